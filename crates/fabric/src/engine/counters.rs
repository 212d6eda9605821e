//! Counters, rounds and credits.
//!
//! Ranks link counters by position: raising counter `c` toward a peer raises the peer's own counter at the
//! same position of the grant. Toward each peer a counter has one data lane for each round that may be open
//! at a time (its window) and a return lane for credits. Owner and source thus count rounds locally, also
//! where writes of different rounds overtake each other.

mod ends;
mod followers;

use super::Engine;
use super::peer_group::UniqueId;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::statistics::TrafficTotals;
use crate::types::{CounterId, Lane, TrafficClass};
pub(super) use ends::{CounterEnd, RemoteCounter};
use ends::{CreditRole, lanes_for};
use followers::no_credits_of_its_own;
use weft_control::Rank;

/// Shape of a counter.
#[derive(Clone, Copy, Debug, Default)]
pub struct CounterConfig<'a> {
    /// Rounds that may be open at a time, from 1 to [`CounterConfig::MAX_WINDOW`]; 0 counts as 1. Round
    /// `r` may start while it is less than credits + window: a ring of `window` slots is one counter.
    pub window: u32,
    /// Peers that it connects; `None`: every peer. The window must be equal at both ends.
    pub peers: Option<&'a [Rank]>,
    /// Traffic class of its writes.
    pub class: TrafficClass,
}

impl CounterConfig<'_> {
    /// The widest window.
    pub const MAX_WINDOW: u32 = 1 << 16;
}

pub(super) struct Counter {
    /// By rank; `None` where it connects no peer.
    pub ends: Vec<Option<CounterEnd>>,
    pub class: TrafficClass,
    /// Shared by all ranks, also if it connects no peer.
    pub shared: bool,
    /// Counter of a driver, left out of [`Engine::raised`].
    pub internal: bool,
    /// Counters credited with this one.
    followers: Vec<CounterId>,
}

impl TrafficTotals {
    /// Adds the writes through one end of a counter.
    pub(super) fn add_writes(&mut self, end: &Option<CounterEnd>) {
        if let Some(CounterEnd { remote: Some(remote), .. }) = end {
            self.bytes += remote.bytes;
            self.parts += remote.raised + remote.credited;
        }
    }
}

impl Engine {
    /// A counter with a window of one round and lanes for every peer. It counts after an exchange of grants
    /// ([`Engine::grant`], [`Engine::import`]).
    pub fn counter(&mut self) -> Result<CounterId> {
        self.counter_with(CounterConfig::default())
    }

    /// A counter with this shape.
    ///
    /// # Errors
    /// [`Error::Limit`] if the window is too wide or the lanes are used up; [`Error::Unknown`] for a rank
    /// that is not a peer. The engine is unchanged then.
    pub fn counter_with(&mut self, config: CounterConfig<'_>) -> Result<CounterId> {
        let window = config.window.max(1);
        if window > CounterConfig::MAX_WINDOW {
            let (wanted, limit) = (window.into(), CounterConfig::MAX_WINDOW.into());
            return Err(Error::Limit { what: "rounds in a counter's window", wanted, limit });
        }
        let all: Vec<Rank>;
        let peers = match config.peers {
            Some(peers) => peers,
            None => {
                all = self.peers().collect();
                &all
            }
        };
        let known = |peer: &&Rank| peer.index() < self.peers.len() && **peer != self.rank;
        if let Some(unknown) = peers.iter().find(|peer| !known(peer)) {
            return Err(Error::Unknown { what: "rank", number: unknown.0.into() });
        }
        let id = self.next_counter()?;
        let mut counter = Counter {
            ends: Vec::new(),
            class: config.class,
            shared: false,
            internal: false,
            followers: Vec::new(),
        };
        counter.ends.resize_with(self.peers.len(), || None);
        for &peer in peers {
            match self.lanes.issue(peer, lanes_for(window)) {
                Ok(first) => {
                    self.note_uses(first, window, id, peer);
                    counter.ends[peer.index()]
                        .get_or_insert_with(|| CounterEnd::new(first, window));
                }
                Err(error) => {
                    self.give_lanes_back(&counter, LaneTable::cancel);
                    self.free_counters.push(id);
                    return Err(error);
                }
            }
        }
        self.counters[id.index()] = Some((id, counter));
        Ok(id)
    }

    /// An id for a counter: a released one with the next reuse count, or a new one.
    fn next_counter(&mut self) -> Result<CounterId> {
        if let Some(id) = self.free_counters.pop() {
            return Ok(id);
        }
        let index = self.counters.len();
        let id = CounterId::new(index as u32, 0).ok_or(Error::Limit {
            what: "counters in one engine",
            wanted: index as u64 + 1,
            limit: CounterId::LIMIT.into(),
        })?;
        self.counters.push(None);
        Ok(id)
    }

    fn note_uses(&mut self, first: Lane, window: u32, counter: CounterId, peer: Rank) {
        let begin = first.id().get() as usize;
        let end = begin + lanes_for(window) as usize;
        if self.lane_uses.len() < end {
            self.lane_uses.resize(end, None);
        }
        for (offset, usage) in (0..).zip(&mut self.lane_uses[begin..end]) {
            *usage = Some(super::LaneUse { counter, peer, offset });
        }
    }

    fn give_lanes_back(&mut self, counter: &Counter, give: impl Fn(&LaneTable, Lane, u32)) {
        for end in counter.ends.iter().flatten() {
            let (begin, count) = (end.data.id().get() as usize, lanes_for(end.window));
            self.lane_uses[begin..begin + count as usize].fill(None);
            give(&self.lanes, end.data, count);
        }
    }

    /// Releases a counter's lanes and id. They are issued again in a new generation, so a late arrival that
    /// names them is dropped and counted. All ranks release the counters of one position together, after
    /// all writes toward them have arrived ([`crate::Communicator::settle`]). A poisoned group issues none
    /// of them again.
    ///
    /// # Errors
    /// [`Error::Unknown`] if it was released before.
    pub fn release_counter(&mut self, counter: CounterId) -> Result<()> {
        self.known_counter(counter)?;
        let Some((id, released)) = self.counters[counter.index()].take() else { return Ok(()) };
        self.raised_lanes.retain(|(listed, _)| *listed != counter);
        // Its waits end.
        self.epoch += 1;
        self.flush();
        for (peer, end) in self.peers.iter_mut().zip(&released.ends) {
            peer.totals.add_writes(end);
        }
        self.stamp = UniqueId::new();
        if self.poison.get().is_none() {
            self.give_lanes_back(&released, LaneTable::release);
            self.free_counters.extend(id.renewed());
        }
        Ok(())
    }

    fn known_counter(&self, counter: CounterId) -> Result<&Counter> {
        match self.counters.get(counter.index()) {
            Some(Some((id, known))) if *id == counter => Ok(known),
            _ => Err(unknown(counter)),
        }
    }

    /// The traffic class of a counter.
    #[inline(always)]
    pub(super) fn class_of(&mut self, counter: CounterId) -> TrafficClass {
        get(&mut self.counters, counter).map_or(TrafficClass::default(), |known| known.class)
    }

    pub(super) fn end(&mut self, counter: CounterId, peer: Rank) -> Result<&mut CounterEnd> {
        find(&mut self.counters, counter, peer).map(|(end, _)| end)
    }

    /// The peer's side, if it was imported.
    pub(super) fn remote(&mut self, counter: CounterId, peer: Rank) -> Result<&mut RemoteCounter> {
        self.end(counter, peer)?.remote.as_mut().ok_or(Error::NotLinked { counter })
    }

    /// Raises by `peer` in the oldest round without a credit. All bytes of these parts are visible.
    pub fn count(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        let count = self.lanes.value(end.oldest()) - end.base;
        if count > 0 {
            // It shares the cache line just loaded, and the next round needs it.
            end.credits = self.lanes.value(end.credit.id());
        }
        Ok(count)
    }

    /// Raises by `peer` in an open round: the oldest without a credit or a later one of its window.
    ///
    /// # Errors
    /// [`Error::OldRound`] if the round was credited; [`Error::NoCredit`] if it is beyond the window.
    pub fn count_in(&mut self, counter: CounterId, peer: Rank, round: u64) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        if round < end.given {
            return Err(Error::OldRound { peer, counter, round, current: end.given });
        }
        if round - end.given >= u64::from(end.window) {
            return Err(Error::NoCredit { peer, counter, round, credits: end.given });
        }
        Ok(end.count_at(round, self.lanes.value(end.data_of(round))))
    }

    /// The oldest round of `peer` that has no credit yet.
    pub fn open_round(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.end(counter, peer)?.given)
    }

    /// Credits of `peer` on this counter; round r may start while r is less than these plus the window.
    pub fn credits(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        end.credits = self.lanes.value(end.credit.id());
        Ok(end.credits)
    }

    /// Credits of `peer` that `round` needs: none while it is less than the window.
    pub(crate) fn credits_for(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
    ) -> Result<u64> {
        Ok((round + 1).saturating_sub(self.end(counter, peer)?.window.into()))
    }

    /// Those of `counters` that connect `peer`, in their order.
    ///
    /// # Errors
    /// [`Error::Unknown`] if one was released.
    pub fn counters_toward(&self, peer: Rank, counters: &[CounterId]) -> Result<Vec<CounterId>> {
        let mut toward = Vec::with_capacity(counters.len());
        for &counter in counters {
            let known = self.known_counter(counter)?;
            if matches!(known.ends.get(peer.index()), Some(Some(_))) {
                toward.push(counter);
            }
        }
        Ok(toward)
    }

    /// True if a counter was shared by [`crate::Communicator::share`] or linked with any peer.
    ///
    /// # Errors
    /// [`Error::Unknown`] if it was released.
    pub fn is_shared(&self, counter: CounterId) -> Result<bool> {
        let known = self.known_counter(counter)?;
        Ok(known.shared || known.ends.iter().flatten().any(|end| end.remote.is_some()))
    }

    /// Records that all ranks have shared these counters.
    pub(crate) fn mark_shared(&mut self, counters: &[CounterId]) {
        for counter in counters {
            if let Some(Some((id, known))) = self.counters.get_mut(counter.index()) {
                known.shared |= id == counter;
            }
        }
    }

    /// True if `round` may be written to `peer`. Reads the lane only if the last value read does not
    /// suffice.
    pub fn has_credit(&mut self, counter: CounterId, peer: Rank, round: u64) -> Result<bool> {
        let end = self.end(counter, peer)?;
        let window = u64::from(end.window);
        Ok(round < end.credits + window || round < self.credits(counter, peer)? + window)
    }

    /// Our raises of `peer`'s end of `counter` since it was linked.
    pub(crate) fn raised_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.remote(counter, peer)?.raised)
    }

    /// Raises of our end of `counter` by `peer` since it was linked.
    pub(crate) fn count_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        Ok((0..u64::from(end.window)).map(|slot| self.lanes.value(end.data_of(slot))).sum())
    }

    /// Error of a round that may not be written, by the known credits.
    pub(super) fn check_round(&mut self, peer: Rank, counter: CounterId, round: u64) -> Result<()> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        if end.remote.is_none() {
            return Err(Error::NotLinked { counter });
        }
        let credits = end.credits;
        if round >= credits + u64::from(end.window) {
            return Err(Error::NoCredit { peer, counter, round, credits });
        }
        if round < credits {
            return Err(Error::OldRound { peer, counter, round, current: credits });
        }
        Ok(())
    }

    /// Releases the oldest open round of `peer`: its bytes may be written again and one more round may
    /// start. Call it once per round, after the round is complete.
    ///
    /// A credit leaves with the next submission, wait or poll. Call [`Engine::flush`] if none follows soon.
    ///
    /// # Errors
    /// [`Error::NothingToCredit`] if the round has no arrivals: it was credited before, or has not begun;
    /// [`Error::Unknown`] for a counter that is credited with another one.
    pub fn credit(&mut self, peer: Rank, counter: CounterId) -> Result<()> {
        self.credit_round(peer, counter, false)
    }

    /// [`Engine::credit`]; drivers may also credit an empty round.
    #[inline(always)]
    pub(super) fn credit_round(
        &mut self,
        peer: Rank,
        counter: CounterId,
        empty: bool,
    ) -> Result<()> {
        self.check()?;
        let (end, _) = find(&mut self.counters, counter, peer)?;
        let (value, role) = (self.lanes.value(end.oldest()), end.role);
        if role == CreditRole::Follower {
            return Err(no_credits_of_its_own(counter));
        }
        let Some(remote) = &mut end.remote else { return Err(Error::NotLinked { counter }) };
        if value == end.base && !empty {
            return Err(Error::NothingToCredit { peer, counter, round: end.given });
        }
        remote.credited += 1;
        let lane = remote.credit;
        let (ours, window) = (end.oldest_lane(), end.window);
        end.close_round(value);
        if role == CreditRole::Leader {
            self.close_followers(peer, counter)?;
        }
        self.queue_credit(peer, lane, ours);
        if window > 1 {
            self.note_next_round(peer, counter)?;
        }
        Ok(())
    }

    /// After a closed round: reports earlier raises of the round that is now the oldest.
    fn note_next_round(&mut self, peer: Rank, counter: CounterId) -> Result<()> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        let is_listed = end.listed;
        if self.lanes.value(end.data_of(end.given)) > end.base {
            self.epoch += 1;
            if !is_listed && !self.is_internal(counter) {
                self.list(counter, peer);
            }
        }
        Ok(())
    }

    /// The first round toward `peer` without a write.
    pub fn next_round(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.remote(counter, peer)?.started)
    }

    /// Sets the counter of [`Engine::barrier`]; it must be linked with every peer.
    pub fn use_for_barriers(&mut self, counter: CounterId) {
        self.barrier = Some(counter);
    }

    pub(crate) fn barrier_counter(&self) -> Result<CounterId> {
        self.barrier.ok_or(Error::Unknown { what: "barrier counter", number: 0 })
    }

    /// Sends pending credits and posts that links have held back.
    pub fn flush(&mut self) {
        self.flush_all();
    }
}

#[cold]
#[inline(never)]
fn unknown(counter: CounterId) -> Error {
    Error::Unknown { what: "counter", number: counter.number().into() }
}

/// The counters of an engine, by index.
pub(super) type Counters = Vec<Option<(CounterId, Counter)>>;

/// A counter, unless it was released.
#[inline(always)]
pub(super) fn get(counters: &mut Counters, counter: CounterId) -> Option<&mut Counter> {
    match counters.get_mut(counter.index()) {
        Some(Some((id, known))) if *id == counter => Some(known),
        _ => None,
    }
}

#[inline(always)]
fn find(
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
fn unknown_rank(peer: Rank) -> Error {
    Error::Unknown { what: "rank", number: peer.0.into() }
}
