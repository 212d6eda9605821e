//! The one trait that a way of reaching peers implements.
//!
//! A provider moves pages into a peer's granted memory and makes one lane rise there once they are
//! visible. It promises no order between two posts. It knows nothing of rounds, credits or parts:
//! the [`crate::Engine`] above it does.
//!
//! Life: [`Provider::address`] is told to every peer; [`Provider::connect`] resolves the peers that
//! were routed to this provider; regions are registered and granted, their entries travel in a
//! descriptor and are imported at the other side; then posts, flushes and polls.

use crate::error::Result;
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{Generation, Lane, Page, ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// What the engine tells a provider when the group is formed.
pub struct Group<'a> {
    /// This engine's rank.
    pub rank: Rank,
    /// Ranks in the group.
    pub size: u32,
    /// The incarnation.
    pub generation: Generation,
    /// The peers routed to this provider, with the addresses that their providers of this kind gave.
    pub peers: &'a [(Rank, &'a [u8])],
    /// The table whose lanes this provider raises on arrival, and that shares the engine's bell.
    pub lanes: &'a Arc<LaneTable>,
    /// When connecting has failed.
    pub deadline: Time,
}

/// One part of a write, or a signal if it has no pages.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Comes back in the [`Completion`].
    pub token: u64,
    /// The peer written to.
    pub peer: Rank,
    /// The peer's lane that this part raises by one.
    pub lane: Lane,
    /// If this is a credit: the lane of this engine's own table that it refers to.
    pub credits: Option<Lane>,
    /// A credit to the same peer that rides along: its lane rises together with that of this part. Given
    /// to inline providers only ([`Capabilities::inline`]).
    pub rider: Option<Lane>,
    /// What is written. Valid for the call only.
    pub pages: &'a [Page],
}

/// What became of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Done already: the source may be reused and there will be no completion.
    Done,
    /// Under way: a completion with the token will follow.
    InFlight,
    /// Nothing was taken, the queue toward this peer is full: post again after a poll.
    Full,
}

/// The end of a part that was under way.
#[derive(Debug)]
pub struct Completion {
    /// The token of its [`Work`].
    pub token: u64,
    /// `Ok`: the source may be reused. `Err`: nobody knows what was written.
    pub result: std::result::Result<(), String>,
}

/// Where a provider reports what happened; the engine owns and drains it.
#[derive(Debug, Default)]
pub struct Sink {
    /// Parts that ended.
    pub completions: Vec<Completion>,
    /// Peers that cannot be reached any more, and why.
    pub lost: Vec<(Rank, String)>,
}

impl Sink {
    /// Reports that a part's source may be reused.
    pub fn done(&mut self, token: u64) {
        self.completions.push(Completion { token, result: Ok(()) });
    }

    /// Reports that a part failed.
    pub fn failed(&mut self, token: u64, why: impl Into<String>) {
        self.completions.push(Completion { token, result: Err(why.into()) });
    }
}

/// What users and planners may know of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// How writes over this provider are cut. Equal at both ends of a route.
    pub parts: PartRule,
    /// Whether memory that Weft did not allocate can be a destination.
    pub registered_destination: bool,
    /// Whether posts complete inside [`Provider::post`], so that nothing needs progress.
    pub inline: bool,
}

/// A way of reaching peers.
pub trait Provider: Send {
    /// Which one.
    fn kind(&self) -> ProviderKind;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// What peers must know to reach it, opaque to everybody else.
    fn address(&self) -> Vec<u8>;

    /// Whether a peer with this address can be reached. Both sides must come to the same answer.
    fn reaches(&self, address: &[u8]) -> bool;

    /// Resolves the peers routed to this provider, all at once, so that no order of connecting
    /// can deadlock. Returns at the group's deadline.
    fn connect(&mut self, group: &Group<'_>) -> Result<()>;

    /// Zeroed memory of a device that peers can be granted, for a provider that reaches devices.
    fn allocate(&mut self, _device: u32, _length: usize) -> Option<Result<Memory>> {
        None
    }

    /// Makes `memory` known as `key`: as a source at once, as a destination after a grant.
    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()>;

    /// Lets `peer` write to `range` of region `key`; returns the entry that the peer imports.
    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>>;

    /// Makes a peer's region writable from here. `length` is what its descriptor says.
    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        deadline: Time,
    ) -> Result<()>;

    /// Forgets a region. The engine calls this only when no post that names it is under way.
    fn deregister(&mut self, key: RegionKey);

    /// Forgets a peer's region, which no post that is under way names. Nothing to do for a provider
    /// that holds nothing for it.
    fn forget(&mut self, _peer: Rank, _key: RegionKey) {}

    /// Takes one part. It may be held back until [`Provider::flush`]. An error means that the peer
    /// cannot be written to at all any more.
    fn post(&mut self, work: &Work<'_>, sink: &mut Sink) -> std::result::Result<Posted, String>;

    /// Sends what posts have held back.
    fn flush(&mut self, sink: &mut Sink);

    /// Makes progress: receives, raises lanes through the table, reports completions.
    fn poll(&mut self, now: Time, sink: &mut Sink);

    /// Cuts a peer off: after this returns no byte of this engine's memory is read for it or
    /// written by it through this provider, and its parts under way have been reported as failed.
    fn fence(&mut self, peer: Rank, sink: &mut Sink);

    /// A descriptor that becomes readable when [`Provider::poll`] has something to do, or `None`
    /// if peers raise lanes without this provider's help.
    fn descriptor(&self) -> Option<RawFd>;
}
