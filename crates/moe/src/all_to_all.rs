//! Dispatch and combine as calls: thin loops over [`Driver`], at the edge.

use crate::driver::Driver;
use crate::error::Error;
use crate::exchange::{Input, Stage};
use crate::round::{Handle, Received};
use crate::rows::{Area, Rows, RowsMut};
use crate::shape::{Config, Shape};
use weft_fabric::trace::PhaseRecord;
use weft_fabric::{Cause, Engine, Host, Poison, Rank, Requests, Time, Waiter, clock, wait};

/// Expert-parallel all-to-all: tokens to the ranks of their experts, results back.
///
/// Every rank makes the same calls in the same order. A handle's four halves come in order;
/// with more than one set of buffers the next round may begin before the last is released.
pub struct AllToAll {
    driver: Driver,
    requests: Requests,
}

impl AllToAll {
    /// Allocates buffers and counters; see [`Driver::allocate`] for what follows.
    ///
    /// # Errors
    /// Those of [`Shape::new`], before anything is allocated, and those of the fabric.
    pub fn allocate(engine: &mut Engine, config: Config) -> Result<AllToAll, Error> {
        let shape = Shape::new(config)?;
        let driver = Driver::allocate(engine, &shape)?;
        let requests = driver.requests();
        Ok(AllToAll { driver, requests })
    }

    /// The state machine, to exchange grants and to look at.
    pub fn driver(&mut self) -> &mut Driver {
        &mut self.driver
    }

    pub(crate) fn into_driver(self) -> Driver {
        self.driver
    }

    /// What was agreed on.
    pub fn shape(&self) -> &Shape {
        self.driver.shape()
    }

    /// Starts a round, see [`Driver::begin`], and submits its first writes.
    ///
    /// # Errors
    /// Those of [`Driver::begin`], and those of the fabric. The round has not begun then.
    pub fn dispatch_send<I: Copy + Into<i64>>(
        &mut self,
        host: &mut impl Host,
        tokens: Input,
        ids: &[I],
        weights: Option<&[f32]>,
        scales: Option<&[u8]>,
    ) -> Result<Handle, Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        let handle = self.driver.begin(tokens, ids, weights, scales)?;
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
        &mut self,
        host: &mut impl Host,
        handle: Handle,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        if !self.driver.receive(handle)? {
            self.run(host, handle, Stage::Dispatching, waiter)?;
            self.driver.receive(handle)?;
        }
        phase(host, "dispatch recv", begin);
        Ok(())
    }

    /// The tokens of a round that was received; see [`Driver::received`].
    pub fn received(&self, handle: Handle) -> Result<Received<'_>, Error> {
        self.driver.received(handle)
    }

    /// For each expert of the group, the tokens that name it in this round.
    pub fn expert_load(&self, handle: Handle) -> Result<&[u64], Error> {
        self.driver.expert_load(handle)
    }

    /// Sends the experts' outputs back: `outputs` has a row for every position of the received plan, in
    /// the combine dtype. They may be changed as soon as this returns. The answers for one source
    /// leave while those for the next are computed.
    pub fn combine_send(
        &mut self,
        host: &mut impl Host,
        handle: Handle,
        outputs: Rows<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        host.with(|engine| engine.check())?;
        self.driver.expect(handle, &[Stage::Dispatched], "combine_send")?;
        let weighting = self.shape().config().weighting;
        loop {
            let more = self.driver.answer(handle, outputs, weighting)?;
            self.turn(host)?;
            if !more {
                break;
            }
        }
        phase(host, "combine send", begin);
        Ok(())
    }

    /// Waits for all answers and sums them into `out`, `[tokens, hidden]` in the output dtype.
    ///
    /// # Errors
    /// As [`AllToAll::dispatch_recv`].
    pub fn combine_recv(
        &mut self,
        host: &mut impl Host,
        handle: Handle,
        out: RowsMut<'_>,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let begin = clock::now();
        self.driver.expect(handle, &[Stage::Combining, Stage::Combined], "combine_recv")?;
        let row_bytes = self.shape().area_row_bytes(Area::Output);
        out.require(Area::Output, self.driver.tokens(handle), row_bytes)?;
        self.run(host, handle, Stage::Combining, waiter)?;
        let weighting = self.shape().config().weighting;
        self.driver.sum_answers(handle, out, weighting)?;
        phase(host, "combine recv", begin);
        Ok(())
    }

    /// Ends a round; see [`Driver::release`].
    pub fn release(&mut self, host: &mut impl Host, handle: Handle) -> Result<(), Error> {
        self.driver.release(handle, &mut self.requests)?;
        host.with(|engine| engine.submit(&mut self.requests))?;
        Ok(())
    }

    /// Whether a round has been released, or has failed on every rank.
    pub fn is_released(&self, handle: Handle) -> bool {
        self.driver.stage(handle) == Stage::Idle
    }

    /// The number of tokens that this rank sent in a round.
    pub fn tokens(&self, handle: Handle) -> usize {
        self.driver.tokens(handle)
    }

    /// Rows that left this rank, and what a copy per expert would have sent; see
    /// [`Driver::copies_sent`].
    pub fn copies_sent(&self, handle: Handle) -> (usize, usize) {
        self.driver.copies_sent(handle)
    }

    /// One look at what has arrived, and what follows from it.
    pub fn turn(&mut self, host: &mut impl Host) -> Result<(), Error> {
        let AllToAll { driver, requests } = self;
        let result = host.with(|engine| engine.turn(driver, requests));
        Self::blame(host, result)
    }

    /// Waits until no write of this rank is under way.
    pub(crate) fn drain(
        &mut self,
        host: &mut impl Host,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let AllToAll { driver, requests } = self;
        let drained = |driver: &Driver| driver.is_drained().then_some(());
        let nothing = |_: &Driver| Vec::new();
        let result = wait::drive(host, "closing", driver, requests, waiter, drained, nothing);
        Self::blame(host, result)
    }

    /// Waits until the round has left a stage.
    fn run(
        &mut self,
        host: &mut impl Host,
        handle: Handle,
        stage: Stage,
        waiter: &mut Waiter<'_>,
    ) -> Result<(), Error> {
        let AllToAll { driver, requests } = self;
        let result = wait::drive(
            host,
            "a round",
            driver,
            requests,
            waiter,
            |driver| (driver.stage(handle) != stage).then_some(()),
            |driver| driver.missing(handle).1,
        );
        let result = match result {
            Err(Error::Fabric(weft_fabric::Error::Timeout { waited, .. })) => {
                let (phase, missing) = driver.missing(handle);
                let rank = driver.shape().config().rank;
                Err(Error::Timeout { rank, phase, round: handle.round, waited, missing })
            }
            other => other,
        };
        Self::blame(host, result)
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
