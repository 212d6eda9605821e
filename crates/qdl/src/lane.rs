//! Lane: buffers for one batch at a time, on a device or on the host, and copies to and from slots.
//!
//! A batch is copied into a lane's buffers, the model reads them, and outputs are copied into the slots from which
//! answers leave. Device copies are asynchronous, on the lane's stream: [`Lane::wait`] ends them, and must return
//! before the batch does, because a front end may then write its memory again. With two lanes, one batch's copies
//! overlap the other's model. CUDA calls are valid while the model captures a graph on another thread.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_cuda::{
    Context, Direction, RegisteredMemory, RelaxedCapture, Rows, Stream, copy_rows_async,
    stream_synchronize,
};
use weft_dispatch::accelerator::{Run, RunMut};
use weft_dispatch::wire::Tensor;
use weft_dispatch::{Batch, Schema};
use weft_fabric::{Memory, MemoryId, MemoryWatcher};

/// Batch output in the model's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// True for memory on the lane's device, false for host memory.
    pub is_on_device: bool,
    /// First byte and byte count for each query's output. Device outputs lie in one allocation: equally spaced parts
    /// are one copy.
    pub parts: Vec<(u64, u64)>,
}

/// Buffer placement.
#[derive(Clone)]
pub enum Place {
    /// The host: copies by the CPU.
    Host,
    /// A device.
    Device(DevicePlace),
}

/// Device with a lane's buffers, and the copy stream.
#[derive(Clone)]
pub struct DevicePlace {
    /// Page-locked slots, for all lanes.
    pub pins: Arc<Pins>,
    /// Copy stream.
    pub stream: Stream,
}

/// Buffers for one batch at a time. See the module's page.
pub struct Lane {
    place: Place,
    /// Buffer address for each input.
    buffers: Box<[u64]>,
    /// Query stride in each buffer: the input's maximum size.
    pitches: Box<[u64]>,
}

impl Lane {
    /// Lane for batches with this schema.
    ///
    /// # Safety
    /// While the lane lives, each input's buffer is memory at `place` with room for the largest batch, at the input's
    /// maximum size per query. Only [`Lane::copy_in`] writes it, and work that [`Lane::wait`] awaits. The stream
    /// belongs to the device.
    pub unsafe fn new(place: Place, schema: &Schema, buffers: Vec<u64>) -> Lane {
        let pitches: Box<[u64]> = schema.inputs.iter().map(Tensor::max_bytes).collect();
        assert_eq!(buffers.len(), pitches.len(), "a buffer for each input");
        Lane { place, buffers: buffers.into(), pitches }
    }

    /// Copies a batch's inputs into the buffers; query `q` begins at `q` times the input's maximum size. Neighbouring
    /// slots are one copy. On a device the copies are in flight afterwards.
    ///
    /// # Errors
    /// CUDA errors.
    pub fn copy_in(&self, batch: &Batch<'_>) -> weft_cuda::Result<()> {
        let _relaxed = self.enter()?;
        if let Place::Device(place) = &self.place {
            batch.memories().for_each(|memory| place.pins.add(memory));
        }
        for (tensor, (buffer, pitch)) in self.buffers.iter().zip(&self.pitches).enumerate() {
            for run in batch.runs(tensor) {
                let to = buffer + run.first as u64 * pitch;
                match &self.place {
                    Place::Device(place) => {
                        let rows = Rows {
                            host: run.bytes.as_ptr().expose_provenance() as u64,
                            host_pitch: run.stride,
                            device: to,
                            device_pitch: *pitch,
                            length: run.length,
                            count: run.count as u64,
                        };
                        copy_rows_async(rows, Direction::ToDevice, place.stream)?;
                    }
                    // SAFETY: the `new` contract: the buffer has room for the batch and no other writer.
                    Place::Host => unsafe { write_rows(to, *pitch, &run) },
                }
            }
        }
        Ok(())
    }

    /// Copies an output into the answer memory, whose sizes were set ([`Batch::resize`]). Queries in neighbouring slots
    /// with equally spaced outputs are one copy. On a device the copies are in flight afterwards.
    ///
    /// # Errors
    /// CUDA errors.
    ///
    /// # Safety
    /// The parts are readable until [`Lane::wait`] has returned, or [`Lane::end`] true; work that writes them precedes the
    /// lane's stream, and no later work does before then.
    pub unsafe fn copy_out(
        &self,
        batch: &mut Batch<'_>,
        tensor: usize,
        output: &Output,
    ) -> weft_cuda::Result<()> {
        let _relaxed = self.enter()?;
        let parts = &output.parts;
        assert_eq!(parts.len(), batch.len(), "an output of each query");
        let mut first = 0;
        while first < parts.len() {
            let (count, pitch) = equally_spaced(&parts[first..]);
            let run = batch.output_run(first, count, tensor);
            let (from, length) = parts[first];
            assert_eq!(run.length, length, "the bytes of an output that were set");
            first += run.count;
            match &self.place {
                Place::Device(place) if output.is_on_device => {
                    let rows = Rows {
                        host: run.bytes.as_mut_ptr().expose_provenance() as u64,
                        host_pitch: run.stride,
                        device: from,
                        device_pitch: pitch,
                        length: run.length,
                        count: run.count as u64,
                    };
                    copy_rows_async(rows, Direction::ToHost, place.stream)?;
                }
                // SAFETY: readable by the caller's contract.
                _ => unsafe { read_rows(from, pitch, run) },
            }
        }
        Ok(())
    }

    /// Waits for the copies on the lane's stream, and for the work that precedes them there.
    ///
    /// # Errors
    /// CUDA errors, including errors from the model's work. Copies may then be in flight: see [`Lane::end`].
    pub fn wait(&self) -> weft_cuda::Result<()> {
        let _relaxed = self.enter()?;
        match &self.place {
            Place::Host => Ok(()),
            Place::Device(place) => stream_synchronize(place.stream),
        }
    }

    /// Ends the copies after an error: waits for the lane's stream, or for the device if that fails. False if both
    /// fail: copies may be in flight, so the buffers must not be freed ([`Lane::leak`]).
    #[must_use]
    pub fn end(&self) -> bool {
        self.wait().is_ok()
            || match &self.place {
                Place::Host => true,
                Place::Device(place) => {
                    let _relaxed = RelaxedCapture::new();
                    place.pins.context().synchronize().is_ok()
                }
            }
    }

    /// Keeps a batch's slots mapped and page-locked until the process ends.
    pub fn leak(&self, batch: &Batch<'_>) {
        batch.memories().for_each(|memory| std::mem::forget(Arc::clone(memory)));
        if let Place::Device(place) = &self.place {
            std::mem::forget(Arc::clone(&place.pins));
        }
    }

    /// Prepares this thread for CUDA calls, which a graph under capture on another thread permits while the guard
    /// lives.
    fn enter(&self) -> weft_cuda::Result<Option<RelaxedCapture>> {
        let Place::Device(place) = &self.place else { return Ok(None) };
        let relaxed = RelaxedCapture::new()?;
        place.pins.context().bind()?;
        Ok(Some(relaxed))
    }
}

/// Longest prefix of equally long, equally spaced parts: part count and stride.
fn equally_spaced(parts: &[(u64, u64)]) -> (usize, u64) {
    let (begin, length) = parts[0];
    let Some(pitch) = parts.get(1).and_then(|next| next.0.checked_sub(begin)) else {
        return (1, length);
    };
    if pitch < length {
        return (1, length);
    }
    let fits =
        |(index, part): &(usize, &(u64, u64))| **part == (begin + *index as u64 * pitch, length);
    (parts.iter().enumerate().take_while(fits).count(), pitch)
}

/// Writes a run's inputs to rows at an address in this process.
///
/// # Safety
/// The rows are memory in this process that no other code accesses now.
unsafe fn write_rows(to: u64, pitch: u64, run: &Run<'_>) {
    for index in 0..run.count {
        let row = run.row(index);
        let to: *mut u8 =
            std::ptr::with_exposed_provenance_mut((to + index as u64 * pitch) as usize);
        // SAFETY: by the caller's contract; slots are other memory than the rows.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, row.len()) };
    }
}

/// Reads rows at an address in this process into a run's outputs.
///
/// # Safety
/// The rows are readable memory in this process.
unsafe fn read_rows(from: u64, pitch: u64, mut run: RunMut<'_>) {
    for index in 0..run.count {
        let from: *const u8 =
            std::ptr::with_exposed_provenance((from + index as u64 * pitch) as usize);
        let row = run.row(index);
        // SAFETY: by the caller's contract; slots are other memory than the rows.
        unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), row.len()) };
    }
}

/// Slots page-locked for device copies, until they are freed or the last lane ends. A batch holds the slot memory, so
/// no copy is in flight then.
pub struct Pins(Arc<PinnedSlots>);

/// Watches slot memory. Empty before the last owner goes: see `Drop` for [`Pins`].
struct PinnedSlots {
    context: Arc<Context>,
    /// `None`: it could not be page-locked, and copies may block.
    pinned: Mutex<HashMap<MemoryId, Option<RegisteredMemory>>>,
}

impl Pins {
    /// None yet, for copies on this device.
    pub fn new(context: Arc<Context>) -> Arc<Pins> {
        Arc::new(Pins(Arc::new(PinnedSlots { context, pinned: Mutex::default() })))
    }

    fn context(&self) -> &Context {
        &self.0.context
    }

    /// Page-locks a memory, once. A graph may be under capture on another thread: the caller has relaxed the capture
    /// mode.
    fn add(&self, memory: &Arc<Memory>) {
        let mut pinned = self.0.lock();
        if pinned.contains_key(&memory.id()) {
            return;
        }
        let Some(address) = memory.host() else { return };
        memory.watch(&self.0);
        let (context, begin, bytes) = (&self.0.context, address.as_ptr(), memory.len());
        // SAFETY: mapped until the memory is dropped, before which `memory_dropped` or the `Pins` drop has dropped this
        // value.
        let registered = unsafe { RegisteredMemory::new(context, begin, bytes) };
        if let Err(error) = &registered {
            log::warn!("{bytes} slot bytes cannot be page-locked, so copies block: {error}");
        }
        pinned.insert(memory.id(), registered.ok());
    }
}

impl Drop for Pins {
    /// Unlocks all pages while memory that is dropped on another thread still finds the watcher, and waits for the
    /// lock.
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::new();
        self.0.lock().clear();
    }
}

impl PinnedSlots {
    fn lock(&self) -> MutexGuard<'_, HashMap<MemoryId, Option<RegisteredMemory>>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryWatcher for PinnedSlots {
    fn memory_dropped(&self, memory: MemoryId) {
        let _relaxed = RelaxedCapture::new();
        // Dropped here, before the memory is unmapped.
        let _unpinned = self.lock().remove(&memory);
    }
}

#[cfg(test)]
mod tests {
    use super::equally_spaced;

    #[test]
    fn parts_at_equal_distances_are_one_copy() {
        for (parts, expected) in [
            (vec![(8, 4)], (1, 4)),
            (vec![(8, 4), (12, 4), (16, 4)], (3, 4)),
            (vec![(8, 4), (18, 4), (28, 4), (39, 4)], (3, 10)),
            (vec![(8, 4), (18, 5)], (1, 10)),
            // Parts that overlap, and descending ones.
            (vec![(8, 4), (10, 4)], (1, 4)),
            (vec![(8, 4), (8, 4)], (1, 4)),
            (vec![(8, 4), (0, 4)], (1, 4)),
            (vec![(8, 0), (8, 0), (8, 0)], (3, 0)),
        ] {
            assert_eq!(equally_spaced(&parts), expected, "{parts:?}");
        }
    }
}
