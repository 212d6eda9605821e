//! Heap segments in a domain, their blocks, and the exchange of freed blocks.

use super::allocator::{Allocation, Allocator};
use crate::error::{Error, Result};
use crate::heap::{Heap, HostView};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use weft_control::Rank;
use weft_fabric::Memory;

/// Segment granularity: the GPU page size.
pub const SEGMENT_BYTES: u64 = 2 << 20;

/// Serial numbers of blocks that this rank has dropped, until all ranks have.
type Freed = Arc<Mutex<BTreeSet<u64>>>;

/// Symmetric heap block: bytes at the same segment and offset on all ranks.
///
/// It stays mapped until it is dropped, even after the domain. Drop it only after this rank's kernels that use it have
/// ended.
pub struct Block {
    // Dropped before `release` records the serial.
    heap: Arc<Heap>,
    allocation: Allocation,
    release: Release,
}

struct Release {
    serial: Option<u64>,
    freed: Freed,
}

impl Drop for Release {
    fn drop(&mut self) {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner).extend(self.serial);
    }
}

impl Block {
    /// Length in bytes, at least the requested one.
    pub fn bytes(&self) -> u64 {
        self.allocation.bytes
    }

    /// First byte's segment offset; equal on all ranks.
    pub fn offset(&self) -> u64 {
        self.allocation.offset
    }

    /// Segment number; equal on all ranks.
    pub fn segment(&self) -> u32 {
        self.allocation.segment
    }

    /// Local addresses of all ranks' parts, by rank.
    pub fn addresses(&self) -> Vec<u64> {
        self.heap.addresses().iter().map(|base| base + self.allocation.offset).collect()
    }

    /// Address of this rank's own part.
    pub fn own(&self) -> u64 {
        self.heap.own() + self.allocation.offset
    }

    /// This rank's part of the segment as memory for a region, in which the block starts at [`Block::offset`]. All
    /// blocks in a segment return the same memory, so that NICs register it once. It keeps the segment mapped, but not
    /// the block: hold the block while peers may write to it.
    ///
    /// ```no_run
    /// # fn example(block: weft_gpu::domain::Block, communicator: weft_fabric::Communicator)
    /// #     -> Result<(), Box<dyn std::error::Error>> {
    /// let region = communicator.engine().register(block.memory()?)?;
    /// let range = block.offset()..block.offset() + block.bytes();
    /// communicator.engine().grant(weft_fabric::Rank(1), &[(&region, range)], &[])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// CUDA's, if the driver cannot export the segment.
    pub fn memory(&self) -> Result<Arc<Memory>> {
        self.heap.memory()
    }

    /// CPU view of a rank's segment, in which the block starts at [`Block::offset`]; `None` on a GPU.
    pub fn host_view(&self, rank: u32) -> Option<HostView<'_>> {
        self.heap.host_view(rank)
    }

    /// Keeps the bytes until the domain ends, since a captured graph may be replayed.
    pub fn keep(mut self) {
        self.release.serial = None;
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.allocation)
    }
}

/// Memory that all ranks have mapped; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryNumber {
    /// Symmetric heap segment.
    Segment(u32),
    /// User memory, by [`Heap::identity`].
    Registration(u64),
}

/// Place in memory that all ranks have mapped, with the first byte's address at each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymmetricPlace {
    /// Segment or registration.
    pub memory: MemoryNumber,
    /// Offset there.
    pub offset: u64,
    /// Local addresses, by rank.
    pub addresses: Vec<u64>,
}

impl SymmetricPlace {
    /// First rank whose address has another remainder by `alignment` than `rank`'s address. Mappings consist of whole
    /// pages, so that all ranks find the same remainders.
    pub fn differs(&self, rank: u32, alignment: u64) -> Option<(Rank, u64)> {
        let own = self.addresses.get(rank as usize)? % alignment;
        let remainders = self.addresses.iter().map(|address| address % alignment);
        (0..).map(Rank).zip(remainders).find(|(_, theirs)| *theirs != own)
    }
}

/// A segment as mapped at this rank.
struct Mapping {
    number: u32,
    own: u64,
    bytes: u64,
    /// By rank.
    addresses: Vec<u64>,
}

/// Segment addresses, which are read while a collective call changes the segments.
#[derive(Clone, Default)]
pub(super) struct Mappings(Arc<RwLock<Vec<Mapping>>>);

impl Mappings {
    /// Symmetric place for `bytes` bytes that are at `address` on this rank, if they are in a segment.
    pub fn place(&self, address: u64, bytes: u64) -> Option<SymmetricPlace> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let inside = |segment: &&Mapping| {
            let at = address.wrapping_sub(segment.own);
            at < segment.bytes && bytes <= segment.bytes - at
        };
        let segment = all.iter().find(inside)?;
        let offset = address - segment.own;
        let addresses = segment.addresses.iter().map(|base| base + offset).collect();
        Some(SymmetricPlace { memory: MemoryNumber::Segment(segment.number), offset, addresses })
    }

    fn add(&self, number: usize, heap: &Heap) {
        let (own, bytes, addresses) = (heap.own(), heap.bytes(), heap.addresses().to_vec());
        self.write().push(Mapping { number: number as u32, own, bytes, addresses });
    }

    fn remove(&self, heaps: &[Heap]) {
        self.write().retain(|segment| heaps.iter().all(|heap| heap.own() != segment.own));
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Vec<Mapping>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Segments, as mapped at this rank.
pub(super) struct Segments {
    allocator: Allocator,
    segments: Vec<Option<Arc<Heap>>>,
    mappings: Mappings,
    freed: Freed,
    /// Live block count, without the table.
    blocks: u64,
}

impl Segments {
    /// From the first segment, whose first `table` bytes are the table.
    pub fn new(heap: Heap, table: u64) -> Segments {
        let mut allocator = Allocator::default();
        allocator.add(heap.bytes());
        allocator.allocate(table, 1);
        let mappings = Mappings::default();
        mappings.add(0, &heap);
        Segments {
            allocator,
            mappings,
            segments: vec![Some(Arc::new(heap))],
            freed: Freed::default(),
            blocks: 0,
        }
    }

    /// Segment length for a block.
    pub fn segment_bytes(bytes: u64, alignment: u64) -> u64 {
        bytes.max(1).next_multiple_of(alignment.max(1)).next_multiple_of(SEGMENT_BYTES)
    }

    pub fn check_open(&self) -> Result<()> {
        let gone = || Error::Fabric(weft_control::Error::Closed.into());
        self.segments.first().and_then(Option::as_ref).map(drop).ok_or_else(gone)
    }

    /// This rank's message to the others: the requested block, and freed blocks, after `settle` has waited for work
    /// that uses them.
    pub fn encode_request(
        &self,
        bytes: u64,
        alignment: u64,
        settle: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<u8>> {
        let freed: Vec<u64> = self.freed().iter().copied().collect();
        if !freed.is_empty() {
            settle()?;
        }
        Ok([bytes, alignment].into_iter().chain(freed).flat_map(u64::to_le_bytes).collect())
    }

    /// Frees the blocks that all ranks have freed, if all requests are equal.
    pub fn apply_requests(
        &mut self,
        bytes: u64,
        alignment: u64,
        requests: &[Vec<u8>],
    ) -> Result<()> {
        let mut common: Option<BTreeSet<u64>> = None;
        for (peer, request) in (0..).map(Rank).zip(requests) {
            let (words, rest) = request.as_chunks::<8>();
            let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let [theirs, aligned, freed @ ..] = words.as_slice() else {
                return Err(Error::Malformed { peer, detail: format!("{} bytes", request.len()) });
            };
            if !rest.is_empty() || (*theirs, *aligned) != (bytes, alignment) {
                let shown = |bytes, alignment| format!("{bytes} bytes aligned to {alignment}");
                let (ours, theirs) = (shown(bytes, alignment), shown(*theirs, *aligned));
                return Err(Error::Disagreement { peer, ours, theirs });
            }
            let freed: BTreeSet<u64> = freed.iter().copied().collect();
            common = Some(common.map_or_else(|| freed.clone(), |c| &c & &freed));
        }
        for serial in common.unwrap_or_default() {
            if self.freed().remove(&serial) {
                self.allocator.free(serial);
                self.blocks = self.blocks.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Allocates a block from free bytes.
    pub fn allocate(&mut self, bytes: u64, alignment: u64) -> Option<Block> {
        let allocation = self.allocator.allocate(bytes, alignment)?;
        let heap = self.segments.get(allocation.segment as usize)?.clone()?;
        self.blocks += 1;
        let release = Release { serial: Some(allocation.serial), freed: self.freed.clone() };
        Some(Block { heap, allocation, release })
    }

    /// Adds a segment for a block, and allocates the block.
    pub fn add_segment(&mut self, heap: Heap, bytes: u64, alignment: u64) -> Result<Block> {
        let (segment, ranks) = (heap.bytes(), heap.size() as usize);
        self.allocator.add(segment);
        self.mappings.add(self.segments.len(), &heap);
        self.segments.push(Some(Arc::new(heap)));
        // The segment has the length that the block needs.
        self.allocate(bytes, alignment).ok_or(Error::Empty { bytes, ranks })
    }

    /// Removes the segments without blocks, from number `first` on, in equal order on all ranks.
    pub fn take_empty(&mut self, first: u32) -> Vec<Heap> {
        let heaps: Vec<Heap> = if first == 0 {
            self.allocator = Allocator::default();
            self.segments.drain(..).flatten().filter_map(Arc::into_inner).collect()
        } else {
            let gone = self.allocator.remove_empty(first);
            let heaps = gone.into_iter().filter_map(|number| self.segments[number as usize].take());
            heaps.filter_map(Arc::into_inner).collect()
        };
        self.mappings.remove(&heaps);
        heaps
    }

    /// Segment addresses.
    pub fn mappings(&self) -> Mappings {
        self.mappings.clone()
    }

    /// True if no rank has a block.
    pub fn is_idle(&self) -> bool {
        self.blocks == 0
    }

    pub fn usage(&self) -> (u64, u64) {
        self.allocator.usage()
    }

    /// Leaks all memory.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.segments));
    }

    fn freed(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
