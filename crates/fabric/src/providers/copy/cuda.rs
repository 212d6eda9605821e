//! Copy engines of GPUs, driven through CUDA: a queue is a stream.
//!
//! Any thread may make progress, including the user's. Each call therefore preserves the thread's current
//! context, and is valid while a graph is captured on another stream.

use super::engine::{CopyEngine, DeviceUuid, EventId, QueueId};
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use weft_cuda::{
    Context, Driver, Event, OwnedStream, RegisteredMemory, Relaxed, RelaxedCapture, Stream,
    VirtualMemory, copy_async, driver, set_bytes_async,
};

/// GPUs that this process sees.
pub(super) struct Cuda {
    driver: &'static Driver,
    contexts: BTreeMap<u32, Arc<Context>>,
    streams: Vec<Option<OnDevice<OwnedStream>>>,
    events: Vec<OnDevice<Event>>,
    /// Unused events.
    free: Vec<u32>,
}

struct OnDevice<T> {
    device: u32,
    it: T,
}

fn why(error: weft_cuda::Error) -> String {
    error.to_string()
}

impl Cuda {
    /// Loads the driver.
    pub fn new() -> Result<Cuda, String> {
        let (contexts, streams) = (BTreeMap::new(), Vec::new());
        let driver = driver().map_err(why)?;
        Ok(Cuda { driver, contexts, streams, events: Vec::new(), free: Vec::new() })
    }

    fn context(&mut self, device: u32) -> Result<Arc<Context>, String> {
        if let Some(context) = self.contexts.get(&device) {
            return Ok(context.clone());
        }
        let context = Context::primary(self.driver.device(device).map_err(why)?).map_err(why)?;
        self.contexts.insert(device, context.clone());
        Ok(context)
    }

    fn stream(&self, queue: QueueId) -> Result<&OnDevice<OwnedStream>, String> {
        let stream = self.streams.get(queue.0 as usize).and_then(Option::as_ref);
        stream.ok_or_else(|| "unknown queue".into())
    }

    /// Unused event of the device.
    fn event(&mut self, device: u32) -> Result<u32, String> {
        let fits = |&number: &u32| self.events[number as usize].device == device;
        if let Some(place) = self.free.iter().position(fits) {
            return Ok(self.free.swap_remove(place));
        }
        let it = Event::new(&self.context(device)?).map_err(why)?;
        self.events.push(OnDevice { device, it });
        Ok(self.events.len() as u32 - 1)
    }
}

/// Wraps mapped device memory as [`Memory`].
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

    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        let context = self.context(device)?;
        let memory = VirtualMemory::create(&context, length.max(1)).map_err(why)?;
        let stream = Stream::create(&context).map_err(why)?;
        {
            let _bound = context.enter().map_err(why)?;
            set_bytes_async(memory.address(), 0, memory.len(), stream.stream()).map_err(why)?;
        }
        stream.synchronize().map_err(why)?;
        region(memory, device, length, true)
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
        let it = Stream::create(&self.context(device)?).map_err(why)?;
        let place = self.streams.iter().position(Option::is_none).unwrap_or(self.streams.len());
        if place == self.streams.len() {
            self.streams.push(None);
        }
        self.streams[place] = Some(OnDevice { device, it });
        Ok(QueueId(place as u32))
    }

    unsafe fn copy(
        &mut self,
        queue: QueueId,
        to: u64,
        from: u64,
        length: u64,
    ) -> Result<(), String> {
        // Unpinned host memory goes through the driver's staging buffers, in the same order.
        let stream = &self.stream(queue)?.it;
        let length = usize::try_from(length).map_err(|_| "length exceeds the address space")?;
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        let _bound = stream.context().enter().map_err(why)?;
        copy_async(to, from, length, stream.stream()).map_err(why)
    }

    fn record(&mut self, queue: QueueId) -> Result<EventId, String> {
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        let device = self.stream(queue)?.device;
        let recorded = self.event(device).and_then(|number| {
            let event = &self.events[number as usize].it;
            event.record(self.stream(queue)?.it.stream()).map_err(why)?;
            Ok(EventId(number))
        });
        if recorded.is_err() {
            // Without an event these copies have no completion, so wait here. If that fails too, the device
            // has stopped.
            let _ = self.stream(queue)?.it.synchronize();
        }
        recorded
    }

    fn is_complete(&mut self, number: EventId) -> Result<bool, String> {
        let event = self.events.get(number.0 as usize).ok_or("unknown event")?;
        let _relaxed = RelaxedCapture::new().map_err(why)?;
        event.it.done().map_err(why)
    }

    fn release(&mut self, number: EventId) {
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
        self.contexts.clear();
    }
}
