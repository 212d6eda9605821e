//! Dispatch: sends rows and counts, and lays out received rows by expert.

use super::Twin;
use super::arrays::{DispatchInputArrays, DispatchOutputArrays};
use super::call::{GroupFailed, TwinCall};
use super::cast;
use super::launch::TwinLaunch;
use super::plan::BatchPlan;
use super::rows::RowKind;
use crate::device::abi::arguments::{DeviceCounts, KEPT};
use crate::device::abi::record::{MoeCode, MoePhase};
use crate::device::options::types::{DeviceLayout, IdWidth};
use crate::device::shape::channel_layout::{DeviceArea, PlanWord, RECORD};
use crate::device::shape::replica_table::ROWS_BITS;
use std::sync::atomic::Ordering::Relaxed;
use weft_gpu::raw_memory::RawMemory;

/// Slot without an expert, in a row's metadata.
const NO_EXPERT: u16 = 0xFFFF;

/// All sources' counts for this rank, and the token positions.
struct ReceivedCounts {
    /// Token counts, by source and local expert.
    counts: Vec<u32>,
    /// First token position, by source and local expert.
    first: Vec<u64>,
    rows: Vec<u32>,
    /// Row counts over lower sources, by source; last, over all sources.
    before: Vec<u64>,
    totals: Vec<u64>,
    offsets: Vec<u64>,
}

impl Twin {
    pub(super) fn send_tokens(
        &self,
        at: TwinLaunch,
        inputs: &DispatchInputArrays<'_>,
    ) -> Result<(), GroupFailed> {
        let call = self.begin(at, MoePhase::DispatchSend)?;
        let plan = if at.plan.kept {
            call.send_key();
            call.kept_plan(inputs.given)
        } else {
            let plan =
                call.plan(self.valid_tokens(inputs.count, inputs.given), inputs.ids, inputs.layer);
            call.send_counts(&plan);
            plan
        };
        let mut row = vec![0; self.shape.channel_layout().row_bytes as usize];
        for token in 0..plan.tokens() {
            if plan.ranks(token).next().is_some() {
                call.build_row(token, inputs, &plan, &mut row);
            }
            for (rank, slot) in plan.ranks(token) {
                call.send_row(RowKind::Token, rank, slot, &row);
            }
        }
        call.end();
        Ok(())
    }

    pub(super) fn count_tokens(&self, at: TwinLaunch) -> Result<DeviceCounts, GroupFailed> {
        let call = self.peek(at)?;
        let arrivals = call.receive_counts()?;
        let experts = self.shape.placement().experts_of(self.rank()).len();
        let narrow = |numbers: &[u64]| numbers.iter().map(|&number| number as u32).collect();
        Ok(DeviceCounts {
            experts: narrow(&arrivals.totals[..experts]),
            offsets: narrow(&arrivals.offsets[..=experts]),
            needed: call.exceeds(&arrivals).unwrap_or(0) as u32,
        })
    }

    pub(super) fn receive_tokens(
        &self,
        at: TwinLaunch,
        outputs: &DispatchOutputArrays<'_>,
    ) -> Result<(), GroupFailed> {
        let call = self.begin(at, MoePhase::DispatchRecv)?;
        if at.plan.kept {
            call.receive_kept(outputs)?;
            call.end();
            return Ok(());
        }
        let arrivals = call.receive_counts()?;
        let overflows = call.exceeds(&arrivals);
        call.write_received(&arrivals, overflows);
        if let Some(needed) = overflows {
            let room = call.room().into();
            call.notice(MoeCode::Capacity, self.rank(), 0, needed, room);
            outputs.clear();
            outputs.experts.fill_all(0xFF);
            if self.shape.config().layout == DeviceLayout::Dense {
                outputs.name_no_expert();
            }
        } else {
            match self.shape.config().layout {
                DeviceLayout::Dense => call.lay_out_dense(&arrivals, outputs)?,
                _ => call.lay_out(&arrivals, outputs)?,
            }
        }
        call.end();
        Ok(())
    }
}

impl TwinCall<'_> {
    /// Sends every rank the token count for each of its experts, then the row count.
    fn send_counts(&self, plan: &BatchPlan) {
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
            let rows = plan.rows_to_rank[rank as usize] | plan.generation << ROWS_BITS;
            self.send_packet(DeviceArea::Counts, first + local, rank, rows);
        }
    }

    /// Sends every rank the kept plan's key, in place of counts.
    fn send_key(&self) {
        let shape = &self.twin.shape;
        let line = u64::from(shape.local_experts()) + 1;
        let first = u64::from(self.twin.rank()) * line;
        let key = KEPT | self.plan_word(PlanWord::Key);
        for rank in 0..shape.config().ranks {
            for place in first..first + line {
                self.send_packet(DeviceArea::Counts, place, rank, key);
            }
        }
    }

    /// Waits for all sources' keys, which must equal this rank's.
    fn receive_keys(&self) -> Result<(), GroupFailed> {
        let key = self.plan_word(PlanWord::Key);
        let line = u64::from(self.twin.shape.local_experts()) + 1;
        for source in 0..self.twin.shape.config().ranks {
            let last = (u64::from(source) + 1) * line - 1;
            let seen = self.wait_packet(DeviceArea::Counts, last, source)?;
            if seen != KEPT | key {
                let seen = if seen & KEPT == 0 { 0 } else { seen & !KEPT };
                return Err(self.fail(
                    MoeCode::OtherPlan.into(),
                    source,
                    0,
                    key.into(),
                    seen.into(),
                ));
            }
        }
        Ok(())
    }

    /// Places the rows in a round with a kept plan.
    fn receive_kept(&self, outputs: &DispatchOutputArrays<'_>) -> Result<(), GroupFailed> {
        let shape = &self.twin.shape;
        self.receive_keys()?;
        match self.plan_word(PlanWord::Needed) {
            0 => {}
            needed => {
                let room = self.room().into();
                self.notice(MoeCode::Capacity, self.twin.rank(), 0, needed.into(), room);
            }
        }
        let mut row = vec![0; shape.channel_layout().row_bytes as usize];
        for source in 0..shape.config().ranks {
            for slot in 0..self.received(source) {
                self.take_row(RowKind::Token, source, slot, &mut row)?;
                for (position, _) in self.entries(source, slot) {
                    self.place(outputs, position, &row);
                }
            }
        }
        Ok(())
    }

    /// Builds a row in wire form, the same for every rank.
    fn build_row(
        &self,
        token: u32,
        inputs: &DispatchInputArrays<'_>,
        plan: &BatchPlan,
        row: &mut [u8],
    ) {
        let shape = &self.twin.shape;
        let (config, areas) = (shape.config(), shape.channel_layout());
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

    /// Waits for all sources' counts. Counts are limited to the batch size.
    fn receive_counts(&self) -> Result<ReceivedCounts, GroupFailed> {
        let shape = &self.twin.shape;
        let most = shape.config().max_tokens;
        let (ranks, local) = (shape.config().ranks, shape.local_experts() as usize);
        let (mut counts, mut rows) = (Vec::new(), Vec::new());
        let mut totals = vec![0; local];
        for source in 0..ranks {
            let place = u64::from(source) * (local as u64 + 1);
            for (expert, total) in (place..).zip(&mut totals) {
                let count = self.wait_packet(DeviceArea::Counts, expert, source)?;
                let count = self.not_kept(count, source)?.min(most);
                counts.push(count);
                *total += u64::from(count);
            }
            let count = self.wait_packet(DeviceArea::Counts, place + local as u64, source)?;
            // With maps, the highest bits are the generation.
            let mapped = shape.layers() > 0;
            rows.push(if mapped { count } else { self.not_kept(count, source)? });
        }
        if shape.layers() > 0 {
            self.check_generations(&rows)?;
            rows.iter_mut().for_each(|rows| *rows &= u32::MAX >> (32 - ROWS_BITS));
        }
        rows.iter_mut().for_each(|rows| *rows = (*rows).min(most));
        // Groups beyond this rank's own experts are empty.
        let own = shape.placement().experts_of(self.twin.rank()).len();
        let mut offsets = vec![0; local + 1];
        for expert in 0..local {
            offsets[expert + 1] = match shape.config().layout {
                DeviceLayout::Contiguous { pad_to } => {
                    offsets[expert] + totals[expert].next_multiple_of(pad_to.into())
                }
                DeviceLayout::Indexed | DeviceLayout::Dense => offsets[expert] + totals[expert],
                DeviceLayout::Padded { .. } => {
                    own.min(expert + 1) as u64 * u64::from(shape.expert_capacity())
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
        let mut before = vec![0];
        for &rows in &rows {
            before.push(before[before.len() - 1] + u64::from(rows));
        }
        Ok(ReceivedCounts { counts, first, rows, before, totals, offsets })
    }

    /// Checks that all ranks dispatched with the same expert map, by the generation in the row counts.
    fn check_generations(&self, rows: &[u32]) -> Result<(), GroupFailed> {
        let own = rows[self.twin.rank() as usize] >> ROWS_BITS;
        for (source, rows) in (0..).zip(rows) {
            let seen = rows >> ROWS_BITS;
            if seen != own {
                return Err(self.fail(
                    MoeCode::Placement.into(),
                    source,
                    0,
                    own.into(),
                    seen.into(),
                ));
            }
        }
        Ok(())
    }

    /// A count from `source`; an error if it uses a kept plan.
    fn not_kept(&self, count: u32, source: u32) -> Result<u32, GroupFailed> {
        if count & KEPT == 0 {
            return Ok(count);
        }
        Err(self.fail(MoeCode::OtherPlan.into(), source, 0, 0, (count & !KEPT).into()))
    }

    /// Room that the round needs, if it exceeds the available room.
    fn exceeds(&self, arrivals: &ReceivedCounts) -> Option<u64> {
        let needed = match self.twin.shape.config().layout {
            DeviceLayout::Padded { .. } => arrivals.totals.iter().copied().max(),
            DeviceLayout::Dense => arrivals.before.last().copied(),
            _ => arrivals.offsets.last().copied(),
        };
        needed.filter(|needed| *needed > self.room().into())
    }

    fn write_received(&self, arrivals: &ReceivedCounts, needed: Option<u64>) {
        let (plan, at) = self.plan_area(DeviceArea::Received);
        let needed = u32::try_from(needed.unwrap_or(0)).unwrap_or(u32::MAX);
        for (place, &rows) in (0..).zip(&arrivals.rows) {
            // Without room no row is placed or replied to.
            let rows = if needed == 0 { rows } else { 0 };
            plan.set_element(at, place, rows.to_le_bytes());
        }
        self.set_plan_word(PlanWord::Needed, needed);
        let used = match self.twin.shape.config().layout {
            DeviceLayout::Dense => arrivals.before.last(),
            _ => arrivals.offsets.last(),
        };
        let used = used.copied().filter(|_| needed == 0);
        self.set_plan_word(PlanWord::Used, used.unwrap_or(0) as u32);
    }

    fn lay_out(
        &self,
        arrivals: &ReceivedCounts,
        outputs: &DispatchOutputArrays<'_>,
    ) -> Result<(), GroupFailed> {
        let shape = &self.twin.shape;
        let local = shape.local_experts() as u64;
        for (expert, (count, offset)) in
            (0..local).zip(arrivals.totals.iter().zip(&arrivals.offsets))
        {
            outputs.set(outputs.counts, expert, (*count as i32).to_le_bytes());
            outputs.set(outputs.offsets, expert, (*offset as i32).to_le_bytes());
        }
        self.add_load(arrivals, outputs);
        let end = arrivals.offsets[local as usize];
        outputs.set(outputs.offsets, local, (end as i32).to_le_bytes());
        for position in 0..end {
            outputs.set(outputs.rows, position, (-1i32).to_le_bytes());
            outputs.set(outputs.weights, position, 0f32.to_le_bytes());
        }
        outputs.experts.fill_all(0xFF);
        let mut row = vec![0; shape.channel_layout().row_bytes as usize];
        for (source, &rows) in (0..).zip(&arrivals.rows) {
            for slot in 0..rows {
                self.take_row(RowKind::Token, source, slot, &mut row)?;
                self.place_row(arrivals, outputs, (source, slot), &row);
            }
        }
        Ok(())
    }

    /// Adds the token counts for this rank's experts to the load; rounds on other channels may do so
    /// concurrently.
    fn add_load(&self, arrivals: &ReceivedCounts, outputs: &DispatchOutputArrays<'_>) {
        if !outputs.load.is_given() {
            return;
        }
        let experts = self.twin.shape.placement().experts_of(self.twin.rank());
        for (expert, &tokens) in experts.zip(&arrivals.totals) {
            let at = u64::from(expert * outputs.load_bytes);
            match outputs.load_bytes {
                8 => _ = outputs.load.packet(at).fetch_add(tokens, Relaxed),
                _ => _ = outputs.load.word(at).fetch_add(tokens as u32, Relaxed),
            }
        }
    }

    /// Writes a row's token, and the scales, at a position.
    fn place(&self, outputs: &DispatchOutputArrays<'_>, position: u64, row: &[u8]) {
        let shape = &self.twin.shape;
        let tokens = &row[..shape.wire_bytes() as usize];
        let at = shape.channel_layout().row_scales_at as usize;
        let scales = &row[at..][..shape.scale_bytes() as usize];
        if outputs.tokens.is_given() {
            outputs.tokens.write(position * tokens.len() as u64, tokens);
        }
        if outputs.scales.is_given() {
            self.place_scales(outputs.scales, position, scales);
        }
    }

    /// Writes the scales at a position; the last word is padded with zeros.
    fn place_scales(&self, to: RawMemory<'_>, position: u64, scales: &[u8]) {
        let placed = self.twin.shape.received_scales();
        for (column, scales) in (0..).zip(scales.chunks(placed.element as usize)) {
            let mut element = [0; 4];
            element[..scales.len()].copy_from_slice(scales);
            to.write(placed.at(position, column), &element[..placed.element as usize]);
        }
    }

    /// Lays out rows by source and slot, with each row's experts; further rows are empty.
    fn lay_out_dense(
        &self,
        arrivals: &ReceivedCounts,
        outputs: &DispatchOutputArrays<'_>,
    ) -> Result<(), GroupFailed> {
        let shape = &self.twin.shape;
        for (expert, count) in (0..).zip(&arrivals.totals) {
            outputs.set(outputs.counts, expert, (*count as i32).to_le_bytes());
        }
        for (source, before) in (0..).zip(&arrivals.before) {
            outputs.set(outputs.offsets, source, (*before as i32).to_le_bytes());
        }
        outputs.name_no_expert();
        self.add_load(arrivals, outputs);
        let mut row = vec![0; shape.channel_layout().row_bytes as usize];
        for (source, (&rows, &before)) in (0..).zip(arrivals.rows.iter().zip(&arrivals.before)) {
            for slot in 0..rows {
                self.take_row(RowKind::Token, source, slot, &mut row)?;
                self.place_dense(outputs, before + u64::from(slot), &row);
            }
        }
        Ok(())
    }

    /// Writes a dense row, and local numbers for the row's experts on this rank.
    fn place_dense(&self, outputs: &DispatchOutputArrays<'_>, to: u64, row: &[u8]) {
        let shape = &self.twin.shape;
        let (config, areas) = (shape.config(), shape.channel_layout());
        self.place(outputs, to, row);
        let experts = shape.placement().experts_of(self.twin.rank());
        let top_k = u64::from(config.top_k);
        let records = row[areas.row_meta_at as usize..].as_chunks::<{ RECORD as usize }>().0;
        for (choice, record) in (to * top_k..(to + 1) * top_k).zip(records) {
            let [id0, id1, _, _, weight @ ..] = *record;
            let id = u32::from(u16::from_le_bytes([id0, id1]));
            if !experts.contains(&id) {
                continue;
            }
            let local = id - experts.start;
            match config.ids {
                IdWidth::I32 => {
                    outputs.rows.set_element(0, choice, (local as i32).to_le_bytes());
                }
                IdWidth::I64 => {
                    outputs.rows.set_element(0, choice, i64::from(local).to_le_bytes());
                }
            }
            outputs.weights.set_element(0, choice, weight);
        }
    }

    /// Writes a row to its experts' positions on this rank. Rows that the source did not announce are
    /// skipped, so no write leaves its group.
    fn place_row(
        &self,
        arrivals: &ReceivedCounts,
        outputs: &DispatchOutputArrays<'_>,
        (source, slot): (u32, u32),
        row: &[u8],
    ) {
        let shape = &self.twin.shape;
        let (config, areas) = (shape.config(), shape.channel_layout());
        let experts = shape.placement().experts_of(self.twin.rank());
        let local = shape.local_experts() as usize;
        let number = u64::from(source) * u64::from(config.max_tokens) + u64::from(slot);
        let top_k = u64::from(config.top_k);
        let (mut entry, entries) = (number * top_k, (number + 1) * top_k);
        let (plan, entries_at) = self.plan_area(DeviceArea::Entries);
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
            let expert = (id - experts.start) as i32;
            outputs.set(outputs.experts, position, expert.to_le_bytes());
            self.place(outputs, position, row);
            let mut bytes = [0; RECORD as usize];
            bytes[..4].copy_from_slice(&(position as i32).to_le_bytes());
            bytes[4..].copy_from_slice(&weight);
            plan.set_element(entries_at, entry, bytes);
            entry += 1;
        }
        let mut none = [0; RECORD as usize];
        none[..4].copy_from_slice(&(-1i32).to_le_bytes());
        for entry in entry..entries {
            plan.set_element(entries_at, entry, none);
        }
    }
}
