//! Common parts for kernels' CPU twins: failure records, bounded waits, and yield points for tests.

use crate::raw_memory::RawMemory;
use crate::table::{RecordLayout, TABLE_BYTES, Word};
use crate::watch::{Code, Record};
use std::hint;
use std::mem::offset_of;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::thread;
use std::time::{Duration, Instant};

/// Record size in bytes; the notice follows the fatal record.
const RECORD_BYTES: u64 = RecordLayout::SIZE as u64;

/// Offsets of a record's 64-bit fields.
const EXPECTED: u64 = offset_of!(RecordLayout, expected) as u64;
const SEEN: u64 = offset_of!(RecordLayout, seen) as u64;

/// A [`Watch`](crate::Watch) from the twin's side: it writes records and reads the abort word and the wait limit, at
/// the addresses that a kernel has.
#[derive(Debug)]
pub struct TwinWatch {
    table: u64,
    record: u64,
    abort: u64,
}

impl TwinWatch {
    /// Creates it from the addresses of a domain's table, records and abort word.
    ///
    /// # Panics
    /// If an address is not a multiple of 8.
    ///
    /// # Safety
    /// While the value is in use: `table` is the address of a domain's table, which twins on one rank share; `record`
    /// points to 128 bytes, the fatal record and the notice, and `abort` to 4, which are accessed only as atomics
    /// while a call runs. Pointers to all of them have been exposed.
    pub unsafe fn new(table: u64, record: u64, abort: u64) -> TwinWatch {
        let aligned = |address: &u64| address.is_multiple_of(8);
        assert!([&table, &record, &abort].into_iter().all(aligned), "addresses are aligned");
        TwinWatch { table, record, abort }
    }

    fn table(&self) -> RawMemory<'_> {
        // SAFETY: the table is in the `new` contract, and only its atomics are accessed.
        unsafe { RawMemory::new(self.table, TABLE_BYTES) }
    }

    fn records(&self) -> RawMemory<'_> {
        // SAFETY: the two records are in the `new` contract and accessed only as atomics.
        unsafe { RawMemory::new(self.record, 2 * RECORD_BYTES) }
    }

    /// Sets the wait limit, up to 584 years. The initial value is 0.
    pub fn set_limit(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.table().packet(Word::Limit as u64).store(limit, Release);
    }

    /// True once the domain has failed on this rank.
    pub fn is_dead(&self) -> bool {
        self.table().word(Word::Dead as u64).load(Acquire) != 0
    }

    /// True once the host ends all waits.
    pub fn is_aborted(&self) -> bool {
        // SAFETY: the abort word is in the `new` contract and accessed only as an atomic.
        unsafe { RawMemory::new(self.abort, 4) }.word(0).load(Acquire) != 0
    }

    /// Marks the domain dead; the first failure writes a record.
    pub fn fail(&self, record: &Record) {
        let dead = self.table().word(Word::Dead as u64);
        if dead.compare_exchange(0, record.code.number(), AcqRel, Acquire).is_ok() {
            self.write_record(0, record);
        }
    }

    /// Writes a notice, if the host has read the previous one.
    pub fn notice(&self, record: &Record) {
        let flagged = self.table().word(Word::Flagged as u64);
        if flagged.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            if self.read_record(1).is_none() {
                self.write_record(1, record);
            }
            flagged.store(0, Release);
        }
    }

    /// True if a wait that began at `begun` has ended without success: the domain is dead, or the host ends all waits,
    /// or the limit has expired. The last two mark the domain dead, with a record that has this code.
    pub fn has_expired(&self, begun: Instant, record: impl FnOnce(Code) -> Record) -> bool {
        if self.is_dead() {
            return true;
        }
        let limit = Duration::from_nanos(self.table().packet(Word::Limit as u64).load(Relaxed));
        let code = match self.is_aborted() {
            true => Code::Aborted,
            false if begun.elapsed() >= limit => Code::Timeout,
            false => return false,
        };
        self.fail(&record(code));
        true
    }

    /// The fatal record, if the domain has failed.
    pub fn fatal(&self) -> Option<Record> {
        self.read_record(0)
    }

    /// Takes the current notice, which makes room for the next.
    pub fn take_notice(&self) -> Option<Record> {
        let notice = self.read_record(1)?;
        self.records().word(RECORD_BYTES).store(0, Release);
        Some(notice)
    }

    /// Writes a record, the code last.
    fn write_record(&self, which: u64, record: &Record) {
        let records = self.records();
        let at = which * RECORD_BYTES;
        let [code, fields @ ..] = record.words();
        for (word, value) in (1..).zip(fields) {
            records.word(at + 4 * word).store(value, Relaxed);
        }
        records.packet(at + EXPECTED).store(record.expected, Relaxed);
        records.packet(at + SEEN).store(record.seen, Relaxed);
        records.word(at).store(code, Release);
    }

    /// Reads a record: the fatal one (0), or the notice (1).
    fn read_record(&self, which: u64) -> Option<Record> {
        let records = self.records();
        let at = which * RECORD_BYTES;
        let code = records.word(at).load(Acquire);
        if code == 0 {
            return None;
        }
        let word = |word: u64| records.word(at + 4 * word).load(Relaxed);
        let wide = |offset| records.packet(at + offset).load(Relaxed);
        let words = [code, word(1), word(2), word(3), word(4), word(5)];
        Some(Record::from_words(words, wide(EXPECTED), wide(SEEN)))
    }
}

/// Pauses between polls in a wait: a spin hint at first, then a thread yield, then 50 µs of sleep.
#[derive(Debug, Default)]
pub struct Backoff {
    polls: u32,
}

impl Backoff {
    /// Polls before the thread yields, and before it sleeps.
    const SPINS: u32 = 64;
    const YIELDS: u32 = 512;
    const SLEEP: Duration = Duration::from_micros(50);

    /// Pauses after a poll without success.
    pub fn pause(&mut self) {
        match self.polls {
            0..Self::SPINS => hint::spin_loop(),
            Self::SPINS..Self::YIELDS => thread::yield_now(),
            _ => thread::sleep(Self::SLEEP),
        }
        self.polls = self.polls.saturating_add(1);
    }
}

/// Yields and postponed steps at random points, for tests; off at first.
#[derive(Debug, Default)]
pub struct Jitter {
    /// Generator state, or 0.
    state: AtomicU64,
}

impl Jitter {
    /// Enables them at points that `seed` selects; 0 disables them.
    pub fn set(&self, seed: u64) {
        self.state.store(seed, Relaxed);
    }

    /// Yields at one in eight points on average.
    pub fn point(&self) {
        if self.draw().is_some_and(|bits| bits.is_multiple_of(8)) {
            thread::yield_now();
        }
    }

    /// True at one in two points on average: the caller postpones a step that may come later.
    pub fn postpones(&self) -> bool {
        self.draw().is_some_and(|bits| bits >> 63 == 1)
    }

    /// Next number, if enabled.
    fn draw(&self) -> Option<u64> {
        let mut bits = self.state.load(Relaxed);
        if bits == 0 {
            return None;
        }
        // Xorshift (Marsaglia, 2003). Concurrent threads may draw the same number.
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        self.state.store(bits, Relaxed);
        Some(bits)
    }
}
