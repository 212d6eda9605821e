//! Device: a way of reaching peers, shared by the groups of a process.
//!
//! A device owns the expensive resources that no single group owns: NICs, endpoints, protection domains,
//! listeners, copy engines. [`Device::open`] makes one group's [`Link`] on it. The devices of a process
//! come from [`crate::registry`].

use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;

/// A way of reaching peers, shared by the groups of a process.
pub trait Device: Send + Sync {
    /// Its provider.
    fn kind(&self) -> ProviderKind;

    /// One group's use of the device.
    fn open(&self, group: Membership) -> Result<Box<dyn Link>>;

    /// Names and values of the layers below the device, such as a library's version and NICs, for records.
    fn details(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// True if writes toward this process progress only while one of its threads polls, so that a
    /// communicator needs a progress thread.
    fn demands_thread(&self) -> bool {
        false
    }
}
