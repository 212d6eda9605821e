//! Combine: replies are sent to the row sources, and summed there.

use super::Twin;
use super::arrays::CombineArrays;
use super::call::{GroupFailed, TwinCall};
use super::launch::TwinLaunch;
use super::rows::RowKind;
use crate::device::abi::record::{MoeCode, MoePhase};
use crate::device::options::types::DeviceLayout;
use crate::device::shape::channel_layout::{DeviceArea, PlanWord, RECORD};
use crate::elements::dtype::weighted_sum;
use crate::shape::config::Weighting;
use weft_gpu::raw_memory::RawMemory;

/// Rank signal in [`DeviceArea::Signals`]: replies follow.
const REPLIES: u32 = 0;
/// Signal for a release without replies. A greater value is the room that the rank needed.
const RELEASED: u32 = 1;

impl Twin {
    pub(super) fn send_replies(
        &self,
        at: TwinLaunch,
        outputs: RawMemory<'_>,
        release: bool,
    ) -> Result<(), GroupFailed> {
        let call = self.begin(at, MoePhase::CombineSend)?;
        let ranks = self.shape.config().ranks;
        let status = match (release, call.lacking()) {
            (true, _) => RELEASED,
            (false, 0) => REPLIES,
            (false, needed) => needed,
        };
        for rank in 0..ranks {
            self.jitter.point();
            call.send_packet(DeviceArea::Signals, self.rank().into(), rank, status);
        }
        if status == REPLIES {
            call.reply(outputs);
        } else if !release && call.plan_word(PlanWord::Needed) == 0 {
            // Dispatch has recorded that this rank lacks room.
            let rows = call.positions.into();
            call.notice(MoeCode::Capacity, self.rank(), 0, status.into(), rows);
        }
        call.end();
        Ok(())
    }

    pub(super) fn receive_replies(
        &self,
        at: TwinLaunch,
        outputs: &CombineArrays<'_>,
        release: bool,
    ) -> Result<(), GroupFailed> {
        let call = self.begin(at, MoePhase::CombineRecv)?;
        let lacks_room = call.receive_signals(release)?;
        match (release, lacks_room) {
            (true, _) => {}
            (false, true) => outputs.combined.fill_all(0xFF),
            (false, false) => call.sum(outputs)?,
        }
        call.end();
        Ok(())
    }
}

impl TwinCall<'_> {
    /// Room that this rank lacks, for received rows or in the outputs passed to combine; 0 if none.
    fn lacking(&self) -> u32 {
        match self.plan_word(PlanWord::Needed) {
            0 => Some(self.plan_word(PlanWord::Used))
                .filter(|used| *used > self.positions)
                .unwrap_or(0),
            needed => needed,
        }
    }

    /// Row count from `source`.
    pub(super) fn received(&self, source: u32) -> u32 {
        let (plan, at) = self.plan_area(DeviceArea::Received);
        u32::from_le_bytes(plan.element(at, source.into()))
    }

    /// Writes the reply for each received row to the row's source.
    fn reply(&self, outputs: RawMemory<'_>) {
        let shape = &self.twin.shape;
        let config = shape.config();
        let bytes = shape.expert_output_bytes() as usize;
        let mut inputs = vec![0; config.top_k as usize * bytes];
        let mut reply = vec![0; shape.reply_bytes() as usize];
        let mut weights = Vec::with_capacity(config.top_k as usize);
        let mut row = 0;
        for source in 0..config.ranks {
            for slot in 0..self.received(source).min(config.max_tokens) {
                weights.clear();
                let dense = config.layout == DeviceLayout::Dense;
                let of_row = dense.then_some((row, 1.0)).into_iter();
                let entries = (!dense).then(|| self.entries(source, slot)).into_iter().flatten();
                row += 1;
                for (position, weight) in of_row.chain(entries) {
                    let input = &mut inputs[weights.len() * bytes..][..bytes];
                    outputs.read(position * bytes as u64, input);
                    weights.push(match config.weighting {
                        Weighting::AtCombine => weight,
                        Weighting::AtExpert => 1.0,
                    });
                }
                let terms = weights.iter().copied().zip(inputs.chunks_exact(bytes));
                weighted_sum(config.combine_dtype, config.reply_dtype, terms, &mut reply);
                self.send_row(RowKind::Reply, source, slot, &reply);
            }
        }
    }

    /// A received row's positions, with the router's weights, in top-k order.
    pub(super) fn entries(&self, source: u32, slot: u32) -> impl Iterator<Item = (u64, f32)> + '_ {
        let shape = &self.twin.shape;
        let config = shape.config();
        let row = u64::from(source) * u64::from(config.max_tokens) + u64::from(slot);
        let (plan, at) = self.plan_area(DeviceArea::Entries);
        let top_k = u64::from(config.top_k);
        (row * top_k..(row + 1) * top_k).map_while(move |entry| {
            let entry: [u8; RECORD as usize] = plan.element(at, entry);
            let [p0, p1, p2, p3, weight @ ..] = entry;
            let position = u64::try_from(i32::from_le_bytes([p0, p1, p2, p3])).ok()?;
            Some((position, f32::from_le_bytes(weight)))
        })
    }

    /// Waits for every rank's signal. Returns true if one of them lacked room.
    fn receive_signals(&self, release: bool) -> Result<bool, GroupFailed> {
        let mut lacks_room = false;
        for peer in 0..self.twin.shape.config().ranks {
            let status = self.wait_packet(DeviceArea::Signals, peer.into(), peer)?;
            match status {
                _ if release => {}
                REPLIES => {}
                RELEASED => {
                    return Err(self.fail(MoeCode::Released.into(), peer, 0, 0, RELEASED.into()));
                }
                needed => {
                    lacks_room = true;
                    if peer != self.twin.rank() {
                        let room = self.twin.shape.room().into();
                        self.notice(MoeCode::Capacity, peer, 0, needed.into(), room);
                    }
                }
            }
        }
        Ok(lacks_room)
    }

    /// Sums each token's replies in rank order, then the arrays to add.
    fn sum(&self, outputs: &CombineArrays<'_>) -> Result<(), GroupFailed> {
        let tokens = self.twin.valid_tokens(outputs.count, outputs.given);
        let shape = &self.twin.shape;
        let config = shape.config();
        let bytes = shape.reply_bytes() as usize;
        let mut replies = vec![0; config.ranks as usize * bytes];
        let mut output = vec![0; shape.output_bytes() as usize];
        let mut sums = vec![0f32; config.hidden as usize];
        let (plan, slots) = self.plan_area(DeviceArea::Slots);
        for token in 0..tokens {
            let mut terms = 0;
            for rank in 0..config.ranks {
                let place = u64::from(token) * u64::from(config.ranks) + u64::from(rank);
                let slot = i32::from_le_bytes(plan.element(slots, place));
                if let Ok(slot) = u32::try_from(slot) {
                    let reply = &mut replies[terms * bytes..][..bytes];
                    self.take_row(RowKind::Reply, rank, slot, reply)?;
                    terms += 1;
                }
            }
            sums.fill(0.0);
            for reply in replies.chunks_exact(bytes).take(terms) {
                config.reply_dtype.accumulate(&mut sums, reply, 1.0);
            }
            let at = u64::from(token) * output.len() as u64;
            for rows in outputs.added.iter().filter(|rows| rows.is_given()) {
                rows.read(at, &mut output);
                config.output_dtype.accumulate(&mut sums, &output, 1.0);
            }
            config.output_dtype.store(&sums, &mut output);
            outputs.combined.write(at, &output);
        }
        Ok(())
    }
}
