//! A driver that threads share.
//!
//! A call that works on the driver (one that plans a round, or sums what came) holds the driver's lock, and
//! takes the engine's inside of it. A step of a wait holds the engine's lock and only tries the driver's:
//! where a call holds that, the step does nothing, what it saw stays with the engine, and the call makes
//! the waits look again once it has given the driver back. So no call waits for another thread's wait, and
//! no thread waits for the driver while it holds the engine.

use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::Engine;
use crate::error::{Error, Missing};
use crate::wait::{self, Host, Waiter};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A driver, its lock, and its waits. Calls on one that was ended return `None`.
///
/// A host that is passed to a call must not be an engine that the caller has locked beside other threads:
/// pass [`crate::Communicator::host`].
pub struct SharedDriver<D> {
    namespace: u16,
    state: Mutex<Option<State<D>>>,
    /// Waits under way. A wait is counted before it first takes the driver's lock, so the thread that takes the
    /// lock after it sees the count.
    waits: AtomicU32,
    ended: AtomicBool,
}

struct State<D> {
    driver: D,
    requests: Requests,
    /// [`Engine::polls`] when the driver was polled last.
    polls: u64,
}

impl<D: Driver> SharedDriver<D>
where
    D::Error: From<Error>,
{
    /// Shares a driver; `requests` has room for all that one poll asks for.
    pub fn new(driver: D, requests: Requests) -> SharedDriver<D> {
        SharedDriver {
            namespace: driver.namespace(),
            state: Mutex::new(Some(State { driver, requests, polls: 0 })),
            waits: AtomicU32::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Runs `work` on the driver, and submits what it asks for.
    ///
    /// # Errors
    /// Those of `work`, and those of [`Engine::submit`].
    pub fn call<T>(
        &self,
        host: &mut impl Host,
        work: impl FnOnce(&mut D, &mut Requests) -> Result<T, D::Error>,
    ) -> Result<Option<T>, D::Error> {
        let mut guard = self.lock();
        let Some(State { driver, requests, .. }) = self.open(&mut guard) else { return Ok(None) };
        let mut result = work(driver, requests);
        if result.is_ok() && !requests.is_empty() {
            let submitted = host.with(|engine| engine.submit(requests));
            result = result.and_then(|value| submitted.map(|()| value).map_err(D::Error::from));
        }
        drop(guard);
        self.renew_waits(host, 0);
        result.map(Some)
    }

    /// One look at what has arrived, and what follows from it.
    ///
    /// # Errors
    /// The driver's own, and those of [`Engine::submit`].
    pub fn turn(&self, host: &mut impl Host) -> Result<Option<()>, D::Error> {
        let turned = self.turn_state(host, self.open(&mut self.lock()));
        self.renew_waits(host, 0);
        turned
    }

    fn turn_state(
        &self,
        host: &mut impl Host,
        state: Option<&mut State<D>>,
    ) -> Result<Option<()>, D::Error> {
        let Some(State { driver, requests, polls }) = state else { return Ok(None) };
        host.with(|engine| {
            let result = engine.turn(driver, requests);
            *polls = engine.polls();
            result.map(Some)
        })
    }

    /// Polls the driver until `done` returns a value. `missing` names the peers that the wait lacks.
    ///
    /// # Errors
    /// The driver's own; [`Error::Timeout`] with what `missing` names; [`Error::Poisoned`];
    /// [`Error::Interrupted`].
    pub fn wait<T>(
        &self,
        host: &mut impl Host,
        what: &'static str,
        waiter: &mut Waiter<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<Missing>,
    ) -> Result<Option<T>, D::Error> {
        self.wait_while(host, what, waiter, done, missing, || !self.is_ended())
    }

    /// As [`SharedDriver::wait`], for the thread that has ended the driver and releases it in good order.
    ///
    /// # Errors
    /// As [`SharedDriver::wait`].
    pub fn wait_ended<T>(
        &self,
        host: &mut impl Host,
        what: &'static str,
        waiter: &mut Waiter<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<Missing>,
    ) -> Result<Option<T>, D::Error> {
        self.wait_while(host, what, waiter, done, missing, || true)
    }

    fn wait_while<T>(
        &self,
        host: &mut impl Host,
        what: &'static str,
        waiter: &mut Waiter<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<Missing>,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<T>, D::Error> {
        let _wait = Wait::new(&self.waits);
        let turned = self.turn_state(host, self.lock().as_mut().filter(|_| goes_on()));
        self.renew_waits(host, 1);
        if turned?.is_none() {
            return Ok(None);
        }
        wait::run(
            host,
            what,
            self.namespace,
            waiter,
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

    /// Polls the driver with the events of the engine's latest poll.
    fn step(state: &mut State<D>, engine: &mut Engine, events: &[Event]) -> Result<(), D::Error> {
        let State { driver, requests, polls } = state;
        let before = std::mem::replace(polls, engine.polls());
        if *polls != before + 1 {
            // Other polls took events of this driver.
            return engine.turn_with(driver, requests, events);
        }
        driver.poll(clock::now(), events, requests)?;
        Ok(engine.submit(requests)?)
    }

    /// Ends all calls and waits, now and later, but for [`SharedDriver::wait_ended`] and
    /// [`SharedDriver::take`]. Returns whether it had not been ended before.
    pub fn end(&self, host: &mut impl Host) -> bool {
        let first = !self.ended.swap(true, Ordering::AcqRel);
        host.with(Engine::renew_waits);
        first
    }

    /// Whether it was ended.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The driver, once no call works on it. Do not hold the engine meanwhile.
    pub fn take(&self) -> Option<D> {
        self.lock().take().map(|state| state.driver)
    }

    /// Makes the waits look at the driver, which the caller has given back, if there are more than `own`.
    /// A wait whose step did not get the driver either took its step before this, and is woken, or takes
    /// the next one after it.
    fn renew_waits(&self, host: &mut impl Host, own: u32) {
        if self.waits.load(Ordering::Relaxed) > own {
            host.with(Engine::renew_waits);
        }
    }

    fn open<'a>(
        &self,
        guard: &'a mut MutexGuard<'_, Option<State<D>>>,
    ) -> Option<&'a mut State<D>> {
        guard.as_mut().filter(|_| !self.is_ended())
    }

    fn lock(&self) -> MutexGuard<'_, Option<State<D>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Option<State<D>>>> {
        match self.state.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A wait under way.
struct Wait<'a>(&'a AtomicU32);

impl Wait<'_> {
    fn new(waits: &AtomicU32) -> Wait<'_> {
        waits.fetch_add(1, Ordering::Relaxed);
        Wait(waits)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
