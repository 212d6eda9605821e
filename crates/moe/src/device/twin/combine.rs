//! Combine: answers leave for the sources of their rows, and are added up there.

use super::Twin;
use super::call::{Call, Dead};
use super::region::Region;
use super::rows::Kind;
use crate::device::areas::{DeviceArea, RECORD};
use crate::device::record::{Code, Phase};
use crate::dtype::weighted_sum;
use crate::shape::Weighting;

/// A rank's signal in [`DeviceArea::Signals`]: answers follow.
const ANSWERS: u32 = 0;
/// Its rows are released without answers. Any greater number is the room that it lacked: what it needed.
const RELEASED: u32 = 1;

impl Twin {
    pub(super) fn send_answers(
        &self,
        channel: u32,
        outputs: Region<'_>,
        release: bool,
    ) -> Result<(), Dead> {
        let call = self.begin(channel, Phase::CombineSend)?;
        let ranks = self.shape.config().ranks;
        let status = match (release, call.received(ranks)) {
            (true, _) => RELEASED,
            (false, 0) => ANSWERS,
            (false, needed) => needed,
        };
        for rank in 0..ranks {
            self.jitter();
            call.send_packet(DeviceArea::Signals, self.rank().into(), rank, status);
        }
        if status == ANSWERS {
            call.answer(outputs);
        }
        call.end();
        Ok(())
    }

    pub(super) fn receive_answers(
        &self,
        channel: u32,
        combined: Region<'_>,
        (count, given): (Region<'_>, u32),
        release: bool,
    ) -> Result<(), Dead> {
        let call = self.begin(channel, Phase::CombineRecv)?;
        let spoilt = call.receive_signals(release)?;
        match (release, spoilt) {
            (true, _) => {}
            (false, true) => combined.fill_all(0xFF),
            (false, false) => call.sum(combined, self.existing(count, given))?,
        }
        call.end();
        Ok(())
    }
}

impl Call<'_> {
    /// Rows of `source`, or after the last source the room that this rank lacked: 0 if it did not.
    fn received(&self, source: u32) -> u32 {
        let at = self.twin.shape.at(self.channel, DeviceArea::Received);
        u32::from_le_bytes(self.twin.own().element(at, source.into()))
    }

    /// Writes the answer for every row received, to its source.
    fn answer(&self, outputs: Region<'_>) {
        let shape = &self.twin.shape;
        let config = shape.config();
        let bytes = shape.expert_output_bytes() as usize;
        let mut inputs = vec![0; config.top_k as usize * bytes];
        let mut answer = vec![0; shape.answer_bytes() as usize];
        let mut weights = Vec::with_capacity(config.top_k as usize);
        for source in 0..config.ranks {
            for slot in 0..self.received(source).min(config.max_tokens) {
                weights.clear();
                for (position, weight) in self.entries(source, slot) {
                    let input = &mut inputs[weights.len() * bytes..][..bytes];
                    outputs.read(position * bytes as u64, input);
                    weights.push(match config.weighting {
                        Weighting::AtCombine => weight,
                        Weighting::AtExpert => 1.0,
                    });
                }
                let terms = weights.iter().copied().zip(inputs.chunks_exact(bytes));
                weighted_sum(config.combine_dtype, config.answer_dtype, terms, &mut answer);
                self.send_row(Kind::Answer, source, slot, &answer);
            }
        }
    }

    /// The positions of a received row, with the router's weights, in top-k order.
    fn entries(&self, source: u32, slot: u32) -> impl Iterator<Item = (u64, f32)> + '_ {
        let shape = &self.twin.shape;
        let config = shape.config();
        let row = u64::from(source) * u64::from(config.max_tokens) + u64::from(slot);
        let at = shape.at(self.channel, DeviceArea::Entries);
        let top_k = u64::from(config.top_k);
        (row * top_k..(row + 1) * top_k).map_while(move |entry| {
            let entry: [u8; RECORD as usize] = self.twin.own().element(at, entry);
            let [p0, p1, p2, p3, weight @ ..] = entry;
            let position = u64::try_from(i32::from_le_bytes([p0, p1, p2, p3])).ok()?;
            Some((position, f32::from_le_bytes(weight)))
        })
    }

    /// Waits for the signal of every rank. True if one of them lacked room.
    fn receive_signals(&self, release: bool) -> Result<bool, Dead> {
        let mut spoilt = false;
        for peer in 0..self.twin.shape.config().ranks {
            let status = self.wait_packet(DeviceArea::Signals, peer.into(), peer)?;
            match status {
                _ if release => {}
                ANSWERS => {}
                RELEASED => return Err(self.fail(Code::Released, peer, 0, 0, RELEASED.into())),
                needed => {
                    spoilt = true;
                    if peer != self.twin.rank() {
                        let room = self.twin.shape.room().into();
                        self.notice(Code::Capacity, peer, 0, needed.into(), room);
                    }
                }
            }
        }
        Ok(spoilt)
    }

    /// Adds up the answers of each token in rank order.
    fn sum(&self, combined: Region<'_>, tokens: u32) -> Result<(), Dead> {
        let shape = &self.twin.shape;
        let config = shape.config();
        let bytes = shape.answer_bytes() as usize;
        let mut answers = vec![0; config.ranks as usize * bytes];
        let mut output = vec![0; shape.output_bytes() as usize];
        let slots = shape.at(self.channel, DeviceArea::Slots);
        for token in 0..tokens {
            let mut terms = 0;
            for rank in 0..config.ranks {
                let place = u64::from(token) * u64::from(config.ranks) + u64::from(rank);
                let slot = i32::from_le_bytes(self.twin.own().element(slots, place));
                if let Ok(slot) = u32::try_from(slot) {
                    let answer = &mut answers[terms * bytes..][..bytes];
                    self.take_row(Kind::Answer, rank, slot, answer)?;
                    terms += 1;
                }
            }
            let terms = answers.chunks_exact(bytes).take(terms).map(|answer| (1.0, answer));
            weighted_sum(config.answer_dtype, config.output_dtype, terms, &mut output);
            combined.write(u64::from(token) * output.len() as u64, &output);
        }
        Ok(())
    }
}
