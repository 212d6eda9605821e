//! Allocator of the symmetric heap: which bytes of which segment a block gets.
//!
//! It is a function of the calls made on it, so ranks that make the same calls get the same offsets. First
//! fit by segment, then by offset; neighbours that are free are one.

use std::collections::BTreeMap;

/// Blocks begin at multiples of this many bytes, and are as long.
pub const ALIGNMENT: u64 = 256;

/// A block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Names the block; never used again.
    pub serial: u64,
    /// Which segment, counted from 0.
    pub segment: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes, rounded up.
    pub bytes: u64,
}

/// The bytes of all segments, free or in blocks.
#[derive(Clone, Debug, Default)]
pub struct Allocator {
    /// Free bytes of each segment, by offset; `None` for one that is gone.
    segments: Vec<Option<Segment>>,
    blocks: BTreeMap<u64, Placed>,
    next: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    bytes: u64,
    free: BTreeMap<u64, u64>,
}

impl Allocator {
    /// Adds a segment, all of it free; returns its number.
    pub fn add(&mut self, bytes: u64) -> u32 {
        let free = BTreeMap::from([(0, bytes)]);
        self.segments.push(Some(Segment { bytes, free }));
        self.segments.len() as u32 - 1
    }

    /// A block of so many bytes, at a multiple of `alignment` (a power of two, at least
    /// [`ALIGNMENT`]). `None` if no segment has room.
    pub fn place(&mut self, bytes: u64, alignment: u64) -> Option<Placed> {
        let alignment = alignment.max(ALIGNMENT);
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let (segment, offset) = (0..).zip(&self.segments).find_map(|(number, segment)| {
            let fit = |(&at, &length): (&u64, &u64)| {
                let begin = at.next_multiple_of(alignment);
                (begin.checked_add(bytes)? <= at + length).then_some(begin)
            };
            Some((number, segment.as_ref()?.free.iter().find_map(fit)?))
        })?;
        let placed = Placed { serial: self.next, segment, offset, bytes };
        self.segments[segment as usize].as_mut()?.take(offset, bytes);
        self.next += 1;
        self.blocks.insert(placed.serial, placed);
        Some(placed)
    }

    /// Frees a block. One that is not there is none of the caller's: nothing happens.
    pub fn free(&mut self, serial: u64) {
        let Some(Placed { segment, offset, bytes, .. }) = self.blocks.remove(&serial) else {
            return;
        };
        if let Some(segment) = &mut self.segments[segment as usize] {
            segment.give(offset, bytes);
        }
    }

    /// Takes away the segments, from number `first` on, that have no block; returns their numbers.
    pub fn drop_empty(&mut self, first: u32) -> Vec<u32> {
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

    /// Bytes in blocks, and bytes of all segments.
    pub fn usage(&self) -> (u64, u64) {
        let all = self.segments.iter().flatten().map(|segment| segment.bytes).sum();
        (self.blocks.values().map(|block| block.bytes).sum(), all)
    }
}

impl Segment {
    /// Bytes that are free, and so are no longer.
    fn take(&mut self, offset: u64, bytes: u64) {
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

    fn give(&mut self, mut offset: u64, mut bytes: u64) {
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
        let blocks: Vec<_> = (0..4).map(|_| allocator.place(1, 1).unwrap()).collect();
        assert_eq!(blocks.iter().map(|b| b.offset).collect::<Vec<_>>(), [0, 256, 512, 768]);
        assert_eq!(allocator.place(1, 1), None);
        for freed in [1, 3, 2] {
            allocator.free(blocks[freed].serial);
        }
        let again = allocator.place(3 * ALIGNMENT, 1).unwrap();
        assert_eq!((again.offset, again.serial), (256, 4));
        allocator.free(99);
        assert_eq!(allocator.usage(), (1024, 1024));
    }

    #[test]
    fn a_segment_without_blocks_can_go_and_its_number_stays_its_own() {
        let mut allocator = Allocator::default();
        let [first, second] = [1 << 20, 2 << 20].map(|bytes| allocator.add(bytes));
        let large = allocator.place(2 << 20, 1).unwrap();
        assert_eq!(large.segment, second);
        assert!(allocator.drop_empty(first + 1).is_empty());
        allocator.free(large.serial);
        assert_eq!(allocator.drop_empty(first + 1), [second]);
        assert_eq!(allocator.place(2 << 20, 1), None);
        let third = allocator.add(4096);
        assert_eq!((third, allocator.usage()), (2, (0, (1 << 20) + 4096)));
        assert_eq!(allocator.drop_empty(0), [first, third]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Place(u64, u32),
        Free(prop::sample::Index),
        Grow(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..5000, 0u32..14).prop_map(|(bytes, shift)| Step::Place(bytes, shift)),
            3 => any::<prop::sample::Index>().prop_map(Step::Free),
            1 => (1u64..40).prop_map(|pages| Step::Grow(pages * 512)),
        ]
    }

    proptest! {
        #[test]
        fn blocks_never_meet_and_what_is_freed_can_be_had_again(
            steps in prop::collection::vec(step(), 0..80)
        ) {
            let (mut one, mut other) = (Allocator::default(), Allocator::default());
            let mut live: Vec<Placed> = Vec::new();
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
                    Step::Place(bytes, shift) => {
                        let placed = one.place(bytes, 1 << shift);
                        prop_assert_eq!(placed, other.place(bytes, 1 << shift));
                        let Some(placed) = placed else { continue };
                        prop_assert!(placed.bytes >= bytes && placed.offset % (1 << shift) == 0);
                        prop_assert!(placed.offset + placed.bytes <= sizes[placed.segment as usize]);
                        let apart = |b: &Placed| b.segment != placed.segment
                            || b.offset + b.bytes <= placed.offset
                            || placed.offset + placed.bytes <= b.offset;
                        prop_assert!(live.iter().all(apart));
                        live.push(placed);
                    }
                }
            }
            for block in &live {
                one.free(block.serial);
            }
            for (number, &bytes) in sizes.iter().enumerate() {
                // First fit takes the first segment that is as large.
                let whole = one.place(bytes / ALIGNMENT * ALIGNMENT, 1).unwrap();
                prop_assert_eq!(whole.offset, 0, "segment {}", number);
            }
        }
    }
}
