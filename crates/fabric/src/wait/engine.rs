//! Blocking calls on an engine with one owner, and driver polls.

use super::conditions::drain_queues;
use super::{WaitOptions, barrier, wait, wait_for_credit, wait_for_request};
use crate::clock;
use crate::driver::{Driver, Event, Requests};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::types::{CounterId, RequestId};
use weft_control::Rank;

impl Engine {
    /// Polls a driver once, with all events since the last poll.
    pub fn drive<D>(&mut self, driver: &mut D, requests: &mut Requests) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        self.drive_once(driver, requests, false)
    }

    /// Same as [`Engine::drive`], for a driver that keeps what each event says. If nobody else has polled since its last
    /// poll, the driver gets new events only, and the cost does not grow with counters, peers and rounds.
    ///
    /// `last_poll` belongs to the driver and this engine: 0 at first, [`Engine::polls`] after each poll.
    ///
    /// # Errors
    /// The driver's errors, and errors from [`Engine::submit`]. The next poll then repeats all events.
    pub fn drive_onward<D>(
        &mut self,
        driver: &mut D,
        requests: &mut Requests,
        last_poll: &mut u64,
    ) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        self.drive_once(driver, requests, *last_poll == self.polls())?;
        *last_poll = self.polls();
        Ok(())
    }

    /// Polls a driver with new events; unless it has all earlier ones, also with those that other polls consumed.
    fn drive_once<D>(
        &mut self,
        driver: &mut D,
        requests: &mut Requests,
        has_earlier: bool,
    ) -> Result<(), D::Error>
    where
        D: Driver,
        D::Error: From<Error>,
    {
        let mut events = std::mem::take(self.event_buffer());
        events.clear();
        self.poll_for(driver.namespace(), clock::now(), &mut events);
        let result = if has_earlier {
            let polled = driver.poll(clock::now(), &events, requests);
            polled.and_then(|()| self.submit_all(driver, requests))
        } else {
            self.drive_with(driver, requests, &events)
        };
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

    /// Submits the requests from a driver poll, and from further polls while it has more.
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

    /// Waits until each listed peer has raised `counter` by the expected count in the oldest round
    /// without a credit.
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

    /// [`Engine::wait`] for an open round: the oldest without a credit or a later one in the window, the
    /// same toward every peer.
    ///
    /// # Errors
    /// Same as [`Engine::wait`]; [`Error::OldRound`] if a peer's round was credited, [`Error::NoCredit`] if it
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

    /// Waits for the credit from `peer` that `round` needs.
    pub fn wait_for_credit(
        &mut self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait_for_credit(self, counter, peer, round, options)
    }

    /// Waits until the request's sources may be reused and all bytes have left this process.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the group was poisoned first: the write's outcome is unknown. A request
    /// that ended before the poison returns without an error. [`Error::Timeout`], [`Error::Interrupted`].
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
    /// Same as [`Engine::wait`].
    pub fn drain_queues(&mut self, options: &mut WaitOptions<'_>) -> Result<()> {
        drain_queues(self, options)
    }

    /// Returns after every rank has entered. It orders control flow, not data. After a timeout, a repeated
    /// call continues the same barrier.
    pub fn barrier(&mut self, options: &mut WaitOptions<'_>) -> Result<()> {
        barrier(self, options)
    }
}
