//! Channel: staging memory, counters, and the plan for one chunk under way.
//!
//! A rank may write to a peer's staging memory once the peer has finished the chunk before on this channel. Both ranks'
//! plans define which ranks write to each other, so only those pairs exchange credits: a rank that wrote in the chunk
//! before has got a credit at the end of that chunk; another one gets it when the peer begins this chunk. A pair counts
//! credits in rounds; the round for a chunk's writes is the credit count so far.

use super::call::Call;
use super::layout::{Piece, Place};
use super::plan::WIDE_BYTES;
use super::read_plan::SLOT_BYTES;
use super::reads::{Addresses, Arithmetic, Operand};
use super::reducer::Reducer;
use super::step::{Plan, Step, Term};
use crate::op;
use crate::reduction::{self, Element};
use crate::run_error::RunError;
use std::sync::Arc;
use weft_fabric::{
    CounterId, MemoryReadError, MissingPeer, Page, Rank, Region, RegionKey, Requests,
};

/// Call chunk on a channel.
pub(super) struct Chunk {
    /// Call number.
    pub call: u64,
    pub arguments: Call,
    pub plan: Arc<Plan>,
    /// Region with the caller's input, if the plan writes from it.
    pub input: Option<RegionKey>,
    /// Share stride in the caller's memory, in bytes.
    pub share_bytes: u64,
    /// Chunk start in each share, in bytes.
    pub offset: u64,
    pub ranks: u32,
    next: usize,
    started: bool,
    /// True once this chunk's credits were given.
    answered: bool,
}

impl Chunk {
    pub fn new(call: u64, arguments: Call, plan: Arc<Plan>, ranks: u32) -> Chunk {
        let share_bytes = arguments.share_bytes(ranks);
        let (input, offset, next, started, answered) = (None, 0, 0, false, false);
        Chunk { call, arguments, plan, input, share_bytes, offset, ranks, next, started, answered }
    }
}

impl Chunk {
    /// Start in bytes for a place in the caller's input or output.
    fn start(&self, place: Place) -> u64 {
        match place {
            Place::Input { share, offset } | Place::Output { share, offset } => {
                // A wide plan has the same places as a float32 plan.
                let offset = match self.plan.is_wide {
                    true => offset / WIDE_BYTES * self.arguments.element.bytes() as u64,
                    false => offset,
                };
                u64::from(share) * self.share_bytes + self.offset + offset
            }
            Place::Staging(offset) => offset,
        }
    }
}

/// State toward one peer.
struct PeerState {
    /// The peer's staging memory.
    remote: RegionKey,
    /// Round for the next write.
    round: u64,
    credits: u64,
    /// Raises in the open round, by lane.
    raised: Vec<u64>,
    /// Writes whose sources are in use.
    in_flight: u32,
    /// Chunk, counted from 1, with this rank's last writes to the peer; 0: none.
    written_in: u64,
    /// The same for the peer's writes to this rank.
    received_in: u64,
}

/// Outcome after an advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advance {
    /// The chunk waits for a peer or for its own writes.
    Blocked,
    /// The next step takes long: earlier requests leave first.
    Paused,
    /// The chunk is complete; the channel is idle.
    Done,
}

pub(super) struct Channel {
    region: Region,
    /// Channel start in the region, equal on all ranks.
    base: u64,
    counters: Vec<CounterId>,
    peers: Vec<Option<PeerState>>,
    pub chunk: Option<Chunk>,
    /// Chunks begun so far.
    chunks: u64,
    /// First write tag; there is one for each rank.
    first_tag: u64,
    /// This rank.
    rank: u32,
}

impl Channel {
    pub fn new(
        region: Region,
        base: u64,
        counters: Vec<CounterId>,
        first_tag: u64,
        (rank, ranks): (u32, u32),
    ) -> Channel {
        let peers = (0..ranks).map(|_| None).collect();
        Channel { region, base, counters, peers, chunk: None, chunks: 0, first_tag, rank }
    }

    /// Connects a peer, with its staging memory.
    pub fn link(&mut self, peer: Rank, remote: RegionKey) {
        if let Some(slot) = self.peers.get_mut(peer.0 as usize) {
            let raised = vec![0; self.counters.len()];
            *slot = Some(PeerState {
                remote,
                round: 0,
                credits: 0,
                raised,
                in_flight: 0,
                written_in: 0,
                received_in: 0,
            });
        }
    }

    pub fn note_raised(&mut self, lane: usize, peer: Rank, count: u64) {
        if let Some(peer) = self.peer_mut(peer.0) {
            peer.raised[lane] = peer.raised[lane].max(count);
        }
    }

    pub fn note_credits(&mut self, peer: Rank, credits: u64) {
        if let Some(peer) = self.peer_mut(peer.0) {
            peer.credits = peer.credits.max(credits);
        }
    }

    pub fn note_completed(&mut self, peer: u32) {
        if let Some(peer) = self.peer_mut(peer) {
            peer.in_flight = peer.in_flight.saturating_sub(1);
        }
    }

    /// True if no write source is in use.
    fn is_drained(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.in_flight == 0)
    }

    fn peer_mut(&mut self, rank: u32) -> Option<&mut PeerState> {
        self.peers.get_mut(rank as usize)?.as_mut()
    }

    fn peer(&self, rank: u32) -> Option<&PeerState> {
        self.peers.get(rank as usize)?.as_ref()
    }

    /// Executes the chunk's steps up to one that has to wait.
    ///
    /// # Errors
    /// [`RunError::PeerMemory`] and [`RunError::Violation`] for a peer that the chunk reads.
    pub fn advance(
        &mut self,
        reducer: &mut Reducer,
        requests: &mut Requests,
    ) -> Result<Advance, RunError> {
        let Some(mut chunk) = self.chunk.take() else { return Ok(Advance::Done) };
        let advanced = self.advance_chunk(&mut chunk, reducer, requests);
        if !matches!(advanced, Ok(Advance::Done)) {
            self.chunk = Some(chunk);
        }
        advanced
    }

    fn advance_chunk(
        &mut self,
        chunk: &mut Chunk,
        reducer: &mut Reducer,
        requests: &mut Requests,
    ) -> Result<Advance, RunError> {
        if !chunk.started {
            chunk.started = true;
            self.begin(&chunk.plan, requests);
            self.stage(chunk, reducer);
        }
        while let Some(step) = chunk.plan.steps.get(chunk.next) {
            if let Step::Fold { target, terms, bytes } = step {
                if !requests.is_empty() {
                    return Ok(Advance::Paused);
                }
                let terms = &chunk.plan.terms[terms.start as usize..terms.end as usize];
                match self.fold(chunk, *target, terms, *bytes, reducer) {
                    // The control plane reports the cause.
                    Err(RunError::PeerMemory {
                        error: MemoryReadError::Ended | MemoryReadError::Revoked,
                        ..
                    }) => return Ok(Advance::Blocked),
                    folded => folded?,
                }
            } else if !self.execute(chunk, step, reducer, requests) {
                return Ok(Advance::Blocked);
            }
            chunk.next += 1;
        }
        if !self.is_drained() {
            return Ok(Advance::Blocked);
        }
        if !std::mem::replace(&mut chunk.answered, true) {
            self.copy_results(chunk, reducer);
            self.answer(chunk, requests);
        }
        if chunk.plan.is_read && self.unanswered(&chunk.plan).next().is_some() {
            return Ok(Advance::Blocked);
        }
        self.finish(chunk);
        Ok(Advance::Done)
    }

    /// Gives a credit to each rank that writes in this chunk but did not in the chunk before, and expects the same from
    /// the ranks that this one writes to.
    fn begin(&mut self, plan: &Plan, requests: &mut Requests) {
        let before = self.chunks;
        self.chunks += 1;
        let (now, leader) = (self.chunks, self.counters[0]);
        for &from in &plan.sources {
            let Some(peer) = self.peer_mut(from) else { continue };
            if peer.received_in != before {
                requests.credit(Rank(from), leader);
            }
            peer.received_in = now;
        }
        for &to in &plan.targets {
            let Some(peer) = self.peer_mut(to) else { continue };
            if peer.written_in != before {
                peer.round += 1;
            }
            peer.written_in = now;
        }
    }

    /// Executes a step; false if it has to wait.
    fn execute(
        &mut self,
        chunk: &Chunk,
        step: &Step,
        reducer: &mut Reducer,
        requests: &mut Requests,
    ) -> bool {
        match step {
            Step::Write { to, lane, pieces } => {
                let pieces = &chunk.plan.pieces[pieces.start as usize..pieces.end as usize];
                self.write(chunk, *to, *lane, pieces, requests)
            }
            Step::Wait { from, lane, raises } => {
                self.peer(*from).is_some_and(|peer| peer.raised[usize::from(*lane)] >= *raises)
            }
            Step::Drain { to } => self.peer(*to).is_none_or(|peer| peer.in_flight == 0),
            Step::Combine { target, a, b, bytes } => {
                let element =
                    if chunk.plan.is_wide { Element::F32 } else { chunk.arguments.element };
                let how = (chunk.arguments.reduction, element);
                let at = |place| self.address(chunk, place);
                let (target, sources) = (at(*target), [at(*a), at(*b)].map(<*mut u8>::cast_const));
                // SAFETY: the places in a plan are inside the caller's memory and this channel, which live
                // (`Collectives::start` contract; the region); the schedule is proved to order all accesses to a block.
                unsafe { reducer.combine(how, target, sources, *bytes as usize) };
                true
            }
            Step::Copy(piece) => {
                self.copy(chunk, piece);
                true
            }
            Step::Fold { .. } => true,
        }
    }

    /// Folds operands, reading peer operands in place.
    fn fold(
        &self,
        chunk: &Chunk,
        target: Place,
        terms: &[Term],
        bytes: u64,
        reducer: &mut Reducer,
    ) -> Result<(), RunError> {
        let call = &chunk.arguments;
        let operands = reducer.operands();
        for &Term { rank, place } in terms {
            operands.push(match self.peer(rank) {
                None => Operand::Local(self.address(chunk, place)),
                Some(_) => {
                    let start = chunk.start(place);
                    let address = self.addresses(rank).locate(rank, place, start, bytes)?;
                    Operand::Remote { rank, address }
                }
            });
        }
        let target = self.address(chunk, target);
        let is_input = |term: &Term| matches!(term.place, Place::Input { .. });
        if !call.collective.reduces() || !terms.iter().all(is_input) {
            // SAFETY: the target is a place in the caller's output, as in `execute`.
            return unsafe { reducer.read(target, bytes as usize) };
        }
        let how = Arithmetic {
            reduction: call.reduction,
            element: call.element,
            factor: call.factor(),
            divisor: call.divides().then_some(chunk.ranks),
        };
        // SAFETY: as in `execute`; the target is the rank's own operand, or disjoint from it.
        unsafe { reducer.fold(how, target, bytes as usize) }
    }

    /// Start of a rank's address slot.
    fn slot(&self, rank: u32) -> *mut u64 {
        let host = self.region.memory().host();
        let start = host.map_or(std::ptr::null_mut(), |host| host.as_ptr());
        start.wrapping_add((self.base + u64::from(rank) * SLOT_BYTES) as usize).cast()
    }

    /// Addresses that a peer has sent in this chunk.
    fn addresses(&self, rank: u32) -> Addresses {
        let slot = self.slot(rank).cast_const();
        // SAFETY: slots are aligned and inside the channel, by the size that the planner checks; a peer may change them
        // at any time, which the volatile reads allow.
        Addresses::from_words(std::array::from_fn(|i| unsafe {
            slot.wrapping_add(i).read_volatile()
        }))
    }

    /// Stores this rank's addresses for its first writes.
    fn store_addresses(&self, chunk: &Chunk) {
        let me = op::Rank(self.rank);
        let (input, output) = chunk.arguments.user_bytes(chunk.ranks, me);
        let words = Addresses::of(&chunk.arguments, input, output).words();
        let slot = self.slot(self.rank);
        for (index, word) in words.into_iter().enumerate() {
            // SAFETY: as in `addresses`; no write reads the slot between two chunks.
            unsafe { slot.wrapping_add(index).write_volatile(word) };
        }
    }

    /// Peers whose answers to this chunk's writes are missing, with their credits.
    fn unanswered(&self, plan: &Plan) -> impl Iterator<Item = MissingPeer> {
        plan.targets.iter().filter_map(|&rank| {
            let peer = self.peer(rank)?;
            let (expected, seen) = (peer.round + 1, peer.credits);
            (seen < expected).then_some(MissingPeer { rank: Rank(rank), expected, seen })
        })
    }

    fn write(
        &mut self,
        chunk: &Chunk,
        to: u32,
        lane: u16,
        pieces: &[Piece],
        requests: &mut Requests,
    ) -> bool {
        let (base, staging, first_tag) = (self.base, self.region.key(), self.first_tag);
        let counter = self.counters[usize::from(lane)];
        let Some(peer) = self.peer_mut(to) else { return false };
        if peer.credits < peer.round {
            return false;
        }
        peer.in_flight += 1;
        let (destination, round) = (peer.remote, peer.round);
        let pages = pieces.iter().filter_map(|piece| {
            let (source, source_offset) = match piece.source {
                Place::Input { share, offset } => {
                    (chunk.input?, u64::from(share) * chunk.share_bytes + chunk.offset + offset)
                }
                Place::Staging(offset) => (staging, base + offset),
                Place::Output { .. } => return None,
            };
            let Place::Staging(target) = piece.target else { return None };
            let (destination_offset, length) = (base + target, piece.bytes);
            Some(Page { source, source_offset, destination, destination_offset, length })
        });
        requests.write(Rank(to), counter, round, pages, first_tag + u64::from(to));
        true
    }

    /// Copies the input to staging memory, if the plan has a copy, and the addresses that peers read.
    fn stage(&self, chunk: &Chunk, reducer: &mut Reducer) {
        if chunk.plan.is_read {
            self.store_addresses(chunk);
        }
        if chunk.plan.is_wide {
            return self.widen(chunk, reducer);
        }
        for piece in &chunk.plan.staged {
            let Some(factor) = chunk.arguments.factor() else {
                self.copy(chunk, piece);
                continue;
            };
            let element = chunk.arguments.element;
            self.map(chunk, piece, reducer, |target, source, bytes| {
                // SAFETY: as in `execute`.
                unsafe {
                    reduction::scale(element, target, source, bytes / element.bytes(), factor);
                }
            });
        }
    }

    /// Calls `map(target, source, bytes)` for parts in a result segment.
    fn map(
        &self,
        chunk: &Chunk,
        piece: &Piece,
        reducer: &mut Reducer,
        map: impl Fn(*mut u8, *const u8, usize) + Sync,
    ) {
        let (target, source) =
            (self.address(chunk, piece.target), self.address(chunk, piece.source));
        // SAFETY: as in `execute`; source and target in a segment are the same, or disjoint.
        unsafe { reducer.map(target, source, piece.bytes as usize, map) };
    }

    fn copy(&self, chunk: &Chunk, piece: &Piece) {
        let (target, source) =
            (self.address(chunk, piece.target), self.address(chunk, piece.source));
        if target.cast_const() != source {
            // SAFETY: as in `execute`; both are valid for these bytes.
            unsafe { weft_fabric::copy_bytes(source, target, piece.bytes as usize) };
        }
    }

    /// Stores the input as float32 to staging memory.
    fn widen(&self, chunk: &Chunk, reducer: &mut Reducer) {
        let (element, factor) = (chunk.arguments.element, chunk.arguments.factor());
        for piece in &chunk.plan.staged {
            let target = (self.address(chunk, piece.target), WIDE_BYTES as usize);
            let source = (self.address(chunk, piece.source).cast_const(), element.bytes());
            // SAFETY: as in `execute`; staging memory and the caller's are disjoint.
            unsafe {
                reducer.convert(
                    target,
                    source,
                    (piece.bytes / WIDE_BYTES) as usize,
                    |to, from, count| {
                        reduction::widen(element, to, from, count, factor);
                    },
                );
            }
        }
    }

    /// Rounds the results in staging memory, or the quotients, to the caller's memory.
    fn narrow(&self, chunk: &Chunk, reducer: &mut Reducer) {
        let element = chunk.arguments.element;
        let divisor = if chunk.arguments.divides() { chunk.ranks } else { 1 };
        for piece in &chunk.plan.results {
            let target = (self.address(chunk, piece.target), element.bytes());
            let source = (self.address(chunk, piece.source).cast_const(), WIDE_BYTES as usize);
            // SAFETY: as in `widen`.
            unsafe {
                reducer.convert(
                    target,
                    source,
                    (piece.bytes / WIDE_BYTES) as usize,
                    |to, from, count| {
                        reduction::narrow(element, to, from, count, divisor);
                    },
                );
            }
        }
    }

    /// Copies the results to the caller's memory.
    fn copy_results(&self, chunk: &Chunk, reducer: &mut Reducer) {
        if chunk.plan.is_wide {
            return self.narrow(chunk, reducer);
        }
        for piece in &chunk.plan.results {
            if !chunk.arguments.divides() {
                self.copy(chunk, piece);
                continue;
            }
            let (element, ranks) = (chunk.arguments.element, chunk.ranks);
            self.map(chunk, piece, reducer, |target, source, bytes| {
                // SAFETY: as in `execute`.
                unsafe {
                    reduction::divide(element, target, source, bytes / element.bytes(), ranks);
                }
            });
        }
    }

    /// Gives this chunk's writers a credit each.
    fn answer(&mut self, chunk: &Chunk, requests: &mut Requests) {
        for &from in &chunk.plan.sources {
            requests.credit(Rank(from), self.counters[0]);
            if let Some(peer) = self.peer_mut(from) {
                peer.raised.fill(0);
            }
        }
    }

    fn finish(&mut self, chunk: &Chunk) {
        for &to in &chunk.plan.targets {
            if let Some(peer) = self.peer_mut(to) {
                peer.round += 1;
            }
        }
    }

    fn address(&self, chunk: &Chunk, place: Place) -> *mut u8 {
        let (start, offset) = match place {
            Place::Input { .. } => (chunk.arguments.input.cast_mut(), chunk.start(place)),
            Place::Output { .. } => (chunk.arguments.output, chunk.start(place)),
            Place::Staging(offset) => {
                let host = self.region.memory().host();
                (host.map_or(std::ptr::null_mut(), |host| host.as_ptr()), self.base + offset)
            }
        };
        start.wrapping_add(offset as usize)
    }

    /// Peers that block the chunk.
    pub fn missing(&self) -> Vec<MissingPeer> {
        let Some(chunk) = &self.chunk else { return Vec::new() };
        let in_flight = |(rank, peer): (u32, &Option<PeerState>)| {
            let count = u64::from(peer.as_ref()?.in_flight);
            (count > 0).then_some(MissingPeer { rank: Rank(rank), expected: count, seen: 0 })
        };
        let drains = || (0..).zip(&self.peers).filter_map(in_flight);
        match chunk.plan.steps.get(chunk.next) {
            Some(Step::Wait { from, lane, raises }) => {
                let seen = self.peer(*from).map_or(0, |peer| peer.raised[usize::from(*lane)]);
                vec![MissingPeer { rank: Rank(*from), expected: *raises, seen }]
            }
            Some(Step::Write { to, .. }) => {
                let (expected, seen) =
                    self.peer(*to).map_or((0, 0), |peer| (peer.round, peer.credits));
                vec![MissingPeer { rank: Rank(*to), expected, seen }]
            }
            Some(Step::Drain { to }) => drains().filter(|one| one.rank.0 == *to).collect(),
            None if chunk.answered => self.unanswered(&chunk.plan).collect(),
            _ => drains().collect(),
        }
    }
}
