//! Receive plan: each received row's slot, and its positions by expert.
//!
//! The counts determine the start of each (source, expert) group, so sources are taken in any order. Metadata
//! are untrusted: each record is checked against the counts before use.

use std::ops::Range;

use crate::area::Area;
use crate::error::Error;
use crate::plan::header::RoundCounts;
use crate::plan::record::MetadataRecord;
use crate::plan::rows::{Rows, RowsMut, SourceRows};
use crate::shape::Shape;
use crate::shape::config::CombineMode;

/// Padding row in [`ReceivePlan::slots`].
pub const PADDING: u32 = u32::MAX;

/// Rows that one rank received in one round. Allocated once; filled without allocating.
///
/// *Rows* are received token copies, ordered by source and then by token. *Pairs* are (row, local expert), in
/// that order and by top-k slot within a row. *Positions* are pairs ordered by local expert first, with the
/// layout's padding: the experts' input and output rows. For example, a row that two local experts take is
/// one row, two pairs and two positions.
#[derive(Clone, Debug)]
pub struct ReceivePlan {
    shape: Shape,
    accepted: Vec<bool>,
    missing: usize,
    row_base: Vec<u32>,
    pair_base: Vec<u32>,
    remainder_offset: Vec<u32>,
    /// Each group's first position, `[source][local expert]`, with one more source for the ends.
    position_base: Vec<u32>,
    expert_counts: Vec<u32>,
    expert_offsets: Vec<u32>,
    /// Slot, by position.
    slots: Vec<u32>,
    weights: Vec<f32>,
    /// First pair, by row.
    row_pair: Vec<u32>,
    /// Position and weight, by pair.
    pairs: Vec<PairPosition>,
    /// Each group's cursor while one source is read, by local expert.
    cursors: Vec<GroupCursor>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PairPosition {
    position: u32,
    weight: f32,
}

#[derive(Clone, Copy, Debug, Default)]
struct GroupCursor {
    next: u32,
    end: u32,
    /// Row in the last pair, plus 1.
    mark: u32,
}

impl ReceivePlan {
    /// An empty plan with room for any round in this shape.
    pub fn new(shape: &Shape) -> ReceivePlan {
        let ranks = shape.config().ranks as usize;
        let local = shape.local_experts();
        let sizes = shape.sizes();
        let pairs = sizes.receive_pairs() as usize;
        let padding = local * (shape.config().layout.pad_to() as usize - 1);
        ReceivePlan {
            shape: shape.clone(),
            accepted: vec![false; ranks],
            missing: ranks,
            row_base: vec![0; ranks + 1],
            pair_base: vec![0; ranks + 1],
            remainder_offset: vec![0; ranks],
            position_base: vec![0; (ranks + 1) * local],
            expert_counts: vec![0; local],
            expert_offsets: vec![0; local + 1],
            slots: Vec::with_capacity(pairs + padding),
            weights: Vec::with_capacity(pairs + padding),
            row_pair: vec![0; sizes.receive_rows() as usize + 1],
            pairs: vec![PairPosition::default(); pairs],
            cursors: vec![GroupCursor::default(); local],
        }
    }

    /// Begins a round, given all ranks' counts.
    ///
    /// # Errors
    /// [`Error::Capacity`] if some rank would receive more than it has room for.
    pub fn begin(&mut self, counts: &RoundCounts) -> Result<(), Error> {
        assert!(counts.is_complete(), "offsets need the counts of every rank");
        counts.check_capacity()?;
        let config = self.shape.config();
        let (ranks, me, pad_to) = (config.ranks, config.rank, config.layout.pad_to());
        let local = self.expert_counts.len();
        self.accepted.fill(false);
        self.missing = ranks as usize;

        let (mut row, mut pair, mut remainder) = (0, 0, 0);
        self.expert_counts.fill(0);
        for source in 0..ranks {
            let at = source as usize;
            (self.row_base[at], self.pair_base[at]) = (row, pair);
            self.row_pair[row as usize] = pair;
            self.remainder_offset[at] = remainder;
            row += counts.rows(source, me);
            pair += counts.pairs(source, me);
            remainder += self.shape.sizes().slots_of(counts.remainder(source, me));
            for (total, count) in self.expert_counts.iter_mut().zip(counts.local_rows(source)) {
                *total += count;
            }
        }
        (self.row_base[ranks as usize], self.pair_base[ranks as usize]) = (row, pair);
        self.row_pair[row as usize] = pair;

        let mut position = 0;
        for expert in 0..local {
            self.expert_offsets[expert] = position;
            let mut next = position;
            for source in 0..ranks {
                self.position_base[source as usize * local + expert] = next;
                next += counts.local_rows(source)[expert];
            }
            self.position_base[ranks as usize * local + expert] = next;
            position = next.next_multiple_of(pad_to);
        }
        self.expert_offsets[local] = position;
        self.slots.clear();
        self.slots.resize(position as usize, PADDING);
        self.weights.clear();
        self.weights.resize(position as usize, 0.0);
        Ok(())
    }

    /// Rows from `source`. `run` returns the rows for a slot range; it is called for the private rows and for
    /// the remainder. Peers may still be writing to other slots.
    pub fn source_rows<'a>(
        &self,
        source: u32,
        mut run: impl FnMut(Range<usize>) -> Rows<'a>,
    ) -> SourceRows<'a> {
        let private = self.shape.config().private_rows;
        let rows = self.rows_from(source).len() as u32;
        let private_rows = rows.min(private);
        let mut slots = |first: u32, rows: u32| {
            let first = self.slot(source, first) as usize;
            run(first..first + rows as usize)
        };
        SourceRows {
            private: slots(0, private_rows),
            private_rows: private_rows as usize,
            remainder: slots(private, rows - private_rows),
        }
    }

    /// Takes `source`'s metadata, once all its rows have arrived.
    ///
    /// # Errors
    /// [`Error::Metadata`] if they contradict the source's header; [`Error::TooFewRows`] or
    /// [`Error::RowLength`] if the records do not fit this shape.
    pub fn accept(&mut self, source: u32, metadata: SourceRows<'_>) -> Result<(), Error> {
        let record = self.shape.sizes().extent(Area::Metadata).stride as usize;
        metadata.require(Area::Metadata, self.rows_from(source).len(), record)?;
        let (from, local) = (source as usize, self.cursors.len());
        if self.accepted[from] {
            return Ok(());
        }
        let bases = self.position_base[from * local..(from + 2) * local].split_at(local);
        for (cursor, (next, end)) in self.cursors.iter_mut().zip(bases.0.iter().zip(bases.1)) {
            *cursor = GroupCursor { next: *next, end: *end, mark: 0 };
        }
        let mut pair = self.pair_base[from];
        for (index, row) in self.rows_from(source).enumerate() {
            self.row_pair[row] = pair;
            self.accept_row(source, index as u32, &metadata, &mut pair)?;
        }
        // The sum is reached and no count was exceeded, so every expert's count is reached.
        if pair != self.pair_base[from + 1] {
            let row = self.rows_from(source).len() as u32;
            let (expected, seen) = (self.pair_base[from + 1].into(), pair.into());
            return Err(Error::Metadata { peer: source, row, what: "last pair", expected, seen });
        }
        self.accepted[from] = true;
        self.missing -= 1;
        Ok(())
    }

    fn accept_row(
        &mut self,
        source: u32,
        index: u32,
        metadata: &SourceRows<'_>,
        pair: &mut u32,
    ) -> Result<(), Error> {
        let wrong = |what, expected: u32, seen: u32| {
            let (expected, seen) = (expected.into(), seen.into());
            Err(Error::Metadata { peer: source, row: index, what, expected, seen })
        };
        let slot = self.slot(source, index);
        let record = MetadataRecord::read(metadata.row(index as usize));
        let most = self.shape.most_local_pairs(self.shape.config().rank);
        if record.count == 0 || record.count > most {
            return wrong("number of experts", most, record.count);
        }
        let top_k = self.shape.config().top_k;
        let mut next_slot = 0;
        for entry in record.entries() {
            let (expert, top_k_slot) = (u32::from(entry.expert), u32::from(entry.slot));
            if top_k_slot < next_slot || top_k_slot >= top_k {
                return wrong("top-k slot", next_slot, top_k_slot);
            }
            next_slot = top_k_slot + 1;
            let experts = self.cursors.len() as u32;
            let Some(cursor) = self.cursors.get_mut(expert as usize) else {
                return wrong("local expert", experts, expert);
            };
            if cursor.mark == index + 1 {
                return wrong("number of entries of one expert", 1, 2);
            }
            if cursor.next == cursor.end {
                let at = source as usize * experts as usize + expert as usize;
                let count = cursor.end - self.position_base[at];
                return wrong("index among the tokens of its expert", count, count + 1);
            }
            let position = cursor.next;
            (cursor.next, cursor.mark) = (position + 1, index + 1);
            self.slots[position as usize] = slot;
            self.weights[position as usize] = entry.weight;
            self.pairs[*pair as usize] = PairPosition { position, weight: entry.weight };
            *pair += 1;
        }
        Ok(())
    }

    /// True if every source's metadata were taken.
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Slot for row `index` from `source`, in the token and metadata areas.
    pub fn slot(&self, source: u32, index: u32) -> u32 {
        let config = self.shape.config();
        let private_slots = self.shape.sizes().private_slots();
        if index < config.private_rows {
            source * private_slots + index
        } else {
            config.ranks * private_slots
                + self.remainder_offset[source as usize]
                + (index - config.private_rows)
        }
    }

    /// Rows from `source`.
    pub fn rows_from(&self, source: u32) -> Range<usize> {
        let source = source as usize;
        self.row_base[source] as usize..self.row_base[source + 1] as usize
    }

    /// Rows for `source` in the send-replies area.
    pub fn replies_to(&self, source: u32) -> Range<usize> {
        let at = source as usize;
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.rows_from(source),
            CombineMode::PerExpert => self.pair_base[at] as usize..self.pair_base[at + 1] as usize,
        }
    }

    /// Received row count.
    pub fn row_count(&self) -> usize {
        self.row_base.last().map_or(0, |&rows| rows as usize)
    }

    /// Token count for each local expert.
    pub fn expert_counts(&self) -> &[u32] {
        &self.expert_counts
    }

    /// Each local expert group's first position, then the position count.
    pub fn expert_offsets(&self) -> &[u32] {
        &self.expert_offsets
    }

    /// Position count: the experts' input and output rows, including padding.
    pub fn positions(&self) -> usize {
        self.slots.len()
    }

    /// Each position's slot in the token area, or [`PADDING`]. In the indexed layout this is the
    /// concatenation of the experts' lists.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Router's weight for each position; 0 for padding.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Copies `source`'s rows, whose metadata were taken, to their positions (contiguous layout): tokens to
    /// [`Area::Expert`], or scales to [`Area::ExpertScales`].
    ///
    /// # Errors
    /// [`Error::TooFewRows`] or [`Error::RowLength`] if rows do not fit the plan.
    pub fn lay_out(
        &self,
        area: Area,
        source: u32,
        from: SourceRows<'_>,
        mut out: RowsMut<'_>,
    ) -> Result<(), Error> {
        let row_bytes = self.shape.area_row_bytes(area);
        let rows = self.rows_from(source);
        from.require(area, rows.len(), row_bytes)?;
        out.require(area, self.positions(), row_bytes)?;
        for (index, row) in rows.enumerate() {
            let bytes = from.row(index);
            for (position, _) in self.pairs_of(row) {
                out.row(position).copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// Writes zeros to the padding in [`Area::Expert`] or [`Area::ExpertScales`].
    ///
    /// # Errors
    /// [`Error::TooFewRows`] or [`Error::RowLength`] if `out` does not fit the plan.
    pub fn clear_padding(&self, area: Area, mut out: RowsMut<'_>) -> Result<(), Error> {
        out.require(area, self.positions(), self.shape.area_row_bytes(area))?;
        for (expert, count) in self.expert_counts.iter().enumerate() {
            for position in self.expert_offsets[expert] + count..self.expert_offsets[expert + 1] {
                out.row(position as usize).fill(0);
            }
        }
        Ok(())
    }

    /// Position and weight for each pair in `row`, in top-k order.
    pub(crate) fn pairs_of(&self, row: usize) -> impl Iterator<Item = (usize, f32)> + Clone + '_ {
        let pairs = self.row_pair[row] as usize..self.row_pair[row + 1] as usize;
        self.pairs[pairs].iter().map(|pair| (pair.position as usize, pair.weight))
    }

    /// The plan's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }
}
