//! How long to wait, and whether somebody wants it to end sooner.

use crate::{Error, Interrupt, Result};
use std::time::{Duration, Instant};

/// How often an interrupt is asked for during a wait.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

/// The end of a wait.
#[derive(Clone)]
pub(crate) struct Deadline {
    started: Instant,
    patience: Duration,
    interrupt: Option<Interrupt>,
}

impl Deadline {
    pub(crate) fn after(patience: Duration, interrupt: Option<Interrupt>) -> Deadline {
        Deadline { started: Instant::now(), patience, interrupt }
    }

    /// The same end or an earlier one, `patience` from now.
    pub(crate) fn at_most(&self, patience: Duration) -> Deadline {
        Deadline::after(patience.min(self.left()), self.interrupt.clone())
    }

    pub(crate) fn waited(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.waited())
    }

    /// When it ends; `None` if the clock has no such time.
    pub(crate) fn end(&self) -> Option<Instant> {
        self.started.checked_add(self.patience)
    }

    pub(crate) fn expired(&self) -> bool {
        self.left().is_zero()
    }

    /// How long to sleep at most before looking again.
    pub(crate) fn slice(&self) -> Duration {
        self.left().min(INTERRUPT_INTERVAL)
    }

    /// Sleeps for `pause`, not beyond the end.
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

    /// An error if the program wants to stop.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        match &self.interrupt {
            Some(interrupt) if interrupt() => Err(Error::Interrupted { operation }),
            _ => Ok(()),
        }
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
