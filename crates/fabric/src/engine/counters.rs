//! Counters, rounds and credits.
//!
//! Ranks that create counters in the same order link those of equal position: raising counter `c`
//! toward a peer raises the peer's own counter `c`. Each counter has, for each peer, a lane that the
//! peer raises and a return lane on which the peer gives us credit. Owner and source thus count rounds
//! without asking each other.

use super::{Engine, LaneUse};
use crate::error::{Error, Result};
use crate::types::{CounterId, Lane};
use weft_control::Rank;

pub(super) struct Counter {
    pub ends: Vec<Option<End>>,
}

/// A counter toward one peer, both ways.
pub(super) struct End {
    /// Ours, raised by the peer.
    pub data: Lane,
    /// Ours, raised by the peer to give us credit.
    pub credit: Lane,
    /// The peer's, once imported.
    pub remote: Option<Remote>,
    /// The value of `data` up to which we have given credit.
    pub base: u64,
    /// The value of `credit` when it was last read.
    pub credits: u64,
}

/// The peer's side of a counter.
#[derive(Clone, Copy)]
pub(super) struct Remote {
    pub data: Lane,
    pub credit: Lane,
    /// By how much we have raised `data` in all.
    pub raised: u64,
    /// By how much we have raised `credit` in all.
    pub credited: u64,
    /// The round that we are in.
    pub round: u64,
}

impl Engine {
    /// A counter with a lane for every peer. It counts nothing until grants were exchanged
    /// ([`Engine::grant`], [`Engine::import`]).
    pub fn counter(&mut self) -> Result<CounterId> {
        let id = CounterId(self.counters.len() as u32);
        let mut ends = Vec::with_capacity(self.peers.len());
        for rank in (0..self.size()).map(Rank) {
            if rank == self.rank {
                ends.push(None);
                continue;
            }
            let mut issue = |credit| -> Result<Lane> {
                let lane = self.lanes.issue(rank)?;
                debug_assert_eq!(lane.id().get() as usize, self.lane_uses.len());
                self.lane_uses.push(LaneUse { counter: id, peer: rank, credit });
                Ok(lane)
            };
            let (data, credit) = (issue(false)?, issue(true)?);
            ends.push(Some(End { data, credit, remote: None, base: 0, credits: 0 }));
        }
        self.counters.push(Counter { ends });
        Ok(id)
    }

    pub(super) fn end(&mut self, counter: CounterId, peer: Rank) -> Result<&mut End> {
        find(&mut self.counters, counter, peer)
    }

    /// The peer's side, if it was imported.
    pub(super) fn remote(&mut self, counter: CounterId, peer: Rank) -> Result<&mut Remote> {
        self.end(counter, peer)?.remote.as_mut().ok_or_else(|| not_linked(counter))
    }

    /// Raises by `peer` since our last credit to it. All bytes counted by them are visible.
    pub fn count(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let end = find(&mut self.counters, counter, peer)?;
        let count = self.lanes.value(end.data.id()) - end.base;
        if count > 0 {
            // It shares the cache line that has just come, and the next round will ask for it.
            end.credits = self.lanes.value(end.credit.id());
        }
        Ok(count)
    }

    /// Credits that `peer` has given us on this counter; round r may start when there are r.
    pub fn credits(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let end = find(&mut self.counters, counter, peer)?;
        end.credits = self.lanes.value(end.credit.id());
        Ok(end.credits)
    }

    /// Whether `round` may be written to `peer`, so that there is nothing to wait for. Reads the lane only
    /// if what was read before does not say so.
    pub fn has_credit(&mut self, counter: CounterId, peer: Rank, round: u64) -> Result<bool> {
        Ok(round <= self.end(counter, peer)?.credits || round <= self.credits(counter, peer)?)
    }

    /// By how much we have raised `peer`'s end of `counter` since it was linked.
    pub(crate) fn raised_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.remote(counter, peer)?.raised)
    }

    /// By how much `peer` has raised our end of `counter` since it was linked.
    pub(crate) fn count_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let id = self.end(counter, peer)?.data.id();
        Ok(self.lanes.value(id))
    }

    /// Checks that `round` may be written and makes it the current one.
    #[inline(always)]
    pub(super) fn enter_round(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
    ) -> Result<&mut Remote> {
        let end = find(&mut self.counters, counter, peer)?;
        let Some(remote) = &mut end.remote else { return Err(not_linked(counter)) };
        if round < remote.round {
            return Err(Error::OldRound { peer, counter, round, current: remote.round });
        }
        if round > end.credits {
            end.credits = self.lanes.value(end.credit.id());
        }
        if round > end.credits {
            return Err(Error::NoCredit { peer, counter, round, credits: end.credits });
        }
        remote.round = round;
        Ok(remote)
    }

    /// Tells `peer` that all it wrote under `counter` so far has been read: its bytes may be written
    /// again and its next round may start. Call it once a round, when the round is complete.
    ///
    /// Nobody waits for a credit as one waits for data: it leaves behind what is submitted next, or with
    /// the next wait or poll. Call [`Engine::flush`] if none of these follows soon.
    pub fn credit(&mut self, peer: Rank, counter: CounterId) -> Result<()> {
        self.check()?;
        let end = find(&mut self.counters, counter, peer)?;
        let remote = end.remote.as_mut().ok_or_else(|| not_linked(counter))?;
        end.base = self.lanes.value(end.data.id());
        remote.credited += 1;
        let (lane, ours) = (remote.credit, end.data);
        self.owe_credit(peer, lane, ours);
        Ok(())
    }

    /// The round after the current one toward `peer`, or the first.
    pub fn next_round(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let remote = self.remote(counter, peer)?;
        Ok(if remote.raised == 0 { 0 } else { remote.round + 1 })
    }

    /// Makes `counter` the one that [`Engine::barrier`] uses; it must be linked with every peer.
    pub fn use_for_barriers(&mut self, counter: CounterId) {
        self.barrier = Some(counter);
    }

    pub(crate) fn barrier_counter(&self) -> Result<CounterId> {
        self.barrier.ok_or(Error::Unknown { what: "barrier counter", number: 0 })
    }

    /// Sends what credits and submits have held back.
    pub fn flush(&mut self) {
        self.flush_all();
    }
}

fn not_linked(counter: CounterId) -> Error {
    Error::Unknown { what: "counter", number: counter.0.into() }
}

fn find(counters: &mut [Counter], counter: CounterId, peer: Rank) -> Result<&mut End> {
    let known = counters.get_mut(counter.0 as usize);
    let counter = known.ok_or_else(|| not_linked(counter))?;
    let end = counter.ends.get_mut(peer.0 as usize).and_then(Option::as_mut);
    end.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })
}
