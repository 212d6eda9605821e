//! Reply of a backend to one query.

use crate::wire::{Schema, Tensor};

/// Reply to one query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    /// Error, or 0.
    pub code: u32,
    outputs: u8,
    /// Output of tokens that were appended, and their bytes.
    stream: u8,
    pub appended: u64,
    lengths: [u64; Schema::MAX_TENSORS],
}

impl Reply {
    /// Reply whose outputs have their most bytes.
    pub fn of(outputs: &[Tensor]) -> Reply {
        let mut reply = Reply {
            code: 0,
            outputs: 0,
            stream: 0,
            appended: 0,
            lengths: [0; Schema::MAX_TENSORS],
        };
        for (length, output) in reply.lengths.iter_mut().zip(outputs) {
            *length = output.max_bytes();
            reply.outputs += 1;
        }
        reply
    }

    /// Replaces it by an error, from 1 to `u32::MAX - 1`.
    pub fn fail(&mut self, code: u32) {
        self.code = code.clamp(1, u32::MAX - 1);
    }

    /// Bytes of each output.
    pub fn lengths(&self) -> &[u64] {
        &self.lengths[..usize::from(self.outputs)]
    }

    /// True for the output of tokens, after an append.
    pub fn is_stream(&self, tensor: usize) -> bool {
        self.appended > 0 && usize::from(self.stream) == tensor
    }

    /// Sets the bytes of appended tokens.
    pub fn append(&mut self, tensor: usize, bytes: u64) {
        (self.stream, self.appended) = (tensor as u8, bytes);
        self.resize(tensor, bytes);
    }

    /// Sets the bytes of an output.
    pub fn resize(&mut self, tensor: usize, bytes: u64) {
        self.lengths[tensor] = bytes;
    }
}
