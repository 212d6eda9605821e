//! Barrier progress, which the engine keeps between two calls.

use crate::types::RequestId;

/// Barrier progress.
#[derive(Debug, Default)]
pub(crate) struct BarrierState {
    /// Peers signalled so far, in rank order.
    pub(crate) signalled: usize,
    /// Signals that have not left this process.
    pub(crate) signals_in_flight: Vec<RequestId>,
    /// A thread is inside the barrier.
    pub(crate) is_entered: bool,
}
