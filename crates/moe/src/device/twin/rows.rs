//! Rows on their way: written to a slot at a peer, waited for here. Either a row and then its flag, or
//! packets, each word beside its epoch.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::call::{Call, Dead, open, seal};
use crate::device::areas::DeviceArea;
use crate::device::config::Path;

/// The two kinds of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Tokens with their scales and metadata.
    Token,
    /// Answers.
    Answer,
}

impl Call<'_> {
    /// Where row `slot` of `from` lies in the heap of the rank it goes to, and where its flag.
    fn places(&self, kind: Kind, from: u32, slot: u32) -> (u64, u64) {
        let (shape, channel) = (&self.twin.shape, self.channel);
        let row = u64::from(from) * u64::from(shape.config().max_tokens) + u64::from(slot);
        let (rows, flags, stride) = match kind {
            Kind::Token => (DeviceArea::Rows, DeviceArea::RowFlags, shape.areas().row_stride),
            Kind::Answer => {
                (DeviceArea::Answers, DeviceArea::AnswerFlags, shape.areas().answer_stride)
            }
        };
        (shape.at(channel, rows) + row * stride, shape.at(channel, flags) + 4 * row)
    }

    /// Writes a row to `to`, in a slot that belongs to this rank.
    ///
    /// Memory order: the bytes, then the flag with release; a packet is one store.
    pub(super) fn send_row(&self, kind: Kind, to: u32, slot: u32, row: &[u8]) {
        self.twin.jitter();
        let (at, flag) = self.places(kind, self.twin.rank(), slot);
        let heap = self.twin.heap(to);
        if self.twin.shape.path() == Path::Packets {
            for (place, word) in (0..).zip(row.as_chunks::<4>().0) {
                let packet = seal(u32::from_le_bytes(*word), self.epoch);
                heap.packet(at + 8 * place).store(packet, Relaxed);
            }
        } else {
            heap.write(at, row);
            self.twin.jitter();
            heap.word(flag).store(self.epoch, Release);
        }
    }

    /// Waits for a row of `from` and reads it.
    ///
    /// Memory order: the flag with acquire, then the bytes; a packet is one load.
    pub(super) fn take_row(
        &self,
        kind: Kind,
        from: u32,
        slot: u32,
        row: &mut [u8],
    ) -> Result<(), Dead> {
        let (at, flag) = self.places(kind, from, slot);
        let heap = self.twin.own();
        if self.twin.shape.path() == Path::Packets {
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
