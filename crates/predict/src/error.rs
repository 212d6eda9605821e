//! Errors in scenarios and runs, one variant per cause.

use std::fmt::Display;

/// Invalid scenario, or a run without an end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Malformed JSON.
    #[error("scenario: {0}")]
    Json(#[from] serde_json::Error),
    /// Field out of range.
    #[error("{field} {value}: expected {must}")]
    Field {
        /// Field path in the scenario, for example `job.ranks`.
        field: String,
        /// Given value.
        value: String,
        /// Expected values.
        must: String,
    },
    /// Schedule deadlock.
    #[error(
        "schedule {schedule}: deadlock of rank {rank} at operation {op} (step {step}), {waits}; \
         {others} other ranks are blocked"
    )]
    Deadlock {
        /// Schedule name.
        schedule: String,
        /// A rank whose awaited write is never posted, or else the one with the least progress.
        rank: u32,
        /// The rank's current operation.
        op: u32,
        /// Step in which the operation is.
        step: u32,
        /// Awaited rank and lane.
        waits: String,
        /// Count of other blocked ranks.
        others: u32,
    },
    /// Flow over a failed link with no later event.
    #[error(
        "write from {flow}: link {link} has failed, and no event is left at {time} s ({flows} blocked \
         writes); set until_s of the fault, or route around the link"
    )]
    Stalled {
        /// Flow name.
        flow: String,
        /// Failed link.
        link: String,
        /// Number of blocked flows.
        flows: u32,
        /// Virtual time, in seconds.
        time: f64,
    },
    /// Workload without a further event.
    #[error("{what}: rank {rank} is blocked in round {round}, and no event is left")]
    Blocked {
        /// Workload.
        what: &'static str,
        /// Blocked rank with the least progress.
        rank: u32,
        /// The rank's round.
        round: u32,
    },
    /// No workload to run.
    #[error("no workload to run")]
    NoWorkload,
    /// Cancelled by the caller.
    #[error("cancelled at {time_s} s of virtual time")]
    Cancelled {
        /// Virtual time, in seconds.
        time_s: f64,
    },
    /// Topology or routing error.
    #[error(transparent)]
    Topology(Box<weft_topology::Error>),
    /// Schedule construction error.
    #[error(transparent)]
    Collectives(Box<weft_collectives::Error>),
    /// Network solver error.
    #[error(transparent)]
    Network(#[from] weft_netsim::Error),
    /// Error in a mixture-of-experts shape or plan.
    #[error(transparent)]
    Moe(#[from] weft_moe::Error),
}

impl Error {
    /// [`Error::Field`].
    pub fn field(field: impl Into<String>, value: impl Display, must: impl Into<String>) -> Error {
        Error::Field { field: field.into(), value: value.to_string(), must: must.into() }
    }
}

// Boxed: these two are large, and results are returned through many frames.
impl From<weft_topology::Error> for Error {
    fn from(error: weft_topology::Error) -> Error {
        Error::Topology(Box::new(error))
    }
}

impl From<weft_collectives::Error> for Error {
    fn from(error: weft_collectives::Error) -> Error {
        Error::Collectives(Box::new(error))
    }
}
