//! Message construction on all ranks in a communicator, and the close.

use super::calls::Messages;
use super::config::MessagesConfig;
use super::driver::Driver;
use crate::run_error::RunError;
use std::sync::atomic::Ordering;
use weft_fabric::bytes::Reader;
use weft_fabric::{Communicator, Driver as _, Engine, Grant, Rank, Time, WaitOptions};

/// Maximum error text that is sent, or accepted from a peer, in characters.
const MAX_DETAIL: usize = 2000;

impl Messages {
    /// Creates messages over a communicator. Collective; `slots` and `slot_bytes` are equal on all ranks.
    ///
    /// # Errors
    /// [`RunError::Invalid`] and [`RunError::TooLarge`] for the configuration; [`RunError::Disagreement`];
    /// [`RunError::PeerFailed`] if a peer could not allocate the rings; fabric errors. All memory is released on every
    /// rank, unless grants were exchanged.
    pub fn connect(
        communicator: &Communicator,
        config: MessagesConfig,
        deadline: Time,
    ) -> Result<Messages, RunError> {
        let made = Driver::allocate(&mut communicator.engine(), &config);
        let mut driver = made_by_all(communicator, &config, made, deadline)?;
        let grants = grants(communicator, &driver, deadline)?;
        for (peer, bytes) in (0..).map(Rank).zip(communicator.exchange(&grants, deadline)?) {
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
            driver.linked(&communicator.engine(), peer, &remotes)?;
        }
        Ok(Messages::new(driver))
    }

    /// Releases all memory, and the peer memory mappings; every rank calls this. Operations under way are dropped;
    /// waits in other threads end with [`RunError::Closed`]. A second call returns at once.
    ///
    /// # Errors
    /// [`weft_fabric::Error::Timeout`] if the other ranks do not call this. The memory then stays until the
    /// communicator is dropped, since peers may write to it. In a poisoned group this releases the memory
    /// without a wait.
    pub fn close(
        &self,
        communicator: &Communicator,
        options: &mut WaitOptions<'_>,
    ) -> Result<(), RunError> {
        self.stopped.store(true, Ordering::Release);
        let mut access = communicator.access();
        if !self.driver.end(&mut access) {
            return Ok(());
        }
        let drained = |driver: &Driver| driver.is_drained().then_some(());
        let none_missing = |_: &Driver| Vec::new();
        let result = self.driver.wait_ended(&mut access, "closing", options, drained, none_missing);
        let settled = self
            .concluded(&mut access, result)
            .and_then(|()| communicator.settle(&self.counters, options).map_err(RunError::from));
        drop(access);
        let Some(driver) = self.driver.take() else { return settled };
        if settled.is_ok() {
            driver.give_back(&mut communicator.engine());
            return Ok(());
        }
        if leave(driver, &mut communicator.engine()) { Ok(()) } else { settled }
    }

    /// Same as [`Messages::close`], by this rank only. Peers may still write to the memory, which stays until the
    /// communicator is dropped, unless the group is poisoned.
    pub fn abandon(&self, communicator: &Communicator) {
        self.stopped.store(true, Ordering::Release);
        if self.driver.end(&mut communicator.access())
            && let Some(driver) = self.driver.take()
        {
            leave(driver, &mut communicator.engine());
        }
    }
}

/// Encoded grants by rank; empty for this rank.
fn grants(
    communicator: &Communicator,
    driver: &Driver,
    deadline: Time,
) -> Result<Vec<Vec<u8>>, RunError> {
    let toward = |rank: Rank| {
        if rank == communicator.rank() {
            return Ok(Vec::new());
        }
        let grant = driver.grant(&mut communicator.engine(), rank);
        let grant = grant.map_err(|error| match error {
            RunError::Fabric(error) => communicator.attribute_error(error, deadline).into(),
            error => error,
        });
        Ok(grant?.encode())
    };
    (0..communicator.world_size()).map(Rank).map(toward).collect()
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

/// Returns the driver if every rank has allocated one with an equal configuration. Otherwise releases it: no peer has a
/// grant for it yet.
fn made_by_all(
    communicator: &Communicator,
    config: &MessagesConfig,
    made: Result<Driver, RunError>,
    deadline: Time,
) -> Result<Driver, RunError> {
    let offer = encode_offer(config, &made);
    let offers = communicator.exchange(&vec![offer; communicator.world_size() as usize], deadline);
    let driver = made?;
    let agreed = offers.map_err(RunError::from).and_then(|offers| {
        (0..).map(Rank).zip(&offers).try_for_each(|(peer, offer)| check_offer(config, peer, offer))
    });
    match agreed {
        Ok(()) => Ok(driver),
        Err(error) => {
            driver.give_back(&mut communicator.engine());
            Err(error)
        }
    }
}

/// A rank's offer: slots (4 bytes) and slot bytes (8 bytes), then the error text if it failed.
fn encode_offer(config: &MessagesConfig, made: &Result<Driver, RunError>) -> Vec<u8> {
    let mut bytes = config.slots.to_le_bytes().to_vec();
    bytes.extend(config.slot_bytes.to_le_bytes());
    if let Err(error) = made {
        bytes.extend(error.to_string().chars().take(MAX_DETAIL).collect::<String>().into_bytes());
    }
    bytes
}

/// Rejects an offer from a peer that failed, or has another configuration.
fn check_offer(config: &MessagesConfig, peer: Rank, offer: &[u8]) -> Result<(), RunError> {
    let mut reader = Reader::new(offer);
    let (Some(slots), Some(slot_bytes)) = (reader.u32(), reader.u64()) else {
        let detail = format!("{} bytes", offer.len());
        let what = "a message configuration";
        return Err(weft_fabric::Error::Malformed { peer, what, detail }.into());
    };
    if offer.len() > 12 {
        let detail = String::from_utf8_lossy(&offer[12..]).chars().take(MAX_DETAIL).collect();
        return Err(RunError::PeerFailed { peer, detail });
    }
    let pairs = [
        ("slots", u64::from(config.slots), u64::from(slots)),
        ("slot_bytes", config.slot_bytes, slot_bytes),
    ];
    for (what, ours, theirs) in pairs {
        if ours != theirs {
            return Err(RunError::Disagreement { peer, what, ours, theirs });
        }
    }
    Ok(())
}
