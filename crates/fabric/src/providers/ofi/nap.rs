//! Sleep of a link: on its queues' descriptors, or where a provider has none, on a timer.

use super::Rail;
use crate::clock;
use crate::error::{Error, Result};
use crate::types::Time;
use rustix::event::Timespec;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::os::fd::RawFd;
use std::time::Duration;

/// The shortest and the longest sleep between two looks at a queue without a descriptor. It grows with the
/// time for which nothing came: an idle rank looks a thousand times a second.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);

pub struct Nap {
    descriptors: Vec<RawFd>,
    /// Where a queue has no descriptor.
    timer: Option<OwnedFd>,
    /// Of the first sleep since something came, and of the latest.
    since: Time,
    latest: Time,
}

impl Nap {
    /// For so many queues, some of which have these descriptors.
    pub fn new(descriptors: Vec<RawFd>, queues: usize) -> Result<Nap> {
        let timer = (descriptors.len() < queues).then(|| {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            timerfd_create(TimerfdClockId::Monotonic, flags)
                .map_err(|e| Error::system("cannot create a timer", e))
        });
        let timer = timer.transpose()?;
        Ok(Nap { descriptors, timer, since: Time(0), latest: Time(0) })
    }

    pub fn descriptors(&self) -> Vec<RawFd> {
        self.descriptors
            .iter()
            .copied()
            .chain(self.timer.as_ref().map(AsRawFd::as_raw_fd))
            .collect()
    }

    /// Arms what the link sleeps on; false if there is something to do.
    pub fn arm(&mut self, rails: &[Rail]) -> bool {
        let with_descriptor = |rail: &&Rail| rail.descriptor().is_some() && !rail.is_closed();
        if !rails.iter().filter(with_descriptor).all(Rail::may_sleep) {
            return false;
        }
        let Some(timer) = &self.timer else { return true };
        let now = clock::now();
        // Whoever has not slept for a while was busy.
        if now.since(self.latest) > 2 * LONGEST {
            self.since = now;
        }
        self.latest = now;
        let length = (now.since(self.since) / 8).clamp(SHORTEST, LONGEST);
        let it_value = Timespec { tv_sec: 0, tv_nsec: length.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Setting it also clears an expiry that was not read. The arguments are valid.
        let _ = timerfd_settime(
            timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval, it_value },
        );
        true
    }
}
