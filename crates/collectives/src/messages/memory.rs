//! Rings of slots, and memory of operations.
//!
//! The only file of messages that accesses memory by address. Soundness rests on two rules. A slot of a ring is
//! read between its arrival and its credit, when no peer writes it; a slot of the staging ring is written while
//! no write from it is in flight. Memory of an operation is accessed while the operation is under way: its
//! [`UserMemory`] is dropped when it ends.

use super::config::MessagesConfig;
use super::header::Header;
use crate::run_error::RunError;
use std::ops::Range;
use std::ptr::NonNull;
use weft_fabric::{Engine, Memory, MemoryKind, Rank, Region, RegionKey};

/// Memory of an operation.
#[derive(Debug)]
pub(super) struct UserMemory {
    address: *mut u8,
    length: u64,
}

// SAFETY: an address, whose bytes any thread may access by the contract of its constructors.
unsafe impl Send for UserMemory {}

impl UserMemory {
    /// Memory of a send.
    ///
    /// # Safety
    /// `length` bytes at `address` are valid for reads of any thread while the value lives.
    pub unsafe fn source(address: *const u8, length: u64) -> UserMemory {
        UserMemory { address: address.cast_mut(), length }
    }

    /// Memory of a receive.
    ///
    /// # Safety
    /// `length` bytes at `address` are valid for writes of any thread while the value lives.
    pub unsafe fn target(address: *mut u8, length: u64) -> UserMemory {
        UserMemory { address, length }
    }

    /// The memory as a source of writes; `None` without bytes.
    ///
    /// # Safety
    /// It stays valid until the region of the result was released, and no write from it is in flight.
    pub unsafe fn register(&self) -> Option<Memory> {
        let address = NonNull::new(self.address).filter(|_| self.length > 0)?;
        let (length, owner) = (self.length as usize, Box::new(()));
        // SAFETY: by this function's contract; a source is only read.
        Some(unsafe { Memory::user_buffer(address, length, MemoryKind::Host, owner) })
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Address of a range; `None` outside of the memory.
    fn at(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(length as u64)? <= self.length;
        // SAFETY: the offset is inside of memory that is valid by the constructor's contract.
        inside.then(|| unsafe { self.address.add(offset as usize) })
    }

    /// Copies `bytes` to `offset` of the memory of a receive.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len()).filter(|_| !bytes.is_empty());
        debug_assert!(to.is_some() || bytes.is_empty());
        if let Some(to) = to {
            // SAFETY: in range by `at`; callers pass the memory of a receive only. The ranges may overlap if a
            // program receives into memory that it also sends.
            unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies from `offset` of the memory into `bytes`.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len()).filter(|_| !bytes.is_empty());
        debug_assert!(from.is_some() || bytes.is_empty());
        if let Some(from) = from {
            // SAFETY: in range by `at`; `bytes` is a distinct borrow.
            unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        }
    }

    /// Copies `length` bytes from the begin of another memory.
    pub fn copy_from(&mut self, other: &UserMemory, length: u64) {
        if let (Some(to), Some(from)) = (self.at(0, length as usize), other.at(0, length as usize))
            && length > 0
        {
            // SAFETY: both in range by `at`; they may overlap.
            unsafe { std::ptr::copy(from, to, length as usize) };
        }
    }
}

/// Slot of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Peer of the ring.
    pub peer: Rank,
    /// Number of the slot.
    pub number: u32,
}

/// Rings of all peers: those that they write, and those from which this rank writes to them.
#[derive(Debug)]
pub(super) struct Rings {
    arrivals: Region,
    staging: Region,
    stride: u64,
    ring_bytes: u64,
}

impl Rings {
    /// Allocates the rings of a group of `ranks`.
    pub fn allocate(
        engine: &mut Engine,
        ranks: u32,
        config: &MessagesConfig,
    ) -> Result<Rings, RunError> {
        let ring_bytes = config.ring_bytes();
        // The configuration was checked against overflow.
        let bytes = (ring_bytes * u64::from(ranks)) as usize;
        let arrivals = engine.alloc(bytes)?;
        match engine.alloc(bytes) {
            Ok(staging) => Ok(Rings { arrivals, staging, stride: config.stride(), ring_bytes }),
            Err(error) => {
                engine.release(&arrivals);
                Err(error.into())
            }
        }
    }

    /// Releases the memory.
    pub fn release(&self, engine: &mut Engine) {
        engine.release(&self.arrivals);
        engine.release(&self.staging);
    }

    /// Region of the rings that peers write.
    pub fn arrivals(&self) -> &Region {
        &self.arrivals
    }

    /// Key of the region from which this rank writes.
    pub fn staging_key(&self) -> RegionKey {
        self.staging.key()
    }

    /// Bytes of the region of arrivals.
    pub fn length(&self) -> u64 {
        self.arrivals.memory().len() as u64
    }

    /// Range of the ring that `peer` writes.
    pub fn granted(&self, peer: Rank) -> Range<u64> {
        let begin = u64::from(peer.0) * self.ring_bytes;
        begin..begin + self.ring_bytes
    }

    /// First byte of a slot in its region, here or at a peer.
    pub fn offset(&self, slot: Slot) -> u64 {
        u64::from(slot.peer.0) * self.ring_bytes + u64::from(slot.number) * self.stride
    }

    /// Copies a header into a slot of the staging ring.
    pub fn stage_header(&self, slot: Slot, header: &Header) {
        self.staging.memory().copy_in(self.offset(slot) as usize, &header.encode());
    }

    /// Copies `length` bytes at `from` of a send to `at` in a slot of the staging ring.
    pub fn stage(&self, slot: Slot, at: u64, source: &UserMemory, from: u64, length: u64) {
        let offset = (self.offset(slot) + at) as usize;
        // SAFETY: no write from this slot is in flight, and no other slice of it lives.
        let bytes = unsafe { self.staging.memory().bytes_mut(offset, length as usize) };
        source.read(from, bytes);
    }

    /// Header bytes of a slot that has arrived.
    pub fn header(&self, slot: Slot) -> [u8; Header::BYTES as usize] {
        let mut bytes = [0; Header::BYTES as usize];
        self.arrivals.memory().copy_out(self.offset(slot) as usize, &mut bytes);
        bytes
    }

    /// Bytes `at..at + length` of a slot that has arrived and was not credited.
    pub fn arrived(&self, slot: Slot, at: u64, length: u64) -> &[u8] {
        let offset = (self.offset(slot) + at) as usize;
        // SAFETY: peers write the slot after its credit only; `incoming.rs` gives the credit in the poll that
        // has copied these bytes.
        unsafe { self.arrivals.memory().bytes(offset, length as usize) }
    }
}
