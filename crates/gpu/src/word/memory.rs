//! A word's memory: ordinary, pinned, or on a GPU and mapped for the host.

use crate::error::{Error, Result};
use crate::proxy::{Pages, WordHome};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use weft_cuda::gdr::{Gdr, MappedWords};
use weft_cuda::{Context, PinnedMemory};

/// A u32 that the host and a GPU share.
pub struct Word {
    memory: Memory,
}

enum Memory {
    /// Without a GPU.
    Host(Box<Line>),
    Pinned(PinnedMemory),
    /// The mapping ends before the memory.
    Mapped(MappedWords, Pages),
}

/// A cache line with one word.
#[repr(align(64))]
#[derive(Default)]
struct Line(AtomicU32);

impl Word {
    /// A zeroed word. Without a context it is in ordinary memory, for threads in place of kernels.
    ///
    /// # Errors
    /// [`Error::WordHome`] for [`WordHome::Gpu`], where the host has no access; CUDA's and GDRCopy's errors.
    pub fn alloc(context: Option<&Arc<Context>>, home: WordHome) -> Result<Word> {
        Word::alloc_with(context, home, Gdr::open)
    }

    fn alloc_with(
        context: Option<&Arc<Context>>,
        home: WordHome,
        open: impl FnOnce() -> weft_cuda::Result<Gdr>,
    ) -> Result<Word> {
        let memory = match home {
            WordHome::Gpu => return Err(Error::WordHome),
            WordHome::Pinned => Memory::pinned(context)?,
            WordHome::Gdrcopy => Memory::map(context, open)?,
            WordHome::Auto => Memory::map(context, open).or_else(|why| {
                log::info!("a word is in pinned host memory: {why}");
                Memory::pinned(context)
            })?,
        };
        Ok(Word { memory })
    }

    /// Address for kernels and streams.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Memory::Host(line) => line.0.as_ptr().expose_provenance() as u64,
            Memory::Pinned(memory) => memory.device_address(),
            Memory::Mapped(_, pages) => pages.address(),
        }
    }

    /// Address for the host's loads and stores; `None` in GPU memory, where only [`Word::set`] and [`Word::get`] reach it.
    pub fn host_address(&self) -> Option<u64> {
        self.atomic().map(|word| word.as_ptr().expose_provenance() as u64)
    }

    /// Home; never [`WordHome::Auto`].
    pub fn home(&self) -> WordHome {
        match self.memory {
            Memory::Host(_) | Memory::Pinned(_) => WordHome::Pinned,
            Memory::Mapped(..) => WordHome::Gdrcopy,
        }
    }

    /// Stores a value, with release.
    pub fn set(&self, value: u32) {
        match (&self.memory, self.atomic()) {
            (_, Some(word)) => word.store(value, Ordering::Release),
            (Memory::Mapped(words, _), None) => words.set(0, value),
            (Memory::Host(_) | Memory::Pinned(_), None) => unreachable!("the host reaches these"),
        }
    }

    /// Loads the value, with acquire. In GPU memory the load crosses PCIe, in about a microsecond.
    pub fn get(&self) -> u32 {
        match (&self.memory, self.atomic()) {
            (_, Some(word)) => word.load(Ordering::Acquire),
            (Memory::Mapped(words, _), None) => words.get(0),
            (Memory::Host(_) | Memory::Pinned(_), None) => unreachable!("the host reaches these"),
        }
    }

    fn atomic(&self) -> Option<&AtomicU32> {
        match &self.memory {
            Memory::Host(line) => Some(&line.0),
            Memory::Pinned(memory) => {
                // SAFETY: aligned to a page, alive as long as `self`, and accessed by atomics and the device only.
                Some(unsafe { AtomicU32::from_ptr(memory.host().cast()) })
            }
            Memory::Mapped(..) => None,
        }
    }
}

impl Memory {
    fn pinned(context: Option<&Arc<Context>>) -> Result<Memory> {
        Ok(match context {
            Some(context) => Memory::Pinned(PinnedMemory::alloc(context, size_of::<Line>())?),
            None => Memory::Host(Box::default()),
        })
    }

    fn map(
        context: Option<&Arc<Context>>,
        open: impl FnOnce() -> weft_cuda::Result<Gdr>,
    ) -> Result<Memory> {
        // First, so that nothing is allocated without GDRCopy.
        let gdr = open()?;
        let pages = Pages::alloc(context, 1)?;
        // SAFETY: the pages are dropped after the mapping, whose field precedes theirs; kernels expect stores to a word.
        let mapped = unsafe { MappedWords::map(gdr, pages.address(), 1) }?;
        Ok(Memory::Mapped(mapped, pages))
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Word({:#x}, {:?})", self.address(), self.home())
    }
}

/// True if a word has reached a value, modulo 2^32, as `weft::reached` does in kernels.
pub fn has_reached(word: u32, value: u32) -> bool {
    word.wrapping_sub(value) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gdrapi;

    #[test]
    fn a_word_in_host_memory_is_where_its_addresses_say() {
        let word = Word::alloc(None, WordHome::Pinned).unwrap();
        assert_eq!((word.get(), word.home()), (0, WordHome::Pinned));
        word.set(7);
        assert_eq!((word.get(), Some(word.address())), (7, word.host_address()));
        let first = std::ptr::with_exposed_provenance::<u32>(word.address() as usize);
        // SAFETY: the word above.
        assert_eq!(unsafe { first.read_volatile() }, 7);
        assert!(matches!(Word::alloc(None, WordHome::Gpu), Err(Error::WordHome)));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_word_that_gdrcopy_maps_is_set_and_read_through_the_mapping() {
        let library = gdrapi::Gdrapi::compile(&[]);
        let open = || Gdr::open_at(&library.library());
        let word = Word::alloc_with(None, WordHome::Auto, open).unwrap();
        word.set(9);
        assert_eq!((word.get(), word.home(), word.host_address()), (9, WordHome::Gdrcopy, None));
        drop(word);
        assert_eq!(library.calls().last().map(String::as_str), Some("gdr_close"));
        let library = gdrapi::Gdrapi::compile(&["FAIL=\"gdr_map\""]);
        let open = || Gdr::open_at(&library.library());
        assert_eq!(Word::alloc_with(None, WordHome::Auto, open).unwrap().home(), WordHome::Pinned);
        assert!(matches!(Word::alloc_with(None, WordHome::Gdrcopy, open), Err(Error::Cuda(_))));
    }

    #[test]
    fn values_are_compared_modulo_two_to_the_32() {
        let cases =
            [(0, 0, true), (1, 0, true), (0, 1, false), (3, u32::MAX, true), (u32::MAX, 3, false)];
        for (word, value, expected) in cases {
            assert_eq!(has_reached(word, value), expected, "{word} {value}");
        }
    }
}
