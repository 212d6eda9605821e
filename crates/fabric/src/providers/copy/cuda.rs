//! GPU copy engines, driven through CUDA: a queue is a stream.
//!
//! Any thread may make progress, including the user's. Each call therefore preserves the thread's current
//! context, and is valid while a graph is captured on another stream.

use super::engine::{CopyEngine, DeviceUuid, EventId, PageCopy, QueueId};
use super::page_kernel::{LONGEST_LIST, LONGEST_PAGE, PageKernel, TableId};
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use weft_cuda::{
    Context, Driver, Event, OwnedStream, PinnedMemory, RegisteredMemory, Relaxed, RelaxedCapture,
    Stream, VirtualMemory, copy_async, driver, set_bytes_async,
};

/// Events created with a device.
const EVENTS: usize = 16;

/// GPUs that this process sees.
///
/// The first use of a device creates and loads what later copies need. CUDA's calls that allocate memory or
/// load a kernel wait for kernels that run, and a kernel may wait for the copy.
pub(super) struct Cuda {
    driver: &'static Driver,
    contexts: BTreeMap<u32, Arc<Context>>,
    /// SMs that page lists may occupy.
    sms: u32,
    /// Kernels by device; none where copy engines move all pages.
    kernels: BTreeMap<u32, PageKernel>,
    streams: Vec<Option<CopyStream>>,
    events: Vec<CopyEvent>,
    /// Unused events.
    free: Vec<u32>,
}

struct CopyStream {
    device: u32,
    it: OwnedStream,
    /// Pages for the next launch.
    pages: Vec<PageCopy>,
    /// Tables of launches since the last event.
    tables: Vec<TableId>,
    /// Copies since the last event that failed.
    failure: Option<String>,
}

struct CopyEvent {
    device: u32,
    it: Event,
    /// Tables of the launches before it.
    tables: Vec<TableId>,
    /// Copies before it that failed.
    failure: Option<String>,
}

fn why(error: weft_cuda::Error) -> String {
    error.to_string()
}

impl Cuda {
    /// Loads the driver. Page lists may occupy `sms` SMs; with 0 they go to the copy engines.
    pub fn new(sms: u32) -> Result<Cuda, String> {
        let (contexts, kernels) = (BTreeMap::new(), BTreeMap::new());
        let (streams, events, free) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Cuda { driver: driver().map_err(why)?, contexts, sms, kernels, streams, events, free })
    }

    fn context(&mut self, device: u32) -> Result<Arc<Context>, String> {
        if let Some(context) = self.contexts.get(&device) {
            return Ok(context.clone());
        }
        let it = self.driver.device(device).map_err(why)?;
        let context = Context::primary(it).map_err(why)?;
        let stream = Stream::create(&context).map_err(why)?;
        if self.sms > 0 {
            let sms = self.sms.min(it.sm_count());
            let loaded = PageKernel::new(&context, it.compute_capability(), sms)
                .and_then(|mut kernel| kernel.load(&stream).map(|()| kernel));
            match loaded {
                Ok(kernel) => drop(self.kernels.insert(device, kernel)),
                Err(error) => log::warn!(
                    "GPU {device}: copy engines move the pages of lists one by one, since a kernel for \
                     them cannot be compiled or loaded: {error}"
                ),
            }
        }
        warm_up(&context, &stream).map_err(why)?;
        for _ in 0..EVENTS {
            let it = Event::new(&context).map_err(why)?;
            self.free.push(self.events.len() as u32);
            self.events.push(CopyEvent { device, it, tables: Vec::new(), failure: None });
        }
        self.contexts.insert(device, context.clone());
        Ok(context)
    }

    fn stream(&self, queue: QueueId) -> Result<&CopyStream, String> {
        let stream = self.streams.get(queue.0 as usize).and_then(Option::as_ref);
        stream.ok_or_else(|| "unknown queue".into())
    }

    fn stream_mut(&mut self, queue: QueueId) -> Result<&mut CopyStream, String> {
        let stream = self.streams.get_mut(queue.0 as usize).and_then(Option::as_mut);
        stream.ok_or_else(|| "unknown queue".into())
    }

    /// Moves the pages that have collected. A failure counts for the event behind them.
    fn start_pages(&mut self, queue: QueueId) -> Result<(), String> {
        let stream = self.streams.get_mut(queue.0 as usize).and_then(Option::as_mut);
        let stream = stream.ok_or("unknown queue")?;
        if stream.pages.is_empty() {
            return Ok(());
        }
        let kernel = self.kernels.get_mut(&stream.device).filter(|_| self.sms > 0);
        let launched = kernel.map_or(Ok(None), |kernel| {
            // SAFETY: by the contract of `copy`; the table is released with the event behind the launch.
            unsafe { kernel.launch(&stream.pages, stream.it.stream()) }.map_err(why)
        });
        let moved = launched.and_then(|table| match table {
            Some(table) => {
                stream.tables.push(table);
                Ok(())
            }
            None => copy_each(&stream.it, &stream.pages),
        });
        if let Err(error) = moved {
            stream.failure.get_or_insert(error);
        }
        stream.pages.clear();
        Ok(())
    }

    /// Unused event on the device.
    fn event(&mut self, device: u32) -> Result<u32, String> {
        let fits = |&number: &u32| self.events[number as usize].device == device;
        if let Some(place) = self.free.iter().position(fits) {
            return Ok(self.free.swap_remove(place));
        }
        let it = Event::new(&self.context(device)?).map_err(why)?;
        self.events.push(CopyEvent { device, it, tables: Vec::new(), failure: None });
        Ok(self.events.len() as u32 - 1)
    }
}

/// Copies some bytes in each direction, for which the driver may load kernels of its own.
fn warm_up(context: &Arc<Context>, stream: &OwnedStream) -> weft_cuda::Result<()> {
    const BYTES: usize = 64;
    let host = PinnedMemory::alloc(context, BYTES)?;
    let device = VirtualMemory::create(context, 2 * BYTES)?;
    {
        let _bound = context.enter()?;
        set_bytes_async(device.address(), 0, 2 * BYTES, stream.stream())?;
        copy_async(host.device_address(), device.address(), BYTES, stream.stream())?;
        copy_async(device.address(), host.device_address(), BYTES, stream.stream())?;
        let other = device.address() + BYTES as u64;
        copy_async(other, device.address(), BYTES, stream.stream())?;
    }
    stream.synchronize()
}

/// Adds copies by the copy engine, one for each page. Unpinned host memory goes through the driver's staging
/// buffers, in the same order.
fn copy_each(stream: &OwnedStream, pages: &[PageCopy]) -> Result<(), String> {
    let _bound = stream.context().enter().map_err(why)?;
    pages.iter().try_for_each(|page| {
        let length = usize::try_from(page.length);
        let length = length.map_err(|_| "length exceeds the address space")?;
        copy_async(page.to, page.from, length, stream.stream()).map_err(why)
    })
}

/// Wraps mapped device memory as [`Memory`].
/// Zeroed memory in a context's device, which can be shared with other processes. No capture may forbid it.
pub(in crate::providers) fn zeroed(
    context: &Arc<Context>,
    length: usize,
) -> Result<Memory, String> {
    let memory = VirtualMemory::create(context, length.max(1)).map_err(why)?;
    let stream = Stream::create(context).map_err(why)?;
    {
        let _bound = context.enter().map_err(why)?;
        set_bytes_async(memory.address(), 0, memory.len(), stream.stream()).map_err(why)?;
    }
    stream.synchronize().map_err(why)?;
    region(memory, context.device().ordinal(), length, true)
}

fn region(
    memory: VirtualMemory,
    device: u32,
    length: usize,
    share: bool,
) -> Result<Memory, String> {
    let address = memory.address() as usize;
    let address = NonNull::new(std::ptr::without_provenance_mut(address));
    let address = address.ok_or("the driver mapped memory at address zero")?;
    let descriptor = if share { Some(memory.export().map_err(why)?) } else { None };
    let owner = Box::new(Relaxed::new(memory));
    // SAFETY: `owner` keeps at least `length` bytes mapped there while it lives.
    Ok(unsafe { Memory::on_device(address, length, device, descriptor, owner) })
}

impl CopyEngine for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn uuid(&mut self, device: u32) -> Result<DeviceUuid, String> {
        Ok(self.driver.device(device).map_err(why)?.uuid())
    }

    fn find(&mut self, uuid: DeviceUuid) -> Option<u32> {
        let devices = 0..self.driver.device_count().ok()?;
        devices.into_iter().find(|&device| self.uuid(device) == Ok(uuid))
    }

    fn prepare(&mut self, device: u32) -> Result<(), String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        self.context(device).map(drop)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        let context = self.context(device)?;
        zeroed(&context, length)
    }

    fn import(
        &mut self,
        device: u32,
        descriptor: BorrowedFd<'_>,
        length: usize,
    ) -> Result<Memory, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        let context = self.context(device)?;
        let descriptor = descriptor.try_clone_to_owned();
        let descriptor = descriptor.map_err(|e| format!("cannot duplicate its descriptor: {e}"))?;
        let memory = VirtualMemory::import(&context, descriptor, length.max(1)).map_err(why)?;
        region(memory, device, length, false)
    }

    unsafe fn pin(&mut self, device: u32, memory: &Memory) -> Option<Box<dyn Send>> {
        let host = memory.host().filter(|_| !memory.is_empty())?;
        let _relaxed = RelaxedCapture::new().ok()?;
        let context = self.context(device).ok()?;
        // SAFETY: `memory` is mapped there, and outlives the returned guard by the caller's contract.
        match unsafe { RegisteredMemory::new(&context, host.as_ptr(), memory.len()) } {
            Ok(pinned) => Some(Box::new(Relaxed::new(pinned))),
            Err(error) => {
                log::warn!(
                    "{} bytes of host memory stay unpinned, copies are slower: {error}",
                    memory.len()
                );
                None
            }
        }
    }

    fn open(&mut self, device: u32) -> Result<QueueId, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        // Streams with different priorities do not share a hardware queue, in which copies would wait behind
        // kernels that were launched and not started.
        let it = Stream::create_first(&self.context(device)?).map_err(why)?;
        let place = self.streams.iter().position(Option::is_none).unwrap_or(self.streams.len());
        if place == self.streams.len() {
            self.streams.push(None);
        }
        let (pages, tables) = (Vec::new(), Vec::new());
        self.streams[place] = Some(CopyStream { device, it, pages, tables, failure: None });
        Ok(QueueId(place as u32))
    }

    unsafe fn copy(
        &mut self,
        queue: QueueId,
        page: PageCopy,
        by_kernels: bool,
    ) -> Result<(), String> {
        let stream = self.stream(queue)?;
        if by_kernels && self.gathers(stream.device, page.length) {
            if stream.pages.len() == LONGEST_LIST {
                let _relaxed = RelaxedCapture::new().map_err(why)?;
                self.start_pages(queue)?;
            }
            self.stream_mut(queue)?.pages.push(page);
            return Ok(());
        }
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        copy_each(&stream.it, &[page])
    }

    fn gathers(&self, device: u32, length: u64) -> bool {
        self.sms > 0 && length < LONGEST_PAGE && self.kernels.contains_key(&device)
    }

    fn use_copy_engines_only(&mut self) {
        // Kernels stay loaded: unloading one could wait for kernels that run.
        self.sms = 0;
    }

    fn record(&mut self, queue: QueueId) -> Result<EventId, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        self.start_pages(queue)?;
        let device = self.stream(queue)?.device;
        let recorded = self.event(device).and_then(|number| {
            let event = &self.events[number as usize].it;
            event.record(self.stream(queue)?.it.stream()).map_err(why)?;
            Ok(number)
        });
        let stream = self.streams[queue.0 as usize].as_mut().ok_or("unknown queue")?;
        match recorded {
            Ok(number) => {
                let event = &mut self.events[number as usize];
                event.tables.append(&mut stream.tables);
                event.failure = stream.failure.take();
                Ok(EventId(number))
            }
            Err(why) => {
                // Without an event these copies have no completion, so wait here. If that fails too, the device
                // has stopped, and may still read the tables.
                if stream.it.synchronize().is_ok()
                    && let Some(kernel) = self.kernels.get_mut(&device)
                {
                    stream.tables.drain(..).for_each(|table| kernel.release(table));
                }
                Err(stream.failure.take().unwrap_or(why))
            }
        }
    }

    fn is_complete(&mut self, number: EventId) -> Result<bool, String> {
        let event = self.events.get(number.0 as usize).ok_or("unknown event")?;
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        match (event.it.done().map_err(why)?, &event.failure) {
            (true, Some(failure)) => Err(failure.clone()),
            (is_complete, _) => Ok(is_complete),
        }
    }

    fn release(&mut self, number: EventId) {
        let Some(event) = self.events.get_mut(number.0 as usize) else { return };
        if let Some(kernel) = self.kernels.get_mut(&event.device) {
            event.tables.drain(..).for_each(|table| kernel.release(table));
        }
        self.free.push(number.0);
    }

    fn close(&mut self, queue: QueueId) {
        let _relaxed = RelaxedCapture::new();
        if let Some(slot) = self.streams.get_mut(queue.0 as usize) {
            *slot = None;
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::new();
        self.streams.clear();
        self.events.clear();
        for (_, kernel) in std::mem::take(&mut self.kernels) {
            if kernel.is_busy() {
                // The device is stuck, and may still execute the kernel and read a table.
                std::mem::forget(kernel);
            }
        }
        self.contexts.clear();
    }
}
