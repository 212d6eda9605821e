//! Memory that kernels and the proxy's thread share: ring, counts, words and lengths.
//!
//! For a GPU it is pinned host memory, for the twin ordinary memory. It is made of 64-byte lines: the count of released
//! tickets, the count of the thread's turns, the slots, the words, and the lengths for SCATTER.

use super::ring::{MappedRing, SLOT_WORDS};
use crate::error::Result;
use crate::table::Table;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use weft_cuda::{Context, DeviceMemory, PinnedMemory, Stream, set_bytes_async};

/// Cache line; a slot has one.
#[repr(C, align(64))]
#[derive(Default)]
struct Line([AtomicU32; SLOT_WORDS]);

type Lines = [[AtomicU32; SLOT_WORDS]];

/// Lines before the slots.
const RELEASED: usize = 0;
const ALIVE: usize = 1;
const SLOTS: usize = 2;

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProxySizes {
    /// Command slots, a power of two.
    pub slots: usize,
    /// Words at this rank, for all sources.
    pub words: usize,
    /// Lengths that SCATTER commands name.
    pub lengths: usize,
}

/// Memory of one proxy. It outlives all kernels that have its addresses.
pub(super) struct ProxyMemory {
    home: Home,
    /// By word: a u64 in the GPU's memory, by which waits elect a reader.
    readers: Readers,
    sizes: ProxySizes,
}

enum Home {
    Pinned(PinnedMemory),
    Host(Box<[Line]>),
}

enum Readers {
    Device(DeviceMemory),
    Host(Box<[AtomicU64]>),
}

impl Readers {
    fn alloc(context: Option<&Arc<Context>>, words: usize) -> Result<Readers> {
        Ok(match context {
            Some(context) => Readers::Device(zeroed(context, words * size_of::<AtomicU64>())?),
            None => Readers::Host((0..words).map(|_| AtomicU64::new(0)).collect()),
        })
    }

    fn address(&self) -> u64 {
        match self {
            Readers::Device(memory) => memory.address(),
            Readers::Host(words) => words.as_ptr().expose_provenance() as u64,
        }
    }
}

/// Zeroed device memory.
fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory> {
    let memory = DeviceMemory::alloc(context, bytes)?;
    let stream = Stream::create(context)?;
    let bound = context.enter()?;
    set_bytes_async(memory.address(), 0, bytes, stream.stream())?;
    drop(bound);
    stream.synchronize()?;
    Ok(memory)
}

impl ProxySizes {
    fn word_lines(&self) -> usize {
        self.words.div_ceil(SLOT_WORDS)
    }

    fn lines(&self) -> usize {
        SLOTS + self.slots + self.word_lines() + self.lengths.div_ceil(SLOT_WORDS)
    }
}

impl ProxyMemory {
    /// Zeroed memory: pinned with a context, ordinary without.
    pub fn alloc(context: Option<&Arc<Context>>, sizes: ProxySizes) -> Result<ProxyMemory> {
        let lines = sizes.lines();
        let home = match context {
            Some(context) => Home::Pinned(PinnedMemory::alloc(context, lines * size_of::<Line>())?),
            None => Home::Host((0..lines).map(|_| Line::default()).collect()),
        };
        Ok(ProxyMemory { home, readers: Readers::alloc(context, sizes.words)?, sizes })
    }

    fn lines(&self) -> &Lines {
        let first = match &self.home {
            Home::Pinned(memory) => memory.host().cast_const().cast(),
            Home::Host(lines) => lines.as_ptr().cast(),
        };
        // SAFETY: page- or line-aligned, with as many lines as `alloc` counted, zeroed, and alive as long as `self`;
        // accessed by atomics and the device only.
        unsafe { std::slice::from_raw_parts(first, self.sizes.lines()) }
    }

    /// The 64-bit count at the start of a line.
    fn count(&self, line: usize) -> &AtomicU64 {
        let words = self.lines()[line][..2].as_ptr();
        // SAFETY: the first two words in a line, so eight aligned bytes that live as long as `self`; accessed only
        // through this function and by the device.
        unsafe { AtomicU64::from_ptr(words.cast_mut().cast()) }
    }

    /// The ring.
    pub fn ring(&self) -> MappedRing<'_> {
        let slots = &self.lines()[SLOTS..][..self.sizes.slots];
        MappedRing { slots, released: self.count(RELEASED) }
    }

    /// Turns of the thread.
    pub fn alive(&self) -> &AtomicU64 {
        self.count(ALIVE)
    }

    /// Words, by source and index.
    pub fn words(&self) -> &[AtomicU32] {
        &self.lines()[SLOTS + self.sizes.slots..].as_flattened()[..self.sizes.words]
    }

    /// Lengths.
    pub fn lengths(&self) -> &[AtomicU32] {
        let first = SLOTS + self.sizes.slots + self.sizes.word_lines();
        &self.lines()[first..].as_flattened()[..self.sizes.lengths]
    }

    /// Table fields with the addresses for kernels.
    pub fn fields(&self) -> Table {
        let base = match &self.home {
            Home::Pinned(memory) => memory.device_address(),
            Home::Host(lines) => lines.as_ptr().expose_provenance() as u64,
        };
        let line = |line: usize| base + (line * size_of::<Line>()) as u64;
        let words = SLOTS + self.sizes.slots;
        Table {
            ring: line(SLOTS),
            released: line(RELEASED),
            alive: line(ALIVE),
            words: line(words),
            list: line(words + self.sizes.word_lines()),
            slots: self.sizes.slots as u32,
            lengths: self.sizes.lengths as u32,
            readers: self.readers.address(),
            ..Table::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn areas_do_not_overlap_and_lie_where_kernels_look() {
        let sizes = ProxySizes { slots: 4, words: 17, lengths: 3 };
        let memory = ProxyMemory::alloc(None, sizes).unwrap();
        let fields = memory.fields();
        memory.ring().slots.as_flattened().iter().for_each(|word| word.store(1, Ordering::Relaxed));
        memory.words().iter().for_each(|word| word.store(2, Ordering::Relaxed));
        memory.lengths().iter().for_each(|word| word.store(3, Ordering::Relaxed));
        memory.ring().released.store(4, Ordering::Relaxed);
        memory.alive().store(5, Ordering::Relaxed);
        let at = |address: u64| {
            let word = std::ptr::with_exposed_provenance::<u32>(address as usize);
            // SAFETY: within the memory above, which nothing else accesses now.
            unsafe { word.read() }
        };
        assert_eq!([fields.released, fields.alive].map(at), [4, 5]);
        assert_eq!([fields.ring, fields.ring + 255].map(|at| at & !3).map(at), [1, 1]);
        assert_eq!([fields.words, fields.words + 4 * 16].map(at), [2, 2]);
        assert_eq!([fields.list, fields.list + 8].map(at), [3, 3]);
        assert_eq!(fields.lengths, 3);
        assert_eq!(memory.ring().slots.len(), 4);
        assert!(fields.ring.is_multiple_of(64));
    }
}
