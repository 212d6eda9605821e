//! Heap: all ranks' parts, as mapped here.

use super::host_view::HostView;
use super::location::MemoryLocation;
use super::part::{self, HeapPart};
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::Memory;

/// All ranks' parts, as mapped here.
pub struct Heap {
    pub(super) rank: u32,
    bytes: u64,
    location: MemoryLocation,
    /// By rank, this rank's own among them.
    pub(super) parts: Vec<Arc<HeapPart>>,
    addresses: Vec<u64>,
    /// True if peers may have this rank's part open without keeping it alive.
    pub(super) leaks: bool,
    /// Digest over all ranks' offers; see [`Heap::identity`].
    pub(super) identity: u64,
    /// Made by the first [`Heap::memory`].
    memory: Mutex<Option<Arc<Memory>>>,
}

impl Heap {
    /// Heaps for a group whose ranks are all in this process, by rank, without an exchange.
    ///
    /// # Errors
    /// Errors as in [`HeapBuilder::allocate`](super::HeapBuilder::allocate); [`Error::Disagreement`] for locations with
    /// different kinds, [`Error::NoPeerAccess`] for two GPUs without peer access.
    pub fn local_group(locations: &[MemoryLocation], bytes: u64) -> Result<Vec<Heap>> {
        if bytes == 0 || locations.is_empty() {
            return Err(Error::Empty { bytes, ranks: locations.len() });
        }
        let parts =
            locations.iter().map(|location| Ok(Arc::new(HeapPart::allocate(location, bytes)?)));
        let parts: Vec<Arc<HeapPart>> = parts.collect::<Result<_>>()?;
        part::join(locations, &parts)?;
        let heaps = (0..).zip(locations);
        Ok(heaps
            .map(|(rank, location)| Heap::new(rank, bytes, *location, parts.clone(), false, 0))
            .collect())
    }

    pub(super) fn new(
        rank: u32,
        bytes: u64,
        location: MemoryLocation,
        parts: Vec<Arc<HeapPart>>,
        leaks: bool,
        identity: u64,
    ) -> Heap {
        let addresses = parts.iter().map(|part| part.address()).collect();
        let memory = Mutex::default();
        Heap { rank, bytes, location, parts, addresses, leaks, identity, memory }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// World size.
    pub fn size(&self) -> u32 {
        self.parts.len() as u32
    }

    /// Bytes per part, on each rank.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Memory location on this rank.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// Memory number, equal on all ranks in a communicator; heaps in other memory have other numbers. 0 in a
    /// single-process group.
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// Local address of a rank's part.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn address(&self, rank: u32) -> u64 {
        self.addresses[rank as usize]
    }

    /// Local addresses of all ranks' parts, by rank.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// Address of this rank's own part.
    pub fn own(&self) -> u64 {
        self.address(self.rank)
    }

    /// This rank's own part as memory for a region, the same on each call, with all its bytes. It keeps the part mapped.
    /// What peers write into it is for all readers, since they also load from it.
    ///
    /// # Errors
    /// CUDA's, if the driver cannot export the part.
    pub(crate) fn memory(&self) -> Result<Arc<Memory>> {
        let mut known = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &*known {
            return Ok(memory.clone());
        }
        let memory = self.parts[self.rank as usize].region_memory(&self.location)?;
        Ok(known.insert(memory).clone())
    }

    /// CPU view of a rank's part; `None` for a part on a GPU or an unknown rank.
    pub fn host_view(&self, rank: u32) -> Option<HostView<'_>> {
        let base = self.parts.get(rank as usize)?.host()?;
        // SAFETY: the part is mapped for as long as `self` holds it, and has at least `bytes`.
        Some(unsafe { HostView::new(base, self.bytes as usize) })
    }
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap")
            .field("rank", &self.rank)
            .field("size", &self.size())
            .field("bytes", &self.bytes)
            .field("location", &self.location)
            .finish()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if self.leaks
            && let Some(own) = self.parts.get(self.rank as usize)
        {
            log::warn!(
                "rank {} leaves {} bytes allocated on the GPU until the process ends: peers may \
                 still have them open (the heap was not closed by all ranks)",
                self.rank,
                own.len()
            );
            std::mem::forget(own.clone());
        }
    }
}
