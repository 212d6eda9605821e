//! Routes to peers, with the state that an engine keeps for each.

use super::peer_queue::PeerQueue;
use super::region::RemoteLengths;
use crate::parts::PartRule;
use crate::statistics::TrafficTotals;
use crate::types::ProviderKind;

/// Route to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The provider.
    pub provider: ProviderKind,
    /// Rule that divides writes into parts, equal at both ends.
    pub parts: PartRule,
    /// Arrivals keep the order in which they were posted.
    pub ordered: bool,
    /// Limit for unconsumed arrivals in each direction.
    pub max_unconsumed: u32,
    /// Both ends map each other's host memory, so that they may exchange messages by [`crate::Mailboxes`].
    pub mapped: bool,
    pub(super) index: usize,
}

/// Route fields that every post reads.
#[derive(Clone, Copy)]
pub(super) struct PostPath {
    /// Link index.
    pub(super) link: u16,
    /// Posts complete inside the post.
    pub(super) inline: bool,
    /// Pages and bytes up to which a write is certainly one part.
    pub(super) single_pages: usize,
    pub(super) single_bytes: u64,
    /// Longest write that carries a piggybacked credit.
    pub(super) max_piggyback: u64,
}

pub(super) struct EnginePeer {
    /// `None` for this rank itself.
    pub(super) path: Option<PostPath>,
    /// As `path`.
    pub(super) route: Option<Route>,
    pub(super) totals: TrafficTotals,
    pub(super) regions: RemoteLengths,
    pub(super) queue: PeerQueue,
}
