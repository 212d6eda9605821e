//! What is under way: flows, services and timers, in slots that are used again.

use crate::error::{Error, Result};
use crate::types::{NONE, Tag};

/// Where a job is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The slot is free.
    Free,
    /// It is no flow: it ends when its time has come.
    Timer,
    /// A flow that waits for its server, its delay and its latency.
    Latency,
    /// A flow that moves from now on, as soon as all of this instant is known.
    Arrived,
    /// A flow on its links.
    Moving,
}

/// A job: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Job {
    pub(crate) tag: Tag,
    pub(crate) bytes: f64,
    /// Bytes that were left at `since`, and what it has moved a second since then.
    pub(crate) remaining: f64,
    pub(crate) since: f64,
    pub(crate) rate: f64,
    pub(crate) path: u32,
    pub(crate) generation: u32,
    /// The link that limits its rate; `NONE` while it has none.
    pub(crate) bottleneck: u32,
    /// The last round of the solver that it had part in, and the last in which its rate is settled.
    pub(crate) solved: u32,
    pub(crate) frozen: u32,
    pub(crate) phase: Phase,
}

impl Job {
    /// Bytes left to move at a time.
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
    /// How many are under way.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots there are, used or free.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// A slot for a job, of at most `most`.
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
            // The solver's marks of the slot's last job are of rounds that are over.
            *job = Job { generation: job.generation, ..new };
            return Ok(slot);
        }
        if self.slots.len() as u64 >= most {
            return Err(Error::TooMany { what: "flows and timers at one time", most });
        }
        self.slots.push(new);
        Ok((self.slots.len() - 1) as u32)
    }

    /// Frees a slot. Handles of the job name nothing from now on.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        let job = &mut self.slots[slot as usize];
        job.phase = Phase::Free;
        job.generation = job.generation.wrapping_add(1);
        self.free.push(slot);
    }

    /// The flows that move, with their paths.
    pub(crate) fn moving(&self) -> impl Iterator<Item = (u32, &Job)> {
        let jobs = (0..).zip(&self.slots);
        jobs.filter(|(_, job)| job.phase == Phase::Moving)
    }
}
