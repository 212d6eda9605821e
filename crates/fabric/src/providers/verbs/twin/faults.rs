//! Injected faults and asynchronous events.

/// Fault in one work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinFault {
    /// It completes with an error.
    Fail {
        /// Libibverbs status.
        status: u32,
        /// Vendor code.
        vendor: u32,
    },
    /// The remote key names no region.
    WrongKey,
    /// The remote range lies outside the region.
    BeyondRange,
    /// It arrives, and the acknowledgement is lost.
    LoseAcknowledgement,
}

/// Asynchronous NIC event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinEvent {
    /// The device has failed, and all queue pairs with it.
    DeviceFatal,
    /// A port went down.
    PortDown(u8),
    /// A port is active again.
    PortUp(u8),
    /// A queue pair has failed, without a completion.
    PairFatal(u32),
}
