//! Communicator: an engine on top of the control plane, the start of most programs.
//!
//! Poison propagates both ways. A rank that the control plane reports lost fails every wait of the engine;
//! a write that fails in the engine poisons the group at every other rank.

mod reform;
mod sharing;

use crate::clock;
use crate::descriptor::EngineAddress;
use crate::device::Device;
use crate::engine::{Engine, EngineConfig, Region};
use crate::error::{Error, Result};
use crate::group_control::{GroupControl, PairMembers};
use crate::inbox::Submitter;
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::processors::{GroupProcessors, ProcessorShare, Processors};
use crate::providers::copy::CopyBackend;
use crate::providers::{OfiChoice, VerbsChoice};
use crate::registration::{IdleLimits, UserBufferCache};
use crate::registry::{self, DeviceConfig};
use crate::shared_engine::{EngineGuard, ProgressThread, SharedEngine, SharedEngineAccess};
use crate::types::{CounterId, Generation, ProviderKind, RequestId, Time};
use crate::wait::{self, WaitOptions};
use reform::ReformPace;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weft_control::{Control, Operation, Poison, Rank};

/// Spin deadlines where the configuration names none: with a core for each rank of the host, and on shared cores.
const OWN_CORE_SPIN: Duration = Duration::from_micros(50);
const SHARED_CORE_SPIN: Duration = Duration::from_micros(200);

/// Source of progress on links that need it. Stores to peers of the same host need none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Progress {
    /// Threads that submit or wait.
    #[default]
    Caller,
    /// A progress thread of the communicator, in addition.
    Thread,
    /// The program's event loop: see [`Engine::descriptor`].
    Epoll,
}

/// Configuration of a communicator.
#[derive(Clone)]
pub struct CommunicatorConfig {
    /// Configuration of the control plane.
    pub control: weft_control::Config,
    /// Providers; a route takes the first, in the order of [`ProviderKind`], that both of its ends have and
    /// that reaches the peer.
    pub providers: Vec<ProviderKind>,
    /// Memory and copy engines of the copy provider, if it is among the providers.
    pub devices: CopyBackend,
    /// Seed of a [`crate::providers::HostileDevice`] wrapper around every device, for tests.
    pub hostile: Option<u64>,
    /// Provider and NICs of libfabric, if the ofi provider is among the providers.
    pub ofi: OfiChoice,
    /// NICs of the verbs provider, if it is among the providers; `None`: [`VerbsChoice::from_env`].
    pub verbs: Option<VerbsChoice>,
    /// Limits and timeouts of the engine.
    pub engine: EngineConfig,
    /// Source of progress.
    pub progress: Progress,
    /// Spin deadline of waits. `None`: 50 us if the host has a core for each of its ranks, otherwise 200 us, in
    /// which a wait yields its core between two looks.
    pub spin: Option<Duration>,
    /// User buffers that are kept, with their registrations, after the release of their last region. None
    /// by default.
    pub kept_user_buffers: IdleLimits,
}

impl CommunicatorConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(control: weft_control::Config) -> CommunicatorConfig {
        CommunicatorConfig {
            control,
            providers: registry::defaults(),
            devices: CopyBackend::default(),
            hostile: None,
            ofi: OfiChoice::from_env(),
            verbs: None,
            engine: EngineConfig::default(),
            progress: Progress::default(),
            spin: None,
            kept_user_buffers: IdleLimits::NONE,
        }
    }
}

/// Group of ranks that can write to each other. Any thread may call at any time: no call blocks on another
/// thread's wait.
pub struct Communicator {
    /// Configuration of the next generation; `None` for a pair.
    config: Option<CommunicatorConfig>,
    control: GroupControl,
    /// Open devices, shared by later groups.
    devices: Vec<Arc<dyn Device>>,
    shared: Arc<SharedEngine>,
    user_buffers: UserBufferCache,
    thread: Mutex<Option<ProgressThread>>,
    spin: Duration,
    share: ProcessorShare,
    /// Entry among the groups of this process, until a re-formed group takes its place.
    processors: Mutex<Option<GroupProcessors>>,
    pace: Arc<Mutex<ReformPace>>,
}

impl Communicator {
    /// Joins the group. Collective.
    ///
    /// # Errors
    /// [`Error::Provider`] if a provider cannot be used on this machine, [`Error::Control`] if the
    /// rendezvous fails, [`Error::NoRoute`] and [`Error::Connect`] if two ranks cannot reach each other,
    /// [`Error::Poisoned`] if a rank is lost meanwhile.
    pub fn init(config: CommunicatorConfig) -> Result<Communicator> {
        check_providers(&config)?;
        let control = Control::connect(config.control.clone())?;
        Communicator::over(control, config)
    }

    /// [`Communicator::init`] of rank 0 with a bound listener, so that its port is known before the
    /// rendezvous.
    ///
    /// # Errors
    /// Those of [`Communicator::init`].
    pub fn init_with_listener(
        config: CommunicatorConfig,
        listener: TcpListener,
    ) -> Result<Communicator> {
        check_providers(&config)?;
        let control = Control::connect_with_listener(config.control.clone(), listener)?;
        Communicator::over(control, config)
    }

    /// A communicator over a formed group, within the rest of its connect timeout.
    pub fn over(control: Control, config: CommunicatorConfig) -> Result<Communicator> {
        let device_config = device_config(&control, &config);
        let open = |kind: &ProviderKind| registry::open(*kind, &device_config);
        let devices = config.providers.iter().map(open).collect::<Result<_>>()?;
        Communicator::over_devices(control, config, devices)
    }

    /// [`Communicator::over`] with open devices, in place of those of [`CommunicatorConfig::providers`].
    #[doc(hidden)]
    pub fn over_devices(
        control: Control,
        config: CommunicatorConfig,
        devices: Vec<Arc<dyn Device>>,
    ) -> Result<Communicator> {
        let rank = control.rank();
        let deadline = clock::now().after(control.connect_time_left());
        let generation = Generation(control.generation() as u8);
        let size = control.world_size();
        let mut engine = Engine::new(config.engine.clone(), rank, size, generation, &devices)?;
        let addresses = connect(&control, &mut engine, deadline)
            .map_err(|error| attribute_error(|| Ok(control.check()?), error, deadline))?;

        let processors = GroupProcessors::of(control.members(), rank, &addresses);
        engine.set_shares_cores(processors.share.is_shared);
        let spin = config.spin.unwrap_or_else(|| default_spin(&engine));
        let barrier = engine.counter()?;
        engine.use_for_barriers(barrier);
        let (progress, control) = (config.progress, GroupControl::Mesh(control));
        let communicator =
            Communicator::assemble(control, engine, devices, spin, processors, Some(config));
        communicator.share(&[], &[barrier], deadline)?;
        communicator.start_thread(progress)?;
        communicator.log_routes();
        Ok(communicator)
    }

    /// A communicator of a pair, with a connected engine that has its barrier counter.
    pub(crate) fn over_pair(
        control: PairMembers,
        engine: Engine,
        devices: Vec<Arc<dyn Device>>,
        progress: Progress,
        spin: Option<Duration>,
        processors: GroupProcessors,
    ) -> Result<Communicator> {
        let spin = spin.unwrap_or_else(|| default_spin(&engine));
        let control = GroupControl::Pair(control);
        let communicator = Communicator::assemble(control, engine, devices, spin, processors, None);
        communicator.start_thread(progress)?;
        Ok(communicator)
    }

    /// Connects poison and departures of the engine and its control plane, in both directions.
    fn assemble(
        control: GroupControl,
        engine: Engine,
        devices: Vec<Arc<dyn Device>>,
        spin: Duration,
        processors: GroupProcessors,
        config: Option<CommunicatorConfig>,
    ) -> Communicator {
        // The flag holds the control plane; the control plane holds a weak reference, against a cycle.
        let flag = Arc::downgrade(engine.poison_flag());
        let left = flag.clone();
        control.on_poison(Box::new(move |poison| {
            if let Some(flag) = flag.upgrade() {
                flag.poison_from_peer(poison.clone());
            }
        }));
        control.on_peer_left(Box::new(move |rank| {
            if let Some(flag) = left.upgrade() {
                flag.peer_left(rank);
            }
        }));
        let spreader = control.clone();
        engine.poison_flag().on_poison(Box::new(move |poison| spreader.poison(poison)));
        let kept = config.as_ref().map_or(IdleLimits::NONE, |config| config.kept_user_buffers);
        let (shared, thread) = (Arc::new(SharedEngine::new(engine)), Mutex::new(None));
        let user_buffers = UserBufferCache::new(kept);
        let (share, processors) = (processors.share, Mutex::new(Some(processors)));
        let pace = Arc::new(Mutex::new(ReformPace::new(clock::now())));
        Communicator {
            config,
            control,
            devices,
            shared,
            user_buffers,
            thread,
            spin,
            share,
            processors,
            pace,
        }
    }

    /// Starts the progress thread if the configuration or a device in use demands one.
    fn start_thread(&self, progress: Progress) -> Result<()> {
        let demanded = self.devices.iter().any(|device| {
            let peers = self.engine().peers();
            let uses = |peer| self.engine().route(peer).map(|route| route.provider);
            device.demands_thread() && peers.into_iter().any(|p| uses(p) == Some(device.kind()))
        });
        if progress == Progress::Thread || demanded {
            let thread = ProgressThread::start(&self.shared, THREAD_SPIN)?;
            *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        }
        Ok(())
    }

    fn log_routes(&self) {
        let (rank, size) = (self.rank(), self.world_size());
        log::info!("{rank} of {size} joined generation {}", self.control.generation());
        let engine = self.engine();
        for peer in engine.peers() {
            if let Some(route) = engine.route(peer) {
                log::debug!("{rank} reaches {peer} over {}", route.provider);
            }
        }
    }

    /// Details of each provider, such as libraries and NICs: see [`Device::details`]. Providers without
    /// details are omitted.
    pub fn provider_details(&self) -> Vec<(ProviderKind, Vec<(&'static str, String)>)> {
        let details = self.devices.iter().map(|device| (device.kind(), device.details()));
        details.filter(|(_, details)| !details.is_empty()).collect()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> u32 {
        self.control.world_size()
    }

    /// Share of this rank in the processors of its host, when the group formed: among the ranks of all groups of this
    /// process.
    pub fn processor_share(&self) -> ProcessorShare {
        self.share
    }

    /// Source of progress.
    pub fn progress(&self) -> Progress {
        self.config.as_ref().map_or(Progress::Caller, |config| config.progress)
    }

    /// Ends the progress thread, if there is one: the caller polls the engine from now on, and gets every event.
    /// Progress ends with its polls, which some providers (ofi) also need for the arrival of writes.
    pub fn end_progress_thread(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(thread);
    }

    /// Locks the engine for one step. Never hold the guard during a wait.
    pub fn engine(&self) -> EngineGuard<'_> {
        self.shared.lock()
    }

    /// True if a poll finds lanes that peers of this host have raised by stores: one load, without the engine's lock.
    /// Over other routes arrivals are found by polls alone.
    #[inline]
    pub fn has_raised(&self) -> bool {
        self.shared.has_raised()
    }

    /// After [`Communicator::has_raised`] returned true: prefetches what the poll loads. Without the engine's lock.
    #[inline]
    pub fn prefetch_raised(&self) {
        self.shared.prefetch_raised();
    }

    /// A waiting thread's access to the engine, for [`crate::SharedDriver`] and patterns built on it.
    pub fn access(&self) -> SharedEngineAccess<'_> {
        self.shared.access()
    }

    /// A submission queue in front of the engine, for threads that must not block on its lock.
    pub fn submitter(&self) -> Submitter {
        self.shared.submitter()
    }

    /// [`Engine::wait`].
    ///
    /// # Errors
    /// As [`Engine::wait`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait(
        &self,
        counter: CounterId,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait(&mut self.access(), counter, None, expected, options)
    }

    /// [`Engine::wait_in`].
    ///
    /// # Errors
    /// As [`Engine::wait_in`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait_in(
        &self,
        counter: CounterId,
        round: u64,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait(&mut self.access(), counter, Some(round), expected, options)
    }

    /// [`Engine::wait_for_credit`].
    ///
    /// # Errors
    /// As [`Communicator::wait`].
    pub fn wait_for_credit(
        &self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait_for_credit(&mut self.access(), counter, peer, round, options)
    }

    /// [`Engine::wait_for_request`].
    ///
    /// # Errors
    /// As [`Engine::wait_for_request`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait_for_request(
        &self,
        request: RequestId,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait_for_request(&mut self.access(), request, options)
    }

    /// Control of the group.
    pub fn control(&self) -> &GroupControl {
        &self.control
    }

    /// Options of a wait until `deadline`, with this communicator's spin deadline.
    pub fn wait_options<'a>(
        &self,
        deadline: Time,
        interrupted: &'a mut dyn FnMut() -> bool,
    ) -> WaitOptions<'a> {
        WaitOptions { deadline, spin: self.spin, interrupted }
    }

    /// [`Engine::register`] of a user buffer. If another region or
    /// [`CommunicatorConfig::kept_user_buffers`] keeps a buffer of the same address and length, that
    /// allocation is reused with its registrations, and `memory` is dropped with its owner.
    ///
    /// # Errors
    /// As [`Engine::register`].
    pub fn register_user_buffer(&self, memory: Memory) -> Result<Region> {
        let memory = self.user_buffers.intern(memory);
        self.engine().register(memory)
    }

    /// Returns after every rank has entered.
    ///
    /// # Errors
    /// As [`Communicator::wait`]. After [`Error::Timeout`] a repeated call continues the same barrier.
    /// [`Error::InProgress`] if another thread is in a barrier of this communicator; that barrier
    /// continues.
    pub fn barrier(&self, options: &mut WaitOptions<'_>) -> Result<()> {
        wait::barrier(&mut self.access(), options)
    }

    /// Poisons the group at every rank.
    pub fn poison(&self, cause: Poison) {
        self.engine().poison(cause);
    }

    /// Leaves the group: the peers see a departure in place of a loss.
    pub fn leave(&self) {
        self.control.leave();
    }

    /// Ends every wait of this process on this communicator with [`weft_control::Error::Closed`], and
    /// the progress thread. Any thread may call it, also while it holds [`Communicator::engine`].
    pub fn close(&self) {
        self.shared.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*thread {
            thread.stop();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
        // The thread ends before the engine.
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(thread);
        let deadline = clock::now().after(LINGER);
        let (spin, interrupted) = (Duration::ZERO, &mut || false);
        // Peers may wait for queued writes, except in a poisoned group.
        let _ = self.engine().drain_queues(&mut WaitOptions { deadline, spin, interrupted });
    }
}

/// Time in which a dropped communicator posts its queued writes.
const LINGER: Duration = Duration::from_secs(1);

/// Spin deadline of an idle progress thread.
const THREAD_SPIN: Duration = Duration::from_micros(20);

/// Time that a link's error waits for the control plane's report on the peer. A process that dies closes
/// all sockets at once, and the link may detect it first.
const LOSS_REPORT_TIME: Duration = Duration::from_secs(2);
/// Interval of checks for that report.
const LOSS_REPORT_POLL: Duration = Duration::from_millis(5);

/// The control plane's error, if it reports a lost or departed rank within [`LOSS_REPORT_TIME`]; otherwise the
/// link's, without delay after the caller's deadline.
fn attribute_error(check: impl Fn() -> Result<()>, error: Error, deadline: Time) -> Error {
    if !matches!(error, Error::Connect { .. } | Error::System { .. }) {
        return error;
    }
    let now = clock::now();
    let until = if now < deadline { now.after(LOSS_REPORT_TIME) } else { now };
    loop {
        if let Err(cause) = check() {
            return cause;
        }
        if clock::now() >= until {
            return error;
        }
        std::thread::sleep(LOSS_REPORT_POLL);
    }
}

/// Exchanges addresses and introductions, and connects the engine; returns the addresses of all ranks.
fn connect(control: &Control, engine: &mut Engine, deadline: Time) -> Result<Vec<EngineAddress>> {
    let addresses = gather_addresses(control, engine, deadline)?;
    let introductions = engine.introduce(&addresses)?;
    let timeout = deadline.since(clock::now());
    let messages = control.exchange_as(Operation::Introductions, &introductions, timeout)?;
    let mut give_up = || Ok(control.check()?);
    let mut limit = WaitLimit { deadline, give_up: &mut give_up };
    engine.connect(&addresses, &messages, &mut limit)?;
    Ok(addresses)
}

fn gather_addresses(
    control: &Control,
    engine: &Engine,
    deadline: Time,
) -> Result<Vec<EngineAddress>> {
    let timeout = deadline.since(clock::now());
    let address = EngineAddress { processors: Processors::of_thread(), ..engine.address() };
    let gathered = control.all_gather_as(Operation::Addresses, &address.encode(), timeout)?;
    let decoded = gathered.iter().enumerate().map(|(number, bytes)| {
        EngineAddress::decode(bytes).map_err(|detail| Error::Malformed {
            peer: Rank(number as u32),
            what: "an address",
            detail,
        })
    });
    decoded.collect()
}

/// Sockets listen on the address of the control plane.
fn device_config(control: &Control, config: &CommunicatorConfig) -> DeviceConfig {
    let reached = control.members()[control.rank().index()].address;
    DeviceConfig {
        host_id: config.control.host_id.clone(),
        bind: config.control.bind.unwrap_or(reached),
        advertise: config.control.advertise,
        devices: config.devices,
        hostile: config.hostile,
        ofi: config.ofi.clone(),
        verbs: config.verbs.clone(),
    }
}

/// Checks that this machine can use the providers of a configuration.
fn check_providers(config: &CommunicatorConfig) -> Result<()> {
    let CommunicatorConfig { providers, ofi, verbs, .. } = config;
    providers.iter().try_for_each(|kind| registry::check(*kind, ofi, verbs))
}

fn default_spin(engine: &Engine) -> Duration {
    if engine.shares_cores() { SHARED_CORE_SPIN } else { OWN_CORE_SPIN }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryKind;
    use std::ptr::NonNull;

    static BYTES: [u8; 64] = [0; 64];

    fn lent() -> Memory {
        // SAFETY: the bytes are never freed, and only their address is used.
        unsafe {
            Memory::user_buffer(
                NonNull::from(&BYTES[0]),
                BYTES.len(),
                MemoryKind::Host,
                Box::new(()),
            )
        }
    }

    fn alone(kept_user_buffers: IdleLimits) -> Communicator {
        let overrides =
            weft_control::Overrides { rank: Some(0), world_size: Some(1), ..Default::default() };
        let control = weft_control::Config::from_env(overrides).unwrap();
        Communicator::init(CommunicatorConfig {
            kept_user_buffers,
            ..CommunicatorConfig::new(control)
        })
        .unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "joining opens sockets and /proc, and isolated miri has neither")]
    fn memory_that_is_registered_twice_is_two_regions_of_one_allocation() {
        let communicator = alone(IdleLimits::NONE);
        let first = communicator.register_user_buffer(lent()).unwrap();
        let second = communicator.register_user_buffer(lent()).unwrap();
        assert_ne!(first.key(), second.key());
        assert!(Arc::ptr_eq(first.memory(), second.memory()));
        // A second release of the first does not release the region that now has its key.
        communicator.engine().release(&first);
        let third = communicator.register_user_buffer(lent()).unwrap();
        assert_eq!(third.key(), first.key());
        communicator.engine().release(&first);
        assert_ne!(communicator.register_user_buffer(lent()).unwrap().key(), third.key());
    }

    #[test]
    #[cfg_attr(miri, ignore = "joining opens sockets and /proc, and isolated miri has neither")]
    fn memory_that_is_registered_in_each_step_is_one_allocation_if_it_is_kept() {
        for (kept, allocations) in [(IdleLimits::default(), 1), (IdleLimits::NONE, 1000)] {
            let communicator = alone(kept);
            let mut seen = std::collections::HashSet::new();
            for _ in 0..1000 {
                let region = communicator.register_user_buffer(lent()).unwrap();
                seen.insert(region.memory().id());
                communicator.engine().release(&region);
            }
            assert_eq!(seen.len(), allocations);
        }
    }
}
