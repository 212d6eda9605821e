//! Memory for heaps, tables and tensors, by address.

use super::super::RawMemory;

/// Zeroed words, aligned to 8 bytes, by address.
pub(super) struct Memory {
    pub(super) words: Vec<u64>,
    pub(super) address: u64,
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Memory {
        let mut words = vec![0u64; bytes.div_ceil(8)];
        let address = words.as_mut_ptr().expose_provenance() as u64;
        Memory { words, address }
    }

    pub(super) fn of(bytes: &[u8]) -> Memory {
        let memory = Memory::new(bytes.len());
        memory.raw().write(0, bytes);
        memory
    }

    pub(super) fn raw(&self) -> RawMemory<'_> {
        // SAFETY: the vector's bytes, exposed in `new`; the protocol and thread joins exclude races.
        unsafe { RawMemory::new(self.address, 8 * self.words.len() as u64) }
    }

    pub(super) fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.raw().read(0, &mut bytes);
        bytes
    }
}
