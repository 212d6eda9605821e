//! Driver shared by threads.
//!
//! A call on the driver (such as planning a round or reducing replies) holds the driver's lock and takes
//! the engine's lock inside it. A wait step holds the engine's lock and only tries the driver's: if a
//! call holds it, the step leaves the events with the engine, and the call wakes the waits once it has
//! released the driver. So no call blocks on another thread's wait, and no thread blocks on the driver
//! while it holds the engine.

use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::Engine;
use crate::error::{Error, MissingPeer};
use crate::wait::{self, EngineAccess, WaitOptions};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Driver, lock and waits. Calls on an ended driver return `None`.
///
/// The access passed to a call must not be a shared engine's guard; pass [`crate::Communicator::access`].
pub struct SharedDriver<D> {
    namespace: u16,
    state: Mutex<Option<DriverState<D>>>,
    /// Waits in progress. A wait is counted before it first takes the driver's lock, so the next lock
    /// holder sees the count.
    waits: AtomicU32,
    ended: AtomicBool,
}

struct DriverState<D> {
    driver: D,
    requests: Requests,
    /// [`Engine::polls`] when the driver was last polled.
    polls: u64,
}

impl<D: Driver> SharedDriver<D>
where
    D::Error: From<Error>,
{
    /// Shares a driver; `requests` has capacity for the largest poll.
    pub fn new(driver: D, requests: Requests) -> SharedDriver<D> {
        SharedDriver {
            namespace: driver.namespace(),
            state: Mutex::new(Some(DriverState { driver, requests, polls: 0 })),
            waits: AtomicU32::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Runs `work` on the driver, and submits the requests from it.
    ///
    /// # Errors
    /// Errors from `work` and from [`Engine::submit`].
    pub fn call<T>(
        &self,
        access: &mut impl EngineAccess,
        work: impl FnOnce(&mut D, &mut Requests) -> Result<T, D::Error>,
    ) -> Result<Option<T>, D::Error> {
        let mut guard = self.lock();
        let Some(DriverState { driver, requests, .. }) = self.open(&mut guard) else {
            return Ok(None);
        };
        let mut result = work(driver, requests);
        if result.is_ok() && !requests.is_empty() {
            let submitted = access.with(|engine| engine.submit_all(driver, requests));
            result = result.and_then(|value| submitted.map(|()| value));
        }
        drop(guard);
        self.renew_waits(access, 0);
        result.map(Some)
    }

    /// Runs `work` on the driver, which makes no requests.
    pub fn peek<T>(
        &self,
        access: &mut impl EngineAccess,
        work: impl FnOnce(&mut D) -> T,
    ) -> Option<T> {
        let result = self.open(&mut self.lock()).map(|state| work(&mut state.driver));
        self.renew_waits(access, 0);
        result
    }

    /// Polls the driver once.
    ///
    /// # Errors
    /// The driver's errors, and errors from [`Engine::submit`].
    pub fn drive(&self, access: &mut impl EngineAccess) -> Result<Option<()>, D::Error> {
        let turned = self.drive_state(access, self.open(&mut self.lock()));
        self.renew_waits(access, 0);
        turned
    }

    fn drive_state(
        &self,
        access: &mut impl EngineAccess,
        state: Option<&mut DriverState<D>>,
    ) -> Result<Option<()>, D::Error> {
        let Some(DriverState { driver, requests, polls }) = state else { return Ok(None) };
        access.with(|engine| {
            let result = engine.drive(driver, requests);
            *polls = engine.polls();
            result.map(Some)
        })
    }

    /// Polls the driver until `done` returns a value. `missing` returns the peers that the wait lacks.
    ///
    /// # Errors
    /// The driver's errors; [`Error::Timeout`] with the peers that `missing` returns;
    /// [`Error::Poisoned`]; [`Error::Interrupted`].
    pub fn wait<T>(
        &self,
        access: &mut impl EngineAccess,
        what: &'static str,
        options: &mut WaitOptions<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<MissingPeer>,
    ) -> Result<Option<T>, D::Error> {
        self.wait_while(access, what, options, done, missing, || !self.is_ended())
    }

    /// Same as [`SharedDriver::wait`], for the thread that has ended the driver and drains it.
    ///
    /// # Errors
    /// Same as [`SharedDriver::wait`].
    pub fn wait_ended<T>(
        &self,
        access: &mut impl EngineAccess,
        what: &'static str,
        options: &mut WaitOptions<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<MissingPeer>,
    ) -> Result<Option<T>, D::Error> {
        self.wait_while(access, what, options, done, missing, || true)
    }

    fn wait_while<T>(
        &self,
        access: &mut impl EngineAccess,
        what: &'static str,
        options: &mut WaitOptions<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<MissingPeer>,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<T>, D::Error> {
        let _wait = WaitCount::new(&self.waits);
        let turned = self.drive_state(access, self.lock().as_mut().filter(|_| goes_on()));
        self.renew_waits(access, 1);
        if turned?.is_none() {
            return Ok(None);
        }
        wait::run(
            access,
            what,
            self.namespace,
            options,
            |engine, events| {
                if !goes_on() {
                    return Ok(Some(None));
                }
                let Some(mut guard) = self.try_lock() else {
                    engine.keep_completions(events);
                    return Ok(None);
                };
                let Some(state) = guard.as_mut() else { return Ok(Some(None)) };
                Self::step(state, engine, events)?;
                Ok(done(&state.driver).map(Some))
            },
            |_| {
                let guard = self.try_lock();
                let state = guard.as_ref().and_then(|guard| guard.as_ref());
                state.map(|state| missing(&state.driver)).unwrap_or_default()
            },
        )
    }

    /// Polls the driver with the events from the engine's latest poll.
    fn step(
        state: &mut DriverState<D>,
        engine: &mut Engine,
        events: &[Event],
    ) -> Result<(), D::Error> {
        let DriverState { driver, requests, polls } = state;
        let before = std::mem::replace(polls, engine.polls());
        if *polls != before + 1 {
            // Other polls consumed events for this driver.
            return engine.drive_with(driver, requests, events);
        }
        driver.poll(clock::now(), events, requests)?;
        engine.submit_all(driver, requests)
    }

    /// Ends all present and later calls and waits except [`SharedDriver::wait_ended`] and
    /// [`SharedDriver::take`]. Returns true the first time.
    pub fn end(&self, access: &mut impl EngineAccess) -> bool {
        let first = !self.ended.swap(true, Ordering::AcqRel);
        access.with(Engine::renew_waits);
        first
    }

    /// True after [`SharedDriver::end`].
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Removes the driver, once no call holds it. The caller must not hold the engine.
    pub fn take(&self) -> Option<D> {
        self.lock().take().map(|state| state.driver)
    }

    /// Wakes the waits after the caller has released the driver, if there are more than `own`. A wait
    /// whose step did not get the driver either took that step before this and is woken, or takes the
    /// next step after it.
    fn renew_waits(&self, access: &mut impl EngineAccess, own: u32) {
        if self.waits.load(Ordering::Relaxed) > own {
            access.with(Engine::renew_waits);
        }
    }

    fn open<'a>(
        &self,
        guard: &'a mut MutexGuard<'_, Option<DriverState<D>>>,
    ) -> Option<&'a mut DriverState<D>> {
        guard.as_mut().filter(|_| !self.is_ended())
    }

    fn lock(&self) -> MutexGuard<'_, Option<DriverState<D>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Option<DriverState<D>>>> {
        match self.state.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Counts a wait in progress.
struct WaitCount<'a>(&'a AtomicU32);

impl WaitCount<'_> {
    fn new(waits: &AtomicU32) -> WaitCount<'_> {
        waits.fetch_add(1, Ordering::Relaxed);
        WaitCount(waits)
    }
}

impl Drop for WaitCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
