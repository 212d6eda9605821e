//! Tuning: predicted times of algorithms, from measurements of `weft tune`.
//!
//! [`TuningFile`] holds the measurements of several groups; [`Tuning`] is that of one group. Where an algorithm was
//! measured, its time is interpolated; for numbers of ranks without measurements, it is estimated from constants of
//! the links, by the model of [`tune`](mod@crate::tune).
//!
//! Predictions use additions, multiplications and divisions alone, so that all ranks obtain equal bits.
//!
//! - `file.rs`: the JSON file and its checks; `prediction.rs`: times of one group
//! - `candidate.rs`: algorithms to choose from; `curve.rs`: interpolation; `model.rs`: estimates from constants

mod candidate;
mod curve;
mod file;
mod model;
mod prediction;

pub use candidate::{candidates, collective_name};
pub use curve::Curve;
pub use file::{TuningFile, TuningKey, TuningSource};
pub use model::LinkConstants;
pub use prediction::{Prediction, Tuning};
