//! Interface of copy engines, implemented by CUDA and by a twin in host memory.

use crate::memory::Memory;
use std::os::fd::BorrowedFd;

/// Queue of copies for one device's engines, executed in any order between two events (CUDA: stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(pub u32);

/// Event in a queue, behind copies (CUDA: event).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u32);

/// Identity of a device in all processes (CUDA: UUID).
pub type DeviceUuid = [u8; 16];

/// Copy engines and the memory that they reach. Devices are named by their ordinal in this process. An
/// error is the cause and, where one exists, the remedy.
pub trait CopyEngine: Send {
    /// Name of the implementation. Ranks with different ones do not reach each other.
    fn name(&self) -> &'static str;

    /// Identity of a device, whose ordinal may differ in other processes.
    fn uuid(&mut self, device: u32) -> Result<DeviceUuid, String>;

    /// Ordinal of a device that another process named.
    fn find(&mut self, uuid: DeviceUuid) -> Option<u32>;

    /// Allocates zeroed device memory with a descriptor by which other processes map it.
    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, String>;

    /// Maps memory of another process for `device`.
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

    /// Adds a copy to a queue; on an error the queue is unchanged.
    ///
    /// # Safety
    /// Both ranges lie inside memory that the queue's device reaches (host memory, memory of its own,
    /// memory imported for it), which stays until a later event of the queue is complete.
    unsafe fn copy(
        &mut self,
        queue: QueueId,
        to: u64,
        from: u64,
        length: u64,
    ) -> Result<(), String>;

    /// Records an event behind all copies in the queue. An error has the meaning of one of
    /// [`CopyEngine::is_complete`].
    fn record(&mut self, queue: QueueId) -> Result<EventId, String>;

    /// True once all copies before the event are complete: all bytes are in their destination, visible to
    /// any reader that observes this result, and the copies make no further access. An error means no
    /// further access either, with undefined destinations.
    fn is_complete(&mut self, event: EventId) -> Result<bool, String>;

    /// Releases an event.
    fn release(&mut self, event: EventId);

    /// Closes a queue whose copies are complete.
    fn close(&mut self, queue: QueueId);
}
