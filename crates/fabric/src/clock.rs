//! The host's monotonic clock, read only at the edges.

use crate::types::Time;

/// Now, on the clock that every process of this host shares: that of [`weft_control::monotonic_ns`].
#[inline]
pub fn now() -> Time {
    Time(weft_control::monotonic_ns())
}
