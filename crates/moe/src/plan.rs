//! The sender's plan: from expert ids to who gets which token.
//!
//! A token goes once to each rank that owns any of its experts. Two passes over the ids make the
//! plan: the first counts, the second sorts by destination (a counting sort, so each destination's
//! rows are in token order and its pairs in top-k order within a row).

use std::ops::Range;

use crate::error::Error;
use crate::metadata::Entry;
use crate::rows::Area;
use crate::shape::{CombineMode, Shape};

/// Marks a slot that has no answer of its own.
const NOWHERE: u32 = u32::MAX;

/// What one rank sends in one round. Made once; [`SendPlan::build`] fills it without allocating.
///
/// *Rows* are token copies in the order in which they leave: by destination, then by token. *Pairs*
/// are (token, expert) in the same order, and by top-k slot within a token.
#[derive(Clone, Debug)]
pub struct SendPlan {
    shape: Shape,
    tokens: usize,
    experts: Vec<ExpertCount>,
    ranks: Vec<RankCount>,
    rows_of_expert: Vec<u32>,
    rows_to_rank: Vec<u32>,
    row_base: Vec<u32>,
    pair_base: Vec<u32>,
    rows: Vec<Row>,
    pairs: Vec<Pair>,
    answer_of_slot: Vec<u32>,
    weights: Vec<f32>,
}

/// `mark` is one more than the token last seen, so 0 is none.
#[derive(Clone, Copy, Debug)]
struct ExpertCount {
    owner: u32,
    mark: u32,
    pairs: u32,
}

/// In the first pass `row` and `pair` count; in the second they say where the next one goes.
#[derive(Clone, Copy, Debug, Default)]
struct RankCount {
    mark: u32,
    row: u32,
    pair: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Row {
    token: u32,
    first_pair: u32,
}

/// `source` is the pair's place in the array of ids: `token * top_k + slot`.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    source: u32,
    expert: u32,
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
            experts: (0..config.experts)
                .map(|expert| ExpertCount { owner: placement.owner(expert), mark: 0, pairs: 0 })
                .collect(),
            ranks: vec![RankCount::default(); ranks],
            rows_of_expert: vec![0; config.experts as usize],
            rows_to_rank: vec![0; ranks],
            row_base: vec![0; ranks + 1],
            pair_base: vec![0; ranks + 1],
            // One more than there can be: its `first_pair` ends the last row.
            rows: vec![Row::default(); send_rows + 1],
            pairs: vec![Pair::default(); pairs],
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
        let top_k = self.shape.config().top_k as usize;
        let tokens = ids.len() / top_k;
        self.clear();
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
        if let Err(error) = self.count(ids) {
            self.clear();
            return Err(error);
        }
        self.tokens = tokens;
        self.place();
        self.sort(ids);
        Ok(())
    }

    /// Makes this the plan of a round without tokens.
    fn clear(&mut self) {
        self.tokens = 0;
        for expert in &mut self.experts {
            (expert.mark, expert.pairs) = (0, 0);
        }
        self.ranks.fill(RankCount::default());
        self.place();
    }

    /// First pass: checks every id and counts rows and pairs.
    fn count<I: Copy + Into<i64>>(&mut self, ids: &[I]) -> Result<(), Error> {
        let top_k = self.shape.config().top_k as usize;
        for (token, ids) in ids.chunks_exact(top_k).enumerate() {
            let mark = token as u32 + 1;
            for (slot, &id) in ids.iter().enumerate() {
                let id: i64 = id.into();
                if id < 0 {
                    continue;
                }
                let Some(expert) = self.experts.get_mut(id as usize) else {
                    let experts = self.shape.config().experts;
                    return Err(Error::ExpertOutOfRange { token, slot, expert: id, experts });
                };
                if expert.mark == mark {
                    return Err(Error::ExpertTwice { token, expert: id as u32 });
                }
                expert.mark = mark;
                expert.pairs += 1;
                let rank = &mut self.ranks[expert.owner as usize];
                rank.row += u32::from(rank.mark != mark);
                rank.pair += 1;
                rank.mark = mark;
            }
        }
        Ok(())
    }

    /// Between the passes: counts become first places.
    fn place(&mut self) {
        let (mut row, mut pair) = (0, 0);
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            self.rows_to_rank[index] = rank.row;
            (self.row_base[index], self.pair_base[index]) = (row, pair);
            let count = std::mem::replace(rank, RankCount { mark: 0, row, pair });
            row += count.row;
            pair += count.pair;
        }
        let ranks = self.ranks.len();
        (self.row_base[ranks], self.pair_base[ranks]) = (row, pair);
        self.rows[row as usize].first_pair = pair;
        for (count, expert) in self.rows_of_expert.iter_mut().zip(&self.experts) {
            *count = expert.pairs;
        }
    }

    /// Second pass: every pair and every row to its place.
    fn sort<I: Copy + Into<i64>>(&mut self, ids: &[I]) {
        let top_k = self.shape.config().top_k as usize;
        let per_expert = self.shape.config().combine == CombineMode::PerExpert;
        for (token, ids) in ids.chunks_exact(top_k).enumerate() {
            let token = token as u32;
            for (slot, &id) in ids.iter().enumerate() {
                let source = token * top_k as u32 + slot as u32;
                let id: i64 = id.into();
                let mut answer = NOWHERE;
                if id >= 0 {
                    let rank = &mut self.ranks[self.experts[id as usize].owner as usize];
                    let pair = rank.pair;
                    self.pairs[pair as usize] = Pair { source, expert: id as u32 };
                    rank.pair += 1;
                    if rank.mark != token + 1 {
                        rank.mark = token + 1;
                        self.rows[rank.row as usize] = Row { token, first_pair: pair };
                        answer = rank.row;
                        rank.row += 1;
                    }
                    if per_expert {
                        answer = pair;
                    }
                }
                self.answer_of_slot[source as usize] = answer;
            }
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
        self.rows[row].token as usize
    }

    /// The metadata of `row`: its destination's experts that want it, in top-k order.
    pub(crate) fn entries(&self, row: usize) -> impl Iterator<Item = Entry> + '_ {
        let pairs = self.rows[row].first_pair as usize..self.rows[row + 1].first_pair as usize;
        let first_source = self.rows[row].token * self.shape.config().top_k;
        let first_expert = self.pairs.get(pairs.start).map_or(0, |pair| {
            let owner = self.experts[pair.expert as usize].owner;
            self.shape.placement().experts_of(owner).start
        });
        self.pairs[pairs].iter().map(move |pair| Entry {
            expert: (pair.expert - first_expert) as u16,
            slot: (pair.source - first_source) as u16,
            weight: self.weights[pair.source as usize],
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
