//! What can go wrong, one variant per cause.

use std::fmt::Display;

/// Why a scenario was refused or could not be run to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The scenario is not the JSON that it should be.
    #[error("the scenario cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A field has a value that cannot be.
    #[error("{field} is {value}; it must be {must}")]
    Field {
        /// The field, as a path in the scenario.
        field: String,
        /// What it is.
        value: String,
        /// What it must be.
        must: String,
    },
    /// A schedule waits for what never comes.
    #[error(
        "the schedule {schedule} deadlocks: rank {rank} stands at operation {op} (step {step}), \
         {waits}; {others} other ranks stand too"
    )]
    Deadlock {
        /// The schedule's name.
        schedule: String,
        /// Who waits for a write that nobody posts any more, or has come least far.
        rank: u32,
        /// Which of its operations it stands at.
        op: u32,
        /// The step that the operation belongs to.
        step: u32,
        /// What it waits for.
        waits: String,
        /// How many others do not end.
        others: u32,
    },
    /// Bytes are left that no link carries any more.
    #[error(
        "the write from {flow} can never end: the link {link} has failed, and at {time} s nothing else \
         is left to happen ({flows} writes wait like it); let the link come back (until_s), or route around it"
    )]
    Stalled {
        /// Whose bytes.
        flow: String,
        /// The link.
        link: String,
        /// How many flows stand.
        flows: u32,
        /// Since when.
        time: f64,
    },
    /// A workload waits for what never comes.
    #[error("{what} has no end: rank {rank} waits in round {round}, and nothing is left to happen")]
    Waiting {
        /// Which workload.
        what: &'static str,
        /// Who waits, of those the one that has come least far.
        rank: u32,
        /// In which round.
        round: u32,
    },
    /// Nothing was given to run.
    #[error("nothing is left to run")]
    Nothing,
    /// The caller asked to stop.
    #[error("the run was cancelled at {time_s} s of simulated time")]
    Cancelled {
        /// How far it had come.
        time_s: f64,
    },
    /// Topology or routing.
    #[error(transparent)]
    Topology(Box<weft_topology::Error>),
    /// A schedule that cannot be built.
    #[error(transparent)]
    Collectives(Box<weft_collectives::Error>),
    /// The network solver.
    #[error(transparent)]
    Network(#[from] weft_netsim::Error),
    /// A mixture-of-experts shape or round.
    #[error(transparent)]
    Moe(#[from] weft_moe::Error),
}

impl Error {
    /// A field that cannot be what it is.
    pub fn field(field: impl Into<String>, value: impl Display, must: impl Into<String>) -> Error {
        Error::Field { field: field.into(), value: value.to_string(), must: must.into() }
    }
}

// Boxed, as results travel through many hands and these two are large.
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
