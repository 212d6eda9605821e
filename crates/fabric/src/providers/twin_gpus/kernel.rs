//! Kernels on twin GPUs: NICs read what they store only after a system-wide release.

use super::{GpuId, TwinGpus, memories};

/// Kernel store that NICs and the host do not see yet.
pub(super) struct Store {
    kernel: u32,
    gpu: GpuId,
    pub(super) to: u64,
    bytes: Vec<u8>,
}

/// A kernel's block on a twin GPU. Its threads have met at a block barrier before each call.
///
/// Memory itself is what NICs and the host read. A store reaches it by [`TwinKernel::release`] or
/// [`TwinGpus::synchronize`], and never otherwise: a put without a release brings old bytes.
pub struct TwinKernel {
    number: u32,
    gpu: GpuId,
}

impl TwinGpus {
    /// Launches a kernel on a GPU.
    pub fn launch(&self, device: u32) -> TwinKernel {
        let mut memories = memories();
        memories.launched += 1;
        TwinKernel { number: memories.launched, gpu: GpuId { gpus: self.number, device } }
    }

    /// Waits for a GPU's streams, as the host does: all that its kernels have stored is visible.
    pub fn synchronize(&self, device: u32) {
        let gpu = GpuId { gpus: self.number, device };
        memories().show_stores(|store| store.gpu == gpu);
    }
}

impl TwinKernel {
    /// Stores bytes, which only this kernel's loads observe so far.
    ///
    /// # Panics
    /// Unless the range is in one allocation on this GPU.
    pub fn store(&self, to: u64, bytes: &[u8]) {
        let mut memories = memories();
        memories.check(self.gpu, to, bytes.len());
        let (kernel, gpu, bytes) = (self.number, self.gpu, bytes.to_vec());
        memories.stores.push(Store { kernel, gpu, to, bytes });
    }

    /// Loads bytes: what has reached memory, and this kernel's own stores.
    ///
    /// # Panics
    /// Same as [`TwinKernel::store`].
    pub fn load(&self, from: u64, bytes: &mut [u8]) {
        let memories = memories();
        memories.check(self.gpu, from, bytes.len());
        // SAFETY: in an allocation, which the lock keeps.
        unsafe { std::ptr::copy(from as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        for store in memories.stores.iter().filter(|store| store.kernel == self.number) {
            for (address, value) in (store.to..).zip(&store.bytes) {
                let at = address.checked_sub(from).and_then(|at| bytes.get_mut(at as usize));
                if let Some(byte) = at {
                    *byte = *value;
                }
            }
        }
    }

    /// Release at system scope (`fence.acq_rel.sys`): NICs and the host read what this kernel has stored.
    pub fn release(&self) {
        memories().show_stores(|store| store.kernel == self.number);
    }
}

impl super::Memories {
    /// Asserts that a range is in an allocation on a GPU.
    fn check(&self, gpu: GpuId, address: u64, length: usize) {
        let found = self.allocations.range(..=address).next_back();
        let is_inside = found.is_some_and(|(begin, memory)| {
            memory.gpu == gpu && address - begin + length as u64 <= memory.length
        });
        assert!(is_inside, "{length} bytes at {address:#x} are not in one allocation on {gpu:?}");
    }

    /// Makes some stores visible, in their order.
    fn show_stores(&mut self, shown: impl Fn(&Store) -> bool) {
        for Store { to, bytes, .. } in self.stores.extract_if(.., |store| shown(store)) {
            // SAFETY: in an allocation, since stores into one end with it.
            unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        }
    }
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
        let left = super::memories().stores.iter().any(|store| store.kernel == kernel.number);
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
