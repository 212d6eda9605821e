//! Where a rank stands in its schedule.

use super::connections::NONE;

/// Why a rank does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// It goes on.
    No,
    /// For its next round to be released.
    Release,
    /// For a lane of a connection to it.
    Lane { connection: u32, lane: u32, count: u32 },
    /// For its own writes over a connection.
    Drain { connection: u32 },
    /// For all its own writes, after its last operation.
    End,
    /// For the world's clock.
    Clock,
}

/// Where a rank stands.
#[derive(Clone, Debug)]
pub(crate) struct RankState {
    /// Its own clock, ahead of the world's or behind it.
    pub at_s: f64,
    pub waiting: Waiting,
    /// The operation that comes next, of so many.
    pub op: u32,
    pub len: u32,
    /// The segment that it works on.
    pub round: u32,
    /// Vectors that it may begin.
    pub released: u32,
    /// Writes posted and not yet arrived.
    pub under_way: u32,
    /// The peers last written to and waited for, and the connections.
    pub to: (u32, u32),
    pub from: (u32, u32),
    /// How many times as long its own work takes.
    pub slow: f64,
}

/// A rank has ended a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ended {
    pub rank: u32,
    pub vector: u32,
    pub at_s: f64,
}

impl RankState {
    /// Before its first vector.
    pub fn new(operations: u32) -> RankState {
        RankState {
            at_s: 0.0,
            waiting: Waiting::Release,
            op: 0,
            len: operations,
            round: 0,
            released: 0,
            under_way: 0,
            to: (NONE, NONE),
            from: (NONE, NONE),
            slow: 1.0,
        }
    }
}
