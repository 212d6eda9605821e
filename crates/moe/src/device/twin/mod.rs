//! CPU implementation of the kernels: one rank's side of the protocol, over the same areas, with atomics in
//! the same memory order.

mod arrays;
mod call;
mod cast;
mod combine;
mod dispatch;
mod launch;
mod packet;
mod plan;
mod rows;

use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use crate::device::abi::arguments::{
    CombineOutputs, DeviceCounts, DispatchInputs, DispatchOutputs,
};
use crate::device::options::types::{DeviceLayout, TransferPath};
use crate::device::shape::DeviceShape;
use crate::device::shape::channel_layout::{DeviceArea, StateWord};
use crate::device::shape::replica_table;
use crate::shape::expert_map::ExpertMap;
use arrays::{CombineArrays, DispatchInputArrays, DispatchOutputArrays};
pub use launch::TwinLaunch;
use weft_gpu::Record;
use weft_gpu::raw_memory::RawMemory;
use weft_gpu::twin::{Jitter, TwinWatch};

/// One rank's kernels. Calls run on the calling thread and have no result: as on a device, errors are written
/// to the records. A send half never waits; [`Twin::set_limit`] bounds all waits in one receive half
/// together.
///
/// Calls on different channels may run concurrently, on different threads.
#[derive(Debug)]
pub struct Twin {
    shape: Arc<DeviceShape>,
    peers: Vec<u64>,
    watch: TwinWatch,
    /// First channel's number: see `DeviceShape::channel_number`.
    number: u32,
    jitter: Jitter,
}

impl Twin {
    /// Creates a twin over all ranks' channels, as mapped on this rank, with the addresses of the domain's
    /// table, two records and abort word.
    ///
    /// # Panics
    /// If a rank's channels are missing, or an address is not aligned.
    ///
    /// # Safety
    /// While the value is in use: each address in `peers` points to [`DeviceShape::heap_bytes`] bytes,
    /// initially zero, that only twins with the same shape access; `table` points to a domain's table, which
    /// twins on this rank share; `record` to 128 bytes, the fatal record and the notice, and `abort` to 4,
    /// which are accessed only as atomics while a call runs. Pointers to all of them have been exposed.
    pub unsafe fn new(
        shape: Arc<DeviceShape>,
        peers: Vec<u64>,
        table: u64,
        record: u64,
        abort: u64,
    ) -> Twin {
        assert_eq!(peers.len(), shape.config().ranks as usize, "every rank has channels");
        assert!(peers.iter().all(|peer| peer.is_multiple_of(8)), "addresses are aligned");
        // SAFETY: the caller's contract.
        let watch = unsafe { TwinWatch::new(table, record, abort) };
        Twin { shape, peers, watch, number: 0, jitter: Jitter::default() }
    }

    /// Sets the first channel's number, if the domain has other all-to-alls. The default is 0.
    #[must_use]
    pub fn numbered(self, number: u32) -> Twin {
        Twin { number, ..self }
    }

    /// The shape.
    pub fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    /// All ranks' channels, as mapped on this rank.
    pub fn peers(&self) -> &[u64] {
        &self.peers
    }

    /// Sets a receive half's maximum wait, up to 584 years. The initial value is 0.
    pub fn set_limit(&self, limit: Duration) {
        self.watch.set_limit(limit);
    }

    /// The fatal record, if the group has failed.
    pub fn fatal(&self) -> Option<Record> {
        self.watch.fatal()
    }

    /// Takes the current notice, which makes room for the next.
    pub fn take_notice(&self) -> Option<Record> {
        self.watch.take_notice()
    }

    /// Sets an idle channel's epoch, as after that many rounds, for wrap-around tests. All ranks call this
    /// before any begins a round.
    pub fn set_epoch(&self, channel: u32, epoch: u32) {
        let state = self.shape.at(channel, DeviceArea::State);
        for phase in 0..4 {
            self.own().word(state + 4 * (StateWord::Epoch as u64 + phase)).store(epoch, Release);
        }
        // Flags and packets hold an earlier round's epoch.
        let extent = |area| self.shape.channel_layout().extent(area);
        for area in [DeviceArea::RowFlags, DeviceArea::ReplyFlags] {
            for flag in 0..u64::from(extent(area).rows) {
                self.own().word(self.shape.at(channel, area) + 4 * flag).store(epoch, Release);
            }
        }
        let mut packets = vec![DeviceArea::Counts, DeviceArea::Signals];
        if self.shape.path() == TransferPath::Packets {
            packets.extend([DeviceArea::Rows, DeviceArea::Replies]);
        }
        for area in packets {
            for at in (0..extent(area).bytes()).step_by(8) {
                let packet = self.own().packet(self.shape.at(channel, area) + at);
                packet.store(packet::seal(0, epoch), Release);
            }
        }
    }

    /// Writes an idle layer's replica table, as [`DeviceAllToAll`](crate::device::DeviceAllToAll) does. All
    /// ranks use the same generation.
    ///
    /// # Panics
    /// If the layer does not exist.
    pub fn set_map(&self, layer: u32, map: &ExpertMap, generation: u32) {
        let at = self.shape.map_at(layer).expect("the configuration has a map for the layer");
        self.own().write(at, &replica_table::table(map, generation));
    }

    /// Enables thread yields at points within calls, selected by `seed`; for tests.
    pub fn set_jitter(&self, seed: u64) {
        self.jitter.set(seed);
    }

    /// Dispatch send.
    ///
    /// # Safety
    /// The `inputs` arrays have the lengths that follow from it and are not written while the call runs;
    /// likewise the plan.
    pub unsafe fn dispatch_send(&self, at: impl Into<TwinLaunch>, inputs: &DispatchInputs) {
        let shape = &self.shape;
        let given = inputs.given.min(shape.config().max_tokens);
        let rows = u64::from(given);
        let ids = rows * u64::from(shape.config().top_k);
        let scales = if shape.config().casts() { 0 } else { shape.scale_bytes() };
        // SAFETY: the caller's contract.
        let array = |address, bytes| unsafe { RawMemory::new(address, bytes) };
        let inputs = DispatchInputArrays {
            tokens: array(inputs.tokens, rows * shape.token_bytes()),
            scales: array(inputs.scales, rows * scales),
            ids: array(inputs.ids, ids * shape.config().ids.bytes() as u64),
            weights: array(inputs.weights, ids * 4),
            count: array(inputs.count, 4),
            given,
            layer: inputs.layer,
        };
        // Errors are in the record.
        let _ = self.send_tokens(at.into(), &inputs);
    }

    /// Dispatch receive: waits for all ranks' tokens and lays them out.
    ///
    /// # Safety
    /// The `outputs` arrays have the lengths that follow from it, with exclusive access while the call runs.
    pub unsafe fn dispatch_recv(&self, at: impl Into<TwinLaunch>, outputs: &DispatchOutputs) {
        let (at, shape) = (at.into(), &self.shape);
        let (positions, local) = (u64::from(at.positions(shape)), u64::from(shape.local_experts()));
        let config = shape.config();
        let rows = if config.layout == DeviceLayout::Indexed { 0 } else { positions };
        let choices = positions * u64::from(config.top_k);
        // Offset count; bytes per row or id; bytes per weight.
        let (offsets, ids, weights) = match config.layout {
            DeviceLayout::Dense => {
                (u64::from(config.ranks), choices * config.ids.bytes() as u64, choices * 4)
            }
            _ => (local, positions * 4, positions * 4),
        };
        // SAFETY: the caller's contract.
        let array = |address, bytes| unsafe { RawMemory::new(address, bytes) };
        let outputs = DispatchOutputArrays {
            tokens: array(outputs.tokens, rows * shape.wire_bytes()),
            scales: array(
                outputs.scales,
                match shape.received_scales() {
                    _ if rows == 0 => 0,
                    scales if scales.leading == 0 => positions * shape.scale_bytes(),
                    columns => columns.bytes(),
                },
            ),
            counts: array(outputs.counts, local * 4),
            offsets: array(outputs.offsets, (offsets + 1) * 4),
            rows: array(outputs.rows, ids),
            weights: array(outputs.weights, weights),
            experts: array(outputs.experts, positions * 4),
            load: array(
                outputs.load,
                u64::from(shape.placement().experts()) * u64::from(outputs.load_bytes),
            ),
            load_bytes: outputs.load_bytes,
        };
        if self.receive_tokens(at, &outputs).is_err() {
            outputs.poison();
        }
    }

    /// Waits for the counts in a round whose tokens are in flight; `None` if there is none, or the wait
    /// failed.
    pub fn counts(&self, at: impl Into<TwinLaunch>) -> Option<DeviceCounts> {
        self.count_tokens(at.into()).ok()
    }

    /// Both dispatch halves.
    ///
    /// # Safety
    /// As for the halves.
    pub unsafe fn dispatch(
        &self,
        at: impl Into<TwinLaunch>,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
    ) {
        let at = at.into();
        // SAFETY: the caller's contract.
        unsafe { self.dispatch_send(at, inputs) };
        // SAFETY: the caller's contract.
        unsafe { self.dispatch_recv(at, outputs) };
    }

    /// Combine send: sends the replies to the tokens' sources. With `release` the rows are only released, and
    /// `outputs` is not read.
    ///
    /// # Safety
    /// `outputs` has a row in the combine type for every position, and is not written while the call runs.
    pub unsafe fn combine_send(&self, at: impl Into<TwinLaunch>, outputs: u64, release: bool) {
        let at = at.into();
        let rows = u64::from(at.positions(&self.shape));
        let bytes = rows * self.shape.expert_output_bytes();
        // SAFETY: the caller's contract.
        let outputs = unsafe { RawMemory::new(outputs, bytes) };
        // Errors are in the record.
        let _ = self.send_replies(at, outputs, release);
    }

    /// Combine receive: waits for the replies and sums them. With `release` it writes no result.
    ///
    /// # Safety
    /// The `outputs` arrays have the lengths that follow from it; access to the result is exclusive while the
    /// call runs, and the other arrays are not written.
    pub unsafe fn combine_recv(
        &self,
        at: impl Into<TwinLaunch>,
        outputs: &CombineOutputs,
        release: bool,
    ) {
        let given = outputs.given.min(self.shape.config().max_tokens);
        let bytes = u64::from(given) * self.shape.output_bytes();
        // SAFETY: the caller's contract.
        let array = |address, bytes| unsafe { RawMemory::new(address, bytes) };
        let outputs = CombineArrays {
            combined: array(outputs.combined, bytes),
            added: outputs.added.map(|rows| array(rows, bytes)),
            count: array(outputs.count, 4),
            given,
        };
        if self.receive_replies(at.into(), &outputs, release).is_err() && !release {
            outputs.combined.fill_all(0xFF);
        }
    }

    /// Both combine halves.
    ///
    /// # Safety
    /// As for the halves.
    pub unsafe fn combine(
        &self,
        at: impl Into<TwinLaunch>,
        outputs: u64,
        combined: &CombineOutputs,
        release: bool,
    ) {
        let at = at.into();
        // SAFETY: the caller's contract.
        unsafe { self.combine_send(at, outputs, release) };
        // SAFETY: the caller's contract.
        unsafe { self.combine_recv(at, combined, release) };
    }

    fn rank(&self) -> u32 {
        self.shape.config().rank
    }

    fn heap(&self, rank: u32) -> RawMemory<'_> {
        // SAFETY: the `new` contract covers this many bytes on every rank.
        unsafe { RawMemory::new(self.peers[rank as usize], self.shape.heap_bytes()) }
    }

    fn own(&self) -> RawMemory<'_> {
        self.heap(self.rank())
    }

    /// Valid token count in a batch.
    fn valid_tokens(&self, count: RawMemory<'_>, given: u32) -> u32 {
        match count.is_given() {
            true => i32::from_le_bytes(count.element(0, 0)).clamp(0, given as i32) as u32,
            false => given,
        }
    }

    /// True if the plan has areas by token chunk.
    fn plans_by_chunk(&self) -> bool {
        self.shape.path() == TransferPath::Bandwidth
    }

    /// Index among a source's counts for the count at `place`: by local expert, then the row count.
    fn count_slot(&self, place: u64) -> u32 {
        (place % (u64::from(self.shape.local_experts()) + 1)) as u32
    }
}
