//! Monitor: a connection beside the links that an engine watches, such as the control connection of a
//! pair, which has no thread of its own.

use super::Engine;
use crate::error::Result;
use crate::types::Time;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// A spinning caller polls the monitor this often: a poll costs a system call. A sleeping caller is woken by
/// its descriptor, and polls it at once.
const INTERVAL: Duration = Duration::from_millis(5);

/// A connection that an engine polls and sleeps on.
pub trait Monitor: Send + Sync {
    /// Receives what has come, without blocking; returns whether more may come.
    fn poll(&self) -> bool;

    /// Readable when [`Monitor::poll`] has something to do; open as long as the monitor lives.
    fn descriptor(&self) -> RawFd;
}

/// An engine's monitor.
pub(super) struct Watched {
    monitor: Arc<dyn Monitor>,
    /// When it is polled next; never again once it has ended.
    due: Time,
    ended: bool,
}

impl Engine {
    /// Polls `monitor` from now on, and sleeps on its descriptor beside those of the links.
    ///
    /// # Errors
    /// [`crate::Error::System`] if the descriptor cannot be watched.
    pub fn watch(&mut self, monitor: Arc<dyn Monitor>) -> Result<()> {
        self.sleeper.watch_monitor(monitor.descriptor())?;
        self.monitor = Some(Watched { monitor, due: Time(0), ended: false });
        Ok(())
    }

    /// The engine slept: the monitor may be what woke it.
    pub(super) fn expect_monitor(&mut self) {
        if let Some(watched) = &mut self.monitor {
            watched.due = Time(0);
        }
    }

    pub(super) fn poll_monitor(&mut self, now: Time) {
        let Some(watched) = &mut self.monitor else { return };
        if watched.ended || (now < watched.due && !self.armed) {
            return;
        }
        watched.due = now.after(INTERVAL);
        watched.ended = !watched.monitor.poll();
        if watched.ended {
            // It stays readable from now on, and would wake every sleep.
            self.sleeper.forget(watched.monitor.descriptor());
        }
    }
}
