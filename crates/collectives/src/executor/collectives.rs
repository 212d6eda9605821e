//! Communicator collectives: connection, and calls from any thread.

use super::agreement::{Agreement, SelectionSources, agree, made_by_all};
use super::call::{Call, CallId};
use super::config::CollectivesConfig;
use super::driver::{Executor, ShortState};
use super::planner::Division;
use crate::algorithm::{Algorithm, Options};
use crate::placement::NetworkSource;
use crate::run_error::RunError;
use crate::tuning::TuningSource;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use weft_fabric::{
    Communicator, CounterId, Driver as _, EngineAccess, MailboxWaits, Rank, Region, Requests,
    SharedDriver, Time, WaitOptions, clock,
};

/// Message checks between two clock reads: some microseconds.
const SPIN_CHECKS: u32 = 64;
/// Vector size in bytes from which a wait spins longer, a nanosecond for each byte up to a limit: a peer copies for longer than
/// the usual spin deadline, and a wake-up costs as much as copying hundreds of KiB.
const SPIN_BYTES: u64 = 64 << 10;
const MAX_SPIN: Duration = Duration::from_millis(2);

/// Communicator collectives. Every rank starts the same calls in the same order.
///
/// Any thread may call at any time; no call blocks on another thread's wait.
pub struct Collectives {
    driver: SharedDriver<Executor>,
    counters: Vec<CounterId>,
    regions: Vec<Region>,
    /// Wait announcements for short calls, if the routes permit such calls.
    waits: Option<Arc<MailboxWaits>>,
    /// True if ranks on this host share cores.
    shares_cores: bool,
    /// Inputs that are registered.
    registered: AtomicUsize,
    /// Bytes in the call started last.
    last_bytes: AtomicU64,
    /// Rank 0's network name and description.
    network: Option<(String, String)>,
}

impl Collectives {
    /// Connects collectives over a communicator. Collective.
    ///
    /// # Errors
    /// [`RunError::Disagreement`] if the ranks' configurations differ; [`RunError::PeerFailed`] if a peer could not
    /// allocate its part; fabric errors.
    pub fn connect(
        communicator: &Communicator,
        config: CollectivesConfig,
        deadline: Time,
    ) -> Result<Collectives, RunError> {
        Collectives::connect_tuned(communicator, config, None, deadline)
    }

    /// Same as [`Collectives::connect`], with algorithms selected by the measurements in rank 0's file; files on other
    /// ranks have no effect.
    ///
    /// # Errors
    /// Errors from [`Collectives::connect`]; [`RunError::Invalid`] at rank 0 if its file is damaged, and
    /// [`RunError::PeerFailed`] at the others.
    pub fn connect_tuned(
        communicator: &Communicator,
        config: CollectivesConfig,
        tuning: Option<TuningSource<'_>>,
        deadline: Time,
    ) -> Result<Collectives, RunError> {
        let sources = SelectionSources { tuning, ..SelectionSources::default() };
        Collectives::connect_with(communicator, config, sources, deadline)
    }

    /// Same as [`Collectives::connect_tuned`], with HDRM on the network that rank 0 passes, in the rank order that the
    /// rank map requires on the hosts. Estimates on this network's links then select the all-reduce algorithms. If the
    /// hosts do not fit, HDRM is not selected, and a call that names it is rejected with the reason.
    ///
    /// # Errors
    /// Errors from [`Collectives::connect_tuned`], for the network as for measurements.
    pub fn connect_with(
        communicator: &Communicator,
        config: CollectivesConfig,
        sources: SelectionSources<'_>,
        deadline: Time,
    ) -> Result<Collectives, RunError> {
        let Agreement { routes, tuning, placement, network } =
            agree(communicator, &config, &sources, deadline)?;
        let made = Executor::allocate(&mut communicator.engine(), config, routes);
        let mut executor = made_by_all(communicator, made, deadline)?;
        executor.set_tuning(tuning);
        executor.set_placement(placement);
        executor.set_reduction_threads(config.threads(communicator.processor_share().cores));
        let (regions, counters) = (executor.regions(), executor.counters().to_vec());
        let remotes = communicator.share(&executor.granted(), &counters, deadline)?;
        for (peer, remotes) in (0..).map(Rank).zip(&remotes) {
            if peer != communicator.rank() {
                executor.linked(&communicator.engine(), peer, remotes)?;
            }
        }
        let waits = executor.waits();
        let shares_cores = communicator.engine().shares_cores();
        let requests = Requests::with_capacity(64, 256);
        let driver = SharedDriver::new(executor, requests);
        Ok(Collectives {
            driver,
            counters,
            regions,
            waits,
            shares_cores,
            registered: AtomicUsize::new(0),
            last_bytes: AtomicU64::new(0),
            network,
        })
    }

    /// Starts a call, and posts the first writes.
    ///
    /// # Safety
    /// Input and output stay valid, the input unchanged, and neither is accessed otherwise, until a wait for this
    /// call has returned without an error or [`Collectives::is_done`] is true; after an error, until the
    /// communicator is dropped.
    ///
    /// # Errors
    /// [`RunError::Invalid`] and [`RunError::TooLarge`]: the call has not started then, on any rank with equal
    /// arguments; [`RunError::Closed`]; fabric errors.
    pub unsafe fn start(
        &self,
        access: &mut impl EngineAccess,
        call: &Call,
    ) -> Result<CallId, RunError> {
        let begun = self.driver.call(access, |driver, requests| {
            driver.check(call)?;
            if let Some(id) = driver.begin_short(call)? {
                return Ok(Ok(id));
            }
            let division = driver.divide_checked(call)?;
            if division.reads_input() {
                return Ok(Err(division));
            }
            driver.begin_call(call, division, None, requests).map(Ok)
        });
        let begun = self.concluded(access, begun)?.ok_or(RunError::Closed)?;
        self.last_bytes.store(call.bytes(), Ordering::Relaxed);
        match begun {
            Ok(id) => Ok(id),
            Err(division) => self.start_in_place(access, call, division),
        }
    }

    /// Starts a call whose writes read the input in place.
    fn start_in_place(
        &self,
        access: &mut impl EngineAccess,
        call: &Call,
        division: Division,
    ) -> Result<CallId, RunError> {
        // SAFETY: the input stays valid until the call is complete, when the driver returns the region.
        let input = access.with(|engine| unsafe { call.register(engine) })?;
        self.registered.fetch_add(1, Ordering::Relaxed);
        let begun = self.driver.call(access, |driver, requests| {
            driver.begin_call(call, division, Some(input.clone()), requests)
        });
        let begun = self.concluded(access, begun)?;
        let Some(id) = begun else {
            access.with(|engine| engine.release(&input));
            return Err(RunError::Closed);
        };
        self.release_finished(access)?;
        Ok(id)
    }

    /// Network that rank 0 passed, on all ranks: for groups with some ranks.
    pub fn network(&self) -> Option<NetworkSource<'_>> {
        self.network.as_ref().map(|(name, text)| NetworkSource { name, text })
    }

    /// Algorithm by which a call would run.
    ///
    /// # Errors
    /// Errors from [`Collectives::start`].
    pub fn selected(
        &self,
        access: &mut impl EngineAccess,
        call: &Call,
    ) -> Result<(Algorithm, Options), RunError> {
        let divided = self.driver.call(access, |driver, _| driver.divide(call))?;
        Ok(divided.ok_or(RunError::Closed)?.algorithm)
    }

    /// True if a call is complete. Advances all calls if it is not.
    ///
    /// # Errors
    /// Errors from [`Collectives::progress`].
    pub fn is_done(&self, access: &mut impl EngineAccess, id: CallId) -> Result<bool, RunError> {
        let is_done = |access: &mut _| {
            let done = self.driver.call(access, |driver, _| Ok(driver.is_done(id)))?;
            done.ok_or(RunError::Closed)
        };
        if is_done(access)? {
            self.release_finished(access)?;
            return Ok(true);
        }
        self.progress(access)?;
        is_done(access)
    }

    /// Advances all calls as far as arrivals allow.
    ///
    /// # Errors
    /// [`RunError::Closed`]; fabric errors, such as a lost peer, after which all calls in the group fail.
    pub fn progress(&self, access: &mut impl EngineAccess) -> Result<(), RunError> {
        let driven = self.driver.drive(access);
        self.concluded(access, driven)?.ok_or(RunError::Closed)?;
        // Another poll may have taken the poison event.
        access.with(|engine| engine.check())?;
        self.release_finished(access)
    }

    /// Advances all calls until this one is complete.
    ///
    /// # Errors
    /// [`RunError::Timeout`] with the peers that block it, after which the wait may be repeated; fabric errors, such as
    /// a lost peer, after which all calls in the group fail.
    pub fn wait(
        &self,
        access: &mut impl EngineAccess,
        id: CallId,
        options: &mut WaitOptions<'_>,
    ) -> Result<(), RunError> {
        let mut announced = None;
        if let Some(waits) = &self.waits {
            match self.spin_short(access, id, options)? {
                ShortState::Done => return self.release_finished(access),
                ShortState::None => {}
                ShortState::Alone | ShortState::Mixed => announced = Some(waits.announce()),
            }
        }
        let spin = match self.last_bytes.load(Ordering::Relaxed) {
            // On shared cores a longer spin delays the peers that copy.
            bytes if bytes >= SPIN_BYTES && !options.spin.is_zero() && !self.shares_cores => {
                options.spin.max(Duration::from_nanos(bytes).min(MAX_SPIN))
            }
            _ => options.spin,
        };
        let mut options =
            WaitOptions { deadline: options.deadline, spin, interrupted: options.interrupted };
        let result = self.driver.wait(
            access,
            "a collective",
            &mut options,
            |driver| driver.is_done(id).then_some(()),
            |driver| driver.missing(id),
        );
        drop(announced);
        let result = match result {
            Err(RunError::Fabric(weft_fabric::Error::Timeout { waited, missing, .. })) => {
                let what = format!("collective {}", id.0);
                Err(RunError::Timeout { what, waited, missing })
            }
            other => other,
        };
        self.concluded(access, result)?.ok_or(RunError::Closed)?;
        self.release_finished(access)
    }

    /// Looks for messages for at most the spin deadline, without polling the engine, while only short calls are in
    /// flight.
    fn spin_short(
        &self,
        access: &mut impl EngineAccess,
        id: CallId,
        options: &WaitOptions<'_>,
    ) -> Result<ShortState, RunError> {
        let spins = !options.spin.is_zero();
        let checks = if spins && !self.shares_cores { SPIN_CHECKS } else { 1 };
        let mut until = None;
        loop {
            let state = self.driver.peek(access, |driver| driver.spin_short(id, checks));
            let state = state.ok_or(RunError::Closed)?;
            if state != ShortState::Alone || !spins {
                return Ok(state);
            }
            let now = clock::now();
            if now >= *until.get_or_insert(options.deadline.min(now.after(options.spin))) {
                return Ok(state);
            }
            if self.shares_cores {
                std::thread::yield_now();
            }
        }
    }

    /// Releases the memory; every rank calls this. Calls under way complete first; waits in other threads end with
    /// [`RunError::Closed`]. A second call returns at once.
    ///
    /// # Errors
    /// [`weft_fabric::Error::Timeout`] if the other ranks do not start the same calls, or do not call this: the
    /// memory then stays until the communicator is dropped. In a poisoned group this releases the memory without
    /// a wait.
    pub fn close(
        &self,
        communicator: &Communicator,
        options: &mut WaitOptions<'_>,
    ) -> Result<(), RunError> {
        if !self.driver.end(&mut communicator.access()) {
            return Ok(());
        }
        let announced = self.waits.as_ref().map(MailboxWaits::announce);
        let completed = self.driver.wait_ended(
            &mut communicator.access(),
            "closing",
            options,
            |driver| driver.is_idle().then_some(()),
            |driver| driver.missing(CallId(u64::MAX)),
        );
        drop(announced);
        let settled = completed
            .and_then(|_| communicator.settle(&self.counters, options).map_err(RunError::from));
        let poisoned = communicator.engine().check().is_err();
        if settled.is_ok() || poisoned {
            let inputs = self.driver.take().into_iter().flat_map(Executor::into_inputs);
            let mut engine = communicator.engine();
            inputs.for_each(|input| engine.release(&input));
            if poisoned {
                engine.progress();
            }
            for &counter in &self.counters {
                // A counter is released once.
                let _ = engine.release_counter(counter);
            }
            self.regions.iter().for_each(|region| engine.release(region));
            return Ok(());
        }
        settled
    }

    /// Driver step outcome. A failure for which a peer is at fault poisons the group, and the returned error is the
    /// poison's.
    fn concluded<T>(
        &self,
        access: &mut impl EngineAccess,
        result: Result<T, RunError>,
    ) -> Result<T, RunError> {
        if let Err(error) = &result
            && let Some(cause) = error.poison()
        {
            access.with(|engine| {
                engine.poison(cause);
                engine.check()
            })?;
        }
        result
    }

    /// Releases the inputs to complete calls.
    fn release_finished(&self, access: &mut impl EngineAccess) -> Result<(), RunError> {
        if self.registered.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        while let Some(Some(region)) =
            self.driver.call(access, |driver, _| Ok(driver.take_finished()))?
        {
            access.with(|engine| engine.release(&region));
            self.registered.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }
}
