//! Region memory: shared pages that Weft allocates, device memory, or a user buffer.
//!
//! A region may be memory that the CPU cannot read: code that accesses bytes calls [`Memory::host`] and
//! handles `None`. All access goes through raw copies, never through references, because a peer may
//! concurrently write other bytes in the same memory.

mod copy;
mod huge;
mod identity;
mod numa;
mod placement;
pub(crate) mod prefetch;
mod shared;

pub use copy::copy_bytes;
pub(crate) use copy::is_slow;
pub use identity::{MemoryId, MemoryWatcher};
pub use placement::Placement;

use crate::error::{Error, Result};
use identity::Watchers;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::mm::munmap;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use weft_cuda::{Context, RelaxedCapture};

pub use weft_cuda::{DmaBuf, Reader};

/// Contiguous memory with an owner that keeps it alive.
pub struct Memory {
    id: MemoryId,
    address: NonNull<u8>,
    length: usize,
    kind: MemoryKind,
    reader: Reader,
    watchers: Watchers,
    // Held only to be dropped.
    owner: MemoryOwner,
}

/// Memory kind: host or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory that the CPU may load and store.
    Host,
    /// Memory on the device with this ordinal; the address is the device's.
    Device(u32),
}

enum MemoryOwner {
    Mapping { descriptor: Option<OwnedFd>, address: NonNull<u8>, length: usize },
    Device { descriptor: Option<OwnedFd>, _owner: Box<dyn Any + Send + Sync> },
    User { _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: `Memory` hands out no references to the bytes, only raw copies and the raw address; the owner
// that keeps the bytes alive is Send + Sync itself.
unsafe impl Send for Memory {}
// SAFETY: as above; concurrent raw copies are governed by the counted-write protocol.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(address: NonNull<u8>, length: usize, kind: MemoryKind, owner: MemoryOwner) -> Memory {
        let (id, reader, watchers) = (MemoryId::next(), Reader::default(), Watchers::default());
        Memory { id, address, length, kind, reader, watchers, owner }
    }

    /// The same memory for this reader of what peers write into it ([`Reader::All`] unless stated). Device
    /// memory for [`Reader::Owner`] needs fewer flushes, and a lane then says nothing to other devices or
    /// the CPU. It has no effect on host memory.
    #[must_use]
    pub fn read_by(mut self, reader: Reader) -> Memory {
        self.reader = reader;
        self
    }

    /// User buffer: bytes that `owner` keeps at this address until it is dropped.
    ///
    /// # Safety
    /// `address..address + length` stays valid for reads (and for writes, if it is to be a destination)
    /// until `owner` is dropped, and no code relies on those bytes while a request that names them is in
    /// flight.
    pub unsafe fn user_buffer(
        address: NonNull<u8>,
        length: usize,
        kind: MemoryKind,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Memory {
        Memory::new(address, length, kind, MemoryOwner::User { _owner: owner })
    }

    /// Memory on device `ordinal` that `owner` keeps alive, and the descriptor by which other processes
    /// can map it: without one it is never a destination.
    ///
    /// # Safety
    /// Same as [`Memory::user_buffer`], with `address` in that device's address space.
    pub unsafe fn on_device(
        address: NonNull<u8>,
        length: usize,
        ordinal: u32,
        descriptor: Option<OwnedFd>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Memory {
        let owner = MemoryOwner::Device { descriptor, _owner: owner };
        Memory::new(address, length, MemoryKind::Device(ordinal), owner)
    }

    /// Private memory with a copy of `bytes`, as a source.
    pub fn from_bytes(bytes: impl Into<Box<[u8]>>) -> Memory {
        let bytes = BoxedBytes(NonNull::from(Box::leak(bytes.into())));
        let (address, length) = (bytes.0.cast(), bytes.0.len());
        // SAFETY: the bytes stay at this address until `bytes` is dropped, and no other code has the
        // address.
        unsafe { Memory::user_buffer(address, length, MemoryKind::Host, Box::new(bytes)) }
    }

    /// Memory identity, unique in this process and never reused.
    pub fn id(&self) -> MemoryId {
        self.id
    }

    /// Adds a watcher, which is called before this memory is freed if it is alive then.
    pub fn watch(&self, watcher: &Arc<impl MemoryWatcher + 'static>) {
        self.watchers.add(watcher);
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// True for zero bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Host or device.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Reader of what peers write into it.
    pub fn reader(&self) -> Reader {
        self.reader
    }

    /// First byte's address, if the CPU may load and store it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        (self.kind == MemoryKind::Host).then_some(self.address)
    }

    /// Address in the [`Memory::kind`] address space.
    pub fn address(&self) -> u64 {
        self.address.as_ptr() as u64
    }

    /// The descriptor by which other processes can map it, if it has one.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.owner {
            MemoryOwner::Mapping { descriptor, .. } | MemoryOwner::Device { descriptor, .. } => {
                descriptor.as_ref().map(AsFd::as_fd)
            }
            MemoryOwner::User { .. } => None,
        }
    }

    /// Dma-buf by which a NIC accesses device memory: a new descriptor, and this memory's offset in it.
    /// `None` for host memory, which NICs register by address.
    ///
    /// # Errors
    /// [`Error::DmaBuf`], such as for a driver before CUDA 11.7.
    pub fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        let MemoryKind::Device(device) = self.kind else { return Ok(None) };
        let export = || {
            let driver = weft_cuda::driver()?;
            // Any thread may register memory, also during a graph capture on another stream.
            let _relaxed = RelaxedCapture::new()?;
            let context = Context::primary(driver.device(device)?)?;
            DmaBuf::of(&context, self.address(), self.length)
        };
        export().map(Some).map_err(|error| Error::DmaBuf { device, source: Box::new(error) })
    }

    /// Address of `length` bytes at `offset`.
    ///
    /// # Panics
    /// If the range is outside or not on the host; callers validate external ranges before.
    pub(crate) fn pointer(&self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(inside, "{length} bytes at {offset} are outside of {} bytes", self.length);
        let base = self.host().expect("only host memory is copied by the CPU");
        // SAFETY: the range was just checked to lie inside the allocation.
        unsafe { base.as_ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`. Panics if they do not fit.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset, bytes.len());
        // SAFETY: `at` checked the range; `bytes` is a distinct borrow or, at worst, the same
        // memory under a protocol violation, which `copy_bytes` tolerates.
        unsafe { copy_bytes(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies from `offset` into `bytes`. Panics if the range is outside.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.pointer(offset, bytes.len());
        // SAFETY: as in `copy_in`.
        unsafe { copy_bytes(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies between two memories. Panics if the range is not inside both.
    pub fn copy_to(&self, offset: usize, to: &Memory, to_offset: usize, length: usize) {
        let from = self.pointer(offset, length);
        let to = to.pointer(to_offset, length);
        // SAFETY: both ranges were checked; they may overlap if both memories are one.
        unsafe { copy_bytes(from, to, length) };
    }

    /// Copies between two memories; `None` if the range is not inside both.
    #[inline]
    pub(crate) fn try_copy_to(&self, from: u64, to: &Memory, at: u64, length: u64) -> Option<()> {
        let inside = |memory: &Memory, offset: u64| {
            let end = offset.checked_add(length)?;
            let base = memory.host().filter(|_| end <= memory.length as u64)?;
            // SAFETY: the range was just checked to lie inside the allocation.
            Some(unsafe { base.as_ptr().add(offset as usize) })
        };
        let (from, to) = (inside(self, from)?, inside(to, at)?);
        // SAFETY: both ranges were checked; they may overlap if both memories are one.
        unsafe { copy_bytes(from, to, length as usize) };
        Some(())
    }

    /// Prefetches the cache lines in a host memory range, as far as it is inside; a hint without other
    /// effect.
    #[inline]
    pub fn prefetch(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.length as u64);
        let Some(base) = self.host().filter(|_| offset < end) else { return };
        let first = base.as_ptr().wrapping_add(offset as usize);
        prefetch::lines_for_load(first, (end - offset) as usize);
    }

    /// Sets `length` bytes at `offset` to `value`.
    pub fn fill(&self, offset: usize, length: usize, value: u8) {
        let to = self.pointer(offset, length);
        // SAFETY: `at` checked the range.
        unsafe { std::ptr::write_bytes(to, value, length) };
    }

    /// Bytes in a range that the protocol keeps stable: counted and not yet credited, or never granted.
    ///
    /// # Safety
    /// These bytes are not written while the slice lives.
    pub unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        let from = self.pointer(offset, length);
        // SAFETY: in range by `at`; stable by the caller's contract.
        unsafe { std::slice::from_raw_parts(from, length) }
    }

    /// Same as [`Memory::bytes`], to write.
    ///
    /// # Safety
    /// These bytes are accessed through the slice only while it lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        let from = self.pointer(offset, length);
        // SAFETY: in range by `at`; exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(from, length) }
    }
}

/// Leaked box, by address: moving the box itself would assert exclusive access to the bytes.
struct BoxedBytes(NonNull<[u8]>);

impl Drop for BoxedBytes {
    fn drop(&mut self) {
        // SAFETY: they came from a box, and `Memory`, the only user, is being dropped.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: plain bytes, reached only through `Memory`.
unsafe impl Send for BoxedBytes {}
// SAFETY: as above.
unsafe impl Sync for BoxedBytes {}

impl Drop for Memory {
    /// The bytes are freed afterwards, with `owner`.
    fn drop(&mut self) {
        self.watchers.end(self.id);
    }
}

impl Drop for MemoryOwner {
    fn drop(&mut self) {
        if let MemoryOwner::Mapping { address, length, .. } = self {
            // SAFETY: this value made the mapping, and no other code unmaps it.
            let unmapped = unsafe { munmap(address.as_ptr().cast(), *length) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

// SAFETY: a descriptor, an address that only `Memory` uses, and an owner that is Send + Sync.
unsafe impl Send for MemoryOwner {}
// SAFETY: as above.
unsafe impl Sync for MemoryOwner {}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("length", &self.length).field("place", &self.kind).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_has_no_dma_buf() {
        assert!(matches!(Memory::from_bytes([1]).dma_buf(), Ok(None)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri loads no libraries")]
    fn a_dma_buf_that_the_driver_cannot_export_is_an_error_that_names_the_device() {
        let address = NonNull::dangling();
        // SAFETY: the bytes are never used; the driver rejects an address that it did not allocate.
        let memory = unsafe { Memory::on_device(address, 16, 7, None, Box::new(())) };
        let error = memory.dma_buf().expect_err("no device has memory there").to_string();
        assert!(error.starts_with("memory of device 7 as a dma-buf: "), "{error}");
    }

    /// Miri checks that the address is valid after the memory has moved.
    #[test]
    fn boxed_bytes_are_written_in_place() {
        let moved = Box::new(Memory::from_bytes([1, 2, 3]));
        moved.copy_in(1, &[7]);
        let mut bytes = [0; 3];
        moved.copy_out(0, &mut bytes);
        assert_eq!(bytes, [1, 7, 3]);
    }
}
