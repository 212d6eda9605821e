//! A rank's position in the schedule.

use super::connections::NONE;

/// Rank state: running, or blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// Executes operations.
    Running,
    /// Blocked until the next vector is released.
    Release,
    /// Blocked on a lane in an incoming connection.
    Lane { connection: u32, lane: u32, count: u32 },
    /// Blocked until the rank's writes over a connection drain.
    Drain { connection: u32 },
    /// Blocked on all the rank's writes, after the last operation.
    OwnWrites,
    /// Paused until the world's clock reaches the rank's.
    Clock,
}

/// A rank's cursor over the operations.
#[derive(Clone, Debug)]
pub(crate) struct RankCursor {
    /// The rank's clock; may be ahead of or behind the world's.
    pub at_s: f64,
    pub waiting: WaitState,
    /// Next operation, and the operation count.
    pub op: u32,
    pub len: u32,
    /// Current segment.
    pub segment: u32,
    /// Released vector count.
    pub released: u32,
    /// Writes in flight.
    pub in_flight: u32,
    /// Last written and last awaited peer, with the connections.
    pub to: (u32, u32),
    pub from: (u32, u32),
    /// Factor on the times for the rank's own work.
    pub slow: f64,
}

/// A vector that has ended at one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CompletedVector {
    pub rank: u32,
    pub vector: u32,
    pub at_s: f64,
}

impl RankCursor {
    /// Cursor before the first vector.
    pub fn new(operations: u32) -> RankCursor {
        RankCursor {
            at_s: 0.0,
            waiting: WaitState::Release,
            op: 0,
            len: operations,
            segment: 0,
            released: 0,
            in_flight: 0,
            to: (NONE, NONE),
            from: (NONE, NONE),
            slow: 1.0,
        }
    }
}
