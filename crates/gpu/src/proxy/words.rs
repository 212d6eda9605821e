//! Words: one u32 for each source and index, which the proxy raises and kernels wait for.
//!
//! A word's value is the number of leading rounds from that source which have arrived whole, modulo 2^32. Kernels compare
//! it with wrap-around, as `weft::reached` does. The words of the own rank count completed DRAINED commands.
//!
//! Memory order: the engine has made a round's bytes visible, flushed by the region's reader where that is needed,
//! before it reports the round. The word follows with release; a kernel acquires it in one thread (`ld.acquire.sys`),
//! and a block barrier follows before other threads load.

use crate::error::Result;
use std::sync::atomic::{AtomicU32, Ordering};
use weft_control::Rank;

/// Value for one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordUpdate {
    /// Rank whose rounds the word counts.
    pub source: Rank,
    /// Word index.
    pub index: u32,
    /// Leading whole rounds, modulo 2^32.
    pub value: u32,
}

/// Word memory: a trait, so that a loom model checks the code that runs.
pub trait WordMemory {
    /// Stores a word.
    ///
    /// # Errors
    /// CUDA's.
    fn set(&self, position: usize, value: u32, order: Ordering) -> Result<()>;
}

impl WordMemory for &[AtomicU32] {
    #[inline]
    fn set(&self, position: usize, value: u32, order: Ordering) -> Result<()> {
        self[position].store(value, order);
        Ok(())
    }
}

/// Position in a list by rank and word, with `each` words for every rank.
#[inline]
pub(super) fn position_of(rank: Rank, word: u32, each: usize) -> usize {
    rank.index() * each + word as usize
}

/// All words at one rank.
#[derive(Debug)]
pub struct Words<M> {
    memory: M,
    each: usize,
}

impl<M: WordMemory> Words<M> {
    /// Words in memory, `each` for every source.
    pub fn new(memory: M, each: usize) -> Words<M> {
        Words { memory, each }
    }

    /// Position of a word in memory. For example, word 2 from rank 3 is at 14 if there are four for each source.
    pub fn position(&self, source: Rank, index: u32) -> usize {
        position_of(source, index, self.each)
    }

    /// Raises a word.
    ///
    /// # Errors
    /// CUDA's.
    #[inline]
    pub fn raise(&self, update: WordUpdate) -> Result<()> {
        let position = self.position(update.source, update.index);
        self.memory.set(position, update.value, Ordering::Release)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_are_grouped_by_source() {
        let memory: Vec<AtomicU32> = (0..12).map(|_| AtomicU32::new(0)).collect();
        let words = Words::new(memory.as_slice(), 4);
        words.raise(WordUpdate { source: Rank(2), index: 3, value: 7 }).unwrap();
        words.raise(WordUpdate { source: Rank(0), index: 0, value: u32::MAX }).unwrap();
        words.raise(WordUpdate { source: Rank(0), index: 0, value: 0 }).unwrap();
        words.raise(WordUpdate { source: Rank(1), index: 1, value: 5 }).unwrap();
        let seen: Vec<u32> = memory.iter().map(|word| word.load(Ordering::Acquire)).collect();
        assert_eq!(seen, [0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 7]);
    }
}
