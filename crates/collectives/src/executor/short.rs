//! Short calls: contributions travel in mailboxes, without a plan, a channel or credits.
//!
//! A short call runs a direct algorithm, or a broadcast, in which the contribution to each peer is one short message.
//! Every rank starts the same calls in the same order, so a pair's messages belong to calls in the order in which they
//! arrive. A call is complete once the messages from all sources are there; the elements are combined in rank order, as
//! in `one-shot` and `direct`, with the same bits.

use super::call::Call;
use super::reads::{self, Arithmetic};
use crate::algorithm::Algorithm;
use crate::op::Collective;
use crate::reduction;
use crate::run_error::RunError;
use std::collections::VecDeque;
use weft_fabric::{Engine, MailboxWaits, Mailboxes, MissingPeer, Rank, Region, RemoteRegion};

/// Maximum message, in bytes, in groups with few ranks and with more: longer ones take less time as writes, or more
/// memory.
const MESSAGE_BYTES_OF_FEW: u64 = 64 << 10;
const MESSAGE_BYTES: u64 = 16 << 10;
/// Maximum rank count in a group with the longer messages.
const FEW_RANKS: u32 = 4;
/// Maximum bytes that a broadcast root stores for all peers together: a tree divides longer copies among the ranks.
const ROOT_BYTES: u64 = 64 << 10;
/// Maximum rank count in a group with mailboxes, which bounds the memory: 4.02 MiB at each rank.
pub(super) const MAX_RANKS: u32 = 32;

/// Longest message in a group, in bytes.
fn message_bytes(ranks: u32) -> u64 {
    if ranks <= FEW_RANKS { MESSAGE_BYTES_OF_FEW } else { MESSAGE_BYTES }
}

/// True if calls by this algorithm run as short calls, where mailboxes exist.
pub(super) fn is_short(
    collective: Collective,
    algorithm: Algorithm,
    bytes: u64,
    ranks: u32,
) -> bool {
    let shares = if collective.shares() { u64::from(ranks) } else { 1 };
    let direct = match collective {
        Collective::AllReduce => algorithm == Algorithm::OneShot,
        Collective::Broadcast { .. } => {
            algorithm == Algorithm::Binomial && bytes * u64::from(ranks - 1) <= ROOT_BYTES
        }
        _ => algorithm == Algorithm::Direct,
    };
    ranks > 1 && direct && bytes / shares <= message_bytes(ranks)
}

/// An executor's short calls, oldest first.
pub(super) struct ShortCalls {
    mailboxes: Mailboxes,
    rank: u32,
    ranks: u32,
    calls: VecDeque<(u64, Call)>,
    /// Calls in `calls` whose messages were sent.
    sent: usize,
    /// This rank's scaled contribution.
    scaled: Vec<u8>,
    /// Contributions to the oldest call, by rank.
    sources: Vec<*const u8>,
}

// SAFETY: the pointers belong to the present reduction, and are dead between two reductions.
unsafe impl Send for ShortCalls {}

impl ShortCalls {
    /// Allocates the mailboxes.
    pub fn allocate(engine: &mut Engine) -> Result<ShortCalls, RunError> {
        let (rank, ranks) = (engine.rank().0, engine.size());
        let most = message_bytes(ranks) as usize;
        let mailboxes = Mailboxes::allocate(engine, most)?;
        let scaled = vec![0; most];
        let (calls, sources) = (VecDeque::new(), Vec::with_capacity(ranks as usize));
        Ok(ShortCalls { mailboxes, rank, ranks, calls, sent: 0, scaled, sources })
    }

    /// Mailbox region.
    pub fn region(&self) -> &Region {
        self.mailboxes.region()
    }

    /// Wait announcements.
    pub fn waits(&self) -> &std::sync::Arc<MailboxWaits> {
        self.mailboxes.waits()
    }

    /// Takes a peer's mailbox.
    pub fn link(&mut self, engine: &Engine, remote: RemoteRegion) -> Result<(), RunError> {
        Ok(self.mailboxes.link(engine, remote)?)
    }

    /// Error for a poisoned group.
    pub fn check(&self) -> Result<(), RunError> {
        Ok(self.mailboxes.check()?)
    }

    /// Number of calls in flight.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Adds a call with this number for which [`is_short`] holds.
    pub fn add(&mut self, number: u64, call: &Call) {
        self.calls.push_back((number, *call));
    }

    /// Sends what has room, and completes the oldest call if the messages are there. Returns the call number.
    #[inline]
    pub fn advance(&mut self) -> Option<u64> {
        if self.calls.is_empty() {
            return None;
        }
        while let Some(&(_, call)) = self.calls.get(self.sent) {
            if !self.send(&call) {
                break;
            }
            self.sent += 1;
        }
        let completed = self.complete();
        self.mailboxes.flush();
        completed
    }

    /// Sends a call's messages, unless a peer has no room.
    fn send(&mut self, call: &Call) -> bool {
        let peers = peers(call, self.rank, self.ranks, true);
        if !peers.clone().all(|peer| self.mailboxes.has_room(Rank(peer))) {
            return false;
        }
        let bytes = call.share_bytes(self.ranks) as usize;
        let is_whole = matches!(
            call.collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. }
        );
        for peer in peers {
            let share = if is_whole { 0 } else { peer };
            self.mailboxes.send(Rank(peer), bytes, |message| {
                // SAFETY: the input is valid by the `Collectives::start` contract.
                unsafe { read_contribution(call, share, message) }
            });
        }
        true
    }

    /// Completes the oldest call if it was sent and all messages to it have arrived.
    fn complete(&mut self) -> Option<u64> {
        let &(number, call) = self.calls.front().filter(|_| self.sent > 0)?;
        let sources = peers(&call, self.rank, self.ranks, false);
        if !sources.clone().all(|peer| self.mailboxes.is_ready(Rank(peer))) {
            return None;
        }
        if call.collective.reduces() {
            self.reduce(&call);
        } else {
            self.gather(&call);
        }
        self.calls.pop_front();
        self.sent -= 1;
        Some(number)
    }

    /// Combines the contributions from all ranks, in rank order, where they lie.
    fn reduce(&mut self, call: &Call) {
        let bytes = call.share_bytes(self.ranks) as usize;
        let own = if call.collective == Collective::ReduceScatter { self.rank } else { 0 };
        let ShortCalls { mailboxes, scaled, sources, .. } = self;
        sources.clear();
        for rank in 0..self.ranks {
            let source = if rank != self.rank {
                mailboxes.message(Rank(rank), bytes).expect("all have arrived").as_ptr()
            } else if call.factor().is_some() {
                // SAFETY: the input is valid by the `Collectives::start` contract.
                unsafe { read_contribution(call, own, &mut scaled[..bytes]) };
                scaled.as_ptr()
            } else {
                call.input.wrapping_add(own as usize * bytes)
            };
            sources.push(source);
        }
        let how = Arithmetic {
            reduction: call.reduction,
            element: call.element,
            factor: None,
            divisor: call.divides().then_some(self.ranks),
        };
        // SAFETY: input and output are valid by the `Collectives::start` contract, and the output is this rank's source
        // or disjoint from it; messages stay until they are freed.
        unsafe { reads::reduce(how, call.output, sources, bytes) };
        for peer in peers(call, self.rank, self.ranks, false) {
            self.mailboxes.free(Rank(peer));
        }
    }

    /// Copies the messages, and the own share, to the output.
    fn gather(&mut self, call: &Call) {
        let bytes = call.share_bytes(self.ranks) as usize;
        let (input, output) = (call.input, call.output);
        let has_shares = call.collective.shares();
        let at = |rank: u32| if has_shares { rank as usize * bytes } else { 0 };
        if peers(call, self.rank, self.ranks, true).next().is_some() {
            let from = if call.collective == Collective::AllToAll { at(self.rank) } else { 0 };
            // SAFETY: input and output are valid for as many shares, by the `Collectives::start` contract; they may
            // overlap.
            unsafe { weft_fabric::copy_bytes(input.add(from), output.add(at(self.rank)), bytes) };
        }
        for peer in peers(call, self.rank, self.ranks, false) {
            let message = self.mailboxes.message(Rank(peer), bytes).expect("all have arrived");
            // SAFETY: as above; the message does not lie in the caller's memory.
            unsafe { weft_fabric::copy_bytes(message.as_ptr(), output.add(at(peer)), bytes) };
            self.mailboxes.free(Rank(peer));
        }
    }

    /// Peers that block the oldest call, if the call number is at most `number`.
    pub fn missing(&self, number: u64) -> Vec<MissingPeer> {
        let Some(&(oldest, call)) = self.calls.front() else { return Vec::new() };
        if oldest > number {
            return Vec::new();
        }
        let has_sent = self.sent > 0;
        let blocks = |peer: &u32| match has_sent {
            true => !self.mailboxes.is_ready(Rank(*peer)),
            false => !self.mailboxes.has_room(Rank(*peer)),
        };
        let missing = |peer| {
            let seen = self.mailboxes.received(Rank(peer));
            MissingPeer { rank: Rank(peer), expected: seen + 1, seen }
        };
        peers(&call, self.rank, self.ranks, !has_sent).filter(blocks).map(missing).collect()
    }
}

/// Peers to which a rank sends a message in a call, or from which it gets one. The order starts at the rank's
/// successor, so that the ranks start with different peers.
fn peers(call: &Call, rank: u32, ranks: u32, sends: bool) -> impl Iterator<Item = u32> + Clone {
    let takes_part = move |peer: u32, root: Option<u32>| match root {
        None => true,
        Some(root) => root == if sends { rank } else { peer },
    };
    let root = match call.collective {
        Collective::Broadcast { root } => Some(root.0),
        _ => None,
    };
    (1..ranks).map(move |i| (rank + i) % ranks).filter(move |peer| takes_part(*peer, root))
}

/// Reads this rank's contribution in input share `share`, scaled if the call scales.
///
/// # Safety
/// The call's input is valid.
unsafe fn read_contribution(call: &Call, share: u32, to: &mut [u8]) {
    // SAFETY: the share is inside the input.
    unsafe {
        let from = call.input.add(share as usize * to.len());
        match call.factor() {
            None => weft_fabric::copy_bytes(from, to.as_mut_ptr(), to.len()),
            Some(factor) => {
                let count = to.len() / call.element.bytes();
                reduction::scale(call.element, to.as_mut_ptr(), from, count, factor);
            }
        }
    }
}
