//! CPU view of a heap part, for kernels' CPU twins.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// View of one rank's part in a twin heap. Any rank may read and write all bytes at any time, so it hands out no
/// references to them: data are copied, flags are atomics.
///
/// # Panics
/// All methods panic if a range is out of bounds or misaligned: offsets come from the caller's layout, not from a
/// peer.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a> {
    base: NonNull<u8>,
    bytes: usize,
    _heap: PhantomData<&'a u8>,
}

// SAFETY: raw copies and atomics only, on shared memory.
unsafe impl Send for HostView<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostView<'_> {}

impl<'a> HostView<'a> {
    /// # Safety
    /// `base..base + bytes` is mapped for reads and writes for as long as `'a`.
    pub(super) unsafe fn new(base: NonNull<u8>, bytes: usize) -> HostView<'a> {
        HostView { base, bytes, _heap: PhantomData }
    }

    /// Length in bytes.
    pub fn len(self) -> usize {
        self.bytes
    }

    /// True without bytes, which never occurs.
    pub fn is_empty(self) -> bool {
        self.bytes == 0
    }

    /// Address of `length` bytes at `offset`.
    pub fn at(self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{length} bytes at {offset} are outside a heap with {}", self.bytes);
        // SAFETY: the range was checked to be inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// 32-bit word at `offset`, a multiple of 4.
    pub fn word32(self, offset: usize) -> &'a AtomicU32 {
        let address = self.at(offset, 4).cast::<u32>();
        assert!(address.is_aligned(), "a 32-bit word at {offset} is not aligned");
        // SAFETY: aligned, mapped for `'a`, and shared by atomics and raw copies only.
        unsafe { AtomicU32::from_ptr(address) }
    }

    /// 64-bit word at `offset`, a multiple of 8.
    pub fn word64(self, offset: usize) -> &'a AtomicU64 {
        let address = self.at(offset, 8).cast::<u64>();
        assert!(address.is_aligned(), "a 64-bit word at {offset} is not aligned");
        // SAFETY: as in `word32`.
        unsafe { AtomicU64::from_ptr(address) }
    }

    /// Copies `bytes` to `offset`.
    pub fn write(self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` checked the range; `bytes` borrows other memory, or `copy` tolerates it.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies from `offset` into `bytes`.
    pub fn read(self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies `length` bytes at `offset` to `to_offset` in another view.
    pub fn copy_to(self, offset: usize, to: HostView<'_>, to_offset: usize, length: usize) {
        let (from, to) = (self.at(offset, length), to.at(to_offset, length));
        // SAFETY: both ranges were checked; they may overlap.
        unsafe { std::ptr::copy(from, to, length) };
    }

    /// Sets `length` bytes at `offset` to `value`.
    pub fn fill(self, offset: usize, length: usize, value: u8) {
        let to = self.at(offset, length);
        // SAFETY: `at` checked the range.
        unsafe { std::ptr::write_bytes(to, value, length) };
    }
}
