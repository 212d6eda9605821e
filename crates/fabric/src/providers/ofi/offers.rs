//! Libfabric offers on this host, for `weft doctor`.

use super::config::device_capability;
use super::info;
use super::info::{Info, OfiProvider};
use super::library::Library;
use crate::error::Result;
use std::net::IpAddr;

/// A libfabric provider's offer on this host, for `weft doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Domain: a NIC.
    pub domain: String,
    /// Fabric: a network.
    pub fabric: String,
    /// Maximum bytes in one part.
    pub max_part_bytes: u64,
    /// Maximum ranges in one part.
    pub max_ranges: u32,
    /// True if sources must be registered.
    pub registers_sources: bool,
    /// True if each arrival consumes a posted receive.
    pub consumes_receives: bool,
    /// True if writes progress without calls into the library.
    pub progresses_by_itself: bool,
    /// True if CUDA device memory can be registered.
    pub reaches_devices: bool,
}

/// Path and version (major, minor) of this process's libfabric.
///
/// # Errors
/// Reason why it is missing.
pub fn library() -> Result<(std::path::PathBuf, (u32, u32)), String> {
    let library = Library::get()?;
    Ok((library.path().clone(), library.version()))
}

/// Providers in this process's libfabric, with or without NICs.
///
/// # Errors
/// Reason why the library is missing.
pub fn built_in() -> Result<Vec<String>, String> {
    info::built_in()
}

/// A provider's offers on this host; `bind`: address that endpoints would listen on.
///
/// # Errors
/// Reason why the provider cannot be used.
pub fn offers(provider: &OfiProvider, bind: IpAddr) -> Result<Vec<Offer>, String> {
    let found = info::offers(provider, bind, device_capability())?;
    let offer = |info: &Info| Offer {
        domain: info.domain_name(),
        fabric: info.fabric_name(),
        max_part_bytes: info.max_message(),
        max_ranges: info.max_ranges(),
        registers_sources: info.registers_sources(),
        consumes_receives: info.consumes_receives(),
        progresses_by_itself: info.progresses_by_itself(),
        reaches_devices: info.reaches_devices(),
    };
    Ok(found.iter().map(offer).collect())
}
