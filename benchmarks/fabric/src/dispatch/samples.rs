//! Samples: queries with random bytes, and answers.

use super::{ANSWER, SUMMED};
use crate::Outcome;
use crate::arena::region_bytes;
use std::sync::Arc;
use weft_fabric::Memory;

/// Random bytes, several times the last-level cache, in samples with equal length.
pub struct Samples {
    memory: Arc<Memory>,
    bytes: usize,
    stride: usize,
    answers: Vec<[u8; ANSWER]>,
}

impl Samples {
    /// Samples with `bytes` bytes, at least 8, different in each process.
    pub fn new(bytes: usize) -> Outcome<Samples> {
        if bytes < 8 {
            return Err(format!("{bytes} bytes of a query: expected at least 8").into());
        }
        let stride = bytes.next_multiple_of(64);
        let count = 2 * region_bytes() / stride;
        let memory = Memory::shared(count * stride)?;
        let mut state = std::time::SystemTime::UNIX_EPOCH.elapsed()?.as_nanos() as u64;
        let mut answers = Vec::with_capacity(count);
        let mut sample = vec![0; bytes];
        for number in 0..count {
            for word in sample.chunks_mut(8) {
                word.copy_from_slice(&next(&mut state).to_le_bytes()[..word.len()]);
            }
            memory.copy_in(number * stride, &sample);
            answers.push(answer(&sample));
        }
        Ok(Samples { memory: Arc::new(memory), bytes, stride, answers })
    }

    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Position where a query's sample begins.
    pub fn offset(&self, query: u64) -> usize {
        self.index(query) * self.stride
    }

    /// A query's sample.
    pub fn sample(&self, query: u64) -> &[u8] {
        // SAFETY: the bytes are never written after construction.
        unsafe { self.memory.bytes(self.offset(query), self.bytes) }
    }

    /// Answer to a query.
    #[inline]
    pub fn answer(&self, query: u64) -> &[u8; ANSWER] {
        &self.answers[self.index(query)]
    }

    fn index(&self, query: u64) -> usize {
        (query % self.answers.len() as u64) as usize
    }
}

/// The query's first 8 bytes; the sum over all words in one of [`SUMMED`], else 0.
#[inline]
pub fn answer(query: &[u8]) -> [u8; ANSWER] {
    let word =
        |bytes: &[u8]| bytes.iter().rev().fold(0, |word: u64, &byte| word << 8 | u64::from(byte));
    let mut answer = [0; ANSWER];
    answer[..8].copy_from_slice(&query[..8]);
    if word(&query[..8]).is_multiple_of(SUMMED) {
        let sum = query
            .chunks(8)
            .fold(0, |sum: u64, bytes| sum.wrapping_mul(31).wrapping_add(word(bytes)));
        answer[8..].copy_from_slice(&sum.to_le_bytes());
    }
    answer
}

/// splitmix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
