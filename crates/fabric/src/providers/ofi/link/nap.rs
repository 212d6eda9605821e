//! Sleep of a link: on its queues' descriptors, or where a provider has none, on a timer.

use super::super::rail::Rail;
use crate::clock;
use crate::error::{Error, Result};
use crate::timer::Timer;
use crate::types::Time;
use rustix::fd::AsRawFd;
use std::os::fd::RawFd;
use std::time::Duration;

/// The shortest and the longest sleep between two looks at a queue without a descriptor. It grows with the
/// idle time: an idle rank looks five hundred times a second.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(2);

pub struct Nap {
    descriptors: Vec<RawFd>,
    /// Where a queue has no descriptor.
    timer: Option<Timer>,
    /// Begin of the current idle time.
    idle_since: Time,
    /// Something has come since the latest sleep.
    is_busy: bool,
}

impl Nap {
    /// For so many queues, some of which have these descriptors.
    pub fn new(descriptors: Vec<RawFd>, queues: usize) -> Result<Nap> {
        let timer = (descriptors.len() < queues).then(Timer::new).transpose();
        let timer = timer.map_err(|e| Error::system("cannot create a timer", e))?;
        Ok(Nap { descriptors, timer, idle_since: Time(0), is_busy: true })
    }

    pub fn descriptors(&self) -> Vec<RawFd> {
        let timer = self.timer.as_ref().map(|timer| timer.descriptor().as_raw_fd());
        self.descriptors.iter().copied().chain(timer).collect()
    }

    /// Something has come: sleeps are short again.
    #[inline]
    pub fn note_event(&mut self) {
        self.is_busy = true;
    }

    /// Arms what the link sleeps on; false if there is something to do.
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
        let length = (now.since(self.idle_since) / 8).clamp(SHORTEST, LONGEST);
        timer.set(Some(now.after(length)));
        true
    }
}
