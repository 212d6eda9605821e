//! GPUs: GPU memory as NICs register it, and flushing what NICs have written there.
//!
//! A NIC reports an arrival in host memory, and the payload lies in a GPU: two paths, which the platform
//! need not order. Where the GPU's driver reports no order, it is asked to wait for the payload (a flush)
//! after completions were read and before lanes rise. One flush covers all arrivals in a batch.

use super::copy::cuda::zeroed;
use crate::memory::{DmaBuf, Memory, MemoryKind, Reader};
use std::fmt::Display;
use std::path::Path;
use weft_cuda::{Context, RdmaWrites, Relaxed, RelaxedCapture};

/// GPUs in this process, as far as NICs access them. Errors are reasons with remedies.
pub trait Gpus: Send + Sync {
    /// Zeroed memory on the GPU with this ordinal; `None` without GPUs.
    fn allocate(&self, device: u32, length: usize) -> Option<Result<Memory, String>>;

    /// Dma-buf for GPU memory.
    fn export(&self, memory: &Memory) -> Result<DmaBuf, String>;

    /// True if NICs register GPU memory by address.
    fn has_peer_memory(&self) -> bool;

    /// Flush that makes writes into a GPU, by ordinal, visible to a reader; `None` if they are with the
    /// completion.
    fn flush_of(&self, device: u32, reader: Reader) -> Result<Option<Flush>, String>;

    /// True for simulated GPUs, whose memory a library registers as host memory.
    fn are_simulated(&self) -> bool {
        false
    }
}

/// Call that returns once NIC writes that completed before it are visible in a GPU, to the reader that it was
/// made for. One for [`Reader::All`] is one for the owner, too.
pub type Flush = Box<dyn Fn() -> Result<(), String> + Send>;

/// CUDA GPUs.
pub struct CudaGpus;

/// Kernel modules by which NICs register GPU memory by address.
const PEER_MEMORY: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

impl Gpus for CudaGpus {
    fn allocate(&self, device: u32, length: usize) -> Option<Result<Memory, String>> {
        let driver = weft_cuda::driver().ok()?;
        let context = || {
            let relaxed = RelaxedCapture::new()?;
            Ok((Context::primary(driver.device(device)?)?, relaxed))
        };
        Some(context().map_err(why).and_then(|(context, _relaxed)| zeroed(&context, length)))
    }

    fn export(&self, memory: &Memory) -> Result<DmaBuf, String> {
        let exported = memory.dma_buf().map_err(|error| error.to_string())?;
        exported.ok_or_else(|| "memory of the host has no dma-buf".into())
    }

    fn has_peer_memory(&self) -> bool {
        PEER_MEMORY.iter().any(|module| Path::new("/sys/module").join(module).exists())
    }

    fn flush_of(&self, device: u32, reader: Reader) -> Result<Option<Flush>, String> {
        let open = || {
            let device = weft_cuda::driver()?.device(device)?;
            // Any thread may grant or poll, also during a graph capture on another stream.
            let _relaxed = RelaxedCapture::new()?;
            Ok((device.rdma_writes(reader), Relaxed::new(Context::primary(device)?)))
        };
        let (writes, context) = open().map_err(why)?;
        match writes {
            RdmaWrites::Ordered => Ok(None),
            RdmaWrites::Flushed => Ok(Some(Box::new(move || {
                let _relaxed = RelaxedCapture::new().map_err(why)?;
                context.flush_rdma_writes().map_err(why)
            }))),
            RdmaWrites::Unordered => Err(cannot_flush(context.device())),
        }
    }
}

/// Refusal of a GPU as a destination.
pub fn cannot_flush(device: impl Display) -> String {
    format!(
        "writes of NICs into {device}: its driver cannot flush them; receive into memory of the host"
    )
}

fn why(error: weft_cuda::Error) -> String {
    error.to_string()
}

/// GPU memory as a destination: the GPU's ordinal, and who reads there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuTarget {
    pub device: u32,
    pub reader: Reader,
}

impl GpuTarget {
    /// `None` for host memory.
    pub fn of(memory: &Memory) -> Option<GpuTarget> {
        match memory.kind() {
            MemoryKind::Host => None,
            MemoryKind::Device(device) => Some(GpuTarget { device, reader: memory.reader() }),
        }
    }
}

/// GPUs that peers may write to, and whose readers need a flush.
#[derive(Default)]
pub struct FlushedGpus(Vec<(GpuTarget, Flush)>);

impl FlushedGpus {
    /// Adds a GPU with a reader.
    ///
    /// # Errors
    /// Reason why writes into it cannot be flushed.
    pub fn add(&mut self, gpus: &dyn Gpus, target: GpuTarget) -> Result<(), String> {
        if !self.has(target) {
            let flush = gpus.flush_of(target.device, target.reader)?;
            self.0.extend(flush.map(|flush| (target, flush)));
        }
        Ok(())
    }

    fn has(&self, target: GpuTarget) -> bool {
        self.0.iter().any(|(known, _)| *known == target)
    }

    /// Removes all but some targets.
    pub fn retain(&mut self, is_target: impl Fn(GpuTarget) -> bool) {
        self.0.retain(|(target, _)| is_target(*target));
    }

    /// True if no GPU needs a flush.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes visible what peers have written, once for all arrivals in a batch. `has_payload`: whether any
    /// of them brought bytes, asked only if there is a GPU to flush.
    #[inline(always)]
    pub fn flush(&self, has_payload: impl FnOnce() -> bool) -> Result<(), String> {
        if self.is_empty() || !has_payload() { Ok(()) } else { self.flush_all() }
    }

    #[inline(never)]
    fn flush_all(&self) -> Result<(), String> {
        let is_covered = |target: GpuTarget| {
            target.reader == Reader::Owner && self.has(GpuTarget { reader: Reader::All, ..target })
        };
        let mut due = self.0.iter().filter(|(target, _)| !is_covered(*target));
        due.try_for_each(|(GpuTarget { device, .. }, flush)| {
            flush().map_err(|why| format!("writes into GPU {device} were not flushed: {why}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::twin_gpus::{TwinGpuControls, TwinGpus};
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::SeqCst;

    const ALL: GpuTarget = GpuTarget { device: 0, reader: Reader::All };
    const OWNER: GpuTarget = GpuTarget { device: 0, reader: Reader::Owner };

    fn gpus() -> (TwinGpus, Arc<TwinGpuControls>) {
        let controls = Arc::default();
        (TwinGpus::new(&controls), controls)
    }

    #[test]
    fn a_gpu_is_flushed_once_for_all_of_its_readers() {
        let (gpus, controls) = gpus();
        let mut flushed = FlushedGpus::default();
        let other = GpuTarget { device: 1, ..OWNER };
        for target in [OWNER, ALL, OWNER, other] {
            flushed.add(&gpus, target).unwrap();
        }
        flushed.flush(|| true).unwrap();
        assert_eq!(controls.flushes.load(SeqCst), 2);
        flushed.flush(|| false).unwrap();
        assert_eq!(controls.flushes.load(SeqCst), 2);
        flushed.retain(|target| target == OWNER);
        flushed.flush(|| true).unwrap();
        assert_eq!(controls.flushes.load(SeqCst), 3);
        flushed.retain(|_| false);
        flushed.flush(|| panic!("no GPU is left to flush")).unwrap();
    }

    #[test]
    fn the_owner_needs_no_flush_where_the_platform_orders_writes_for_it() {
        let (gpus, controls) = gpus();
        controls.is_ordered_for_owner.store(true, SeqCst);
        let mut flushed = FlushedGpus::default();
        flushed.add(&gpus, OWNER).unwrap();
        assert!(flushed.is_empty());
        flushed.add(&gpus, ALL).unwrap();
        flushed.flush(|| true).unwrap();
        assert_eq!(controls.flushes.load(SeqCst), 1);
        controls.is_ordered.store(true, SeqCst);
        let mut flushed = FlushedGpus::default();
        flushed.add(&gpus, ALL).unwrap();
        assert!(flushed.is_empty());
    }

    #[test]
    fn a_gpu_that_cannot_be_flushed_is_refused_unless_its_reader_needs_none() {
        let (gpus, controls) = gpus();
        controls.cannot_flush.store(true, SeqCst);
        let mut flushed = FlushedGpus::default();
        let expected = cannot_flush("GPU 0");
        assert_eq!(flushed.add(&gpus, OWNER).unwrap_err(), expected);
        controls.is_ordered_for_owner.store(true, SeqCst);
        assert_eq!(flushed.add(&gpus, ALL).unwrap_err(), expected);
        flushed.add(&gpus, OWNER).unwrap();
    }

    #[test]
    fn memory_is_for_all_readers_unless_stated() {
        let (gpus, _) = gpus();
        let memory = || gpus.allocate(0, 16).unwrap();
        assert_eq!(GpuTarget::of(&memory()), Some(ALL));
        assert_eq!(GpuTarget::of(&memory().read_by(Reader::Owner)), Some(OWNER));
        assert_eq!(GpuTarget::of(&Memory::shared(16).unwrap()), None);
    }
}
