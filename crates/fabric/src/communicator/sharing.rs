//! Regions and counters between ranks: grants, counters that are released, bytes that are traded for them.

use super::{Communicator, verdict};
use crate::clock;
use crate::descriptor::{Grant, Refusal};
use crate::engine::{Engine, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::types::{CounterId, Time};
use crate::wait::{self, Waiter};
use std::ops::Range;
use std::time::Duration;
use weft_control::{Operation, Rank};

/// Time between two looks whether what a peer sends over its link has come.
const MEETING_POLL: Duration = Duration::from_millis(1);

impl Communicator {
    /// Grants every peer the given ranges of the given regions and links the given counters; every
    /// rank calls this with as many of both. A counter is linked with the peers that it connects, who
    /// pass one at the same position that connects this rank. Returns, by rank, the regions that it
    /// granted to us (none for this rank itself).
    ///
    /// # Errors
    /// Those of [`Engine::grant`], and [`Error::PeerRefused`] at the other ranks: nothing was granted then.
    /// Those of [`Engine::import`]; the control plane's if ranks are lost, leave or do not come.
    pub fn share(
        &self,
        regions: &[(&Region, Range<u64>)],
        counters: &[CounterId],
        deadline: Time,
    ) -> Result<Vec<Vec<RemoteRegion>>> {
        let granted = self.grants(regions, counters, deadline);
        let refusal = |error: &Error| {
            let refusal = Refusal(error.to_string()).encode();
            vec![refusal; self.world_size() as usize]
        };
        // A rank that refuses its arguments takes part, so that none waits for it.
        let grants = granted.as_ref().map_or_else(refusal, Vec::clone);
        let traded = self.trade_as(Operation::Share, &grants, deadline);
        granted?;
        let traded = traded?;
        // Before anything is imported: all ranks find the same.
        for (peer, bytes) in (0..).map(Rank).zip(&traded) {
            if let Some(Refusal(detail)) = Refusal::decode(bytes) {
                return Err(Error::PeerRefused { call: "share", peer, detail });
            }
        }
        let mut remotes = Vec::new();
        for (peer, bytes) in (0..).map(Rank).zip(&traded) {
            if peer == self.rank() {
                remotes.push(Vec::new());
                continue;
            }
            let grant = Grant::decode(bytes).ok_or_else(|| Error::Malformed {
                peer,
                what: "a grant",
                detail: format!("{} bytes", bytes.len()),
            })?;
            remotes.push(self.meet(deadline, |engine, limit| {
                let counters = engine.counters_toward(peer, counters)?;
                engine.import_within(peer, &grant, &counters, limit)
            })?);
        }
        self.engine().mark_shared(counters);
        Ok(remotes)
    }

    /// By rank, what each is granted; nothing for this rank itself.
    fn grants(
        &self,
        regions: &[(&Region, Range<u64>)],
        counters: &[CounterId],
        deadline: Time,
    ) -> Result<Vec<Vec<u8>>> {
        let toward = |rank: Rank| {
            if rank == self.rank() {
                return Ok(Vec::new());
            }
            let grant = self.meet(deadline, |engine, _| {
                let counters = engine.counters_toward(rank, counters)?;
                engine.grant(rank, regions, &counters)
            });
            Ok(grant?.encode())
        };
        (0..self.world_size()).map(Rank).map(toward).collect()
    }

    /// Runs `work`, which exchanges grants with peers and may have to wait for their links, until `deadline`.
    /// Where it would wait it is given up with an error of its [`WaitLimit`] and run again later, so that
    /// no other thread waits for the engine meanwhile. It ends early if the communicator is closed or a peer
    /// is lost or leaves; the control plane's verdict on a peer comes before the error of a link to it.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Control`].
    pub fn meet<T>(
        &self,
        deadline: Time,
        mut work: impl FnMut(&mut Engine, &mut WaitLimit<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let is_last = clock::now() >= deadline;
            let mut would_wait = false;
            let mut give_up = || {
                would_wait = !is_last;
                if is_last { Ok(()) } else { Err(Error::Interrupted) }
            };
            let mut limit = WaitLimit { deadline, give_up: &mut give_up };
            let result = work(&mut self.engine(), &mut limit);
            if result.is_ok() || !would_wait {
                return result.map_err(|error| self.verdict(error, deadline));
            }
            self.check_wait()?;
            std::thread::sleep(MEETING_POLL);
        }
    }

    /// The check of a wait that its caller makes itself, such as [`WaitLimit::give_up`], a few times a second.
    ///
    /// # Errors
    /// [`weft_control::Error::Closed`] once the communicator was closed; those of [`Control::check`].
    pub fn check_wait(&self) -> Result<()> {
        self.shared.check_open()?;
        Ok(self.control.check()?)
    }

    /// The control plane's error on a rank that was lost or has left, in place of the error of a link to
    /// it; other errors as they are. It waits for at most two seconds, and not after `deadline`.
    pub fn verdict(&self, error: Error, deadline: Time) -> Error {
        verdict(|| Ok(self.control.check()?), error, deadline)
    }

    /// Waits until all that was written toward a counter has arrived, as [`Communicator::settle`], and
    /// releases it. Every rank calls this with the counter of the same position, once its requests have
    /// drained. A counter that was not shared is released at once, by this rank alone.
    ///
    /// # Errors
    /// Those of [`Communicator::settle`]: the counter then stays, and the call may be repeated;
    /// [`Error::Unknown`] if it was released before. In a poisoned group nothing is waited for.
    pub fn release_counter(&self, counter: CounterId, waiter: &mut Waiter<'_>) -> Result<()> {
        let (is_shared, is_poisoned) = {
            let engine = self.engine();
            (engine.is_shared(counter)?, engine.check().is_err())
        };
        if is_shared && !is_poisoned {
            self.settle(&[counter], waiter)?;
        }
        self.engine().release_counter(counter)
    }

    /// Gives each rank its own bytes, over the control plane; returns what each gave to this one.
    pub fn trade(&self, to_each: &[Vec<u8>], deadline: Time) -> Result<Vec<Vec<u8>>> {
        self.trade_as(Operation::Exchange, to_each, deadline)
    }

    fn trade_as(
        &self,
        operation: Operation,
        to_each: &[Vec<u8>],
        deadline: Time,
    ) -> Result<Vec<Vec<u8>>> {
        let timeout = deadline.since(clock::now());
        Ok(self.control.exchange_as(operation, to_each, timeout)?)
    }

    /// Waits until all that any rank has written toward these counters has arrived here. Every rank
    /// calls this with the same counters, once its own requests have drained, and writes toward them
    /// no more: regions that only they count may be released then.
    pub fn settle(&self, counters: &[CounterId], waiter: &mut Waiter<'_>) -> Result<()> {
        let mut engine = self.engine();
        let mut connected = Vec::new();
        let mut raised = vec![Vec::new(); self.world_size() as usize];
        for peer in engine.peers() {
            let toward = engine.counters_toward(peer, counters)?;
            for &counter in &toward {
                let total = engine.raised_in_all(counter, peer)?;
                raised[peer.index()].extend(total.to_le_bytes());
            }
            connected.push((peer, toward));
        }
        drop(engine);
        let told = self.trade_as(Operation::Settle, &raised, waiter.deadline)?;
        let mut expected = Vec::new();
        for (peer, toward) in connected {
            let mut totals = crate::bytes::Reader::new(&told[peer.index()]);
            for &counter in &toward {
                let total = totals.u64().ok_or_else(|| Error::Malformed {
                    peer,
                    what: "its totals",
                    detail: format!("they are not of {} counters", toward.len()),
                })?;
                expected.push((counter, peer, total));
            }
        }
        wait::wait_for_totals(&mut self.host(), &expected, waiter)
    }
}
