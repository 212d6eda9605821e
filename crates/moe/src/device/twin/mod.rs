//! The kernels on the CPU: one rank's side of the protocol, over the same areas as the kernels', with real
//! atomics in the same memory order.

mod call;
mod cast;
mod combine;
mod dispatch;
mod plan;
mod region;
mod rows;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::thread;
use std::time::Duration;

use crate::device::areas::{DeviceArea, StateWord};
use crate::device::arguments::{DispatchInputs, DispatchOutputs};
use crate::device::config::{DeviceLayout, Path};
use crate::device::record::{RECORD_BYTES, Record};
use crate::device::shape::DeviceShape;
use dispatch::{Inputs, Outputs};
use region::Region;
use weft_gpu::domain::{TABLE_BYTES, Word};

/// One rank's kernels. Calls run on the calling thread and give nothing back: as on a device, what
/// goes wrong is written to the records. A send half never waits; the waits of a receive half take
/// no longer than [`Twin::set_limit`] says, all together.
///
/// Calls on different channels may run at once, on different threads.
#[derive(Debug)]
pub struct Twin {
    shape: Arc<DeviceShape>,
    peers: Vec<u64>,
    table: u64,
    record: u64,
    abort: u64,
    /// 0, or the state of the generator that says where to yield.
    jitter: AtomicU64,
}

impl Twin {
    /// A rank over the channels of all ranks, as they are mapped here, with the addresses of its domain's
    /// table, of its two records and of its abort word.
    ///
    /// # Panics
    /// If there are not channels of each rank, or an address is not aligned.
    ///
    /// # Safety
    /// For as long as the value is used: each address in `peers` is that of
    /// [`DeviceShape::heap_bytes`] bytes, zeros at first, that only twins of the same shape touch; `table` is
    /// that of a domain's table, which twins of this rank share;
    /// `record` is that of 128 bytes, the fatal record and the notice, and `abort` of 4, which are
    /// accessed as atomics alone while a call runs. Pointers to all of them have been exposed, where they
    /// were had as pointers.
    pub unsafe fn new(
        shape: Arc<DeviceShape>,
        peers: Vec<u64>,
        table: u64,
        record: u64,
        abort: u64,
    ) -> Twin {
        assert_eq!(peers.len(), shape.config().ranks as usize, "there are channels of every rank");
        let aligned = |address: &u64| address.is_multiple_of(8);
        assert!(
            peers.iter().chain([&table, &record, &abort]).all(aligned),
            "addresses are aligned"
        );
        Twin { shape, peers, table, record, abort, jitter: AtomicU64::new(0) }
    }

    /// The shape.
    pub fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    /// The channels of all ranks, as they are mapped here.
    pub fn peers(&self) -> &[u64] {
        &self.peers
    }

    /// How long a receive half may wait, up to 584 years. A new table says 0: nothing is waited for.
    pub fn set_limit(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.table().packet(Word::Limit as u64).store(limit, Release);
    }

    /// What ended the group, if it has ended.
    pub fn fatal(&self) -> Option<Record> {
        self.read_record(0)
    }

    /// Takes the notice that stands, which makes room for the next.
    pub fn take_notice(&self) -> Option<Record> {
        let notice = self.read_record(1)?;
        self.records().word(RECORD_BYTES).store(0, Release);
        Some(notice)
    }

    /// Sets the number of the last round of a channel that is idle, as if so many had been; for tests, of
    /// what happens when the numbers wrap. All ranks do so before any begins a round.
    pub fn set_epoch(&self, channel: u32, epoch: u32) {
        let state = self.shape.at(channel, DeviceArea::State);
        for phase in 0..4 {
            self.own().word(state + 4 * (StateWord::Epoch as u64 + phase)).store(epoch, Release);
        }
        // What was not written in this round was in some earlier one.
        let extent = |area| self.shape.areas().extent(area);
        for area in [DeviceArea::RowFlags, DeviceArea::AnswerFlags] {
            for flag in 0..u64::from(extent(area).rows) {
                self.own().word(self.shape.at(channel, area) + 4 * flag).store(epoch, Release);
            }
        }
        let mut packets = vec![DeviceArea::Counts, DeviceArea::Signals];
        if self.shape.path() == Path::Packets {
            packets.extend([DeviceArea::Rows, DeviceArea::Answers]);
        }
        for area in packets {
            for at in (0..extent(area).bytes()).step_by(8) {
                let packet = self.own().packet(self.shape.at(channel, area) + at);
                packet.store(call::seal(0, epoch), Release);
            }
        }
    }

    /// From here on the thread is yielded at points that `seed` chooses, within every call; for tests.
    pub fn set_jitter(&self, seed: u64) {
        self.jitter.store(seed, Relaxed);
    }

    fn jitter(&self) {
        let mut bits = self.jitter.load(Relaxed);
        if bits != 0 {
            // Xorshift (Marsaglia, 2003); threads that lose an update of another's only share its number.
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            self.jitter.store(bits, Relaxed);
            if bits.is_multiple_of(8) {
                thread::yield_now();
            }
        }
    }

    /// Tokens leave for the ranks that own their experts.
    ///
    /// # Safety
    /// The arrays of `inputs` are as long as it says, and nobody writes them while the call runs.
    pub unsafe fn dispatch_send(&self, channel: u32, inputs: &DispatchInputs) {
        let shape = &self.shape;
        let given = inputs.given.min(shape.config().max_tokens);
        let rows = u64::from(given);
        let ids = rows * u64::from(shape.config().top_k);
        let scales = if shape.config().casts() { 0 } else { shape.scale_bytes() };
        // SAFETY: the caller's promise.
        let array = |address, bytes| unsafe { Region::new(address, bytes) };
        let inputs = Inputs {
            tokens: array(inputs.tokens, rows * shape.token_bytes()),
            scales: array(inputs.scales, rows * scales),
            ids: array(inputs.ids, ids * shape.config().ids.bytes() as u64),
            weights: array(inputs.weights, ids * 4),
            count: array(inputs.count, 4),
            given,
        };
        // A record says what went wrong.
        let _ = self.send_tokens(channel, &inputs);
    }

    /// Waits for the tokens of all ranks and lays them out.
    ///
    /// # Safety
    /// The arrays of `outputs` are as long as it says, and nobody else touches them while the call runs.
    pub unsafe fn dispatch_recv(&self, channel: u32, outputs: &DispatchOutputs) {
        let shape = &self.shape;
        let (positions, local) = (u64::from(shape.positions()), u64::from(shape.local_experts()));
        let indexed = shape.config().layout == DeviceLayout::Indexed;
        let rows = if indexed { 0 } else { positions };
        // SAFETY: the caller's promise.
        let array = |address, bytes| unsafe { Region::new(address, bytes) };
        let outputs = Outputs {
            tokens: array(outputs.tokens, rows * shape.wire_bytes()),
            scales: array(outputs.scales, rows * shape.scale_bytes()),
            counts: array(outputs.counts, local * 4),
            offsets: array(outputs.offsets, (local + 1) * 4),
            rows: array(outputs.rows, positions * 4),
            weights: array(outputs.weights, positions * 4),
        };
        if self.receive_tokens(channel, &outputs).is_err() {
            outputs.poison();
        }
    }

    /// Both halves of dispatch.
    ///
    /// # Safety
    /// Those of the halves.
    pub unsafe fn dispatch(
        &self,
        channel: u32,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.dispatch_send(channel, inputs) };
        // SAFETY: the caller's promise.
        unsafe { self.dispatch_recv(channel, outputs) };
    }

    /// Answers leave for the ranks that sent the tokens. With `release`, rows are only given back, and
    /// `outputs` is not read.
    ///
    /// # Safety
    /// `outputs` has a row in the combine type for every position, and nobody writes it while the call runs.
    pub unsafe fn combine_send(&self, channel: u32, outputs: u64, release: bool) {
        let bytes = u64::from(self.shape.positions()) * self.shape.expert_output_bytes();
        // SAFETY: the caller's promise.
        let outputs = unsafe { Region::new(outputs, bytes) };
        // A record says what went wrong.
        let _ = self.send_answers(channel, outputs, release);
    }

    /// Waits for the answers and adds them up. `count` is the address of an int32, or 0, as in dispatch.
    /// With `release`, `combined` is not written.
    ///
    /// # Safety
    /// `combined` has `given` rows in the output type, and nobody else touches it while the call runs;
    /// nobody writes `count`.
    pub unsafe fn combine_recv(
        &self,
        channel: u32,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
    ) {
        let given = given.min(self.shape.config().max_tokens);
        let bytes = u64::from(given) * self.shape.output_bytes();
        // SAFETY: the caller's promise.
        let combined = unsafe { Region::new(combined, bytes) };
        // SAFETY: the caller's promise.
        let count = unsafe { Region::new(count, 4) };
        if self.receive_answers(channel, combined, (count, given), release).is_err() && !release {
            combined.fill_all(0xFF);
        }
    }

    /// Both halves of combine.
    ///
    /// # Safety
    /// Those of the halves.
    pub unsafe fn combine(
        &self,
        channel: u32,
        outputs: u64,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.combine_send(channel, outputs, release) };
        // SAFETY: the caller's promise.
        unsafe { self.combine_recv(channel, combined, count, given, release) };
    }

    fn rank(&self) -> u32 {
        self.shape.config().rank
    }

    fn heap(&self, rank: u32) -> Region<'_> {
        // SAFETY: `new` was promised so many bytes of every rank.
        unsafe { Region::new(self.peers[rank as usize], self.shape.heap_bytes()) }
    }

    fn table(&self) -> Region<'_> {
        // SAFETY: `new` was promised the table, of which only atomics are accessed.
        unsafe { Region::new(self.table, TABLE_BYTES) }
    }

    fn own(&self) -> Region<'_> {
        self.heap(self.rank())
    }

    /// Tokens of a batch that exist.
    fn existing(&self, count: Region<'_>, given: u32) -> u32 {
        match count.is_given() {
            true => i32::from_le_bytes(count.element(0, 0)).clamp(0, given as i32) as u32,
            false => given,
        }
    }

    /// Whether the plan is kept by chunks of tokens.
    fn plans_by_chunk(&self) -> bool {
        self.shape.path() == Path::Bandwidth
    }

    /// Which of a source's counts stands at `place` in the area: its local expert, or after the last the rows.
    fn count_slot(&self, place: u64) -> u32 {
        (place % (u64::from(self.shape.local_experts()) + 1)) as u32
    }
}
