//! CPU twin for the kernels: one rank's side of the protocol, over the same memory, with the same memory orders on
//! atomics.
//!
//! Blocks in a launch are independent channels, so that a call can run them one after another on the calling thread.
//!
//! - `packets.rs`: calls by packets; `chunks.rs`: calls by chunks; `direct.rs`: direct calls
//! - `transfers.rs`: sends and receives
//! - `user_bytes.rs`: user tensors

mod chunks;
mod direct;
mod packets;
#[cfg(test)]
mod tests;
mod transfers;
mod user_bytes;

use super::arguments::TensorsOfRanks;
use super::family::FAMILY;
use super::layout::Layout;
use super::plan::{Kernel, LaunchPlan, Transport};
use crate::reduction::{Element, Reduction, average_all, combine_all};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use user_bytes::UserBytes;
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::{Jitter, TwinWatch};
use weft_gpu::{Code, Record};

/// Kernel twin for one rank. Calls run on the calling thread, one at a time, and return nothing: as on a device, errors
/// go to the record.
#[derive(Debug)]
pub(super) struct Twin {
    layout: Layout,
    rank: u32,
    peers: Vec<u64>,
    watch: TwinWatch,
    jitter: Jitter,
}

/// Twin call.
#[derive(Clone, Copy, Debug)]
pub(super) struct TwinCall<'a> {
    /// Launch plan.
    pub plan: &'a LaunchPlan,
    /// Tensors on all ranks, for a direct call.
    pub tensors: Option<&'a TensorsOfRanks>,
    /// Input address.
    pub input: u64,
    /// Output address.
    pub output: u64,
    /// Bytes per element.
    pub element_bytes: u64,
    /// Arithmetic for a plan that reduces.
    pub reduction: Option<(Reduction, Element)>,
    /// Rank count for an average, or 0.
    pub divisor: u32,
}

/// Failed call: the domain is dead and has a record, or the collectives are closed.
#[derive(Debug)]
struct Failed;

/// Phases in the order that the family defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Packets,
    Contributions,
    Results,
    Entry,
    Exit,
    Send,
    Receive,
}

impl Twin {
    /// Creates the twin for `rank`: all ranks' memory as mapped on this rank, and the addresses for the domain table,
    /// both records and the abort word.
    ///
    /// # Panics
    /// If a rank's memory is missing, or an address is not a multiple of 8.
    ///
    /// # Safety
    /// While the value is in use: each address in `peers` points to [`Layout::bytes`] bytes, initially zero, that only
    /// twins with the same layout access; `table` points to a domain table, which this rank's twins share; `record`
    /// points to 128 bytes, the fatal record and the notice, and `abort` to 4 bytes, and while a call runs they are
    /// accessed only as atomics. Pointers to all this memory have been exposed.
    pub unsafe fn new(
        layout: Layout,
        rank: u32,
        peers: Vec<u64>,
        table: u64,
        record: u64,
        abort: u64,
    ) -> Twin {
        assert_eq!(peers.len(), layout.ranks as usize, "every rank has memory");
        assert!(peers.iter().all(|peer| peer.is_multiple_of(8)), "addresses are aligned");
        // SAFETY: the caller's contract.
        let watch = unsafe { TwinWatch::new(table, record, abort) };
        Twin { layout, rank, peers, watch, jitter: Jitter::default() }
    }

    /// Runs a call. If it fails, all output bytes become 0xFF, except for bytes in a direct call that are input too.
    ///
    /// # Panics
    /// If the plan reduces and `call` has no arithmetic, or messages contain partial elements.
    ///
    /// # Safety
    /// The plan was made for this layout and this rank. The input is readable and the output writable for the plan's
    /// message lengths, at any alignment; pointers to both have been exposed, and other threads do not access the
    /// output, or write the input, during the call. The two are disjoint, or each message that overlaps the output is
    /// at this rank's own part, or in an all-reduce at the same place. In a direct call the same holds for the tensors
    /// on all ranks, which peer twins access from entry to exit.
    pub unsafe fn run(&self, call: &TwinCall<'_>) {
        let whole = |bytes: u64| bytes.is_multiple_of(call.element_bytes);
        let all_whole = |message: &super::message::Message| {
            whole(message.send_bytes) && whole(message.receive_bytes)
        };
        assert!(call.plan.messages.iter().all(all_whole), "messages have whole elements");
        let entered = Cell::new(false);
        let done = (0..call.plan.grid).try_for_each(|number| {
            let block = Block { twin: self, call, number };
            block.begin()?;
            match call.plan.kernel.transport() {
                Transport::Packets => block.run_packets(),
                Transport::Chunks => block.run_chunks(),
                Transport::Direct => block.run_direct(&entered),
            }
        });
        if done.is_err() {
            let block = Block { twin: self, call, number: 0 };
            // Peers in a direct call may still read bytes that are input too.
            let keep = match call.plan.kernel {
                Kernel::ExchangeDirect | Kernel::CopyEntry => true,
                Kernel::AllReduceDirect => entered.get(),
                _ => false,
            };
            for rank in 0..self.layout.ranks {
                let (from, out) = (block.sent_to(rank), block.received_from(rank));
                if !(keep && from.begin == out.begin) {
                    out.poison();
                }
            }
        }
    }

    /// Enables thread yields at points within calls, selected by `seed`.
    #[cfg(test)]
    fn set_jitter(&self, seed: u64) {
        self.jitter.set(seed);
    }
}

impl TwinCall<'_> {
    /// Reduction result for contributions with equal length, by rank.
    fn reduce(&self, contributions: &[Vec<u8>]) -> Vec<u8> {
        let (reduction, element) = self.reduction.expect("the plan reduces");
        let length = contributions.iter().map(Vec::len).min().unwrap_or(0);
        let count = length / element.bytes();
        let sources: Vec<*const u8> = contributions.iter().map(|bytes| bytes.as_ptr()).collect();
        let mut result = vec![0; length];
        let target = result.as_mut_ptr();
        match self.divisor {
            // SAFETY: all have at least `length` bytes; the result is new.
            0 => unsafe { combine_all(reduction, element, target, &sources, count) },
            // SAFETY: as above.
            divisor => unsafe { average_all(element, target, &sources, count, divisor) },
        }
        result
    }
}

/// Block in a call; it exists only during [`Twin::run`].
#[derive(Clone, Copy)]
struct Block<'a> {
    twin: &'a Twin,
    call: &'a TwinCall<'a>,
    number: u32,
}

impl<'a> Block<'a> {
    fn begin(&self) -> Result<(), Failed> {
        let closed = self.own().word(self.layout().closed).load(Acquire) != 0;
        if closed || self.twin.watch.is_dead() { Err(Failed) } else { Ok(()) }
    }

    fn layout(&self) -> &'a Layout {
        &self.twin.layout
    }

    fn ranks(&self) -> u32 {
        self.twin.layout.ranks
    }

    fn rank(&self) -> u32 {
        self.twin.rank
    }

    /// A rank's memory.
    fn memory(&self, rank: u32) -> RawMemory<'a> {
        // SAFETY: `Twin::new` requires this many bytes on every rank; the credits exclude races.
        unsafe { RawMemory::new(self.twin.peers[rank as usize], self.twin.layout.bytes) }
    }

    fn own(&self) -> RawMemory<'a> {
        self.memory(self.rank())
    }

    /// State word for this block on this rank; only this rank accesses it.
    fn state(&self, at: u64) -> u32 {
        self.own().word(at).load(Relaxed)
    }

    fn set_state(&self, at: u64, value: u32) {
        self.own().word(at).store(value, Relaxed);
    }

    /// Peer at a step from 1 on; this rank at step 0. Each rank starts with its successor, so that they do not all
    /// write to one peer.
    fn peer(&self, step: u32) -> u32 {
        (self.rank() + step) % self.ranks()
    }

    /// Bytes that this rank sends to a rank.
    fn sent_to(&self, rank: u32) -> UserBytes<'a> {
        let message = &self.call.plan.messages[rank as usize];
        let begin = self.call.input.wrapping_add(message.send_at);
        // SAFETY: `Twin::run` requires it.
        unsafe { UserBytes::new(begin, message.send_bytes) }
    }

    /// Output bytes from a rank.
    fn received_from(&self, rank: u32) -> UserBytes<'a> {
        let message = &self.call.plan.messages[rank as usize];
        let begin = self.call.output.wrapping_add(message.receive_at);
        // SAFETY: `Twin::run` requires it.
        unsafe { UserBytes::new(begin, message.receive_bytes) }
    }

    fn jitter(&self) {
        self.twin.jitter.point();
    }

    /// Record for a failed wait.
    fn record(&self, phase: Phase, wait: AwaitedValue) -> impl FnOnce(Code) -> Record {
        let AwaitedValue { peer, slot, expected, seen } = wait;
        let (rank, channel, peer) = (self.rank(), self.number, Some(peer));
        let phase = FAMILY.first_phase + phase as u32;
        let (expected, seen) = (expected.into(), seen.into());
        move |code| Record { code, rank, phase, peer, channel, slot, expected, seen }
    }
}

/// True if a counter has reached `expected`; counters wrap around.
fn is_reached(seen: u32, expected: u32) -> bool {
    seen.wrapping_sub(expected).cast_signed() >= 0
}

/// Value that a wait expects, and the one that it has seen.
#[derive(Clone, Copy)]
struct AwaitedValue {
    peer: u32,
    slot: u32,
    expected: u32,
    seen: u32,
}
