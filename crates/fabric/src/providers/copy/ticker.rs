//! Periodic timer that wakes an engine with copies in flight, which have no other wake-up.

use crate::error::{Error, Result};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::os::fd::RawFd;

/// Poll period. A small copy takes about as long, and a poll a microsecond.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000 };
const NEVER: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Timer whose descriptor becomes readable in each period while enabled.
#[derive(Debug)]
pub struct Ticker {
    timer: OwnedFd,
    ticks: bool,
}

impl Ticker {
    pub fn new() -> Result<Ticker> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags);
        let timer = timer.map_err(|e| Error::system("cannot create a timer descriptor", e))?;
        Ok(Ticker { timer, ticks: false })
    }

    /// Starts or stops the ticks.
    pub fn set(&mut self, ticks: bool) {
        if self.ticks != ticks {
            self.ticks = ticks;
            let every = if ticks { TICK } else { NEVER };
            let times = Itimerspec { it_interval: every, it_value: every };
            // Fails only for an invalid descriptor or time.
            let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &times);
        }
    }

    /// Clears the expired tick before a poll.
    pub fn clear(&self) {
        if self.ticks {
            // Empty before the first tick.
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        }
    }

    pub fn descriptor(&self) -> RawFd {
        self.timer.as_fd().as_raw_fd()
    }
}
