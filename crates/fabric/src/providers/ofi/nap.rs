//! Sleep of a link: on its queues' descriptors, or where a provider has none, on a timer.

use super::Rail;
use crate::clock;
use crate::error::{Error, Result};
use crate::timer::Timer;
use crate::types::Time;
use rustix::fd::AsRawFd;
use std::os::fd::RawFd;
use std::time::Duration;

/// The shortest and the longest sleep between two looks at a queue without a descriptor. It grows with the
/// time for which nothing came: an idle rank looks a thousand times a second.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);

pub struct Nap {
    descriptors: Vec<RawFd>,
    /// Where a queue has no descriptor.
    timer: Option<Timer>,
    /// Of the first sleep since something came, and of the latest.
    since: Time,
    latest: Time,
}

impl Nap {
    /// For so many queues, some of which have these descriptors.
    pub fn new(descriptors: Vec<RawFd>, queues: usize) -> Result<Nap> {
        let timer = (descriptors.len() < queues).then(Timer::new).transpose();
        let timer = timer.map_err(|e| Error::system("cannot create a timer", e))?;
        Ok(Nap { descriptors, timer, since: Time(0), latest: Time(0) })
    }

    pub fn descriptors(&self) -> Vec<RawFd> {
        let timer = self.timer.as_ref().map(|timer| timer.descriptor().as_raw_fd());
        self.descriptors.iter().copied().chain(timer).collect()
    }

    /// Arms what the link sleeps on; false if there is something to do.
    pub fn arm(&mut self, rails: &[Rail]) -> bool {
        let with_descriptor = |rail: &&Rail| rail.descriptor().is_some() && !rail.is_closed();
        if !rails.iter().filter(with_descriptor).all(Rail::may_sleep) {
            return false;
        }
        let Some(timer) = &mut self.timer else { return true };
        let now = clock::now();
        // Whoever has not slept for a while was busy.
        if now.since(self.latest) > 2 * LONGEST {
            self.since = now;
        }
        self.latest = now;
        let length = (now.since(self.since) / 8).clamp(SHORTEST, LONGEST);
        timer.set(Some(now.after(length)));
        true
    }
}
