//! Blocking calls: loops around [`Engine::poll`].
//!
//! A wait spins up to its spin deadline, then parks: on the doorbell word if peers' stores alone can wake
//! it, on descriptors if a link needs polls. Every wait has a deadline. The loops run over an engine with
//! one owner and over one that threads share (`shared_engine.rs`).

use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::{Engine, MAX_PARK};
use crate::error::{Error, MissingPeer, Result};
use crate::types::{CounterId, RequestId, Time};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// Options of a wait.
pub struct WaitOptions<'a> {
    /// Deadline of the wait.
    pub deadline: Time,
    /// Time to spin before parking (spin deadline).
    pub spin: Duration,
    /// Interruption check, called a few times a second without a lock; `true` ends the wait with
    /// [`Error::Interrupted`].
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

/// Checks of the awaited lanes between two polls of a spinning wait: some microseconds. A poll costs more
/// than the latency of a peer's store.
const SPIN_CHECKS: u32 = 100;
/// Polls of a spinning wait between two reads of the clock and of the other end conditions.
const POLLS: u32 = 16;
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
    let found = access.with(|engine| {
        engine.flush();
        // Without a driver, `step` only reads lanes; if peers' stores alone can end the wait, a few checks
        // precede the first poll.
        let checks = if spins && engine.is_raised_by_stores() { SPIN_CHECKS } else { 0 };
        check_step(engine, checks, None, &mut step)
    });
    if let Some(value) = found? {
        return Ok(value);
    }
    let begin = clock::now();
    // The first iteration reuses the time read above.
    let mut first = Some(begin);
    let mut idle_since = begin;
    let mut interrupt_checked = Time(0);
    let mut left_since = None;
    loop {
        let ticket = access.ticket();
        let now = first.take().unwrap_or_else(clock::now);
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
        match outcome {
            StepOutcome::Ended(result) => return result,
            StepOutcome::Busy => {
                idle_since = now;
                continue;
            }
            StepOutcome::Idle => {}
        }
        if now.since(idle_since) < options.spin {
            match spin(access, spins, now, &mut step) {
                StepOutcome::Ended(result) => return result,
                StepOutcome::Busy => idle_since = now,
                StepOutcome::Idle => {}
            }
            continue;
        }
        // The check may take long, so frequent wake-ups skip it.
        if now.since(interrupt_checked) >= INTERRUPT_INTERVAL {
            interrupt_checked = now;
            access.yield_lead();
            if (options.interrupted)() {
                return Err(Error::Interrupted.into());
            }
        }
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
        access.park(ticket, options.deadline.min(now.after(MAX_PARK)));
    }
}

/// Spins between two reads of the clock.
fn spin<T, E>(
    access: &mut impl EngineAccess,
    spins: bool,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> StepOutcome<T, E> {
    access.spin(|engine, callers| {
        if spins && !engine.is_raised_by_stores() {
            return poll_again(engine, callers, now, step);
        }
        let checks = if spins { SPIN_CHECKS } else { 0 };
        match check_step(engine, checks, callers, step).transpose() {
            Some(result) => StepOutcome::Ended(result),
            None => StepOutcome::Idle,
        }
    })
}

/// Polls up to `POLLS` times for a wait without a driver, until `step` returns a value; yields to
/// `callers`.
fn poll_again<T, E>(
    engine: &mut Engine,
    callers: Option<&AtomicU32>,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> StepOutcome<T, E> {
    let mut outcome = StepOutcome::Idle;
    for _ in 0..POLLS {
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

/// [`Engine::wait_in`] over any access; without a round, [`Engine::wait`].
#[inline]
pub(crate) fn wait(
    access: &mut impl EngineAccess,
    counter: CounterId,
    round: Option<u64>,
    expected: &[(Rank, u64)],
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    let count = |engine: &mut Engine, rank| match round {
        Some(round) => engine.count_in(counter, rank, round),
        None => engine.count(counter, rank),
    };
    run(
        access,
        "a wait on a counter",
        0,
        options,
        |engine, _| {
            for &(rank, expected) in expected {
                if count(engine, rank)? < expected {
                    return Ok(None);
                }
            }
            for &(rank, _) in expected {
                let is_oldest = match round {
                    Some(round) => engine.open_round(counter, rank)? == round,
                    None => true,
                };
                if is_oldest {
                    engine.unlist(counter, rank);
                }
            }
            Ok(Some(()))
        },
        |engine| {
            let short = |&(rank, expected): &(Rank, u64)| {
                let seen = count(engine, rank).unwrap_or_default();
                (seen < expected).then_some(MissingPeer { rank, expected, seen })
            };
            expected.iter().filter_map(short).collect()
        },
    )
}

/// Waits until peers have raised counters to these totals since they were linked.
pub(crate) fn wait_for_totals(
    access: &mut impl EngineAccess,
    expected: &[(CounterId, Rank, u64)],
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    let lacking = |engine: &mut Engine| -> Result<Vec<MissingPeer>> {
        let mut missing = Vec::new();
        for &(counter, rank, expected) in expected {
            let seen = engine.count_in_all(counter, rank)?;
            if seen < expected {
                missing.push(MissingPeer { rank, expected, seen });
            }
        }
        Ok(missing)
    };
    run(
        access,
        "a wait for all writes",
        0,
        options,
        |engine, _| Ok(lacking(engine)?.is_empty().then_some(())),
        |engine| lacking(engine).unwrap_or_default(),
    )
}

/// [`Engine::wait_for_credit`] over any access.
pub(crate) fn wait_for_credit(
    access: &mut impl EngineAccess,
    counter: CounterId,
    peer: Rank,
    round: u64,
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    run(
        access,
        "a wait for credit",
        0,
        options,
        |engine, _| Ok(engine.has_credit(counter, peer, round)?.then_some(())),
        |engine| {
            let seen = engine.credits(counter, peer).unwrap_or_default();
            let expected = engine.credits_for(counter, peer, round).unwrap_or(round);
            vec![MissingPeer { rank: peer, expected, seen }]
        },
    )
}

/// [`Engine::wait_for_request`] over any access.
pub(crate) fn wait_for_request(
    access: &mut impl EngineAccess,
    request: RequestId,
    options: &mut WaitOptions<'_>,
) -> Result<()> {
    run(
        access,
        "a request",
        0,
        options,
        |engine, _| {
            if !engine.is_drained(request) {
                return Ok(None);
            }
            if engine.has_failed(request) {
                engine.check()?;
            }
            Ok(Some(()))
        },
        |engine| engine.missing_of(request),
    )
}

/// [`Engine::drain_queues`] over any access.
fn drain_queues(access: &mut impl EngineAccess, options: &mut WaitOptions<'_>) -> Result<()> {
    run(
        access,
        "draining queues",
        0,
        options,
        |engine, _| Ok((!engine.has_queued()).then_some(())),
        |engine| engine.missing_of_queues(),
    )
}

/// Progress of a barrier.
#[derive(Debug, Default)]
pub(crate) struct BarrierState {
    /// Number of peers signalled, in rank order.
    signalled: usize,
    /// Signals that have not left this process.
    signals_in_flight: Vec<RequestId>,
    /// A thread is inside the barrier.
    is_entered: bool,
}

/// Guard of a thread inside a barrier; its drop, also by a panic, admits another thread.
struct BarrierGuard<'a, H: EngineAccess>(&'a mut H);

impl<H: EngineAccess> Drop for BarrierGuard<'_, H> {
    fn drop(&mut self) {
        self.0.with(|engine| engine.barrier_state().is_entered = false);
    }
}

/// [`Engine::barrier`] over any access. Barriers of two threads at once have no order that is the same at
/// all ranks, so the second is refused.
pub(crate) fn barrier(access: &mut impl EngineAccess, options: &mut WaitOptions<'_>) -> Result<()> {
    let entered =
        |engine: &mut Engine| std::mem::replace(&mut engine.barrier_state().is_entered, true);
    if access.with(entered) {
        return Err(Error::InProgress { call: "barrier" });
    }
    let guard = BarrierGuard(access);
    pass_barrier(&mut *guard.0, options)
}

fn pass_barrier(access: &mut impl EngineAccess, options: &mut WaitOptions<'_>) -> Result<()> {
    let (peers, counter) = access.with(|engine| {
        let peers: Vec<Rank> = engine.peers().collect();
        engine.barrier_counter().map(|counter| (peers, counter))
    })?;
    loop {
        let next = access.with(|engine| -> Result<Option<(Rank, u64)>> {
            let signalled = engine.barrier_state().signalled;
            let Some(&peer) = peers.get(signalled) else { return Ok(None) };
            Ok(Some((peer, engine.next_round(counter, peer)?)))
        })?;
        let Some((peer, round)) = next else { break };
        wait_for_credit(access, counter, peer, round, options)?;
        access.with(|engine| {
            let signal = engine.signal(peer, counter, round)?;
            let state = engine.barrier_state();
            state.signalled += 1;
            if signal != RequestId::DONE {
                state.signals_in_flight.push(signal);
            }
            Ok::<(), Error>(())
        })?;
    }
    let expected: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
    wait(access, counter, None, &expected, options)?;
    // Signals leave this process before the program computes on.
    while let Some(signal) =
        access.with(|engine| engine.barrier_state().signals_in_flight.last().copied())
    {
        wait_for_request(access, signal, options)?;
        access.with(|engine| engine.barrier_state().signals_in_flight.pop());
    }
    access.with(|engine| {
        engine.barrier_state().signalled = 0;
        for peer in peers {
            engine.credit(peer, counter)?;
        }
        engine.flush();
        Ok(())
    })
}

impl Engine {
    /// Polls a driver once, with all events since its last poll.
    pub fn drive<D>(&mut self, driver: &mut D, requests: &mut Requests) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let mut events = std::mem::take(self.event_buffer());
        events.clear();
        self.poll_for(driver.namespace(), clock::now(), &mut events);
        let result = self.drive_with(driver, requests, &events);
        *self.event_buffer() = events;
        result
    }

    /// Polls a driver with these events and with those that other polls consumed.
    pub(crate) fn drive_with<D>(
        &mut self,
        driver: &mut D,
        requests: &mut Requests,
        events: &[Event],
    ) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let mut all = std::mem::take(&mut self.catch_up_events);
        all.clear();
        all.extend_from_slice(events);
        self.catch_up(driver.namespace(), driver.counters(), &mut all);
        let result = driver.poll(clock::now(), &all, requests);
        self.catch_up_events = all;
        result?;
        self.submit_all(driver, requests)
    }

    /// Submits the requests of a driver's poll, and those of further polls while it has more.
    pub(crate) fn submit_all<D>(
        &mut self,
        driver: &mut D,
        requests: &mut Requests,
    ) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        self.submit(requests)?;
        while driver.has_more() {
            driver.poll(clock::now(), &[], requests)?;
            self.submit(requests)?;
        }
        Ok(())
    }

    /// Waits until each listed peer has raised `counter` by its expected count in its oldest round without
    /// a credit.
    ///
    /// # Errors
    /// [`Error::Timeout`], which names the missing peers; the wait may be repeated;
    /// [`Error::Poisoned`]; [`Error::Interrupted`].
    pub fn wait(
        &mut self,
        counter: CounterId,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait(self, counter, None, expected, options)
    }

    /// [`Engine::wait`] for an open round: the oldest without a credit or a later one of the window, the
    /// same toward every peer.
    ///
    /// # Errors
    /// As [`Engine::wait`]; [`Error::OldRound`] if a peer's round was credited, [`Error::NoCredit`] if it
    /// is beyond the window.
    pub fn wait_in(
        &mut self,
        counter: CounterId,
        round: u64,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait(self, counter, Some(round), expected, options)
    }

    /// Waits for the credit of `peer` that `round` needs.
    pub fn wait_for_credit(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait_for_credit(self, counter, peer, round, options)
    }

    /// Waits until the request's sources may be reused and its bytes have left this process.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the group was poisoned first: the outcome of the write is unknown. A
    /// request that ended before the poison returns without an error. [`Error::Timeout`],
    /// [`Error::Interrupted`].
    pub fn wait_for_request(
        &mut self,
        request: RequestId,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait_for_request(self, request, options)
    }

    /// Waits until links have accepted all queued parts. Accepted parts arrive even if the engine is
    /// dropped afterwards; queued parts are lost with it.
    ///
    /// # Errors
    /// As [`Engine::wait`].
    pub fn drain_queues(&mut self, options: &mut WaitOptions<'_>) -> Result<()> {
        drain_queues(self, options)
    }

    /// Returns after every rank has entered. It orders control flow, not data. After a timeout, a repeated
    /// call continues the same barrier.
    pub fn barrier(&mut self, options: &mut WaitOptions<'_>) -> Result<()> {
        barrier(self, options)
    }
}
