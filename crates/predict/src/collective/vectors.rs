//! The vectors that a schedule works on, cut into segments.

use weft_collectives::Schedule;

use super::sizes::Sizes;
use crate::error::Error;

/// The most segments of all vectors of an execution, and the most vectors times ranks.
const MOST_ROUNDS: u64 = 1 << 20;
const MOST_STARTS: u64 = 1 << 26;

/// A round is one pass through the schedule: a segment of a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub sizes: Sizes,
    pub vector: u32,
    /// Whether it is its vector's first segment, and whether its last.
    pub first: bool,
    pub last: bool,
}

/// Vectors, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Vectors {
    rounds: Vec<Round>,
    /// The first round of each vector, and one past the last round.
    starts: Vec<u32>,
    /// When each rank may begin each vector, by vector.
    release_s: Vec<f64>,
    ranks: usize,
}

impl Vectors {
    /// Vectors of these lengths in segments of at most `segment` bytes.
    pub fn new(
        schedule: &impl Schedule,
        lengths: &[u64],
        segment: Option<u64>,
    ) -> Result<Vectors, Error> {
        let ranks = schedule.ranks() as usize;
        let count = |bytes: &u64| segment.map_or(1, |most| bytes.div_ceil(most).max(1));
        let all = lengths.iter().map(count).fold(0, u64::saturating_add);
        if all > MOST_ROUNDS {
            let must = format!("at most {MOST_ROUNDS}: fewer vectors, or a larger segment_bytes");
            return Err(Error::field("segments of all vectors", all, must));
        }
        let releases = lengths.len() as u64 * ranks as u64;
        if releases > MOST_STARTS {
            let must = format!("at most {MOST_STARTS}: fewer rounds or iterations");
            return Err(Error::field("vectors times ranks", releases, must));
        }
        let mut vectors = Vectors {
            rounds: Vec::with_capacity(all as usize),
            starts: vec![0],
            release_s: vec![0.0; releases as usize],
            ranks,
        };
        for (vector, bytes) in (0u32..).zip(lengths) {
            let parts = count(bytes);
            let start =
                |part: u64| (u128::from(*bytes) * u128::from(part) / u128::from(parts)) as u64;
            for part in 0..parts {
                let sizes = Sizes::new(schedule, start(part + 1) - start(part))?;
                let (first, last) = (part == 0, part + 1 == parts);
                vectors.rounds.push(Round { sizes, vector, first, last });
            }
            vectors.starts.push(vectors.rounds.len() as u32);
        }
        Ok(vectors)
    }

    /// The number of rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds.len() as u32
    }

    /// A round.
    pub fn round(&self, round: u32) -> Round {
        self.rounds[round as usize]
    }

    /// How many rounds a rank may do that may begin `released` vectors.
    pub fn allowed(&self, released: u32) -> u32 {
        self.starts[released as usize]
    }

    /// When a rank may begin a vector.
    pub fn release_s(&mut self, vector: u32, rank: u32) -> &mut f64 {
        &mut self.release_s[vector as usize * self.ranks + rank as usize]
    }
}
