//! Tuning: predicted algorithm times, from `weft tune` measurements.
//!
//! [`TuningFile`] holds the measurements for several groups; [`Tuning`] for one group. Where an algorithm was measured,
//! the time is interpolated; for rank counts without measurements, it is estimated from link constants, by the
//! [`tune`](mod@crate::tune) model.
//!
//! Predictions use only additions, multiplications and divisions, so that all ranks obtain equal bits.
//!
//! - `file.rs`: the JSON file with its checks; `prediction.rs`: times for one group
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
