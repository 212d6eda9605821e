//! One call: that it may begin, its waits, and what it tells the host.

use std::hint;
use std::mem::offset_of;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::thread;
use std::time::{Duration, Instant};

use super::Twin;
use super::region::Region;
use crate::device::areas::{DeviceArea, StateWord};
use crate::device::record::{Code, Phase, RECORD_BYTES, Record};
use weft_gpu::domain::{RecordLayout, Word};

/// A fatal record stands, or was written just now: the group is over, and outputs are poisoned.
#[derive(Debug)]
pub(super) struct Dead;

/// Looks at what a wait is for before the thread offers its processor to others, and before it sleeps.
const SPINS: u32 = 64;
const YIELDS: u32 = 512;
const NAP: Duration = Duration::from_micros(50);

/// A call of one phase on one channel, from its beginning to its end.
pub(super) struct Call<'a> {
    pub(super) twin: &'a Twin,
    phase: Phase,
    pub(super) channel: u32,
    /// The number of its round, and what flags say in it.
    round: u32,
    pub(super) epoch: u32,
    begun: Instant,
    limit: Duration,
}

impl Twin {
    /// Begins a call, if the group lives, the phase is next on the channel and no other such call runs there.
    pub(super) fn begin(&self, channel: u32, phase: Phase) -> Result<Call<'_>, Dead> {
        let limit = self.table().packet(Word::Limit as u64).load(Relaxed);
        let (begun, limit) = (Instant::now(), Duration::from_nanos(limit));
        let mut call = Call { twin: self, phase, channel, round: 0, epoch: 0, begun, limit };
        let entered = call.state(StateWord::Entered, phase as u64).fetch_add(1, AcqRel);
        let left = call.state(StateWord::Left, phase as u64).load(Acquire);
        if self.is_dead() || call.state(StateWord::Closed, 0).load(Acquire) != 0 {
            return Err(Dead);
        }
        if self.is_aborted() {
            return Err(call.fail(Code::Aborted, self.rank(), 0, 0, 0));
        }
        if entered != left {
            let (expected, seen) = (left.into(), entered.into());
            return Err(call.fail(Code::TwoLaunches, self.rank(), 0, expected, seen));
        }
        let epochs = [0, 1, 2, 3].map(|phase| call.state(StateWord::Epoch, phase).load(Acquire));
        let next = (1..4).find(|&phase| epochs[phase - 1] != epochs[phase]).unwrap_or(0) as u64;
        if next != phase as u64 {
            return Err(call.fail(Code::OutOfOrder, self.rank(), 0, next, phase as u64));
        }
        call.round = epochs[phase as usize].wrapping_add(1);
        // Memory holds 0 before the first round, so none has that epoch.
        call.epoch = if call.round == 0 { 1 << 31 } else { call.round };
        Ok(call)
    }

    fn is_dead(&self) -> bool {
        self.table().word(Word::Dead as u64).load(Acquire) != 0
    }

    fn is_aborted(&self) -> bool {
        // SAFETY: `new` was promised the abort word, which is accessed as an atomic only.
        unsafe { Region::new(self.abort, 4) }.word(0).load(Acquire) != 0
    }

    /// Writes a record, its code last.
    fn write_record(&self, which: u64, record: &Record) {
        let records = self.records();
        let at = which * RECORD_BYTES;
        let Record { code, rank, phase, peer, channel, slot, expected, seen } = *record;
        for (word, value) in (1..).zip([rank, phase, peer, channel, slot]) {
            records.word(at + 4 * word).store(value, Relaxed);
        }
        records.packet(at + offset_of!(RecordLayout, expected) as u64).store(expected, Relaxed);
        records.packet(at + offset_of!(RecordLayout, seen) as u64).store(seen, Relaxed);
        records.word(at).store(code, Release);
    }

    /// Reads a record: the fatal one, or the notice.
    pub(super) fn read_record(&self, which: u64) -> Option<Record> {
        let records = self.records();
        let at = which * RECORD_BYTES;
        let code = records.word(at).load(Acquire);
        let word = |word: u64| records.word(at + 4 * word).load(Relaxed);
        (code != 0).then(|| Record {
            code,
            rank: word(1),
            phase: word(2),
            peer: word(3),
            channel: word(4),
            slot: word(5),
            expected: records.packet(at + offset_of!(RecordLayout, expected) as u64).load(Relaxed),
            seen: records.packet(at + offset_of!(RecordLayout, seen) as u64).load(Relaxed),
        })
    }

    pub(super) fn records(&self) -> Region<'_> {
        // SAFETY: `new` was promised two records, which are accessed as atomics only.
        unsafe { Region::new(self.record, 2 * RECORD_BYTES) }
    }
}

impl Call<'_> {
    fn state(&self, word: StateWord, phase: u64) -> &std::sync::atomic::AtomicU32 {
        let at = self.twin.shape.at(self.channel, DeviceArea::State);
        self.twin.own().word(at + 4 * (word as u64 + phase))
    }

    /// The round's phase is done.
    pub(super) fn end(self) {
        self.state(StateWord::Epoch, self.phase as u64).store(self.round, Release);
    }

    /// Ends the group, with a record if it is the first to do so.
    pub(super) fn fail(&self, code: Code, peer: u32, slot: u32, expected: u64, seen: u64) -> Dead {
        let dead = self.twin.table().word(Word::Dead as u64);
        if dead.compare_exchange(0, code as u32, AcqRel, Acquire).is_ok() {
            let record = self.record(code, peer, slot, expected, seen);
            self.twin.write_record(0, &record);
        }
        Dead
    }

    /// Tells the host something that ends nothing, if it has read what it was told before.
    pub(super) fn notice(&self, code: Code, peer: u32, slot: u32, expected: u64, seen: u64) {
        let flagged = self.twin.table().word(Word::Flagged as u64);
        if flagged.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            if self.twin.read_record(1).is_none() {
                let record = self.record(code, peer, slot, expected, seen);
                self.twin.write_record(1, &record);
            }
            flagged.store(0, Release);
        }
    }

    fn record(&self, code: Code, peer: u32, slot: u32, expected: u64, seen: u64) -> Record {
        let planned = code == Code::Expert && self.twin.plans_by_chunk();
        let phase = if planned { Phase::Plan } else { self.phase };
        let (code, phase) = (code as u32, phase as u32);
        let (rank, channel) = (self.twin.rank(), self.channel);
        Record { code, rank, phase, peer, channel, slot, expected, seen }
    }

    /// Waits until `look` finds this round's epoch; what else it finds is what a timeout has seen.
    pub(super) fn wait<T>(
        &self,
        peer: u32,
        slot: u32,
        look: impl Fn() -> Result<T, u32>,
    ) -> Result<T, Dead> {
        let mut looks = 0u32;
        loop {
            self.twin.jitter();
            let seen = match look() {
                Ok(value) => return Ok(value),
                Err(seen) => u64::from(seen),
            };
            let expected = self.epoch.into();
            if self.twin.is_dead() {
                return Err(Dead);
            }
            if self.twin.is_aborted() {
                return Err(self.fail(Code::Aborted, peer, slot, expected, seen));
            }
            if self.begun.elapsed() >= self.limit {
                return Err(self.fail(Code::Timeout, peer, slot, expected, seen));
            }
            match looks {
                0..SPINS => hint::spin_loop(),
                SPINS..YIELDS => thread::yield_now(),
                _ => thread::sleep(NAP),
            }
            looks = looks.saturating_add(1);
        }
    }

    /// Waits for a packet of this round and gives its value. Acquires: what its writer had read or written
    /// before is done.
    pub(super) fn wait_packet(&self, area: DeviceArea, at: u64, peer: u32) -> Result<u32, Dead> {
        let packet = self.twin.shape.at(self.channel, area) + 8 * at;
        let packet = self.twin.own().packet(packet);
        let slot = if area == DeviceArea::Counts { self.twin.count_slot(at) } else { 0 };
        self.wait(peer, slot, || open(packet.load(Acquire), self.epoch))
    }

    /// Writes a packet of this round to an area of `peer`. Releases: what this rank has read or written before
    /// is done.
    pub(super) fn send_packet(&self, area: DeviceArea, at: u64, peer: u32, value: u32) {
        self.twin.jitter();
        let to = self.twin.shape.at(self.channel, area) + 8 * at;
        self.twin.heap(peer).packet(to).store(seal(value, self.epoch), Release);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.state(StateWord::Left, self.phase as u64).fetch_add(1, AcqRel);
    }
}

/// A value with its epoch.
pub(super) fn seal(value: u32, epoch: u32) -> u64 {
    u64::from(epoch) << 32 | u64::from(value)
}

/// The value of a packet of this epoch, or the epoch that it has.
pub(super) fn open(packet: u64, epoch: u32) -> Result<u32, u32> {
    let seen = (packet >> 32) as u32;
    if seen == epoch { Ok(packet as u32) } else { Err(seen) }
}
