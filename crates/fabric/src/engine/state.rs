//! Engine state and construction.

use super::barrier_state::BarrierState;
use super::config::EngineConfig;
use super::counters::Counters;
use super::peer_queue::PeerQueue;
use super::region::{LocalRegion, Region, RemoteLengths, RemoteRegion};
use super::route::{EnginePeer, Route};
use super::unique_id::UniqueId;
use super::wake_sources::WakeSources;
use super::watch_list::Watches;
use crate::descriptor::EngineAddress;
use crate::device::Device;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::link::{Link, MappedPeer, Membership, Sink};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::peer_memory::MemoryReader;
use crate::poison::PoisonFlag;
use crate::processors::Processors;
use crate::request::{LaneTarget, PartToken, RequestTable};
use crate::statistics::{EngineStatistics, PeerStatistics, TrafficTotals};
use crate::trace::Trace;
use crate::types::{CounterId, Generation, RequestId, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::{Poison, Rank};

/// A peer whose connection broke, before the control plane reports it.
pub(super) struct PendingLoss {
    pub(super) rank: Rank,
    pub(super) since: Time,
    pub(super) why: String,
}

/// A driver's scatter whose parts were posted in the submit that has not ended.
pub(super) struct ScatterInSubmit {
    pub id: RequestId,
    /// Range in the requests' parts.
    pub parts: Range<usize>,
}

/// One rank's state in one group generation. See the module documentation.
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) rank: Rank,
    pub(super) generation: Generation,
    pub(super) links: Vec<Box<dyn Link>>,
    pub(super) peers: Vec<EnginePeer>,
    pub(super) lanes: Arc<LaneTable>,
    /// Use of each local lane, by lane number.
    pub(super) lane_uses: Vec<Option<LaneUse>>,
    pub(super) counters: Counters,
    pub(super) free_counters: Vec<CounterId>,
    pub(super) regions: Vec<Option<LocalRegion>>,
    /// Registrations so far.
    pub(super) registered: u64,
    /// Released regions that requests in flight still read.
    pub(super) released: usize,
    /// Identifies this engine in the process.
    pub(super) id: UniqueId,
    /// Changes when a region or counter that a peer group may name is removed.
    pub(super) stamp: UniqueId,
    pub(super) requests: RequestTable,
    /// Peers with queued writes.
    pub(super) queued: Vec<Rank>,
    /// Links with posts since the last flush, a bit each.
    pub(super) unflushed: u32,
    pub(super) spare_parts: Vec<Parts>,
    /// Parts of the scatter being submitted.
    pub(super) parts: Vec<crate::link::ScatterPart>,
    /// Drivers' scatters in the submit, whose parts are counted.
    pub(super) open_scatters: Vec<ScatterInSubmit>,
    /// Pages of the descriptor being submitted.
    pub(super) slices: Vec<crate::types::Page>,
    /// Credits that leave with the next flush.
    pub(super) pending_credits: Vec<LaneTarget>,
    /// Tags of requests completed inside submit; the next poll reports them.
    pub(super) completed_tags: Vec<u64>,
    /// Completions for other drivers' requests, kept for them.
    pub(super) foreign_tags: Vec<u64>,
    pub(super) namespaces: u16,
    /// Counters raised since [`Engine::raised`], each once.
    pub(super) raised_lanes: Vec<(CounterId, Rank)>,
    /// A credit or a completion since the last [`Engine::raised`].
    pub(super) unreported: bool,
    /// An event loop sleeps or is about to sleep on [`Engine::descriptor`].
    pub(super) armed: bool,
    /// A peer may lack the event descriptor, so an armed event loop also wakes by timer.
    pub(super) lacks_doorbell: bool,
    /// Count of events that may end a wait.
    pub(super) epoch: u64,
    pub(super) polls: u64,
    pub(super) sink: Sink,
    pub(super) pending_losses: Vec<PendingLoss>,
    pub(super) watches: Watches,
    pub(super) poison: Arc<PoisonFlag>,
    pub(super) wake_sources: WakeSources,
    pub(super) poison_reported: bool,
    pub(super) barrier: Option<CounterId>,
    pub(super) barrier_state: BarrierState,
    pub(super) shares_cores: bool,
    pub(super) events: Vec<Event>,
    /// Buffer for [`Engine::drive_with`].
    pub(crate) catch_up_events: Vec<Event>,
    pub(super) trace: Option<Trace>,
}

/// Use of a lane: counter, peer, and offset from the end's first lane (1 for credits).
#[derive(Clone, Copy)]
pub(super) struct LaneUse {
    pub(super) counter: CounterId,
    pub(super) peer: Rank,
    pub(super) offset: u32,
}

impl Engine {
    /// Makes an unconnected engine for `rank` in a group with `size` ranks, with a link on each device.
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
            regions: RemoteLengths::default(),
            queue: PeerQueue::default(),
        });
        let peers = peers.collect();
        let wake_sources = WakeSources::new(&lanes)?;
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
            open_scatters: Vec::new(),
            slices: Vec::new(),
            pending_credits: Vec::with_capacity(room),
            completed_tags: Vec::with_capacity(room),
            foreign_tags: Vec::with_capacity(room),
            namespaces: 0,
            raised_lanes: Vec::new(),
            unreported: false,
            armed: false,
            lacks_doorbell: false,
            epoch: 0,
            polls: 0,
            sink: Sink::default(),
            pending_losses: Vec::new(),
            watches: Watches::default(),
            poison,
            wake_sources,
            poison_reported: false,
            barrier: None,
            barrier_state: BarrierState::default(),
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

    /// True if ranks on this host share cores: a spinning wait then yields the core to them.
    #[inline]
    pub fn shares_cores(&self) -> bool {
        self.shares_cores
    }

    /// Sets [`Engine::shares_cores`], `false` in a new engine.
    pub fn set_shares_cores(&mut self, shares_cores: bool) {
        self.shares_cores = shares_cores;
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

    /// Group generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The route to a peer; `None` for this rank, for an unknown rank, and before connect.
    pub fn route(&self, peer: Rank) -> Option<Route> {
        self.peers.get(peer.index())?.route
    }

    /// Peer memory that this process maps; `None` unless the route is [`Route::mapped`].
    pub(crate) fn mapped_peer(&self, remote: RemoteRegion) -> Option<MappedPeer> {
        let route = self.route(remote.peer)?;
        self.links[route.index].mapped_peer(remote.peer, remote.key)
    }

    /// Reader for a connected peer's private memory; `None` if the route cannot read it. Reading takes no
    /// engine lock.
    pub fn memory_reader(&self, peer: Rank) -> Option<Arc<dyn MemoryReader>> {
        self.links[self.route(peer)?.index].memory_reader(peer)
    }

    pub(crate) fn lane_table(&self) -> &Arc<LaneTable> {
        &self.lanes
    }

    /// Group poison flag, for poisoning the group from other threads.
    pub fn poison_flag(&self) -> &Arc<PoisonFlag> {
        &self.poison
    }

    /// Cause of the poison, as an error.
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

    /// Statistics snapshot.
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

    pub(crate) fn barrier_state(&mut self) -> &mut BarrierState {
        &mut self.barrier_state
    }

    /// Namespace for a driver's tags. Several drivers may share an engine.
    pub fn namespace(&mut self) -> u16 {
        self.namespaces += 1;
        self.namespaces
    }

    /// Allocates shareable zeroed memory, registered with every link.
    pub fn alloc(&mut self, length: usize) -> Result<Region> {
        self.register(Memory::shared(length)?)
    }

    /// Allocates zeroed memory on the device with this ordinal, which can be granted to peers: over copy,
    /// through slots in host memory ([`crate::providers::StagedDevice`]), or over NICs that reach GPUs.
    ///
    /// # Errors
    /// [`Error::NoDevices`] without such a provider; [`Error::Provider`] if the device has no such memory,
    /// [`Error::Unusable`] if a NIC cannot register it.
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
