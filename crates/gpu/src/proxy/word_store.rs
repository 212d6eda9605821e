//! Homes of the words that kernels wait for.

use super::words::WordMemory;
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use weft_cuda::gdr::{Gdr, MappedWords, PAGE_BYTES};
use weft_cuda::{
    Context, DeviceMemory, OwnedStream, Stream, set_bytes_async, stream_write_value32,
};

/// Home of the words that kernels wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WordHome {
    /// [`WordHome::Gdrcopy`] where GDRCopy maps the GPU's memory, else [`WordHome::Pinned`].
    #[default]
    Auto,
    /// The GPU's memory, mapped by GDRCopy: the thread raises a word by a store, and every wait reads it there.
    Gdrcopy,
    /// Pinned host memory: the thread raises a word by a store, and one waiting block for each word reads it over PCIe.
    Pinned,
    /// The GPU's memory: the thread raises a word by a write on a CUDA stream, and every wait reads it there.
    Gpu,
}

/// Words at one rank.
pub(super) enum WordStore {
    /// In the GPU's memory, or the twin's, mapped by GDRCopy. The mapping ends before the memory.
    Mapped(MappedWords, Pages),
    /// In the lines of the proxy's memory, with a u64 for each word in the GPU's memory, by which waits elect a reader.
    Pinned(Readers),
    /// In the GPU's memory, with a stream of the highest priority.
    Gpu(DeviceMemory, OwnedStream),
    /// The twin's.
    Twin(Box<[AtomicU32]>),
}

impl WordStore {
    /// Zeroed words; `open` connects to GDRCopy.
    pub fn alloc(
        context: Option<&Arc<Context>>,
        home: WordHome,
        words: usize,
        open: impl FnOnce() -> weft_cuda::Result<Gdr>,
    ) -> Result<WordStore> {
        let pinned = || Ok(WordStore::Pinned(Readers::alloc(context, words)?));
        match (home, context) {
            (WordHome::Auto, _) => WordStore::map(context, words, open).or_else(|why| {
                log::info!("the proxy's words are in pinned host memory: {why}");
                pinned()
            }),
            (WordHome::Gdrcopy, _) => WordStore::map(context, words, open),
            (WordHome::Pinned, _) => pinned(),
            (WordHome::Gpu, Some(context)) => {
                let memory = zeroed(context, words * size_of::<AtomicU32>())?;
                Ok(WordStore::Gpu(memory, Stream::create_first(context)?))
            }
            (WordHome::Gpu, None) => {
                Ok(WordStore::Twin((0..words).map(|_| AtomicU32::new(0)).collect()))
            }
        }
    }

    fn map(
        context: Option<&Arc<Context>>,
        words: usize,
        open: impl FnOnce() -> weft_cuda::Result<Gdr>,
    ) -> Result<WordStore> {
        // First, so that nothing is allocated without GDRCopy.
        let gdr = open()?;
        let pages = Pages::alloc(context, words)?;
        // SAFETY: the pages are dropped after the mapping, whose field precedes theirs; kernels expect stores to words.
        let mapped = unsafe { MappedWords::map(gdr, pages.address(), words) }?;
        Ok(WordStore::Mapped(mapped, pages))
    }

    /// The home; never [`WordHome::Auto`].
    pub fn home(&self) -> WordHome {
        match self {
            WordStore::Mapped(..) => WordHome::Gdrcopy,
            WordStore::Pinned(_) => WordHome::Pinned,
            WordStore::Gpu(..) | WordStore::Twin(_) => WordHome::Gpu,
        }
    }

    /// Words as the thread writes them; `lines`: those in the proxy's memory.
    pub fn writer<'a>(&'a self, lines: &'a [AtomicU32]) -> WordWriter<'a> {
        match self {
            WordStore::Mapped(words, _) => WordWriter::Mapped(words),
            WordStore::Pinned(_) => WordWriter::Host(lines),
            WordStore::Gpu(memory, stream) => WordWriter::Stream(stream.stream(), memory.address()),
            WordStore::Twin(words) => WordWriter::Host(words),
        }
    }

    /// Makes the context current on the thread that writes words, if that takes calls of CUDA.
    pub fn bind_writer(&self) -> Result<()> {
        match self {
            WordStore::Gpu(memory, _) => Ok(memory.context().bind()?),
            WordStore::Mapped(..) | WordStore::Pinned(_) | WordStore::Twin(_) => Ok(()),
        }
    }

    /// Addresses for kernels: words, and the u64 by which waits elect a reader for each (0: all waits read). `lines`: words
    /// in the proxy's memory.
    pub fn addresses(&self, lines: u64) -> (u64, u64) {
        match self {
            WordStore::Mapped(_, pages) => (pages.address(), 0),
            WordStore::Pinned(readers) => (lines, readers.address()),
            WordStore::Gpu(memory, _) => (memory.address(), 0),
            WordStore::Twin(words) => (words.as_ptr().expose_provenance() as u64, 0),
        }
    }
}

/// Words, as the thread writes them.
pub(super) enum WordWriter<'a> {
    /// By stores.
    Host(&'a [AtomicU32]),
    /// By stores through GDRCopy's mapping.
    Mapped(&'a MappedWords),
    /// By writes on a stream, to words from an address on.
    Stream(Stream, u64),
}

impl WordMemory for WordWriter<'_> {
    /// A write on a stream, and a store through the mapping, are behind a fence, whatever the order: bytes in the GPU's
    /// memory, and bytes that this thread has seen arrive, are visible before it.
    fn set(&self, position: usize, value: u32, order: Ordering) -> Result<()> {
        match self {
            WordWriter::Host(words) => words.set(position, value, order),
            WordWriter::Mapped(words) => {
                words.set(position, value);
                Ok(())
            }
            WordWriter::Stream(stream, first) => {
                let address = first + (position * size_of::<u32>()) as u64;
                Ok(stream_write_value32(*stream, address, value)?)
            }
        }
    }
}

/// Whole GPU pages, as GDRCopy maps them.
pub(crate) enum Pages {
    /// From the first page's start on.
    Device(DeviceMemory),
    Host(Box<[Page]>),
}

/// A GPU page in the twin's memory.
#[repr(C, align(65536))]
pub(crate) struct Page([AtomicU32; PAGE_BYTES / size_of::<AtomicU32>()]);

impl Pages {
    /// Zeroed pages with room for words.
    pub(crate) fn alloc(context: Option<&Arc<Context>>, words: usize) -> Result<Pages> {
        let pages = (words * size_of::<AtomicU32>()).div_ceil(PAGE_BYTES);
        Ok(match context {
            // An allocation may begin anywhere in a page.
            Some(context) => Pages::Device(zeroed(context, (pages + 1) * PAGE_BYTES)?),
            None => Pages::Host(
                (0..pages).map(|_| Page(std::array::from_fn(|_| AtomicU32::new(0)))).collect(),
            ),
        })
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Pages::Device(memory) => memory.address().next_multiple_of(PAGE_BYTES as u64),
            Pages::Host(pages) => pages.as_ptr().expose_provenance() as u64,
        }
    }
}

/// A u64 for each word, by which waits elect a reader.
pub(super) enum Readers {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::gdrapi::Gdrapi;

    fn absent() -> weft_cuda::Result<Gdr> {
        Gdr::open_at("/absent/libgdrapi.so.2".as_ref())
    }

    #[test]
    fn a_write_that_cuda_refuses_is_an_error() {
        let words = WordWriter::Stream(Stream(0), 0);
        // Without a driver, or without a context.
        assert!(words.set(0, 1, Ordering::Release).is_err());
    }

    #[test]
    fn without_gdrcopy_auto_takes_pinned_memory_and_its_name_is_an_error() {
        let store = WordStore::alloc(None, WordHome::Auto, 4, absent).unwrap();
        assert_eq!(store.home(), WordHome::Pinned);
        let error = WordStore::alloc(None, WordHome::Gdrcopy, 4, absent).err().unwrap();
        let text = error.to_string();
        assert!(text.starts_with("GDRCopy (libgdrapi.so.2) cannot be loaded (/absent/"), "{text}");
        for home in [WordHome::Pinned, WordHome::Gpu] {
            let store = WordStore::alloc(None, home, 4, || panic!("not asked for")).unwrap();
            assert_eq!(store.home(), home);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn words_that_gdrcopy_maps_are_where_kernels_look_until_they_are_dropped() {
        for home in [WordHome::Auto, WordHome::Gdrcopy] {
            let library = Gdrapi::compile(&[]);
            let count = PAGE_BYTES / 4 + 1;
            let store =
                WordStore::alloc(None, home, count, || Gdr::open_at(&library.library())).unwrap();
            assert_eq!(store.home(), WordHome::Gdrcopy);
            let writer = store.writer(&[]);
            writer.set(0, 7, Ordering::Release).unwrap();
            writer.set(count - 1, 8, Ordering::Release).unwrap();
            let (first, readers) = store.addresses(1);
            assert_eq!(readers, 0);
            let seen = [0, 1, count - 1].map(|at| {
                let word = std::ptr::with_exposed_provenance::<u32>(first as usize + 4 * at);
                // SAFETY: within the pages.
                unsafe { word.read_volatile() }
            });
            assert_eq!(seen, [7, 0, 8]);
            store.bind_writer().unwrap();
            drop(store);
            let calls = library.calls();
            assert_eq!(calls[calls.len() - 3..], ["gdr_unmap", "gdr_unpin_buffer", "gdr_close"]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn memory_that_cannot_be_pinned_leaves_auto_in_pinned_memory() {
        let library = Gdrapi::compile(&["FAIL=\"gdr_pin_buffer\""]);
        let open = || Gdr::open_at(&library.library());
        let store = WordStore::alloc(None, WordHome::Auto, 4, open).unwrap();
        assert_eq!(store.home(), WordHome::Pinned);
        assert_ne!(store.addresses(1).1, 0);
        let error = WordStore::alloc(None, WordHome::Gdrcopy, 4, open).err().unwrap();
        let Error::Cuda(weft_cuda::Error::Call { call, .. }) = error else { panic!("{error}") };
        assert_eq!(call, "gdr_pin_buffer");
        assert_eq!(library.calls()[..3], ["gdr_open", "gdr_pin_buffer", "gdr_close"]);
    }
}
