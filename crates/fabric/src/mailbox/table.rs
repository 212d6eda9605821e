//! Area table: one rank's mailbox region, own or mapped, as words and payloads.

use super::area::{MailboxArea, SLOTS};
use crate::atomics::{CacheLine, Word64};
use crate::memory::Memory;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use weft_control::Rank;

const LINE: usize = size_of::<CacheLine<AtomicU64>>();
const HEAD: usize = size_of::<AtomicU64>();

/// A line that announces waits, then an area for each rank: a line with the count of messages taken, and
/// the slots.
#[derive(Clone, Debug)]
pub(super) struct AreaTable {
    /// Keeps the words alive.
    _memory: Arc<Memory>,
    base: NonNull<u8>,
    ranks: u32,
    message_bytes: usize,
}

/// One rank's area in the table.
#[derive(Debug)]
pub(super) struct TableArea<'a> {
    base: NonNull<u8>,
    slot_bytes: usize,
    table: PhantomData<&'a AreaTable>,
}

// SAFETY: `base` points into the memory, which is Send; the words are only ever accessed atomically, and payloads only
// as `MailboxEnd` permits.
unsafe impl Send for AreaTable {}
// SAFETY: as above.
unsafe impl Sync for AreaTable {}

impl AreaTable {
    /// Byte size of a table for this many ranks and this message length.
    pub fn bytes_for(ranks: u32, message_bytes: usize) -> usize {
        LINE + ranks as usize * area_bytes(message_bytes)
    }

    /// Views `memory` as a table; `None` if it is too small, misaligned or device memory.
    pub fn new(memory: Arc<Memory>, ranks: u32, message_bytes: usize) -> Option<AreaTable> {
        let base = memory.host()?;
        let aligned = base.as_ptr().addr().is_multiple_of(align_of::<CacheLine<AtomicU64>>());
        let fits = AreaTable::bytes_for(ranks, message_bytes) <= memory.len();
        let table = AreaTable { _memory: memory, base, ranks, message_bytes };
        (aligned && fits).then_some(table)
    }

    /// Bytes in the longest message.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Area for messages from a rank.
    ///
    /// # Panics
    /// If the rank is outside the table.
    #[inline]
    pub fn area(&self, rank: Rank) -> TableArea<'_> {
        assert!(rank.0 < self.ranks);
        let first = LINE + rank.index() * area_bytes(self.message_bytes);
        // SAFETY: `new` checked the size.
        let base = unsafe { self.base.add(first) };
        TableArea { base, slot_bytes: slot_bytes(self.message_bytes), table: PhantomData }
    }

    /// Owner: announces waits, or withdraws the announcement.
    pub fn set_wait(&self, waits: bool) {
        self.wait_word().store(waits.into());
    }

    /// Peer: true if the owner has announced a wait.
    #[inline]
    pub fn has_wait(&self) -> bool {
        self.wait_word().load() != 0
    }

    #[inline]
    fn wait_word(&self) -> &impl Word64 {
        // SAFETY: as in `area`; a table has at least this line.
        unsafe { &(*self.base.as_ptr().cast::<CacheLine<AtomicU64>>()).0 }
    }
}

impl TableArea<'_> {
    /// Slot payload, as many bytes as messages have.
    #[inline]
    pub fn payload(&self, slot: usize) -> *mut u8 {
        // SAFETY: a slot is a head and as many bytes.
        unsafe { self.slot(slot).add(HEAD) }
    }

    #[inline]
    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS as usize);
        // SAFETY: `AreaTable::new` checked the size: an area is a line and all slots.
        unsafe { self.base.as_ptr().add(LINE + slot * self.slot_bytes) }
    }
}

impl MailboxArea for TableArea<'_> {
    type Word = AtomicU64;

    #[inline]
    fn taken(&self) -> &CacheLine<AtomicU64> {
        // SAFETY: `AreaTable::new` checked alignment and size; every bit pattern is a valid atomic; the word is only
        // ever accessed atomically, here and in every process that maps it.
        unsafe { self.base.cast().as_ref() }
    }

    #[inline]
    fn head(&self, slot: usize) -> &AtomicU64 {
        // SAFETY: as in `taken`; slots are whole lines.
        unsafe { &*self.slot(slot).cast() }
    }
}

/// Bytes in an area: the line that counts messages taken, and the slots.
const fn area_bytes(message_bytes: usize) -> usize {
    LINE + SLOTS as usize * slot_bytes(message_bytes)
}

/// Bytes in a slot: the message head and the message, in whole lines.
const fn slot_bytes(message_bytes: usize) -> usize {
    (HEAD + message_bytes).next_multiple_of(LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_lie_side_by_side_in_memory_that_is_large_enough() {
        let bytes = AreaTable::bytes_for(3, 57);
        assert_eq!(bytes, 64 * (1 + 3 * (1 + 2 * SLOTS as usize)));
        let memory = Arc::new(Memory::shared(bytes).unwrap());
        let table = AreaTable::new(memory.clone(), 3, 57).unwrap();
        let begin = |rank| std::ptr::from_ref(table.area(Rank(rank)).taken()).addr();
        assert_eq!(begin(0), memory.host().unwrap().addr().get() + 64);
        assert_eq!([begin(1) - begin(0), begin(2) - begin(1)], [64 * (1 + 2 * SLOTS as usize); 2]);
        let last = table.area(Rank(2)).payload(SLOTS as usize - 1).addr() + 120;
        assert_eq!(last, memory.host().unwrap().addr().get() + bytes);
        assert!(AreaTable::new(memory, 3, 121).is_none());
    }
}
