//! Counter end toward one peer: lanes, rounds and credits.

use crate::lane_table::LaneTable;
use crate::types::{Lane, LaneId};

/// Counter end toward one peer, in both directions.
pub(in crate::engine) struct CounterEnd {
    /// Our data lane, raised by the peer in rounds that are multiples of the window.
    pub data: Lane,
    /// Our credit lane, raised by the peer; a follower shares the leader's lane.
    pub credit: Lane,
    pub window: u32,
    pub role: CreditRole,
    /// Granted to the peer.
    pub granted: bool,
    /// The peer's side, once imported.
    pub remote: Option<RemoteCounter>,
    /// Credits sent: the oldest round that the peer may write.
    pub given: u64,
    /// Data lane value at the start of the oldest round.
    pub base: u64,
    /// `base` for each slot, if the window is longer than one round.
    bases: Box<[u64]>,
    /// `credit` when it was last read.
    pub credits: u64,
    /// Listed in the engine's `raised_lanes`.
    pub listed: bool,
}

/// Relation between a counter's credits and the credits of other counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum CreditRole {
    /// The credits serve only this counter.
    Alone,
    /// The credits also release rounds on other counters ([`Engine::counter_credited_with`]).
    Leader,
    /// Another counter's credits release the rounds.
    Follower,
}

/// The peer's side of a counter.
#[derive(Clone, Copy)]
pub(in crate::engine) struct RemoteCounter {
    pub data: Lane,
    pub credit: Lane,
    /// Our raises on the peer's data lanes in total.
    pub raised: u64,
    /// Bytes in those writes.
    pub bytes: u64,
    /// Our raises on `credit` in total.
    pub credited: u64,
    /// Rounds below this one have been entered.
    pub started: u64,
}

/// Lanes at one end: data lane 0 and the credit lane share a cache line, the other data lanes follow.
pub(super) fn lanes_for(window: u32) -> u32 {
    (window + 1).next_multiple_of(2)
}

/// Offset from data lane 0 to a round's data lane.
fn offset_of(round: u64, window: u32) -> u32 {
    match window {
        1 => 0,
        _ => match (round % u64::from(window)) as u32 {
            0 => 0,
            slot => slot + 1,
        },
    }
}

/// Lane at `offset` from `first`, in the same generation.
fn lane_at(first: Lane, offset: u32) -> Lane {
    let id = LaneId::new(first.id().get() + offset).unwrap_or(first.id());
    Lane::new(id, first.generation())
}

impl CounterEnd {
    pub(super) fn new(first: Lane, window: u32) -> CounterEnd {
        CounterEnd {
            data: first,
            credit: lane_at(first, 1),
            window,
            role: CreditRole::Alone,
            granted: false,
            remote: None,
            given: 0,
            base: 0,
            bases: if window > 1 { vec![0; window as usize].into() } else { Box::default() },
            credits: 0,
            listed: false,
        }
    }

    /// Our data lane for a round.
    pub fn data_of(&self, round: u64) -> LaneId {
        lane_at(self.data, offset_of(round, self.window)).id()
    }

    /// Our data lane for the oldest round without a credit.
    #[inline(always)]
    pub fn oldest(&self) -> LaneId {
        if self.window == 1 { self.data.id() } else { self.data_of(self.given) }
    }

    fn base_of(&self, round: u64) -> u64 {
        if self.window == 1 {
            return self.base;
        }
        self.bases[(round % u64::from(self.window)) as usize]
    }

    /// The open round that the lane at `offset` behind data lane 0 counts.
    pub fn round_of(&self, offset: u32) -> u64 {
        let (window, slot) = (u64::from(self.window), u64::from(offset.saturating_sub(1)));
        let oldest = self.given % window;
        self.given + slot - oldest + if slot < oldest { window } else { 0 }
    }

    /// Our data lane for the oldest open round, with the lane's generation.
    pub(super) fn oldest_lane(&self) -> Lane {
        match self.window {
            1 => self.data,
            window => lane_at(self.data, offset_of(self.given, window)),
        }
    }

    /// Raises in the open round on the data lane at `offset` ([`CounterEnd::round_of`]), by the lane's
    /// value. Zero for the lane that pads an even window, which no peer may raise.
    pub fn count_in_lane(&self, offset: u32, value: u64) -> u64 {
        let base = match self.window {
            1 => Some(&self.base),
            _ => self.bases.get(offset.saturating_sub(1) as usize),
        };
        base.map_or(0, |base| value.saturating_sub(*base))
    }

    /// Raises in an open round, by the lane's value.
    pub fn count_at(&self, round: u64, value: u64) -> u64 {
        value.saturating_sub(self.base_of(round))
    }

    /// Closes the oldest round, whose lane has this value.
    pub(super) fn close_round(&mut self, value: u64) {
        if self.window > 1 {
            let window = u64::from(self.window);
            self.bases[(self.given % window) as usize] = value;
            self.base = self.bases[((self.given + 1) % window) as usize];
        } else {
            self.base = value;
        }
        self.given += 1;
    }

    /// True if a round may be written. A round that was entered may have been credited since; a new one
    /// needs a lane read only if the known credits do not reach it.
    #[inline(always)]
    pub fn is_open(&mut self, lanes: &LaneTable, round: u64, started: u64) -> bool {
        let window = u64::from(self.window);
        if round < started || round >= self.credits + window {
            self.credits = lanes.value(self.credit.id());
        }
        round.wrapping_sub(self.credits) < window
    }
}

impl RemoteCounter {
    /// The peer's side of a newly linked counter.
    pub fn new(data: Lane, credit: Lane) -> RemoteCounter {
        RemoteCounter { data, credit, raised: 0, bytes: 0, credited: 0, started: 0 }
    }

    /// Enters a write into a round; returns the lane that it raises.
    #[inline(always)]
    pub fn enter(&mut self, window: u32, round: u64, raises: u64, bytes: u64) -> Lane {
        if round >= self.started {
            self.started = round + 1;
        }
        self.raised += raises;
        self.bytes += bytes;
        if window == 1 { self.data } else { lane_at(self.data, offset_of(round, window)) }
    }
}
