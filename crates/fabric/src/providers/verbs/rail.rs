//! Rail: one NIC in one group: queues, keys and completions.

use super::library::Library;
use super::nic::{self, Nic};
use super::objects::{
    AsyncEvent, CompletionQueue, Context, ProtectionDomain, Queues, Result, SharedReceiveQueue,
};
use super::pair::{Pair, RequestId};
use super::sys;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// Completions per read.
pub const BATCH: usize = 16;
/// Receives that are posted at once in place of consumed ones.
const REPOST: usize = 16;

/// One group's NIC.
pub struct Rail {
    pub nic: Nic,
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    queues: Arc<Queues>,
    entries: Box<[sys::Completion; BATCH]>,
    /// Entries read and not yet taken.
    unread: usize,
    /// Consumed receives that have not been posted again.
    missing_receives: usize,
    /// Pairs by queue pair number.
    numbers: PairNumbers,
}

/// Queue sizes on a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Work requests for parts in flight toward each peer.
    pub requests: u32,
    /// Unconsumed arrivals from each peer.
    pub unconsumed: u32,
}

impl Rail {
    /// Opens a NIC, which must be active, with a completion queue for `completions` entries, and posts
    /// `receives`.
    pub fn open(
        library: &'static Library,
        nic: &Nic,
        gid_index: Option<u32>,
        completions: usize,
        receives: usize,
    ) -> Result<Rail> {
        let context = Arc::new(Context::open(library, &nic.device)?);
        let nic = nic::renewed(&context, nic, gid_index)?;
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let queues = Queues {
            completions: CompletionQueue::new(&context, completions)?,
            receives: SharedReceiveQueue::new(&domain, receives as u32)?,
        };
        let (posted, result) = queues.receives.post(RequestId::RECEIVE, receives);
        result.map_err(|why| format!("{why} after {posted} of {receives} receives"))?;
        Ok(Rail {
            nic,
            context,
            domain,
            queues: Arc::new(queues),
            entries: Box::new([sys::Completion::default(); BATCH]),
            unread: 0,
            missing_receives: 0,
            numbers: PairNumbers::default(),
        })
    }

    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    pub fn library(&self) -> &'static Library {
        self.context.library()
    }

    /// Opens the pair toward a peer.
    pub fn open_pair(
        &mut self,
        peer: Rank,
        requests: u32,
        rails: (usize, usize),
        first_packet: u32,
    ) -> Result<Pair> {
        let pair = Pair::open(&self.domain, &self.queues, peer, requests, rails, first_packet)?;
        self.numbers.insert(pair.address().number, peer);
        Ok(pair)
    }

    /// Peer that a queue pair connects.
    #[inline(always)]
    pub fn peer_of(&self, number: u32) -> Option<Rank> {
        self.numbers.get(number)
    }

    /// Reads up to [`BATCH`] completions; returns how many. [`Rail::entry`] has them.
    #[inline(always)]
    pub fn read(&mut self) -> Result<usize> {
        if self.unread == 0 {
            self.unread = self.queues.completions.poll(&mut self.entries[..])?;
        }
        Ok(std::mem::take(&mut self.unread))
    }

    /// True if an arrival among the first `count` entries brought bytes.
    #[inline(never)]
    pub fn has_payload(&self, count: usize) -> bool {
        self.entries[..count].iter().any(|it| {
            let has_arrived = it.status == sys::IBV_WC_SUCCESS && it.opcode & sys::IBV_WC_RECV != 0;
            has_arrived && it.byte_len > 0
        })
    }

    #[inline(always)]
    pub fn entry(&self, index: usize) -> sys::Completion {
        self.entries[index]
    }

    /// Counts a consumed receive, and posts again when enough are missing.
    #[inline(always)]
    pub fn renew_receive(&mut self) {
        self.missing_receives += 1;
        if self.missing_receives >= REPOST {
            self.post_missing_receives();
        }
    }

    /// Posts receives in place of consumed ones.
    pub fn post_missing_receives(&mut self) {
        if self.missing_receives == 0 {
            return;
        }
        let (posted, result) = self.queues.receives.post(RequestId::RECEIVE, self.missing_receives);
        self.missing_receives -= posted;
        if let Err(why) = result {
            log::error!("{}: {why}; arrivals wait for the next poll", self.nic.name());
        }
    }

    /// Descriptors to sleep on: for completions and for asynchronous events.
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.queues.completions.descriptor(), self.context.event_descriptor()]
    }

    /// Arms the descriptor and looks once more; false if a completion is there.
    pub fn may_sleep(&mut self) -> bool {
        self.post_missing_receives();
        if self.unread > 0 {
            return false;
        }
        self.queues.completions.take_events();
        let armed = self.queues.completions.arm();
        match armed.and_then(|()| self.queues.completions.poll(&mut self.entries[..])) {
            Ok(count) => self.unread = count,
            // The next poll reports it.
            Err(_) => return false,
        }
        self.unread == 0
    }

    /// Next asynchronous event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.context.next_event()
    }
}

/// Peers by queue pair number: open addressing with linear probing, at most half full.
#[derive(Default)]
struct PairNumbers {
    /// Number and rank; `EMPTY` in a free slot. A power of two.
    slots: Vec<(u32, Rank)>,
    used: usize,
}

impl PairNumbers {
    /// Queue pairs have 24-bit numbers.
    const EMPTY: u32 = u32::MAX;

    fn insert(&mut self, number: u32, peer: Rank) {
        if 2 * (self.used + 1) > self.slots.len() {
            let length = (2 * self.slots.len()).max(8);
            let before =
                std::mem::replace(&mut self.slots, vec![(PairNumbers::EMPTY, Rank(0)); length]);
            self.used = 0;
            let known = before.into_iter().filter(|(number, _)| *number != PairNumbers::EMPTY);
            known.for_each(|(number, peer)| self.insert(number, peer));
        }
        let mask = self.slots.len() - 1;
        let mut slot = number as usize & mask;
        while ![PairNumbers::EMPTY, number].contains(&self.slots[slot].0) {
            slot = (slot + 1) & mask;
        }
        self.used += usize::from(self.slots[slot].0 == PairNumbers::EMPTY);
        self.slots[slot] = (number, peer);
    }

    #[inline(always)]
    fn get(&self, number: u32) -> Option<Rank> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut slot = number as usize & mask;
        loop {
            let (known, peer) = self.slots[slot];
            if known == number {
                return Some(peer);
            }
            if known == PairNumbers::EMPTY {
                return None;
            }
            slot = (slot + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn pair_numbers_are_those_of_a_map(
            inserted in prop::collection::vec((0u32..64, 0u32..9), 0..60),
            wanted in prop::collection::vec(0u32..70, 0..20),
        ) {
            let (mut numbers, mut map) = (PairNumbers::default(), HashMap::new());
            for (number, peer) in inserted {
                numbers.insert(number, Rank(peer));
                map.insert(number, Rank(peer));
            }
            for number in wanted {
                prop_assert_eq!(numbers.get(number), map.get(&number).copied());
            }
        }
    }
}
