//! Connects the engine to all ranks in a formed group, and finds out why that failed.

use crate::clock;
use crate::descriptor::EngineAddress;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::processors::Processors;
use crate::types::Time;
use std::time::Duration;
use weft_control::{Cause, Control, Operation, Poison, Rank, limits};

/// Time that a link's error waits for the control plane's report on the peer. A process that dies closes
/// all sockets at once, and the link may detect it first.
pub(super) const LOSS_REPORT_TIME: Duration = Duration::from_secs(2);

/// Poll interval for that report.
pub(super) const LOSS_REPORT_POLL: Duration = Duration::from_millis(5);

/// True if this process or host has run out of a resource.
pub(super) fn is_exhausted(error: &Error) -> bool {
    match error {
        Error::System { source, .. } | Error::Allocate { source, .. } => {
            limits::is_exhausted(source)
        }
        Error::Control(weft_control::Error::Ports { .. }) => true,
        _ => false,
    }
}

/// Reports to the other ranks why this one cannot join, if it lacks a resource: otherwise they would only
/// see it depart.
pub(super) fn report(control: &Control, error: Error) -> Error {
    if is_exhausted(&error) {
        let (kind, rank) = (Cause::User, Some(control.rank()));
        control.poison(&Poison { kind, rank, detail: format!("it cannot join: {error}") });
    }
    error
}

/// The control plane's error, if it reports a lost or departed rank within [`LOSS_REPORT_TIME`]; otherwise the
/// link's, without delay after the caller's deadline.
pub(super) fn attribute_error(
    check: impl Fn() -> Result<()>,
    error: Error,
    deadline: Time,
) -> Error {
    if !matches!(error, Error::Connect { .. } | Error::System { .. }) || is_exhausted(&error) {
        return error;
    }
    let now = clock::now();
    let until = if now < deadline { now.after(LOSS_REPORT_TIME) } else { now };
    loop {
        if let Err(cause) = check() {
            return cause;
        }
        if clock::now() >= until {
            return error;
        }
        std::thread::sleep(LOSS_REPORT_POLL);
    }
}

/// Exchanges addresses and introductions, and connects the engine; returns all ranks' addresses.
pub(super) fn connect(
    control: &Control,
    engine: &mut Engine,
    deadline: Time,
) -> Result<Vec<EngineAddress>> {
    let addresses = gather_addresses(control, engine, deadline)?;
    let introductions = engine.introduce(&addresses)?;
    let timeout = deadline.since(clock::now());
    let messages = control.exchange_as(Operation::Introductions, &introductions, timeout)?;
    let mut give_up = || Ok(control.check()?);
    let mut limit = WaitLimit { deadline, give_up: &mut give_up };
    engine.connect(&addresses, &messages, &mut limit)?;
    Ok(addresses)
}

pub(super) fn gather_addresses(
    control: &Control,
    engine: &Engine,
    deadline: Time,
) -> Result<Vec<EngineAddress>> {
    let timeout = deadline.since(clock::now());
    let address = EngineAddress { processors: Processors::of_thread(), ..engine.address() };
    let gathered = control.all_gather_as(Operation::Addresses, &address.encode(), timeout)?;
    let decoded = gathered.iter().enumerate().map(|(number, bytes)| {
        EngineAddress::decode(bytes).map_err(|detail| Error::Malformed {
            peer: Rank(number as u32),
            what: "an address",
            detail,
        })
    });
    decoded.collect()
}
