//! Lane: buffers of one batch at a time, on a device or on the host, and the copies between them and slots.
//!
//! A batch is copied into a lane's buffers, its model reads them, and its outputs are copied into the slots from which
//! answers leave. Copies of a device are asynchronous, on the lane's stream: [`Lane::wait`] ends them, and must return
//! before the batch does, whose memory a front end may write again. With two lanes, the copies of one batch overlap the model of
//! the other. Calls of CUDA are valid while the model captures a graph on another thread.

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

/// Output of a batch in memory of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// True for memory of the lane's device, false for memory of the host.
    pub is_on_device: bool,
    /// First byte and number of bytes of the output of each query. Those on a device are of one allocation: parts at equal
    /// distances are one copy.
    pub parts: Vec<(u64, u64)>,
}

/// Place of a lane's buffers.
#[derive(Clone)]
pub enum Place {
    /// The host: copies by the CPU.
    Host,
    /// A device.
    Device(DevicePlace),
}

/// Device of a lane's buffers, and the stream of its copies.
#[derive(Clone)]
pub struct DevicePlace {
    /// Slots that are page-locked, of all lanes.
    pub pins: Arc<Pins>,
    /// Stream of the copies.
    pub stream: Stream,
}

/// Buffers of one batch at a time. See the module's page.
pub struct Lane {
    place: Place,
    /// Address of each input's buffer.
    buffers: Box<[u64]>,
    /// Distance of queries in each buffer: the most bytes of the input.
    pitches: Box<[u64]>,
}

impl Lane {
    /// Lane for batches of this schema.
    ///
    /// # Safety
    /// While the lane lives, the buffer of each input is memory of its place with room for the largest batch, at the most
    /// bytes of the input for each query; only [`Lane::copy_in`] writes it, and work that [`Lane::wait`] awaits. The
    /// stream is one of the device.
    pub unsafe fn new(place: Place, schema: &Schema, buffers: Vec<u64>) -> Lane {
        let pitches: Box<[u64]> = schema.inputs.iter().map(Tensor::max_bytes).collect();
        assert_eq!(buffers.len(), pitches.len(), "a buffer for each input");
        Lane { place, buffers: buffers.into(), pitches }
    }

    /// Copies the inputs of a batch into the buffers; those of query `q` begin at `q` times the most bytes of the input.
    /// Neighbouring slots are one copy. On a device the copies are under way afterwards.
    ///
    /// # Errors
    /// Errors of CUDA.
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
                    // SAFETY: the buffer has room for the batch and has no other writer, by the contract of `new`.
                    Place::Host => unsafe { write_rows(to, *pitch, &run) },
                }
            }
        }
        Ok(())
    }

    /// Copies an output into the memory of the answers, whose bytes were set ([`Batch::resize`]). Queries in neighbouring
    /// slots, whose outputs are at equal distances, are one copy. On a device the copies are under way afterwards.
    ///
    /// # Errors
    /// Errors of CUDA.
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

    /// Waits for the copies of the lane's stream, and for the work that precedes them there.
    ///
    /// # Errors
    /// Errors of CUDA, including those of the model's work. Copies may be under way then: see [`Lane::end`].
    pub fn wait(&self) -> weft_cuda::Result<()> {
        let _relaxed = self.enter()?;
        match &self.place {
            Place::Host => Ok(()),
            Place::Device(place) => stream_synchronize(place.stream),
        }
    }

    /// Ends the copies after an error: waits for the lane's stream, or for the device if that fails. False if both fail:
    /// copies may be under way, so that their memory must not be freed ([`Lane::leak`]).
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

    /// Keeps the slots of a batch mapped and page-locked until the process ends.
    pub fn leak(&self, batch: &Batch<'_>) {
        batch.memories().for_each(|memory| std::mem::forget(Arc::clone(memory)));
        if let Place::Device(place) = &self.place {
            std::mem::forget(Arc::clone(&place.pins));
        }
    }

    /// Prepares this thread for calls of CUDA, which a graph under capture on another thread permits while the guard lives.
    fn enter(&self) -> weft_cuda::Result<Option<RelaxedCapture>> {
        let Place::Device(place) = &self.place else { return Ok(None) };
        let relaxed = RelaxedCapture::new()?;
        place.pins.context().bind()?;
        Ok(Some(relaxed))
    }
}

/// Number of parts from the first one on that are equally long and at equal distances, and that distance.
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

/// Writes the inputs of a run to rows at an address of this process.
///
/// # Safety
/// The rows are memory of this process that no other code accesses now.
unsafe fn write_rows(to: u64, pitch: u64, run: &Run<'_>) {
    for index in 0..run.count {
        let row = run.row(index);
        let to: *mut u8 =
            std::ptr::with_exposed_provenance_mut((to + index as u64 * pitch) as usize);
        // SAFETY: by the caller's contract; slots are other memory than the rows.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, row.len()) };
    }
}

/// Reads rows at an address of this process into the outputs of a run.
///
/// # Safety
/// The rows are readable memory of this process.
unsafe fn read_rows(from: u64, pitch: u64, mut run: RunMut<'_>) {
    for index in 0..run.count {
        let from: *const u8 =
            std::ptr::with_exposed_provenance((from + index as u64 * pitch) as usize);
        let row = run.row(index);
        // SAFETY: by the caller's contract; slots are other memory than the rows.
        unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), row.len()) };
    }
}

/// Slots that are page-locked for copies of a device, until their memory is freed or the last lane ends. A batch keeps
/// its memory, so that no copy of it is under way then.
pub struct Pins(Arc<PinnedSlots>);

/// Watches the memory of slots. Empty before its last owner goes: see the drop of [`Pins`].
struct PinnedSlots {
    context: Arc<Context>,
    /// `None`: it could not be page-locked, and copies of it may block.
    pinned: Mutex<HashMap<MemoryId, Option<RegisteredMemory>>>,
}

impl Pins {
    /// None, for copies of this device.
    pub fn new(context: Arc<Context>) -> Arc<Pins> {
        Arc::new(Pins(Arc::new(PinnedSlots { context, pinned: Mutex::default() })))
    }

    fn context(&self) -> &Context {
        &self.0.context
    }

    /// Page-locks a memory, once. A graph may be under capture on another thread: the caller has relaxed its mode.
    fn add(&self, memory: &Arc<Memory>) {
        let mut pinned = self.0.lock();
        if pinned.contains_key(&memory.id()) {
            return;
        }
        let Some(address) = memory.host() else { return };
        memory.watch(&self.0);
        let (context, begin, bytes) = (&self.0.context, address.as_ptr(), memory.len());
        // SAFETY: mapped until the memory is dropped, before which `memory_dropped` drops this value, or the drop of
        // `Pins` has dropped it.
        let registered = unsafe { RegisteredMemory::new(context, begin, bytes) };
        if let Err(error) = &registered {
            log::warn!(
                "{bytes} bytes of slots cannot be page-locked, copies of them block: {error}"
            );
        }
        pinned.insert(memory.id(), registered.ok());
    }
}

impl Drop for Pins {
    /// Unlocks all pages while memory that is dropped on another thread still finds the watcher, and waits for its lock.
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
