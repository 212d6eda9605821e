//! Dispatch and combine as calls: thin loops over [`Driver`], at the edge.

use crate::driver::Driver;
use crate::error::Error;
use crate::exchange::{Input, Stage};
use crate::round::{Handle, Received};
use crate::rows::{Area, Rows, RowsMut};
use crate::shape::Shape;
use weft_fabric::trace::PhaseRecord;
use weft_fabric::{
    Cause, CounterId, Driver as _, Host, Poison, Rank, Requests, SharedDriver, Time, Waiter, clock,
};

/// Expert-parallel all-to-all: tokens to the ranks of their experts, results back.
///
/// Every rank starts its rounds in the same order. A handle's four halves come in order; with more than
/// one set of buffers the next round may begin before the last is released. Any thread may call at any
/// time: no call waits for another thread's wait, so the halves of several rounds may be in several
/// threads. Calls on the same round need an order of their own.
///
/// Each call takes a host: [`weft_fabric::Communicator::host`], or an engine that the caller owns alone.
pub struct AllToAll {
    pub(crate) driver: SharedDriver<Driver>,
    pub(crate) counters: Vec<CounterId>,
    shape: Shape,
}

impl AllToAll {
    /// Calls on a driver that is linked with every peer.
    pub fn new(driver: Driver) -> AllToAll {
        let (shape, counters) = (driver.shape().clone(), driver.counters().to_vec());
        let requests = driver.requests();
        AllToAll { driver: SharedDriver::new(driver, requests), counters, shape }
    }

    /// What was agreed on.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.driver.is_ended()
    }

    /// Starts a round, see [`Driver::begin`], and submits its first writes.
    ///
    /// # Errors
    /// Those of [`Driver::begin`], and those of the fabric. The round has not begun then.
    /// [`Error::Closed`], as from every call.
    pub fn dispatch_send<I: Copy + Into<i64>>(
        &self,
        host: &mut impl Host,
        tokens: Input,
        ids: &[I],
        weights: Option<&[f32]>,
        scales: Option<&[u8]>,
    ) -> Result<Handle, Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        let handle = self.call(host, |driver, _| driver.begin(tokens, ids, weights, scales))?;
        self.turn(host)?;
        phase(host, "dispatch send", begin);
        Ok(handle)
    }

    /// Waits until every token for this rank's experts is here, and this rank's own have left.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which the call may be repeated; [`Error::Capacity`], the same on every
    /// rank, after which the round is over and the next may begin; a peer's mistakes and
    /// losses, after which the group is poisoned.
    pub fn dispatch_recv(
        &self,
        host: &mut impl Host,
        handle: Handle,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        if !self.call(host, |driver, _| driver.receive(handle))? {
            self.run(host, handle, Stage::Dispatching, waiter)?;
            self.call(host, |driver, _| driver.receive(handle))?;
        }
        phase(host, "dispatch recv", begin);
        Ok(())
    }

    /// Shows `look` the tokens of a round that was received, see [`Driver::received`], and for each expert
    /// of the group the tokens that name it in this round.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn with_received<T>(
        &self,
        host: &mut impl Host,
        handle: Handle,
        look: impl FnOnce(Received<'_>, &[u64]) -> T,
    ) -> Result<T, Error> {
        self.call(host, |driver, _| Ok(look(driver.received(handle)?, driver.expert_load(handle)?)))
    }

    /// Sends the experts' outputs back: `outputs` has a row for every position of the received plan, in
    /// the combine dtype. They may be changed as soon as this returns. The answers for one source
    /// leave while those for the next are computed.
    pub fn combine_send(
        &self,
        host: &mut impl Host,
        handle: Handle,
        outputs: Rows<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        let weighting = self.shape.config().weighting;
        let mut more = self.call(host, |driver, _| {
            driver.expect(handle, &[Stage::Dispatched], "combine_send")?;
            driver.answer(handle, outputs, weighting)
        })?;
        loop {
            self.turn(host)?;
            if !more {
                break;
            }
            more = self.call(host, |driver, _| driver.answer(handle, outputs, weighting))?;
        }
        phase(host, "combine send", begin);
        Ok(())
    }

    /// Waits for all answers and sums them into `out`, `[tokens, hidden]` in the output dtype.
    ///
    /// # Errors
    /// As [`AllToAll::dispatch_recv`].
    pub fn combine_recv(
        &self,
        host: &mut impl Host,
        handle: Handle,
        out: RowsMut<'_>,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        let row_bytes = self.shape.area_row_bytes(Area::Output);
        self.call(host, |driver, _| {
            driver.expect(handle, &[Stage::Combining, Stage::Combined], "combine_recv")?;
            out.require(Area::Output, driver.tokens(handle), row_bytes)
        })?;
        self.run(host, handle, Stage::Combining, waiter)?;
        let weighting = self.shape.config().weighting;
        self.call(host, |driver, _| driver.sum_answers(handle, out, weighting))?;
        phase(host, "combine recv", begin);
        Ok(())
    }

    /// Ends a round; see [`Driver::release`].
    pub fn release(&self, host: &mut impl Host, handle: Handle) -> Result<(), Error> {
        self.call(host, |driver, requests| driver.release(handle, requests))
    }

    /// Whether a round has been released, or has failed on every rank.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn is_released(&self, host: &mut impl Host, handle: Handle) -> Result<bool, Error> {
        self.call(host, |driver, _| Ok(driver.stage(handle) == Stage::Idle))
    }

    /// The number of tokens that this rank sent in a round.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn tokens(&self, host: &mut impl Host, handle: Handle) -> Result<usize, Error> {
        self.call(host, |driver, _| Ok(driver.tokens(handle)))
    }

    /// Rows that left this rank, and what a copy per expert would have sent; see
    /// [`Driver::copies_sent`].
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn copies_sent(
        &self,
        host: &mut impl Host,
        handle: Handle,
    ) -> Result<(usize, usize), Error> {
        self.call(host, |driver, _| Ok(driver.copies_sent(handle)))
    }

    /// One look at what has arrived, and what follows from it.
    pub fn turn(&self, host: &mut impl Host) -> Result<(), Error> {
        let turned = self.driver.turn(host);
        Self::blame(host, turned)?.ok_or(Error::Closed)
    }

    /// Waits, after the end of all calls, until no write of this rank is under way.
    pub(crate) fn drain(&self, host: &mut impl Host, waiter: &mut Waiter<'_>) -> Result<(), Error> {
        let drained = |driver: &Driver| driver.is_drained().then_some(());
        let nothing = |_: &Driver| Vec::new();
        let result = self.driver.wait_ended(host, "closing", waiter, drained, nothing);
        Self::blame(host, result)?.ok_or(Error::Closed)
    }

    fn call<T>(
        &self,
        host: &mut impl Host,
        work: impl FnOnce(&mut Driver, &mut Requests) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.driver.call(host, work)?.ok_or(Error::Closed)
    }

    /// Waits until the round has left a stage.
    fn run(
        &self,
        host: &mut impl Host,
        handle: Handle,
        stage: Stage,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let result = self.driver.wait(
            host,
            "a round",
            waiter,
            |driver| (driver.stage(handle) != stage).then_some(()),
            |driver| driver.missing(handle).1,
        );
        let result = match result {
            Err(Error::Fabric(weft_fabric::Error::Timeout { waited, .. })) => {
                let (phase, missing) = self.call(host, |driver, _| Ok(driver.missing(handle)))?;
                let rank = self.shape.config().rank;
                Err(Error::Timeout { rank, phase, round: handle.round, waited, missing })
            }
            other => other,
        };
        Self::blame(host, result)?.ok_or(Error::Closed)
    }

    /// A peer that breaks the protocol poisons the group.
    fn blame<T>(host: &mut impl Host, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result
            && let Some(rank) = error.offender()
        {
            let (kind, rank) = (Cause::Protocol, Some(Rank(rank)));
            let detail = error.to_string();
            host.with(|engine| engine.poison(Poison { kind, rank, detail }));
        }
        result
    }
}

fn phase(host: &mut impl Host, name: &str, begin: Time) {
    host.with(|engine| {
        if let Some(trace) = engine.trace() {
            trace.phase(PhaseRecord { name: name.to_owned(), begin, end: clock::now() });
        }
    });
}
