//! Bounded waits for sockets.

use crate::clock;
use crate::error::Result;
use crate::types::Time;
use rustix::event::{PollFd, Timespec, poll};
use std::time::Duration;

/// Longest sleep between two [`WaitLimit`] checks.
pub(super) const MAX_PARK: Duration = Duration::from_millis(50);

/// Bounds on a wait: a deadline, and a check for other reasons to stop.
pub struct WaitLimit<'a> {
    /// Wait deadline; the error names the missing peer.
    pub deadline: Time,
    /// Check, called at least every 50 ms. An error from it ends the wait.
    pub give_up: &'a mut dyn FnMut() -> Result<()>,
}

impl WaitLimit<'_> {
    /// Sleep before the next check; `None` after the deadline.
    pub(crate) fn park(&mut self) -> Result<Option<Duration>> {
        (self.give_up)()?;
        let now = clock::now();
        Ok((now < self.deadline).then(|| self.deadline.since(now).min(MAX_PARK)))
    }
}

/// Sleeps until one of `polled` is ready, at most `timeout`. An error ends the sleep early.
pub(super) fn sleep(polled: &mut [PollFd<'_>], timeout: Duration) {
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    let _ = poll(polled, Some(&timeout));
}
