//! Communicator: an engine on top of the control plane, where most programs start.
//!
//! Poison propagates both ways. A rank that the control plane reports lost fails every engine wait; a
//! write that fails in the engine poisons the group at every other rank.
//!
//! - this file: a communicator over a formed group, and the engine it shares
//! - `config.rs`: configuration for a communicator and the devices it opens
//! - `connect.rs`: connects the engine to all ranks
//! - `waits.rs`: blocking calls
//! - `sharing.rs`: exchanges grants between all ranks
//! - `reform.rs`, `pace.rs`: the next group after a loss, and the pause if no member was lost

mod config;
mod connect;
mod pace;
mod reform;
mod sharing;
mod waits;

use crate::device::Device;
use crate::engine::{Engine, Region};
use crate::error::Result;
use crate::group_control::{GroupControl, PairMembers};
use crate::memory::Memory;
use crate::processors::{GroupProcessors, ProcessorShare};
use crate::progress_demand::{DemandThread, ProgressDemand};
use crate::registration::{IdleLimits, UserBufferCache};
use crate::shared_engine::{EngineGuard, ProgressThread, SharedEngine, SharedEngineAccess};
use crate::submitter::Submitter;
use crate::types::{Generation, ProviderKind};
use crate::wait::WaitOptions;
use crate::{clock, registry};
use config::{check_providers, device_config};
use connect::{attribute_error, connect, report};
use pace::ReformPace;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weft_control::{Control, Poison, Rank};

pub use config::{CommunicatorConfig, Progress};

/// Spin deadlines if the configuration names none: with a core for each rank on the host, and on shared
/// cores.
const OWN_CORE_SPIN: Duration = Duration::from_micros(50);
const SHARED_CORE_SPIN: Duration = Duration::from_micros(200);

/// Group of ranks that can write to each other. Any thread may call it at any time: no call blocks on
/// another thread's wait.
pub struct Communicator {
    /// Configuration for the next generation; `None` for a pair.
    config: Option<CommunicatorConfig>,
    control: GroupControl,
    /// Open devices, shared by later groups.
    devices: Vec<Arc<dyn Device>>,
    shared: Arc<SharedEngine>,
    user_buffers: UserBufferCache,
    thread: Mutex<Option<ProgressThread>>,
    on_demand: Mutex<Option<DemandThread>>,
    spin: Duration,
    share: ProcessorShare,
    /// This group's entry in the process-wide table, until a re-formed group replaces it.
    processors: Mutex<Option<GroupProcessors>>,
    pace: Arc<Mutex<ReformPace>>,
}

impl Communicator {
    /// Joins the group. Collective.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if a provider cannot be used on this machine, [`crate::Error::Control`] if the
    /// rendezvous fails, [`crate::Error::NoRoute`] and [`crate::Error::Connect`] if two ranks cannot reach each other,
    /// [`crate::Error::Poisoned`] if a rank is lost meanwhile.
    pub fn init(config: CommunicatorConfig) -> Result<Communicator> {
        check_providers(&config)?;
        let control = Control::connect(config.control.clone())?;
        Communicator::over(control, config)
    }

    /// [`Communicator::init`] for rank 0 with a bound listener, so that the port is known before the
    /// rendezvous.
    ///
    /// # Errors
    /// Same as [`Communicator::init`].
    pub fn init_with_listener(
        config: CommunicatorConfig,
        listener: TcpListener,
    ) -> Result<Communicator> {
        check_providers(&config)?;
        let control = Control::connect_with_listener(config.control.clone(), listener)?;
        Communicator::over(control, config)
    }

    /// Makes a communicator over a formed group, within the rest of the group's connect timeout.
    pub fn over(control: Control, config: CommunicatorConfig) -> Result<Communicator> {
        let device_config = device_config(&control, &config);
        let open = |kind: &ProviderKind| registry::open(*kind, &device_config);
        let devices = config.providers.iter().map(open).collect::<Result<_>>();
        let devices = devices.map_err(|error| report(&control, error))?;
        Communicator::over_devices(control, config, devices)
    }

    /// [`Communicator::over`] with open devices, in place of [`CommunicatorConfig::providers`].
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
        let engine = Engine::new(config.engine.clone(), rank, size, generation, &devices);
        let mut engine = engine.map_err(|error| report(&control, error))?;
        let addresses = connect(&control, &mut engine, deadline).map_err(|error| {
            let error = attribute_error(|| Ok(control.check()?), error, deadline);
            report(&control, error)
        })?;

        let processors: Vec<_> = addresses.iter().map(|address| &address.processors).collect();
        let processors = GroupProcessors::of(control.members(), rank, &processors);
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

    /// Pair communicator, over a connected engine that has a barrier counter.
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

    /// Connects poison and departures between engine and control plane, in both directions.
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
            on_demand: Mutex::default(),
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

    /// Details for each provider, such as libraries and NICs: see [`Device::details`]. Providers without
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

    /// This rank's share in the host's processors when the group formed, divided among the ranks in all
    /// groups in this process.
    pub fn processor_share(&self) -> ProcessorShare {
        self.share
    }

    /// Progress source.
    pub fn progress(&self) -> Progress {
        self.config.as_ref().map_or(Progress::Caller, |config| config.progress)
    }

    /// Ends the progress thread, if there is one. From now on the caller polls the engine and gets every
    /// event. Progress then depends on the caller's polls, which some providers (ofi) also need for
    /// writes to arrive.
    pub fn end_progress_thread(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(thread);
    }

    /// Has a thread make progress while the result lives, for watches ([`Engine::watch`]) that an event loop awaits.
    /// The progress thread, if there is one, already does.
    ///
    /// # Errors
    /// [`crate::Error::Control`] if no thread can be started, or after [`Communicator::close`].
    pub fn demand_progress(&self) -> Result<ProgressDemand> {
        self.shared.check_open()?;
        if self.thread.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Ok(ProgressDemand::MET);
        }
        let mut on_demand = self.on_demand.lock().unwrap_or_else(PoisonError::into_inner);
        if on_demand.is_none() {
            *on_demand = Some(DemandThread::start(&self.shared)?);
        }
        Ok(on_demand.as_ref().map_or(ProgressDemand::MET, DemandThread::demand))
    }

    /// Locks the engine for one step. Never hold the guard during a wait.
    pub fn engine(&self) -> EngineGuard<'_> {
        self.shared.lock()
    }

    /// True if a poll finds lanes that peers on this host have raised by stores: one load, without the
    /// engine's lock. Arrivals over other routes are found only by polling.
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

    /// Submission queue in front of the engine, for threads that must not block on the engine lock.
    pub fn submitter(&self) -> Submitter {
        self.shared.submitter()
    }

    /// Group control.
    pub fn control(&self) -> &GroupControl {
        &self.control
    }

    /// [`Engine::register`] for a user buffer, for example a tensor that each step registers. If another
    /// region or [`CommunicatorConfig::kept_user_buffers`] keeps a buffer with the same address and
    /// length, that allocation is reused with all its registrations, and `memory` and its owner are
    /// dropped.
    ///
    /// # Errors
    /// Same as [`Engine::register`].
    pub fn register_user_buffer(&self, memory: Memory) -> Result<Region> {
        let memory = self.user_buffers.intern(memory);
        self.engine().register(memory)
    }

    /// Poisons the group at every rank.
    pub fn poison(&self, cause: Poison) {
        self.engine().poison(cause);
    }

    /// Leaves the group: the peers see a departure instead of a loss.
    pub fn leave(&self) {
        self.control.leave();
    }

    /// Ends every wait on this communicator in this process with [`weft_control::Error::Closed`], and
    /// ends the threads that make progress, which end the watches. Any thread may call it, also while it
    /// holds [`Communicator::engine`].
    pub fn close(&self) {
        self.shared.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*thread {
            thread.stop();
        }
        let on_demand = self.on_demand.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*on_demand {
            thread.stop();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
        // The threads end before the engine.
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let on_demand = self.on_demand.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop((thread, on_demand));
        let deadline = clock::now().after(LINGER);
        let (spin, interrupted) = (Duration::ZERO, &mut || false);
        // Peers may wait for queued writes, except in a poisoned group.
        let _ = self.engine().drain_queues(&mut WaitOptions { deadline, spin, interrupted });
    }
}

/// Time in which a dropped communicator posts queued writes.
const LINGER: Duration = Duration::from_secs(1);

/// Spin deadline for an idle progress thread.
const THREAD_SPIN: Duration = Duration::from_micros(20);

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
        // SAFETY: the bytes are never freed, and only the address is used.
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
        // Releasing the first region again does not release the region that now has this key.
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
