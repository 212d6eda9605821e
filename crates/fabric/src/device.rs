//! Device: a process-wide way of reaching peers, shared by groups.
//!
//! A device owns what is expensive and belongs to no group: NICs, endpoints, protection domains,
//! listeners, copy engines. [`Device::open`] makes one group's [`Link`] on it. The devices of a process
//! come from [`crate::registry`].

use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use std::sync::Arc;

/// A way of reaching peers, shared by the groups of a process.
pub trait Device: Send + Sync {
    /// Its provider.
    fn kind(&self) -> ProviderKind;

    /// One group's use of the device.
    fn open(&self, group: Membership) -> Result<Box<dyn Link>>;

    /// What stands below the device, as names and values for records: a library's version, NICs.
    fn details(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// Whether writes toward this process make no progress unless some thread of it polls, so that a
    /// communicator over this device needs a progress thread.
    fn demands_thread(&self) -> bool {
        false
    }
}

/// Devices of one engine, in no particular order.
pub type Devices = Vec<Arc<dyn Device>>;
