//! Wait options.

use crate::types::Time;
use std::time::Duration;

/// Wait options.
pub struct WaitOptions<'a> {
    /// Wait deadline.
    pub deadline: Time,
    /// Time to spin before parking (spin deadline).
    pub spin: Duration,
    /// Interruption check, for example for a pending Ctrl-C, called at most 50 times a second without a
    /// lock, also while the wait spins or has events; `true` ends the wait with
    /// [`crate::Error::Interrupted`].
    pub interrupted: &'a mut dyn FnMut() -> bool,
}
