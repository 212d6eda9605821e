//! Peer state in a channel: credits, lanes and progress in the round.

use weft_fabric::PartRule;

/// Channel counter. Each of the three is a lane to and from each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Headers: one from each rank.
    Headers = 0,
    /// Rows: tokens and metadata, private and remainder.
    Rows = 1,
    /// Replies.
    Replies = 2,
}

pub(crate) const LANES: [Lane; 3] = [Lane::Headers, Lane::Rows, Lane::Replies];

/// A peer's lane toward this rank, in one round.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaneState {
    /// Raises by the peer that this rank has not yet credited.
    pub raised: u64,
    /// Raises by the peer in this round: fixed from the start for headers and replies, computed from all
    /// headers for rows.
    pub expected: u64,
}

/// Round progress with one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerProgress {
    pub header_sent: bool,
    pub private_sent: bool,
    pub remainder_sent: bool,
    pub rows_taken: bool,
    pub replies_ready: bool,
    pub replies_sent: bool,
    pub replies_taken: bool,
    /// Writes to the peer: requested, and completed.
    pub writes_asked: u64,
    pub writes_completed: u64,
}

/// Peer state in one channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerState {
    /// The peer's region for this channel.
    pub region: weft_fabric::RegionKey,
    /// Rule that divides writes between the two ranks into parts.
    pub parts: PartRule,
    /// Credits from the peer: rounds in which it has read all writes from this rank.
    pub credits: u64,
    /// Rounds that this rank has started toward the peer.
    pub started: u64,
    pub lanes: [LaneState; 3],
    pub progress: PeerProgress,
}

impl PeerProgress {
    /// True if the source buffers for all writes to the peer are free.
    pub fn is_drained(&self) -> bool {
        self.writes_completed == self.writes_asked
    }
}

impl PeerState {
    pub fn lane(&mut self, lane: Lane) -> &mut LaneState {
        &mut self.lanes[lane as usize]
    }

    /// True if the next round may start: the peer has released the channel.
    pub fn is_open(&self) -> bool {
        self.credits >= self.started
    }

    /// Starts the next round and returns the number, which all writes in the round carry.
    pub fn start(&mut self) -> u64 {
        self.started += 1;
        self.started - 1
    }

    /// The round in flight.
    pub fn current(&self) -> u64 {
        self.started - 1
    }
}

impl PeerState {
    pub fn new(region: weft_fabric::RegionKey, parts: PartRule) -> PeerState {
        let (lanes, progress) = Default::default();
        PeerState { region, parts, credits: 0, started: 0, lanes, progress }
    }
}
