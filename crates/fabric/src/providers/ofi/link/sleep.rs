//! Link sleep: on queue descriptors, or on a timer for queues without one.

use super::super::rail::Rail;
use crate::clock;
use crate::error::{Error, Result};
use crate::timer::Timer;
use crate::types::Time;
use rustix::fd::AsRawFd;
use std::os::fd::RawFd;
use std::time::Duration;

/// Minimum and maximum sleep between two polls on a queue without a descriptor. It grows with the idle
/// time: an idle rank polls 500 times a second.
const MIN_SLEEP: Duration = Duration::from_micros(50);
const MAX_SLEEP: Duration = Duration::from_millis(2);

pub struct SleepState {
    descriptors: Vec<RawFd>,
    /// Present if a queue has no descriptor.
    timer: Option<Timer>,
    /// Time at which the link became idle.
    idle_since: Time,
    /// True after an event since the last sleep.
    is_busy: bool,
}

impl SleepState {
    /// State for `queues` queues, some with these descriptors.
    pub fn new(descriptors: Vec<RawFd>, queues: usize) -> Result<SleepState> {
        let timer = (descriptors.len() < queues).then(Timer::new).transpose();
        let timer = timer.map_err(|e| Error::system("cannot create a timer", e))?;
        Ok(SleepState { descriptors, timer, idle_since: Time(0), is_busy: true })
    }

    pub fn descriptors(&self) -> Vec<RawFd> {
        let timer = self.timer.as_ref().map(|timer| timer.descriptor().as_raw_fd());
        self.descriptors.iter().copied().chain(timer).collect()
    }

    /// Records an event, which resets the sleep to the minimum.
    #[inline]
    pub fn record_event(&mut self) {
        self.is_busy = true;
    }

    /// Stops a closed link's timer: a timer that has expired would keep event loops awake.
    pub fn stop(&mut self) {
        if let Some(timer) = &mut self.timer {
            timer.set(None);
        }
    }

    /// Arms descriptors and timer; false if a completion is ready.
    pub fn arm(&mut self, rails: &[Rail]) -> bool {
        let with_descriptor = |rail: &&Rail| rail.descriptor().is_some() && !rail.is_closed();
        if !rails.iter().filter(with_descriptor).all(Rail::may_sleep) {
            return false;
        }
        let Some(timer) = &mut self.timer else { return true };
        let now = clock::now();
        if std::mem::take(&mut self.is_busy) {
            self.idle_since = now;
        }
        let length = (now.since(self.idle_since) / 8).clamp(MIN_SLEEP, MAX_SLEEP);
        timer.set(Some(now.after(length)));
        true
    }
}
