//! Jobs in flight: flows, services and timers, in reusable slots.

use crate::error::{Error, Result};
use crate::types::{NONE, Tag};

/// Job phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Free slot.
    Free,
    /// Service, timer, or flow without bytes: ends at a fixed time.
    Timer,
    /// Flow that waits for a server, a delay and a latency.
    Latency,
    /// Flow that starts to move once all jobs at this instant are processed.
    Arrived,
    /// Flow on the links.
    Moving,
}

/// A job, one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Job {
    pub(crate) tag: Tag,
    pub(crate) bytes: f64,
    /// Bytes left at time `since`, and the rate in bytes/s since then.
    pub(crate) remaining: f64,
    pub(crate) since: f64,
    pub(crate) rate: f64,
    pub(crate) path: u32,
    pub(crate) generation: u32,
    /// Link that limits the rate, or `NONE`.
    pub(crate) bottleneck: u32,
    /// Last solver round that included it, and last round that fixed the rate.
    pub(crate) solved: u32,
    pub(crate) frozen: u32,
    pub(crate) phase: Phase,
}

impl Job {
    /// Bytes left at a time.
    pub(crate) fn left(&self, now: f64) -> f64 {
        (self.remaining - self.rate * (now - self.since)).max(0.0)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Jobs {
    pub(crate) slots: Vec<Job>,
    free: Vec<u32>,
}

impl Jobs {
    /// Number in flight.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slot count, used or free.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Allocates a slot, at most `most` in all.
    #[inline]
    pub(crate) fn add(
        &mut self,
        phase: Phase,
        path: u32,
        bytes: f64,
        tag: Tag,
        most: u64,
    ) -> Result<u32> {
        let new = Job {
            tag,
            bytes,
            remaining: bytes,
            since: 0.0,
            rate: 0.0,
            path,
            generation: 0,
            bottleneck: NONE,
            solved: 0,
            frozen: 0,
            phase,
        };
        if let Some(slot) = self.free.pop() {
            let job = &mut self.slots[slot as usize];
            // `solved` and `frozen` from the previous job refer to past rounds.
            *job = Job { generation: job.generation, ..new };
            return Ok(slot);
        }
        if self.slots.len() as u64 >= most {
            return Err(Error::TooMany { what: "flows and timers at one time", most });
        }
        self.slots.push(new);
        Ok((self.slots.len() - 1) as u32)
    }

    /// Frees a slot, which invalidates handles to the job.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        let job = &mut self.slots[slot as usize];
        job.phase = Phase::Free;
        job.generation = job.generation.wrapping_add(1);
        self.free.push(slot);
    }

    /// Moving flows with slots.
    pub(crate) fn moving(&self) -> impl Iterator<Item = (u32, &Job)> {
        let jobs = (0..).zip(&self.slots);
        jobs.filter(|(_, job)| job.phase == Phase::Moving)
    }
}
