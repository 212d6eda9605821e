//! GPUs of the twin: memory in which writes of NICs are visible after a flush.
//!
//! Their memory is that of the host under the kind of a device. A NIC withholds what it writes there, for ever
//! without a flush: a lane that rises before has payload that is missing.

use super::super::gpu::{Flush, Gpus};
use super::network::{Network, network};
use crate::memory::{DmaBuf, Memory, MemoryKind};
use rustix::fd::BorrowedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, write};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes in front of an allocation, which begins inside of a page as a tensor may.
const MISALIGNMENT: usize = 512;
const PAGE: u64 = 4096;

/// GPUs of one process.
#[derive(Clone)]
pub struct TwinGpus {
    number: u32,
    controls: Arc<TwinGpuControls>,
}

/// Behaviour of the GPUs' driver, and its counter, shared with a test.
#[derive(Debug, Default)]
pub struct TwinGpuControls {
    /// Writes are visible with their completion, into memory that is allocated from now on.
    pub is_ordered: AtomicBool,
    /// Memory is not exported as a dma-buf.
    pub refuses_export: AtomicBool,
    /// Memory is registered by its address, too.
    pub has_peer_memory: AtomicBool,
    /// Flushes fail.
    pub fails_flushes: AtomicBool,
    /// Number of flushes.
    pub flushes: AtomicU64,
}

fn is_set(control: &AtomicBool) -> bool {
    control.load(Ordering::SeqCst)
}

/// Identity of a GPU: its process, and its ordinal there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuId {
    gpus: u32,
    device: u32,
}

/// Allocation of a GPU, by its address.
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

/// Write of a NIC that is not yet visible.
pub struct WithheldWrite {
    pub gpu: GpuId,
    /// Key by which it came.
    pub key: u32,
    pub to: u64,
    pub bytes: Vec<u8>,
}

/// Owner of an allocation.
struct Allocation {
    address: u64,
    _memory: Memory,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        network().gpu_memory.remove(&self.address);
    }
}

impl TwinGpus {
    /// GPUs of a process.
    pub fn new(controls: &Arc<TwinGpuControls>) -> TwinGpus {
        TwinGpus { number: network().issue(), controls: controls.clone() }
    }

    /// Zeroed memory of a GPU, which tests read by its address.
    ///
    /// # Errors
    /// Those of [`Memory::shared`].
    pub fn allocate(&self, device: u32, length: usize) -> crate::Result<Memory> {
        let memory = Memory::shared(MISALIGNMENT + length)?;
        let first = memory.pointer(MISALIGNMENT, length);
        let address = first.expose_provenance() as u64;
        let record = GpuMemory {
            length: length as u64,
            gpu: GpuId { gpus: self.number, device },
            is_ordered: is_set(&self.controls.is_ordered),
            controls: self.controls.clone(),
        };
        network().gpu_memory.insert(address, record);
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
        network().show_writes(gpu);
        Ok(())
    }
}

impl Gpus for TwinGpus {
    /// A file with address and length of whole pages in place of their bytes.
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

    fn flush_of(&self, device: u32) -> Result<Option<Flush>, String> {
        if is_set(&self.controls.is_ordered) {
            return Ok(None);
        }
        let (gpus, gpu) = (self.clone(), GpuId { gpus: self.number, device });
        Ok(Some(Box::new(move || gpus.flush(gpu))))
    }
}

impl Network {
    /// Allocation of a GPU that contains an address.
    pub fn gpu_memory_at(&self, address: u64) -> Option<&GpuMemory> {
        let (begin, memory) = self.gpu_memory.range(..=address).next_back()?;
        (address - begin < memory.length).then_some(memory)
    }

    /// Makes the withheld writes into a GPU visible.
    fn show_writes(&mut self, gpu: GpuId) {
        for WithheldWrite { to, bytes, .. } in self.withheld.extract_if(.., |it| it.gpu == gpu) {
            // SAFETY: the range is registered, so its owner keeps it: the writes of a region end with it.
            unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        }
    }
}

/// First address and length of the pages behind a descriptor of [`TwinGpus`]; `None` for another one.
pub fn exported_pages(descriptor: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let mut content = [0; 17];
    let length = pread(descriptor, &mut content, 0).ok()?;
    let number = |at: usize| content[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    (length == 16).then_some((number(0)?, number(8)?))
}
