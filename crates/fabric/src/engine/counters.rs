//! Counters, rounds and credits.
//!
//! Ranks link counters by position: raising counter `c` toward a peer raises the peer's own counter at
//! the same position in the grant. Toward each peer a counter has one data lane for each round that may
//! be open at a time (the window) and a return lane for credits. Owner and source can thus count rounds
//! locally, even if writes from different rounds overtake each other.

mod ends;
mod followers;
mod table;

use super::state::{Engine, LaneUse};
use super::unique_id::UniqueId;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::types::{CounterId, Lane, TrafficClass};
use ends::{CreditRole, lanes_for};
use followers::no_credits_of_its_own;
use table::{find, unknown};
use weft_control::Rank;

pub(super) use ends::{CounterEnd, RemoteCounter};
pub use table::CounterConfig;
pub(super) use table::{Counter, Counters, get};

impl Engine {
    /// Makes a counter with a one-round window and lanes for every peer. It counts after an exchange of
    /// grants ([`Engine::grant`], [`Engine::import`]).
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
            *usage = Some(LaneUse { counter, peer, offset });
        }
    }

    fn give_lanes_back(&mut self, counter: &Counter, give: impl Fn(&LaneTable, Lane, u32)) {
        for end in counter.ends.iter().flatten() {
            let (begin, count) = (end.data.id().get() as usize, lanes_for(end.window));
            self.lane_uses[begin..begin + count as usize].fill(None);
            give(&self.lanes, end.data, count);
        }
    }

    /// Releases a counter's lanes and id. They are issued again in a new generation, so a late arrival
    /// that names them is dropped and counted. All ranks release the counters at one position together,
    /// after all writes toward them have arrived ([`crate::Communicator::settle`]). A poisoned group
    /// never issues them again.
    ///
    /// # Errors
    /// [`Error::Unknown`] if it was released before.
    pub fn release_counter(&mut self, counter: CounterId) -> Result<()> {
        self.known_counter(counter)?;
        let Some((id, released)) = self.counters[counter.index()].take() else { return Ok(()) };
        self.raised_lanes.retain(|(listed, _)| *listed != counter);
        // Waits on the counter end.
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

    /// Traffic class that a counter uses.
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

    /// Raises by `peer` in the oldest round without a credit. All bytes in these parts are visible.
    pub fn count(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        let count = self.lanes.value(end.oldest()) - end.base;
        if count > 0 {
            // It shares the cache line just loaded, and the next round needs it.
            end.credits = self.lanes.value(end.credit.id());
        }
        Ok(count)
    }

    /// Raises by `peer` in an open round: the oldest without a credit or a later one in the window.
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

    /// Oldest round from `peer` that has no credit yet.
    pub fn open_round(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.end(counter, peer)?.given)
    }

    /// Credits from `peer` on this counter. Round r may start while r is less than credits plus window.
    pub fn credits(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        end.credits = self.lanes.value(end.credit.id());
        Ok(end.credits)
    }

    /// Credits from `peer` that `round` needs: none while it is less than the window.
    pub(crate) fn credits_for(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
    ) -> Result<u64> {
        Ok((round + 1).saturating_sub(self.end(counter, peer)?.window.into()))
    }

    /// Subset of `counters` that connects `peer`, in the same order.
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

    /// Raises that this rank sent to `peer`'s end of `counter` since it was linked.
    pub(crate) fn raised_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        Ok(self.remote(counter, peer)?.raised)
    }

    /// Raises that `peer` sent to our end of `counter` since it was linked.
    pub(crate) fn count_in_all(&mut self, counter: CounterId, peer: Rank) -> Result<u64> {
        let (end, _) = find(&mut self.counters, counter, peer)?;
        Ok((0..u64::from(end.window)).map(|slot| self.lanes.value(end.data_of(slot))).sum())
    }

    /// Error for a round that may not be written, according to the known credits.
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

    /// Releases the oldest open round from `peer`: the bytes may be written again and one more round may
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
        let has_watches = self.has_watches();
        if has_watches {
            self.renew_watches();
        }
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
        if has_watches {
            self.renew_watches();
        }
        Ok(())
    }

    /// After a round has closed, reports earlier raises in the round that is now the oldest.
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

    /// Sets the counter for [`Engine::barrier`]; it must be linked with every peer.
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
