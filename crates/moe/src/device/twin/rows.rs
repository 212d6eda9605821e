//! Row transfer: written to a slot at a peer, awaited at the receiver. Either a row and then a flag, or
//! packets, each 32-bit word beside an epoch.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::call::{GroupFailed, TwinCall};
use super::packet::{open, seal};
use crate::device::options::types::TransferPath;
use crate::device::shape::channel_layout::DeviceArea;

/// Row kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowKind {
    /// Tokens with scales and metadata.
    Token,
    /// Replies.
    Reply,
}

impl TwinCall<'_> {
    /// Offsets of row `slot` from `from`, and its flag, in the receiver's heap.
    fn places(&self, kind: RowKind, from: u32, slot: u32) -> (u64, u64) {
        let (shape, channel) = (&self.twin.shape, self.channel);
        let row = u64::from(from) * u64::from(shape.config().max_tokens) + u64::from(slot);
        let (rows, flags, stride) = match kind {
            RowKind::Token => {
                (DeviceArea::Rows, DeviceArea::RowFlags, shape.channel_layout().row_stride)
            }
            RowKind::Reply => {
                (DeviceArea::Replies, DeviceArea::ReplyFlags, shape.channel_layout().reply_stride)
            }
        };
        (shape.at(channel, rows) + row * stride, shape.at(channel, flags) + 4 * row)
    }

    /// Writes a row to `to`, in a slot that only this rank uses.
    ///
    /// Memory order: the bytes, then the flag with release; a packet is one store.
    pub(super) fn send_row(&self, kind: RowKind, to: u32, slot: u32, row: &[u8]) {
        self.twin.jitter.point();
        let (at, flag) = self.places(kind, self.twin.rank(), slot);
        let heap = self.twin.heap(to);
        if self.twin.shape.path() == TransferPath::Packets {
            for (place, word) in (0..).zip(row.as_chunks::<4>().0) {
                let packet = seal(u32::from_le_bytes(*word), self.epoch);
                heap.packet(at + 8 * place).store(packet, Relaxed);
            }
        } else {
            heap.write(at, row);
            self.twin.jitter.point();
            heap.word(flag).store(self.epoch, Release);
        }
    }

    /// Waits for a row from `from` and reads it.
    ///
    /// Memory order: the flag with acquire, then the bytes; a packet is one load.
    pub(super) fn take_row(
        &self,
        kind: RowKind,
        from: u32,
        slot: u32,
        row: &mut [u8],
    ) -> Result<(), GroupFailed> {
        let (at, flag) = self.places(kind, from, slot);
        let heap = self.twin.own();
        if self.twin.shape.path() == TransferPath::Packets {
            for (place, word) in (0..).zip(row.as_chunks_mut::<4>().0) {
                let packet = heap.packet(at + 8 * place);
                let value = self.wait(from, slot, || open(packet.load(Relaxed), self.epoch))?;
                *word = value.to_le_bytes();
            }
        } else {
            let flag = heap.word(flag);
            self.wait(from, slot, || match flag.load(Acquire) {
                epoch if epoch == self.epoch => Ok(()),
                seen => Err(seen),
            })?;
            heap.read(at, row);
        }
        Ok(())
    }
}
