//! A rank's progress.
//!
//! A rank is at most one round ahead of another, since dispatch ends after the headers from all ranks. So arrivals are
//! counted for two rounds, in turn.

/// Arrivals at a rank in one round, and completed stages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoundProgress {
    pub headers: u32,
    pub rows: u32,
    pub answers: u32,
    pub packed: bool,
    pub routed: bool,
    pub dispatch_ended: bool,
    pub replies_sent: bool,
    pub combine_ended: bool,
}

/// Rank state.
#[derive(Clone, Debug, Default)]
pub(crate) struct MoeRank {
    pub slow: f64,
    pub late_s: f64,
    pub begun_s: f64,
    pub progress: [RoundProgress; 2],
    pub rounds_done: u32,
}
