//! Vectors in a schedule, cut into segments.

use weft_collectives::Schedule;

use super::sizes::SpanSizes;
use crate::error::Error;

/// Maximum segment count in an execution, and maximum vectors times ranks.
const MOST_SEGMENTS: u64 = 1 << 20;
const MOST_STARTS: u64 = 1 << 26;

/// Vector segment: one pass through the schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub sizes: SpanSizes,
    pub vector: u32,
    /// True for the first and the last segment in a vector.
    pub first: bool,
    pub last: bool,
}

/// Consecutive vectors.
#[derive(Clone, Debug)]
pub(crate) struct Vectors {
    segments: Vec<Segment>,
    /// First segment in each vector, and one past the last segment.
    starts: Vec<u32>,
    /// Release time for each vector at each rank, by vector.
    release_s: Vec<f64>,
    ranks: usize,
}

impl Vectors {
    /// Vectors with `lengths` in segments of at most `segment` bytes.
    pub fn new(
        schedule: &impl Schedule,
        lengths: &[u64],
        segment: Option<u64>,
    ) -> Result<Vectors, Error> {
        let ranks = schedule.ranks() as usize;
        let count = |bytes: &u64| segment.map_or(1, |most| bytes.div_ceil(most).max(1));
        let all = lengths.iter().map(count).fold(0, u64::saturating_add);
        if all > MOST_SEGMENTS {
            let must =
                format!("at most {MOST_SEGMENTS}; pass fewer vectors or a larger segment_bytes");
            return Err(Error::field("segments in all vectors", all, must));
        }
        let releases = lengths.len() as u64 * ranks as u64;
        if releases > MOST_STARTS {
            let must = format!("at most {MOST_STARTS}: fewer segments or iterations");
            return Err(Error::field("vectors times ranks", releases, must));
        }
        let mut vectors = Vectors {
            segments: Vec::with_capacity(all as usize),
            starts: vec![0],
            release_s: vec![0.0; releases as usize],
            ranks,
        };
        for (vector, bytes) in (0u32..).zip(lengths) {
            let parts = count(bytes);
            let start =
                |part: u64| (u128::from(*bytes) * u128::from(part) / u128::from(parts)) as u64;
            for part in 0..parts {
                let sizes = SpanSizes::new(schedule, start(part + 1) - start(part))?;
                let (first, last) = (part == 0, part + 1 == parts);
                vectors.segments.push(Segment { sizes, vector, first, last });
            }
            vectors.starts.push(vectors.segments.len() as u32);
        }
        Ok(vectors)
    }

    /// Segment count.
    pub fn segments(&self) -> u32 {
        self.segments.len() as u32
    }

    /// Segment by number.
    pub fn segment(&self, segment: u32) -> Segment {
        self.segments[segment as usize]
    }

    /// Segments in the first `released` vectors.
    pub fn allowed(&self, released: u32) -> u32 {
        self.starts[released as usize]
    }

    /// Release time for a vector at a rank.
    pub fn release_s(&mut self, vector: u32, rank: u32) -> &mut f64 {
        &mut self.release_s[vector as usize * self.ranks + rank as usize]
    }
}
