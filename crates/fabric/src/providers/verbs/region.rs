//! Region: this engine's memory, registered with each NIC.

use super::super::gpu_memory::{GpuTarget, Gpus};
use super::super::granted_regions::RemoteMemory;
use super::config::OnDemandPaging;
use super::objects::{MemoryRegion, ProtectionDomain};
use super::{fork, sys};
use crate::memory::{Memory, MemoryKind};
use std::cell::Cell;
use std::ffi::c_uint;
use std::sync::Arc;

/// Source memory in a region, as registered with one NIC.
#[derive(Clone, Copy)]
pub struct Source {
    address: u64,
    length: u64,
    key: u32,
    /// False for device memory.
    pub is_host_memory: bool,
}

impl Source {
    /// Source without bytes.
    pub const EMPTY: Source = Source { address: 0, length: 0, key: 0, is_host_memory: true };

    /// Range for a slice; `None` outside the region.
    #[inline(always)]
    pub fn range(&self, offset: u64, length: u64) -> Option<sys::Sge> {
        let end = offset.checked_add(length)?;
        let range = sys::Sge {
            addr: self.address.wrapping_add(offset),
            length: length as u32,
            lkey: self.key,
        };
        (end <= self.length).then_some(range)
    }
}

pub struct RegisteredRegion {
    // Drop order: registrations before the memory.
    /// Source registrations by NIC; empty for an empty region, and where destination registrations
    /// replaced them.
    sources: Vec<MemoryRegion>,
    /// Destination registrations by NIC, made with the first grant.
    destinations: Vec<MemoryRegion>,
    /// A part may name the source registrations.
    has_been_source: Cell<bool>,
    /// `memory` address.
    address: u64,
    length: u64,
    /// Present for GPU memory.
    gpu: Option<GpuTarget>,
    /// The log has the warning that it could not be locked.
    has_warned: bool,
    memory: Arc<Memory>,
}

impl RegisteredRegion {
    /// Region whose memory can be a source.
    pub fn new<'a>(
        memory: &Arc<Memory>,
        domains: impl Iterator<Item = &'a Arc<ProtectionDomain>> + Clone,
        gpus: &dyn Gpus,
        paging: OnDemandPaging,
    ) -> Result<RegisteredRegion, String> {
        let mut has_warned = false;
        let sources = registrations(memory, domains, gpus, (0, paging), &mut has_warned)?;
        let (address, length) = (memory.address(), memory.len() as u64);
        let gpu = GpuTarget::of(memory);
        let (destinations, has_been_source) = (Vec::new(), Cell::new(false));
        let memory = memory.clone();
        Ok(RegisteredRegion {
            sources,
            destinations,
            has_been_source,
            address,
            length,
            gpu,
            has_warned,
            memory,
        })
    }

    /// Registers it as a destination, with a key for each NIC. Writes into it may be reordered among each
    /// other where the platform allows it; an arrival stays behind them, into a GPU with the flush in
    /// `gpu_memory.rs`.
    ///
    /// The memory is then registered once unless a part may name the source registrations: destination keys
    /// serve this process's work requests too.
    pub fn targets<'a>(
        &mut self,
        domains: impl Iterator<Item = &'a Arc<ProtectionDomain>> + Clone,
        gpus: &dyn Gpus,
        paging: OnDemandPaging,
    ) -> Result<Vec<RemoteMemory>, String> {
        let access = sys::IBV_ACCESS_LOCAL_WRITE
            | sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_RELAXED_ORDERING;
        if self.destinations.is_empty() {
            let (how, has_warned) = ((access, paging), &mut self.has_warned);
            self.destinations =
                registrations(&self.memory, domains.clone(), gpus, how, has_warned)?;
            if !self.has_been_source.get() {
                self.sources.clear();
            }
        }
        if self.length == 0 {
            return Ok(domains.map(|_| RemoteMemory { base: self.address, key: 0 }).collect());
        }
        let target =
            |it: &MemoryRegion| RemoteMemory { base: self.address, key: it.remote_key().into() };
        Ok(self.destinations.iter().map(target).collect())
    }

    /// The region as a destination, for GPU memory.
    pub fn gpu(&self) -> Option<GpuTarget> {
        self.gpu
    }

    /// Present if peers may write into GPU memory by this region.
    pub fn granted_gpu(&self) -> Option<GpuTarget> {
        self.gpu.filter(|_| !self.destinations.is_empty())
    }

    /// True if the CPU may copy from it.
    #[inline(always)]
    pub fn is_host_memory(&self) -> bool {
        self.gpu.is_none()
    }

    /// The region as a source for one NIC.
    #[inline(always)]
    pub fn source(&self, nic: usize) -> Source {
        self.has_been_source.set(true);
        let registered = self.sources.get(nic).or_else(|| self.destinations.get(nic));
        let key = registered.map_or(0, MemoryRegion::local_key);
        let (address, length, is_host_memory) = (self.address, self.length, self.is_host_memory());
        Source { address, length, key, is_host_memory }
    }
}

/// Registers non-empty memory with each NIC. The first NIC that pages it because it cannot be locked is
/// logged.
fn registrations<'a>(
    memory: &Memory,
    domains: impl Iterator<Item = &'a Arc<ProtectionDomain>> + Clone,
    gpus: &dyn Gpus,
    (access, paging): (c_uint, OnDemandPaging),
    has_warned: &mut bool,
) -> Result<Vec<MemoryRegion>, String> {
    if memory.is_empty() {
        return Ok(Vec::new());
    }
    let address = memory.address();
    if memory.kind() == MemoryKind::Host {
        let of_host = |domain: &Arc<ProtectionDomain>| {
            // SAFETY: the region keeps the memory until the registrations are dropped.
            let registered = unsafe { domain.register_host(address, memory.len(), access, paging) };
            let (region, refused) = registered?;
            if let Some(refused) = refused
                && !std::mem::replace(has_warned, true)
            {
                let bytes = memory.len();
                log::warn!("a region of {bytes} bytes is paged on demand: locking it: {refused}");
            }
            Ok::<_, String>(region)
        };
        let registered: Vec<MemoryRegion> = domains.map(of_host).collect::<Result<_, _>>()?;
        if let Some(first) = registered.first() {
            fork::keep_in_children(first.library().copies_at_fork, address, memory.len());
        }
        return Ok(registered);
    }
    // SAFETY: as above.
    let of_address =
        |domain: &Arc<ProtectionDomain>| unsafe { domain.register(address, memory.len(), access) };
    let by_dma_buf = gpus.export(memory).and_then(|exported| {
        let domains = domains.clone();
        // SAFETY: as above.
        domains.map(|it| unsafe { it.register_dma_buf(&exported, address, access) }).collect()
    });
    match by_dma_buf {
        Err(why) if gpus.has_peer_memory() => {
            let by_address: Result<_, String> = domains.map(of_address).collect();
            by_address.map_err(|other| format!("{why}; by its address: {other}"))
        }
        registered => registered,
    }
}
