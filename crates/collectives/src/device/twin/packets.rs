//! Calls by packets: a unit travels as four words, each beside the epoch.
//!
//! Memory order: relaxed 8-byte stores and loads, written and read whole. The protocol is the same as in
//! `kernels/collectives/packets.cuh`.

use super::super::layout::UNIT;
use super::super::plan::Kernel;
use super::{AwaitedValue, Block, Failed, Phase};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::Backoff;

/// Bytes per unit, as an index.
const UNIT_BYTES: usize = UNIT as usize;

/// A block's message part, in units.
struct Part {
    first: u64,
    count: u32,
}

impl Part {
    /// Offset in the message.
    fn begin(&self) -> u64 {
        self.first * UNIT
    }

    /// Bytes, including those behind the message end.
    fn bytes(&self) -> usize {
        self.count as usize * UNIT_BYTES
    }
}

impl Block<'_> {
    pub(super) fn run_packets(&self) -> Result<(), Failed> {
        let at = self.layout().epoch(self.number);
        // Epochs wrap around to 2, which follows an odd one.
        let epoch = match self.state(at).wrapping_add(1) {
            0 => 2,
            epoch => epoch,
        };
        self.send_packets(epoch);
        let done = match self.call.plan.kernel {
            Kernel::ReducePackets => self.reduce_packets(epoch),
            _ => self.receive_packets(epoch),
        };
        let done = done.and_then(|()| self.wait_credits(epoch));
        self.set_state(at, epoch);
        done
    }

    fn part(&self, bytes: u64) -> Part {
        let units = bytes.div_ceil(UNIT);
        let each = u64::from(self.call.plan.units_per_block);
        let first = (u64::from(self.number) * each).min(units);
        // No more than `units_per_block`.
        Part { first, count: each.min(units - first) as u32 }
    }

    /// Unit at `rank`, and its offset there.
    fn unit(&self, rank: u32, source: u32, epoch: u32, slot: u32) -> (RawMemory<'_>, u64) {
        (self.memory(rank), self.layout().unit(self.number, source, epoch, slot))
    }

    /// Sends the parts for all messages, or the credits for messages without bytes in this block.
    fn send_packets(&self, epoch: u32) {
        for peer in (1..self.ranks()).map(|step| self.peer(step)) {
            let from = self.sent_to(peer);
            let part = self.part(from.bytes);
            let bytes = from.load(part.begin(), part.bytes());
            for (slot, unit) in (0..).zip(bytes.as_chunks::<UNIT_BYTES>().0) {
                self.send_unit(peer, epoch, slot, unit);
            }
            if part.count == 0 {
                self.send_unit(peer, epoch, self.layout().slots, &[0; UNIT_BYTES]);
            }
        }
    }

    fn send_unit(&self, peer: u32, epoch: u32, slot: u32, unit: &[u8; UNIT_BYTES]) {
        self.jitter();
        let (memory, at) = self.unit(peer, self.rank(), epoch, slot);
        for (word, value) in (0..).zip(unit.as_chunks::<4>().0) {
            let packet = u64::from(epoch) << 32 | u64::from(u32::from_ne_bytes(*value));
            memory.packet(at + 8 * word).store(packet, Relaxed);
        }
    }

    /// Waits for a unit with `epoch`.
    fn wait_unit(&self, peer: u32, epoch: u32, slot: u32) -> Result<[u8; UNIT_BYTES], Failed> {
        let (memory, at) = self.unit(self.rank(), peer, epoch, slot);
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        loop {
            self.jitter();
            let packets = [0, 8, 16, 24].map(|word| memory.packet(at + word).load(Relaxed));
            let missing = packets.iter().map(|packet| (packet >> 32) as u32);
            let Some(seen) = missing.clone().find(|seen| *seen != epoch) else {
                let mut unit = [0; UNIT_BYTES];
                for (value, packet) in unit.as_chunks_mut::<4>().0.iter_mut().zip(packets) {
                    *value = (packet as u32).to_ne_bytes();
                }
                return Ok(unit);
            };
            let value = AwaitedValue { peer, slot, expected: epoch, seen };
            if self.twin.watch.has_expired(begun, self.record(Phase::Packets, value)) {
                return Err(Failed);
            }
            backoff.pause();
        }
    }

    /// Waits for a message's part.
    fn wait_part(&self, peer: u32, epoch: u32, part: &Part) -> Result<Vec<u8>, Failed> {
        let mut bytes = Vec::with_capacity(part.bytes());
        for slot in 0..part.count {
            bytes.extend(self.wait_unit(peer, epoch, slot)?);
        }
        Ok(bytes)
    }

    /// Waits for credits from peers whose message has no bytes in this block.
    fn wait_credits(&self, epoch: u32) -> Result<(), Failed> {
        for peer in (0..self.ranks()).filter(|peer| *peer != self.rank()) {
            if self.part(self.received_from(peer).bytes).count == 0 {
                self.wait_unit(peer, epoch, self.layout().slots)?;
            }
        }
        Ok(())
    }

    fn receive_packets(&self, epoch: u32) -> Result<(), Failed> {
        let (from, to) = (self.sent_to(self.rank()), self.received_from(self.rank()));
        if from.begin != to.begin {
            let part = self.part(to.bytes);
            to.store(part.begin(), &from.load(part.begin(), part.bytes()));
        }
        for peer in (1..self.ranks()).rev().map(|step| self.peer(step)) {
            let out = self.received_from(peer);
            let part = self.part(out.bytes);
            out.store(part.begin(), &self.wait_part(peer, epoch, &part)?);
        }
        Ok(())
    }

    /// Reduces the contributions from all ranks, in rank order.
    fn reduce_packets(&self, epoch: u32) -> Result<(), Failed> {
        let (mine, out) = (self.sent_to(self.rank()), self.received_from(self.rank()));
        let part = self.part(out.bytes);
        if part.count == 0 {
            return Ok(());
        }
        let contribution = |source| match source == self.rank() {
            true => Ok(mine.load(part.begin(), part.bytes())),
            false => self.wait_part(source, epoch, &part),
        };
        let contributions = (0..self.ranks()).map(contribution).collect::<Result<Vec<_>, _>>()?;
        out.store(part.begin(), &self.call.reduce(&contributions));
        Ok(())
    }
}
