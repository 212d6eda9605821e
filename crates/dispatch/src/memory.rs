//! Slot memory: only this file in the crate accesses memory by address.
//!
//! Soundness rests on the protocol. An incoming slot is read from when its write arrives until the write that answers
//! it is submitted (queries; by the thread that runs the batch, too), or until the query is released (answers); no peer
//! writes it meanwhile. An outgoing slot is written while no write from it is in flight, by the node or by the one job
//! that has its query. By the front end's contract, query memory is unchanged from submission until it returns.

use weft_fabric::{Engine, Error, Memory, Placement, Region, RegionKey};

/// Equally long slots in one region.
#[derive(Clone, Debug)]
pub(crate) struct SlotMemory {
    region: Region,
    stride: u64,
}

impl SlotMemory {
    /// Allocates `slots` slots with `stride` bytes, on a NUMA node unless it has no memory or the system refuses to
    /// bind pages.
    pub fn allocate(
        engine: &mut Engine,
        slots: u32,
        stride: u64,
        numa_node: Option<u32>,
    ) -> weft_fabric::Result<SlotMemory> {
        let bytes = u64::from(slots).saturating_mul(stride).max(1);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(SlotMemory { region: engine.register(shared(length, numa_node)?)?, stride })
    }

    /// Slot region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Region key.
    pub fn key(&self) -> RegionKey {
        self.region.key()
    }

    /// Position in the region.
    pub fn offset(&self, slot: u32, offset: u64) -> u64 {
        u64::from(slot) * self.stride + offset
    }

    /// Bytes in a slot that no peer writes now.
    pub fn read(&self, slot: u32, offset: u64, length: u64) -> &[u8] {
        debug_assert!(offset + length <= self.stride);
        // SAFETY: stable by the protocol, see the module's page; `Memory::bytes` checks the range.
        unsafe { self.region.memory().bytes(self.offset(slot, offset) as usize, length as usize) }
    }

    /// Prefetches a slot's first `length` bytes.
    #[inline]
    pub fn prefetch(&self, slot: u32, length: u64) {
        self.region.memory().prefetch(self.offset(slot, 0), length.min(self.stride));
    }

    /// Bytes from `offset` in a slot over the next ones, all of which no peer writes now.
    pub fn read_across(&self, slot: u32, offset: u64, length: u64) -> &[u8] {
        // SAFETY: stable by the protocol, see the module's page; `Memory::bytes` checks the range.
        unsafe { self.region.memory().bytes(self.offset(slot, offset) as usize, length as usize) }
    }

    /// Bytes in the answer to a query in progress, for the job that has it.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the protocol")]
    pub fn write_in_job(&self, slot: u32, offset: u64, length: u64) -> &mut [u8] {
        debug_assert!(offset + length <= self.stride);
        let begin = self.offset(slot, offset) as usize;
        // SAFETY: a query is in one job, whose batch is borrowed exclusively; the node accesses these bytes after the
        // job has returned. `Memory::bytes_mut` checks the range.
        unsafe { self.region.memory().bytes_mut(begin, length as usize) }
    }

    /// Bytes from `offset` in the answer to a query in progress over the next slots, whose queries are in the same job.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the protocol")]
    pub fn write_across_in_job(&self, slot: u32, offset: u64, length: u64) -> &mut [u8] {
        let begin = self.offset(slot, offset) as usize;
        // SAFETY: as in `write_in_job`, for all these queries; what is between the outputs belongs to the same slots.
        // `Memory::bytes_mut` checks the range.
        unsafe { self.region.memory().bytes_mut(begin, length as usize) }
    }

    /// Bytes in an outgoing slot, which no write in flight reads.
    pub fn write(&mut self, slot: u32, offset: u64, length: u64) -> &mut [u8] {
        debug_assert!(offset + length <= self.stride);
        let begin = self.offset(slot, offset) as usize;
        // SAFETY: exclusive by `&mut self` and the protocol, see the module's page.
        unsafe { self.region.memory().bytes_mut(begin, length as usize) }
    }
}

/// Shared memory, on a NUMA node if it can be bound there.
fn shared(length: usize, numa_node: Option<u32>) -> weft_fabric::Result<Memory> {
    let placement = Placement { numa_node, huge_pages: false };
    Memory::shared_with(length, placement).or_else(|error| match error {
        Error::NumaBind { .. } | Error::NoNumaNode { .. } => {
            log::warn!("slots are on the NUMA node of their first use: {error}");
            Memory::shared(length)
        }
        error => Err(error),
    })
}

/// Query bytes in the caller's memory.
///
/// # Panics
/// If the range is outside, or the memory is on a device; `submit` has checked both.
pub(crate) fn query_bytes(memory: &Memory, offset: u64, length: u64) -> &[u8] {
    // SAFETY: by the front end's contract, unchanged until the query's memory returns.
    unsafe { memory.bytes(offset as usize, length as usize) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::shared;

    #[test]
    fn slots_are_anywhere_if_their_numa_node_has_no_memory() {
        assert_eq!(shared(100, Some(4000)).expect("memory").len(), 100);
    }
}
