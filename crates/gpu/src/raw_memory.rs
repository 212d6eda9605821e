//! Raw memory: a byte range at an address, as kernels access it, for the CPU twins.

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Byte range at an address.
///
/// Every access is checked against the range, and panics outside. Words and packets are atomics; the twins'
/// protocol excludes races on plain bytes.
#[derive(Clone, Copy, Debug)]
pub struct RawMemory<'a> {
    address: u64,
    bytes: u64,
    memory: PhantomData<&'a AtomicU64>,
}

impl<'a> RawMemory<'a> {
    /// `bytes` bytes from `address` on. At address 0 the range is empty: the array is absent.
    ///
    /// # Safety
    /// While the value is in use, the bytes are readable (and writable, if this value writes), a pointer to
    /// them has been exposed, and accesses to bytes that are not atomics do not race.
    pub unsafe fn new(address: u64, bytes: u64) -> RawMemory<'a> {
        RawMemory { address, bytes: if address == 0 { 0 } else { bytes }, memory: PhantomData }
    }

    /// True if the range is not empty: an absent array has no bytes.
    pub fn is_given(&self) -> bool {
        self.bytes > 0
    }

    fn pointer(&self, at: u64, bytes: usize) -> *mut u8 {
        let end = at.checked_add(bytes as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes {at}+{bytes} of {}", self.bytes);
        ptr::with_exposed_provenance_mut((self.address + at) as usize)
    }

    /// Shared 32-bit word at offset `at`, a multiple of 4.
    pub fn word(&self, at: u64) -> &'a AtomicU32 {
        let word = self.pointer(at, 4).cast::<u32>();
        assert!(word.is_aligned(), "words are aligned");
        // SAFETY: within the range, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// Shared packet, a value with an epoch, at offset `at`, a multiple of 8.
    pub fn packet(&self, at: u64) -> &'a AtomicU64 {
        let packet = self.pointer(at, 8).cast::<u64>();
        assert!(packet.is_aligned(), "packets are aligned");
        // SAFETY: within the range, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU64::from_ptr(packet) }
    }

    /// Reads plain bytes.
    pub fn read(&self, at: u64, out: &mut [u8]) {
        let from = self.pointer(at, out.len());
        // SAFETY: within the range; `out` does not overlap it, since no reference borrows from the range.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Writes plain bytes.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let to = self.pointer(at, bytes.len());
        // SAFETY: within the range; `bytes` does not overlap it, as above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Sets `bytes` plain bytes to `value`.
    pub fn fill(&self, at: u64, bytes: u64, value: u8) {
        let to = self.pointer(at, bytes as usize);
        // SAFETY: within the range.
        unsafe { ptr::write_bytes(to, value, bytes as usize) }
    }

    /// Sets every byte to `value`.
    pub fn fill_all(&self, value: u8) {
        if self.is_given() {
            self.fill(0, self.bytes, value);
        }
    }

    /// The `N` plain bytes in element `index` of an array at `at`.
    pub fn element<const N: usize>(&self, at: u64, index: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(at + index * N as u64, &mut bytes);
        bytes
    }

    /// Writes element `index` in an array at `at` whose elements are `N` plain bytes.
    pub fn set_element<const N: usize>(&self, at: u64, index: u64, bytes: [u8; N]) {
        self.write(at + index * N as u64, &bytes);
    }
}
