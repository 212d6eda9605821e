//! The engine: one rank's end of one peer group.
//!
//! An engine lives as long as its group: its connections, its lane table and its memory are made
//! together, poisoned together and never reused (decision record 0001). It owns no thread, and acts on no
//! clock of its own: whoever polls it says what time it is. (Only the stamps of a trace are read from
//! the host's clock.) [`crate::wait`] has the blocking calls, and with them the clock.
//!
//! - this file: construction, and the routes
//! - `counters.rs`, `counters/followers.rs`: counters, rounds, credits, also for several counters
//! - `regions.rs`: regions, grants, imports
//! - `submit.rs`, `target.rs`: writes and their checks
//! - `peer_group.rs`: scatters over peers that were resolved once
//! - `post.rs`, `queue.rs`, `complete.rs`: parts with a link, those that wait for one, and their ends
//! - `handover.rs`: requests whose bytes a link has copied and not handed on
//! - `progress.rs`: polling, completions, loss
//! - `sleep.rs`: descriptors, deadlines and sleep

mod complete;
mod counters;
mod handover;
mod peer_group;
mod post;
mod progress;
mod queue;
mod regions;
mod sleep;
mod submit;
mod target;

pub use counters::CounterConfig;
pub use peer_group::{MemberWrite, PeerGroup};
pub use progress::Raised;
pub use regions::{Region, RemoteRegion, WeakRegion};
pub(crate) use sleep::{MAX_PARK, Park};
pub use submit::PeerWrite;

use crate::descriptor::Address;
use crate::device::Device;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Link, Membership, RouteRule, Sink};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::{PartRule, Parts};
use crate::poison::PoisonFlag;
use crate::request::{Aim, Table, Token};
use crate::statistics::{PeerStatistics, Statistics, Totals};
use crate::trace::Trace;
use crate::types::{CounterId, Generation, ProviderKind, Time};
use counters::Counters;
use peer_group::Stamp;
use queue::PeerQueue;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{Poison, Rank};

/// Limits and habits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Lanes in the table: two for each counter and peer, more for a window of more than one round. A
    /// lane takes 32 bytes of shared memory once it is issued.
    pub lanes: usize,
    /// Requests that may be under way; more are refused with [`Error::Limit`].
    pub max_requests: usize,
    /// How long a peer's broken connection may wait for the control plane to say whether the peer
    /// has left or died, before it counts as died.
    pub loss_grace: Duration,
    /// Requests and events that memory is reserved for; more are allocated as they come.
    pub reserved: usize,
    /// Records of each sort that a trace keeps; none are kept when zero.
    pub trace_limit: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            lanes: 65_536,
            max_requests: 65_536,
            loss_grace: Duration::from_secs(1),
            reserved: 1024,
            trace_limit: 0,
        }
    }
}

impl EngineConfig {
    /// For a pair group, of which a process may have thousands: 256 lanes in 8 KiB, memory for 16 requests.
    pub fn for_pair() -> EngineConfig {
        EngineConfig { lanes: 256, max_requests: 4096, reserved: 16, ..EngineConfig::default() }
    }
}

/// How a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The provider.
    pub provider: ProviderKind,
    /// How writes to it are cut; the peer cuts its writes to us alike.
    pub parts: PartRule,
    /// Arrivals keep the order of their posts.
    pub ordered: bool,
    /// Arrivals that may lie unconsumed in each direction.
    pub max_unconsumed: u32,
    index: usize,
}

/// The part of a route that every post reads.
#[derive(Clone, Copy)]
struct Path {
    /// Place of the link.
    link: u16,
    /// Posts complete inside the post.
    inline: bool,
    /// The most pages and bytes of a write that is surely one part.
    single_pages: usize,
    single_bytes: u64,
    /// The longest write that takes a credit along.
    max_ride: u64,
}

struct Peer {
    /// `None` for this rank itself.
    path: Option<Path>,
    /// As `path`.
    route: Option<Route>,
    totals: Totals,
    regions: regions::Lengths,
    queue: PeerQueue,
}

/// A peer whose connection broke, and for which the control plane has not given a reason.
struct Suspect {
    rank: Rank,
    since: Time,
    why: String,
}

/// One rank's end of one peer group. See the module's page.
pub struct Engine {
    config: EngineConfig,
    rank: Rank,
    generation: Generation,
    links: Vec<Box<dyn Link>>,
    peers: Vec<Peer>,
    lanes: Arc<LaneTable>,
    /// Use of each of our lanes, by its number.
    lane_uses: Vec<Option<LaneUse>>,
    counters: Counters,
    free_counters: Vec<CounterId>,
    regions: Vec<Option<regions::Local>>,
    /// Regions that there have been.
    registered: u64,
    /// Regions that were released and that requests under way still read.
    released: usize,
    /// Identity of this engine in its process.
    id: Stamp,
    /// Changes when something that a peer group may name is removed.
    stamp: Stamp,
    requests: Table,
    /// Peers with writes that no link has taken yet.
    queued: Vec<Rank>,
    /// Links that have taken posts since they were flushed, a bit each in their order.
    unflushed: u32,
    spare_parts: Vec<Parts>,
    /// Parts of the scatter that is being submitted.
    parts: Vec<crate::link::ScatterPart>,
    /// Slices of the descriptor that is being submitted.
    slices: Vec<crate::types::Page>,
    /// Credits that leave with the next flush.
    owed: Vec<Aim>,
    /// Tags of requests that ended inside submit; the next poll reports them.
    ended: Vec<u64>,
    /// Tags of other drivers that a poll came across.
    held: Vec<u64>,
    namespaces: u16,
    /// Lanes that [`Engine::progress`] saw rise, each once.
    rose: Vec<(CounterId, Rank)>,
    /// Something that `rose` does not hold has happened since [`Engine::raised`] was last asked: a
    /// credit, the end of a request.
    news: bool,
    /// An event loop sleeps, or is about to, on [`Engine::descriptor`].
    armed: bool,
    /// Polls that found something, for callers that were not polled meanwhile.
    epoch: u64,
    polls: u64,
    sink: Sink,
    suspects: Vec<Suspect>,
    poison: Arc<PoisonFlag>,
    sleeper: sleep::Sleeper,
    poison_reported: bool,
    barrier: Option<CounterId>,
    barrier_state: crate::wait::BarrierState,
    events: Vec<Event>,
    /// Reused by drivers that catch up.
    pub(crate) caught_up: Vec<Event>,
    trace: Option<Trace>,
}

/// Use of a lane: the counter and peer, and its place behind that end's first lane (1 for credits).
#[derive(Clone, Copy)]
struct LaneUse {
    counter: CounterId,
    peer: Rank,
    offset: u32,
}

impl Engine {
    /// An engine with a link on each of these devices, not yet connected. `rank` is this one's of `size`.
    pub fn new(
        config: EngineConfig,
        rank: Rank,
        size: u32,
        generation: Generation,
        devices: &[Arc<dyn Device>],
    ) -> Result<Engine> {
        if rank.0 >= size {
            return Err(Error::Unknown { what: "rank", number: rank.0.into() });
        }
        let max_requests = config.max_requests.min(Token::PLACES);
        let config = EngineConfig { max_requests, ..config };
        let lanes = Arc::new(LaneTable::new(config.lanes, generation)?);
        let group = Membership { rank, size, generation, lanes: lanes.clone() };
        let links = devices.iter().map(|device| device.open(group.clone()));
        let mut links: Vec<Box<dyn Link>> = links.collect::<Result<_>>()?;
        links.sort_by_key(|link| link.kind());
        let poison = Arc::new(PoisonFlag::new(size, lanes.clone()));
        let peers = (0..size).map(|_| Peer {
            path: None,
            route: None,
            totals: Totals::default(),
            regions: regions::Lengths::default(),
            queue: PeerQueue::default(),
        });
        let peers = peers.collect();
        let sleeper = sleep::Sleeper::new(&lanes)?;
        let trace = (config.trace_limit > 0).then(|| Trace::with_limit(config.trace_limit));
        let room = config.max_requests.min(config.reserved);
        let requests = Table::new(config.max_requests, room);
        Ok(Engine {
            config,
            rank,
            generation,
            links,
            peers,
            lanes,
            lane_uses: Vec::new(),
            counters: Vec::new(),
            free_counters: Vec::new(),
            regions: Vec::new(),
            registered: 0,
            released: 0,
            id: Stamp::new(),
            stamp: Stamp::new(),
            requests,
            queued: Vec::new(),
            unflushed: 0,
            spare_parts: Vec::new(),
            parts: Vec::new(),
            slices: Vec::new(),
            owed: Vec::with_capacity(room),
            ended: Vec::with_capacity(room),
            held: Vec::with_capacity(room),
            namespaces: 0,
            rose: Vec::new(),
            news: false,
            armed: false,
            epoch: 0,
            polls: 0,
            sink: Sink::default(),
            suspects: Vec::new(),
            poison,
            sleeper,
            poison_reported: false,
            barrier: None,
            barrier_state: crate::wait::BarrierState::default(),
            events: Vec::with_capacity(room),
            caught_up: Vec::with_capacity(room),
            trace,
        })
    }

    /// What the other ranks need to route to this engine.
    pub fn address(&self) -> Address {
        Address { providers: self.links.iter().map(|link| (link.kind(), link.address())).collect() }
    }

    /// Resolves a route to every peer and makes the message for each. `addresses` holds every rank's
    /// [`Engine::address`], in rank order. Returns a message for each rank, empty for this one; the
    /// messages that the peers made for this rank enter [`Engine::connect`].
    ///
    /// # Errors
    /// [`Error::NoRoute`] if no link reaches a peer.
    pub fn introduce(&mut self, addresses: &[Address]) -> Result<Vec<Vec<u8>>> {
        if addresses.len() != self.peers.len() {
            return Err(Error::Unknown { what: "rank", number: addresses.len() as u64 });
        }
        let mut messages = vec![Vec::new(); addresses.len()];
        for (number, address) in addresses.iter().enumerate() {
            if number as u32 == self.rank.0 {
                continue;
            }
            let peer = Rank(number as u32);
            let (route, path, entry) = self.resolve(peer, address)?;
            messages[number] = self.links[route.index].introduce(peer, entry)?;
            self.peers[number].route = Some(route);
            self.peers[number].path = Some(path);
        }
        Ok(messages)
    }

    /// Connects every peer. `addresses` are those of [`Engine::introduce`], `messages` what each rank's
    /// `introduce` made for this one, in rank order. Every rank of the group calls this.
    ///
    /// # Errors
    /// [`Error::Connect`], also after the deadline; the error of [`WaitLimit::give_up`].
    pub fn connect(
        &mut self,
        addresses: &[Address],
        messages: &[Vec<u8>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        if addresses.len() != self.peers.len() || messages.len() != self.peers.len() {
            return Err(Error::Unknown { what: "rank", number: messages.len() as u64 });
        }
        for (index, link) in self.links.iter_mut().enumerate() {
            let kind = link.kind();
            let routed = (0..self.peers.len())
                .filter(|&rank| self.peers[rank].route.is_some_and(|route| route.index == index));
            let peers: Vec<Introduction<'_>> = routed
                .map(|rank| Introduction {
                    peer: Rank(rank as u32),
                    address: addresses[rank].of(kind).unwrap_or_default(),
                    message: &messages[rank],
                })
                .collect();
            link.connect(&peers, limit)?;
            if !peers.is_empty() {
                self.sleeper.watch(link.descriptors())?;
            }
        }
        Ok(())
    }

    /// The first link, in the order of [`ProviderKind`], whose kind both ends have and that reaches.
    fn resolve<'a>(&self, peer: Rank, address: &'a Address) -> Result<(Route, Path, &'a [u8])> {
        for (index, link) in self.links.iter().enumerate() {
            let provider = link.kind();
            let Some(entry) = address.of(provider) else { continue };
            if let Some(rule) = link.route(entry) {
                let RouteRule { parts, ordered, inline, max_unconsumed, max_ride } = rule;
                let (single_pages, single_bytes) = parts.single();
                let path =
                    Path { link: index as u16, inline, single_pages, single_bytes, max_ride };
                return Ok((
                    Route { provider, parts, ordered, max_unconsumed, index },
                    path,
                    entry,
                ));
            }
        }
        let names = |names: Vec<String>| {
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        let here = self.links.iter().map(|link| link.describe(&link.address()));
        let there = address.providers.iter().map(|(kind, entry)| {
            let link = self.links.iter().find(|link| link.kind() == *kind);
            link.map_or_else(|| kind.name().to_owned(), |link| link.describe(entry))
        });
        Err(Error::NoRoute { peer, here: names(here.collect()), there: names(there.collect()) })
    }

    /// This engine's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> u32 {
        self.peers.len() as u32
    }

    /// Every rank but this one.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.rank;
        (0..self.peers.len() as u32).map(Rank).filter(move |rank| *rank != me)
    }

    /// The group's incarnation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The route to a peer; `None` for this rank itself, for an unknown one, and before connect.
    pub fn route(&self, peer: Rank) -> Option<Route> {
        self.peers.get(peer.0 as usize)?.route
    }

    pub(crate) fn lane_table(&self) -> &Arc<LaneTable> {
        &self.lanes
    }

    /// The mark of this group's death, to poison it from elsewhere.
    pub fn poison_flag(&self) -> &Arc<PoisonFlag> {
        &self.poison
    }

    /// The cause, as an error, if the group is poisoned.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(poisoned(cause)),
            None => Ok(()),
        }
    }

    /// Poisons the group here. Telling the peers is the control plane's.
    pub fn poison(&self, cause: Poison) {
        self.poison.poison(cause);
    }

    /// What went where.
    pub fn statistics(&self) -> Statistics {
        use std::sync::atomic::Ordering::Relaxed;
        let peer = |(number, peer): (usize, &Peer)| {
            let provider = peer.route?.provider;
            let mut totals = peer.totals;
            for (_, counter) in self.counters.iter().flatten() {
                totals.add_writes(&counter.ends[number]);
            }
            Some(PeerStatistics { rank: Rank(number as u32), provider, totals })
        };
        Statistics {
            peers: self.peers.iter().enumerate().filter_map(peer).collect(),
            requests: self.requests.len() as u64,
            refused_ungranted: self.lanes.refused().ungranted.load(Relaxed),
            refused_stale: self.lanes.refused().stale.load(Relaxed),
        }
    }

    /// What was recorded, if [`EngineConfig::trace_limit`] asked for it.
    pub fn trace(&mut self) -> Option<&mut Trace> {
        self.trace.as_mut()
    }

    pub(crate) fn barrier_state(&mut self) -> &mut crate::wait::BarrierState {
        &mut self.barrier_state
    }

    /// A number for a driver to mark its tags with. Several drivers may share an engine.
    pub fn namespace(&mut self) -> u16 {
        self.namespaces += 1;
        self.namespaces
    }

    /// A stretch of shareable, zeroed memory, registered with every link.
    pub fn alloc(&mut self, length: usize) -> Result<Region> {
        self.register(Memory::shared(length)?)
    }

    /// A stretch of zeroed memory of the device of this ordinal, which peers that are reached over the
    /// copy provider may be granted.
    ///
    /// # Errors
    /// [`Error::NoDevices`] without that provider; [`Error::Provider`] if the device has no such memory.
    pub fn alloc_device(&mut self, device: u32, length: usize) -> Result<Region> {
        let memory = self.links.iter_mut().find_map(|link| link.allocate(device, length));
        self.register(memory.unwrap_or(Err(Error::NoDevices { device }))?)
    }
}

#[cold]
#[inline(never)]
fn poisoned(cause: &Poison) -> Error {
    Error::Poisoned(cause.clone())
}

impl Drop for Engine {
    /// Peers may be waiting for credits that have not left. For writes behind a full queue there is
    /// [`Engine::hand_on`].
    fn drop(&mut self) {
        self.flush();
    }
}
