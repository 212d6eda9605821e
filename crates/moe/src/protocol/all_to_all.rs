//! Dispatch and combine as blocking calls: thin loops over [`Driver`].

use crate::area::Area;
use crate::error::Error;
use crate::plan::rows::{Rows, RowsMut};
use crate::protocol::channel::TokenInput;
use crate::protocol::driver::Driver;
use crate::protocol::round::{ReceivedTokens, RoundHandle};
use crate::shape::Shape;
use crate::stage::Stage;
use weft_fabric::{
    Cause, CounterId, Driver as _, EngineAccess, PhaseRecord, Poison, Rank, Requests, SharedDriver,
    Time, WaitOptions, clock,
};

/// Expert-parallel all-to-all: sends tokens to their experts' ranks, and returns results.
///
/// Every rank starts its rounds in the same order. A handle's four halves come in order; with more than one
/// channel the next round may begin before the previous one is released. Any thread may call at any time: no
/// call blocks on another thread's wait, so several rounds' halves may be in several threads. Calls on the
/// same round need external ordering.
///
/// Each call takes a host: [`weft_fabric::Communicator::access`], or the caller's engine.
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

    /// The agreed shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// True after a close.
    pub fn is_closed(&self) -> bool {
        self.driver.is_ended()
    }

    /// Starts a round by [`Driver::begin`] and submits the first writes.
    ///
    /// # Errors
    /// Errors from [`Driver::begin`] and the fabric; the round has then not begun. [`Error::Closed`], as from
    /// every call.
    pub fn dispatch_send<I: Copy + Into<i64>>(
        &self,
        host: &mut impl EngineAccess,
        tokens: TokenInput,
        ids: &[I],
        weights: Option<&[f32]>,
        scales: Option<&[u8]>,
    ) -> Result<RoundHandle, Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        let handle = self.call(host, |driver, _| driver.begin(tokens, ids, weights, scales))?;
        self.drive(host)?;
        phase(host, "dispatch send", begin);
        Ok(handle)
    }

    /// Waits until all tokens for this rank's experts have arrived and all this rank's writes have completed.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which the call may be repeated; [`Error::Capacity`], the same on every rank,
    /// after which the round has ended and the next may begin; protocol violations and lost peers, after
    /// which the group is poisoned.
    pub fn dispatch_recv(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
        waiter: &mut WaitOptions<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        if !self.call(host, |driver, _| driver.receive(handle))? {
            self.run(host, handle, Stage::Dispatching, waiter)?;
            self.call(host, |driver, _| driver.receive(handle))?;
        }
        phase(host, "dispatch recv", begin);
        Ok(())
    }

    /// Calls `look` with a round's received tokens (see [`Driver::received`]) and the token count for each
    /// expert in the group.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn with_received<T>(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
        look: impl FnOnce(ReceivedTokens<'_>, &[u64]) -> T,
    ) -> Result<T, Error> {
        self.call(host, |driver, _| Ok(look(driver.received(handle)?, driver.expert_load(handle)?)))
    }

    /// Sends the experts' outputs back. `outputs` has a row for every position in the received plan, in the
    /// combine dtype, and may be changed once this returns. Replies to one source are sent while the next
    /// source's are computed.
    pub fn combine_send(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
        outputs: Rows<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        let weighting = self.shape.config().weighting;
        let mut more = self.call(host, |driver, _| {
            driver.expect(handle, &[Stage::Dispatched], "combine_send")?;
            driver.reply(handle, outputs, weighting)
        })?;
        loop {
            self.drive(host)?;
            if !more {
                break;
            }
            more = self.call(host, |driver, _| driver.reply(handle, outputs, weighting))?;
        }
        phase(host, "combine send", begin);
        Ok(())
    }

    /// Waits for all replies and sums them into `out`, `[tokens, hidden]` in the output dtype.
    ///
    /// # Errors
    /// As [`AllToAll::dispatch_recv`].
    pub fn combine_recv(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
        out: RowsMut<'_>,
        waiter: &mut WaitOptions<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        let row_bytes = self.shape.area_row_bytes(Area::Output);
        self.call(host, |driver, _| {
            driver.expect(handle, &[Stage::Combining, Stage::Combined], "combine_recv")?;
            out.require(Area::Output, driver.tokens(handle), row_bytes)
        })?;
        self.run(host, handle, Stage::Combining, waiter)?;
        let weighting = self.shape.config().weighting;
        self.call(host, |driver, _| driver.sum_replies(handle, out, weighting))?;
        phase(host, "combine recv", begin);
        Ok(())
    }

    /// Ends a round; see [`Driver::release`].
    pub fn release(&self, host: &mut impl EngineAccess, handle: RoundHandle) -> Result<(), Error> {
        self.call(host, |driver, requests| driver.release(handle, requests))
    }

    /// True if a round was released, or has failed on every rank.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn is_released(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
    ) -> Result<bool, Error> {
        self.call(host, |driver, _| Ok(driver.stage(handle) == Stage::Idle))
    }

    /// Number of tokens that this rank sent in a round.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn tokens(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
    ) -> Result<usize, Error> {
        self.call(host, |driver, _| Ok(driver.tokens(handle)))
    }

    /// Rows sent to other ranks, and pairs; see [`Driver::copies_sent`].
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn copies_sent(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
    ) -> Result<(usize, usize), Error> {
        self.call(host, |driver, _| Ok(driver.copies_sent(handle)))
    }

    /// Polls once, and advances all rounds.
    pub fn drive(&self, host: &mut impl EngineAccess) -> Result<(), Error> {
        let turned = self.driver.drive(host);
        Self::poison_on_violation(host, turned)?.ok_or(Error::Closed)
    }

    /// Waits, after all calls have ended, until no write from this rank is in flight.
    pub(crate) fn drain(
        &self,
        host: &mut impl EngineAccess,
        waiter: &mut WaitOptions<'_>,
    ) -> Result<(), Error> {
        let drained = |driver: &Driver| driver.is_drained().then_some(());
        let none_missing = |_: &Driver| Vec::new();
        let result = self.driver.wait_ended(host, "closing", waiter, drained, none_missing);
        Self::poison_on_violation(host, result)?.ok_or(Error::Closed)
    }

    fn call<T>(
        &self,
        host: &mut impl EngineAccess,
        work: impl FnOnce(&mut Driver, &mut Requests) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.driver.call(host, work)?.ok_or(Error::Closed)
    }

    /// Waits until the round has left `stage`.
    fn run(
        &self,
        host: &mut impl EngineAccess,
        handle: RoundHandle,
        stage: Stage,
        waiter: &mut WaitOptions<'_>,
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
        Self::poison_on_violation(host, result)?.ok_or(Error::Closed)
    }

    /// Poisons the group if a peer violated the protocol.
    fn poison_on_violation<T>(
        host: &mut impl EngineAccess,
        result: Result<T, Error>,
    ) -> Result<T, Error> {
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

fn phase(host: &mut impl EngineAccess, name: &str, begin: Time) {
    host.with(|engine| {
        if let Some(trace) = engine.trace() {
            trace.phase(PhaseRecord { name: name.to_owned(), begin, end: clock::now() });
        }
    });
}
