//! GPUs as verbs and ofi use them: allocations, exports and flushes.

use super::super::gpu_memory::{Flush, Gpus, cannot_flush};
use super::kernel::TwinKernel;
use super::memories::{GpuId, GpuMemory, TwinGpuControls, is_set, memories};
use crate::memory::{DmaBuf, Memory, MemoryKind, Reader};
use rustix::fd::BorrowedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, write};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes in front of an allocation, which begins inside a page as a tensor may.
const MISALIGNMENT: usize = 512;
const PAGE: u64 = 4096;

/// One process's GPUs.
#[derive(Clone)]
pub struct TwinGpus {
    number: u32,
    controls: Arc<TwinGpuControls>,
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

    /// Launches a kernel on a GPU.
    pub fn launch(&self, device: u32) -> TwinKernel {
        TwinKernel::launched(GpuId { gpus: self.number, device })
    }

    /// Waits for a GPU's streams, as the host does: all stores by kernels there are visible.
    pub fn synchronize(&self, device: u32) {
        let gpu = GpuId { gpus: self.number, device };
        memories().show_stores(|store| store.gpu == gpu);
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

/// First address and length of the pages behind a [`TwinGpus`] descriptor; `None` for another one.
pub fn exported_pages(descriptor: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let mut content = [0; 17];
    let length = pread(descriptor, &mut content, 0).ok()?;
    let number = |at: usize| content[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    (length == 16).then_some((number(0)?, number(8)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use std::sync::Arc;

    /// Bytes that NICs and the host read.
    fn seen(memory: &Memory) -> Vec<u8> {
        // SAFETY: the test's memory.
        unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.len()) }.to_vec()
    }

    #[test]
    fn stores_are_seen_after_a_release_by_their_kernel() {
        let gpus = TwinGpus::new(&Arc::default());
        let memory = gpus.allocate(0, 6).unwrap();
        let (one, two) = (gpus.launch(0), gpus.launch(0));
        one.store(memory.address(), &[1, 2, 3]);
        one.store(memory.address() + 2, &[4]);
        two.store(memory.address() + 4, &[5, 6]);
        let mut loaded = [9; 4];
        one.load(memory.address() + 1, &mut loaded);
        assert_eq!(loaded, [2, 4, 0, 0]);
        assert_eq!(seen(&memory), [0; 6]);
        one.release();
        assert_eq!(seen(&memory), [1, 2, 4, 0, 0, 0], "another kernel's stores are not released");
        two.release();
        assert_eq!(seen(&memory), [1, 2, 4, 0, 5, 6]);
    }

    #[test]
    fn the_host_synchronises_all_kernels_on_one_gpu() {
        let gpus = TwinGpus::new(&Arc::default());
        let memories = [0, 1].map(|device| gpus.allocate(device, 1).unwrap());
        for (device, memory) in (0..).zip(&memories) {
            gpus.launch(device).store(memory.address(), &[7]);
        }
        gpus.synchronize(1);
        assert_eq!(memories.each_ref().map(|memory| seen(memory)[0]), [0, 7]);
    }

    #[test]
    fn stores_end_with_their_memory() {
        let gpus = TwinGpus::new(&Arc::default());
        let memory = gpus.allocate(0, 1).unwrap();
        let (kernel, address) = (gpus.launch(0), memory.address());
        kernel.store(address, &[7]);
        drop(memory);
        let left = memories().stores.iter().any(|store| store.kernel == kernel.number);
        assert!(!left);
    }

    #[test]
    #[should_panic(expected = "not in one allocation")]
    fn a_store_outside_the_gpus_memory_panics() {
        let gpus = TwinGpus::new(&Arc::default());
        let memory = gpus.allocate(0, 1).unwrap();
        gpus.launch(1).store(memory.address(), &[7]);
    }
}
