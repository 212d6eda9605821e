//! Monotonic clock of the host, read at the edges only.

use crate::types::Time;

/// Current time on the clock that all processes of this host share ([`weft_control::monotonic_ns`]).
#[inline]
pub fn now() -> Time {
    Time(weft_control::monotonic_ns())
}
