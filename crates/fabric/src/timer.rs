//! Timer descriptor: readable from a deadline on.

use crate::types::Time;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Timer on the clock that [`crate::clock::now`] reads.
#[derive(Debug)]
pub(crate) struct Timer {
    descriptor: OwnedFd,
    deadline: Option<Time>,
}

impl Timer {
    /// A timer that is not set.
    pub fn new() -> rustix::io::Result<Timer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let descriptor = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Timer { descriptor, deadline: None })
    }

    /// Makes the descriptor readable from `deadline` on; `None` stops the timer.
    pub fn set(&mut self, deadline: Option<Time>) {
        if deadline == self.deadline {
            return;
        }
        self.deadline = deadline;
        let at = deadline.map_or(0, |deadline| deadline.0.max(1));
        let it_value =
            Timespec { tv_sec: (at / 1_000_000_000) as i64, tv_nsec: (at % 1_000_000_000) as _ };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let new = Itimerspec { it_interval, it_value };
        // Setting it also clears an expiry that was not read. The arguments are valid.
        let _ = timerfd_settime(&self.descriptor, TimerfdTimerFlags::ABSTIME, &new);
    }

    /// The descriptor that becomes readable.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
