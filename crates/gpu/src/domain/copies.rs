//! Copies between the host and this rank's part of the heap, each complete at return.

use super::{Block, Domain, Gpu};
use crate::error::Result;
use weft_cuda::{PinnedMemory, copy_async, set_bytes_async};

impl Domain {
    /// Writes to this rank's part of a block, after all work on the domain's stream, and waits for completion.
    ///
    /// # Errors
    /// CUDA's.
    ///
    /// # Panics
    /// If the bytes are not inside.
    pub fn write_block(&self, block: &Block, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() as u64 <= block.bytes(), "inside the block");
        self.store(block.own() + at, bytes)
    }

    /// Reads bytes from this rank's part of a block, and waits for completion.
    ///
    /// # Errors
    /// CUDA's.
    ///
    /// # Panics
    /// If the bytes are not inside.
    pub fn read_block(&self, block: &Block, at: u64, bytes: &mut [u8]) -> Result<()> {
        assert!(at + bytes.len() as u64 <= block.bytes(), "inside the block");
        self.load(block.own() + at, bytes)
    }

    pub(super) fn load(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(Gpu { context, stream }) = &self.gpu else {
            let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
            // SAFETY: within this rank's own part, which the heap keeps mapped; see `read_block` and `proxy_tickets`.
            unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
            return Ok(());
        };
        let _current = context.enter()?;
        let pinned = PinnedMemory::alloc(context, bytes.len())?;
        copy_async(pinned.device_address(), address, bytes.len(), stream.stream())?;
        stream.synchronize()?;
        // SAFETY: this function's own buffer with that length, into which the copy is complete.
        unsafe { pinned.host().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes to the table.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.store(self.table + at, bytes)
    }

    fn store(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let Some(Gpu { context, stream }) = &self.gpu else {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: within this rank's own part, which the heap keeps mapped; see `write_block` and `write`.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return Ok(());
        };
        let _current = context.enter()?;
        let pinned = PinnedMemory::alloc(context, bytes.len())?;
        // SAFETY: this function's own buffer with that length.
        unsafe { pinned.host().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        copy_async(address, pinned.device_address(), bytes.len(), stream.stream())?;
        Ok(stream.synchronize()?)
    }

    pub(super) fn zero(&self, block: &Block) -> Result<()> {
        let (own, bytes) = (block.own(), block.bytes() as usize);
        let Some(Gpu { context, stream }) = &self.gpu else {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(own as usize);
            // SAFETY: the block is exclusive to this rank until the collective call has returned on all ranks.
            unsafe { to.write_bytes(0, bytes) };
            return Ok(());
        };
        let _current = context.enter()?;
        set_bytes_async(own, 0, bytes, stream.stream())?;
        Ok(stream.synchronize()?)
    }
}
