//! What the provider asks of copy engines: narrow, so that a twin in host memory can take their place.

use crate::memory::Memory;
use std::os::fd::BorrowedFd;

/// A queue of copies that one device's engines work off, in any order between two marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Queue(pub u32);

/// A place in a queue, behind copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark(pub u32);

/// What a device is known by in every process.
pub type Identity = [u8; 16];

/// Why something did not work, and what to do, in words.
pub type Why = String;

/// Copy engines and the memory that they reach. Devices are named by their ordinal in this process.
pub trait Copier: Send {
    /// Which machinery this is. Ranks with different ones do not reach each other.
    fn name(&self) -> &'static str;

    /// What the device is known by in other processes, where its ordinal may be another.
    fn identity(&mut self, device: u32) -> Result<Identity, Why>;

    /// The ordinal here of a device that another process named.
    fn find(&mut self, identity: Identity) -> Option<u32>;

    /// Zeroed memory of a device, with a descriptor by which other processes can map it.
    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, Why>;

    /// Maps memory of another process so that `device` reaches it.
    fn import(
        &mut self,
        device: u32,
        descriptor: BorrowedFd<'_>,
        length: usize,
    ) -> Result<Memory, Why>;

    /// Makes host memory that Weft mapped fast to reach for devices, if that can be. What comes back
    /// undoes it when it is dropped.
    ///
    /// # Safety
    /// That happens before the memory goes.
    unsafe fn pin(&mut self, device: u32, memory: &Memory) -> Option<Box<dyn Send>>;

    /// A new queue.
    fn open(&mut self, device: u32) -> Result<Queue, Why>;

    /// Adds a copy to a queue. An error means that nothing was added.
    ///
    /// # Safety
    /// Both ranges lie inside memory that the queue's device reaches (host memory, memory of its
    /// own, memory imported for it), which stays until a later mark of the queue is over.
    unsafe fn copy(&mut self, queue: Queue, to: u64, from: u64, length: u64) -> Result<(), Why>;

    /// A mark behind all copies that the queue has been given. An error means what one of
    /// [`Copier::is_over`] does.
    fn mark(&mut self, queue: Queue) -> Result<Mark, Why>;

    /// Whether all copies before the mark are over: every byte of them is in its destination, visible
    /// to whoever learns of it, and no byte will be read or written by them any more. An error
    /// means that they will do neither and have perhaps not done it.
    fn is_over(&mut self, mark: Mark) -> Result<bool, Why>;

    /// Gives a mark back.
    fn release(&mut self, mark: Mark);

    /// Gives a queue back, whose copies are over.
    fn close(&mut self, queue: Queue);
}
