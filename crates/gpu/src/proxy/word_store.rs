//! Homes of the words that kernels wait for.

use super::words::WordMemory;
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use weft_cuda::{
    Context, DeviceMemory, OwnedStream, Stream, set_bytes_async, stream_write_value32,
};

/// Home of the words that kernels wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WordHome {
    /// Pinned host memory: the thread raises a word by a store, and one waiting block for each word reads it over PCIe.
    #[default]
    Pinned,
    /// The GPU's memory: the thread raises a word by a write on a CUDA stream, and every wait reads it there.
    Gpu,
}

/// Words at one rank.
pub(super) enum WordStore {
    /// In the lines of the proxy's memory, with a u64 for each word in the GPU's memory, by which waits elect a reader.
    Pinned(Readers),
    /// In the GPU's memory, with a stream of the highest priority.
    Gpu(DeviceMemory, OwnedStream),
    /// The twin's.
    Twin(Box<[AtomicU32]>),
}

impl WordStore {
    /// Zeroed words.
    pub fn alloc(
        context: Option<&Arc<Context>>,
        home: WordHome,
        words: usize,
    ) -> Result<WordStore> {
        Ok(match (home, context) {
            (WordHome::Pinned, context) => WordStore::Pinned(Readers::alloc(context, words)?),
            (WordHome::Gpu, Some(context)) => {
                let memory = zeroed(context, words * size_of::<AtomicU32>())?;
                WordStore::Gpu(memory, Stream::create_first(context)?)
            }
            (WordHome::Gpu, None) => {
                WordStore::Twin((0..words).map(|_| AtomicU32::new(0)).collect())
            }
        })
    }

    /// Words as the thread writes them; `lines`: those in the proxy's memory.
    pub fn writer<'a>(&'a self, lines: &'a [AtomicU32]) -> WordWriter<'a> {
        match self {
            WordStore::Pinned(_) => WordWriter::Host(lines),
            WordStore::Gpu(memory, stream) => WordWriter::Stream(stream.stream(), memory.address()),
            WordStore::Twin(words) => WordWriter::Host(words),
        }
    }

    /// Makes the context current on the thread that writes words, if that takes calls of CUDA.
    pub fn bind_writer(&self) -> Result<()> {
        match self {
            WordStore::Gpu(memory, _) => Ok(memory.context().bind()?),
            WordStore::Pinned(_) | WordStore::Twin(_) => Ok(()),
        }
    }

    /// Addresses for kernels: words, and the u64 by which waits elect a reader for each (0: all waits read). `lines`: words
    /// in the proxy's memory.
    pub fn addresses(&self, lines: u64) -> (u64, u64) {
        match self {
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
    /// By writes on a stream, to words from an address on.
    Stream(Stream, u64),
}

impl WordMemory for WordWriter<'_> {
    /// A write on a stream is behind a fence, whatever the order: bytes in the GPU's memory, and bytes that this thread
    /// has seen arrive, are visible before it.
    fn set(&self, position: usize, value: u32, order: Ordering) -> Result<()> {
        match self {
            WordWriter::Host(words) => words.set(position, value, order),
            WordWriter::Stream(stream, first) => {
                let address = first + (position * size_of::<u32>()) as u64;
                Ok(stream_write_value32(*stream, address, value)?)
            }
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

    #[test]
    fn a_write_that_cuda_refuses_is_an_error() {
        let words = WordWriter::Stream(Stream(0), 0);
        // Without a driver, or without a context.
        assert!(words.set(0, 1, Ordering::Release).is_err());
    }
}
