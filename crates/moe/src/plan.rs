//! The sender's plan: from expert ids to who gets which token.
//!
//! A token goes once to each rank that owns any of its experts. Two passes over the ids make the
//! plan: the first counts, the second sorts by destination (a counting sort, so each destination's
//! rows are in token order and its pairs in top-k order within a row). Both are bound by the two dozen
//! instructions that they spend on each pair.

use std::ops::Range;

use crate::error::Error;
use crate::metadata::Entry;
use crate::rows::Area;
use crate::shape::{CombineMode, Shape};

/// Marks a slot that has no answer of its own.
const NOWHERE: u32 = u32::MAX;
/// Marks a slot that names no expert.
const NOBODY: u32 = u32::MAX;
/// Beside a slot's expert: it is the first of its token that goes to its rank.
const FIRST: u32 = 1 << 31;
/// Beside a row's first pair: the token names more experts of that rank.
const MORE: u32 = 1 << 31;
/// More experts, or more ids in a batch, than this leave no room for the marks.
pub(crate) const MOST_MARKED: u64 = (FIRST - 1) as u64;

/// What one rank sends in one round. Made once; [`SendPlan::build`] fills it without allocating.
///
/// *Rows* are token copies in the order in which they leave: by destination, then by token. *Pairs*
/// are (token, expert) in the same order, and by top-k slot within a token.
#[derive(Clone, Debug)]
pub struct SendPlan {
    shape: Shape,
    tokens: usize,
    /// By expert: its rank, and in the first pass its tokens.
    owners: Vec<u32>,
    experts: Vec<Tally>,
    /// By rank: in the first pass its rows, in the second where the next one goes.
    ranks: Vec<Tally>,
    cursors: Vec<Cursor>,
    rows_of_expert: Vec<u32>,
    rows_to_rank: Vec<u32>,
    row_base: Vec<u32>,
    pair_base: Vec<u32>,
    /// By row: the place of its first pair in the array of ids, `token * top_k + slot`, with [`MORE`].
    rows: Vec<u32>,
    /// By place in the array of ids: the expert, with [`FIRST`], or [`NOBODY`].
    slots: Vec<u32>,
    answer_of_slot: Vec<u32>,
    weights: Vec<f32>,
}

/// `mark` is one more than the token last counted, so 0 is none.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    mark: u32,
    count: u32,
}

/// The next row and the next pair, in the lower and the upper half, so that one store moves both.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor(u64);

impl Cursor {
    fn new(row: u32, pair: u32) -> Cursor {
        Cursor(u64::from(pair) << 32 | u64::from(row))
    }

    /// Takes a row if `rows` is 1; gives one past the last row taken.
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
    /// A plan of nothing, with room for any round of this shape.
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
            cursors: vec![Cursor::default(); ranks],
            rows_of_expert: vec![0; config.experts as usize],
            rows_to_rank: vec![0; ranks],
            row_base: vec![0; ranks + 1],
            pair_base: vec![0; ranks + 1],
            rows: vec![0; send_rows],
            slots: vec![NOBODY; pairs],
            answer_of_slot: vec![NOWHERE; pairs],
            weights: vec![1.0; pairs],
        }
    }

    /// Plans a round: `ids` holds `top_k` expert ids for each token, a negative one meaning none.
    /// `weights`, if given, are as many; otherwise every weight is 1.
    ///
    /// # Errors
    /// [`Error::WrongLength`], [`Error::TooManyTokens`], [`Error::ExpertOutOfRange`],
    /// [`Error::ExpertTwice`]. The plan is then one of no tokens.
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

    /// Before the first pass: nothing is counted.
    fn reset(&mut self) {
        self.experts.fill(Tally::default());
        self.ranks.fill(Tally::default());
    }

    /// First pass: checks every id and counts rows and pairs.
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
                        *out = NOBODY;
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

    /// Between the passes: counts become first places.
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
            self.cursors[index] = Cursor::new(row, pair);
            row += rank.count;
            pair += pairs.iter().sum::<u32>();
        }
        let ranks = self.ranks.len();
        (self.row_base[ranks], self.pair_base[ranks]) = (row, pair);
    }

    /// Second pass: every pair and every row to its place.
    fn sort<const PER_EXPERT: bool>(&mut self, ids: usize) {
        let SendPlan { owners, cursors, rows, slots, answer_of_slot, .. } = self;
        let slots = slots[..ids].iter().zip(&mut answer_of_slot[..ids]);
        for (source, (&slot, answer)) in (0..).zip(slots) {
            if slot == NOBODY {
                *answer = NOWHERE;
                continue;
            }
            let (expert, first) = (slot & !FIRST, slot / FIRST);
            let cursor = &mut cursors[owners[expert as usize] as usize];
            let row = cursor.take_row(first) - 1;
            let place = &mut rows[row as usize];
            *place = if first == 1 { source } else { *place | MORE };
            *answer = match (PER_EXPERT, first) {
                (true, _) => cursor.take_pair(),
                (false, 1) => row,
                (false, _) => NOWHERE,
            };
        }
    }

    /// The shape that the plan was made for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// For each rank, the rows that go to it.
    pub fn rows_to_rank(&self) -> &[u32] {
        &self.rows_to_rank
    }

    /// For each expert of the group, the tokens that name it.
    pub fn rows_of_expert(&self) -> &[u32] {
        &self.rows_of_expert
    }

    /// The number of rows, over all destinations.
    pub fn row_count(&self) -> usize {
        self.row_base[self.ranks.len()] as usize
    }

    /// The number of pairs, over all destinations.
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

    /// The rows of the answers area in which `rank`'s answers arrive.
    pub fn answers_from(&self, rank: u32) -> Range<usize> {
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.rows_for(rank),
            CombineMode::PerExpert => self.pairs_for(rank),
        }
    }

    /// The number of answers, over all ranks.
    pub fn answer_count(&self) -> usize {
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.row_count(),
            CombineMode::PerExpert => self.pair_count(),
        }
    }

    /// The token of which `row` is a copy.
    pub fn token_of(&self, row: usize) -> usize {
        ((self.rows[row] & !MORE) / self.shape.config().top_k) as usize
    }

    /// The metadata of `row`: its destination's experts that want it, in top-k order.
    pub(crate) fn entries(&self, row: usize) -> impl Iterator<Item = Entry> + '_ {
        let (first, more) = (self.rows[row] & !MORE, self.rows[row] & MORE != 0);
        let top_k = self.shape.config().top_k;
        let token = first - first % top_k;
        let end = if more { token + top_k } else { first + 1 };
        let expert = |place: u32| self.slots[place as usize] & !FIRST;
        let block = self.shape.placement().experts_of(self.owners[expert(first) as usize]);
        // Of the rest of the token's slots, those of the same rank; no block has what marks nobody.
        (first..end).filter_map(move |place| {
            let expert = expert(place);
            block.contains(&expert).then(|| Entry {
                expert: (expert - block.start) as u16,
                slot: (place - token) as u16,
                weight: self.weights[place as usize],
            })
        })
    }

    /// Bytes of a metadata record.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.shape.sizes().extent(Area::Metadata).stride as usize
    }

    /// Orders the answers of `tokens` by rank, which is how they are summed where they were reduced at
    /// the experts. Rows are sorted by rank, so this is the order of their numbers.
    pub(crate) fn order_answers(&mut self, tokens: Range<usize>) {
        let top_k = self.shape.config().top_k as usize;
        if self.shape.config().combine == CombineMode::ReduceAtExpert {
            for slots in self.answer_of_slot[tokens.start * top_k..tokens.end * top_k]
                .chunks_exact_mut(top_k)
            {
                slots.sort_unstable();
            }
        }
    }

    /// The rows of the answers area that belong to `token`, in the order in which they are summed, each
    /// with the weight of its top-k slot (which has a meaning with one answer per expert only).
    pub(crate) fn answers_of(&self, token: usize) -> impl Iterator<Item = (f32, u32)> + Clone + '_ {
        let top_k = self.shape.config().top_k as usize;
        let slots = token * top_k..(token + 1) * top_k;
        let weights = self.weights[slots.clone()].iter().copied();
        weights
            .zip(self.answer_of_slot[slots].iter().copied())
            .filter(|(_, answer)| *answer != NOWHERE)
    }
}
