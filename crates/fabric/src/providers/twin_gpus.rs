//! Twin GPUs, for tests without hardware: memory in which NIC writes are visible after a flush, and kernel stores
//! after a system-wide release.
//!
//! This is host memory marked as device memory. A simulated NIC withholds what it writes there
//! ([`withhold`]), for ever without a flush: a lane that rises before has payload that is missing. Kernels
//! ([`TwinKernel`]) withhold what they store in the same way: a NIC that reads before the release sends old bytes.

mod kernel;

pub use kernel::TwinKernel;

use super::gpu_memory::{Flush, Gpus, cannot_flush};
use crate::memory::{DmaBuf, Memory, MemoryKind, Reader};
use rustix::fd::BorrowedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, write};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Bytes in front of an allocation, which begins inside a page as a tensor may.
const MISALIGNMENT: usize = 512;
const PAGE: u64 = 4096;

/// One process's GPUs.
#[derive(Clone)]
pub struct TwinGpus {
    number: u32,
    controls: Arc<TwinGpuControls>,
}

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

/// Identifies a GPU: a process, and an ordinal there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuId {
    gpus: u32,
    device: u32,
}

/// GPU allocation.
#[derive(Clone)]
pub struct GpuMemory {
    length: u64,
    gpu: GpuId,
    is_ordered: bool,
    controls: Arc<TwinGpuControls>,
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

/// GPU memory in this process, and writes and stores that are not visible there.
#[derive(Default)]
struct Memories {
    /// By address.
    allocations: BTreeMap<u64, GpuMemory>,
    /// In arrival order.
    withheld: Vec<WithheldWrite>,
    /// Kernel stores without a release, in their order.
    stores: Vec<kernel::Store>,
    issued: u32,
    launched: u32,
}

fn memories() -> MutexGuard<'static, Memories> {
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

fn is_set(control: &AtomicBool) -> bool {
    control.load(Ordering::SeqCst)
}

/// Allocation owner.
struct Allocation {
    address: u64,
    _memory: Memory,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut memories = memories();
        let length = memories.allocations.remove(&self.address).map_or(0, |memory| memory.length);
        memories.stores.retain(|store| store.to.wrapping_sub(self.address) >= length);
    }
}

impl TwinGpus {
    /// A process's GPUs.
    pub fn new(controls: &Arc<TwinGpuControls>) -> TwinGpus {
        let mut memories = memories();
        memories.issued += 1;
        TwinGpus { number: memories.issued, controls: controls.clone() }
    }

    /// Zeroed GPU memory, which tests read by address, as NICs and the host do.
    ///
    /// # Errors
    /// Same as [`Memory::shared`].
    pub fn allocate(&self, device: u32, length: usize) -> crate::Result<Memory> {
        let memory = Memory::shared(MISALIGNMENT + length)?;
        let first = memory.pointer(MISALIGNMENT, length);
        let address = first.expose_provenance() as u64;
        let record = GpuMemory {
            length: length as u64,
            gpu: GpuId { gpus: self.number, device },
            is_ordered: is_set(&self.controls.is_ordered)
                || is_set(&self.controls.is_ordered_for_owner),
            controls: self.controls.clone(),
        };
        memories().allocations.insert(address, record);
        let owner = Box::new(Allocation { address, _memory: memory });
        let first = NonNull::new(first).expect("mapped memory has an address");
        // SAFETY: `owner` keeps the mapping.
        Ok(unsafe { Memory::on_device(first, length, device, None, owner) })
    }

    fn flush(&self, gpu: GpuId) -> Result<(), String> {
        if is_set(&self.controls.fails_flushes) {
            return Err("the test fails flushes".into());
        }
        self.controls.flushes.fetch_add(1, Ordering::SeqCst);
        memories().show_writes(gpu);
        Ok(())
    }
}

impl Gpus for TwinGpus {
    fn allocate(&self, device: u32, length: usize) -> Option<Result<Memory, String>> {
        Some(TwinGpus::allocate(self, device, length).map_err(|error| error.to_string()))
    }

    /// A file that holds the address and length of whole pages in place of the bytes.
    fn export(&self, memory: &Memory) -> Result<DmaBuf, String> {
        if is_set(&self.controls.refuses_export) {
            return Err("the test refuses to export memory".into());
        }
        let MemoryKind::Device(_) = memory.kind() else { return Err("memory of the host".into()) };
        let (address, bytes) = (memory.address(), memory.len() as u64);
        let offset = address % PAGE;
        let range = [address - offset, (offset + bytes).next_multiple_of(PAGE)];
        let file = memfd_create("twin dma-buf", MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
        let content = range.map(u64::to_le_bytes).concat();
        write(&file, &content).map_err(|e| e.to_string())?;
        Ok(DmaBuf { descriptor: file, offset, bytes })
    }

    fn has_peer_memory(&self) -> bool {
        is_set(&self.controls.has_peer_memory)
    }

    fn flush_of(&self, device: u32, reader: Reader) -> Result<Option<Flush>, String> {
        let for_owner = reader == Reader::Owner && is_set(&self.controls.is_ordered_for_owner);
        if for_owner || is_set(&self.controls.is_ordered) {
            return Ok(None);
        }
        if is_set(&self.controls.cannot_flush) {
            return Err(cannot_flush(format_args!("GPU {device}")));
        }
        let (gpus, gpu) = (self.clone(), GpuId { gpus: self.number, device });
        Ok(Some(Box::new(move || gpus.flush(gpu))))
    }

    fn are_simulated(&self) -> bool {
        true
    }
}

impl Memories {
    /// Makes the withheld writes into a GPU visible.
    fn show_writes(&mut self, gpu: GpuId) {
        for WithheldWrite { to, bytes, .. } in self.withheld.extract_if(.., |it| it.gpu == gpu) {
            // SAFETY: the range is registered, so the owner keeps it: writes into a region end with it.
            unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        }
    }
}

/// First address and length of the pages behind a [`TwinGpus`] descriptor; `None` for another one.
pub fn exported_pages(descriptor: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let mut content = [0; 17];
    let length = pread(descriptor, &mut content, 0).ok()?;
    let number = |at: usize| content[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    (length == 16).then_some((number(0)?, number(8)?))
}
