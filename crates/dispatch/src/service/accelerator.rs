//! Accelerator node service: thread, front ends, drain, stop.

use super::accelerator_thread::{AcceleratorState, AcceleratorThread, Stop};
use super::commands::{self, Commands};
use super::config::ServiceConfig;
use crate::accelerator::{Accelerator, AcceleratorConfig, Executor, Waker};
use crate::connection::{Connection, SlotConfig};
use crate::error::{Error, Result};
use crate::wire::{Hello, Role, Schema};
use std::sync::Arc;
use std::thread::JoinHandle;
use weft_fabric::{Communicator, QueueSender, Time, submission_queue};

/// Service name in errors.
pub(super) const WHAT: &str = "accelerator node";

/// Accelerator node that a thread drives. Dropping it closes all connections and ends the thread;
/// [`AcceleratorService::stop`] first answers the queries.
pub struct AcceleratorService<E: Executor> {
    bell: QueueSender<()>,
    commands: Arc<Commands<AcceleratorThread<E>>>,
    thread: Option<JoinHandle<(Accelerator<E>, usize)>>,
    slots: SlotConfig,
}

impl<E: Executor + Send + 'static> AcceleratorService<E> {
    /// Starts a thread that runs queries in this schema on a backend or another executor.
    ///
    /// # Errors
    /// As [`Accelerator::new`]; [`Error::System`].
    pub fn start(
        config: ServiceConfig,
        accelerator: AcceleratorConfig,
        schema: Schema,
        executor: E,
    ) -> Result<AcceleratorService<E>> {
        AcceleratorService::start_with(config, accelerator, schema, |_| Ok(executor))
    }

    /// As [`AcceleratorService::start`], for an executor that wakes the thread when a batch has ended, such as
    /// [`crate::accelerator::Threaded`].
    ///
    /// # Errors
    /// Errors as in [`AcceleratorService::start`], and from `executor`.
    pub fn start_with(
        config: ServiceConfig,
        accelerator: AcceleratorConfig,
        schema: Schema,
        executor: impl FnOnce(Waker) -> Result<E>,
    ) -> Result<AcceleratorService<E>> {
        let (bell, receiver) = submission_queue(2)?;
        let ended = bell.clone();
        let executor = executor(Box::new(move || {
            // A full queue has batch reports that the thread has not taken.
            let _ = ended.put(());
            ended.wake();
        }))?;
        let accelerator = Accelerator::new(accelerator, schema, executor)?;
        let appended = bell.clone();
        accelerator.wake_with(Box::new(move || {
            // As above.
            let _ = appended.put(());
            appended.wake();
        }));
        let commands = Arc::new(Commands::new(WHAT));
        let state = AcceleratorThread::new(config, accelerator, receiver, commands.clone())?;
        let thread = std::thread::Builder::new().name("weft-accelerator".into());
        let thread = thread.spawn(move || state.run());
        let thread = thread.map_err(|error| Error::System {
            what: "cannot start an accelerator node's thread",
            error,
        })?;
        let slots = SlotConfig { numa_node: config.numa_node, ..SlotConfig::default() };
        Ok(AcceleratorService { bell, commands, thread: Some(thread), slots })
    }

    /// Serves the front end at the other end of a pair. The handshake runs on the calling thread. The pair's engine
    /// comes from [`Connection::engine_config`].
    ///
    /// # Errors
    /// As [`Connection::over_with`] and [`Accelerator::join`]; [`Error::Stopped`].
    pub fn join(&self, pair: Communicator, hello: &Hello, deadline: Time) -> Result<()> {
        if hello.role != Role::Accelerator {
            let detail = "an accelerator node joins front ends with its own role".into();
            return Err(Error::Disagreement { detail });
        }
        let connection = Connection::over_with(&pair, hello, self.slots, deadline)?;
        self.call(move |thread| thread.join(pair, connection))?
    }

    /// Node state.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn state(&self) -> Result<AcceleratorState> {
        self.call(|thread| thread.state())
    }

    /// Causes for lost front ends since the last call, the latest 64.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn take_losses(&self) -> Result<Vec<String>> {
        self.call(|thread| thread.take_losses())
    }

    /// Asks all front ends to send no more, answers the queries that have arrived, and ends the thread once all front
    /// ends have left, or at `deadline`. Returns the node.
    ///
    /// # Errors
    /// [`Error::Timeout`] if front ends were connected at the deadline; their queries are sent to other nodes.
    /// [`Error::Panicked`] if the backend did.
    pub fn stop(mut self, deadline: Time) -> Result<Accelerator<E>> {
        self.end(Stop { close_at: deadline });
        let thread = self.thread.take().ok_or(Error::Stopped { what: WHAT })?;
        let (accelerator, left) = commands::join(WHAT, thread)?;
        if left > 0 {
            let detail = format!("{left} front ends were connected");
            return Err(Error::Timeout { what: "stop of an accelerator node", detail });
        }
        Ok(accelerator)
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut AcceleratorThread<E>) -> T + Send + 'static,
    ) -> Result<T> {
        self.commands.call(|| self.bell.wake(), work)
    }
}

impl<E: Executor> AcceleratorService<E> {
    fn end(&self, stop: Stop) {
        // Fails if the thread has ended.
        let _ = self.commands.post(|| self.bell.wake(), move |thread| thread.stop(stop));
    }
}

impl<E: Executor> Drop for AcceleratorService<E> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.end(Stop { close_at: Time(0) });
            // The thread has reported its own panic.
            let _ = thread.join();
        }
    }
}
