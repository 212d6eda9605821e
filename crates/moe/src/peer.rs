//! What one set of buffers knows of one peer, in one round.

use weft_fabric::PartRule;

/// The three counters of a set of buffers, and so the three lanes to and from each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// One header from every rank.
    Headers = 0,
    /// Tokens and their metadata, private and remainder.
    Rows = 1,
    /// Answers on their way back.
    Answers = 2,
}

pub(crate) const LANES: [Lane; 3] = [Lane::Headers, Lane::Rows, Lane::Answers];

/// A peer's lane toward us, in one round.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Way {
    /// Raises by the peer that we have not credited.
    pub raised: u64,
    /// Raises by the peer that belong to this round: of headers and answers from its beginning, of
    /// rows once all headers are here.
    pub expected: u64,
}

/// How far a round is with one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    pub header_sent: bool,
    pub private_sent: bool,
    pub remainder_sent: bool,
    pub rows_taken: bool,
    pub answers_ready: bool,
    pub answers_sent: bool,
    pub answers_taken: bool,
    /// Writes to the peer that were asked for, and those whose sources are free again.
    pub writes_asked: u64,
    pub writes_completed: u64,
}

/// A peer as one set of buffers sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// The peer's region for this set.
    pub region: weft_fabric::RegionKey,
    /// How writes between the two are cut.
    pub parts: PartRule,
    /// Credits that the peer has given: rounds of which it has read all that we wrote.
    pub credits: u64,
    /// Rounds that we have started toward it.
    pub started: u64,
    pub ways: [Way; 3],
    pub progress: Progress,
}

impl Progress {
    /// Whether the sources of all writes to the peer are free.
    pub fn is_drained(&self) -> bool {
        self.writes_completed == self.writes_asked
    }
}

impl Peer {
    pub fn way(&mut self, lane: Lane) -> &mut Way {
        &mut self.ways[lane as usize]
    }

    /// Whether the next round may start: the peer has released the set of buffers.
    pub fn is_open(&self) -> bool {
        self.credits >= self.started
    }

    /// Starts the next round; its number, by which all writes of the round go.
    pub fn start(&mut self) -> u64 {
        self.started += 1;
        self.started - 1
    }

    /// The round that is under way.
    pub fn current(&self) -> u64 {
        self.started - 1
    }
}

impl Peer {
    /// A peer of which nothing is known but where its buffers are.
    pub fn new(region: weft_fabric::RegionKey, parts: PartRule) -> Peer {
        let (ways, progress) = Default::default();
        Peer { region, parts, credits: 0, started: 0, ways, progress }
    }
}
