//! Command ring: many writers on the GPU, one reader on the host.
//!
//! A writer takes a ticket, waits until `ticket - released < slots`, and stores the four quarters in any order, each
//! with the slot's use number behind the payload. The reader takes the slot of the next ticket once all four use
//! numbers are that ticket's, and then publishes how many tickets it has released. The idea of a sequence number in
//! each slot is D. Vyukov's [bounded MPMC
//! queue](https://www.1024cores.net/home/lock-free-algorithms/queues/bounded-mpmc-queue); here it is in each quarter,
//! since 16 bytes are the most that a GPU thread stores at once.
//!
//! | step | memory order |
//! |---|---|
//! | writer, quarter | payload before use number: one 16-byte store on a GPU, release on the CPU |
//! | reader, quarter | acquire of the use number, then the payload |
//! | reader, released | release, behind all loads from the slot and from the command's lengths |
//! | writer, room | acquire of `released`, before any quarter is stored |

use super::command::{CommandFields, PAYLOAD_WORDS, Payloads, QUARTERS, SlotLayout};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Words in a slot.
pub const SLOT_WORDS: usize = SlotLayout::SIZE / 4;
/// Words in a quarter.
const QUARTER_WORDS: usize = PAYLOAD_WORDS + 1;

/// Ring memory as reader and writers access it: a trait, so that loom models check the code that runs.
pub trait RingMemory {
    /// Slots, a power of two.
    fn slots(&self) -> usize;
    /// Loads a quarter's use number.
    fn use_number(&self, slot: usize, quarter: usize, order: Ordering) -> u32;
    /// Loads a quarter's payload.
    fn payload(&self, slot: usize, quarter: usize) -> [u32; PAYLOAD_WORDS];
    /// Stores a quarter's payload.
    fn set_payload(&self, slot: usize, quarter: usize, payload: [u32; PAYLOAD_WORDS]);
    /// Stores a quarter's use number.
    fn set_use_number(&self, slot: usize, quarter: usize, number: u32, order: Ordering);
    /// Loads the count of released tickets.
    fn released(&self, order: Ordering) -> u64;
    /// Stores the count of released tickets.
    fn set_released(&self, tickets: u64, order: Ordering);
}

/// Ring in memory that a GPU or another thread maps.
#[derive(Clone, Copy, Debug)]
pub struct MappedRing<'a> {
    /// Slots, a power of two.
    pub slots: &'a [[AtomicU32; SLOT_WORDS]],
    /// Tickets whose slots the reader has left.
    pub released: &'a AtomicU64,
}

impl RingMemory for MappedRing<'_> {
    #[inline]
    fn slots(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    fn use_number(&self, slot: usize, quarter: usize, order: Ordering) -> u32 {
        self.slots[slot][quarter * QUARTER_WORDS + PAYLOAD_WORDS].load(order)
    }

    #[inline]
    fn payload(&self, slot: usize, quarter: usize) -> [u32; PAYLOAD_WORDS] {
        let word =
            |word: usize| self.slots[slot][quarter * QUARTER_WORDS + word].load(Ordering::Relaxed);
        [word(0), word(1), word(2)]
    }

    fn set_payload(&self, slot: usize, quarter: usize, payload: [u32; PAYLOAD_WORDS]) {
        let words = &self.slots[slot][quarter * QUARTER_WORDS..][..PAYLOAD_WORDS];
        words.iter().zip(payload).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    fn set_use_number(&self, slot: usize, quarter: usize, number: u32, order: Ordering) {
        self.slots[slot][quarter * QUARTER_WORDS + PAYLOAD_WORDS].store(number, order);
    }

    fn released(&self, order: Ordering) -> u64 {
        self.released.load(order)
    }

    #[inline]
    fn set_released(&self, tickets: u64, order: Ordering) {
        self.released.store(tickets, order);
    }
}

/// Slot and use number of a ticket in a ring with this many slots, a power of two. For example, ticket 1030 has slot 6
/// of 1024, in the second use.
#[inline]
pub fn place_of(ticket: u64, slots: usize) -> (usize, u32) {
    let use_number = (ticket >> slots.trailing_zeros()) as u32;
    (ticket as usize & (slots - 1), use_number.wrapping_add(1))
}

/// Ring memory with a use number that no writer in turn has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "quarter {quarter} of command {ticket} has use number {seen}: expected {} or {expected}; the command ring is \
     corrupt, or a kernel stored to it without a ticket",
    .expected.wrapping_sub(1)
)]
pub struct RingError {
    /// Ticket that the reader waits for.
    pub ticket: u64,
    /// Quarter.
    pub quarter: usize,
    /// Use number of that ticket.
    pub expected: u32,
    /// Use number in memory.
    pub seen: u32,
}

/// Reader of a command ring. It never blocks: a command that is not whole is found again by the next call.
#[derive(Debug)]
pub struct RingReader<M> {
    memory: M,
    next: u64,
}

impl<M: RingMemory> RingReader<M> {
    /// Reader of a ring whose memory was zero before the first command.
    ///
    /// # Panics
    /// If the number of slots is no power of two.
    pub fn new(memory: M) -> RingReader<M> {
        assert!(memory.slots().is_power_of_two(), "a ring has a power of two slots");
        RingReader { memory, next: 0 }
    }

    /// Tickets taken so far.
    pub fn taken(&self) -> u64 {
        self.next
    }

    /// Calls `accept` with the next ticket and the fields, if the command is whole. The slot, and what else the command
    /// names in memory of the ring's writers, is released when `accept` has returned.
    ///
    /// # Errors
    /// [`RingError`]; the reader stays at that ticket.
    #[inline]
    pub fn take<T>(
        &mut self,
        accept: impl FnOnce(u64, &CommandFields) -> T,
    ) -> Result<Option<T>, RingError> {
        let ticket = self.next;
        let (slot, expected) = place_of(ticket, self.memory.slots());
        let mut payloads: Payloads = [[0; PAYLOAD_WORDS]; QUARTERS];
        for (quarter, payload) in payloads.iter_mut().enumerate() {
            let seen = self.memory.use_number(slot, quarter, Ordering::Acquire);
            if seen != expected {
                if seen != expected.wrapping_sub(1) {
                    return Err(RingError { ticket, quarter, expected, seen });
                }
                return Ok(None);
            }
            *payload = self.memory.payload(slot, quarter);
        }
        let result = accept(ticket, &CommandFields::from_payloads(&payloads));
        self.next += 1;
        self.memory.set_released(self.next, Ordering::Release);
        Ok(Some(result))
    }
}

/// Writer on the CPU: a kernel's counterpart for tests and for twins.
#[derive(Debug)]
pub struct RingWriter<M> {
    memory: M,
}

impl<M: RingMemory> RingWriter<M> {
    /// Writer for tickets that the caller counts.
    pub fn new(memory: M) -> RingWriter<M> {
        RingWriter { memory }
    }

    /// True if this ticket's slot is free.
    pub fn has_room(&self, ticket: u64) -> bool {
        let released = self.memory.released(Ordering::Acquire);
        ticket.wrapping_sub(released) < self.memory.slots() as u64
    }

    /// Stores one quarter of a command; [`RingWriter::has_room`] has returned true for the ticket.
    pub fn store_quarter(&self, ticket: u64, fields: &CommandFields, quarter: usize) {
        let (slot, number) = place_of(ticket, self.memory.slots());
        self.memory.set_payload(slot, quarter, fields.payloads()[quarter]);
        self.memory.set_use_number(slot, quarter, number, Ordering::Release);
    }

    /// Stores a command, if the slot is free.
    pub fn push(&self, ticket: u64, fields: &CommandFields) -> bool {
        let free = self.has_room(ticket);
        if free {
            (0..QUARTERS).for_each(|quarter| self.store_quarter(ticket, fields, quarter));
        }
        free
    }
}

#[cfg(all(test, not(loom)))]
#[path = "ring_tests.rs"]
mod tests;
