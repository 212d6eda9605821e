//! The connecting end.

use super::PairConfig;
use super::forming::{Forming, Introduction, decode_offer, left, name_descriptors};
use crate::clock;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::types::{ProviderKind, Time};
use std::time::Duration;
use weft_control::Operation;
use weft_control::pair::{CONNECTOR, LISTENER, PairControl, dial, dial_stream};

/// Forms a pair with the listener at the configuration's address; this end is rank 1.
///
/// # Errors
/// [`Error::Control`]: the listener is not there in time, holds another secret or speaks another version;
/// an address off loopback without a secret; no descriptor left. [`Error::NoRoute`] and
/// [`Error::Connect`] if no provider reaches it.
pub fn connect(config: &PairConfig, deadline: Time) -> Result<Communicator> {
    loop {
        match attempt(config, deadline).map_err(name_descriptors) {
            // A listener that had no room for one more stranger closed the connection.
            Err(error) if is_closed(&error) && clock::now().after(PAUSE) < deadline => {
                log::debug!("connecting again to {}: {error}", config.settings.address);
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

/// Pause before a listener that closed the connection is dialled again.
const PAUSE: Duration = Duration::from_millis(20);

fn is_closed(error: &Error) -> bool {
    use weft_control::{Cause, Error as Control};
    matches!(error, Error::Control(Control::Poisoned(poison)) if poison.kind == Cause::Lost)
}

fn attempt(config: &PairConfig, deadline: Time) -> Result<Communicator> {
    let mut forming = Forming::new(CONNECTOR, config)?;
    let control = dial(&config.settings, &forming.details(), left(deadline))?;
    match answer(&mut forming, &control, config, deadline) {
        Ok(offer) => forming.finish(&offer, control, config, left(deadline)),
        Err(error) => {
            // The listener finds the end of the connection.
            control.abandon();
            Err(error)
        }
    }
}

/// Takes the listener's offer and answers it; returns the introduction within.
fn answer(
    forming: &mut Forming,
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
    let introduction = forming.introduce(details)?;
    if forming.is_over_tcp() {
        let token = Introduction::decode(theirs).and_then(|theirs| theirs.token());
        let token = token.ok_or_else(malformed)?;
        let refused =
            |detail: String| Error::Connect { peer: LISTENER, provider: ProviderKind::Tcp, detail };
        let address = control.addresses().1;
        let address = address.ok_or_else(|| refused("the connection has ended".into()))?;
        let interrupt = config.settings.interrupt.clone();
        let stream = dial_stream(address, &token, left(deadline), interrupt)?
            .map_err(|source| refused(format!("{address}: {source}")))?;
        forming.adoption().put(stream);
    }
    control.begin(Operation::Introductions, &introduction.encode())?;
    // The offer is the listener's part: it has come.
    control.finish()?;
    Ok(theirs.to_vec())
}
