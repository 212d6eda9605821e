//! Watch: records from kernels to the host, and the abort word from the host to kernels.
//!
//! A device wait that expires does not trap, which would destroy the CUDA context. It writes a [`Record`] into
//! memory that the host reads, poisons the output and exits; the host finds the record at the next call. In the
//! other direction there is one word: once the host has set it, all device waits end.
//!
//! A [`Watch`] has 192 bytes, three 64-byte lines: the fatal record, the notice, the abort word. For a GPU they are
//! pinned host memory, for the CPU twin ordinary memory.
//!
//! The writer stores a record's fields and then `code` with release; the reader loads `code` with acquire, so a
//! record is read whole. The first fatal record is kept: later ones are consequences. Taking a notice frees the line
//! for the next. Concurrent writers elect one: [`Watch::report`] by word 6 in the record, a kernel in separate
//! memory.
//!
//! - `record.rs`: records and codes
//! - `family.rs`: a family's phases and codes, and errors for records

mod family;
mod record;

pub use family::{Families, Family};
pub use record::{Code, Record};

use crate::error::Result;
use crate::table::RecordLayout;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use weft_cuda::{Context, PinnedMemory};

/// Words per line.
const LINE: usize = 16;
const CODE: usize = offset_of!(RecordLayout, code) / 4;
const CLAIM: usize = offset_of!(RecordLayout, claim) / 4;
const EXPECTED: usize = offset_of!(RecordLayout, expected) / 4;
const SEEN: usize = offset_of!(RecordLayout, seen) / 4;
const _: () = assert!(RecordLayout::SIZE == 4 * LINE);

/// Record severity, which selects the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// The group has failed.
    Fatal,
    /// One batch is invalid; the group continues.
    Notice,
}

impl Severity {
    fn line(self) -> usize {
        match self {
            Severity::Fatal => 0,
            Severity::Notice => 1,
        }
    }
}

const ABORT_LINE: usize = 2;

/// Cache line, so that device and host write to different lines.
#[repr(C, align(64))]
#[derive(Default)]
struct Line([AtomicU32; LINE]);

/// One rank's records and abort word. It must outlive all kernels that have its addresses.
pub struct Watch {
    memory: WatchMemory,
    /// Serialises threads that take a notice.
    take_lock: Mutex<()>,
}

enum WatchMemory {
    /// Pinned host memory with at least three lines, initially zero.
    Pinned(PinnedMemory),
    Host(Box<[Line; 3]>),
}

impl Watch {
    /// Watch for a GPU, in pinned memory, which all this process's devices reach.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn on_device(context: &Arc<Context>) -> Result<Watch> {
        let memory = PinnedMemory::alloc(context, size_of::<[Line; 3]>())?;
        Ok(Watch { memory: WatchMemory::Pinned(memory), take_lock: Mutex::default() })
    }

    /// Watch for the CPU twin, in ordinary memory in this process.
    pub fn on_host() -> Watch {
        Watch { memory: WatchMemory::Host(Box::default()), take_lock: Mutex::default() }
    }

    fn lines(&self) -> &[Line; 3] {
        match &self.memory {
            // SAFETY: page-aligned, as long as three lines, zeroed, alive as long as `self`; accessed
            // by atomics and the device only.
            WatchMemory::Pinned(memory) => unsafe { &*memory.host().cast::<[Line; 3]>() },
            WatchMemory::Host(lines) => lines,
        }
    }

    fn word(&self, line: usize, word: usize) -> &AtomicU32 {
        &self.lines()[line].0[word]
    }

    /// 64-bit value that starts at this word.
    fn wide(&self, line: usize, word: usize) -> &AtomicU64 {
        debug_assert!(word.is_multiple_of(2) && word + 1 < LINE);
        // A pointer to both words: provenance from only the first would not cover the second.
        let words = &self.lines()[line].0[word..word + 2];
        let address = words.as_ptr().cast_mut().cast::<u64>();
        // SAFETY: two words at an even index in a line, so eight aligned bytes that live as long as `self`; accessed
        // only through this function and by the device.
        unsafe { AtomicU64::from_ptr(address) }
    }

    fn device_address(&self) -> u64 {
        match &self.memory {
            WatchMemory::Pinned(memory) => memory.device_address(),
            WatchMemory::Host(lines) => lines.as_ptr() as u64,
        }
    }

    /// Device (or twin) address of the records: fatal, then notice.
    pub fn record_address(&self) -> u64 {
        self.device_address()
    }

    /// Device (or twin) address of the abort word.
    pub fn abort_address(&self) -> u64 {
        self.device_address() + (ABORT_LINE * size_of::<Line>()) as u64
    }

    /// The fatal record, if there is one; it is kept.
    pub fn fatal(&self) -> Option<Record> {
        self.read(Severity::Fatal)
    }

    /// Takes the pending notice, if there is one, and frees the line.
    pub fn take_notice(&self) -> Option<Record> {
        let _one = self.take_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let record = self.read(Severity::Notice)?;
        let line = Severity::Notice.line();
        self.word(line, CODE).store(0, Ordering::Release);
        self.word(line, CLAIM).store(0, Ordering::Release);
        Some(record)
    }

    /// Ends all present and future waits on the device.
    pub fn abort(&self) {
        self.word(ABORT_LINE, 0).store(1, Ordering::Release);
    }

    /// True after [`Watch::abort`].
    pub fn is_aborted(&self) -> bool {
        self.word(ABORT_LINE, 0).load(Ordering::Acquire) != 0
    }

    /// Writes a record from the CPU, for the twin. Returns false, and drops the record, if the line holds another.
    pub fn report(&self, severity: Severity, record: &Record) -> bool {
        let line = severity.line();
        let word = |number| self.word(line, number);
        let claimed = word(CLAIM).compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_err() || word(CODE).load(Ordering::Relaxed) != 0 {
            return false;
        }
        let [code, fields @ ..] = record.words();
        for (number, field) in fields.into_iter().enumerate() {
            word(1 + number).store(field, Ordering::Relaxed);
        }
        self.wide(line, EXPECTED).store(record.expected, Ordering::Relaxed);
        self.wide(line, SEEN).store(record.seen, Ordering::Relaxed);
        word(CODE).store(code, Ordering::Release);
        true
    }

    fn read(&self, severity: Severity) -> Option<Record> {
        let line = severity.line();
        let code = self.word(line, CODE).load(Ordering::Acquire);
        if code == 0 {
            return None;
        }
        let word = |number| self.word(line, number).load(Ordering::Relaxed);
        let words = [code, word(1), word(2), word(3), word(4), word(5)];
        let (expected, seen) = (self.wide(line, EXPECTED), self.wide(line, SEEN));
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        Some(Record::from_words(words, load(expected), load(seen)))
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("fatal", &self.fatal())
            .field("notice", &self.read(Severity::Notice))
            .field("aborted", &self.is_aborted())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(code: Code, peer: u32) -> Record {
        Record {
            code,
            rank: 2,
            phase: 1,
            peer: Some(peer),
            channel: 1,
            slot: 17,
            expected: (9 << 32) | 7,
            seen: 6,
        }
    }

    #[test]
    fn a_record_lies_in_memory_as_the_kernels_write_it() {
        let watch = Watch::on_host();
        assert!(watch.record_address().is_multiple_of(64));
        assert_eq!(watch.abort_address(), watch.record_address() + 128);
        assert!(watch.report(Severity::Notice, &record(Code::Family(6), 3)));
        let at = (watch.record_address() + 64) as *const u32;
        // SAFETY: the second line in a live watch, which has no writer now.
        let words: Vec<u32> = (0..16).map(|word| unsafe { at.add(word).read() }).collect();
        assert_eq!(words, [6, 2, 1, 3, 1, 17, 1, 0, 7, 9, 6, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn the_first_fatal_record_stays_and_each_notice_is_taken_once() {
        let watch = Watch::on_host();
        assert_eq!((watch.fatal(), watch.take_notice()), (None, None));
        assert!(watch.report(Severity::Fatal, &record(Code::Timeout, 3)));
        assert!(!watch.report(Severity::Fatal, &record(Code::Timeout, 4)));
        for _ in 0..2 {
            assert_eq!(watch.fatal(), Some(record(Code::Timeout, 3)));
        }
        for peer in 5..8 {
            assert!(watch.report(Severity::Notice, &record(Code::Family(6), peer)));
            assert!(!watch.report(Severity::Notice, &record(Code::Family(6), 9)));
            assert_eq!(watch.take_notice(), Some(record(Code::Family(6), peer)));
            assert_eq!(watch.take_notice(), None);
        }
    }

    #[test]
    fn an_abort_is_seen_where_the_device_looks() {
        let watch = Watch::on_host();
        // SAFETY: the abort word in a live watch, read as the device reads it.
        let word = unsafe { AtomicU32::from_ptr(watch.abort_address() as *mut u32) };
        assert_eq!(word.load(Ordering::Acquire), 0);
        watch.abort();
        assert_eq!(word.load(Ordering::Acquire), 1);
        assert!(watch.is_aborted());
    }

    #[test]
    fn of_many_writers_one_is_read_whole() {
        for _ in 0..50 {
            let watch = Watch::on_host();
            let taken = std::thread::scope(|scope| {
                for peer in 0..4u64 {
                    let watch = &watch;
                    scope.spawn(move || {
                        let mut mine = record(Code::Timeout, peer as u32);
                        (mine.expected, mine.seen) = (peer, peer);
                        watch.report(Severity::Fatal, &mine)
                    });
                }
                loop {
                    if let Some(record) = watch.fatal() {
                        break record;
                    }
                    std::thread::yield_now();
                }
            });
            let peer = u64::from(taken.peer.unwrap());
            assert_eq!((taken.expected, taken.seen), (peer, peer));
            assert_eq!(watch.fatal(), Some(taken));
        }
    }
}
