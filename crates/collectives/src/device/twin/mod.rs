//! CPU twin of the kernels: one rank's side of the protocol, over the same memory, with atomics of the same memory
//! order.
//!
//! Blocks of a launch are independent channels, so a call runs them one after another on the calling thread.
//!
//! - `packets.rs`: calls by packets; `chunks.rs`: calls by chunks; `direct.rs`: direct calls
//! - `transfers.rs`: sends and receives
//! - `user_bytes.rs`: tensors of the user

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
use crate::reduction::{Element, Reduction, combine_all, divide};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use user_bytes::UserBytes;
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::{Jitter, TwinWatch};
use weft_gpu::{Code, Record};

/// Kernels of one rank. Calls run on the calling thread, one at a time, and have no result: as on a device, errors are
/// written to the record.
#[derive(Debug)]
pub(super) struct Twin {
    layout: Layout,
    rank: u32,
    peers: Vec<u64>,
    watch: TwinWatch,
    jitter: Jitter,
}

/// Call of a twin.
#[derive(Clone, Copy, Debug)]
pub(super) struct TwinCall<'a> {
    /// Plan of the launch.
    pub plan: &'a LaunchPlan,
    /// Tensors of all ranks, of a direct call.
    pub tensors: Option<&'a TensorsOfRanks>,
    /// Address of the input.
    pub input: u64,
    /// Address of the output.
    pub output: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Arithmetic of a plan that reduces.
    pub reduction: Option<(Reduction, Element)>,
    /// Number of ranks of an average, or 0.
    pub divisor: u32,
}

/// Failure of a call: the domain is dead, with a record, or the collectives are closed.
#[derive(Debug)]
struct Failed;

/// Phases of the family, in its order.
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
    /// Creates the twin of `rank` over the memory of all ranks, as mapped on this rank, with the addresses of its
    /// domain's table, its two records and its abort word.
    ///
    /// # Panics
    /// If the memory of a rank is missing, or an address is not a multiple of 8.
    ///
    /// # Safety
    /// While the value is in use: each address in `peers` is that of [`Layout::bytes`] bytes, initially zero, that only
    /// twins of the same layout access; `table` is that of a domain's table, which twins of this rank share; `record`
    /// is that of 128 bytes, the fatal record and the notice, and `abort` of 4, which are accessed as atomics alone
    /// while a call runs. Pointers to all of them have been exposed.
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

    /// Runs a call. If it fails, all bytes of the output are 0xFF, but those of a direct call that are an input as well.
    ///
    /// # Panics
    /// If the plan reduces and `call` has no arithmetic, or messages have parts of elements.
    ///
    /// # Safety
    /// The plan is one for the layout and this rank. The input is readable and the output writable, by the lengths of
    /// the plan's messages, at any alignment; pointers to both have been exposed, and other threads do not access the
    /// output, or write the input, during the call. The two are disjoint, or each message that overlaps the output has
    /// the place of this rank's own part, or of an all-reduce the same place. In a direct call the same holds of the
    /// tensors of all ranks, which twins of the peers access from their entry to their exit.
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
            // Peers of a direct call may read what is an input as well.
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
    /// Result of contributions of equal length, by rank.
    fn reduce(&self, contributions: &[Vec<u8>]) -> Vec<u8> {
        let (reduction, element) = self.reduction.expect("the plan reduces");
        let length = contributions.iter().map(Vec::len).min().unwrap_or(0);
        let count = length / element.bytes();
        let sources: Vec<*const u8> = contributions.iter().map(|bytes| bytes.as_ptr()).collect();
        let mut result = vec![0; length];
        let target = result.as_mut_ptr();
        // SAFETY: all have at least `length` bytes; the result is new.
        unsafe { combine_all(reduction, element, target, &sources, count) };
        if self.divisor != 0 {
            // SAFETY: as above, in place.
            unsafe { divide(element, target, target, count, self.divisor) };
        }
        result
    }
}

/// Block of a call. It exists during [`Twin::run`] alone.
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

    /// Memory of a rank.
    fn memory(&self, rank: u32) -> RawMemory<'a> {
        // SAFETY: this many bytes of every rank are part of the contract of `Twin::new`; the credits exclude races.
        unsafe { RawMemory::new(self.twin.peers[rank as usize], self.twin.layout.bytes) }
    }

    fn own(&self) -> RawMemory<'a> {
        self.memory(self.rank())
    }

    /// Word of this block's state on this rank, accessed by this rank alone.
    fn state(&self, at: u64) -> u32 {
        self.own().word(at).load(Relaxed)
    }

    fn set_state(&self, at: u64, value: u32) {
        self.own().word(at).store(value, Relaxed);
    }

    /// Peer of a step from 1 on; this rank at step 0. Ranks start behind themselves, so that not all of them write
    /// to one.
    fn peer(&self, step: u32) -> u32 {
        (self.rank() + step) % self.ranks()
    }

    /// Bytes that this rank sends to a rank.
    fn sent_to(&self, rank: u32) -> UserBytes<'a> {
        let message = &self.call.plan.messages[rank as usize];
        let begin = self.call.input.wrapping_add(message.send_at);
        // SAFETY: part of the contract of `Twin::run`.
        unsafe { UserBytes::new(begin, message.send_bytes) }
    }

    /// Bytes of the output from a rank.
    fn received_from(&self, rank: u32) -> UserBytes<'a> {
        let message = &self.call.plan.messages[rank as usize];
        let begin = self.call.output.wrapping_add(message.receive_at);
        // SAFETY: part of the contract of `Twin::run`.
        unsafe { UserBytes::new(begin, message.receive_bytes) }
    }

    fn jitter(&self) {
        self.twin.jitter.point();
    }

    /// Record of a failed wait.
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
