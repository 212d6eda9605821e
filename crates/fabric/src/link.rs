//! Link: one group's use of a [`crate::Device`].
//!
//! A link moves pages into a peer's granted memory and raises one lane there once they are visible.
//! Two posts have no order. Rounds, credits and parts belong to the [`crate::Engine`] above it.
//!
//! Life of a link:
//!
//! 1. [`Link::address`] goes to every peer, the same bytes to each.
//! 2. [`Link::route`] decides from both addresses whether and by which rule a pair is connected.
//! 3. [`Link::introduce`] makes one message for each routed peer; the peers' answers enter
//!    [`Link::connect`].
//! 4. Regions are registered and granted; entries travel in a descriptor and are imported.
//! 5. Posts, flushes, polls. [`Link::prepare_sleep`] arms the link before its owner sleeps.

use crate::error::Result;
use crate::lane_table::LaneTable;
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::request::Token;
use crate::types::{Class, Generation, Lane, LaneId, Page, ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// The group that a link belongs to.
#[derive(Clone, Debug)]
pub struct Membership {
    /// This engine's rank.
    pub rank: Rank,
    /// Ranks in the group.
    pub size: u32,
    /// Generation of the group.
    pub generation: Generation,
    /// Lanes that the link raises on arrival. The table also carries the engine's bell.
    pub lanes: Arc<LaneTable>,
}

/// How one pair of ranks is connected. Both ends derive the same rule from the two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRule {
    /// How writes are cut: longest part, ranges and gather entries per part, stripes.
    pub parts: PartRule,
    /// Arrivals keep the order of their posts.
    pub ordered: bool,
    /// Posts complete inside [`Link::post`]: nothing is ever under way, and nothing needs progress.
    pub inline: bool,
    /// Arrivals that may lie unconsumed in each direction; the sender's link posts no further part until
    /// the owner has consumed some (see [`crate::unconsumed`]).
    pub max_unconsumed: u32,
    /// The longest write, in bytes, that takes a credit to the same peer along ([`Work::rider`]); 0: none
    /// does. Of no meaning where posts complete inside of the call: those always do.
    pub max_ride: u64,
}

impl RouteRule {
    /// Stores into a peer's mapping: any write is one part and done when its post returns.
    pub const STORES: RouteRule = RouteRule {
        parts: PartRule::WHOLE,
        ordered: true,
        inline: true,
        max_unconsumed: RouteRule::UNBOUNDED,
        max_ride: 0,
    };

    /// Parts that complete later, and take no place in a queue when they arrive.
    pub const LATER: RouteRule = RouteRule { inline: false, ..RouteRule::STORES };

    /// Arrivals take no place in a queue.
    pub const UNBOUNDED: u32 = u32::MAX;
}

/// A routed peer, with what it sent to this engine alone.
#[derive(Clone, Copy, Debug)]
pub struct Introduction<'a> {
    /// The peer.
    pub peer: Rank,
    /// Its [`Link::address`].
    pub address: &'a [u8],
    /// What its [`Link::introduce`] made for this engine.
    pub message: &'a [u8],
}

/// One part of a write, or a signal if it has no pages.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Returned in the [`Sink`] when the part ends.
    pub token: u64,
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// For a credit that is offered for the first time: the lane of this engine's own table that it
    /// answers.
    pub credits: Option<Lane>,
    /// A credit to the same peer that travels with this part: its lane rises together with that of
    /// the part. On inline routes, and on those with a [`RouteRule::max_ride`], where its immediate is not 0.
    pub rider: Option<Lane>,
    /// Traffic class. Bulk parts never delay latency-critical ones.
    pub class: Class,
    /// What is written. Valid during the call.
    pub pages: &'a [Page],
}

/// Writes of one part and one page each to several peers, under one request.
#[derive(Clone, Copy, Debug)]
pub struct Scatter<'a> {
    /// What the tokens of all parts have in common.
    pub(crate) token: u64,
    /// Traffic class of all parts.
    pub class: Class,
    /// What goes where.
    pub parts: &'a [ScatterPart],
}

/// One part of a [`Scatter`].
#[derive(Clone, Copy, Debug)]
pub struct ScatterPart {
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// Place of its link; [`ScatterPart::NO_LINK`] for a write that is no such part.
    pub(crate) link: u16,
    /// What is written.
    pub page: Page,
}

impl ScatterPart {
    pub(crate) const NO_LINK: u16 = u16::MAX;

    /// A place for a part.
    pub(crate) const BLANK: ScatterPart = ScatterPart {
        peer: Rank(0),
        lane: Lane::from_immediate(0),
        link: ScatterPart::NO_LINK,
        page: Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(0),
            destination_offset: 0,
            length: 0,
        },
    };
}

impl Scatter<'_> {
    /// The token of one part.
    #[inline(always)]
    pub fn token(&self, part: &ScatterPart) -> u64 {
        Token::toward(self.token, part.peer)
    }

    /// One part as a post of its own.
    #[inline(always)]
    pub fn work<'a>(&self, part: &'a ScatterPart) -> Work<'a> {
        let (token, class) = (self.token(part), self.class);
        let ScatterPart { peer, lane, ref page, .. } = *part;
        let pages = std::slice::from_ref(page);
        Work { token, peer, lane, credits: None, rider: None, class, pages }
    }
}

/// Outcome of [`Link::post_scatter`].
#[derive(Debug, Default)]
pub struct ScatterPosted {
    /// Parts that were taken, from the first on.
    pub taken: usize,
    /// Those of them that are under way.
    pub in_flight: u32,
    /// Why the next one failed. If that is `None`, it found a full queue.
    pub failed: Option<String>,
}

/// Outcome of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The source may be reused, no completion follows. The bytes may still lie with the link
    /// ([`Sink::held`]).
    Done,
    /// Under way: its token follows exactly once in the [`Sink`].
    InFlight,
    /// Not taken, the queue toward this peer is full: post again after a poll.
    Full,
}

/// Where a link reports what happened; the engine owns and drains it. Each part that was under way ends
/// exactly once.
#[derive(Debug, Default)]
pub struct Sink {
    /// Tokens of parts of which the source may be reused.
    pub completed: Vec<u64>,
    /// Tokens of parts that failed, with the reason. The outcome of the write is unknown.
    pub failures: Vec<(u64, String)>,
    /// Peers that cannot be reached any more, with the reason.
    pub lost: Vec<(Rank, String)>,
    /// Lanes that a poll has raised without a mark ([`LaneTable::arrive_unmarked`]).
    pub raised: Vec<LaneId>,
    /// After a flush: parts may be left with the link although their posts were [`Posted::Done`]. Their
    /// requests go on by [`Link::hold`]. The reader clears it.
    pub held: bool,
}

impl Sink {
    /// Whether there is nothing to take.
    pub fn is_empty(&self) -> bool {
        self.completed.is_empty()
            && self.failures.is_empty()
            && self.lost.is_empty()
            && self.raised.is_empty()
    }

    /// Reports that a lane has risen without a mark. A lane that rises several times in a row is reported once.
    #[inline]
    pub fn rose(&mut self, lane: LaneId) {
        if self.raised.last() != Some(&lane) {
            self.raised.push(lane);
        }
    }

    /// Reports that the source of a part may be reused.
    pub fn done(&mut self, token: u64) {
        self.completed.push(token);
    }

    /// Reports that a part failed.
    pub fn failed(&mut self, token: u64, why: impl Into<String>) {
        self.failures.push((token, why.into()));
    }
}

/// One group's use of a device.
pub trait Link: Send {
    /// Its provider.
    fn kind(&self) -> ProviderKind;

    /// Address for every peer, opaque to all but links of the same kind.
    fn address(&self) -> Vec<u8>;

    /// The rule of the pair, or `None` if this link does not reach that address. A pure function of
    /// both addresses, and symmetric: the peer's link derives the same rule.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule>;

    /// The provider of an address of this kind, for errors.
    fn describe(&self, _address: &[u8]) -> String {
        self.kind().name().to_owned()
    }

    /// The message for one routed peer: a queue pair number, a token. Empty by default.
    fn introduce(&mut self, _peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Connects all routed peers at once, so that no order of connecting can deadlock.
    ///
    /// # Errors
    /// [`crate::Error::Connect`], also after the deadline; the error of [`WaitLimit::give_up`].
    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()>;

    /// Zeroed device memory that peers can be granted; `None` if the link reaches no devices.
    fn allocate(&mut self, _device: u32, _length: usize) -> Option<Result<Memory>> {
        None
    }

    /// Registers `memory` under `key`: a source at once, a destination after a grant.
    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()>;

    /// Lets `peer` write to `range` of region `key`; returns the entry that the peer imports.
    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>>;

    /// Makes a peer's region of `length` bytes writable from here.
    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()>;

    /// Removes a region. No post that names it is under way.
    fn deregister(&mut self, key: RegionKey);

    /// Removes a peer's region. No post that names it is under way.
    fn forget(&mut self, _peer: Rank, _key: RegionKey) {}

    /// Takes one part. It may be held back until [`Link::flush`], so that a batch costs one doorbell.
    /// An error means that the peer cannot be written to any more.
    fn post(&mut self, work: &Work<'_>, sink: &mut Sink) -> std::result::Result<Posted, String>;

    /// Takes the parts of a scatter, in order and up to the first that is not taken. A link with templates
    /// of its own patches them here.
    fn post_scatter(&mut self, scatter: &Scatter<'_>, sink: &mut Sink) -> ScatterPosted {
        let mut posted = ScatterPosted::default();
        for part in scatter.parts {
            match self.post(&scatter.work(part), sink) {
                Ok(Posted::Done) => {}
                Ok(Posted::InFlight) => posted.in_flight += 1,
                Ok(Posted::Full) => break,
                Err(why) => {
                    posted.failed = Some(why);
                    break;
                }
            }
            posted.taken += 1;
        }
        posted
    }

    /// The owner has read what `peer` wrote under `lane`, a lane of its own table, and its credit names
    /// another lane ([`Work::credits`]). For links that watch over bytes; nothing is sent.
    fn released(&mut self, _peer: Rank, _lane: Lane) {}

    /// Sends what posts have held back. Sets [`Sink::held`] if parts of these posts are left here that
    /// were [`Posted::Done`].
    fn flush(&mut self, sink: &mut Sink);

    /// Reports `token` each time one of the queues to `peer` has been sent as far as it goes now. Returns
    /// how many completions follow: one for each queue with parts that were [`Posted::Done`] since the
    /// last flush but one. A link that keeps nothing behind [`Posted::Done`] has none.
    fn hold(&mut self, _peer: Rank, _token: u64) -> u32 {
        0
    }

    /// Makes progress: receives, raises lanes through the table, reports completions.
    fn poll(&mut self, now: Time, sink: &mut Sink);

    /// Arms the link: from now on one of its descriptors becomes readable when [`Link::poll`] has
    /// something to do. Returns `false` if there is something to do already.
    fn prepare_sleep(&mut self) -> bool {
        true
    }

    /// Descriptors to sleep on. None if peers raise lanes without this link's help.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// When [`Link::poll`] must be called even if no descriptor becomes readable.
    fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// Cuts a peer off. After this returns no byte of this engine's memory is read for it or written
    /// by it through this link, and its parts under way have been reported as failed.
    fn fence(&mut self, peer: Rank, sink: &mut Sink);
}
