//! Control lanes: lanes that a link owns, for messages between links where the network has no other
//! channel.

use crate::lane_table::LaneTable;
use crate::types::{Lane, LaneId};
use weft_control::Rank;

/// Local lanes that a peer's link raises for control messages.
#[derive(Clone, Copy, Debug)]
pub struct ControlLanes {
    /// Raised for each half of the unconsumed arrival bound that the peer has consumed.
    pub consumed: Lane,
    /// Raised with the peer's greeting, when the peer has received ours, and when it leaves.
    pub presence: Lane,
}

impl ControlLanes {
    /// Issues two adjacent lanes in this engine's table.
    pub fn issue(lanes: &LaneTable, peer: Rank) -> crate::Result<ControlLanes> {
        let consumed = lanes.issue(peer, 2)?;
        let beside = LaneId::new(consumed.id().get() + 1);
        let beside = beside.expect("two adjacent lanes were issued");
        Ok(ControlLanes { consumed, presence: Lane::new(beside, consumed.generation()) })
    }

    /// True for either lane.
    #[inline]
    pub fn contains(&self, lane: Lane) -> bool {
        let (lane, first) = (lane.id().get(), self.consumed.id().get());
        lane == first || lane == first + 1
    }
}
