//! Sends and receives: chunk rings for each ordered rank pair and lane.
//!
//! Flows, each with the transfers for one direction and peer in one lane, take turns on one thread, for all blocks
//! together: each moves what is ready. The protocol is the same as in `kernels/transfers.cu`.
//!
//! Memory order: the chunk bytes and headers, then the arrival flag with release; the flag with acquire, then the
//! bytes. The receiver reads chunks, then raises the credit with release; the sender reads it with acquire before it
//! overwrites them.

use super::super::layout::Layout;
use super::super::transfers::{Flow, Transfer, TransferPlan, flows};
use super::user_bytes::UserBytes;
use super::{Failed, Phase, Twin, is_reached};
use crate::device::family::{FAMILY, OTHER_LENGTH};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::Backoff;
use weft_gpu::{Code, Record};

/// A flow and where it stands.
struct Position {
    flow: Flow,
    /// Next chunk in the first transfer, among those in the lane.
    chunk: u32,
    /// Next chunk in the lane, from the construction on.
    sequence: u32,
    /// Block that has it in a kernel.
    block: u32,
}

impl Twin {
    /// Runs a batch with sends and receives. If it fails, all receive bytes are 0xFF.
    ///
    /// # Safety
    /// The plan was made for this layout and this rank. Tensors are readable and receive tensors writable; pointers to
    /// them have been exposed, and other threads do not access receive tensors, or write the others, during the call.
    /// Receive tensors are disjoint from all others.
    pub unsafe fn run_transfers(&self, plan: &TransferPlan) {
        let batch = Batch { twin: self, plan };
        if batch.run().is_err() {
            let received = plan.transfers.iter().filter(|transfer| transfer.receives);
            received.for_each(|transfer| batch.tensor(transfer).poison());
        }
    }
}

/// Batch in progress; it exists only during [`Twin::run_transfers`].
struct Batch<'a> {
    twin: &'a Twin,
    plan: &'a TransferPlan,
}

impl<'a> Batch<'a> {
    fn layout(&self) -> &'a Layout {
        &self.twin.layout
    }

    fn memory(&self, rank: u32) -> RawMemory<'a> {
        // SAFETY: `Twin::new` requires this many bytes on every rank; the credits exclude races.
        unsafe { RawMemory::new(self.twin.peers[rank as usize], self.twin.layout.bytes) }
    }

    fn own(&self) -> RawMemory<'a> {
        self.memory(self.twin.rank)
    }

    fn tensor(&self, transfer: &Transfer) -> UserBytes<'a> {
        // SAFETY: `Twin::run_transfers` requires it.
        unsafe { UserBytes::new(transfer.address, transfer.bytes) }
    }

    fn transfer(&self, position: &Position) -> Transfer {
        self.plan.transfers[position.flow.first]
    }

    fn run(&self) -> Result<(), Failed> {
        let (layout, watch) = (self.layout(), &self.twin.watch);
        if self.own().word(layout.closed).load(Acquire) != 0 || watch.is_dead() {
            return Err(Failed);
        }
        let position = |(number, flow): (u32, Flow)| {
            let Transfer { receives, peer, .. } = self.plan.transfers[flow.first];
            let at = layout.transferred(receives, flow.lane, peer);
            let sequence = self.own().word(at).load(Relaxed);
            Position { flow, chunk: 0, sequence, block: number % self.plan.grid }
        };
        let mut open: Vec<Position> =
            (0..).zip(flows(&self.plan.transfers, layout)).map(position).collect();
        open.retain_mut(|position| self.settle(position));
        let (mut begun, mut backoff) = (Instant::now(), Backoff::default());
        while !open.is_empty() {
            let mut advanced = false;
            let mut failed = None;
            open.retain_mut(|position| {
                self.twin.jitter.point();
                if failed.is_some() || self.twin.jitter.postpones() {
                    return true;
                }
                match self.advance(position) {
                    Ok(moved) => advanced |= moved,
                    Err(error) => failed = Some(error),
                }
                self.settle(position)
            });
            if let Some(error) = failed {
                return Err(error);
            }
            if advanced {
                (begun, backoff) = (Instant::now(), Backoff::default());
            } else if let Some(position) = open.first() {
                let (seen, expected) = self.counts(position);
                let record = |code| self.record(position, code, (expected.into(), seen.into()));
                // A flow that has become ready meanwhile moves in the next turn.
                if !is_reached(seen, expected) && watch.has_expired(begun, record) {
                    return Err(Failed);
                }
                backoff.pause();
            }
        }
        Ok(())
    }

    /// Continues with the next transfer behind the last chunk in one; false, with the lane count stored, if there is
    /// none.
    fn settle(&self, position: &mut Position) -> bool {
        let lane = position.flow.lane;
        let Transfer { receives, peer, .. } = self.transfer(position);
        while self.transfer(position).chunks_in(self.layout(), lane) == position.chunk {
            (position.flow.first, position.chunk) = (position.flow.first + 1, 0);
            if position.flow.first == position.flow.end {
                let at = self.layout().transferred(receives, lane, peer);
                self.own().word(at).store(position.sequence, Relaxed);
                return false;
            }
        }
        true
    }

    /// Counter that a flow waits for, and the value at which the next chunk may move.
    fn counts(&self, position: &Position) -> (u32, u32) {
        let (layout, lane) = (self.layout(), position.flow.lane);
        let Transfer { receives, peer, .. } = self.transfer(position);
        let next = position.sequence.wrapping_add(1);
        let (at, expected) = match receives {
            true => (layout.arrival(lane, peer), next),
            false => (layout.credit(lane, peer), next.wrapping_sub(layout.lane_chunks)),
        };
        (self.own().word(at).load(Acquire), expected)
    }

    /// Moves a flow's ready chunks in the present transfer; false if there are none.
    fn advance(&self, position: &mut Position) -> Result<bool, Failed> {
        let (layout, rank) = (self.layout(), self.twin.rank);
        let (transfer, lane) = (self.transfer(position), position.flow.lane);
        let (seen, expected) = self.counts(position);
        let left = transfer.chunks_in(layout, lane) - position.chunk;
        let ready = match is_reached(seen, expected) {
            true => seen.wrapping_sub(expected) + 1,
            false => return Ok(false),
        };
        let count = ready.min(left).min(layout.lane_chunks / 2);
        let peer = self.memory(transfer.peer);
        for index in 0..count {
            let sequence = position.sequence.wrapping_add(index);
            let (begin, length) = self.part(&transfer, lane, position.chunk + index);
            self.twin.jitter.point();
            if transfer.receives {
                let from = transfer.peer;
                let header = self.own().packet(layout.header(lane, from, sequence));
                let sent = header.load(Relaxed);
                if sent != transfer.bytes {
                    let code = Code::Family(OTHER_LENGTH);
                    let record = self.record(position, code, (transfer.bytes, sent));
                    self.twin.watch.fail(&record);
                    return Err(Failed);
                }
                let mut bytes = vec![0; length];
                self.own().read(layout.lane_chunk(lane, from, sequence), &mut bytes);
                self.tensor(&transfer).store(begin, &bytes);
            } else {
                let bytes = self.tensor(&transfer).load(begin, length);
                peer.write(layout.lane_chunk(lane, rank, sequence), &bytes);
                peer.packet(layout.header(lane, rank, sequence)).store(transfer.bytes, Relaxed);
            }
        }
        position.chunk += count;
        position.sequence = position.sequence.wrapping_add(count);
        self.twin.jitter.point();
        let at = match transfer.receives {
            true => layout.credit(lane, rank),
            false => layout.arrival(lane, rank),
        };
        peer.word(at).store(position.sequence, Release);
        Ok(true)
    }

    /// Begin and length for a lane chunk in its message.
    fn part(&self, transfer: &Transfer, lane: u32, chunk: u32) -> (u64, usize) {
        let (layout, lanes) = (self.layout(), transfer.lanes(self.layout()));
        let number = u64::from(chunk) * u64::from(lanes) + u64::from(lane);
        let begin = number * u64::from(layout.chunk_capacity);
        let length = transfer.bytes.saturating_sub(begin).min(layout.chunk_capacity.into());
        (begin, length as usize)
    }

    fn record(&self, position: &Position, code: Code, (expected, seen): (u64, u64)) -> Record {
        let Transfer { receives, peer, .. } = self.transfer(position);
        let phase = if receives { Phase::Receive } else { Phase::Send };
        let phase = FAMILY.first_phase + phase as u32;
        let (rank, channel, slot) = (self.twin.rank, position.block, position.flow.lane);
        Record { code, rank, phase, peer: Some(peer), channel, slot, expected, seen }
    }
}
