//! Headers: the counts that each rank sends to every rank, and all ranks' counts.
//!
//! Layout, little-endian: magic (u32), sender rank (u32), round (u64), tokens (u32), zero (u32), rows to each
//! rank (u32 each), rows for each expert (u32 each).

use crate::error::Error;
use crate::plan::send::SendPlan;
use crate::shape::Shape;
use crate::shape::config::CombineMode;
use crate::shape::wire::{HEADER_FIXED, header_bytes};

/// "WEMO" and the layout version.
const MAGIC: u32 = u32::from_le_bytes(*b"WEM\x01");

/// Writes `plan`'s header for `round` to the start of `out`.
///
/// # Errors
/// [`Error::WrongLength`] if `out` is shorter than a header.
pub fn encode(plan: &SendPlan, round: u64, out: &mut [u8]) -> Result<(), Error> {
    let config = plan.shape().config();
    let (expected, given) = (header_bytes(config) as usize, out.len());
    if given < expected {
        return Err(Error::WrongLength { what: "the send header", expected, given });
    }
    let (fixed, counts) = out.split_at_mut(HEADER_FIXED);
    fixed[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    fixed[4..8].copy_from_slice(&config.rank.to_le_bytes());
    fixed[8..16].copy_from_slice(&round.to_le_bytes());
    fixed[16..20].copy_from_slice(&(plan.tokens() as u32).to_le_bytes());
    fixed[20..24].fill(0);
    let values = plan.rows_to_rank().iter().chain(plan.rows_of_expert());
    for (value, out) in values.zip(counts.as_chunks_mut::<4>().0) {
        *out = value.to_le_bytes();
    }
    Ok(())
}

/// A round's counts, gathered from all ranks' headers, including this one's.
///
/// All ranks hold the same numbers, so all compute the same offsets and, if a rank would overflow, the same
/// error.
#[derive(Clone, Debug)]
pub struct RoundCounts {
    shape: Shape,
    round: u64,
    accepted: Vec<bool>,
    missing: usize,
    /// Row counts, `[source][destination]`.
    rows: Vec<u32>,
    /// Pair counts, `[source][destination]`.
    pairs: Vec<u32>,
    /// Token counts, `[source][local expert]`, for this rank's experts.
    local: Vec<u32>,
    rows_of_expert: Vec<u64>,
    /// Token count in the header that is being read; `scratch` holds its row counts for ranks and experts.
    tokens: u32,
    scratch: Vec<u32>,
}

impl RoundCounts {
    /// Counts with room for any round.
    pub fn new(shape: &Shape) -> RoundCounts {
        let (ranks, experts) = (shape.config().ranks as usize, shape.config().experts as usize);
        RoundCounts {
            shape: shape.clone(),
            round: 0,
            accepted: vec![false; ranks],
            missing: ranks,
            rows: vec![0; ranks * ranks],
            pairs: vec![0; ranks * ranks],
            local: vec![0; ranks * shape.local_experts()],
            rows_of_expert: vec![0; experts],
            tokens: 0,
            scratch: vec![0; ranks + experts],
        }
    }

    /// Clears the counts and begins `round`.
    pub fn begin(&mut self, round: u64) {
        self.round = round;
        self.accepted.fill(false);
        self.missing = self.accepted.len();
        self.rows_of_expert.fill(0);
    }

    /// Takes `peer`'s header; a second one in the same round is ignored.
    ///
    /// # Errors
    /// [`Error::Header`] if the header is inconsistent. The counts are then unchanged.
    pub fn accept(&mut self, peer: u32, header: &[u8]) -> Result<(), Error> {
        let ranks = self.accepted.len();
        let source = peer as usize;
        if source >= ranks {
            return Err(Error::RankOutOfRange { rank: peer, ranks: ranks as u32 });
        }
        if self.accepted[source] {
            return Ok(());
        }
        self.decode(peer, header)?;
        self.check_and_store(peer)?;
        let experts = &self.scratch[ranks..];
        let mine = self.shape.placement().experts_of(self.shape.config().rank);
        let local = mine.len();
        self.local[source * local..(source + 1) * local]
            .copy_from_slice(&experts[mine.start as usize..mine.end as usize]);
        for (total, count) in self.rows_of_expert.iter_mut().zip(experts) {
            *total += u64::from(*count);
        }
        self.accepted[source] = true;
        self.missing -= 1;
        Ok(())
    }

    /// True if every rank's header was taken.
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// True if `rank`'s header was taken.
    pub fn has(&self, rank: u32) -> bool {
        self.accepted.get(rank as usize).copied().unwrap_or(false)
    }

    /// Rejects a round in which a rank would receive more rows than it has room for.
    ///
    /// # Errors
    /// [`Error::Capacity`], the same on every rank.
    pub fn check_capacity(&self) -> Result<(), Error> {
        let capacity = self.shape.sizes().receive_rows();
        for rank in 0..self.shape.config().ranks {
            let rows = self.sources().map(|source| u64::from(self.rows(source, rank))).sum();
            if rows > u64::from(capacity) {
                return Err(Error::Capacity { rank, rows, capacity });
            }
        }
        Ok(())
    }

    /// Rows from `source` to `destination`.
    pub fn rows(&self, source: u32, destination: u32) -> u32 {
        self.rows[source as usize * self.accepted.len() + destination as usize]
    }

    /// (token, expert) pairs from `source` to `destination`.
    pub fn pairs(&self, source: u32, destination: u32) -> u32 {
        self.pairs[source as usize * self.accepted.len() + destination as usize]
    }

    /// Replies from `destination` to `source`.
    pub fn replies(&self, source: u32, destination: u32) -> u32 {
        match self.shape.config().combine {
            CombineMode::ReduceAtExpert => self.rows(source, destination),
            CombineMode::PerExpert => self.pairs(source, destination),
        }
    }

    /// Rows from `source` to `destination` after the private ones.
    pub fn remainder(&self, source: u32, destination: u32) -> u32 {
        self.rows(source, destination).saturating_sub(self.shape.config().private_rows)
    }

    /// First slot for `source`'s rows in the remainder at `destination`, after all lower ranks' rows. Within
    /// the area if [`RoundCounts::check_capacity`] passes.
    pub fn remainder_offset(&self, source: u32, destination: u32) -> u32 {
        let slots = |lower| self.shape.sizes().slots_of(self.remainder(lower, destination));
        (0..source).map(slots).fold(0, u32::saturating_add)
    }

    /// First row for `destination`'s replies in the replies area at `source`, after all lower ranks' replies.
    pub fn reply_offset(&self, source: u32, destination: u32) -> u32 {
        (0..destination).map(|lower| self.replies(source, lower)).sum()
    }

    /// For each expert in the group, the tokens that name it, over the headers taken so far.
    pub fn rows_of_expert(&self) -> &[u64] {
        &self.rows_of_expert
    }

    /// For each of this rank's experts, the tokens from `source` that name it.
    pub(crate) fn local_rows(&self, source: u32) -> &[u32] {
        let local = self.shape.local_experts();
        &self.local[source as usize * local..][..local]
    }

    fn sources(&self) -> std::ops::Range<u32> {
        0..self.shape.config().ranks
    }

    /// Reads a header into the scratch and checks the fixed part.
    fn decode(&mut self, peer: u32, header: &[u8]) -> Result<(), Error> {
        let wrong = |what, expected, seen| Err(Error::Header { peer, what, expected, seen });
        let length = header_bytes(self.shape.config()) as u64;
        let Some((fixed, rest)) = header.split_first_chunk::<HEADER_FIXED>() else {
            return wrong("length in bytes", length, header.len() as u64);
        };
        if (header.len() as u64) < length {
            return wrong("length in bytes", length, header.len() as u64);
        }
        let words = fixed.as_chunks::<4>().0;
        let word = |index: usize| u32::from_le_bytes(words[index]);
        if word(0) != MAGIC {
            return wrong("magic number", MAGIC.into(), word(0).into());
        }
        if word(1) != peer {
            return wrong("rank", peer.into(), word(1).into());
        }
        let round = u64::from(word(2)) | u64::from(word(3)) << 32;
        if round != self.round {
            return wrong("round", self.round, round);
        }
        let max_tokens = self.shape.config().max_tokens;
        if word(4) > max_tokens {
            return wrong("number of tokens", max_tokens.into(), word(4).into());
        }
        self.tokens = word(4);
        for (value, bytes) in self.scratch.iter_mut().zip(rest.as_chunks().0) {
            *value = u32::from_le_bytes(*bytes);
            if *value > word(4) {
                return wrong("count of rows", word(4).into(), (*value).into());
            }
        }
        Ok(())
    }

    /// Checks that the row counts to each rank are consistent with its experts' counts, and stores the sums.
    fn check_and_store(&mut self, peer: u32) -> Result<(), Error> {
        let ranks = self.accepted.len();
        let (to_rank, of_expert) = self.scratch.split_at(ranks);
        let (tokens, top_k) = (self.tokens, self.shape.config().top_k);
        let (most, sum) = (
            u64::from(tokens) * u64::from(top_k),
            of_expert.iter().map(|&count| u64::from(count)).sum(),
        );
        if sum > most {
            return Err(Error::Header { peer, what: "count of pairs", expected: most, seen: sum });
        }
        for (destination, &rows) in to_rank.iter().enumerate() {
            let block = self.shape.placement().experts_of(destination as u32);
            let block = &of_expert[block.start as usize..block.end as usize];
            // Every row names at least one expert, each expert at most once.
            let most = block.iter().copied().max().unwrap_or(0);
            let sum: u64 = block.iter().map(|&count| u64::from(count)).sum();
            let limit =
                u64::from(rows) * u64::from(self.shape.most_local_pairs(destination as u32));
            let problem = if rows < most {
                Some(("count of rows", u64::from(most), u64::from(rows)))
            } else if u64::from(rows) > sum {
                Some(("count of rows", sum, u64::from(rows)))
            } else if sum > limit {
                Some(("count of pairs", limit, sum))
            } else {
                None
            };
            if let Some((what, expected, seen)) = problem {
                return Err(Error::Header { peer, what, expected, seen });
            }
            let at = peer as usize * ranks + destination;
            self.rows[at] = rows;
            self.pairs[at] = sum as u32;
        }
        Ok(())
    }
}
