//! The engine: one rank's end of one peer group.
//!
//! An engine lives as long as its group: its connections, its lane table and its memory are made
//! together, poisoned together and never reused (decision record 0001). It owns no thread, and acts on no
//! clock of its own: whoever polls it says what time it is. (Only the stamps of a trace are read from
//! the host's clock.) [`crate::wait`] has the blocking calls, and with them the clock.
//!
//! - this file: construction, and the routes
//! - `counters.rs`: counters, rounds, credits
//! - `regions.rs`: regions, grants, imports
//! - `submit.rs`: from a request to parts with a provider
//! - `progress.rs`: polling, completions, loss
//! - `sleep.rs`: how an owner with nothing to do is woken

mod counters;
mod progress;
mod regions;
mod sleep;
mod submit;

pub use progress::Raised;
pub use regions::{Region, RemoteRegion, WeakRegion};
pub use submit::PeerWrite;

use crate::descriptor::Address;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::poison::PoisonFlag;
use crate::provider::{Group, Provider, Sink};
use crate::request::{Aim, Table};
use crate::statistics::{PeerStatistics, Statistics, Totals};
use crate::trace::Trace;
use crate::types::{CounterId, Generation, ProviderKind, RegionKey, Time};
use counters::Counter;
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{Poison, Rank};

/// Limits and habits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Lanes in the table: two for each counter and peer, 32 bytes each.
    pub lanes: usize,
    /// Requests that may be under way; more are refused with [`Error::Limit`].
    pub max_requests: usize,
    /// How long a peer's broken connection may wait for the control plane to say whether the peer
    /// has left or died, before it counts as died.
    pub loss_grace: Duration,
    /// Records of each sort that a trace keeps; none are kept when zero.
    pub trace_limit: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            lanes: 4096,
            max_requests: 65_536,
            loss_grace: Duration::from_secs(1),
            trace_limit: 0,
        }
    }
}

/// How a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The provider.
    pub provider: ProviderKind,
    /// How writes to it are cut; the peer cuts its writes to us alike.
    pub parts: PartRule,
    inline: bool,
    index: usize,
}

struct Peer {
    /// `None` for this rank itself.
    route: Option<Route>,
    totals: Totals,
    /// Since when its connection has been broken with nobody saying why.
    suspect: Option<(Time, String)>,
    /// Lengths of its regions, by key, in the order of keys.
    regions: Vec<(RegionKey, u64)>,
}

/// One rank's end of one peer group. See the module's page.
pub struct Engine {
    config: EngineConfig,
    rank: Rank,
    generation: Generation,
    providers: Vec<Box<dyn Provider>>,
    peers: Vec<Peer>,
    lanes: Arc<LaneTable>,
    /// Marks taken from the bell and not yet looked at.
    pending: u32,
    /// What each of our lanes is for, by its number.
    lane_uses: Vec<LaneUse>,
    counters: Vec<Counter>,
    regions: Vec<Option<regions::Local>>,
    requests: Table,
    /// Requests with parts that no provider has taken yet.
    posting: Vec<crate::types::RequestId>,
    /// Credits that leave with the next flush.
    owed: Vec<Aim>,
    /// Tags of requests that ended inside submit, to be reported by the next poll.
    ended: Vec<u64>,
    /// Tags that a poll on somebody else's behalf came across.
    held: Vec<u64>,
    namespaces: u16,
    /// Lanes that [`Engine::progress`] saw rise.
    rose: Vec<(CounterId, Rank)>,
    /// Whether [`Engine::progress`] came across something that [`Engine::raised`] has not told since.
    news: bool,
    sink: Sink,
    poison: Arc<PoisonFlag>,
    /// Readable when a sleeping owner should poll: the lane table's descriptor and the providers'.
    epoll: OwnedFd,
    /// Whether some route's provider must be polled for what peers do.
    needs_descriptors: bool,
    poison_reported: bool,
    barrier: Option<CounterId>,
    events: Vec<Event>,
    trace: Option<Trace>,
}

#[derive(Clone, Copy)]
struct LaneUse {
    counter: CounterId,
    peer: Rank,
    credit: bool,
}

impl Engine {
    /// An engine over these providers, not yet connected. `rank` is this one's of `size`.
    pub fn new(
        config: EngineConfig,
        rank: Rank,
        size: u32,
        generation: Generation,
        mut providers: Vec<Box<dyn Provider>>,
    ) -> Result<Engine> {
        if rank.0 >= size {
            return Err(Error::Unknown { what: "rank", number: rank.0.into() });
        }
        providers.sort_by_key(|provider| provider.kind());
        let lanes = Arc::new(LaneTable::new(config.lanes, generation)?);
        let poison = Arc::new(PoisonFlag::new(size, lanes.clone()));
        let peers = (0..size)
            .map(|_| Peer {
                route: None,
                totals: Totals::default(),
                suspect: None,
                regions: Vec::new(),
            })
            .collect();
        let epoll = sleep::epoll(&lanes, &providers)?;
        let trace = (config.trace_limit > 0).then(|| Trace::with_limit(config.trace_limit));
        let requests = Table::with_capacity(config.max_requests.min(1024));
        Ok(Engine {
            config,
            rank,
            generation,
            providers,
            peers,
            lanes,
            pending: 0,
            lane_uses: Vec::new(),
            counters: Vec::new(),
            regions: Vec::new(),
            requests,
            posting: Vec::with_capacity(64),
            owed: Vec::with_capacity(1024),
            ended: Vec::with_capacity(1024),
            held: Vec::with_capacity(1024),
            namespaces: 0,
            rose: Vec::new(),
            news: false,
            sink: Sink::default(),
            poison,
            epoll,
            needs_descriptors: false,
            poison_reported: false,
            barrier: None,
            events: Vec::with_capacity(1024),
            trace,
        })
    }

    /// What the other ranks need to connect to this engine.
    pub fn address(&self) -> Address {
        Address { providers: self.providers.iter().map(|p| (p.kind(), p.address())).collect() }
    }

    /// Resolves a route to every peer. `addresses` holds every rank's [`Engine::address`], in rank
    /// order, and every rank of the group calls this.
    pub fn connect(&mut self, addresses: &[Address], deadline: Time) -> Result<()> {
        if addresses.len() != self.peers.len() {
            return Err(Error::Unknown { what: "rank", number: addresses.len() as u64 });
        }
        for (number, address) in addresses.iter().enumerate() {
            if number as u32 != self.rank.0 {
                self.peers[number].route = Some(self.resolve(Rank(number as u32), address)?);
            }
        }
        for index in 0..self.providers.len() {
            let provider = &mut self.providers[index];
            let kind = provider.kind();
            let entry = |rank: usize| {
                let found = addresses[rank].providers.iter().find(|(k, _)| *k == kind);
                found.map_or(&[][..], |(_, entry)| entry.as_slice())
            };
            let peers: Vec<(Rank, &[u8])> = (0..self.peers.len())
                .filter(|&rank| self.peers[rank].route.is_some_and(|r| r.index == index))
                .map(|rank| (Rank(rank as u32), entry(rank)))
                .collect();
            provider.connect(&Group {
                rank: self.rank,
                size: self.peers.len() as u32,
                generation: self.generation,
                peers: &peers,
                lanes: &self.lanes,
                deadline,
            })?;
            self.needs_descriptors |= !peers.is_empty() && provider.descriptor().is_some();
        }
        Ok(())
    }

    /// The first provider, in the order of [`ProviderKind`], that both ends have and that reaches.
    fn resolve(&self, peer: Rank, address: &Address) -> Result<Route> {
        for (index, provider) in self.providers.iter().enumerate() {
            let kind = provider.kind();
            let entry = address.providers.iter().find(|(k, _)| *k == kind);
            if entry.is_some_and(|(_, entry)| provider.reaches(entry)) {
                let capabilities = provider.capabilities();
                let (parts, inline) = (capabilities.parts, capabilities.inline);
                return Ok(Route { provider: kind, parts, inline, index });
            }
        }
        let names = |kinds: Vec<ProviderKind>| {
            let names: Vec<&str> = kinds.into_iter().map(ProviderKind::name).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        Err(Error::NoRoute {
            peer,
            here: names(self.providers.iter().map(|p| p.kind()).collect()),
            there: names(address.providers.iter().map(|(kind, _)| *kind).collect()),
        })
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

    /// The mark of this group's death, to poison it from elsewhere.
    pub fn poison_flag(&self) -> &Arc<PoisonFlag> {
        &self.poison
    }

    /// The cause, as an error, if the group is poisoned.
    pub fn check(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(Error::Poisoned(cause.clone())),
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
            Some(PeerStatistics { rank: Rank(number as u32), provider, totals: peer.totals })
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

    /// A number for a driver to mark its tags with. Several drivers may share an engine.
    pub fn namespace(&mut self) -> u16 {
        self.namespaces += 1;
        self.namespaces
    }

    /// A stretch of shareable, zeroed memory, known to every provider.
    pub fn alloc(&mut self, length: usize) -> Result<Region> {
        self.register(Memory::shared(length)?)
    }

    /// A stretch of zeroed memory of the device of this ordinal, which peers that are reached over the
    /// copy provider may be granted.
    ///
    /// # Errors
    /// [`Error::NoDevices`] without that provider; [`Error::Provider`] if the device has no such memory.
    pub fn alloc_device(&mut self, device: u32, length: usize) -> Result<Region> {
        let mut providers = self.providers.iter_mut();
        let memory = providers.find_map(|provider| provider.allocate(device, length));
        self.register(memory.unwrap_or(Err(Error::NoDevices { device }))?)
    }
}

impl Drop for Engine {
    /// Peers may be waiting for credits that have not left.
    fn drop(&mut self) {
        self.flush();
    }
}
