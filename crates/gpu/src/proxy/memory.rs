//! Memory that kernels and the proxy's thread share: ring, counts, words and lengths.
//!
//! For a GPU it is pinned host memory, for the twin ordinary memory. Words may have a home of their own. It is made of 64-byte lines: the count of released
//! tickets, the count of the thread's turns, the slots, the words, and the lengths for SCATTER.

use super::ring::{MappedRing, SLOT_WORDS};
use super::word_store::{WordHome, WordStore, WordWriter};
use crate::error::Result;
use crate::table::Table;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use weft_cuda::gdr::Gdr;
use weft_cuda::{Context, PinnedMemory};

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
    words: WordStore,
    sizes: ProxySizes,
}

enum Home {
    Pinned(PinnedMemory),
    Host(Box<[Line]>),
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
    pub fn alloc(
        context: Option<&Arc<Context>>,
        sizes: ProxySizes,
        words: WordHome,
    ) -> Result<ProxyMemory> {
        let lines = sizes.lines();
        let home = match context {
            Some(context) => Home::Pinned(PinnedMemory::alloc(context, lines * size_of::<Line>())?),
            None => Home::Host((0..lines).map(|_| Line::default()).collect()),
        };
        let words = WordStore::alloc(context, words, sizes.words, Gdr::open)?;
        Ok(ProxyMemory { home, words, sizes })
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
    pub fn words(&self) -> WordWriter<'_> {
        let lines = &self.lines()[SLOTS + self.sizes.slots..];
        self.words.writer(&lines.as_flattened()[..self.sizes.words])
    }

    /// Home of the words; never [`WordHome::Auto`].
    pub fn word_home(&self) -> WordHome {
        self.words.home()
    }

    /// Makes the context current on the thread that writes words, if that takes calls of CUDA.
    pub fn bind_writer(&self) -> Result<()> {
        self.words.bind_writer()
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
        let (at, readers) = self.words.addresses(line(words));
        Table {
            ring: line(SLOTS),
            released: line(RELEASED),
            alive: line(ALIVE),
            words: at,
            list: line(words + self.sizes.word_lines()),
            slots: self.sizes.slots as u32,
            lengths: self.sizes.lengths as u32,
            readers,
            ..Table::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::WordMemory;
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn areas_do_not_overlap_and_lie_where_kernels_look() {
        let sizes = ProxySizes { slots: 4, words: 17, lengths: 3 };
        let memory = ProxyMemory::alloc(None, sizes, WordHome::Pinned).unwrap();
        let fields = memory.fields();
        memory.ring().slots.as_flattened().iter().for_each(|word| word.store(1, Ordering::Relaxed));
        let words = memory.words();
        (0..sizes.words).for_each(|at| words.set(at, 2, Ordering::Relaxed).unwrap());
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
        assert_ne!(fields.readers, 0);
    }

    #[test]
    fn words_in_the_gpus_memory_have_no_readers() {
        let sizes = ProxySizes { slots: 4, words: 17, lengths: 3 };
        let memory = ProxyMemory::alloc(None, sizes, WordHome::Gpu).unwrap();
        let fields = memory.fields();
        memory.words().set(16, 9, Ordering::Release).unwrap();
        let word = std::ptr::with_exposed_provenance::<u32>(fields.words as usize);
        // SAFETY: within the memory above, which nothing else accesses now.
        assert_eq!(unsafe { word.add(16).read() }, 9);
        assert_eq!(fields.readers, 0);
        assert_eq!(fields.list, fields.ring + (4 + 2) * 64);
    }
}
