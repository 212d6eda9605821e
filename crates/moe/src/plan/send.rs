//! Send plan: from expert ids to the rows for each rank.
//!
//! A token goes once to each rank that owns any of its experts: with experts 0 and 1 on one rank, for
//! example, it is one row there. Two passes over the ids make the plan: the first counts; the second is a
//! counting sort by destination, so each destination's rows are in token order and its pairs in top-k order
//! within a row. Both passes are bound by about 24 instructions per pair.

use std::ops::Range;

use crate::area::Area;
use crate::error::Error;
use crate::plan::record::RecordEntry;
use crate::shape::Shape;
use crate::shape::config::CombineMode;
use crate::shape::wire::MARK;

/// A slot without a separate reply.
const NO_REPLY: u32 = u32::MAX;
/// A slot without an expert.
const NO_EXPERT: u32 = u32::MAX;
/// Flag on a slot's expert: the first that the token names on that rank.
const FIRST: u32 = MARK;
/// Flag on a row's first pair: the token names more experts on that rank.
const MORE: u32 = MARK;
/// Rows that one rank sends in one round. Allocated once; [`SendPlan::build`] fills it without allocating.
///
/// *Rows* are token copies in sending order: by destination, then by token. *Pairs* are (token, expert) in
/// the same order, and by top-k slot within a token.
#[derive(Clone, Debug)]
pub struct SendPlan {
    shape: Shape,
    tokens: usize,
    /// Owner rank, by expert.
    owners: Vec<u32>,
    experts: Vec<Tally>,
    /// Row counts in the first pass, by rank.
    ranks: Vec<Tally>,
    cursors: Vec<DestinationCursor>,
    rows_of_expert: Vec<u32>,
    rows_to_rank: Vec<u32>,
    row_base: Vec<u32>,
    pair_base: Vec<u32>,
    /// Index of the first pair in the id array, `token * top_k + slot`, with [`MORE`]; by row.
    rows: Vec<u32>,
    /// Expert, with [`FIRST`], or [`NO_EXPERT`]; by index in the id array.
    slots: Vec<u32>,
    reply_of_slot: Vec<u32>,
    weights: Vec<f32>,
}

/// A count, and the token last counted: `mark` is that token plus 1, or 0.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    mark: u32,
    count: u32,
}

/// A destination's next row (lower half) and next pair (upper half), so that one store advances both.
#[derive(Clone, Copy, Debug, Default)]
struct DestinationCursor(u64);

impl DestinationCursor {
    fn new(row: u32, pair: u32) -> DestinationCursor {
        DestinationCursor(u64::from(pair) << 32 | u64::from(row))
    }

    /// Takes a row if `rows` is 1; returns the last row taken plus 1.
    fn take_row(&mut self, rows: u32) -> u32 {
        self.0 += u64::from(rows);
        self.0 as u32
    }

    /// Takes a pair.
    fn take_pair(&mut self) -> u32 {
        let pair = (self.0 >> 32) as u32;
        self.0 += 1 << 32;
        pair
    }
}

impl SendPlan {
    /// An empty plan with room for any round in this shape.
    pub fn new(shape: &Shape) -> SendPlan {
        let placement = shape.placement();
        let config = shape.config();
        let ranks = config.ranks as usize;
        let pairs = config.max_tokens as usize * config.top_k as usize;
        let send_rows = shape.sizes().extent(Area::SendMetadata).rows as usize;
        SendPlan {
            shape: shape.clone(),
            tokens: 0,
            owners: (0..config.experts).map(|expert| placement.owner(expert)).collect(),
            experts: vec![Tally::default(); config.experts as usize],
            ranks: vec![Tally::default(); ranks],
            cursors: vec![DestinationCursor::default(); ranks],
            rows_of_expert: vec![0; config.experts as usize],
            rows_to_rank: vec![0; ranks],
            row_base: vec![0; ranks + 1],
            pair_base: vec![0; ranks + 1],
            rows: vec![0; send_rows],
            slots: vec![NO_EXPERT; pairs],
            reply_of_slot: vec![NO_REPLY; pairs],
            weights: vec![1.0; pairs],
        }
    }

    /// Plans a round. `ids` holds `top_k` expert ids for each token; a negative id means none. `weights` has
    /// the same length; without it every weight is 1.
    ///
    /// # Errors
    /// [`Error::WrongLength`], [`Error::TooManyTokens`], [`Error::ExpertOutOfRange`], [`Error::ExpertTwice`].
    /// The plan is then empty.
    pub fn build<I>(&mut self, ids: &[I], weights: Option<&[f32]>) -> Result<(), Error>
    where
        I: Copy + Into<i64>,
    {
        let result = self.try_build(ids, weights);
        if result.is_err() {
            self.tokens = 0;
            self.reset();
            self.place();
        }
        result
    }

    fn try_build<I>(&mut self, ids: &[I], weights: Option<&[f32]>) -> Result<(), Error>
    where
        I: Copy + Into<i64>,
    {
        let top_k = self.shape.config().top_k as usize;
        let tokens = ids.len() / top_k;
        if !ids.len().is_multiple_of(top_k) {
            let expected = (tokens + 1) * top_k;
            return Err(Error::WrongLength { what: "expert ids", expected, given: ids.len() });
        }
        let max_tokens = self.shape.config().max_tokens;
        if tokens > max_tokens as usize {
            return Err(Error::TooManyTokens { tokens, max_tokens });
        }
        match weights {
            None => self.weights[..ids.len()].fill(1.0),
            Some(weights) if weights.len() == ids.len() => {
                self.weights[..ids.len()].copy_from_slice(weights);
            }
            Some(weights) => {
                let (expected, given) = (ids.len(), weights.len());
                return Err(Error::WrongLength { what: "weights", expected, given });
            }
        }
        self.reset();
        self.count(ids)?;
        self.tokens = tokens;
        self.place();
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.sort::<false>(ids.len()),
            CombineMode::PerExpert => self.sort::<true>(ids.len()),
        }
        Ok(())
    }

    /// Clears the counts before the first pass.
    fn reset(&mut self) {
        self.experts.fill(Tally::default());
        self.ranks.fill(Tally::default());
    }

    /// First pass: checks each id, and counts rows and pairs.
    fn count<I: Copy + Into<i64>>(&mut self, ids: &[I]) -> Result<(), Error> {
        let top_k = self.shape.config().top_k as usize;
        let SendPlan { owners, experts, ranks, slots, .. } = self;
        let owners = &owners[..experts.len()];
        let tokens = ids.chunks_exact(top_k).zip(slots.chunks_exact_mut(top_k));
        for (mark, (ids, slots)) in (1..).zip(tokens) {
            for (slot, (&id, out)) in ids.iter().zip(slots).enumerate() {
                let id: i64 = id.into();
                let token = mark as usize - 1;
                // A negative id is out of range as well.
                let Some(expert) = experts.get_mut(id as usize) else {
                    if id < 0 {
                        *out = NO_EXPERT;
                        continue;
                    }
                    let experts = self.shape.config().experts;
                    return Err(Error::ExpertOutOfRange { token, slot, expert: id, experts });
                };
                if expert.mark == mark {
                    return Err(Error::ExpertTwice { token, expert: id as u32 });
                }
                *expert = Tally { mark, count: expert.count + 1 };
                let rank = &mut ranks[owners[id as usize] as usize];
                let first = u32::from(rank.mark != mark);
                *rank = Tally { mark, count: rank.count + first };
                *out = id as u32 | (first * FIRST);
            }
        }
        Ok(())
    }

    /// Between the passes: prefix sums over the counts.
    fn place(&mut self) {
        for (count, expert) in self.rows_of_expert.iter_mut().zip(&self.experts) {
            *count = expert.count;
        }
        let (mut row, mut pair) = (0, 0);
        for (index, rank) in self.ranks.iter().enumerate() {
            let experts = self.shape.placement().experts_of(index as u32);
            let pairs = &self.rows_of_expert[experts.start as usize..experts.end as usize];
            self.rows_to_rank[index] = rank.count;
            (self.row_base[index], self.pair_base[index]) = (row, pair);
            self.cursors[index] = DestinationCursor::new(row, pair);
            row += rank.count;
            pair += pairs.iter().sum::<u32>();
        }
        let ranks = self.ranks.len();
        (self.row_base[ranks], self.pair_base[ranks]) = (row, pair);
    }

    /// Second pass: assigns an index to each pair and each row.
    fn sort<const PER_EXPERT: bool>(&mut self, ids: usize) {
        let SendPlan { owners, cursors, rows, slots, reply_of_slot, .. } = self;
        let slots = slots[..ids].iter().zip(&mut reply_of_slot[..ids]);
        for (source, (&slot, reply)) in (0..).zip(slots) {
            if slot == NO_EXPERT {
                *reply = NO_REPLY;
                continue;
            }
            let (expert, first) = (slot & !FIRST, slot / FIRST);
            let cursor = &mut cursors[owners[expert as usize] as usize];
            let row = cursor.take_row(first) - 1;
            let place = &mut rows[row as usize];
            *place = if first == 1 { source } else { *place | MORE };
            *reply = match (PER_EXPERT, first) {
                (true, _) => cursor.take_pair(),
                (false, 1) => row,
                (false, _) => NO_REPLY,
            };
        }
    }

    /// The plan's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Token count in the batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Rows to each rank.
    pub fn rows_to_rank(&self) -> &[u32] {
        &self.rows_to_rank
    }

    /// For each expert in the group, the tokens that name it.
    pub fn rows_of_expert(&self) -> &[u32] {
        &self.rows_of_expert
    }

    /// Row count, over all destinations.
    pub fn row_count(&self) -> usize {
        self.row_base[self.ranks.len()] as usize
    }

    /// Pair count, over all destinations.
    pub fn pair_count(&self) -> usize {
        self.pair_base[self.ranks.len()] as usize
    }

    /// The rows that go to `rank`.
    pub fn rows_for(&self, rank: u32) -> Range<usize> {
        let rank = rank as usize;
        self.row_base[rank] as usize..self.row_base[rank + 1] as usize
    }

    /// The pairs that go to `rank`.
    pub fn pairs_for(&self, rank: u32) -> Range<usize> {
        let rank = rank as usize;
        self.pair_base[rank] as usize..self.pair_base[rank + 1] as usize
    }

    /// Rows in the replies area for replies from `rank`.
    pub fn replies_from(&self, rank: u32) -> Range<usize> {
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.rows_for(rank),
            CombineMode::PerExpert => self.pairs_for(rank),
        }
    }

    /// Reply count, over all ranks.
    pub fn reply_count(&self) -> usize {
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.row_count(),
            CombineMode::PerExpert => self.pair_count(),
        }
    }

    /// Token in `row`.
    pub fn token_of(&self, row: usize) -> usize {
        ((self.rows[row] & !MORE) / self.shape.config().top_k) as usize
    }

    /// Metadata for `row`: the destination's experts that take it, in top-k order.
    pub(crate) fn entries(&self, row: usize) -> impl Iterator<Item = RecordEntry> + '_ {
        let (first, more) = (self.rows[row] & !MORE, self.rows[row] & MORE != 0);
        let top_k = self.shape.config().top_k;
        let token = first - first % top_k;
        let end = if more { token + top_k } else { first + 1 };
        let expert = |place: u32| self.slots[place as usize] & !FIRST;
        let block = self.shape.placement().experts_of(self.owners[expert(first) as usize]);
        // The token's other slots on the same rank. No block contains the empty-slot value.
        (first..end).filter_map(move |place| {
            let expert = expert(place);
            block.contains(&expert).then(|| RecordEntry {
                expert: (expert - block.start) as u16,
                slot: (place - token) as u16,
                weight: self.weights[place as usize],
            })
        })
    }

    /// Metadata record size in bytes.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.shape.sizes().extent(Area::Metadata).stride as usize
    }

    /// Orders the replies to `tokens` by rank, the summation order for replies that were reduced at the
    /// experts. Rows are sorted by rank, so this is row number order.
    pub(crate) fn order_replies(&mut self, tokens: Range<usize>) {
        let top_k = self.shape.config().top_k as usize;
        if self.shape.config().combine == CombineMode::ReduceAtExpert {
            for slots in
                self.reply_of_slot[tokens.start * top_k..tokens.end * top_k].chunks_exact_mut(top_k)
            {
                slots.sort_unstable();
            }
        }
    }

    /// Rows in the replies area for `token`, in summation order, each with its top-k slot's weight. The
    /// weight is meaningful only with one reply per expert.
    pub(crate) fn replies_of(&self, token: usize) -> impl Iterator<Item = (f32, u32)> + Clone + '_ {
        let top_k = self.shape.config().top_k as usize;
        let slots = token * top_k..(token + 1) * top_k;
        let weights = self.weights[slots.clone()].iter().copied();
        weights
            .zip(self.reply_of_slot[slots].iter().copied())
            .filter(|(_, reply)| *reply != NO_REPLY)
    }
}
