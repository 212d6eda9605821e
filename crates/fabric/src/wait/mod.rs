//! Blocking calls: loops around [`Engine::poll`].
//!
//! A wait spins up to its spin deadline, and yields its core meanwhile if ranks share cores; then it parks: on the
//! doorbell word if peers' stores alone can wake it, on descriptors if a link needs polls. Every wait has a deadline.
//! The loops run over an engine with one owner and over one that threads share (`shared_engine.rs`).

mod barrier;
mod conditions;
mod engine;

pub(crate) use barrier::{BarrierState, barrier};
pub(crate) use conditions::{wait, wait_for_credit, wait_for_request, wait_for_totals};

use crate::clock;
use crate::driver::Event;
use crate::engine::{Engine, MAX_PARK};
use crate::error::{Error, MissingPeer, Result};
use crate::types::Time;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// Options of a wait.
pub struct WaitOptions<'a> {
    /// Deadline of the wait.
    pub deadline: Time,
    /// Time to spin before parking (spin deadline).
    pub spin: Duration,
    /// Interruption check, called at most 50 times a second without a lock, also while the wait spins or
    /// has events; `true` ends the wait with [`Error::Interrupted`].
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

/// Checks of the awaited lanes between two polls of a spinning wait: some microseconds. A poll costs more
/// than the latency of a peer's store.
const SPIN_CHECKS: u32 = 100;
/// Polls of a spinning wait between two reads of the clock and of the other end conditions: at first and at
/// least, and at most. They double while they take less than `CLOCK_INTERVAL`.
const POLLS: u32 = 16;
const MOST_POLLS: u32 = 256;
/// Time between two reads of the clock, which takes some tens of nanoseconds, or a system call where the kernel
/// has no vDSO for it.
const CLOCK_INTERVAL: Duration = Duration::from_micros(10);
/// Pause instructions between two checks: each load takes the cache line away from the peer that stores to
/// it.
const PAUSES: u32 = 2;
/// Least time between two interruption checks.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);
/// Time that a wait continues for a peer that has left, whose last writes may be in flight.
const DEPARTURE_GRACE: Duration = Duration::from_secs(1);

/// Access of a waiting thread to its engine: an [`Engine`] of its own, or one that threads share
/// ([`crate::Communicator::access`]).
pub trait EngineAccess {
    /// Runs `work` on the engine. Other threads may use the engine between two calls.
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R;

    /// As [`EngineAccess::with`], with the number of callers that wait for the engine: a spinning thread
    /// yields to them.
    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R;

    /// Count of events so far, for [`EngineAccess::park`].
    fn ticket(&self) -> u32;

    /// Sleeps until an event after `ticket`, at most until `until`.
    fn park(&mut self, ticket: u32, until: Time);

    /// Passes the lead to another waiting thread, before the caller does something other than a poll.
    fn yield_lead(&self);

    /// The error of every wait on a closed engine.
    fn closed(&self) -> Result<()>;
}

impl EngineAccess for Engine {
    #[inline(always)]
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(self)
    }

    #[inline(always)]
    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R {
        work(self, None)
    }

    fn ticket(&self) -> u32 {
        0
    }

    fn park(&mut self, _ticket: u32, until: Time) {
        if let Some(park) = self.prepare_park() {
            park.sleep(until);
            self.finish_park(&park);
        }
    }

    fn yield_lead(&self) {}

    fn closed(&self) -> Result<()> {
        Ok(())
    }
}

/// Outcome of one iteration of a wait.
enum StepOutcome<T, E> {
    Ended(Result<T, E>),
    /// At least one event.
    Busy,
    Idle,
}

/// Polls until `step` returns a value. `step` receives each poll's events, or none for a repeated check;
/// `missing` returns the peers that the wait lacks, after its deadline or when a peer has left.
pub(crate) fn run<T, E: From<Error>>(
    access: &mut impl EngineAccess,
    what: &'static str,
    namespace: u16,
    options: &mut WaitOptions<'_>,
    step: impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
    missing: impl FnMut(&mut Engine) -> Vec<MissingPeer>,
) -> Result<T, E> {
    let result = poll_until(access, what, namespace, options, step, missing);
    access.yield_lead();
    result
}

fn poll_until<T, E: From<Error>>(
    access: &mut impl EngineAccess,
    what: &'static str,
    namespace: u16,
    options: &mut WaitOptions<'_>,
    mut step: impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
    mut missing: impl FnMut(&mut Engine) -> Vec<MissingPeer>,
) -> Result<T, E> {
    let spins = namespace == 0 && !options.spin.is_zero();
    let (found, yields) = access.with(|engine| {
        engine.flush();
        let yields = engine.shares_cores();
        // Without a driver, `step` only reads lanes; if peers' stores alone can end the wait, a few checks
        // precede the first poll.
        let spins = spins && !yields && engine.is_raised_by_stores();
        let checks = if spins { SPIN_CHECKS } else { 0 };
        (check_step(engine, checks, None, &mut step), yields)
    });
    if let Some(value) = found? {
        return Ok(value);
    }
    let begin = clock::now();
    // The first iteration reuses the time read above.
    let mut first = Some(begin);
    let mut idle_since = begin;
    let mut checked = None;
    let mut left_since = None;
    let (mut polls, mut last) = (POLLS, begin);
    loop {
        let ticket = access.ticket();
        let now = first.take().unwrap_or_else(clock::now);
        polls = if now.since(last) < CLOCK_INTERVAL { 2 * polls } else { polls / 2 };
        polls = polls.clamp(POLLS, MOST_POLLS);
        last = now;
        access.closed()?;
        let outcome = access.with(|engine| {
            let mut events = std::mem::take(engine.event_buffer());
            events.clear();
            engine.poll_for(namespace, now, &mut events);
            let busy = !events.is_empty();
            let stepped = step(engine, &events);
            *engine.event_buffer() = events;
            match stepped {
                Ok(None) => {}
                Ok(Some(value)) => return StepOutcome::Ended(Ok(value)),
                Err(error) => return StepOutcome::Ended(Err(error)),
            }
            if let Err(error) = engine.check() {
                return StepOutcome::Ended(Err(error.into()));
            }
            if now >= options.deadline {
                let error = Error::timeout(what, begin, now, missing(engine));
                return StepOutcome::Ended(Err(error.into()));
            }
            if busy { StepOutcome::Busy } else { StepOutcome::Idle }
        });
        let is_busy = match outcome {
            StepOutcome::Ended(result) => return result,
            StepOutcome::Busy => true,
            StepOutcome::Idle => false,
        };
        if is_busy {
            idle_since = now;
        }
        let spins_on = is_busy || now.since(idle_since) < options.spin;
        // A wait that has events or spins is checked from time to time, one that parks before it does. The check for
        // an interrupt may take long, so frequent wake-ups skip it.
        let is_due = now.since(checked.unwrap_or(begin)) >= INTERRUPT_INTERVAL;
        if is_due || (!spins_on && checked.is_none()) {
            checked = Some(now);
            access.yield_lead();
            if (options.interrupted)() {
                return Err(Error::Interrupted.into());
            }
        }
        if is_due || !spins_on {
            let departed = access.with(|engine| missing_departed(engine, &mut missing));
            if let Some(departed) = departed
                && now.since(*left_since.get_or_insert(now)) >= DEPARTURE_GRACE
            {
                let detail = format!("{departed} finished before this rank's {what} was complete");
                access.with(|engine| {
                    engine.poison(Poison { kind: Cause::Left, rank: Some(departed), detail });
                });
                continue;
            }
        }
        if is_busy {
            continue;
        }
        if spins_on && yields {
            // The peers that this wait is for may wait for this core.
            std::thread::yield_now();
            continue;
        }
        if spins_on {
            match spin(access, spins, polls, now, &mut step) {
                StepOutcome::Ended(result) => return result,
                StepOutcome::Busy => idle_since = now,
                StepOutcome::Idle => {}
            }
            continue;
        }
        access.park(ticket, options.deadline.min(now.after(MAX_PARK)));
    }
}

/// Spins between two reads of the clock.
fn spin<T, E>(
    access: &mut impl EngineAccess,
    spins: bool,
    polls: u32,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> StepOutcome<T, E> {
    access.spin(|engine, callers| {
        if spins && !engine.is_raised_by_stores() {
            return poll_again(engine, callers, polls, now, step);
        }
        let checks = if spins { SPIN_CHECKS } else { 0 };
        match check_step(engine, checks, callers, step).transpose() {
            Some(result) => StepOutcome::Ended(result),
            None => StepOutcome::Idle,
        }
    })
}

/// Polls up to `polls` times for a wait without a driver, until `step` returns a value; yields to
/// `callers`.
fn poll_again<T, E>(
    engine: &mut Engine,
    callers: Option<&AtomicU32>,
    polls: u32,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> StepOutcome<T, E> {
    let mut outcome = StepOutcome::Idle;
    for _ in 0..polls {
        if engine.progress_at(now) {
            outcome = StepOutcome::Busy;
            if let Some(result) = step(engine, &[]).transpose() {
                return StepOutcome::Ended(result);
            }
            if callers.is_some() {
                // Releasing the engine wakes other threads that wait for this event.
                break;
            }
        }
        if callers.is_some_and(|callers| callers.load(Ordering::Relaxed) > 0) {
            break;
        }
    }
    outcome
}

/// Calls `step` up to `checks` times without a poll; yields to `callers`.
fn check_step<T, E>(
    engine: &mut Engine,
    checks: u32,
    callers: Option<&AtomicU32>,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    for _ in 0..checks {
        if let Some(value) = step(engine, &[])? {
            return Ok(Some(value));
        }
        if callers.is_some_and(|callers| callers.load(Ordering::Relaxed) > 0) {
            break;
        }
        for _ in 0..PAUSES {
            std::hint::spin_loop();
        }
    }
    Ok(None)
}

fn missing_departed(
    engine: &mut Engine,
    missing: &mut impl FnMut(&mut Engine) -> Vec<MissingPeer>,
) -> Option<Rank> {
    if !engine.poison_flag().any_has_left() {
        return None;
    }
    let missing = missing(engine);
    missing.into_iter().map(|m| m.rank).find(|rank| engine.poison_flag().has_left(*rank))
}
