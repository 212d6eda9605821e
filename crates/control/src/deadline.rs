//! Wait deadline, with the program's interrupt.

use crate::{Error, Result};
use rustix::event::Timespec;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The program's interrupt check: `true` ends a wait with [`Error::Interrupted`].
pub type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

/// Interrupt check interval during a wait.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

/// Wait end.
#[derive(Clone)]
pub(crate) struct Deadline {
    started: Instant,
    timeout: Duration,
    interrupt: Option<Interrupt>,
}

impl Deadline {
    pub(crate) fn after(timeout: Duration, interrupt: Option<Interrupt>) -> Deadline {
        Deadline { started: Instant::now(), timeout, interrupt }
    }

    /// This deadline or `timeout` from now, whichever is earlier.
    pub(crate) fn at_most(&self, timeout: Duration) -> Deadline {
        Deadline::after(timeout.min(self.left()), self.interrupt.clone())
    }

    pub(crate) fn waited(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.waited())
    }

    /// End time; `None` if the clock cannot represent it.
    pub(crate) fn end(&self) -> Option<Instant> {
        self.started.checked_add(self.timeout)
    }

    pub(crate) fn expired(&self) -> bool {
        self.left().is_zero()
    }

    /// Longest sleep until the next interrupt check.
    pub(crate) fn slice(&self) -> Duration {
        self.left().min(INTERRUPT_INTERVAL)
    }

    /// Sleeps for `pause`, at most until the deadline.
    ///
    /// # Errors
    /// [`Error::Interrupted`], within [`INTERRUPT_INTERVAL`].
    pub(crate) fn pause(&self, pause: Duration, operation: &'static str) -> Result<()> {
        let pause = self.at_most(pause);
        while !pause.expired() {
            self.check(operation)?;
            std::thread::sleep(pause.slice());
        }
        Ok(())
    }

    /// Error if the program's interrupt is raised.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        match &self.interrupt {
            Some(interrupt) if interrupt() => Err(Error::Interrupted { operation }),
            _ => Ok(()),
        }
    }
}

/// Duration as a `timespec`.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_beyond_every_clock_is_one_that_never_comes() {
        let deadline = Deadline::after(Duration::MAX, None);
        assert_eq!(deadline.end(), None);
        assert!(!deadline.expired() && deadline.left() > Duration::from_secs(1 << 60));
        assert_eq!(deadline.slice(), INTERRUPT_INTERVAL);
        assert!(!deadline.at_most(Duration::MAX).expired());
        assert!(deadline.at_most(Duration::ZERO).expired());
    }
}
