//! Blocking calls: thin loops around [`Engine::poll`], at the edge.
//!
//! A waiter spins for a bounded time, then parks: on the bell word if peers' stores alone can wake
//! it, on descriptors if a provider needs to be polled. No wait is unbounded.

use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::Engine;
use crate::error::{Error, Missing, Result};
use crate::types::{CounterId, RequestId, Time};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::cell::RefCell;
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// How to wait.
pub struct Waiter<'a> {
    /// When the wait fails.
    pub deadline: Time,
    /// For how long to spin before parking.
    pub spin: Duration,
    /// Asked a few times a second while parked; `true` ends the wait with [`Error::Interrupted`].
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

/// How often a spinning wait looks at nothing but what it waits for before it polls again: some
/// microseconds. A poll in between costs more than the store of a peer takes to be seen.
const GLANCES: u32 = 100;
/// Pauses between two glances: each look takes the line away from the peer that is about to store to it.
const PAUSES: u32 = 2;
/// The longest sleep between two looks at deadlines and interruptions.
const NAP: Duration = Duration::from_millis(50);
/// How long a wait goes on for a peer that has said goodbye, whose last writes may be under way.
const LEFT_GRACE: Duration = Duration::from_secs(1);

impl Engine {
    /// Polls until `step` returns a value. `step` sees each poll's events, or none if it is only to
    /// look again; `missing` is asked whom the wait lacks, when it fails or a peer has left.
    fn run<T, E: From<Error>>(
        &mut self,
        what: &'static str,
        namespace: u16,
        waiter: &mut Waiter<'_>,
        mut step: impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
        mut missing: impl FnMut(&mut Engine) -> Vec<Missing>,
    ) -> Result<T, E> {
        // Without a driver, `step` only reads; if peers' stores are all that can bring what it waits for,
        // it is worth a few looks before the first poll.
        let glances = match waiter.spin {
            Duration::ZERO => 0,
            _ if namespace == 0 && self.is_told_by_stores() => GLANCES,
            _ => 0,
        };
        self.flush();
        if let Some(value) = self.glance(glances, &mut step)? {
            return Ok(value);
        }
        let begin = clock::now();
        let mut events = std::mem::take(self.event_buffer());
        let mut idle_since = begin;
        let mut left_since = None;
        let result = loop {
            let now = clock::now();
            events.clear();
            self.poll_for(namespace, now, &mut events);
            match step(self, &events) {
                Ok(Some(value)) => break Ok(value),
                Ok(None) => {}
                Err(error) => break Err(error),
            }
            if let Err(error) = self.check() {
                break Err(error.into());
            }
            if now >= waiter.deadline {
                break Err(Error::timeout(what, begin, now, missing(self)).into());
            }
            if !events.is_empty() {
                idle_since = now;
                continue;
            }
            if now.since(idle_since) < waiter.spin {
                match self.glance(glances, &mut step) {
                    Ok(Some(value)) => break Ok(value),
                    Ok(None) => continue,
                    Err(error) => break Err(error),
                }
            }
            if (waiter.interrupted)() {
                break Err(Error::Interrupted.into());
            }
            if let Some(gone) = self.missing_left(&mut missing)
                && now.since(*left_since.get_or_insert(now)) >= LEFT_GRACE
            {
                let detail = format!("{gone} finished before this rank's {what} was complete");
                self.poison(Poison { kind: Cause::Left, rank: Some(gone), detail });
                continue;
            }
            self.park(waiter.deadline.min(now.after(NAP)));
        };
        *self.event_buffer() = events;
        result
    }

    /// Looks that often whether `step` has what it waits for.
    fn glance<T, E>(
        &mut self,
        glances: u32,
        step: &mut impl FnMut(&mut Engine, &[Event]) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        for _ in 0..glances {
            if let Some(value) = step(self, &[])? {
                return Ok(Some(value));
            }
            for _ in 0..PAUSES {
                std::hint::spin_loop();
            }
        }
        Ok(None)
    }

    fn missing_left(
        &mut self,
        missing: &mut impl FnMut(&mut Engine) -> Vec<Missing>,
    ) -> Option<Rank> {
        if !self.peers().any(|rank| self.poison_flag().has_left(rank)) {
            return None;
        }
        missing(self).into_iter().map(|m| m.rank).find(|rank| self.poison_flag().has_left(*rank))
    }

    /// Runs a driver until `done` says so.
    ///
    /// # Errors
    /// The driver's own; [`Error::Timeout`] with what `missing` names; [`Error::Poisoned`];
    /// [`Error::Interrupted`].
    pub fn drive<D, T>(
        &mut self,
        what: &'static str,
        driver: &mut D,
        requests: &mut Requests,
        waiter: &mut Waiter<'_>,
        done: impl Fn(&D) -> Option<T>,
        missing: impl Fn(&D) -> Vec<Missing>,
    ) -> Result<T, D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        self.turn(driver, requests)?;
        let namespace = driver.namespace();
        let driver = RefCell::new(driver);
        self.run(
            what,
            namespace,
            waiter,
            |engine, events| {
                let driver = &mut **driver.borrow_mut();
                driver.poll(clock::now(), events, requests)?;
                engine.submit(requests)?;
                Ok(done(driver))
            },
            |_| missing(&driver.borrow()),
        )
    }

    /// Polls a driver once, with all that has happened since it was polled last.
    pub fn turn<D>(&mut self, driver: &mut D, requests: &mut Requests) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let now = clock::now();
        let mut events = std::mem::take(self.event_buffer());
        events.clear();
        self.poll_for(driver.namespace(), now, &mut events);
        self.catch_up(driver.namespace(), driver.counters(), &mut events);
        let result = driver.poll(now, &events, requests);
        *self.event_buffer() = events;
        result?;
        Ok(self.submit(requests)?)
    }

    /// Waits until every peer named has raised `counter` by as much as is expected of it in this
    /// round.
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
        let lacking = |engine: &mut Engine| -> Result<Vec<Missing>> {
            let mut missing = Vec::new();
            for &(rank, expected) in expected {
                let seen = engine.count(counter, rank)?;
                if seen < expected {
                    missing.push(Missing { rank, expected, seen });
                }
            }
            Ok(missing)
        };
        self.run(
            "a wait on a counter",
            0,
            waiter,
            |engine, _| {
                for &(rank, expected) in expected {
                    if engine.count(counter, rank)? < expected {
                        return Ok(None);
                    }
                }
                Ok(Some(()))
            },
            |engine| lacking(engine).unwrap_or_default(),
        )
    }

    /// Waits until counters have been raised by peers as often, since they were linked, as is
    /// expected of each.
    pub(crate) fn wait_for_totals(
        &mut self,
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
        self.run(
            "a wait for all that was written",
            0,
            waiter,
            |engine, _| Ok(lacking(engine)?.is_empty().then_some(())),
            |engine| lacking(engine).unwrap_or_default(),
        )
    }

    /// Waits until `peer` has given the credit that `round` needs.
    pub fn wait_for_credit(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        waiter: &mut Waiter<'_>,
    ) -> Result<()> {
        self.run(
            "a wait for credit",
            0,
            waiter,
            |engine, _| Ok(engine.has_credit(counter, peer, round)?.then_some(())),
            |engine| {
                let seen = engine.credits(counter, peer).unwrap_or_default();
                vec![Missing { rank: peer, expected: round, seen }]
            },
        )
    }

    /// Waits until the request's sources may be reused.
    pub fn wait_for_request(&mut self, request: RequestId, waiter: &mut Waiter<'_>) -> Result<()> {
        self.run(
            "a request",
            0,
            waiter,
            |engine, _| Ok(engine.is_drained(request).then_some(())),
            |_| Vec::new(),
        )
    }

    /// Every rank has entered before any leaves. It orders control, not data.
    pub fn barrier(&mut self, waiter: &mut Waiter<'_>) -> Result<()> {
        let peers: Vec<Rank> = self.peers().collect();
        let counter = self.barrier_counter()?;
        for &peer in &peers {
            let round = self.next_round(counter, peer)?;
            self.wait_for_credit(counter, peer, round, waiter)?;
            self.signal(peer, counter, round)?;
        }
        let expected: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
        self.wait(counter, &expected, waiter)?;
        for peer in peers {
            self.credit(peer, counter)?;
        }
        self.flush();
        Ok(())
    }

    /// Sleeps until something may have happened, at most until `until`.
    fn park(&mut self, until: Time) {
        let timeout = until.since(clock::now());
        if !self.needs_descriptors() {
            self.sleep_on_word(timeout);
            return;
        }
        if self.may_sleep() {
            let timeout = Timespec {
                tv_sec: timeout.as_secs() as i64,
                tv_nsec: timeout.subsec_nanos().into(),
            };
            let descriptor = self.descriptor();
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            // A signal ends it early, which is right.
            let _ = rustix::event::poll(&mut polled, Some(&timeout));
        }
        self.disarm();
    }
}
