//! Kernels on twin GPUs: NICs read what they store only after a system-wide release.

use super::memories::{GpuId, Store, memories};

/// A kernel's block on a twin GPU. All threads have met at a block barrier before each call.
///
/// Memory itself is what NICs and the host read. A store reaches it by [`TwinKernel::release`] or
/// [`TwinGpus::synchronize`](super::TwinGpus::synchronize), and never otherwise: a put without a release brings old bytes.
pub struct TwinKernel {
    pub(super) number: u32,
    gpu: GpuId,
}

impl TwinKernel {
    /// A kernel that begins now.
    pub(super) fn launched(gpu: GpuId) -> TwinKernel {
        let mut memories = memories();
        memories.launched += 1;
        TwinKernel { number: memories.launched, gpu }
    }

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
