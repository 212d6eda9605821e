//! Making an all-to-all on all ranks of a communicator.

use crate::all_to_all::AllToAll;
use crate::driver::Driver;
use crate::error::Error;
use crate::outcome;
use crate::shape::{Config, Shape};
use weft_fabric::descriptor::Grant;
use weft_fabric::{Communicator, Driver as _, Engine, Rank, Time, Waiter};

impl AllToAll {
    /// Makes an all-to-all over a communicator; every rank calls this with the same configuration but
    /// for `rank`.
    ///
    /// # Errors
    /// Those of [`crate::Shape::new`]; [`Error::Disagreement`] if the ranks' configurations differ,
    /// before anything is allocated; those of the fabric; [`Error::PeerRefused`] if a peer could not
    /// allocate its part. Nothing stays allocated, here or there, unless grants were exchanged.
    pub fn connect(
        communicator: &Communicator,
        config: Config,
        deadline: Time,
    ) -> Result<AllToAll, Error> {
        let copies = vec![config.encode(); communicator.world_size() as usize];
        config.agree(&communicator.trade(&copies, deadline)?)?;
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
                    Error::Fabric(error) => communicator.verdict(error, deadline).into(),
                    error => error,
                });
                grant?.encode()
            });
        }
        for (number, bytes) in communicator.trade(&grants, deadline)?.into_iter().enumerate() {
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
            let remotes = communicator.meet(deadline, |engine, limit| {
                engine.import_within(peer, &grant, counters, limit)
            })?;
            driver.linked(&communicator.engine(), peer, remotes)?;
        }
        Ok(AllToAll::new(driver))
    }

    /// Gives all memory back, here and what is mapped of the peers'; every rank calls this. What is
    /// under way arrives first, also of rounds that were not released, and is dropped. Waits of other
    /// threads end with [`Error::Closed`]. A second call returns at once.
    ///
    /// # Errors
    /// [`weft_fabric::Error::Timeout`] if the other ranks do not come. The memory then stays until the
    /// communicator is dropped, since peers may write to it. In a poisoned group nobody can, and
    /// nothing is waited for.
    pub fn close(&self, communicator: &Communicator, waiter: &mut Waiter<'_>) -> Result<(), Error> {
        if !self.driver.end(&mut communicator.host()) {
            return Ok(());
        }
        let settled = self
            .drain(&mut communicator.host(), waiter)
            .and_then(|()| communicator.settle(&self.counters, waiter).map_err(Error::from));
        let Some(driver) = self.driver.take() else { return settled };
        if settled.is_ok() {
            driver.give_back(&mut communicator.engine());
            return Ok(());
        }
        if leave(driver, &mut communicator.engine()) { Ok(()) } else { settled }
    }

    /// As [`AllToAll::close`], by this rank alone. Peers may go on writing here, so the memory stays
    /// until the communicator is dropped, unless the group is poisoned.
    pub fn abandon(&self, communicator: &Communicator) {
        if self.driver.end(&mut communicator.host())
            && let Some(driver) = self.driver.take()
        {
            leave(driver, &mut communicator.engine());
        }
    }
}

/// Drops a driver whose memory peers may write to, and gives that back if the group is poisoned; whether it
/// is.
fn leave(driver: Driver, engine: &mut Engine) -> bool {
    let poisoned = engine.check().is_err();
    if poisoned {
        // Cuts the peers off, if the poison was not polled yet.
        engine.progress();
        driver.give_back(engine);
    }
    poisoned
}

/// A driver if every rank has allocated its own. Otherwise it is given back: no peer was granted any
/// of it yet.
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
