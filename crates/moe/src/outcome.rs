//! How a step of making an all-to-all went on every rank, so that none waits for one that failed.

use crate::error::Error;
use weft_fabric::{Communicator, Time};

/// Most characters of an error that the peers are sent, and that are taken of a peer's.
const MAX_DETAIL: usize = 2000;

/// Sends every rank how it went here. Returns the first rank where it failed, with the text of its error.
///
/// # Errors
/// Those of [`Communicator::trade`].
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
    let all = communicator.trade(&vec![mine; communicator.world_size() as usize], deadline)?;
    let failed = (0..).zip(all).find(|(_, text)| !text.is_empty());
    Ok(failed.map(|(peer, text)| {
        (peer, String::from_utf8_lossy(&text).chars().take(MAX_DETAIL).collect())
    }))
}
