//! Position of a rank in its schedule.

use super::connections::NONE;

/// State of a rank: running, or blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// Executes operations.
    Running,
    /// Blocked until its next vector is released.
    Release,
    /// Blocked on a lane of an incoming connection.
    Lane { connection: u32, lane: u32, count: u32 },
    /// Blocked on its own writes over a connection.
    Drain { connection: u32 },
    /// Blocked on all its own writes, after its last operation.
    OwnWrites,
    /// Paused until the world's clock reaches its own.
    Clock,
}

/// Cursor of a rank over its operations.
#[derive(Clone, Debug)]
pub(crate) struct RankCursor {
    /// Clock of the rank; may be ahead of or behind the world's.
    pub at_s: f64,
    pub waiting: WaitState,
    /// Next operation, and their number.
    pub op: u32,
    pub len: u32,
    /// Current segment.
    pub segment: u32,
    /// Number of released vectors.
    pub released: u32,
    /// Writes in flight.
    pub in_flight: u32,
    /// Last written and last awaited peer, with the connections.
    pub to: (u32, u32),
    pub from: (u32, u32),
    /// Factor on the times of its own work.
    pub slow: f64,
}

/// End of a vector at one rank.
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
