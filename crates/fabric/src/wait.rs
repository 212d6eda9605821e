//! Blocking calls: thin loops around [`Engine::poll`], at the edge.
//!
//! A waiter spins for a bounded time, then parks: on the bell word if peers' stores alone can wake
//! it, on descriptors if a link needs to be polled. No wait is unbounded. The same loops run over an
//! engine that the caller holds alone, and over one that threads share ([`crate::shared`]).

use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::{Engine, MAX_PARK};
use crate::error::{Error, Missing, Result};
use crate::types::{CounterId, RequestId, Time};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// How to wait.
pub struct Waiter<'a> {
    /// When the wait fails.
    pub deadline: Time,
    /// For how long to spin before parking.
    pub spin: Duration,
    /// Asked a few times a second; `true` ends the wait with [`Error::Interrupted`]. No lock is held
    /// during the call.
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

/// How often a spinning wait looks only at what it waits for before it polls again: some
/// microseconds. A poll in between costs more than the store of a peer takes to be seen.
const GLANCES: u32 = 100;
/// Polls of a spinning wait between two looks at the clock and at all that ends a wait without an event.
const POLLS: u32 = 16;
/// Pauses between two glances: each look takes the line away from the peer that is about to store to it.
const PAUSES: u32 = 2;
/// The least time between two questions whether a wait is interrupted.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long a wait goes on for a peer that has said goodbye, whose last writes may be under way.
const LEFT_GRACE: Duration = Duration::from_secs(1);

/// Access of a waiting thread to its engine: an [`Engine`] that it holds alone, or one that threads share
/// ([`crate::Communicator::host`]).
pub trait Host {
    /// Runs `work` on the engine. Other threads may run between two calls.
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R;

    /// As [`Host::with`], with the number of callers that want the engine: a thread that spins on it
    /// gives way to them.
    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R;

    /// Identifies what has happened so far, for [`Host::park`].
    fn ticket(&self) -> u32;

    /// Sleeps until something may have happened since `ticket`, at most until `until`.
    fn park(&mut self, ticket: u32, until: Time);

    /// The caller goes on to something else than a poll: another waiting thread takes its place.
    fn step_aside(&self);

    /// The error that ends every wait, once the engine was closed.
    fn closed(&self) -> Result<()>;
}

impl Host for Engine {
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

    fn step_aside(&self) {}

    fn closed(&self) -> Result<()> {
        Ok(())
    }
}

/// What one turn of a wait came to.
enum Turn<T, E> {
    Ended(Result<T, E>),
    /// Something happened.
    Busy,
    Idle,
}

/// Polls until `step` returns a value. `step` sees each poll's events, or none if it is only to
/// look again; `missing` names the peers that the wait lacks, when it fails or a peer has left.
pub(crate) fn run<T, E: From<Error>>(
    host: &mut impl Host,
    what: &'static str,
    namespace: u16,
    waiter: &mut Waiter<'_>,
    step: impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
    missing: impl FnMut(&mut Engine) -> Vec<Missing>,
) -> Result<T, E> {
    let result = run_turns(host, what, namespace, waiter, step, missing);
    host.step_aside();
    result
}

fn run_turns<T, E: From<Error>>(
    host: &mut impl Host,
    what: &'static str,
    namespace: u16,
    waiter: &mut Waiter<'_>,
    mut step: impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
    mut missing: impl FnMut(&mut Engine) -> Vec<Missing>,
) -> Result<T, E> {
    let spins = namespace == 0 && !waiter.spin.is_zero();
    let found = host.with(|engine| {
        engine.flush();
        // Without a driver, `step` only reads; if peers' stores are all that can bring what it waits for,
        // it is worth a few looks before the first poll.
        let glances = if spins && engine.is_raised_by_stores() { GLANCES } else { 0 };
        glance(engine, glances, None, &mut step)
    });
    if let Some(value) = found? {
        return Ok(value);
    }
    let begin = clock::now();
    // The first turn needs no second look at the clock.
    let mut first = Some(begin);
    let mut idle_since = begin;
    let mut asked = Time(0);
    let mut left_since = None;
    loop {
        let ticket = host.ticket();
        let now = first.take().unwrap_or_else(clock::now);
        host.closed()?;
        let turn = host.with(|engine| {
            let mut events = std::mem::take(engine.event_buffer());
            events.clear();
            engine.poll_for(namespace, now, &mut events);
            let busy = !events.is_empty();
            let stepped = step(engine, &events);
            *engine.event_buffer() = events;
            match stepped {
                Ok(None) => {}
                Ok(Some(value)) => return Turn::Ended(Ok(value)),
                Err(error) => return Turn::Ended(Err(error)),
            }
            if let Err(error) = engine.check() {
                return Turn::Ended(Err(error.into()));
            }
            if now >= waiter.deadline {
                let error = Error::timeout(what, begin, now, missing(engine));
                return Turn::Ended(Err(error.into()));
            }
            if busy { Turn::Busy } else { Turn::Idle }
        });
        match turn {
            Turn::Ended(result) => return result,
            Turn::Busy => {
                idle_since = now;
                continue;
            }
            Turn::Idle => {}
        }
        if now.since(idle_since) < waiter.spin {
            match spin(host, spins, now, &mut step) {
                Turn::Ended(result) => return result,
                Turn::Busy => idle_since = now,
                Turn::Idle => {}
            }
            continue;
        }
        // It may take long, and a wait that is woken often need not ask each time.
        if now.since(asked) >= ASK_EVERY {
            asked = now;
            host.step_aside();
            if (waiter.interrupted)() {
                return Err(Error::Interrupted.into());
            }
        }
        let gone = host.with(|engine| missing_left(engine, &mut missing));
        if let Some(gone) = gone
            && now.since(*left_since.get_or_insert(now)) >= LEFT_GRACE
        {
            let detail = format!("{gone} finished before this rank's {what} was complete");
            host.with(|engine| {
                engine.poison(Poison { kind: Cause::Left, rank: Some(gone), detail });
            });
            continue;
        }
        host.park(ticket, waiter.deadline.min(now.after(MAX_PARK)));
    }
}

/// One spell of spinning between two looks at the clock.
fn spin<T, E>(
    host: &mut impl Host,
    spins: bool,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> Turn<T, E> {
    host.spin(|engine, callers| {
        if spins && !engine.is_raised_by_stores() {
            return poll_again(engine, callers, now, step);
        }
        let glances = if spins { GLANCES } else { 0 };
        match glance(engine, glances, callers, step).transpose() {
            Some(result) => Turn::Ended(result),
            None => Turn::Idle,
        }
    })
}

/// Polls a few times for a wait without a driver, until it has what it waits for; gives way to `callers`.
fn poll_again<T, E>(
    engine: &mut Engine,
    callers: Option<&AtomicU32>,
    now: Time,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> Turn<T, E> {
    let mut turn = Turn::Idle;
    for _ in 0..POLLS {
        if engine.progress_at(now) {
            turn = Turn::Busy;
            if let Some(result) = step(engine, &[]).transpose() {
                return Turn::Ended(result);
            }
            if callers.is_some() {
                // Another thread may wait for what has happened; giving the engine back wakes it.
                break;
            }
        }
        if callers.is_some_and(|callers| callers.load(Ordering::Relaxed) > 0) {
            break;
        }
    }
    turn
}

/// Looks that often whether `step` has what it waits for; gives way to `callers`.
fn glance<T, E>(
    engine: &mut Engine,
    glances: u32,
    callers: Option<&AtomicU32>,
    step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    for _ in 0..glances {
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

fn missing_left(
    engine: &mut Engine,
    missing: &mut impl FnMut(&mut Engine) -> Vec<Missing>,
) -> Option<Rank> {
    if !engine.poison_flag().any_has_left() {
        return None;
    }
    let missing = missing(engine);
    missing.into_iter().map(|m| m.rank).find(|rank| engine.poison_flag().has_left(*rank))
}

/// [`Engine::wait_in`] over any host; without a round, [`Engine::wait`].
#[inline]
pub(crate) fn wait(
    host: &mut impl Host,
    counter: CounterId,
    round: Option<u64>,
    expected: &[(Rank, u64)],
    waiter: &mut Waiter<'_>,
) -> Result<()> {
    let count = |engine: &mut Engine, rank| match round {
        Some(round) => engine.count_in(counter, rank, round),
        None => engine.count(counter, rank),
    };
    run(
        host,
        "a wait on a counter",
        0,
        waiter,
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
                (seen < expected).then_some(Missing { rank, expected, seen })
            };
            expected.iter().filter_map(short).collect()
        },
    )
}

/// Waits until counters have been raised by peers as often, since they were linked, as is
/// expected of each.
pub(crate) fn wait_for_totals(
    host: &mut impl Host,
    expected: &[(CounterId, Rank, u64)],
    waiter: &mut Waiter<'_>,
) -> Result<()> {
    let lacking = |engine: &mut Engine| -> Result<Vec<Missing>> {
        let mut missing = Vec::new();
        for &(counter, rank, expected) in expected {
            let seen = engine.count_in_all(counter, rank)?;
            if seen < expected {
                missing.push(Missing { rank, expected, seen });
            }
        }
        Ok(missing)
    };
    run(
        host,
        "a wait for all that was written",
        0,
        waiter,
        |engine, _| Ok(lacking(engine)?.is_empty().then_some(())),
        |engine| lacking(engine).unwrap_or_default(),
    )
}

/// [`Engine::wait_for_credit`] over any host.
pub(crate) fn wait_for_credit(
    host: &mut impl Host,
    counter: CounterId,
    peer: Rank,
    round: u64,
    waiter: &mut Waiter<'_>,
) -> Result<()> {
    run(
        host,
        "a wait for credit",
        0,
        waiter,
        |engine, _| Ok(engine.has_credit(counter, peer, round)?.then_some(())),
        |engine| {
            let seen = engine.credits(counter, peer).unwrap_or_default();
            let expected = engine.credits_for(counter, peer, round).unwrap_or(round);
            vec![Missing { rank: peer, expected, seen }]
        },
    )
}

/// [`Engine::wait_for_request`] over any host.
pub(crate) fn wait_for_request(
    host: &mut impl Host,
    request: RequestId,
    waiter: &mut Waiter<'_>,
) -> Result<()> {
    run(
        host,
        "a request",
        0,
        waiter,
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

/// [`Engine::hand_on`] over any host.
fn hand_on(host: &mut impl Host, waiter: &mut Waiter<'_>) -> Result<()> {
    run(
        host,
        "handing on",
        0,
        waiter,
        |engine, _| Ok((!engine.has_queued()).then_some(())),
        |engine| engine.missing_of_queues(),
    )
}

/// A barrier that has begun.
#[derive(Debug, Default)]
pub(crate) struct BarrierState {
    /// The peers before this place in their order have been signalled.
    signalled: usize,
    /// Signals of which the kernel has not taken all.
    leaving: Vec<RequestId>,
    /// A thread is inside.
    is_occupied: bool,
}

/// A thread's stay in a barrier; its end, also by a panic, lets another thread in.
struct Stay<'a, H: Host>(&'a mut H);

impl<H: Host> Drop for Stay<'_, H> {
    fn drop(&mut self) {
        self.0.with(|engine| engine.barrier_state().is_occupied = false);
    }
}

/// [`Engine::barrier`] over any host. Barriers of two threads at once have no order that is the same at
/// all ranks, so the second is refused.
pub(crate) fn barrier(host: &mut impl Host, waiter: &mut Waiter<'_>) -> Result<()> {
    let occupied =
        |engine: &mut Engine| std::mem::replace(&mut engine.barrier_state().is_occupied, true);
    if host.with(occupied) {
        return Err(Error::UnderWay { call: "barrier" });
    }
    let stay = Stay(host);
    pass_barrier(&mut *stay.0, waiter)
}

fn pass_barrier(host: &mut impl Host, waiter: &mut Waiter<'_>) -> Result<()> {
    let (peers, counter) = host.with(|engine| {
        let peers: Vec<Rank> = engine.peers().collect();
        engine.barrier_counter().map(|counter| (peers, counter))
    })?;
    loop {
        let next = host.with(|engine| -> Result<Option<(Rank, u64)>> {
            let signalled = engine.barrier_state().signalled;
            let Some(&peer) = peers.get(signalled) else { return Ok(None) };
            Ok(Some((peer, engine.next_round(counter, peer)?)))
        })?;
        let Some((peer, round)) = next else { break };
        wait_for_credit(host, counter, peer, round, waiter)?;
        host.with(|engine| {
            let signal = engine.signal(peer, counter, round)?;
            let state = engine.barrier_state();
            state.signalled += 1;
            if signal != RequestId::DONE {
                state.leaving.push(signal);
            }
            Ok::<(), Error>(())
        })?;
    }
    let expected: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
    wait(host, counter, None, &expected, waiter)?;
    // A peer must not wait for a signal that lies here while this program computes.
    while let Some(signal) = host.with(|engine| engine.barrier_state().leaving.last().copied()) {
        wait_for_request(host, signal, waiter)?;
        host.with(|engine| engine.barrier_state().leaving.pop());
    }
    host.with(|engine| {
        engine.barrier_state().signalled = 0;
        for peer in peers {
            engine.credit(peer, counter)?;
        }
        engine.flush();
        Ok(())
    })
}

impl Engine {
    /// Polls a driver once, with all that has happened since it was polled last.
    pub fn turn<D>(&mut self, driver: &mut D, requests: &mut Requests) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let mut events = std::mem::take(self.event_buffer());
        events.clear();
        self.poll_for(driver.namespace(), clock::now(), &mut events);
        let result = self.turn_with(driver, requests, &events);
        *self.event_buffer() = events;
        result
    }

    /// Polls a driver with these events of a poll and with all that other polls took from it.
    pub(crate) fn turn_with<D>(
        &mut self,
        driver: &mut D,
        requests: &mut Requests,
        events: &[Event],
    ) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let mut all = std::mem::take(&mut self.caught_up);
        all.clear();
        all.extend_from_slice(events);
        self.catch_up(driver.namespace(), driver.counters(), &mut all);
        let result = driver.poll(clock::now(), &all, requests);
        self.caught_up = all;
        result?;
        Ok(self.submit(requests)?)
    }

    /// Waits until every peer named has raised `counter` by as much as is expected of it in its oldest
    /// round without a credit.
    ///
    /// # Errors
    /// [`Error::Timeout`], which names who is missing and may be waited for again;
    /// [`Error::Poisoned`]; [`Error::Interrupted`].
    pub fn wait(
        &mut self,
        counter: CounterId,
        expected: &[(Rank, u64)],
        waiter: &mut Waiter<'_>,
    ) -> Result<()> {
        wait(self, counter, None, expected, waiter)
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
        waiter: &mut Waiter<'_>,
    ) -> Result<()> {
        wait(self, counter, Some(round), expected, waiter)
    }

    /// Waits until `peer` has given the credit that `round` needs.
    pub fn wait_for_credit(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        waiter: &mut Waiter<'_>,
    ) -> Result<()> {
        wait_for_credit(self, counter, peer, round, waiter)
    }

    /// Waits until the request's sources may be reused and its bytes have left this process.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the poison of the group came first: the outcome of the write is unknown. A
    /// request that ended before the poison returns without an error. [`Error::Timeout`],
    /// [`Error::Interrupted`].
    pub fn wait_for_request(&mut self, request: RequestId, waiter: &mut Waiter<'_>) -> Result<()> {
        wait_for_request(self, request, waiter)
    }

    /// Waits until links have taken all that waits for a full queue. What they have taken arrives although
    /// the engine is dropped then; what still waits is lost with it.
    ///
    /// # Errors
    /// As [`Engine::wait`].
    pub fn hand_on(&mut self, waiter: &mut Waiter<'_>) -> Result<()> {
        hand_on(self, waiter)
    }

    /// Returns after every rank has entered. It orders control, not data. After a timeout, a repeat
    /// continues the same barrier.
    pub fn barrier(&mut self, waiter: &mut Waiter<'_>) -> Result<()> {
        barrier(self, waiter)
    }
}
