//! Monotonic host clock, read at the edges only.

use crate::types::Time;

/// Current time on the clock that all processes on this host share ([`weft_control::monotonic_ns`]).
#[inline]
pub fn now() -> Time {
    Time(weft_control::monotonic_ns())
}
