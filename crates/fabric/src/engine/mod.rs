//! Engine: one rank's state in one generation of a group.
//!
//! An engine lives as long as its group: its connections, lane table and memory are made together, poisoned
//! together and never reused (decision record 0001). It has no thread and no clock: a poll takes the time
//! as an argument. (Only the times of a trace come from the host's clock.) [`crate::wait`] has the blocking
//! calls, and with them the clock.
//!
//! - this file: construction and routes
//! - `counters.rs`, `counters/followers.rs`: counters, rounds, credits; credits shared by several counters
//! - `regions.rs`: regions, grants, imports
//! - `submit.rs`, `target.rs`: writes and their validation
//! - `peer_group.rs`: scatters over peers resolved once
//! - `post.rs`, `queue.rs`, `complete.rs`: parts posted to a link, queued parts, completions
//! - `handover.rs`: requests whose copied bytes have not left the link
//! - `progress.rs`: polls, arrivals, losses
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
pub use progress::RaisedCounter;
pub use regions::{Region, RemoteRegion, WeakRegion};
pub(crate) use sleep::{AnnouncedSleep, MAX_PARK};
pub use submit::PeerWrite;

use crate::descriptor::EngineAddress;
use crate::device::Device;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Link, MappedPeer, Membership, RouteRule, Sink};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::{PartRule, Parts};
use crate::peer_memory::MemoryReader;
use crate::poison::PoisonFlag;
use crate::processors::Processors;
use crate::request::{LaneTarget, PartToken, RequestTable};
use crate::statistics::{EngineStatistics, PeerStatistics, TrafficTotals};
use crate::trace::Trace;
use crate::types::{CounterId, Generation, ProviderKind, Time};
use counters::Counters;
use peer_group::UniqueId;
use queue::PeerQueue;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{Poison, Rank};

/// Limits and timeouts of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Lanes in the table: two for each counter and peer, more for windows of more than one round. An
    /// issued lane takes 32 bytes of shared memory.
    pub lanes: usize,
    /// Limit of requests in flight; more are rejected with [`Error::Limit`].
    pub max_requests: usize,
    /// Time that a broken connection waits for the control plane's report that the peer has left;
    /// afterwards the peer counts as lost.
    pub loss_grace: Duration,
    /// Requests and events for which memory is reserved; more are allocated on demand.
    pub reserved: usize,
    /// Limit of trace records of each kind; zero turns the trace off.
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
    /// Limits for a pair, of which a process may have thousands: 256 lanes in 8 KiB, memory for 16
    /// requests.
    pub fn for_pair() -> EngineConfig {
        EngineConfig { lanes: 256, max_requests: 4096, reserved: 16, ..EngineConfig::default() }
    }
}

/// Route to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The provider.
    pub provider: ProviderKind,
    /// Division of writes into parts, equal at both ends.
    pub parts: PartRule,
    /// Arrivals keep the order of their posts.
    pub ordered: bool,
    /// Limit of unconsumed arrivals in each direction.
    pub max_unconsumed: u32,
    /// Both ends map each other's host memory, so that they may exchange messages by [`crate::Mailboxes`].
    pub mapped: bool,
    index: usize,
}

/// Fields of a route that every post reads.
#[derive(Clone, Copy)]
struct PostPath {
    /// Index of the link.
    link: u16,
    /// Posts complete inside the post.
    inline: bool,
    /// Pages and bytes up to which a write is certainly one part.
    single_pages: usize,
    single_bytes: u64,
    /// Longest write that carries a piggybacked credit.
    max_piggyback: u64,
}

struct EnginePeer {
    /// `None` for this rank itself.
    path: Option<PostPath>,
    /// As `path`.
    route: Option<Route>,
    totals: TrafficTotals,
    regions: regions::RemoteLengths,
    queue: PeerQueue,
}

/// A peer whose connection broke, before a report of the control plane.
struct PendingLoss {
    rank: Rank,
    since: Time,
    why: String,
}

/// One rank's state in one generation of a group. See the module's page.
pub struct Engine {
    config: EngineConfig,
    rank: Rank,
    generation: Generation,
    links: Vec<Box<dyn Link>>,
    peers: Vec<EnginePeer>,
    lanes: Arc<LaneTable>,
    /// Use of each of our lanes, by lane number.
    lane_uses: Vec<Option<LaneUse>>,
    counters: Counters,
    free_counters: Vec<CounterId>,
    regions: Vec<Option<regions::LocalRegion>>,
    /// Number of registrations so far.
    registered: u64,
    /// Released regions that requests in flight still read.
    released: usize,
    /// Identity of this engine in its process.
    id: UniqueId,
    /// Changes when a region or counter that a peer group may name is removed.
    stamp: UniqueId,
    requests: RequestTable,
    /// Peers with queued writes.
    queued: Vec<Rank>,
    /// Links with posts since their last flush, a bit each.
    unflushed: u32,
    spare_parts: Vec<Parts>,
    /// Parts of the scatter in submission.
    parts: Vec<crate::link::ScatterPart>,
    /// Pages of the descriptor in submission.
    slices: Vec<crate::types::Page>,
    /// Credits that leave with the next flush.
    pending_credits: Vec<LaneTarget>,
    /// Tags of requests completed inside submit; the next poll reports them.
    completed_tags: Vec<u64>,
    /// Completions of other drivers' requests, kept for them.
    foreign_tags: Vec<u64>,
    namespaces: u16,
    /// Counters raised since [`Engine::raised`], each once.
    raised_lanes: Vec<(CounterId, Rank)>,
    /// A credit or a completion since the last [`Engine::raised`].
    unreported: bool,
    /// An event loop sleeps or is about to sleep on [`Engine::descriptor`].
    armed: bool,
    /// Number of events that may end a wait.
    epoch: u64,
    polls: u64,
    sink: Sink,
    pending_losses: Vec<PendingLoss>,
    poison: Arc<PoisonFlag>,
    wake_sources: sleep::WakeSources,
    poison_reported: bool,
    barrier: Option<CounterId>,
    barrier_state: crate::wait::BarrierState,
    shares_cores: bool,
    events: Vec<Event>,
    /// Buffer of [`Engine::drive_with`].
    pub(crate) catch_up_events: Vec<Event>,
    trace: Option<Trace>,
}

/// Use of a lane: counter, peer, and offset from the end's first lane (1 for credits).
#[derive(Clone, Copy)]
struct LaneUse {
    counter: CounterId,
    peer: Rank,
    offset: u32,
}

impl Engine {
    /// An unconnected engine of `rank` in a group of `size`, with a link on each of these devices.
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
        let max_requests = config.max_requests.min(PartToken::SLOTS);
        let config = EngineConfig { max_requests, ..config };
        let lanes = Arc::new(LaneTable::new(config.lanes, generation)?);
        let group = Membership { rank, size, generation, lanes: lanes.clone() };
        let links = devices.iter().map(|device| device.open(group.clone()));
        let mut links: Vec<Box<dyn Link>> = links.collect::<Result<_>>()?;
        links.sort_by_key(|link| link.kind());
        if let Some(twice) = links.windows(2).find(|pair| pair[0].kind() == pair[1].kind()) {
            let (provider, detail) = (twice[0].kind(), "named twice: expected once".to_owned());
            return Err(Error::Provider { provider, detail });
        }
        let words = links.iter().filter_map(|link| link.probe_word()).collect();
        let poison = Arc::new(PoisonFlag::new(size, lanes.clone(), words));
        let peers = (0..size).map(|_| EnginePeer {
            path: None,
            route: None,
            totals: TrafficTotals::default(),
            regions: regions::RemoteLengths::default(),
            queue: PeerQueue::default(),
        });
        let peers = peers.collect();
        let wake_sources = sleep::WakeSources::new(&lanes)?;
        let trace = (config.trace_limit > 0).then(|| Trace::with_limit(config.trace_limit));
        let room = config.max_requests.min(config.reserved);
        let requests = RequestTable::new(config.max_requests, room);
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
            id: UniqueId::new(),
            stamp: UniqueId::new(),
            requests,
            queued: Vec::new(),
            unflushed: 0,
            spare_parts: Vec::new(),
            parts: Vec::new(),
            slices: Vec::new(),
            pending_credits: Vec::with_capacity(room),
            completed_tags: Vec::with_capacity(room),
            foreign_tags: Vec::with_capacity(room),
            namespaces: 0,
            raised_lanes: Vec::new(),
            unreported: false,
            armed: false,
            epoch: 0,
            polls: 0,
            sink: Sink::default(),
            pending_losses: Vec::new(),
            poison,
            wake_sources,
            poison_reported: false,
            barrier: None,
            barrier_state: crate::wait::BarrierState::default(),
            shares_cores: false,
            events: Vec::with_capacity(room),
            catch_up_events: Vec::with_capacity(room),
            trace,
        })
    }

    /// Address for the other ranks, without processors.
    pub fn address(&self) -> EngineAddress {
        EngineAddress {
            providers: self.links.iter().map(|link| (link.kind(), link.address())).collect(),
            processors: Processors::default(),
        }
    }

    /// True if ranks of this host share cores: a spinning wait then yields its core to them.
    #[inline]
    pub fn shares_cores(&self) -> bool {
        self.shares_cores
    }

    /// Sets [`Engine::shares_cores`], `false` in a new engine.
    pub fn set_shares_cores(&mut self, shares_cores: bool) {
        self.shares_cores = shares_cores;
    }

    /// Resolves a route to every peer and makes its introduction. `addresses` holds every rank's
    /// [`Engine::address`], in rank order. Returns a message for each rank, empty for this one; the peers'
    /// messages for this rank enter [`Engine::connect`].
    ///
    /// # Errors
    /// [`Error::NoRoute`] if no link reaches a peer.
    pub fn introduce(&mut self, addresses: &[EngineAddress]) -> Result<Vec<Vec<u8>>> {
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

    /// Connects every peer. `addresses` are those of [`Engine::introduce`], `messages` the results of each
    /// rank's `introduce` for this one, in rank order. Collective.
    ///
    /// # Errors
    /// [`Error::Connect`], also after the deadline; the error of [`WaitLimit::give_up`].
    pub fn connect(
        &mut self,
        addresses: &[EngineAddress],
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
                self.wake_sources.watch(link.descriptors())?;
            }
        }
        Ok(())
    }

    /// The first link, in the order of [`ProviderKind`], that reaches the peer.
    fn resolve<'a>(
        &self,
        peer: Rank,
        address: &'a EngineAddress,
    ) -> Result<(Route, PostPath, &'a [u8])> {
        for (index, link) in self.links.iter().enumerate() {
            let provider = link.kind();
            let Some(entry) = address.of(provider) else { continue };
            if let Some(rule) = link.route(entry) {
                let RouteRule { parts, ordered, inline, max_unconsumed, max_piggyback, mapped } =
                    rule;
                let (single_pages, single_bytes) = parts.single();
                let path = PostPath {
                    link: index as u16,
                    inline,
                    single_pages,
                    single_bytes,
                    max_piggyback,
                };
                let route = Route { provider, parts, ordered, max_unconsumed, mapped, index };
                return Ok((route, path, entry));
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

    /// All ranks except this one.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.rank;
        (0..self.peers.len() as u32).map(Rank).filter(move |rank| *rank != me)
    }

    /// Generation of the group.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The route to a peer; `None` for this rank, for an unknown rank, and before connect.
    pub fn route(&self, peer: Rank) -> Option<Route> {
        self.peers.get(peer.index())?.route
    }

    /// Memory of a peer that this process maps; `None` unless the route is [`Route::mapped`].
    pub(crate) fn mapped_peer(&self, remote: RemoteRegion) -> Option<MappedPeer> {
        let route = self.route(remote.peer)?;
        self.links[route.index].mapped_peer(remote.peer, remote.key)
    }

    /// Reader of a connected peer's private memory; `None` if its route cannot read it. Its reads take no lock of
    /// the engine.
    pub fn memory_reader(&self, peer: Rank) -> Option<Arc<dyn MemoryReader>> {
        self.links[self.route(peer)?.index].memory_reader(peer)
    }

    pub(crate) fn lane_table(&self) -> &Arc<LaneTable> {
        &self.lanes
    }

    /// Poison flag of the group, to poison it from other threads.
    pub fn poison_flag(&self) -> &Arc<PoisonFlag> {
        &self.poison
    }

    /// The cause of the poison, as an error.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(poisoned(cause)),
            None => Ok(()),
        }
    }

    /// Poisons the group in this process; the control plane notifies the peers.
    pub fn poison(&self, cause: Poison) {
        self.poison.poison(cause);
    }

    /// Snapshot of the statistics.
    pub fn statistics(&self) -> EngineStatistics {
        use std::sync::atomic::Ordering::Relaxed;
        let peer = |(number, peer): (usize, &EnginePeer)| {
            let provider = peer.route?.provider;
            let mut totals = peer.totals;
            for (_, counter) in self.counters.iter().flatten() {
                totals.add_writes(&counter.ends[number]);
            }
            Some(PeerStatistics { rank: Rank(number as u32), provider, totals })
        };
        EngineStatistics {
            peers: self.peers.iter().enumerate().filter_map(peer).collect(),
            requests: self.requests.len() as u64,
            refused_ungranted: self.lanes.dropped().ungranted.load(Relaxed),
            refused_stale: self.lanes.dropped().stale.load(Relaxed),
        }
    }

    /// The trace, if [`EngineConfig::trace_limit`] is not zero.
    pub fn trace(&mut self) -> Option<&mut Trace> {
        self.trace.as_mut()
    }

    pub(crate) fn barrier_state(&mut self) -> &mut crate::wait::BarrierState {
        &mut self.barrier_state
    }

    /// A namespace for the tags of a driver. Several drivers may share an engine.
    pub fn namespace(&mut self) -> u16 {
        self.namespaces += 1;
        self.namespaces
    }

    /// Allocates shareable zeroed memory, registered with every link.
    pub fn alloc(&mut self, length: usize) -> Result<Region> {
        self.register(Memory::shared(length)?)
    }

    /// Allocates zeroed memory of the device with this ordinal, which can be granted to peers over the copy
    /// provider.
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
    /// Sends pending credits. [`Engine::drain_queues`] sends queued writes.
    fn drop(&mut self) {
        self.flush();
    }
}
