//! Memory by its address, as kernels know it.

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// So many bytes at an address. Every access is within them; that nobody else touches plain bytes
/// meanwhile is what the protocol is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region<'a> {
    address: u64,
    bytes: u64,
    memory: PhantomData<&'a AtomicU64>,
}

impl<'a> Region<'a> {
    /// # Safety
    /// While the value is used, the bytes can be read (and written, if anything is written here), a pointer
    /// to them has been exposed, and nobody else accesses those that are not atomics in a way that races.
    pub(super) unsafe fn new(address: u64, bytes: u64) -> Region<'a> {
        Region { address, bytes: if address == 0 { 0 } else { bytes }, memory: PhantomData }
    }

    /// Whether there is anything: an array that is not given has no bytes.
    pub(super) fn is_given(&self) -> bool {
        self.bytes > 0
    }

    fn pointer(&self, at: u64, bytes: usize) -> *mut u8 {
        let end = at.checked_add(bytes as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes {at}+{bytes} of {}", self.bytes);
        ptr::with_exposed_provenance_mut((self.address + at) as usize)
    }

    /// A word that others access too.
    pub(super) fn word(&self, at: u64) -> &'a AtomicU32 {
        let word = self.pointer(at, 4).cast::<u32>();
        assert!(word.is_aligned(), "words are aligned");
        // SAFETY: within the region, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// A value and its epoch, which others access too.
    pub(super) fn packet(&self, at: u64) -> &'a AtomicU64 {
        let packet = self.pointer(at, 8).cast::<u64>();
        assert!(packet.is_aligned(), "packets are aligned");
        // SAFETY: within the region, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU64::from_ptr(packet) }
    }

    /// Reads plain bytes.
    pub(super) fn read(&self, at: u64, out: &mut [u8]) {
        let from = self.pointer(at, out.len());
        // SAFETY: within the region, and `out` is not part of it: nothing else here borrows from it.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Writes plain bytes.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        let to = self.pointer(at, bytes.len());
        // SAFETY: within the region, and `bytes` are not part of it, as above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Sets `bytes` plain bytes to `value`.
    pub(super) fn fill(&self, at: u64, bytes: u64, value: u8) {
        let to = self.pointer(at, bytes as usize);
        // SAFETY: within the region.
        unsafe { ptr::write_bytes(to, value, bytes as usize) }
    }

    /// Sets every byte to `value`.
    pub(super) fn fill_all(&self, value: u8) {
        if self.is_given() {
            self.fill(0, self.bytes, value);
        }
    }

    /// The `N` plain bytes of element `index` of an array of such.
    pub(super) fn element<const N: usize>(&self, at: u64, index: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(at + index * N as u64, &mut bytes);
        bytes
    }

    /// Writes element `index` of an array of elements of `N` plain bytes.
    pub(super) fn set_element<const N: usize>(&self, at: u64, index: u64, bytes: [u8; N]) {
        self.write(at + index * N as u64, &bytes);
    }
}
