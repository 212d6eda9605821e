//! Front end service: thread, node joins and departures, cancels, stop.

use super::commands::{self, Commands};
use super::config::ServiceConfig;
use super::front_end_thread::{FrontEndThread, NodeState, Stop};
use super::handle::{FrontEndHandle, Intake, WHAT};
use super::handler::Handler;
use super::submissions::Submissions;
use crate::connection::{Connection, SlotConfig};
use crate::error::{Error, Result};
use crate::front_end::FrontEnd;
use crate::ledger::{Counts, LedgerConfig, NodeId};
use crate::wire::{Hello, Role, Schema};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use weft_fabric::{Communicator, Memory, Time, clock, submission_queue};

/// Front end that a thread drives. Dropping it cancels all queries and ends the thread; [`FrontEndService::stop`] first
/// lets them end.
pub struct FrontEndService<H: Handler> {
    intake: Arc<Intake>,
    commands: Arc<Commands<FrontEndThread<H>>>,
    memories: Box<[Arc<Memory>]>,
    slots: SlotConfig,
    thread: Option<JoinHandle<(H, Counts)>>,
}

impl<H: Handler + 'static> FrontEndService<H> {
    /// Starts a thread for queries in this schema, whose tensors are in `memories`. Reports go to `handler`. Queries
    /// wait for the first [`FrontEndService::join`].
    ///
    /// # Errors
    /// As [`FrontEnd::new`]; [`Error::System`].
    pub fn start(
        config: ServiceConfig,
        ledger: LedgerConfig,
        schema: Schema,
        memories: &[Arc<Memory>],
        handler: H,
    ) -> Result<FrontEndService<H>> {
        let front_end = FrontEnd::new(ledger, schema, memories)?;
        let (sender, receiver) = submission_queue(config.submissions)?;
        let intake = Arc::new(Intake {
            admission: front_end.admission().clone(),
            sender,
            limit: config.submissions.next_power_of_two().max(2) as u32,
            closed: AtomicBool::new(false),
        });
        let commands = Arc::new(Commands::new(WHAT));
        let state = FrontEndThread::new(
            config,
            front_end,
            Submissions::new(receiver),
            intake.clone(),
            commands.clone(),
            handler,
        )?;
        let thread = std::thread::Builder::new().name("weft-front-end".into());
        let thread = thread.spawn(move || state.run());
        let thread = thread
            .map_err(|error| Error::System { what: "cannot start a front end's thread", error })?;
        let (memories, numa_node) = (memories.into(), config.numa_node);
        let slots = SlotConfig { max_bytes: config.max_slot_bytes, numa_node };
        Ok(FrontEndService { intake, commands, memories, slots, thread: Some(thread) })
    }

    /// Handle for submissions.
    pub fn handle(&self) -> FrontEndHandle {
        FrontEndHandle(self.intake.clone())
    }

    /// Adds the node at the other end of a pair: handshake, memory registration, first queries. The handshake runs on
    /// the calling thread. The pair's engine comes from [`Connection::engine_config`] or, for a node that may answer in
    /// tokens, from [`Connection::streaming_engine_config`].
    ///
    /// # Errors
    /// As [`Connection::over_with`] and [`FrontEnd::join`]; [`Error::Stopped`].
    pub fn join(&self, pair: Communicator, hello: &Hello, deadline: Time) -> Result<NodeId> {
        if hello.role != Role::FrontEnd {
            let detail = "a front end joins nodes with the front end role".into();
            return Err(Error::Disagreement { detail });
        }
        let connection = Connection::over_with(&pair, hello, self.slots, deadline)?;
        let mut keys = Vec::with_capacity(self.memories.len());
        for memory in &self.memories {
            keys.push(pair.engine().register(memory.clone())?.key());
        }
        self.call(move |thread| thread.join(pair, connection, &keys))?
    }

    /// Stops sending to a node, without waiting. Its queries are answered; then it leaves.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::Stopped`].
    pub fn drain(&self, node: NodeId) -> Result<()> {
        self.call(move |thread| thread.drain(node, None))?
    }

    /// Drains a node and waits until it has left.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::Timeout`]: it still drains; [`Error::Stopped`].
    pub fn leave(&self, node: NodeId, deadline: Time) -> Result<()> {
        let (gone, has_gone) = sync_channel(1);
        self.call(move |thread| thread.drain(node, Some(gone)))??;
        // The sender is dropped with the node.
        match has_gone.recv_timeout(deadline.since(clock::now())) {
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                let in_flight = self.nodes()?.into_iter().find(|state| state.node == node);
                let in_flight = in_flight.map_or(0, |state| state.in_flight);
                let detail = format!("node {node} has {in_flight} slots in use");
                Err(Error::Timeout { what: "departure of a node", detail })
            }
            _ => Ok(()),
        }
    }

    /// Closes the connections to nodes that have not answered queries which were cancelled or expired; that memory
    /// returns. The nodes are lost.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn lose_late(&self) -> Result<()> {
        self.call(|thread| thread.lose_late())
    }

    /// Cancels the query with this token. False if it has ended already. O(queries).
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn cancel(&self, token: u64) -> Result<bool> {
        self.call(move |thread| thread.cancel(token))
    }

    /// The present nodes.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn nodes(&self) -> Result<Vec<NodeState>> {
        self.call(|thread| thread.nodes())
    }

    /// Query counts, without queries that wait in the submission queue.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn counts(&self) -> Result<Counts> {
        self.call(|thread| thread.counts())
    }

    /// Accepts no more queries, waits until all have ended, at `deadline` cancels the rest, and ends the thread. All
    /// memory has returned then. Returns the handler and the counts.
    ///
    /// # Errors
    /// [`Error::Panicked`] if the handler did.
    pub fn stop(mut self, deadline: Time) -> Result<(H, Counts)> {
        self.end(Stop { cancel_at: deadline });
        let thread = self.thread.take().ok_or(Error::Stopped { what: WHAT })?;
        commands::join(WHAT, thread)
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut FrontEndThread<H>) -> T + Send + 'static,
    ) -> Result<T> {
        self.commands.call(|| self.intake.sender.wake(), work)
    }
}

impl<H: Handler> FrontEndService<H> {
    fn end(&self, stop: Stop) {
        // Fails if the thread has ended.
        let wake = || self.intake.sender.wake();
        let _ = self.commands.post(wake, move |thread| thread.stop(stop));
    }
}

impl<H: Handler> Drop for FrontEndService<H> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.end(Stop { cancel_at: Time(0) });
            // The thread has reported its own panic.
            let _ = thread.join();
        }
    }
}
