//! Measured times for one algorithm by size.

use crate::algorithm::{Algorithm, Options};

/// Measured times for one algorithm: a line between each two sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Collective name.
    pub collective: &'static str,
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Chunk count, for pipelined algorithms.
    pub chunks: u32,
    /// Vector sizes in bytes, rising, and seconds per call: at least one point.
    pub points: Vec<(u64, f64)>,
}

impl Curve {
    /// Algorithm options.
    pub fn options(&self) -> Options {
        Options { chunks: self.chunks, ..Options::default() }
    }

    /// Longest vector measured, in bytes.
    pub fn last_bytes(&self) -> u64 {
        self.points.last().map_or(0, |point| point.0)
    }

    /// Seconds per call on a vector of `bytes` bytes: on the line between two points; for shorter vectors the
    /// shortest one's time; for longer ones in proportion to the longest.
    pub fn seconds(&self, bytes: u64) -> f64 {
        let after = self.points.partition_point(|point| point.0 < bytes);
        match (after.checked_sub(1).map(|before| self.points[before]), self.points.get(after)) {
            (Some((low, from)), Some(&(high, to))) => {
                from + (to - from) * ((bytes - low) as f64 / (high - low) as f64)
            }
            (None, Some(&(_, first))) => first,
            (Some((longest, seconds)), None) => seconds * (bytes as f64 / longest as f64),
            (None, None) => f64::INFINITY,
        }
    }
}
