//! Link: one group's use of a [`crate::Device`].
//!
//! A link moves pages into a peer's granted memory and raises one lane there once they are visible.
//! Two posts have no order. Rounds, credits and parts belong to the [`crate::Engine`] above it.
//!
//! A link goes through these states:
//!
//! 1. [`Link::address`] goes to every peer, the same bytes to each.
//! 2. [`Link::route`] derives the rule for each pair from both addresses, or none.
//! 3. [`Link::introduce`] makes one message for each routed peer; the peers' messages go into
//!    [`Link::connect`].
//! 4. Regions are registered and granted; entries travel in a descriptor and are imported.
//! 5. Posts, flushes, polls. [`Link::prepare_sleep`] arms the link before the owner sleeps.

use crate::error::Result;
use crate::lane_table::{LaneTable, LaneWords, wake};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::peer_memory::{MemoryReader, ProbeWord};
use crate::request::PartToken;
use crate::types::{Generation, Lane, LaneId, Page, ProviderKind, RegionKey, Time, TrafficClass};
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use weft_control::Rank;

/// The group that a link belongs to.
#[derive(Clone, Debug)]
pub struct Membership {
    /// This engine's rank.
    pub rank: Rank,
    /// Ranks in the group.
    pub size: u32,
    /// Group generation.
    pub generation: Generation,
    /// Lanes that the link raises on arrival, with the engine's doorbell.
    pub lanes: Arc<LaneTable>,
}

/// Route rule between two ranks. Both ends derive the same rule from the two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRule {
    /// Rule that divides writes into parts: longest part, ranges and gather entries per part, stripes.
    pub parts: PartRule,
    /// Arrivals keep the order in which they were posted.
    pub ordered: bool,
    /// Posts complete inside [`Link::post`], so no part is in flight and no progress is needed.
    pub inline: bool,
    /// Limit for unconsumed arrivals in each direction; at the limit the sender's link posts no part
    /// until the owner has consumed some (`unconsumed.rs`).
    pub max_unconsumed: u32,
    /// The longest write, in bytes, that carries a credit to the same peer ([`WorkRequest::piggyback`]); 0:
    /// none. Inline routes ignore it: there each write may carry one.
    pub max_piggyback: u64,
    /// Both ends map each other's host memory: [`Link::mapped_peer`].
    pub mapped: bool,
}

impl RouteRule {
    /// Stores into a peer's mapping: each write is one part, complete when the post returns.
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

    /// No limit for unconsumed arrivals.
    pub const UNBOUNDED: u32 = u32::MAX;

    /// [`RouteRule::max_piggyback`] for wires: a credit waits for the last byte in the write that carries
    /// it.
    pub const LONGEST_CARRIER: u64 = 256 << 10;
}

/// Routed peer, with the message that it made only for this engine.
#[derive(Clone, Copy, Debug)]
pub struct Introduction<'a> {
    /// The peer.
    pub peer: Rank,
    /// The peer's [`Link::address`].
    pub address: &'a [u8],
    /// Message from the peer's [`Link::introduce`] for this engine.
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
    /// For a credit on the first post: the lane in this engine's own table whose round it releases.
    pub credits: Option<Lane>,
    /// Piggybacked credit to the same peer: its lane rises together with the part's lane. Used on inline
    /// routes, and on routes with a [`RouteRule::max_piggyback`], where the immediate is not 0.
    pub piggyback: Option<Lane>,
    /// Traffic class. Bulk parts never delay latency-critical ones.
    pub class: TrafficClass,
    /// Pages to write. Valid during the call.
    pub pages: &'a [Page],
}

/// Writes with one part and one page each to several peers, under one request.
#[derive(Clone, Copy, Debug)]
pub struct Scatter<'a> {
    /// Token bits that all parts share.
    pub(crate) token: u64,
    /// Traffic class for all parts.
    pub class: TrafficClass,
    /// Parts with peers.
    pub parts: &'a [ScatterPart],
}

/// One part in a [`Scatter`].
#[derive(Clone, Copy, Debug)]
pub struct ScatterPart {
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// Link index; [`ScatterPart::NO_LINK`] for a write that needs more than one part.
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
    /// Token for one part.
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

/// Outcome from [`Link::post_scatter`].
#[derive(Debug, Default)]
pub struct ScatterStatus {
    /// Parts accepted, from the first on.
    pub taken: usize,
    /// Accepted parts that are in flight.
    pub in_flight: u32,
    /// Error for the next part; `None` if it found a full queue.
    pub failed: Option<String>,
}

impl ScatterStatus {
    /// Adds the next part's outcome; false if it was not accepted.
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

/// A peer's region that this process maps, and the peer's doorbell. Stores need no post and no lock; the
/// peer and this rank agree on places and order ([`crate::Mailboxes`]).
#[derive(Clone, Debug)]
pub struct MappedPeer {
    pub(crate) memory: Arc<Memory>,
    pub(crate) words: Arc<LaneWords>,
    pub(crate) wake: Arc<OnceLock<OwnedFd>>,
}

impl MappedPeer {
    /// Wakes the peer's waits for a message.
    pub(crate) fn announce_message(&self) {
        let lanes = self.words.lanes();
        // Threads sleep on the word wherever a group has mailboxes; an event loop does not wait for them.
        wake(lanes, lanes.announce_message(), self.wake.get());
    }
}

/// Post outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostStatus {
    /// The source may be reused; no completion follows. The link may still hold a copy ([`Sink::held`]).
    Done,
    /// In flight: the token follows exactly once in the [`Sink`].
    InFlight,
    /// Not accepted: the queue toward this peer is full. Post again after a poll.
    Full,
}

/// Events that a link reports; the engine owns and drains them. Each part in flight ends exactly once.
#[derive(Debug, Default)]
pub struct Sink {
    /// Tokens for parts whose source may be reused.
    pub completed: Vec<u64>,
    /// Tokens for parts that failed, with the reason. The write's outcome is unknown.
    pub failures: Vec<(u64, String)>,
    /// Peers that became unreachable, with the reason.
    pub lost: Vec<(Rank, String)>,
    /// Lanes raised inside a poll without a dirty bit ([`LaneTable::arrive_in_poll`]).
    pub raised: Vec<LaneId>,
    /// After a flush: the link may hold parts whose posts were [`PostStatus::Done`]. The requests
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

    /// Reports a lane raised without a dirty bit. Consecutive raises on one lane are one report.
    #[inline]
    pub fn lane_raised(&mut self, lane: LaneId) {
        if self.raised.last() != Some(&lane) {
            self.raised.push(lane);
        }
    }

    /// Reports that a part's source may be reused.
    pub fn done(&mut self, token: u64) {
        self.completed.push(token);
    }

    /// Reports that a part failed.
    pub fn failed(&mut self, token: u64, why: impl Into<String>) {
        self.failures.push((token, why.into()));
    }
}

/// First bytes in the address of a link in the staging wrapper, ahead of the version.
pub(crate) const STAGED_ADDRESS: &[u8] = b"staged ";

/// Provider behind an address that the provider's own links may not be able to read.
pub(crate) fn described(kind: ProviderKind, address: &[u8]) -> String {
    let name = kind.name();
    match (address.starts_with(STAGED_ADDRESS), kind) {
        (false, _) => name.to_owned(),
        (true, ProviderKind::Tcp) => format!("{name} in the staging wrapper"),
        (true, _) => format!("{name} with WEFT_STAGED=1"),
    }
}

/// One group's use of a device.
pub trait Link: Send {
    /// Provider kind.
    fn kind(&self) -> ProviderKind;

    /// Address for every peer, opaque except to links of the same kind.
    fn address(&self) -> Vec<u8>;

    /// Rule for the pair, or `None` if this link does not reach that address. A pure, symmetric function
    /// of both addresses: the peer's link derives the same rule.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule>;

    /// Provider behind an address of this kind, for errors.
    fn describe(&self, address: &[u8]) -> String {
        described(self.kind(), address)
    }

    /// The introduction for one routed peer, such as a queue pair number or a token. Empty by default.
    fn introduce(&mut self, _peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Connects all routed peers at once, so that no connecting order can deadlock.
    ///
    /// # Errors
    /// [`crate::Error::Connect`], also after the deadline; the error from [`WaitLimit::give_up`].
    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()>;

    /// The link to use in place of this one once it is connected; `None` for this one. A wrapper without work
    /// steps aside. Region keys stay, and no part is in flight.
    fn take_inner(&mut self) -> Option<Box<dyn Link>> {
        None
    }

    /// Reader for a connected peer's private memory; `None` if this link cannot read it.
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

    /// Lets `peer` write to `range` in region `key`; returns the entry that the peer imports.
    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>>;

    /// Makes a peer's region with `length` bytes writable from here.
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

    /// A peer's imported memory, for stores from this process on routes that are [`RouteRule::mapped`].
    fn mapped_peer(&self, _peer: Rank, _key: RegionKey) -> Option<MappedPeer> {
        None
    }

    /// True if peers raise lanes in this engine's table by stores: then nothing here may
    /// raise a lane that a peer holds.
    fn peers_raise(&self) -> bool {
        false
    }

    /// Posts one part. It may be held back until [`Link::flush`], so that a batch costs one doorbell. An
    /// error means that the peer is unreachable.
    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String>;

    /// [`Link::post`] for a part that others follow: the peer may be notified only by [`Link::flush`].
    fn post_in_batch(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.post(work, sink)
    }

    /// Posts a scatter's parts in order, up to the first that is not accepted. A link with work request
    /// templates patches them here.
    fn post_scatter(&mut self, scatter: &Scatter<'_>, sink: &mut Sink) -> ScatterStatus {
        let mut posted = ScatterStatus::default();
        for part in scatter.parts {
            if !posted.add(self.post(&scatter.work(part), sink)) {
                break;
            }
        }
        posted
    }

    /// Reports to the link that the owner has read the round on `lane`, a lane in its own table that
    /// `peer` raised, and that the credit names another lane ([`WorkRequest::credits`]). For links that
    /// check accesses; no message is sent.
    fn released(&mut self, _peer: Rank, _lane: Lane) {}

    /// Sends parts that posts have held back. Sets [`Sink::held`] if the link still holds some whose posts
    /// were [`PostStatus::Done`].
    fn flush(&mut self, sink: &mut Sink);

    /// Requests a completion with `token` for each queue toward `peer` once everything now in the queue
    /// has been sent. Returns how many completions follow: one for each queue with parts that were
    /// [`PostStatus::Done`] since the flush before the last. Zero for a link that holds no part after
    /// [`PostStatus::Done`].
    fn hold(&mut self, _peer: Rank, _token: u64) -> u32 {
        0
    }

    /// Makes progress: receives, raises lanes through the table, reports completions.
    fn poll(&mut self, now: Time, sink: &mut Sink);

    /// True if bytes have arrived that a link poll left unread, and that no descriptor reports.
    fn has_unread(&self) -> bool {
        false
    }

    /// A link descriptor was reported as readable: the next poll may look first where the last messages
    /// came from.
    fn expect_messages(&mut self) {}

    /// From now on copy engines move all pages, also those in lists: a kernel for these may queue in the GPU
    /// behind kernels that wait for it.
    fn use_copy_engines_only(&mut self) {}

    /// A write to this peer follows soon: the link may prefetch.
    fn expect_write(&mut self, _peer: Rank) {}

    /// Runs before this rank announces that it sleeps on a descriptor: gives the event descriptor to the
    /// peers that raise lanes by stores. Returns `false` if one may lack it, so that the sleep must be
    /// short.
    fn share_wake(&mut self) -> bool {
        true
    }

    /// Arms the link: from now on a link descriptor becomes readable when [`Link::poll`] has work.
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
    /// for that peer, and all parts in flight to it have been reported as failed.
    fn fence(&mut self, peer: Rank, sink: &mut Sink);
}
