//! Wait loop: polls, spins and parks until a step returns a value.

use super::access::EngineAccess;
use super::options::WaitOptions;
use crate::clock;
use crate::driver::Event;
use crate::engine::{Engine, MAX_PARK};
use crate::error::{Error, MissingPeer, Result};
use crate::poison::departure;
use crate::types::Time;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_control::Rank;

/// Checks of the awaited lanes between two polls in a spinning wait: some microseconds. A poll costs more
/// than a peer's store latency.
const SPIN_CHECKS: u32 = 100;

/// Polls in a spinning wait between two reads of the clock and the other end conditions: at first and at
/// least, and at most. They double while they take less than `CLOCK_INTERVAL`.
const POLLS: u32 = 16;

const MOST_POLLS: u32 = 256;

/// Time between two clock reads, each some tens of nanoseconds, or a system call where the kernel has no
/// vDSO for it.
const CLOCK_INTERVAL: Duration = Duration::from_micros(10);

/// Pause instructions between two checks: each load takes the cache line away from the peer that stores to
/// it.
const PAUSES: u32 = 2;

/// Least time between two interruption checks.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);

/// Outcome of one wait iteration.
enum StepOutcome<T, E> {
    Ended(Result<T, E>),
    /// At least one event.
    Busy,
    Idle,
}

/// Polls until `step` returns a value. `step` receives each poll's events, or none for a repeated check;
/// `missing` returns the peers that the wait lacks, after the deadline or when a peer has left.
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
        // Without a driver, `step` only reads lanes; if only peers' stores can end the wait, a few checks
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
            if let Some(departed) = departed {
                let cause = access.with(|engine| {
                    let cause = departure(&mut left_since, now, what, engine.rank(), departed);
                    cause.map(|cause| engine.poison(cause))
                });
                if cause.is_some() {
                    continue;
                }
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

/// Spins between two clock reads.
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
