//! Copy engine interface, implemented by CUDA and by a twin in host memory.

use crate::memory::Memory;
use std::os::fd::BorrowedFd;

/// Copy queue for one device's engines, executed in any order between two events (CUDA: stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(pub u32);

/// Event in a queue, behind copies (CUDA: event).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u32);

/// A copy's addresses and length in bytes. Part of the page kernel's interface.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Destination.
    pub to: u64,
    /// Source.
    pub from: u64,
    /// Bytes.
    pub length: u64,
}

/// Device identity in all processes (CUDA: UUID).
pub type DeviceUuid = [u8; 16];

/// Copy engines and the memory that they reach. Devices are named by ordinal in this process. An error is
/// the cause and, where one exists, the remedy.
pub trait CopyEngine: Send {
    /// Implementation name. Ranks with different implementations do not reach each other.
    fn name(&self) -> &'static str;

    /// Device identity; the ordinal may differ in other processes.
    fn uuid(&mut self, device: u32) -> Result<DeviceUuid, String>;

    /// Ordinal for a device that another process named.
    fn find(&mut self, uuid: DeviceUuid) -> Option<u32>;

    /// Opens a device ahead of the first copy, which would otherwise take milliseconds.
    fn prepare(&mut self, device: u32) -> Result<(), String> {
        self.uuid(device).map(drop)
    }

    /// Allocates zeroed device memory with a descriptor by which other processes map it.
    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, String>;

    /// Maps another process's memory for `device`.
    fn import(
        &mut self,
        device: u32,
        descriptor: BorrowedFd<'_>,
        length: usize,
    ) -> Result<Memory, String>;

    /// Pins mapped host memory for faster copies, if possible. The returned guard undoes it on drop.
    ///
    /// # Safety
    /// The guard is dropped before the memory.
    unsafe fn pin(&mut self, device: u32, memory: &Memory) -> Option<Box<dyn Send>>;

    /// Opens a queue.
    fn open(&mut self, device: u32) -> Result<QueueId, String>;

    /// Adds a copy to a queue; on an error the queue is unchanged. `by_kernels`: kernels on the queue's device
    /// reach both ranges, since host memory is pinned; the copy may be moved with others before the next event.
    ///
    /// # Safety
    /// Both ranges lie inside memory that the queue's device reaches (host memory, device memory, memory
    /// imported for it), which stays until a later event in the queue is complete.
    unsafe fn copy(
        &mut self,
        queue: QueueId,
        page: PageCopy,
        by_kernels: bool,
    ) -> Result<(), String>;

    /// True if kernels on this device move such pages together: many may be in flight.
    fn gathers(&self, _device: u32, _length: u64) -> bool {
        false
    }

    /// See [`crate::link::Link::use_copy_engines_only`].
    fn use_copy_engines_only(&mut self) {}

    /// Records an event behind all copies in the queue. An error means the same as an error from
    /// [`CopyEngine::is_complete`].
    fn record(&mut self, queue: QueueId) -> Result<EventId, String>;

    /// True once all copies before the event are complete: all bytes are at the destination, visible to
    /// any reader that observes this result, and the copies make no further access. An error means no
    /// further access either, with undefined destinations.
    fn is_complete(&mut self, event: EventId) -> Result<bool, String>;

    /// Releases an event.
    fn release(&mut self, event: EventId);

    /// Closes a queue whose copies are complete.
    fn close(&mut self, queue: QueueId);
}
