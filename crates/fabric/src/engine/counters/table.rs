//! An engine's counter table, with lookups.

use super::ends::CounterEnd;
use crate::error::{Error, Result};
use crate::statistics::TrafficTotals;
use crate::types::{CounterId, TrafficClass};
use weft_control::Rank;

/// Counter shape: peers, window and traffic class.
#[derive(Clone, Copy, Debug, Default)]
pub struct CounterConfig<'a> {
    /// Rounds that may be open at a time, from 1 to [`CounterConfig::MAX_WINDOW`]; 0 counts as 1. Round
    /// `r` may start while it is less than credits + window: for example, window 4 and 10 credits permit
    /// rounds 0 to 13. A ring with `window` slots is one counter.
    pub window: u32,
    /// Peers that it connects; `None`: every peer. The window must be equal at both ends.
    pub peers: Option<&'a [Rank]>,
    /// Traffic class for writes to this counter.
    pub class: TrafficClass,
}

impl CounterConfig<'_> {
    /// The widest window.
    pub const MAX_WINDOW: u32 = 1 << 16;
}

pub(in crate::engine) struct Counter {
    /// By rank; `None` where it connects no peer.
    pub ends: Vec<Option<CounterEnd>>,
    pub class: TrafficClass,
    /// Shared by all ranks, also if it connects no peer.
    pub shared: bool,
    /// Driver-owned counter, left out of [`Engine::raised`].
    pub internal: bool,
    /// Counters credited with this one.
    pub(super) followers: Vec<CounterId>,
}

impl TrafficTotals {
    /// Adds the writes through one counter end.
    pub(in crate::engine) fn add_writes(&mut self, end: &Option<CounterEnd>) {
        if let Some(CounterEnd { remote: Some(remote), .. }) = end {
            self.bytes += remote.bytes;
            self.parts += remote.raised + remote.credited;
        }
    }
}

#[cold]
#[inline(never)]
pub(super) fn unknown(counter: CounterId) -> Error {
    Error::Unknown { what: "counter", number: counter.number().into() }
}

/// An engine's counters, by index.
pub(in crate::engine) type Counters = Vec<Option<(CounterId, Counter)>>;

/// A counter, unless it was released.
#[inline(always)]
pub(in crate::engine) fn get(counters: &mut Counters, counter: CounterId) -> Option<&mut Counter> {
    match counters.get_mut(counter.index()) {
        Some(Some((id, known))) if *id == counter => Some(known),
        _ => None,
    }
}

#[inline(always)]
pub(super) fn find(
    counters: &mut Counters,
    counter: CounterId,
    peer: Rank,
) -> Result<(&mut CounterEnd, TrafficClass)> {
    let Some(known) = get(counters, counter) else { return Err(unknown(counter)) };
    match known.ends.get_mut(peer.index()) {
        Some(Some(end)) => Ok((end, known.class)),
        _ => Err(unknown_rank(peer)),
    }
}

#[cold]
#[inline(never)]
pub(super) fn unknown_rank(peer: Rank) -> Error {
    Error::Unknown { what: "rank", number: peer.0.into() }
}
