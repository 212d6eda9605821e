//! Link: one group's use of a [`crate::Device`].
//!
//! A link moves pages into a peer's granted memory and raises one lane there once they are visible.
//! Two posts have no order. Rounds, credits and parts belong to the [`crate::Engine`] above it.
//!
//! States of a link:
//!
//! 1. [`Link::address`] goes to every peer, the same bytes to each.
//! 2. [`Link::route`] derives the rule of each pair from both addresses, or none.
//! 3. [`Link::introduce`] makes one message for each routed peer; the messages of the peers enter
//!    [`Link::connect`].
//! 4. Regions are registered and granted; entries travel in a descriptor and are imported.
//! 5. Posts, flushes, polls. [`Link::prepare_sleep`] arms the link before its owner sleeps.

use crate::error::Result;
use crate::lane_table::{LaneTable, LaneWords, wake};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::peer_memory::{MemoryReader, ProbeWord};
use crate::request::PartToken;
use crate::types::{Generation, Lane, LaneId, Page, ProviderKind, RegionKey, Time, TrafficClass};
use rustix::fd::{AsFd, OwnedFd};
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
    /// Lanes that the link raises on arrival, with the engine's doorbell.
    pub lanes: Arc<LaneTable>,
}

/// Rule of the route between two ranks. Both ends derive the same rule from the two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRule {
    /// Division of writes into parts: longest part, ranges and gather entries per part, stripes.
    pub parts: PartRule,
    /// Arrivals keep the order of their posts.
    pub ordered: bool,
    /// Posts complete inside [`Link::post`], so no part is in flight and no progress is needed.
    pub inline: bool,
    /// Limit of unconsumed arrivals in each direction; at the limit the sender's link posts no part until
    /// the owner has consumed some (`unconsumed.rs`).
    pub max_unconsumed: u32,
    /// The longest write, in bytes, that carries a credit to the same peer ([`WorkRequest::piggyback`]); 0:
    /// none. Inline routes ignore it: there each write may carry one.
    pub max_piggyback: u64,
    /// Both ends map each other's host memory: [`Link::mapped_peer`].
    pub mapped: bool,
}

impl RouteRule {
    /// Stores into a peer's mapping: each write is one part, complete when its post returns.
    pub const STORES: RouteRule = RouteRule {
        parts: PartRule::WHOLE,
        ordered: true,
        inline: true,
        max_unconsumed: RouteRule::UNBOUNDED,
        max_piggyback: 0,
        mapped: false,
    };

    /// Parts that complete later and occupy no completion queue on arrival.
    pub const DEFERRED: RouteRule = RouteRule { inline: false, ..RouteRule::STORES };

    /// No limit of unconsumed arrivals.
    pub const UNBOUNDED: u32 = u32::MAX;

    /// A [`RouteRule::max_piggyback`] for wires: a credit waits for the last byte of the write that carries it.
    pub const LONGEST_CARRIER: u64 = 256 << 10;
}

/// A routed peer, with its message for this engine alone.
#[derive(Clone, Copy, Debug)]
pub struct Introduction<'a> {
    /// The peer.
    pub peer: Rank,
    /// Its [`Link::address`].
    pub address: &'a [u8],
    /// The message of its [`Link::introduce`] for this engine.
    pub message: &'a [u8],
}

/// One part of a write, or a signal if it has no pages.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// Returned in the [`Sink`] when the part ends.
    pub token: u64,
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// For a credit on its first post: the lane of this engine's own table whose round it releases.
    pub credits: Option<Lane>,
    /// Piggybacked credit to the same peer: its lane rises together with that of the part. On inline
    /// routes, and on those with a [`RouteRule::max_piggyback`], where its immediate is not 0.
    pub piggyback: Option<Lane>,
    /// Traffic class. Bulk parts never delay latency-critical ones.
    pub class: TrafficClass,
    /// Pages to write. Valid during the call.
    pub pages: &'a [Page],
}

/// Writes of one part and one page each to several peers, under one request.
#[derive(Clone, Copy, Debug)]
pub struct Scatter<'a> {
    /// The part of the token that all parts share.
    pub(crate) token: u64,
    /// Traffic class of all parts.
    pub class: TrafficClass,
    /// The parts, with their peers.
    pub parts: &'a [ScatterPart],
}

/// One part of a [`Scatter`].
#[derive(Clone, Copy, Debug)]
pub struct ScatterPart {
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// Index of its link; [`ScatterPart::NO_LINK`] for a write that needs more than one part.
    pub(crate) link: u16,
    /// The page to write.
    pub page: Page,
}

impl ScatterPart {
    pub(crate) const NO_LINK: u16 = u16::MAX;

    /// Placeholder.
    pub(crate) const EMPTY: ScatterPart = ScatterPart {
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
        PartToken::toward(self.token, part.peer)
    }

    /// One part as a separate work request.
    #[inline(always)]
    pub fn work<'a>(&self, part: &'a ScatterPart) -> WorkRequest<'a> {
        let (token, class) = (self.token(part), self.class);
        let ScatterPart { peer, lane, ref page, .. } = *part;
        let pages = std::slice::from_ref(page);
        WorkRequest { token, peer, lane, credits: None, piggyback: None, class, pages }
    }
}

/// Outcome of [`Link::post_scatter`].
#[derive(Debug, Default)]
pub struct ScatterStatus {
    /// Number of parts accepted, from the first on.
    pub taken: usize,
    /// Number of those in flight.
    pub in_flight: u32,
    /// Error of the next part; `None` if it found a full queue.
    pub failed: Option<String>,
}

impl ScatterStatus {
    /// Adds the outcome of the next part; false if it was not accepted.
    #[inline(always)]
    pub fn add(&mut self, posted: std::result::Result<PostStatus, String>) -> bool {
        match posted {
            Ok(PostStatus::Full) => return false,
            Ok(status) => self.in_flight += u32::from(status == PostStatus::InFlight),
            Err(why) => {
                self.failed = Some(why);
                return false;
            }
        }
        self.taken += 1;
        true
    }
}

/// A peer's region that this process maps, and the peer's doorbell. Stores need no post and no lock; the peer and
/// this rank agree on their places and order ([`crate::Mailboxes`]).
#[derive(Clone, Debug)]
pub struct MappedPeer {
    pub(crate) memory: Arc<Memory>,
    pub(crate) words: Arc<LaneWords>,
    pub(crate) wake: Arc<OwnedFd>,
}

impl MappedPeer {
    /// Wakes the peer's waits for a message.
    pub(crate) fn announce_message(&self) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.announce_message(), self.wake.as_fd());
    }
}

/// Outcome of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostStatus {
    /// The source may be reused; no completion follows. The link may still hold a copy of the bytes
    /// ([`Sink::held`]).
    Done,
    /// In flight: its token follows exactly once in the [`Sink`].
    InFlight,
    /// Not accepted: the queue toward this peer is full. Post again after a poll.
    Full,
}

/// Events that a link reports; the engine owns and drains them. Each part in flight ends exactly once.
#[derive(Debug, Default)]
pub struct Sink {
    /// Tokens of parts whose source may be reused.
    pub completed: Vec<u64>,
    /// Tokens of parts that failed, with the reason. The outcome of the write is unknown.
    pub failures: Vec<(u64, String)>,
    /// Peers that became unreachable, with the reason.
    pub lost: Vec<(Rank, String)>,
    /// Lanes raised inside a poll without a dirty bit ([`LaneTable::arrive_in_poll`]).
    pub raised: Vec<LaneId>,
    /// After a flush: the link may hold parts whose posts were [`PostStatus::Done`]. Their requests
    /// continue by [`Link::hold`]. The reader clears it.
    pub held: bool,
}

impl Sink {
    /// True without events.
    pub fn is_empty(&self) -> bool {
        self.completed.is_empty()
            && self.failures.is_empty()
            && self.lost.is_empty()
            && self.raised.is_empty()
    }

    /// Reports a lane raised without a dirty bit. Consecutive raises of one lane are one report.
    #[inline]
    pub fn lane_raised(&mut self, lane: LaneId) {
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

    /// Address for every peer, opaque except to links of the same kind.
    fn address(&self) -> Vec<u8>;

    /// The rule of the pair, or `None` if this link does not reach that address. A pure, symmetric function
    /// of both addresses: the peer's link derives the same rule.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule>;

    /// The provider of an address of this kind, for errors.
    fn describe(&self, _address: &[u8]) -> String {
        self.kind().name().to_owned()
    }

    /// The introduction for one routed peer, such as a queue pair number or a token. Empty by default.
    fn introduce(&mut self, _peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Connects all routed peers at once, so that no order of connecting can deadlock.
    ///
    /// # Errors
    /// [`crate::Error::Connect`], also after the deadline; the error of [`WaitLimit::give_up`].
    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()>;

    /// Reader of the private memory of a connected peer; `None` if this link cannot read it.
    fn memory_reader(&self, _peer: Rank) -> Option<Arc<dyn MemoryReader>> {
        None
    }

    /// Word by which peers read this process's memory; `None` if they cannot.
    fn probe_word(&self) -> Option<Arc<ProbeWord>> {
        None
    }

    /// Zeroed device memory that can be granted to peers; `None` if the link reaches no devices.
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

    /// Removes a region that no post in flight names.
    fn deregister(&mut self, key: RegionKey);

    /// Removes a peer's region that no post in flight names.
    fn remove_remote(&mut self, _peer: Rank, _key: RegionKey) {}

    /// Imported memory of a peer for stores of this process, on routes that are [`RouteRule::mapped`].
    fn mapped_peer(&self, _peer: Rank, _key: RegionKey) -> Option<MappedPeer> {
        None
    }

    /// Posts one part. It may be held back until [`Link::flush`], so that a batch costs one doorbell. An
    /// error means that the peer is unreachable.
    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String>;

    /// [`Link::post`] of a part that others follow: the peer may be notified of it by [`Link::flush`] alone.
    fn post_in_batch(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.post(work, sink)
    }

    /// Posts the parts of a scatter in order, up to the first that is not accepted. A link with work
    /// request templates patches them here.
    fn post_scatter(&mut self, scatter: &Scatter<'_>, sink: &mut Sink) -> ScatterStatus {
        let mut posted = ScatterStatus::default();
        for part in scatter.parts {
            if !posted.add(self.post(&scatter.work(part), sink)) {
                break;
            }
        }
        posted
    }

    /// Reports to the link that the owner has read the round of `lane`, a lane of its own table that `peer`
    /// raised, and that the credit names another lane ([`WorkRequest::credits`]). For links that check
    /// accesses; no message is sent.
    fn released(&mut self, _peer: Rank, _lane: Lane) {}

    /// Sends parts that posts have held back. Sets [`Sink::held`] if the link still holds some whose posts
    /// were [`PostStatus::Done`].
    fn flush(&mut self, sink: &mut Sink);

    /// Requests a completion with `token` for each queue toward `peer` once its present contents have been
    /// sent. Returns the number of completions that follow: one for each queue with parts that were
    /// [`PostStatus::Done`] since the flush before the last. Zero for a link that holds no part after
    /// [`PostStatus::Done`].
    fn hold(&mut self, _peer: Rank, _token: u64) -> u32 {
        0
    }

    /// Makes progress: receives, raises lanes through the table, reports completions.
    fn poll(&mut self, now: Time, sink: &mut Sink);

    /// True if bytes have arrived that a poll of the link left, and that no descriptor reports.
    fn has_unread(&self) -> bool {
        false
    }

    /// A descriptor of the link was reported as readable: its next poll may look first where the last messages came from.
    fn expect_messages(&mut self) {}

    /// A write to this peer follows soon: the link may prefetch.
    fn expect_write(&mut self, _peer: Rank) {}

    /// Arms the link: from now on one of its descriptors becomes readable when [`Link::poll`] has work.
    /// Returns `false` if it has work already.
    fn prepare_sleep(&mut self) -> bool {
        true
    }

    /// Descriptors to sleep on; empty if peers raise lanes by stores.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Time at which [`Link::poll`] is due even if no descriptor becomes readable.
    fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// Ends the connection to a peer. Afterwards this link neither reads nor writes this engine's memory
    /// for it, and its parts in flight have been reported as failed.
    fn fence(&mut self, peer: Rank, sink: &mut Sink);
}
