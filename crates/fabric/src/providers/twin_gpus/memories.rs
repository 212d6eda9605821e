//! GPU memory in this process, and the writes and stores that are not visible there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// GPU driver behaviour, and a flush counter, shared with a test.
#[derive(Debug, Default)]
pub struct TwinGpuControls {
    /// Writes are visible with the completion, into memory that is allocated from now on.
    pub is_ordered: AtomicBool,
    /// Writes are visible to the GPU itself with the completion. Tests then read as the GPU does.
    pub is_ordered_for_owner: AtomicBool,
    /// Memory is not exported as a dma-buf.
    pub refuses_export: AtomicBool,
    /// Memory is registered by address, too.
    pub has_peer_memory: AtomicBool,
    /// The driver neither orders nor flushes writes.
    pub cannot_flush: AtomicBool,
    /// Flushes fail.
    pub fails_flushes: AtomicBool,
    /// Flushes so far.
    pub flushes: AtomicU64,
}

pub(super) fn is_set(control: &AtomicBool) -> bool {
    control.load(Ordering::SeqCst)
}

/// Identifies a GPU: a process, and an ordinal there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuId {
    pub(super) gpus: u32,
    pub(super) device: u32,
}

/// GPU allocation.
#[derive(Clone)]
pub struct GpuMemory {
    pub(super) length: u64,
    pub(super) gpu: GpuId,
    pub(super) is_ordered: bool,
    pub(super) controls: Arc<TwinGpuControls>,
}

impl GpuMemory {
    /// The GPU whose flush makes writes visible; `None` for one that needs none.
    pub fn flushed_gpu(&self) -> Option<GpuId> {
        (!self.is_ordered).then_some(self.gpu)
    }

    pub fn has_peer_memory(&self) -> bool {
        is_set(&self.controls.has_peer_memory)
    }
}

/// NIC write that is not yet visible.
pub struct WithheldWrite {
    pub gpu: GpuId,
    /// Key by which it came.
    pub key: u32,
    pub to: u64,
    pub bytes: Vec<u8>,
}

/// Kernel store that NICs and the host do not see yet.
pub(super) struct Store {
    pub kernel: u32,
    pub gpu: GpuId,
    pub to: u64,
    pub bytes: Vec<u8>,
}

/// All allocations, and what is not visible there.
#[derive(Default)]
pub(super) struct Memories {
    /// By address.
    pub(super) allocations: BTreeMap<u64, GpuMemory>,
    /// In arrival order.
    withheld: Vec<WithheldWrite>,
    /// Kernel stores without a release, oldest first.
    pub(super) stores: Vec<Store>,
    pub(super) issued: u32,
    pub(super) launched: u32,
}

pub(super) fn memories() -> MutexGuard<'static, Memories> {
    static MEMORIES: LazyLock<Mutex<Memories>> = LazyLock::new(Mutex::default);
    MEMORIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// GPU allocation that contains an address.
pub fn memory_at(address: u64) -> Option<GpuMemory> {
    let memories = memories();
    let (begin, memory) = memories.allocations.range(..=address).next_back()?;
    (address - begin < memory.length).then(|| memory.clone())
}

/// Keeps a NIC write until the GPU's next flush. The range stays valid until [`forget`] takes the key.
pub fn withhold(write: WithheldWrite) {
    memories().withheld.push(write);
}

/// Drops the withheld writes by a key, which ends.
pub fn forget(key: u32) {
    memories().withheld.retain(|write| write.key != key);
}

impl Memories {
    /// Makes the withheld writes into a GPU visible.
    pub fn show_writes(&mut self, gpu: GpuId) {
        for WithheldWrite { to, bytes, .. } in self.withheld.extract_if(.., |it| it.gpu == gpu) {
            // SAFETY: the range is registered, so the owner keeps it: writes into a region end with it.
            unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        }
    }

    /// Asserts that a range is in an allocation on a GPU.
    pub fn check(&self, gpu: GpuId, address: u64, length: usize) {
        let found = self.allocations.range(..=address).next_back();
        let is_inside = found.is_some_and(|(begin, memory)| {
            memory.gpu == gpu && address - begin + length as u64 <= memory.length
        });
        assert!(is_inside, "{length} bytes at {address:#x} are not in one allocation on {gpu:?}");
    }

    /// Makes some stores visible, the oldest first.
    pub fn show_stores(&mut self, shown: impl Fn(&Store) -> bool) {
        for Store { to, bytes, .. } in self.stores.extract_if(.., |store| shown(store)) {
            // SAFETY: in an allocation, since stores into one end with it.
            unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        }
    }
}
