//! Slot rings and operation memory.
//!
//! The only message file that accesses memory by address. Soundness rests on two rules. A ring slot is read between
//! arrival and credit, when no peer writes it; a staging ring slot is written while no write from it is in flight.
//! Operation memory is accessed while the operation is under way: the [`UserMemory`] is dropped when it ends.

use super::config::MessagesConfig;
use super::header::Header;
use crate::run_error::RunError;
use std::ops::Range;
use std::ptr::NonNull;
use weft_fabric::{Engine, Memory, MemoryKind, Rank, Region, RegionKey};

/// Operation memory.
#[derive(Debug)]
pub(super) struct UserMemory {
    address: *mut u8,
    length: u64,
}

// SAFETY: an address, whose bytes any thread may access by the constructors' contract.
unsafe impl Send for UserMemory {}

impl UserMemory {
    /// Send memory.
    ///
    /// # Safety
    /// `length` bytes at `address` are valid for reads from any thread while the value lives.
    pub unsafe fn source(address: *const u8, length: u64) -> UserMemory {
        UserMemory { address: address.cast_mut(), length }
    }

    /// Receive memory.
    ///
    /// # Safety
    /// `length` bytes at `address` are valid for writes from any thread while the value lives.
    pub unsafe fn target(address: *mut u8, length: u64) -> UserMemory {
        UserMemory { address, length }
    }

    /// The memory as a source for writes; `None` without bytes.
    ///
    /// # Safety
    /// It stays valid until the result's region was released, and no write from it is in flight.
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

    /// Address for a range; `None` outside the memory.
    fn at(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(length as u64)? <= self.length;
        // SAFETY: the offset is inside memory that is valid by the constructor's contract.
        inside.then(|| unsafe { self.address.add(offset as usize) })
    }

    /// Copies `bytes` to `offset` in receive memory.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len()).filter(|_| !bytes.is_empty());
        debug_assert!(to.is_some() || bytes.is_empty());
        if let Some(to) = to {
            // SAFETY: in range by `at`; callers pass only receive memory. The ranges may overlap if a program receives
            // into memory that it also sends.
            unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies from `offset` in the memory into `bytes`.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len()).filter(|_| !bytes.is_empty());
        debug_assert!(from.is_some() || bytes.is_empty());
        if let Some(from) = from {
            // SAFETY: in range by `at`; `bytes` is a distinct borrow.
            unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        }
    }

    /// Copies `length` bytes from where another memory begins.
    pub fn copy_from(&mut self, other: &UserMemory, length: u64) {
        if let (Some(to), Some(from)) = (self.at(0, length as usize), other.at(0, length as usize))
            && length > 0
        {
            // SAFETY: both in range by `at`; they may overlap.
            unsafe { std::ptr::copy(from, to, length as usize) };
        }
    }
}

/// Ring slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Ring peer.
    pub peer: Rank,
    /// Slot number.
    pub number: u32,
}

/// Rings for all peers: rings that they write, and rings from which this rank writes to them.
#[derive(Debug)]
pub(super) struct Rings {
    arrivals: Region,
    staging: Region,
    stride: u64,
    ring_bytes: u64,
}

impl Rings {
    /// Allocates the rings for a group of `ranks` ranks.
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

    /// Region with the rings that peers write.
    pub fn arrivals(&self) -> &Region {
        &self.arrivals
    }

    /// Key for the region from which this rank writes.
    pub fn staging_key(&self) -> RegionKey {
        self.staging.key()
    }

    /// Arrival region size in bytes.
    pub fn length(&self) -> u64 {
        self.arrivals.memory().len() as u64
    }

    /// Range for the ring that `peer` writes.
    pub fn granted(&self, peer: Rank) -> Range<u64> {
        let begin = u64::from(peer.0) * self.ring_bytes;
        begin..begin + self.ring_bytes
    }

    /// A slot's first byte in the region, here or at a peer.
    pub fn offset(&self, slot: Slot) -> u64 {
        u64::from(slot.peer.0) * self.ring_bytes + u64::from(slot.number) * self.stride
    }

    /// Copies a header into a staging ring slot.
    pub fn stage_header(&self, slot: Slot, header: &Header) {
        self.staging.memory().copy_in(self.offset(slot) as usize, &header.encode());
    }

    /// Copies `length` bytes from a send at `from` to `at` in a staging ring slot.
    pub fn stage(&self, slot: Slot, at: u64, source: &UserMemory, from: u64, length: u64) {
        let offset = (self.offset(slot) + at) as usize;
        // SAFETY: no write from this slot is in flight, and no other slice into it lives.
        let bytes = unsafe { self.staging.memory().bytes_mut(offset, length as usize) };
        source.read(from, bytes);
    }

    /// Header bytes in a slot that has arrived.
    pub fn header(&self, slot: Slot) -> [u8; Header::BYTES as usize] {
        let mut bytes = [0; Header::BYTES as usize];
        self.arrivals.memory().copy_out(self.offset(slot) as usize, &mut bytes);
        bytes
    }

    /// Bytes `at..at + length` in a slot that has arrived and was not credited.
    pub fn arrived(&self, slot: Slot, at: u64, length: u64) -> &[u8] {
        let offset = (self.offset(slot) + at) as usize;
        // SAFETY: peers write the slot only after it is credited; `incoming.rs` gives the credit in the poll that has
        // copied these bytes.
        unsafe { self.arrivals.memory().bytes(offset, length as usize) }
    }
}
