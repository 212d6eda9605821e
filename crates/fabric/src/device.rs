//! Device: a way to reach peers, shared by all groups in a process.
//!
//! A device owns the expensive resources that no single group owns: NICs, endpoints, protection domains,
//! listeners, copy engines. [`Device::open`] makes one group's [`Link`] on it. [`crate::registry`] opens
//! a process's devices.

use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;

/// Way to reach peers, shared by all groups in a process.
pub trait Device: Send + Sync {
    /// Provider kind.
    fn kind(&self) -> ProviderKind;

    /// Opens one group's link on the device.
    fn open(&self, group: Membership) -> Result<Box<dyn Link>>;

    /// Names and values that describe the layers below the device, such as a library version and NICs,
    /// for records.
    fn details(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// True if writes toward this process progress only while a thread in it polls, so that a
    /// communicator needs a progress thread.
    fn demands_thread(&self) -> bool {
        false
    }
}
