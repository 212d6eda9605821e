//! Models without a framework: what a node runs in tests of the network itself.

use crate::counts::Counts;
use crate::error::{Error, Result};
use serde::Deserialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_dispatch::{Backend, Batch};

/// Model answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Zero bytes.
    #[default]
    NoOp,
    /// Sum over the query's bytes, each times the position, in the first 8 bytes; then zeros.
    Checksum,
    /// The schema's maximum token count: token i is the number i in 4 bytes. Only on nodes.
    Tokens,
}

/// Model: a function on a query's bytes, and a time per query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// Answer kind.
    pub kind: ModelKind,
    /// CPU time per query, or per token in the answer, microseconds.
    pub work_us: u64,
}

impl Model {
    /// Minimum answer size in bytes.
    pub fn min_answer_bytes(self) -> u64 {
        match self.kind {
            ModelKind::NoOp | ModelKind::Tokens => 0,
            ModelKind::Checksum => 8,
        }
    }

    /// Writes the answer to a query.
    ///
    /// # Panics
    /// If `answer` is shorter than [`Model::min_answer_bytes`].
    #[inline]
    pub fn answer(self, query: &[u8], answer: &mut [u8]) {
        if self.kind == ModelKind::Checksum {
            answer[..8].copy_from_slice(&checksum(query).to_le_bytes());
            answer[8..].fill(0);
        }
        self.work();
    }

    fn work(self) {
        if self.work_us > 0 {
            let end = Instant::now() + Duration::from_micros(self.work_us);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
    }
}

/// Bytes per token in [`ModelKind::Tokens`].
const TOKEN_BYTES: u64 = 4;

/// Sum over bytes, each times the position from 1 on, modulo 2^64: it depends on every byte and on their
/// order. For example, `[1, 2]` gives 5.
pub fn checksum(bytes: &[u8]) -> u64 {
    let weighted = |(position, byte): (usize, &u8)| (position as u64 + 1) * u64::from(*byte);
    bytes.iter().enumerate().map(weighted).fold(0, u64::wrapping_add)
}

/// Backend that runs a [`Model`] on each query's first input and first output, and counts.
#[derive(Debug)]
pub struct ModelBackend {
    model: Model,
    /// Tokens per answer.
    tokens: u64,
    counts: Arc<Counts>,
}

impl ModelBackend {
    /// Model backend for outputs up to `answer_bytes`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for outputs that are too short.
    pub fn new(model: Model, answer_bytes: u64, counts: Arc<Counts>) -> Result<ModelBackend> {
        let least = model.min_answer_bytes();
        if answer_bytes < least {
            return Err(Error::Invalid {
                what: "bytes of an answer",
                value: answer_bytes.to_string(),
                expected: format!("at least {least} with the model checksum"),
            });
        }
        Ok(ModelBackend { model, tokens: answer_bytes / TOKEN_BYTES, counts })
    }
}

impl ModelBackend {
    fn append_tokens(&self, batch: &mut Batch<'_>) {
        for token in 0..self.tokens {
            for query in 0..batch.len() {
                self.model.work();
                // Fails only beyond the schema's bound.
                batch.append(query, &(token as u32).to_le_bytes());
            }
        }
    }
}

impl Backend for ModelBackend {
    fn run(&mut self, batch: &mut Batch<'_>) {
        let queries = batch.len() as u64;
        self.counts.add_issued(queries);
        if self.model.kind == ModelKind::Tokens {
            self.append_tokens(batch);
        } else if self.model != Model::default() {
            for query in 0..batch.len() {
                let mut answer = [0; 8];
                let written = self.model.min_answer_bytes() as usize;
                self.model.answer(batch.input(query, 0), &mut answer[..written]);
                let output = batch.output(query, 0);
                output[..written].copy_from_slice(&answer[..written]);
                output[written..].fill(0);
            }
        }
        self.counts.add_answered(queries);
    }
}

#[cfg(test)]
mod tests {
    use super::{Model, ModelKind, checksum};
    use std::time::{Duration, Instant};

    #[test]
    fn the_checksum_depends_on_bytes_and_their_order() {
        assert_eq!(checksum(&[1, 2]), 5);
        assert_eq!(checksum(&[2, 1]), 4);
        assert_ne!(checksum(&[0, 7]), checksum(&[7, 0]));
    }

    #[test]
    fn an_answer_takes_the_time_of_its_work() {
        let model = Model { kind: ModelKind::Checksum, work_us: 300 };
        let (begin, mut answer) = (Instant::now(), [9; 12]);
        model.answer(&[3], &mut answer);
        assert!(begin.elapsed() >= Duration::from_micros(300));
        assert_eq!(answer, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
