//! A record of what an engine did, for timelines. Off unless asked for; bounded when on.

use crate::types::Time;
use weft_control::Rank;

/// A write, when it was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRecord {
    /// When.
    pub at: Time,
    /// To whom.
    pub peer: Rank,
    /// The peer's lane.
    pub lane: u32,
    /// The lane's value once this write has landed: with peer and lane it names the flow.
    pub value: u64,
    /// Payload bytes.
    pub bytes: u64,
}

/// A raise, when the owner saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalRecord {
    /// When.
    pub at: Time,
    /// From whom.
    pub peer: Rank,
    /// Our lane.
    pub lane: u32,
    /// Its value.
    pub value: u64,
}

/// A named stretch of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseRecord {
    /// What was done.
    pub name: String,
    /// Since when.
    pub begin: Time,
    /// Until when.
    pub end: Time,
}

/// What was recorded. Each list stops at the limit and counts what it left out.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    limit: usize,
    /// Writes submitted, in order.
    pub writes: Vec<WriteRecord>,
    /// Raises seen, in order.
    pub arrivals: Vec<ArrivalRecord>,
    /// Phases ended, in order.
    pub phases: Vec<PhaseRecord>,
    /// Records that found no room.
    pub dropped: u64,
}

impl Trace {
    /// A trace that keeps at most `limit` records of each sort.
    pub fn with_limit(limit: usize) -> Trace {
        Trace { limit, ..Trace::default() }
    }

    /// Records a write.
    pub fn write(&mut self, record: WriteRecord) {
        push(&mut self.writes, record, self.limit, &mut self.dropped);
    }

    /// Records a raise.
    pub fn arrival(&mut self, record: ArrivalRecord) {
        push(&mut self.arrivals, record, self.limit, &mut self.dropped);
    }

    /// Records a phase.
    pub fn phase(&mut self, record: PhaseRecord) {
        push(&mut self.phases, record, self.limit, &mut self.dropped);
    }
}

fn push<T>(list: &mut Vec<T>, record: T, limit: usize, dropped: &mut u64) {
    if list.len() < limit {
        list.push(record);
    } else {
        *dropped += 1;
    }
}
