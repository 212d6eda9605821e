//! Constructing an all-to-all on all ranks in a communicator, and ending it.

use crate::error::Error;
use crate::protocol::all_to_all::AllToAll;
use crate::protocol::driver::Driver;
use crate::protocol::outcome;
use crate::shape::Shape;
use crate::shape::config::Config;
use weft_fabric::{Communicator, Driver as _, Engine, Grant, Rank, Time, WaitOptions};

impl AllToAll {
    /// Creates an all-to-all over a communicator. Every rank calls this with the same configuration but for
    /// `rank`.
    ///
    /// # Errors
    /// Errors from [`crate::Shape::new`]; [`Error::Disagreement`] if the ranks' configurations differ, before
    /// any allocation; fabric errors; [`Error::PeerRefused`] if a peer could not allocate its part. All
    /// memory is released on every rank, unless grants were exchanged.
    pub fn connect(
        communicator: &Communicator,
        config: Config,
        deadline: Time,
    ) -> Result<AllToAll, Error> {
        let copies = vec![config.encode(); communicator.world_size() as usize];
        config.agree(&communicator.exchange(&copies, deadline)?)?;
        let made = Shape::new(config)
            .and_then(|shape| Driver::allocate(&mut communicator.engine(), &shape));
        let mut driver = made_by_all(communicator, made, deadline)?;
        let mut grants = Vec::new();
        for rank in (0..communicator.world_size()).map(Rank) {
            grants.push(if rank == communicator.rank() {
                Vec::new()
            } else {
                let grant = driver.grant(&mut communicator.engine(), rank);
                let grant = grant.map_err(|error| match error {
                    Error::Fabric(error) => communicator.attribute_error(error, deadline).into(),
                    error => error,
                });
                grant?.encode()
            });
        }
        for (number, bytes) in communicator.exchange(&grants, deadline)?.into_iter().enumerate() {
            let peer = Rank(number as u32);
            if peer == communicator.rank() {
                continue;
            }
            let grant = Grant::decode(&bytes).ok_or(weft_fabric::Error::Malformed {
                peer,
                what: "a grant",
                detail: format!("{} bytes", bytes.len()),
            })?;
            let counters = driver.counters();
            let remotes = communicator.retry_until(deadline, |engine, limit| {
                engine.import_within(peer, &grant, counters, limit)
            })?;
            driver.linked(&communicator.engine(), peer, remotes)?;
        }
        Ok(AllToAll::new(driver))
    }

    /// Releases all memory, and the mappings to peers' memory; every rank calls this. Writes in flight arrive
    /// first, also in rounds that were not released, and are dropped. Waits in other threads end with
    /// [`Error::Closed`]. A second call returns at once.
    ///
    /// # Errors
    /// [`weft_fabric::Error::Timeout`] if the other ranks do not call this. The memory then stays until the
    /// communicator is dropped, since peers may write to it. In a poisoned group this releases the memory
    /// without a wait.
    pub fn close(
        &self,
        communicator: &Communicator,
        waiter: &mut WaitOptions<'_>,
    ) -> Result<(), Error> {
        if !self.driver.end(&mut communicator.access()) {
            return Ok(());
        }
        let settled = self
            .drain(&mut communicator.access(), waiter)
            .and_then(|()| communicator.settle(&self.counters, waiter).map_err(Error::from));
        let Some(driver) = self.driver.take() else { return settled };
        if settled.is_ok() {
            driver.give_back(&mut communicator.engine());
            return Ok(());
        }
        if leave(driver, &mut communicator.engine()) { Ok(()) } else { settled }
    }

    /// [`AllToAll::close`] on only this rank. Peers may still write to its memory, which stays until the
    /// communicator is dropped, unless the group is poisoned.
    pub fn abandon(&self, communicator: &Communicator) {
        if self.driver.end(&mut communicator.access())
            && let Some(driver) = self.driver.take()
        {
            leave(driver, &mut communicator.engine());
        }
    }
}

/// Drops a driver whose memory peers may write to. Releases the memory if the group is poisoned, and returns
/// true then.
fn leave(driver: Driver, engine: &mut Engine) -> bool {
    let poisoned = engine.check().is_err();
    if poisoned {
        // Ends the links to the peers, if the poison was not polled yet.
        engine.progress();
        driver.give_back(engine);
    }
    poisoned
}

/// Returns the driver if every rank has allocated its own. Otherwise releases it: no peer has a grant yet.
fn made_by_all(
    communicator: &Communicator,
    made: Result<Driver, Error>,
    deadline: Time,
) -> Result<Driver, Error> {
    let outcomes = outcome::trade(communicator, &made, deadline);
    let driver = made?;
    let refusal = match outcomes {
        Ok(None) => return Ok(driver),
        Ok(Some((peer, detail))) => Error::PeerRefused { peer, detail },
        Err(error) => error,
    };
    driver.give_back(&mut communicator.engine());
    Err(refusal)
}
