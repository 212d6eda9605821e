//! An engine on top of the control plane: what most programs start with.
//!
//! Poison flows both ways. A rank that the control plane finds dead fails every wait of the engine;
//! a write that fails in the engine poisons the group at every other rank.

use crate::clock;
use crate::descriptor::{Address, Grant};
use crate::engine::{Engine, EngineConfig, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::provider::Provider;
use crate::providers::copy::{CopyConfig, CopyProvider, Devices};
use crate::providers::shm::{ShmConfig, ShmProvider};
use crate::providers::tcp::{TcpConfig, TcpProvider};
use crate::providers::threaded::Threaded;
use crate::types::{CounterId, Generation, ProviderKind, Time};
use crate::wait::Waiter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{Control, Operation, Poison, Rank};

/// Who makes progress on connections that need it. Stores to peers of the same host never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Progress {
    /// Whoever submits or waits.
    #[default]
    Caller,
    /// A thread for each provider that needs one.
    Thread,
    /// The caller, from its own event loop: see [`Engine::descriptor`].
    Epoll,
}

/// How a communicator is made.
#[derive(Clone)]
pub struct CommunicatorConfig {
    /// How the ranks find each other.
    pub control: weft_control::Config,
    /// The providers to use; a route takes the first, in the order of [`ProviderKind`], that both of
    /// its ends have and that reaches.
    pub providers: Vec<ProviderKind>,
    /// Whose memory and copy engines the copy provider uses, if it is among the providers.
    pub devices: Devices,
    /// The engine's limits and habits.
    pub engine: EngineConfig,
    /// Who makes progress.
    pub progress: Progress,
    /// How long a wait spins before it parks. `None`: 50 us if every rank of this host can have a core
    /// of its own, nothing otherwise.
    pub spin: Option<Duration>,
}

impl CommunicatorConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(control: weft_control::Config) -> CommunicatorConfig {
        CommunicatorConfig {
            control,
            providers: vec![ProviderKind::Shm, ProviderKind::Tcp],
            devices: Devices::default(),
            engine: EngineConfig::default(),
            progress: Progress::default(),
            spin: None,
        }
    }
}

/// A group of ranks that can write to each other.
pub struct Communicator {
    config: CommunicatorConfig,
    control: Control,
    engine: Engine,
    spin: Duration,
}

impl Communicator {
    /// Joins the group: every rank calls this.
    ///
    /// # Errors
    /// [`Error::Control`] if the ranks do not find each other, [`Error::NoRoute`] and
    /// [`Error::Connect`] if two of them do not reach each other.
    pub fn init(config: CommunicatorConfig) -> Result<Communicator> {
        let control = Control::connect(config.control.clone())?;
        Communicator::over(control, config)
    }

    /// A communicator over a group that has been formed.
    pub fn over(control: Control, config: CommunicatorConfig) -> Result<Communicator> {
        let deadline = clock::now().after(config.control.connect_timeout);
        let rank = control.rank();
        let host_id = &config.control.host_id;
        let mut providers: Vec<Box<dyn Provider>> = Vec::new();
        for kind in &config.providers {
            match kind {
                ProviderKind::Shm => {
                    providers
                        .push(Box::new(ShmProvider::new(ShmConfig { host_id: host_id.clone() })?));
                }
                ProviderKind::Tcp => {
                    let tcp = TcpProvider::new(tcp_config(&control, &config))?;
                    providers.push(with_progress(Box::new(tcp), config.progress)?);
                }
                ProviderKind::Copy => {
                    let (host_id, devices) = (host_id.clone(), config.devices);
                    let copy = CopyProvider::new(CopyConfig { host_id, devices })?;
                    providers.push(with_progress(Box::new(copy), config.progress)?);
                }
                ProviderKind::Sim => {
                    return Err(Error::Provider {
                        provider: ProviderKind::Sim,
                        detail: "it joins ranks of one process: use it through its World".into(),
                    });
                }
            }
        }
        let generation = Generation(control.generation() as u8);
        let size = control.world_size();
        let mut engine = Engine::new(config.engine.clone(), rank, size, generation, providers)?;
        let addresses = gather_addresses(&control, &engine, deadline)?;
        engine.connect(&addresses, deadline)?;

        // The flag keeps the control plane, so the control plane must not keep the flag: neither
        // would ever go.
        let flag = Arc::downgrade(engine.poison_flag());
        let left = flag.clone();
        control.on_poison(Box::new(move |poison| {
            if let Some(flag) = flag.upgrade() {
                flag.told(poison.clone());
            }
        }));
        control.on_peer_left(Box::new(move |rank| {
            if let Some(flag) = left.upgrade() {
                flag.peer_left(rank);
            }
        }));
        let told = control.clone();
        engine.poison_flag().on_poison(Box::new(move |poison| told.poison(poison)));

        let spin = config.spin.unwrap_or_else(|| default_spin(&control, host_id));
        let mut communicator = Communicator { config, control, engine, spin };
        let barrier = communicator.engine.counter()?;
        communicator.share(&[], &[barrier], deadline)?;
        communicator.engine.use_for_barriers(barrier);
        communicator.log_routes();
        Ok(communicator)
    }

    fn log_routes(&self) {
        let (rank, size) = (self.rank(), self.world_size());
        log::info!("{rank} of {size} joined generation {}", self.control.generation());
        for peer in self.engine.peers() {
            if let Some(route) = self.engine.route(peer) {
                log::debug!("{rank} reaches {peer} over {}", route.provider);
            }
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> u32 {
        self.control.world_size()
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The control plane.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// A way to wait until `deadline` with this communicator's habits.
    pub fn waiter<'a>(
        &self,
        deadline: Time,
        interrupted: &'a mut dyn FnMut() -> bool,
    ) -> Waiter<'a> {
        Waiter { deadline, spin: self.spin, interrupted }
    }

    /// Grants every peer the given ranges of the given regions and links the given counters; every
    /// rank calls this with as many of both. Returns, by rank, the regions that it granted to us (none
    /// for this rank itself).
    pub fn share(
        &mut self,
        regions: &[(&Region, Range<u64>)],
        counters: &[CounterId],
        deadline: Time,
    ) -> Result<Vec<Vec<RemoteRegion>>> {
        let mut grants = Vec::new();
        for rank in (0..self.world_size()).map(Rank) {
            grants.push(if rank == self.rank() {
                Vec::new()
            } else {
                self.engine.grant(rank, regions, counters)?.encode()
            });
        }
        let mut remotes = Vec::new();
        for (number, bytes) in
            self.trade_as(Operation::Share, &grants, deadline)?.into_iter().enumerate()
        {
            let peer = Rank(number as u32);
            if peer == self.rank() {
                remotes.push(Vec::new());
                continue;
            }
            let grant = Grant::decode(&bytes).ok_or_else(|| Error::Malformed {
                peer,
                what: "a grant",
                detail: format!("{} bytes", bytes.len()),
            })?;
            remotes.push(self.engine.import(peer, &grant, counters, deadline)?);
        }
        Ok(remotes)
    }

    /// Gives each rank its own bytes, over the control plane; returns what each gave to this one.
    pub fn trade(&self, to_each: &[Vec<u8>], deadline: Time) -> Result<Vec<Vec<u8>>> {
        self.trade_as(Operation::Exchange, to_each, deadline)
    }

    fn trade_as(
        &self,
        operation: Operation,
        to_each: &[Vec<u8>],
        deadline: Time,
    ) -> Result<Vec<Vec<u8>>> {
        let timeout = deadline.since(clock::now());
        Ok(self.control.exchange_as(operation, to_each, timeout)?)
    }

    /// Every rank has entered before any leaves.
    pub fn barrier(&mut self, waiter: &mut Waiter<'_>) -> Result<()> {
        self.engine.barrier(waiter)
    }

    /// Waits until all that any rank has written toward these counters has arrived here. Every rank
    /// calls this with the same counters, once its own requests have drained, and writes toward them
    /// no more: regions that only they count may be released then.
    pub fn settle(&mut self, counters: &[CounterId], waiter: &mut Waiter<'_>) -> Result<()> {
        let peers: Vec<Rank> = self.engine.peers().collect();
        let mut raised = vec![Vec::new(); self.world_size() as usize];
        for &peer in &peers {
            for &counter in counters {
                let total = self.engine.raised_in_all(counter, peer)?;
                raised[peer.index()].extend(total.to_le_bytes());
            }
        }
        let told = self.trade_as(Operation::Settle, &raised, waiter.deadline)?;
        let mut expected = Vec::new();
        for peer in peers {
            let mut totals = crate::bytes::Reader::new(&told[peer.index()]);
            for &counter in counters {
                let total = totals.u64().ok_or_else(|| Error::Malformed {
                    peer,
                    what: "its totals",
                    detail: format!("they are not of {} counters", counters.len()),
                })?;
                expected.push((counter, peer, total));
            }
        }
        self.engine.wait_for_totals(&expected, waiter)
    }

    /// After a loss: agrees with the other survivors on who is left and makes a new communicator,
    /// with new ranks in the old order, new connections and new memory. This one's memory is not
    /// reused.
    pub fn reform(&self, timeout: Duration) -> Result<Communicator> {
        if self.control.poisoned().is_none()
            && let Some(cause) = self.engine.poison_flag().get()
        {
            self.control.poison(cause);
        }
        Communicator::over(self.control.reform(timeout)?, self.config.clone())
    }

    /// Poisons the group at every rank.
    pub fn poison(&self, cause: Poison) {
        self.engine.poison(cause);
    }

    /// Says goodbye: the peers then know that this rank left, and did not die.
    pub fn leave(&self) {
        self.control.leave();
    }
}

fn gather_addresses(control: &Control, engine: &Engine, deadline: Time) -> Result<Vec<Address>> {
    let timeout = deadline.since(clock::now());
    let gathered =
        control.all_gather_as(Operation::Addresses, &engine.address().encode(), timeout)?;
    let decoded = gathered.iter().enumerate().map(|(number, bytes)| {
        Address::decode(bytes).ok_or_else(|| Error::Malformed {
            peer: Rank(number as u32),
            what: "an address",
            detail: format!("{} bytes", bytes.len()),
        })
    });
    decoded.collect()
}

/// A provider that needs progress, with whom makes it.
fn with_progress(provider: Box<dyn Provider>, progress: Progress) -> Result<Box<dyn Provider>> {
    Ok(match progress {
        Progress::Thread => Box::new(Threaded::new(provider)?),
        Progress::Caller | Progress::Epoll => provider,
    })
}

/// Listens where the control plane is reached.
fn tcp_config(control: &Control, config: &CommunicatorConfig) -> TcpConfig {
    let reached = control.members()[control.rank().index()].address;
    let bind = config.control.bind.unwrap_or(reached);
    TcpConfig { bind, advertise: config.control.advertise, ..TcpConfig::default() }
}

/// Spinning pays only where nobody else needs the core.
fn default_spin(control: &Control, host_id: &str) -> Duration {
    let local = control.members().iter().filter(|member| member.host_id == host_id).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if local <= cores { Duration::from_micros(50) } else { Duration::ZERO }
}
