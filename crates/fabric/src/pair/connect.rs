//! Connecting end of a pair.

use super::config::PairConfig;
use super::pending_pair::{
    PairIntroduction, PendingPair, decode_offer, left, name_descriptors, providers_of,
};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::providers::NicAddress;
use crate::types::{ProviderKind, Time};
use crate::{clock, registry};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use weft_control::Operation;
use weft_control::pair::{CONNECTOR, LISTENER, PairControl, dial, dial_stream};

/// Forms a pair with the listener at the configuration's address; this end is rank 1.
///
/// # Errors
/// [`Error::Control`]: no listener before the deadline, another secret, or another version;
/// an address off loopback without a secret; no descriptor left. [`Error::NoRoute`] and [`Error::Connect`]
/// if no provider reaches the listener.
pub fn connect(config: &PairConfig, deadline: Time) -> Result<Communicator> {
    registry::check_variables(&config.ofi, &None)?;
    loop {
        match attempt(config, deadline).map_err(name_descriptors) {
            // The listener evicted this connection among unproven ones.
            Err(error) if is_closed(&error) && clock::now().after(PAUSE) < deadline => {
                log::debug!("connecting again to {}: {error}", config.settings.address);
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

/// Pause before a redial.
const PAUSE: Duration = Duration::from_millis(20);

fn is_closed(error: &Error) -> bool {
    use weft_control::{Cause, Error as Control};
    matches!(error, Error::Control(Control::Poisoned(poison)) if poison.kind == Cause::Lost)
}

fn attempt(config: &PairConfig, deadline: Time) -> Result<Communicator> {
    let local = match providers_of(config)?.contains(&ProviderKind::Ofi) {
        true => config.settings.local_address(left(deadline))?,
        false => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let nic = config.settings.source.map(NicAddress::of_source);
    let mut pending = PendingPair::new(CONNECTOR, config, local, nic)?;
    let control = dial(&config.settings, &pending.details(), left(deadline))?;
    match reply(&mut pending, &control, config, deadline) {
        Ok(offer) => pending.finish(&offer, control, config, left(deadline)),
        Err(error) => {
            // The listener detects that the connection has ended.
            control.abandon();
            Err(error)
        }
    }
}

/// Receives the listener's offer and replies to it; returns the introduction in the offer.
fn reply(
    pending: &mut PendingPair,
    control: &PairControl,
    config: &PairConfig,
    deadline: Time,
) -> Result<Vec<u8>> {
    let offer = control.peek(Operation::Introductions, left(deadline))?;
    let malformed = || Error::Malformed {
        peer: LISTENER,
        what: "its offer",
        detail: format!("{} bytes", offer.len()),
    };
    let (details, theirs) = decode_offer(&offer).ok_or_else(malformed)?;
    let introduction = pending.introduce(details)?;
    if pending.is_over_tcp() {
        pending.check_tls(&config.settings.address)?;
        let token = PairIntroduction::decode(theirs).and_then(|theirs| theirs.token());
        let token = token.ok_or_else(malformed)?;
        let refused =
            |detail: String| Error::Connect { peer: LISTENER, provider: ProviderKind::Tcp, detail };
        let address = control.addresses().1;
        let address = address.ok_or_else(|| refused("the connection has ended".into()))?;
        let stream = dial_stream(&config.settings, address, &token, left(deadline))?
            .map_err(|source| refused(format!("{address}: {source}")))?;
        pending.adoption().put(stream);
    }
    control.begin(Operation::Introductions, &introduction.encode())?;
    // The offer is the listener's half in the exchange and has arrived.
    control.finish()?;
    Ok(theirs.to_vec())
}
