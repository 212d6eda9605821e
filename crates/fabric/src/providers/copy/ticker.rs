//! What wakes an engine whose copies are under way: nobody else tells it that they are over.

use crate::error::{Error, Result};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::os::fd::RawFd;

/// From one look at a copy to the next. A small copy takes about as long, and a look a microsecond.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000 };
const NEVER: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A descriptor that becomes readable again and again while there is something to look at.
#[derive(Debug)]
pub(super) struct Ticker {
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

    /// Ticks from now on, or stops.
    pub fn set(&mut self, ticks: bool) {
        if self.ticks != ticks {
            self.ticks = ticks;
            let every = if ticks { TICK } else { NEVER };
            let times = Itimerspec { it_interval: every, it_value: every };
            // Fails only for a descriptor or a time that is none.
            let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &times);
        }
    }

    /// Before a look: the tick that led to it is over.
    pub fn heard(&self) {
        if self.ticks {
            // Empty unless it has ticked.
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        }
    }

    pub fn descriptor(&self) -> RawFd {
        self.timer.as_fd().as_raw_fd()
    }
}
