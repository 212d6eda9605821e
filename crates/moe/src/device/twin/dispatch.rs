//! Dispatch: rows and counts leave, and what arrives is laid out by expert.

use super::Twin;
use super::call::{Call, Dead};
use super::cast;
use super::plan::Plan;
use super::region::Region;
use super::rows::Kind;
use crate::device::areas::{DeviceArea, RECORD};
use crate::device::config::DeviceLayout;
use crate::device::record::{Code, Phase};

/// In a row's metadata, a slot that names no expert.
const NO_EXPERT: u16 = 0xFFFF;

/// The arrays of dispatch send.
pub(super) struct Inputs<'a> {
    pub(super) tokens: Region<'a>,
    pub(super) scales: Region<'a>,
    pub(super) ids: Region<'a>,
    pub(super) weights: Region<'a>,
    pub(super) count: Region<'a>,
    pub(super) given: u32,
}

/// The arrays of dispatch receive.
pub(super) struct Outputs<'a> {
    pub(super) tokens: Region<'a>,
    pub(super) scales: Region<'a>,
    pub(super) counts: Region<'a>,
    pub(super) offsets: Region<'a>,
    pub(super) rows: Region<'a>,
    pub(super) weights: Region<'a>,
}

impl Outputs<'_> {
    /// Nobody takes these for results.
    pub(super) fn poison(&self) {
        for array in [&self.tokens, &self.scales, &self.rows, &self.weights] {
            array.fill_all(0xFF);
        }
        self.clear();
    }

    fn clear(&self) {
        self.counts.fill_all(0);
        self.offsets.fill_all(0);
    }
}

/// What all sources announced to this rank, and where their tokens go.
struct Arrivals {
    /// By source and local expert.
    counts: Vec<u32>,
    /// By source and local expert: the position of its first token.
    first: Vec<u64>,
    rows: Vec<u32>,
    totals: Vec<u64>,
    offsets: Vec<u64>,
}

impl Twin {
    pub(super) fn send_tokens(&self, channel: u32, inputs: &Inputs<'_>) -> Result<(), Dead> {
        let call = self.begin(channel, Phase::DispatchSend)?;
        let tokens = self.existing(inputs.count, inputs.given);
        let plan = call.plan(tokens, inputs.ids);
        call.send_counts(&plan);
        let mut row = vec![0; self.shape.areas().row_bytes as usize];
        for token in 0..tokens {
            if plan.ranks(token).next().is_some() {
                call.build_row(token, inputs, &plan, &mut row);
            }
            for (rank, slot) in plan.ranks(token) {
                call.send_row(Kind::Token, rank, slot, &row);
            }
        }
        call.end();
        Ok(())
    }

    pub(super) fn receive_tokens(&self, channel: u32, outputs: &Outputs<'_>) -> Result<(), Dead> {
        let call = self.begin(channel, Phase::DispatchRecv)?;
        let arrivals = call.receive_counts()?;
        let overflows = call.exceeds(&arrivals);
        call.write_received(&arrivals, overflows);
        if let Some(needed) = overflows {
            let room = self.shape.room().into();
            call.notice(Code::Capacity, self.rank(), 0, needed, room);
            outputs.clear();
        } else {
            call.lay_out(&arrivals, outputs)?;
        }
        call.end();
        Ok(())
    }
}

impl Call<'_> {
    /// To every rank, the tokens for each of its experts, and then its rows.
    fn send_counts(&self, plan: &Plan) {
        let shape = &self.twin.shape;
        let local = u64::from(shape.local_experts());
        let first = u64::from(self.twin.rank()) * (local + 1);
        for rank in 0..shape.config().ranks {
            let experts = shape.placement().experts_of(rank);
            let experts = &plan.tokens_of_expert[experts.start as usize..experts.end as usize];
            for expert in 0..local {
                let count = experts.get(expert as usize).copied().unwrap_or(0);
                self.send_packet(DeviceArea::Counts, first + expert, rank, count);
            }
            let rows = plan.rows_to_rank[rank as usize];
            self.send_packet(DeviceArea::Counts, first + local, rank, rows);
        }
    }

    /// A row as it travels, the same to every rank.
    fn build_row(&self, token: u32, inputs: &Inputs<'_>, plan: &Plan, row: &mut [u8]) {
        let shape = &self.twin.shape;
        let (config, areas) = (shape.config(), shape.areas());
        row.fill(0);
        let (elements, rest) = row.split_at_mut(areas.row_scales_at as usize);
        let (scales, meta) = rest.split_at_mut((areas.row_meta_at - areas.row_scales_at) as usize);
        let elements = &mut elements[..shape.wire_bytes() as usize];
        let scales = &mut scales[..shape.scale_bytes() as usize];
        let token_at = u64::from(token) * shape.token_bytes();
        match config.scaled().filter(|_| config.casts()) {
            Some(scaled) => {
                let mut given = vec![0; shape.token_bytes() as usize];
                inputs.tokens.read(token_at, &mut given);
                cast::cast(config.token_type, &given, scaled, elements, scales);
            }
            None => {
                inputs.tokens.read(token_at, elements);
                inputs.scales.read(u64::from(token) * shape.scale_bytes(), scales);
            }
        }
        let records = meta.as_chunks_mut::<{ RECORD as usize }>().0;
        let first = u64::from(token) * u64::from(config.top_k);
        for ((slot, expert), record) in (first..).zip(plan.experts(token)).zip(records) {
            let (id, index) = expert.unwrap_or((NO_EXPERT, 0));
            let weight = match inputs.weights.is_given() {
                true => f32::from_le_bytes(inputs.weights.element(0, slot)),
                false => 1.0,
            };
            record[..2].copy_from_slice(&id.to_le_bytes());
            record[2..4].copy_from_slice(&index.to_le_bytes());
            record[4..].copy_from_slice(&weight.to_le_bytes());
        }
    }

    /// Waits for the counts of all sources. No count is believed beyond what a batch can hold.
    fn receive_counts(&self) -> Result<Arrivals, Dead> {
        let shape = &self.twin.shape;
        let most = shape.config().max_tokens;
        let (ranks, local) = (shape.config().ranks, shape.local_experts() as usize);
        let (mut counts, mut rows) = (Vec::new(), Vec::new());
        let mut totals = vec![0; local];
        for source in 0..ranks {
            let place = u64::from(source) * (local as u64 + 1);
            for (expert, total) in (place..).zip(&mut totals) {
                let count = self.wait_packet(DeviceArea::Counts, expert, source)?.min(most);
                counts.push(count);
                *total += u64::from(count);
            }
            let count = self.wait_packet(DeviceArea::Counts, place + local as u64, source)?;
            rows.push(count.min(most));
        }
        let mut offsets = vec![0; local + 1];
        for expert in 0..local {
            offsets[expert + 1] = match shape.config().layout {
                DeviceLayout::Contiguous { pad_to } => {
                    offsets[expert] + totals[expert].next_multiple_of(pad_to.into())
                }
                DeviceLayout::Indexed => offsets[expert] + totals[expert],
                DeviceLayout::Padded { .. } => {
                    (expert as u64 + 1) * u64::from(shape.expert_capacity())
                }
            };
        }
        let mut next = offsets[..local].to_vec();
        let mut first = Vec::with_capacity(counts.len());
        for counts in counts.chunks_exact(local) {
            first.extend_from_slice(&next);
            for (next, count) in next.iter_mut().zip(counts) {
                *next += u64::from(*count);
            }
        }
        Ok(Arrivals { counts, first, rows, totals, offsets })
    }

    /// What the round needs, if that is more than there is room for.
    fn exceeds(&self, arrivals: &Arrivals) -> Option<u64> {
        let needed = match self.twin.shape.config().layout {
            DeviceLayout::Padded { .. } => arrivals.totals.iter().copied().max(),
            _ => arrivals.offsets.last().copied(),
        };
        needed.filter(|needed| *needed > self.twin.shape.room().into())
    }

    fn write_received(&self, arrivals: &Arrivals, needed: Option<u64>) {
        let at = self.twin.shape.at(self.channel, DeviceArea::Received);
        let needed = u32::try_from(needed.unwrap_or(0)).unwrap_or(u32::MAX);
        let numbers = arrivals.rows.iter().copied().chain([needed]);
        for (place, number) in (0..).zip(numbers) {
            self.twin.own().set_element(at, place, number.to_le_bytes());
        }
    }

    fn lay_out(&self, arrivals: &Arrivals, outputs: &Outputs<'_>) -> Result<(), Dead> {
        let shape = &self.twin.shape;
        let local = shape.local_experts() as u64;
        for (expert, (count, offset)) in
            (0..local).zip(arrivals.totals.iter().zip(&arrivals.offsets))
        {
            outputs.set(outputs.counts, expert, (*count as i32).to_le_bytes());
            outputs.set(outputs.offsets, expert, (*offset as i32).to_le_bytes());
        }
        let end = arrivals.offsets[local as usize];
        outputs.set(outputs.offsets, local, (end as i32).to_le_bytes());
        for position in 0..end {
            outputs.set(outputs.rows, position, (-1i32).to_le_bytes());
            outputs.set(outputs.weights, position, 0f32.to_le_bytes());
        }
        let mut row = vec![0; shape.areas().row_bytes as usize];
        for (source, &rows) in (0..).zip(&arrivals.rows) {
            for slot in 0..rows {
                self.take_row(Kind::Token, source, slot, &mut row)?;
                self.place_row(arrivals, outputs, (source, slot), &row);
            }
        }
        Ok(())
    }

    /// A row goes to the position of each of its experts here. One that its source did not announce is
    /// left out: nothing is written outside of a group.
    fn place_row(
        &self,
        arrivals: &Arrivals,
        outputs: &Outputs<'_>,
        (source, slot): (u32, u32),
        row: &[u8],
    ) {
        let shape = &self.twin.shape;
        let (config, areas) = (shape.config(), shape.areas());
        let experts = shape.placement().experts_of(self.twin.rank());
        let local = shape.local_experts() as usize;
        let number = u64::from(source) * u64::from(config.max_tokens) + u64::from(slot);
        let top_k = u64::from(config.top_k);
        let (mut entry, entries) = (number * top_k, (number + 1) * top_k);
        let entries_at = shape.at(self.channel, DeviceArea::Entries);
        let records = row[areas.row_meta_at as usize..].as_chunks::<{ RECORD as usize }>().0;
        for record in &records[..top_k as usize] {
            let [id0, id1, index0, index1, weight @ ..] = *record;
            let id = u32::from(u16::from_le_bytes([id0, id1]));
            let index = u32::from(u16::from_le_bytes([index0, index1]));
            if !experts.contains(&id) {
                continue;
            }
            let group = source as usize * local + (id - experts.start) as usize;
            if index >= arrivals.counts[group] {
                continue;
            }
            let position = arrivals.first[group] + u64::from(index);
            outputs.set(outputs.rows, position, (number as i32).to_le_bytes());
            outputs.set(outputs.weights, position, weight);
            let tokens = &row[..shape.wire_bytes() as usize];
            let scales = &row[areas.row_scales_at as usize..][..shape.scale_bytes() as usize];
            for (array, bytes) in [(outputs.tokens, tokens), (outputs.scales, scales)] {
                if array.is_given() {
                    array.write(position * bytes.len() as u64, bytes);
                }
            }
            let mut bytes = [0; RECORD as usize];
            bytes[..4].copy_from_slice(&(position as i32).to_le_bytes());
            bytes[4..].copy_from_slice(&weight);
            self.twin.own().set_element(entries_at, entry, bytes);
            entry += 1;
        }
        let mut none = [0; RECORD as usize];
        none[..4].copy_from_slice(&(-1i32).to_le_bytes());
        for entry in entry..entries {
            self.twin.own().set_element(entries_at, entry, none);
        }
    }
}

impl Outputs<'_> {
    fn set(&self, array: Region<'_>, at: u64, bytes: [u8; 4]) {
        if array.is_given() {
            array.set_element(0, at, bytes);
        }
    }
}
