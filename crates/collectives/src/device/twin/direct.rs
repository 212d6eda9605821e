//! Direct calls: tensors in the symmetric heap, which peers write and read themselves.
//!
//! Memory order: a rank's tensors, then its entry with release; the entries from all peers with acquire, then their
//! tensors, then this rank's exit with release; the exits from all peers with acquire. The protocol is the same as in
//! `kernels/collectives/direct.cuh`.

use super::super::family::OTHER_CALL;
use super::super::plan::Kernel;
use super::user_bytes::UserBytes;
use super::{AwaitedValue, Block, Failed, Phase, is_reached};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;
use weft_gpu::Code;
use weft_gpu::twin::Backoff;

impl<'a> Block<'a> {
    /// Sets `entered` once peers may access this rank's tensors.
    pub(super) fn run_direct(&self, entered: &Cell<bool>) -> Result<(), Failed> {
        let at = self.layout().meeting(self.number);
        let before = self.state(at);
        let (entry, exit) = (before.wrapping_add(1), before.wrapping_add(2));
        self.meet(entry, Phase::Entry)?;
        entered.set(true);
        match self.call.plan.kernel {
            Kernel::ReduceDirect | Kernel::AllReduceDirect => self.reduce_direct(),
            _ => self.exchange_direct(),
        }
        self.meet(exit, Phase::Exit)?;
        self.set_state(at, exit);
        Ok(())
    }

    /// Signals all peers, and waits for all peers' signals.
    fn meet(&self, meeting: u32, phase: Phase) -> Result<(), Failed> {
        let digest = self.call.tensors.map_or(0, |tensors| tensors.digest);
        let signal = |source| self.layout().signal(self.number, source);
        for peer in (1..self.ranks()).map(|step| self.peer(step)) {
            self.jitter();
            let value = u64::from(meeting) << 32 | u64::from(digest);
            self.memory(peer).packet(signal(self.rank())).store(value, Release);
        }
        for peer in (1..self.ranks()).map(|step| self.peer(step)) {
            let (begun, mut backoff) = (Instant::now(), Backoff::default());
            loop {
                self.jitter();
                let value = self.own().packet(signal(peer)).load(Acquire);
                let (seen, theirs) = ((value >> 32) as u32, value as u32);
                if is_reached(seen, meeting) {
                    // Behind the exit the peer may have entered the next call.
                    if phase == Phase::Exit || theirs == digest {
                        break;
                    }
                    let value = AwaitedValue { peer, slot: 0, expected: digest, seen: theirs };
                    self.twin.watch.fail(&self.record(phase, value)(Code::Family(OTHER_CALL)));
                    return Err(Failed);
                }
                let value = AwaitedValue { peer, slot: 0, expected: meeting, seen };
                if self.twin.watch.has_expired(begun, self.record(phase, value)) {
                    return Err(Failed);
                }
                backoff.pause();
            }
        }
        Ok(())
    }

    /// This block's chunks in a message of `bytes` bytes: begin and length.
    fn own_chunks(&self, bytes: u64) -> impl Iterator<Item = (u64, usize)> + use<> {
        let chunk = u64::from(self.call.plan.chunk_bytes);
        let (number, grid) = (u64::from(self.number), u64::from(self.call.plan.grid));
        let begins = (number..).step_by(grid as usize).map(move |index| index * chunk);
        let begins = begins.take_while(move |begin| *begin < bytes);
        // A chunk has at most 16 KiB.
        begins.map(move |begin| (begin, chunk.min(bytes - begin) as usize))
    }

    /// Part of a rank's tensor that is at `tensors[rank]`.
    fn at_rank(&self, tensors: &[u64], rank: u32, at: u64, bytes: u64) -> UserBytes<'a> {
        // SAFETY: `Twin::run` requires it; entries and exits exclude races.
        unsafe { UserBytes::new(tensors[rank as usize].wrapping_add(at), bytes) }
    }

    /// Copies messages into the outputs on all ranks.
    fn exchange_direct(&self) {
        let place = self.call.plan.messages[self.rank() as usize].receive_at;
        for step in 0..self.ranks() {
            let peer = self.peer(step);
            let from = self.sent_to(peer);
            let to = match (peer == self.rank(), self.call.tensors) {
                (false, Some(tensors)) => self.at_rank(&tensors.outputs, peer, place, from.bytes),
                _ => self.received_from(self.rank()),
            };
            if from.begin == to.begin {
                continue;
            }
            for (begin, length) in self.own_chunks(from.bytes) {
                self.jitter();
                to.store(begin, &from.load(begin, length));
            }
        }
    }

    /// Reduces this rank's part over all inputs, in rank order; an all-reduce writes the result to all outputs.
    fn reduce_direct(&self) {
        let Some(tensors) = self.call.tensors else { return };
        let message = self.call.plan.messages[self.rank() as usize];
        let bytes = message.send_bytes;
        let inputs = (0..self.ranks())
            .map(|rank| self.at_rank(&tensors.inputs, rank, message.send_at, bytes));
        let inputs: Vec<_> = inputs.collect();
        let everywhere = self.call.plan.kernel == Kernel::AllReduceDirect;
        let outputs: Vec<_> = match everywhere {
            true => (0..self.ranks())
                .map(|rank| self.at_rank(&tensors.outputs, rank, message.receive_at, bytes))
                .collect(),
            false => vec![self.received_from(self.rank())],
        };
        for (begin, length) in self.own_chunks(bytes) {
            self.jitter();
            let contributions: Vec<_> =
                inputs.iter().map(|input| input.load(begin, length)).collect();
            let result = self.call.reduce(&contributions);
            outputs.iter().for_each(|output| output.store(begin, &result));
        }
    }
}
