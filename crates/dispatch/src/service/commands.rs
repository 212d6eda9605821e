//! Commands: calls that a service thread runs between turns.

use crate::error::{Error, Result};
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for a turn on a service thread, which a handler or a backend may delay.
pub(super) const MAX_TURN: Duration = Duration::from_secs(10);

type Command<L> = Box<dyn FnOnce(&mut L) + Send>;

/// Commands for a thread with state `L`.
pub(super) struct Commands<L> {
    what: &'static str,
    list: Mutex<Option<Vec<Command<L>>>>,
    has_any: AtomicBool,
}

impl<L> Commands<L> {
    /// Empty list for the service `what`.
    pub fn new(what: &'static str) -> Commands<L> {
        Commands { what, list: Mutex::new(Some(Vec::new())), has_any: AtomicBool::new(false) }
    }

    /// Adds a command without waiting for it; `wake` wakes the thread.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn post(
        &self,
        wake: impl FnOnce(),
        work: impl FnOnce(&mut L) + Send + 'static,
    ) -> Result<()> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let open = list.as_mut().ok_or(Error::Stopped { what: self.what })?;
        open.push(Box::new(work));
        self.has_any.store(true, Ordering::Release);
        drop(list);
        wake();
        Ok(())
    }

    /// Runs `work` on the thread and returns the result.
    ///
    /// # Errors
    /// [`Error::Stopped`]; [`Error::Timeout`] after [`MAX_TURN`].
    pub fn call<T: Send + 'static>(
        &self,
        wake: impl FnOnce(),
        work: impl FnOnce(&mut L) -> T + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = sync_channel(1);
        self.post(wake, move |state| {
            // The caller may have given up.
            let _ = sender.send(work(state));
        })?;
        receiver.recv_timeout(MAX_TURN).map_err(|error| match error {
            RecvTimeoutError::Disconnected => Error::Stopped { what: self.what },
            RecvTimeoutError::Timeout => {
                let detail = format!("its thread has been in one call for {MAX_TURN:?}");
                Error::Timeout { what: self.what, detail }
            }
        })
    }

    /// True with commands to run.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// Thread: runs the commands on `state`.
    pub fn run(&self, state: &mut L) {
        self.has_any.store(false, Ordering::Relaxed);
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let commands = list.as_mut().map(std::mem::take).unwrap_or_default();
        drop(list);
        commands.into_iter().for_each(|command| command(state));
    }

    /// Thread: refuses all further commands, and drops those that have not run.
    pub fn close(&self) {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(list);
    }
}

/// Result from a thread that has ended.
pub(super) fn join<T>(what: &'static str, thread: JoinHandle<T>) -> Result<T> {
    thread.join().map_err(|panic| Error::Panicked { what, message: message_of(&*panic) })
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
