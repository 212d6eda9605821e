//! Places in the node list.

use crate::network::NodeId;

/// No path; also: not a core node.
pub const NONE: u32 = u32::MAX;

/// The node at a position in the node list.
pub(super) fn node(place: usize) -> NodeId {
    NodeId(place as u32)
}
