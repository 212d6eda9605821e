//! Segments of a domain's heap, the blocks in them, and who has freed what.

use super::allocator::{Allocator, Placed};
use crate::error::{Error, Result};
use crate::heap::{Heap, Window};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use weft_control::Rank;

/// Segments are as long as a multiple of this: the pages of a GPU's memory.
pub const SEGMENT_BYTES: u64 = 2 << 20;

/// Serial numbers of blocks that this rank has dropped and others may not have.
type Freed = Arc<Mutex<BTreeSet<u64>>>;

/// Memory of the symmetric heap: so many bytes at the same place of the same segment on every rank.
///
/// It is mapped for as long as this lives, whatever becomes of the domain. Dropping it must wait until this
/// rank's kernels that use it have ended.
pub struct Block {
    // Let go of before the serial is given back.
    heap: Arc<Heap>,
    placed: Placed,
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
    /// Bytes, at least as many as were asked for.
    pub fn bytes(&self) -> u64 {
        self.placed.bytes
    }

    /// The first byte, counted from the beginning of its segment; the same on every rank.
    pub fn offset(&self) -> u64 {
        self.placed.offset
    }

    /// Which segment it is in; the same on every rank.
    pub fn segment(&self) -> u32 {
        self.placed.segment
    }

    /// Where each rank's part is mapped here, by rank.
    pub fn addresses(&self) -> Vec<u64> {
        self.heap.addresses().iter().map(|base| base + self.placed.offset).collect()
    }

    /// Where this rank's own part is.
    pub fn own(&self) -> u64 {
        self.heap.own() + self.placed.offset
    }

    /// The segment of a rank as the CPU twin uses it, in which the block begins at [`Block::offset`]; none on a
    /// GPU.
    pub fn window(&self, rank: u32) -> Option<Window<'_>> {
        self.heap.window(rank)
    }

    /// Never uses the bytes again while the domain lives: a graph that was captured may be replayed.
    pub fn keep(mut self) {
        self.release.serial = None;
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.placed)
    }
}

/// The segments, as this rank has them mapped.
pub(super) struct Space {
    allocator: Allocator,
    segments: Vec<Option<Arc<Heap>>>,
    freed: Freed,
    /// Blocks that live, the table not counted.
    blocks: u64,
}

impl Space {
    /// Of a first segment, whose first bytes are the table's.
    pub fn new(heap: Heap, table: u64) -> Space {
        let mut allocator = Allocator::default();
        allocator.add(heap.bytes());
        allocator.place(table, 1);
        Space {
            allocator,
            segments: vec![Some(Arc::new(heap))],
            freed: Freed::default(),
            blocks: 0,
        }
    }

    /// Bytes of a segment made for a block.
    pub fn segment(bytes: u64, alignment: u64) -> u64 {
        bytes.max(1).next_multiple_of(alignment.max(1)).next_multiple_of(SEGMENT_BYTES)
    }

    pub fn alive(&self) -> Result<()> {
        let gone = || Error::Fabric(weft_control::Error::Closed.into());
        self.segments.first().and_then(Option::as_ref).map(drop).ok_or_else(gone)
    }

    /// What this rank tells the others: what it asks for, and what it has freed, with nothing under way that
    /// uses it.
    pub fn say(
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

    /// Frees what all ranks have freed, if all ask for the same.
    pub fn hear(&mut self, bytes: u64, alignment: u64, told: &[Vec<u8>]) -> Result<()> {
        let mut common: Option<BTreeSet<u64>> = None;
        for (peer, said) in (0..).map(Rank).zip(told) {
            let (words, rest) = said.as_chunks::<8>();
            let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let [theirs, aligned, freed @ ..] = words.as_slice() else {
                return Err(Error::Malformed { peer, detail: format!("{} bytes", said.len()) });
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

    /// A block of what is free.
    pub fn place(&mut self, bytes: u64, alignment: u64) -> Option<Block> {
        let placed = self.allocator.place(bytes, alignment)?;
        let heap = self.segments.get(placed.segment as usize)?.clone()?;
        self.blocks += 1;
        let release = Release { serial: Some(placed.serial), freed: self.freed.clone() };
        Some(Block { heap, placed, release })
    }

    /// A block of a segment made for it.
    pub fn grow(&mut self, heap: Heap, bytes: u64, alignment: u64) -> Result<Block> {
        let (segment, ranks) = (heap.bytes(), heap.size() as usize);
        self.allocator.add(segment);
        self.segments.push(Some(Arc::new(heap)));
        // The segment is as long as the block needs.
        self.place(bytes, alignment).ok_or(Error::Empty { bytes, ranks })
    }

    /// The segments without blocks, from number `first` on, in an order that is the same on all ranks.
    pub fn take_empty(&mut self, first: u32) -> Vec<Heap> {
        if first == 0 {
            self.allocator = Allocator::default();
            return self.segments.drain(..).flatten().filter_map(Arc::into_inner).collect();
        }
        let gone = self.allocator.drop_empty(first);
        let heaps = gone.into_iter().filter_map(|number| self.segments[number as usize].take());
        heaps.filter_map(Arc::into_inner).collect()
    }

    /// Whether no rank has a block.
    pub fn is_idle(&self) -> bool {
        self.blocks == 0
    }

    pub fn usage(&self) -> (u64, u64) {
        self.allocator.usage()
    }

    /// Leaves all memory as it is.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.segments));
    }

    fn freed(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
