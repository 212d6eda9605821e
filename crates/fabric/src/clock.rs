//! The host's monotonic clock, read only at the edges.

use crate::types::Time;

/// Now, on the clock that every process of this host shares.
pub fn now() -> Time {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64)
}
