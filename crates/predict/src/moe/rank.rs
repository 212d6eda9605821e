//! How far a rank is.
//!
//! A rank is never more than one round ahead of another: it cannot end dispatch without everybody's
//! header. So what has arrived is kept for two rounds, in turn.

/// What has arrived at a rank in one round, and how far the rank is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    pub headers: u32,
    pub rows: u32,
    pub answers: u32,
    pub packed: bool,
    pub routed: bool,
    pub dispatch_ended: bool,
    pub answers_sent: bool,
    pub combine_ended: bool,
}

/// A rank: how slow and late it is, and what it has done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rank {
    pub slow: f64,
    pub late_s: f64,
    pub begun_s: f64,
    pub progress: [Progress; 2],
    pub rounds_done: u32,
}
