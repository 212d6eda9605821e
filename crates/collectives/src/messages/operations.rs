//! Operation table: sends and receives from start to end.

use super::memory::UserMemory;
use crate::run_error::RunError;
use weft_fabric::{Rank, Region};

/// Send or receive under way, until a wait has returned the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId {
    index: u32,
    reuse: u32,
}

/// Operation result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Message sender.
    pub from: Rank,
    /// Message size in bytes; for a receive, these may be fewer than the memory has.
    pub bytes: u64,
}

/// Operation direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// A message that is longer than its receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLong {
    pub from: Rank,
    pub sent: u64,
}

/// Operation state.
#[derive(Debug)]
pub(super) struct Operation {
    pub direction: Direction,
    /// Destination, or required sender.
    pub peer: Option<Rank>,
    pub tag: u64,
    /// Memory size in bytes.
    pub bytes: u64,
    /// `None` once it has ended.
    pub memory: Option<UserMemory>,
    /// Memory region for a long send, from which the slots are written.
    pub region: Option<Region>,
    /// Bytes copied out of or into the memory.
    pub moved: u64,
    /// A send's writes in flight.
    pub in_flight: u32,
    /// True once all send bytes have been copied.
    pub all_staged: bool,
    pub outcome: Option<Result<Completed, TooLong>>,
}

impl Operation {
    /// Operation that has just started.
    pub fn new(
        direction: Direction,
        peer: Option<Rank>,
        tag: u64,
        memory: UserMemory,
    ) -> Operation {
        Operation {
            direction,
            peer,
            tag,
            bytes: memory.length(),
            memory: Some(memory),
            region: None,
            moved: 0,
            in_flight: 0,
            all_staged: false,
            outcome: None,
        }
    }

    /// Ends the operation; the memory is not accessed afterwards.
    pub fn end(&mut self, outcome: Result<Completed, TooLong>) {
        self.memory = None;
        self.outcome = Some(outcome);
    }

    /// Description for a wait error.
    pub fn describe(&self) -> String {
        let Operation { bytes, tag, moved, .. } = self;
        match (self.direction, self.peer) {
            (Direction::Send, Some(to)) => {
                format!("the send of {bytes} bytes with tag {tag} to {to} ({moved} taken)")
            }
            (_, Some(from)) => {
                format!(
                    "the receive of {bytes} bytes with tag {tag} from {from} ({moved} received)"
                )
            }
            (_, None) => format!(
                "the receive of {bytes} bytes with tag {tag} from any rank ({moved} received)"
            ),
        }
    }
}

/// Operation table.
#[derive(Debug, Default)]
pub(super) struct Operations {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Entry {
    reuse: u32,
    operation: Option<Operation>,
}

/// Operations for which memory is reserved; more are allocated on demand.
pub(super) const RESERVED: usize = 256;

impl Operations {
    /// Empty table with memory for [`RESERVED`] operations.
    pub fn new() -> Operations {
        Operations { entries: Vec::with_capacity(RESERVED), free: Vec::with_capacity(RESERVED) }
    }

    /// Adds an operation.
    pub fn open(&mut self, operation: Operation) -> Result<OperationId, RunError> {
        let index =
            match self.free.pop() {
                Some(index) => index,
                None => {
                    let (what, limit) = ("operations under way", u64::from(u32::MAX));
                    let wanted = self.entries.len() as u64 + 1;
                    let index = u32::try_from(self.entries.len())
                        .map_err(|_| RunError::TooLarge { what, wanted, limit })?;
                    self.entries.push(Entry::default());
                    index
                }
            };
        let entry = &mut self.entries[index as usize];
        entry.operation = Some(operation);
        Ok(OperationId { index, reuse: entry.reuse })
    }

    /// An operation that was not removed.
    pub fn get(&self, id: OperationId) -> Option<&Operation> {
        let entry = self.entries.get(id.index as usize)?;
        entry.operation.as_ref().filter(|_| entry.reuse == id.reuse)
    }

    /// As [`Operations::get`], to change it.
    pub fn get_mut(&mut self, id: OperationId) -> Option<&mut Operation> {
        let entry = self.entries.get_mut(id.index as usize)?;
        entry.operation.as_mut().filter(|_| entry.reuse == id.reuse)
    }

    /// Removes an operation.
    pub fn remove(&mut self, id: OperationId) -> Option<Operation> {
        self.get(id)?;
        let entry = &mut self.entries[id.index as usize];
        entry.reuse = entry.reuse.wrapping_add(1);
        self.free.push(id.index);
        entry.operation.take()
    }

    /// Drops the memory for all operations.
    pub fn drop_memory(&mut self) {
        for operation in self.entries.iter_mut().filter_map(|entry| entry.operation.as_mut()) {
            operation.memory = None;
        }
    }

    /// Takes the regions from all operations.
    pub fn take_regions(&mut self) -> impl Iterator<Item = Region> {
        self.entries.iter_mut().filter_map(|entry| entry.operation.as_mut()?.region.take())
    }

    /// Operation count.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}
