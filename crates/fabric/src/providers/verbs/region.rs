//! Region: memory of this engine and its registrations with each NIC.

use super::super::granted_regions::RemoteMemory;
use super::objects::{MemoryRegion, ProtectionDomain};
use super::sys;
use crate::memory::Memory;
use std::ffi::c_uint;
use std::sync::Arc;

pub struct RegisteredRegion {
    // Drop order: registrations before the memory.
    /// Source registrations by NIC; empty for an empty region.
    sources: Vec<MemoryRegion>,
    /// Destination registrations by NIC, made with the first grant.
    destinations: Vec<MemoryRegion>,
    /// Address of `memory`.
    address: u64,
    length: u64,
    memory: Arc<Memory>,
}

impl RegisteredRegion {
    /// Region whose memory, of the host, can be a source.
    pub fn new<'a>(
        memory: &Arc<Memory>,
        domains: impl Iterator<Item = &'a Arc<ProtectionDomain>>,
    ) -> Result<RegisteredRegion, String> {
        let sources = registrations(memory, domains, 0)?;
        let (address, length) = (memory.address(), memory.len() as u64);
        let (destinations, memory) = (Vec::new(), memory.clone());
        Ok(RegisteredRegion { sources, destinations, address, length, memory })
    }

    /// Registers it as a destination, with a key for each NIC. Writes into it may be reordered among each
    /// other where the platform allows it; an arrival stays behind them.
    pub fn targets<'a>(
        &mut self,
        domains: impl Iterator<Item = &'a Arc<ProtectionDomain>> + Clone,
    ) -> Result<Vec<RemoteMemory>, String> {
        let access = sys::IBV_ACCESS_LOCAL_WRITE
            | sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_RELAXED_ORDERING;
        if self.destinations.is_empty() {
            self.destinations = registrations(&self.memory, domains.clone(), access)?;
        }
        if self.length == 0 {
            return Ok(domains.map(|_| RemoteMemory { base: self.address, key: 0 }).collect());
        }
        let target =
            |it: &MemoryRegion| RemoteMemory { base: self.address, key: it.remote_key().into() };
        Ok(self.destinations.iter().map(target).collect())
    }

    /// Range of a slice for one NIC; `None` outside of the region.
    #[inline(always)]
    pub fn source(&self, nic: usize, offset: u64, length: u64) -> Option<sys::Sge> {
        let end = offset.checked_add(length)?;
        let key = self.sources.get(nic).map_or(0, MemoryRegion::local_key);
        let range = sys::Sge { addr: self.address + offset, length: length as u32, lkey: key };
        (end <= self.length).then_some(range)
    }
}

/// Registrations of non-empty memory with each NIC.
fn registrations<'a>(
    memory: &Memory,
    domains: impl Iterator<Item = &'a Arc<ProtectionDomain>>,
    access: c_uint,
) -> Result<Vec<MemoryRegion>, String> {
    if memory.is_empty() {
        return Ok(Vec::new());
    }
    // SAFETY: the region keeps the memory until its registrations are dropped.
    domains
        .map(|domain| unsafe { domain.register(memory.address(), memory.len(), access) })
        .collect()
}
