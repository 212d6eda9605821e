//! Measurements for one group, and the times that they predict.

use super::candidate::{candidates, collective_name, is_pipelined};
use super::curve::Curve;
use super::model::LinkConstants;
use crate::algorithm::{Algorithm, Options};
use crate::op::Collective;
use std::fmt;

/// Maximum rank count for which times are estimated; more take long to estimate.
const MODEL_RANKS: u32 = 64;

/// Measurements for one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Link constants.
    pub constants: LinkConstants,
    /// Measured times; empty if the group itself was not measured.
    pub curves: Vec<Curve>,
}

/// Predicted algorithm time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Algorithm options.
    pub options: Options,
    /// Seconds per call.
    pub seconds: f64,
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.algorithm)?;
        if is_pipelined(self.algorithm) {
            write!(f, " of {} chunks", self.options.chunks)?;
        }
        Ok(())
    }
}

impl Tuning {
    /// Predicted times for all candidates on a vector of `bytes` bytes, fastest first; none for more ranks than the
    /// model takes. An algorithm that was not measured up to this size, since it was slow, is no candidate where others
    /// were.
    pub fn predictions(&self, collective: Collective, ranks: u32, bytes: u64) -> Vec<Prediction> {
        let name = collective_name(collective);
        let of_collective = || self.curves.iter().filter(|curve| curve.collective == name);
        let longest = of_collective().map(Curve::last_bytes).max().unwrap_or(0);
        let measured = of_collective().filter(|curve| curve.last_bytes() >= bytes.min(longest));
        let mut all: Vec<Prediction> = measured
            .map(|curve| Prediction {
                algorithm: curve.algorithm,
                options: curve.options(),
                seconds: curve.seconds(bytes),
            })
            .collect();
        if all.is_empty() && ranks <= MODEL_RANKS {
            let estimated = candidates(collective).filter_map(|(algorithm, options)| {
                let seconds = self.constants.seconds(collective, algorithm, options, ranks, bytes);
                Some(Prediction { algorithm, options, seconds: seconds.ok()? })
            });
            all.extend(estimated);
        }
        all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        all
    }

    /// True if the collective was measured.
    pub fn is_measured(&self, collective: Collective) -> bool {
        self.curves.iter().any(|curve| curve.collective == collective_name(collective))
    }
}
