//! Outcome exchange: every rank gets the error from a rank whose step failed, so that none waits for it.

use crate::error::Error;
use weft_fabric::{Communicator, Time};

/// Longest error text that is sent to or taken from a peer, in characters.
const MAX_DETAIL: usize = 2000;

/// Sends every rank this rank's outcome. Returns the first rank that failed, with the error text.
///
/// # Errors
/// Errors from [`Communicator::exchange`].
pub(crate) fn trade<T>(
    communicator: &Communicator,
    outcome: &Result<T, Error>,
    deadline: Time,
) -> Result<Option<(u32, String)>, Error> {
    let mine = match outcome {
        Ok(_) => Vec::new(),
        Err(error) => {
            let text: String = error.to_string().chars().take(MAX_DETAIL).collect();
            text.into_bytes()
        }
    };
    let all = communicator.exchange(&vec![mine; communicator.world_size() as usize], deadline)?;
    let failed = (0..).zip(all).find(|(_, text)| !text.is_empty());
    Ok(failed.map(|(peer, text)| {
        (peer, String::from_utf8_lossy(&text).chars().take(MAX_DETAIL).collect())
    }))
}
