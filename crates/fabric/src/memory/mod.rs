//! Memory that can be a region: shared pages that Weft made, or bytes that the user lends.
//!
//! A region need not be memory that the CPU can read. Whoever needs to touch bytes asks for
//! [`Memory::host`] and handles its absence. All access goes through raw copies, never through
//! references, because a peer may be writing other bytes of the same memory at the same time.

mod huge;
mod identity;
mod numa;
mod shared;

pub use identity::{MemoryId, MemoryWatcher};
pub use shared::Placement;

use crate::error::{Error, Result};
use identity::Watchers;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::mm::munmap;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
pub use weft_cuda::DmaBuf;
use weft_cuda::{Context, RelaxedCapture};

/// A stretch of memory with an owner that keeps it alive.
pub struct Memory {
    id: MemoryId,
    address: NonNull<u8>,
    length: usize,
    place: Place,
    watchers: Watchers,
    // Held for its Drop alone.
    _keep: Keep,
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The CPU may load and store it.
    Host,
    /// Only the device of this ordinal may touch it; the address is the device's.
    Device(u32),
}

enum Keep {
    Mapping { descriptor: Option<OwnedFd>, address: NonNull<u8>, length: usize },
    Device { descriptor: Option<OwnedFd>, _owner: Box<dyn Any + Send + Sync> },
    Lent { _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: `Memory` hands out no references to its bytes, only raw copies and the raw address; the
// owner that keeps the bytes alive is Send + Sync itself.
unsafe impl Send for Memory {}
// SAFETY: as above; concurrent raw copies are governed by the counted-write protocol.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(address: NonNull<u8>, length: usize, place: Place, keep: Keep) -> Memory {
        let (id, watchers) = (MemoryId::next(), Watchers::default());
        Memory { id, address, length, place, watchers, _keep: keep }
    }

    /// Bytes that belong to `owner`, who keeps them where they are until it is dropped.
    ///
    /// # Safety
    /// `address..address + length` stays valid for reads (and for writes, if it is to be a
    /// destination) until `owner` is dropped, and nobody relies on those bytes while a request
    /// that names them is under way.
    pub unsafe fn lent(
        address: NonNull<u8>,
        length: usize,
        place: Place,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Memory {
        Memory::new(address, length, place, Keep::Lent { _owner: owner })
    }

    /// Memory of device `ordinal` that `owner` keeps, and the descriptor by which other processes can
    /// map it: without one it is never a destination.
    ///
    /// # Safety
    /// As for [`Memory::lent`], with `address` in the address space of that device.
    pub unsafe fn on_device(
        address: NonNull<u8>,
        length: usize,
        ordinal: u32,
        descriptor: Option<OwnedFd>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Memory {
        let keep = Keep::Device { descriptor, _owner: owner };
        Memory::new(address, length, Place::Device(ordinal), keep)
    }

    /// A copy of `bytes` in ordinary memory, as a source.
    pub fn from_bytes(bytes: impl Into<Box<[u8]>>) -> Memory {
        let bytes = Boxed(NonNull::from(Box::leak(bytes.into())));
        let (address, length) = (bytes.0.cast(), bytes.0.len());
        // SAFETY: the bytes stay where they are until `bytes` is dropped, and nobody else knows them.
        unsafe { Memory::lent(address, length, Place::Host, Box::new(bytes)) }
    }

    /// Its identity, which no other memory of this process has or will have.
    pub fn id(&self) -> MemoryId {
        self.id
    }

    /// Calls `watcher` before this memory is freed, if the watcher is still alive then.
    pub fn watch(&self, watcher: &Arc<impl MemoryWatcher + 'static>) {
        self.watchers.add(watcher);
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The first byte, if the CPU may load and store it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        (self.place == Place::Host).then_some(self.address)
    }

    /// The address in whatever address space [`Memory::place`] names.
    pub fn address(&self) -> u64 {
        self.address.as_ptr() as u64
    }

    /// The descriptor by which other processes can map it, if it has one.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self._keep {
            Keep::Mapping { descriptor, .. } | Keep::Device { descriptor, .. } => {
                descriptor.as_ref().map(AsFd::as_fd)
            }
            Keep::Lent { .. } => None,
        }
    }

    /// The dma-buf by which a NIC reaches memory of a device: a new descriptor, and where in it this
    /// memory begins. `None` for memory of the host, which NICs register by its address.
    ///
    /// # Errors
    /// [`Error::DmaBuf`], such as for a driver before CUDA 11.7.
    pub fn dma_buf(&self) -> Result<Option<DmaBuf>> {
        let Place::Device(device) = self.place else { return Ok(None) };
        let export = || {
            let driver = weft_cuda::driver()?;
            // Any thread may register memory, also while a graph is captured on another stream.
            let _relaxed = RelaxedCapture::new()?;
            let context = Context::primary(driver.device(device)?)?;
            DmaBuf::of(&context, self.address(), self.length)
        };
        export().map(Some).map_err(|error| Error::DmaBuf { device, source: Box::new(error) })
    }

    /// The address of `length` bytes at `offset`.
    ///
    /// # Panics
    /// If they are not all inside, or not on the host: callers check what comes from outside before.
    pub(crate) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(inside, "{length} bytes at {offset} are outside of {} bytes", self.length);
        let base = self.host().expect("only host memory is copied by the CPU");
        // SAFETY: the range was just checked to lie inside the allocation.
        unsafe { base.as_ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`. Panics if they do not fit.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` checked the range; `bytes` is a distinct borrow or, at worst, the same
        // memory under a protocol violation, which `copy` tolerates.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies from `offset` into `bytes`. Panics if there are not as many.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies between two memories. Panics if the range is not inside both.
    pub fn copy_to(&self, offset: usize, to: &Memory, to_offset: usize, length: usize) {
        let from = self.at(offset, length);
        let to = to.at(to_offset, length);
        // SAFETY: both ranges were checked; they may overlap if both memories are one.
        unsafe { std::ptr::copy(from, to, length) };
    }

    /// Copies between two memories, unless the range is not inside both.
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
        unsafe { std::ptr::copy(from, to, length as usize) };
        Some(())
    }

    /// Sets `length` bytes at `offset` to `value`.
    pub fn fill(&self, offset: usize, length: usize, value: u8) {
        let to = self.at(offset, length);
        // SAFETY: `at` checked the range.
        unsafe { std::ptr::write_bytes(to, value, length) };
    }

    /// The bytes of a range that the protocol has made stable: counted and not yet credited, or
    /// never granted to anybody.
    ///
    /// # Safety
    /// No one writes these bytes while the slice lives.
    pub unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        let from = self.at(offset, length);
        // SAFETY: in range by `at`; stable by the caller's promise.
        unsafe { std::slice::from_raw_parts(from, length) }
    }

    /// As [`Memory::bytes`], to write.
    ///
    /// # Safety
    /// No one else reads or writes these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        let from = self.at(offset, length);
        // SAFETY: in range by `at`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(from, length) }
    }
}

/// The bytes of a box, as an address: to move the box itself would be to say that nobody else
/// touches its bytes.
struct Boxed(NonNull<[u8]>);

impl Drop for Boxed {
    fn drop(&mut self) {
        // SAFETY: they came from a box, and `Memory`, the only one to use them, is being dropped.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: plain bytes, reached only through `Memory`.
unsafe impl Send for Boxed {}
// SAFETY: as above.
unsafe impl Sync for Boxed {}

impl Drop for Memory {
    /// The bytes go after this, with `_keep`.
    fn drop(&mut self) {
        self.watchers.end(self.id);
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if let Keep::Mapping { address, length, .. } = self {
            // SAFETY: this value made the mapping and nobody else unmaps it.
            let unmapped = unsafe { munmap(address.as_ptr().cast(), *length) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

// SAFETY: a descriptor, an address that only `Memory` uses, and an owner that is Send + Sync.
unsafe impl Send for Keep {}
// SAFETY: as above.
unsafe impl Sync for Keep {}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("length", &self.length).field("place", &self.place).finish()
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
    fn a_dma_buf_that_the_driver_cannot_give_is_an_error_that_names_the_device() {
        let address = NonNull::dangling();
        // SAFETY: its bytes are never used; the driver refuses an address that it did not give out.
        let memory = unsafe { Memory::on_device(address, 16, 7, None, Box::new(())) };
        let error = memory.dma_buf().expect_err("no device has memory there").to_string();
        assert!(error.starts_with("memory of device 7 as a dma-buf: "), "{error}");
    }

    /// Miri sees to it that the address is still good once the memory has moved.
    #[test]
    fn bytes_that_were_boxed_are_written_where_they_lie() {
        let moved = Box::new(Memory::from_bytes([1, 2, 3]));
        moved.copy_in(1, &[7]);
        let mut bytes = [0; 3];
        moved.copy_out(0, &mut bytes);
        assert_eq!(bytes, [1, 7, 3]);
    }
}
