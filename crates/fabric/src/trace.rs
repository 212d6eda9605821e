//! Engine trace for timelines: writes, arrivals and phases. Off by default, bounded when on.

use crate::types::Time;
use weft_control::Rank;

/// Submitted write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRecord {
    /// Record time.
    pub at: Time,
    /// The destination.
    pub peer: Rank,
    /// The peer's lane.
    pub lane: u32,
    /// The lane's value after this write: with peer and lane it identifies the flow.
    pub value: u64,
    /// Payload bytes.
    pub bytes: u64,
}

/// Lane raise, as the owner observed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalRecord {
    /// Record time.
    pub at: Time,
    /// The peer that raised it.
    pub peer: Rank,
    /// Our lane.
    pub lane: u32,
    /// Lane value.
    pub value: u64,
}

/// Named interval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseRecord {
    /// Phase name.
    pub name: String,
    /// Start.
    pub begin: Time,
    /// End.
    pub end: Time,
}

/// Records, each list up to the limit. Further records are counted only.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    limit: usize,
    /// Writes submitted, in order.
    pub writes: Vec<WriteRecord>,
    /// Raises seen, in order.
    pub arrivals: Vec<ArrivalRecord>,
    /// Phases ended, in order.
    pub phases: Vec<PhaseRecord>,
    /// Records beyond the limit.
    pub dropped: u64,
}

impl Trace {
    /// Makes a trace that keeps at most `limit` records for each kind.
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
