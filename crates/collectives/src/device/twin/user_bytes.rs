//! Message in a user tensor, at any alignment.

use weft_gpu::raw_memory::RawMemory;

/// Message bytes in a user tensor.
#[derive(Clone, Copy)]
pub(super) struct UserBytes<'a> {
    pub begin: u64,
    pub bytes: u64,
    memory: RawMemory<'a>,
}

impl UserBytes<'_> {
    /// # Safety
    /// Same as [`RawMemory::new`], for `bytes` bytes at `begin`.
    pub unsafe fn new<'a>(begin: u64, bytes: u64) -> UserBytes<'a> {
        // SAFETY: the caller's contract.
        UserBytes { begin, bytes, memory: unsafe { RawMemory::new(begin, bytes) } }
    }

    /// Part of `length` bytes from `at` on that lies within the message.
    fn within(&self, at: u64, length: usize) -> usize {
        self.bytes.saturating_sub(at).min(length as u64) as usize
    }

    /// Copy of `length` bytes from `at` on, zero behind the message end.
    pub fn load(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let within = self.within(at, length);
        if within > 0 {
            self.memory.read(at, &mut bytes[..within]);
        }
        bytes
    }

    /// Writes bytes from `at` on, up to the message end.
    pub fn store(&self, at: u64, bytes: &[u8]) {
        let within = self.within(at, bytes.len());
        if within > 0 {
            self.memory.write(at, &bytes[..within]);
        }
    }

    /// Fills the message with 0xFF bytes, which are not a result.
    pub fn poison(&self) {
        self.memory.fill_all(0xFF);
    }
}
