//! GPUs: their memory as NICs register it, and the flush of what NICs have written there.
//!
//! A NIC reports an arrival in host memory, and its payload lies in a GPU: two ways, which the platform need not
//! order. Where the GPU's driver reports no order, it is asked to wait for the payload (a flush) after completions
//! were read and before their lanes rise. One flush is for all arrivals of a batch.

use super::sys;
use crate::memory::{DmaBuf, Memory};
use std::path::Path;
use weft_cuda::{Context, RdmaWrites, Relaxed, RelaxedCapture};

/// GPUs of this process, as far as NICs access them. Errors are reasons with their remedies.
pub trait Gpus: Send + Sync {
    /// Dma-buf of memory of a GPU.
    fn export(&self, memory: &Memory) -> Result<DmaBuf, String>;

    /// True if NICs register memory of GPUs by its address.
    fn has_peer_memory(&self) -> bool;

    /// Flush of the writes into a GPU, by its ordinal; `None` if they are visible with their completion.
    fn flush_of(&self, device: u32) -> Result<Option<Flush>, String>;
}

/// Call that returns once the writes of NICs that completed before it are visible in a GPU.
pub type Flush = Box<dyn Fn() -> Result<(), String> + Send>;

/// GPUs of CUDA.
pub struct CudaGpus;

/// Kernel modules by which NICs register memory of GPUs by its address.
const PEER_MEMORY: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

impl Gpus for CudaGpus {
    fn export(&self, memory: &Memory) -> Result<DmaBuf, String> {
        let exported = memory.dma_buf().map_err(|error| error.to_string())?;
        exported.ok_or_else(|| "memory of the host has no dma-buf".into())
    }

    fn has_peer_memory(&self) -> bool {
        PEER_MEMORY.iter().any(|module| Path::new("/sys/module").join(module).exists())
    }

    fn flush_of(&self, device: u32) -> Result<Option<Flush>, String> {
        let open = || {
            let device = weft_cuda::driver()?.device(device)?;
            // Any thread may grant or poll, also during a graph capture on another stream.
            let _relaxed = RelaxedCapture::new()?;
            Ok((device.rdma_writes(), Relaxed::new(Context::primary(device)?)))
        };
        let (writes, context) = open().map_err(why)?;
        match writes {
            RdmaWrites::Ordered => Ok(None),
            RdmaWrites::Flushed => Ok(Some(Box::new(move || {
                let _relaxed = RelaxedCapture::new().map_err(why)?;
                context.flush_rdma_writes().map_err(why)
            }))),
            RdmaWrites::Unordered => Err(format!(
                "writes of NICs into {}: its driver cannot flush them; receive into memory of the host",
                context.device()
            )),
        }
    }
}

fn why(error: weft_cuda::Error) -> String {
    error.to_string()
}

/// GPUs that peers may write to, and whose writes need a flush.
#[derive(Default)]
pub struct FlushedGpus(Vec<(u32, Flush)>);

impl FlushedGpus {
    /// Adds a GPU.
    ///
    /// # Errors
    /// Reason why its writes cannot be flushed.
    pub fn add(&mut self, gpus: &dyn Gpus, device: u32) -> Result<(), String> {
        if self.0.iter().all(|(known, _)| *known != device) {
            self.0.extend(gpus.flush_of(device)?.map(|flush| (device, flush)));
        }
        Ok(())
    }

    /// Removes all but some GPUs.
    pub fn retain(&mut self, is_target: impl Fn(u32) -> bool) {
        self.0.retain(|(device, _)| is_target(*device));
    }

    /// Makes visible what arrivals among these completions have written. An empty arrival has no payload.
    #[inline(always)]
    pub fn flush<'a>(
        &self,
        completions: impl FnOnce() -> &'a [sys::Completion],
    ) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { self.flush_arrived(completions()) }
    }

    #[inline(never)]
    fn flush_arrived(&self, completions: &[sys::Completion]) -> Result<(), String> {
        let has_written = |it: &sys::Completion| {
            let has_arrived = it.status == sys::IBV_WC_SUCCESS && it.opcode & sys::IBV_WC_RECV != 0;
            has_arrived && it.byte_len > 0
        };
        if !completions.iter().any(has_written) {
            return Ok(());
        }
        let flush = |(device, flush): &(u32, Flush)| {
            flush().map_err(|why| format!("writes into GPU {device} were not flushed: {why}"))
        };
        self.0.iter().try_for_each(flush)
    }
}
