//! Symmetric heap allocator: each block's segment and offset.
//!
//! Deterministic: ranks that make the same calls get the same offsets. First fit by segment, then by offset; free
//! neighbours are merged.

use std::collections::BTreeMap;

/// Blocks start at multiples of this many bytes, and have such lengths: 300 bytes take 512, for example.
pub const ALIGNMENT: u64 = 256;

/// Block position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Block identifier, never reused.
    pub serial: u64,
    /// Segment, from 0.
    pub segment: u32,
    /// First byte.
    pub offset: u64,
    /// Length in bytes, rounded up.
    pub bytes: u64,
}

/// Free bytes and blocks in all segments.
#[derive(Clone, Debug, Default)]
pub struct Allocator {
    /// Segments; `None` for a removed one.
    segments: Vec<Option<Segment>>,
    blocks: BTreeMap<u64, Allocation>,
    next: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    bytes: u64,
    free: BTreeMap<u64, u64>,
}

impl Allocator {
    /// Adds an entirely free segment; returns its number.
    pub fn add(&mut self, bytes: u64) -> u32 {
        let free = BTreeMap::from([(0, bytes)]);
        self.segments.push(Some(Segment { bytes, free }));
        self.segments.len() as u32 - 1
    }

    /// Allocates a block at a multiple of `alignment`, a power of two, raised to [`ALIGNMENT`]. `None` if no segment
    /// has room.
    pub fn allocate(&mut self, bytes: u64, alignment: u64) -> Option<Allocation> {
        let alignment = alignment.max(ALIGNMENT);
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let (segment, offset) = (0..).zip(&self.segments).find_map(|(number, segment)| {
            let fit = |(&at, &length): (&u64, &u64)| {
                let begin = at.next_multiple_of(alignment);
                (begin.checked_add(bytes)? <= at + length).then_some(begin)
            };
            Some((number, segment.as_ref()?.free.iter().find_map(fit)?))
        })?;
        let allocation = Allocation { serial: self.next, segment, offset, bytes };
        self.segments[segment as usize].as_mut()?.remove_free(offset, bytes);
        self.next += 1;
        self.blocks.insert(allocation.serial, allocation);
        Some(allocation)
    }

    /// Frees a block; no effect for an unknown serial.
    pub fn free(&mut self, serial: u64) {
        let Some(Allocation { segment, offset, bytes, .. }) = self.blocks.remove(&serial) else {
            return;
        };
        if let Some(segment) = &mut self.segments[segment as usize] {
            segment.insert_free(offset, bytes);
        }
    }

    /// Removes the segments without blocks, from number `first` on; returns their numbers.
    pub fn remove_empty(&mut self, first: u32) -> Vec<u32> {
        let mut gone = Vec::new();
        for (number, segment) in (0..).zip(&mut self.segments).skip(first as usize) {
            let empty = |segment: &Segment| segment.free.get(&0) == Some(&segment.bytes);
            if segment.as_ref().is_some_and(empty) {
                *segment = None;
                gone.push(number);
            }
        }
        gone
    }

    /// Bytes in blocks, and bytes in all segments.
    pub fn usage(&self) -> (u64, u64) {
        let all = self.segments.iter().flatten().map(|segment| segment.bytes).sum();
        (self.blocks.values().map(|block| block.bytes).sum(), all)
    }
}

impl Segment {
    /// Removes a range from the free bytes.
    fn remove_free(&mut self, offset: u64, bytes: u64) {
        let Some((&at, &length)) = self.free.range(..=offset).next_back() else { return };
        self.free.remove(&at);
        let (before, after) = (offset - at, at + length - (offset + bytes));
        if before > 0 {
            self.free.insert(at, before);
        }
        if after > 0 {
            self.free.insert(offset + bytes, after);
        }
    }

    fn insert_free(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some((&at, &length)) = self.free.range(..offset).next_back()
            && at + length == offset
        {
            self.free.remove(&at);
            (offset, bytes) = (at, bytes + length);
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn freed_neighbours_are_one_again() {
        let mut allocator = Allocator::default();
        allocator.add(4 * ALIGNMENT);
        let blocks: Vec<_> = (0..4).map(|_| allocator.allocate(1, 1).unwrap()).collect();
        assert_eq!(blocks.iter().map(|b| b.offset).collect::<Vec<_>>(), [0, 256, 512, 768]);
        assert_eq!(allocator.allocate(1, 1), None);
        for freed in [1, 3, 2] {
            allocator.free(blocks[freed].serial);
        }
        let again = allocator.allocate(3 * ALIGNMENT, 1).unwrap();
        assert_eq!((again.offset, again.serial), (256, 4));
        allocator.free(99);
        assert_eq!(allocator.usage(), (1024, 1024));
    }

    #[test]
    fn a_segment_without_blocks_can_be_removed_and_its_number_is_not_reused() {
        let mut allocator = Allocator::default();
        let [first, second] = [1 << 20, 2 << 20].map(|bytes| allocator.add(bytes));
        let large = allocator.allocate(2 << 20, 1).unwrap();
        assert_eq!(large.segment, second);
        assert!(allocator.remove_empty(first + 1).is_empty());
        allocator.free(large.serial);
        assert_eq!(allocator.remove_empty(first + 1), [second]);
        assert_eq!(allocator.allocate(2 << 20, 1), None);
        let third = allocator.add(4096);
        assert_eq!((third, allocator.usage()), (2, (0, (1 << 20) + 4096)));
        assert_eq!(allocator.remove_empty(0), [first, third]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(u64, u32),
        Free(prop::sample::Index),
        Grow(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..5000, 0u32..14).prop_map(|(bytes, shift)| Step::Allocate(bytes, shift)),
            3 => any::<prop::sample::Index>().prop_map(Step::Free),
            1 => (1u64..40).prop_map(|pages| Step::Grow(pages * 512)),
        ]
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_freed_bytes_can_be_allocated_again(
            steps in prop::collection::vec(step(), 0..80)
        ) {
            let (mut one, mut other) = (Allocator::default(), Allocator::default());
            let mut live: Vec<Allocation> = Vec::new();
            let mut sizes = Vec::new();
            for step in steps {
                match step {
                    Step::Grow(bytes) => {
                        sizes.push(bytes);
                        prop_assert_eq!(one.add(bytes), other.add(bytes));
                    }
                    Step::Free(index) if !live.is_empty() => {
                        let freed = live.swap_remove(index.index(live.len())).serial;
                        one.free(freed);
                        other.free(freed);
                    }
                    Step::Free(_) => {}
                    Step::Allocate(bytes, shift) => {
                        let allocation = one.allocate(bytes, 1 << shift);
                        prop_assert_eq!(allocation, other.allocate(bytes, 1 << shift));
                        let Some(allocation) = allocation else { continue };
                        prop_assert!(allocation.bytes >= bytes && allocation.offset % (1 << shift) == 0);
                        prop_assert!(allocation.offset + allocation.bytes <= sizes[allocation.segment as usize]);
                        let apart = |b: &Allocation| b.segment != allocation.segment
                            || b.offset + b.bytes <= allocation.offset
                            || allocation.offset + allocation.bytes <= b.offset;
                        prop_assert!(live.iter().all(apart));
                        live.push(allocation);
                    }
                }
            }
            for block in &live {
                one.free(block.serial);
            }
            for (number, &bytes) in sizes.iter().enumerate() {
                // First fit takes the first segment with that size.
                let whole = one.allocate(bytes / ALIGNMENT * ALIGNMENT, 1).unwrap();
                prop_assert_eq!(whole.offset, 0, "segment {}", number);
            }
        }
    }
}
