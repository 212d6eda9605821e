//! Area table: the mailbox region of one rank, its own or a mapped one, as words.

use super::area::{LINE_WORDS, MailboxArea, SLOTS};
use crate::atomics::{CacheLine, Word64};
use crate::memory::Memory;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use weft_control::Rank;

const LINE: usize = size_of::<CacheLine<AtomicU64>>();

/// A line with the announcement of waits, then an area for each rank: a line with the number of messages taken, and
/// the slots.
#[derive(Clone, Debug)]
pub(super) struct AreaTable {
    /// Keeps the words alive.
    _memory: Arc<Memory>,
    base: NonNull<u8>,
    ranks: u32,
    message_bytes: usize,
    /// Lines of all slots of an area.
    lines: usize,
}

// SAFETY: `base` points into the memory, which is Send; the words are only ever accessed atomically.
unsafe impl Send for AreaTable {}
// SAFETY: as above.
unsafe impl Sync for AreaTable {}

impl AreaTable {
    /// Bytes of a table for this many ranks and messages of this length.
    pub fn bytes_for(ranks: u32, message_bytes: usize) -> usize {
        LINE * (1 + ranks as usize * (1 + slot_lines(message_bytes) * SLOTS as usize))
    }

    /// View of `memory`; `None` if it is too small, misaligned or of a device.
    pub fn new(memory: Arc<Memory>, ranks: u32, message_bytes: usize) -> Option<AreaTable> {
        let base = memory.host()?;
        let aligned = base.as_ptr().addr().is_multiple_of(align_of::<CacheLine<AtomicU64>>());
        let fits = AreaTable::bytes_for(ranks, message_bytes) <= memory.len();
        let lines = slot_lines(message_bytes) * SLOTS as usize;
        let table = AreaTable { _memory: memory, base, ranks, message_bytes, lines };
        (aligned && fits).then_some(table)
    }

    /// Bytes of the longest message.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Area for the messages of a rank.
    ///
    /// # Panics
    /// If the rank is outside of the table.
    #[inline]
    pub fn area(&self, rank: Rank) -> MailboxArea<'_, AtomicU64> {
        assert!(rank.0 < self.ranks);
        let first = 1 + rank.0 as usize * (1 + self.lines);
        // SAFETY: `new` checked alignment and size; every bit pattern is a valid atomic; the words are only ever
        // accessed atomically, here and in every process that maps them.
        unsafe {
            let line = |index: usize| self.base.as_ptr().add(index * LINE);
            MailboxArea {
                taken: &*line(first).cast(),
                lines: std::slice::from_raw_parts(line(first + 1).cast(), self.lines),
            }
        }
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

/// Cache lines of a slot: the head of a message, and its bytes.
fn slot_lines(message_bytes: usize) -> usize {
    (1 + message_bytes.div_ceil(8)).div_ceil(LINE_WORDS)
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
        let begin = |rank| std::ptr::from_ref(table.area(Rank(rank)).taken).addr();
        assert_eq!(begin(0), memory.host().unwrap().addr().get() + 64);
        assert_eq!([begin(1) - begin(0), begin(2) - begin(1)], [64 * (1 + 2 * SLOTS as usize); 2]);
        let last = table.area(Rank(2)).lines.as_ptr_range().end.addr();
        assert_eq!(last, memory.host().unwrap().addr().get() + bytes);
        assert!(AreaTable::new(memory, 3, 121).is_none());
    }
}
