//! Sharing between ranks: granting regions and counters, releasing counters, exchanging bytes.

use super::{Communicator, attribute_error};
use crate::clock;
use crate::descriptor::{Grant, Refusal};
use crate::engine::{Engine, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::types::{CounterId, Time};
use crate::wait::{self, WaitOptions};
use std::ops::Range;
use std::time::Duration;
use weft_control::{Operation, Rank};

/// Retry interval for messages from a peer over the link.
const RETRY_POLL: Duration = Duration::from_millis(1);

impl Communicator {
    /// Grants these region ranges to every peer and links these counters. Collective; every rank passes
    /// equal numbers of both. A counter is linked with the peers that it connects, which pass one at the
    /// same position that connects this rank. Returns the regions granted to this rank, by peer (empty
    /// for this rank).
    ///
    /// # Errors
    /// Errors from [`Engine::grant`], and [`Error::PeerRefused`] at the other ranks: no rank has granted
    /// anything then. Errors from [`Engine::import`]; a control plane error if ranks are lost, leave or
    /// time out.
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
        // A rank that rejects the arguments still takes part in the exchange, so that no peer waits for
        // it.
        let grants = granted.as_ref().map_or_else(refusal, Vec::clone);
        let traded = self.exchange_as(Operation::Share, &grants, deadline);
        granted?;
        let traded = traded?;
        // Before any import, so that all ranks return an error.
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
            remotes.push(self.retry_until(deadline, |engine, limit| {
                let counters = engine.counters_toward(peer, counters)?;
                engine.import_within(peer, &grant, &counters, limit)
            })?);
        }
        self.engine().mark_shared(counters);
        Ok(remotes)
    }

    /// Encoded grants by rank; empty for this rank.
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
            let grant = self.retry_until(deadline, |engine, _| {
                let counters = engine.counters_toward(rank, counters)?;
                engine.grant(rank, regions, &counters)
            });
            Ok(grant?.encode())
        };
        (0..self.world_size()).map(Rank).map(toward).collect()
    }

    /// Runs `work`, which exchanges grants with peers and may have to wait for peers' links, until
    /// `deadline`. Where it would wait, [`WaitLimit`] ends it with an error and it runs again later, so
    /// that no other thread blocks on the engine. It ends early if the communicator is closed or a peer
    /// is lost or leaves; the control plane's error about a peer then replaces the link's error.
    ///
    /// # Errors
    /// Errors from `work`; [`Error::Control`].
    pub fn retry_until<T>(
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
                return result.map_err(|error| self.attribute_error(error, deadline));
            }
            self.check_wait()?;
            std::thread::sleep(RETRY_POLL);
        }
    }

    /// Check for a custom wait loop, such as [`WaitLimit::give_up`]; call it a few times a second.
    ///
    /// # Errors
    /// [`weft_control::Error::Closed`] on a closed communicator; errors from
    /// [`weft_control::Control::check`].
    pub fn check_wait(&self) -> Result<()> {
        self.shared.check_open()?;
        Ok(self.control.check()?)
    }

    /// Replaces a link error toward a lost or departed rank by the control plane's error; other errors
    /// are returned unchanged. Waits for at most 2 s, and not after `deadline`.
    pub fn attribute_error(&self, error: Error, deadline: Time) -> Error {
        attribute_error(|| Ok(self.control.check()?), error, deadline)
    }

    /// Waits until all writes toward a counter have arrived, like [`Communicator::settle`], and releases
    /// it. Collective, with the counter at the same position, after this rank's requests have drained. A
    /// counter that was not shared is released at once, only by this rank.
    ///
    /// # Errors
    /// Errors from [`Communicator::settle`]: the counter then stays, and the call may be repeated;
    /// [`Error::Unknown`] if it was released before. The call does not wait in a poisoned group.
    pub fn release_counter(&self, counter: CounterId, options: &mut WaitOptions<'_>) -> Result<()> {
        let (is_shared, is_poisoned) = {
            let engine = self.engine();
            (engine.is_shared(counter)?, engine.check().is_err())
        };
        if is_shared && !is_poisoned {
            self.settle(&[counter], options)?;
        }
        self.engine().release_counter(counter)
    }

    /// Byte all-to-all over the control plane: sends `to_each[r]` to rank r; returns the bytes from each
    /// rank.
    pub fn exchange(&self, to_each: &[Vec<u8>], deadline: Time) -> Result<Vec<Vec<u8>>> {
        self.exchange_as(Operation::Exchange, to_each, deadline)
    }

    fn exchange_as(
        &self,
        operation: Operation,
        to_each: &[Vec<u8>],
        deadline: Time,
    ) -> Result<Vec<Vec<u8>>> {
        let timeout = deadline.since(clock::now());
        Ok(self.control.exchange_as(operation, to_each, timeout)?)
    }

    /// Waits until all writes toward these counters from all ranks have arrived here. Collective, with
    /// the same counters, after this rank's requests have drained; no rank writes toward them afterwards.
    /// Regions that only they count may then be released.
    pub fn settle(&self, counters: &[CounterId], options: &mut WaitOptions<'_>) -> Result<()> {
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
        let totals_by_rank = self.exchange_as(Operation::Settle, &raised, options.deadline)?;
        let mut expected = Vec::new();
        for (peer, toward) in connected {
            let mut totals = crate::bytes::Reader::new(&totals_by_rank[peer.index()]);
            for &counter in &toward {
                let total = totals.u64().ok_or_else(|| Error::Malformed {
                    peer,
                    what: "its totals",
                    detail: format!("expected totals of {} counters", toward.len()),
                })?;
                expected.push((counter, peer, total));
            }
        }
        wait::wait_for_totals(&mut self.access(), &expected, options)
    }
}
