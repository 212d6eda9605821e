//! All ranks in a group in one process: heaps, records, arrays, and one round on each rank.

use std::alloc::{Layout as Place, alloc_zeroed, dealloc};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_gpu::table::TABLE_BYTES;
use weft_moe::Weighting;
use weft_moe::device::{
    CombineOutputs, DeviceArea, DeviceConfig, DeviceLayout, DeviceShape, DispatchInputs,
    DispatchOutputs, IdWidth, PlanLocation, StateWord, Twin, TwinLaunch,
};

use crate::common::{Batch, run_expert};
use crate::dense;

/// Memory by address, aligned to 256 bytes, initially zeros.
pub struct Array {
    pointer: *mut u8,
    place: Place,
}

// SAFETY: plain memory; the users exclude races.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

impl Array {
    pub fn new(bytes: usize) -> Array {
        let place = Place::from_size_align(bytes.max(1), 256).unwrap();
        // SAFETY: the size is not 0.
        let pointer = unsafe { alloc_zeroed(place) };
        assert!(!pointer.is_null());
        Array { pointer, place }
    }

    pub fn of(bytes: &[u8]) -> Array {
        let array = Array::new(bytes.len());
        // SAFETY: as long, and new.
        unsafe { array.pointer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        array
    }

    pub fn filled(bytes: usize, value: u8) -> Array {
        Array::of(&vec![value; bytes])
    }

    pub fn address(&self) -> u64 {
        self.pointer.expose_provenance() as u64
    }

    pub fn bytes(&self, at: usize, bytes: usize) -> Vec<u8> {
        assert!(at + bytes <= self.place.size());
        let mut out = vec![0; bytes];
        // SAFETY: within the array, which is not written concurrently.
        unsafe { self.pointer.add(at).copy_to_nonoverlapping(out.as_mut_ptr(), bytes) };
        out
    }

    pub fn whole(&self) -> Vec<u8> {
        self.bytes(0, self.place.size())
    }

    pub fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.place.size());
        // SAFETY: within the array, which is not read concurrently.
        unsafe { self.pointer.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub fn i32s(&self, at: usize, count: usize) -> Vec<i32> {
        let bytes = self.bytes(at, 4 * count);
        bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: as it was allocated.
        unsafe { dealloc(self.pointer, self.place) };
    }
}

pub struct Group {
    pub shape: DeviceShape,
    pub heaps: Vec<Array>,
    /// For each rank two records, from byte 128 on the abort word, and from byte 192 on the table.
    pub records: Vec<Array>,
    pub twins: Vec<Twin>,
}

impl Group {
    pub fn new(config: &DeviceConfig) -> Group {
        let shape = |rank| DeviceShape::new(DeviceConfig { rank, ..config.clone() }).unwrap();
        let bytes = shape(0).heap_bytes() as usize;
        let heaps: Vec<Array> = (0..config.ranks).map(|_| Array::new(bytes)).collect();
        let records: Vec<Array> =
            (0..config.ranks).map(|_| Array::new(192 + TABLE_BYTES as usize)).collect();
        let peers: Vec<u64> = heaps.iter().map(Array::address).collect();
        let twins = (0..config.ranks)
            .map(|rank| {
                let record = records[rank as usize].address();
                // SAFETY: heaps and records live as long as the group.
                let twin = unsafe {
                    let (table, abort) = (record + 192, record + 128);
                    Twin::new(Arc::new(shape(rank)), peers.clone(), table, record, abort)
                };
                twin.set_limit(Duration::from_secs(20));
                twin
            })
            .collect();
        let group = Group { shape: shape(0), heaps, records, twins };
        for (layer, map) in (0..).zip(&*config.maps) {
            group.twins.iter().for_each(|twin| twin.set_map(layer, map, layer + 1));
        }
        group
    }

    pub fn abort(&self, rank: usize) {
        let word = self.records[rank].pointer.wrapping_add(128).cast::<u32>();
        // SAFETY: within the array, aligned, and an atomic for all.
        unsafe { AtomicU32::from_ptr(word) }.store(1, Ordering::Release);
    }

    /// Waits until calls for all phases to `phase` have begun on channel 0 in a new group.
    pub fn until_entered(&self, rank: usize, phase: usize) {
        let state = self.shape.at(0, DeviceArea::State) as usize;
        let word = state + 4 * (StateWord::Entered as usize + phase);
        let word = self.heaps[rank].pointer.wrapping_add(word).cast::<u32>();
        let since = std::time::Instant::now();
        // SAFETY: within the array, aligned, and an atomic for all.
        while unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire) == 0 {
            assert!(since.elapsed().as_secs() < 30, "no call of phase {phase} has begun");
            std::thread::yield_now();
        }
    }

    /// No group dies in silence, and no notice goes unread.
    pub fn assert_quiet(&self) {
        for twin in &self.twins {
            assert_eq!(twin.fatal(), None);
            assert_eq!(twin.take_notice(), None);
        }
    }
}

/// A rank's arrays in one round.
pub struct Member<'a> {
    pub twin: &'a Twin,
    pub channel: u32,
    /// Plan memory, if that is not in the channel.
    pub plan: Option<Arc<Array>>,
    /// True if an earlier round made the plan.
    pub kept: bool,
    /// Rows in arrays with one for each position, if they are not for the worst case.
    pub positions: Option<u32>,
    inputs: [Array; 5],
    pub given: u32,
    pub layer: u32,
    counted: bool,
    weighted: bool,
    pub received: Received,
    outputs: Array,
    pub combined: Array,
    /// Rows that combine adds to the sums; and whether it adds what `combined` held.
    pub added: [Option<Array>; 2],
    pub accumulates: bool,
}

pub struct Received {
    pub tokens: Array,
    pub scales: Array,
    pub counts: Array,
    pub offsets: Array,
    pub rows: Array,
    pub weights: Array,
    pub experts: Array,
    /// For all experts in the group: 32 or 64 bits each.
    pub load: Array,
}

impl<'a> Member<'a> {
    /// `surplus` rows follow the batch's rows in the arrays; `count` is how many are valid.
    pub fn new(twin: &'a Twin, channel: u32, batch: &Batch, ids: &[i64], surplus: u32) -> Self {
        let shape = twin.shape();
        let config = shape.config();
        let tokens = (ids.len() / config.top_k as usize) as u32;
        let surplus = surplus.min(config.max_tokens - tokens);
        let given = tokens + surplus;
        let extended = |bytes: &[u8], row: usize| {
            let mut bytes = bytes.to_vec();
            bytes.resize(given as usize * row, 0x3C);
            Array::of(&bytes)
        };
        let (top_k, id) = (config.top_k as usize, config.ids.bytes());
        let ids: Vec<u8> = match config.ids {
            IdWidth::I32 => ids.iter().flat_map(|id| (*id as i32).to_le_bytes()).collect(),
            IdWidth::I64 => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
        };
        let weights: Vec<u8> =
            batch.weights.iter().flatten().flat_map(|weight| weight.to_le_bytes()).collect();
        let scales = if config.casts() { 0 } else { shape.scale_bytes() as usize };
        let inputs = [
            extended(&batch.tokens, shape.token_bytes() as usize),
            extended(&batch.scales, scales),
            extended(&ids, top_k * id),
            extended(&weights, top_k * 4),
            Array::of(&tokens.to_le_bytes()),
        ];
        let (positions, local) = (shape.positions() as usize, shape.local_experts() as usize);
        let (groups, choices, number) = match config.layout {
            DeviceLayout::Dense => (config.ranks as usize, positions * top_k, id as u64),
            _ => (local, positions, 4),
        };
        let array = |rows: usize, bytes: u64| Array::filled(rows * bytes as usize, 0xAA);
        let received = Received {
            tokens: array(positions, shape.wire_bytes()),
            scales: array(1, shape.received_scales().bytes()),
            counts: array(local, 4),
            offsets: array(groups + 1, 4),
            rows: array(choices, number),
            weights: array(choices, 4),
            experts: array(positions, 4),
            load: Array::filled(shape.placement().experts() as usize * 8, 0x11),
        };
        Member {
            twin,
            channel,
            plan: None,
            kept: false,
            positions: None,
            inputs,
            given,
            layer: 0,
            counted: surplus > 0 || tokens % 2 == 1,
            weighted: batch.weights.is_some(),
            received,
            outputs: array(positions, shape.expert_output_bytes()),
            combined: array(given as usize, shape.output_bytes()),
            added: [None, None],
            accumulates: false,
        }
    }

    /// The same with a separate plan, which outlives the round.
    pub fn keeping(mut self) -> Self {
        let bytes = self.twin.shape().channel_layout().plan_bytes() as usize;
        self.plan = Some(Arc::new(Array::filled(bytes, 0xAA)));
        self
    }

    /// The same by `earlier`'s plan.
    pub fn by_plan_of(mut self, earlier: &Member<'_>) -> Self {
        (self.plan, self.kept) = (earlier.plan.clone(), true);
        let (from, to) = (&earlier.received, &self.received);
        for (from, to) in [
            (&from.counts, &to.counts),
            (&from.offsets, &to.offsets),
            (&from.rows, &to.rows),
            (&from.weights, &to.weights),
            (&from.experts, &to.experts),
            // No round by a plan that was kept adds to it.
            (&from.load, &to.load),
        ] {
            to.set(0, &from.whole()[..to.place.size()]);
        }
        self
    }

    /// Allocates exactly `positions` positions.
    pub fn fit(&mut self, positions: u32) {
        let shape = self.twin.shape();
        let array = |bytes: u64| Array::filled(positions as usize * bytes as usize, 0xAA);
        self.positions = Some(positions);
        self.received.tokens = array(shape.wire_bytes());
        if shape.received_scales().leading == 0 {
            self.received.scales = array(shape.scale_bytes());
        }
        self.received.experts = array(4);
        self.received.rows = array(4);
        self.received.weights = array(4);
        self.outputs = array(shape.expert_output_bytes());
    }

    pub fn at(&self) -> TwinLaunch {
        let address = self.plan.as_ref().map_or(0, |plan| plan.address());
        let plan = PlanLocation { address, kept: self.kept };
        TwinLaunch { channel: self.channel, plan, positions: self.positions }
    }

    /// Numbers in a plan area, wherever that lies.
    pub fn plan_numbers(&self, heap: &Array, area: DeviceArea, count: usize) -> Vec<i32> {
        let shape = self.twin.shape();
        let offset = |area| shape.channel_layout().extent(area).offset as usize;
        match &self.plan {
            Some(plan) => plan.i32s(offset(area) - offset(DeviceArea::Slots), count),
            None => heap.i32s(shape.at(self.channel, area) as usize, count),
        }
    }

    pub fn inputs(&self) -> DispatchInputs {
        let [tokens, scales, ids, weights, _] = &self.inputs;
        let scaled = self.twin.shape().scales() > 0 && !self.twin.shape().config().casts();
        DispatchInputs {
            tokens: tokens.address(),
            scales: if scaled { scales.address() } else { 0 },
            ids: if self.kept { 0 } else { ids.address() },
            weights: if self.weighted && !self.kept { weights.address() } else { 0 },
            count: self.count(),
            given: self.given,
            layer: self.layer,
        }
    }

    fn count(&self) -> u64 {
        if self.counted && !self.kept { self.inputs[4].address() } else { 0 }
    }

    pub fn send(&self) {
        // SAFETY: the member's arrays, which live as long as it does.
        unsafe { self.twin.dispatch_send(self.at(), &self.inputs()) };
    }

    /// Bytes per element in [`Received::load`].
    pub fn load_bytes(&self) -> u32 {
        if self.counted { 8 } else { 4 }
    }

    pub fn receive(&self) {
        let received = &self.received;
        let planned = |array: &Array| if self.kept { 0 } else { array.address() };
        let outputs = DispatchOutputs {
            tokens: received.tokens.address(),
            scales: received.scales.address(),
            counts: planned(&received.counts),
            offsets: planned(&received.offsets),
            rows: planned(&received.rows),
            weights: planned(&received.weights),
            experts: planned(&received.experts),
            load: planned(&received.load),
            load_bytes: self.load_bytes(),
        };
        // SAFETY: as in `send`.
        unsafe { self.twin.dispatch_recv(self.at(), &outputs) };
    }

    /// Runs this rank's experts on what it received, wherever the layout leaves it.
    pub fn compute(&self, weighting: Weighting, heap: &Array) {
        let shape = self.twin.shape();
        let config = dense::config(shape.config());
        let first = shape.placement().experts_of(config.rank).start;
        let output_bytes = shape.expert_output_bytes() as usize;
        let mut output = vec![0; output_bytes];
        if self.is_dense() {
            for row in 0..self.received.offsets.i32s(4 * config.ranks as usize, 1)[0] as usize {
                let (token, scales) = self.token(row, heap);
                run_expert(&config, first, 0.5, (&token, &scales), &mut output);
                self.outputs.set(row * output_bytes, &output);
            }
            return;
        }
        let local = shape.local_experts() as usize;
        let offsets = self.received.offsets.i32s(0, local + 1);
        for (group, count) in self.received.counts.i32s(0, local).into_iter().enumerate() {
            for position in offsets[group]..offsets[group] + count {
                let position = position as usize;
                let (token, scales) = self.token(position, heap);
                let weight = self.received.weights.bytes(4 * position, 4);
                let weight = match weighting {
                    Weighting::AtCombine => 1.0,
                    Weighting::AtExpert => f32::from_le_bytes(weight.try_into().unwrap()),
                };
                let expert = first + group as u32;
                run_expert(&config, expert, weight, (&token, &scales), &mut output);
                self.outputs.set(position * output_bytes, &output);
            }
        }
    }

    pub fn is_dense(&self) -> bool {
        self.twin.shape().config().layout == DeviceLayout::Dense
    }

    /// The token and the scales at a position.
    pub fn token(&self, position: usize, heap: &Array) -> (Vec<u8>, Vec<u8>) {
        let shape = self.twin.shape();
        let (token, scales) = (shape.wire_bytes() as usize, shape.scale_bytes() as usize);
        if shape.config().layout != DeviceLayout::Indexed {
            let received = &self.received;
            let tokens = received.tokens.bytes(position * token, token);
            return (tokens, self.placed_scales(position as u64, scales));
        }
        let row = self.received.rows.i32s(4 * position, 1)[0] as u64;
        let rows = shape.at(self.channel, weft_moe::device::DeviceArea::Rows);
        let at = (rows + row * shape.channel_layout().row_stride) as usize;
        let scales_at = at + shape.channel_layout().row_scales_at as usize;
        (heap.bytes(at, token), heap.bytes(scales_at, scales))
    }

    /// The scales at a position, element by element, and zeros behind the last in a four-scale word.
    fn placed_scales(&self, position: u64, bytes: usize) -> Vec<u8> {
        let placed = self.twin.shape().received_scales();
        let at = |column| placed.at(position, column) as usize;
        let element = |column| self.received.scales.bytes(at(column), placed.element as usize);
        let mut scales: Vec<u8> = (0..placed.columns).flat_map(element).collect();
        assert!(scales.split_off(bytes).iter().all(|byte| *byte == 0));
        scales
    }

    pub fn reply(&self, release: bool) {
        // SAFETY: as in `send`.
        unsafe { self.twin.combine_send(self.at(), self.outputs.address(), release) };
    }

    pub fn combine(&self, release: bool) {
        let combined = self.combined.address();
        let [first, second] =
            self.added.each_ref().map(|rows| rows.as_ref().map_or(0, Array::address));
        let last = if self.accumulates { combined } else { 0 };
        let added = [first, second, last];
        let outputs = CombineOutputs { combined, added, count: self.count(), given: self.given };
        // SAFETY: as in `send`.
        unsafe { self.twin.combine_recv(self.at(), &outputs, release) };
    }
}

impl Member<'_> {
    /// The experts' outputs in the planner's position order, which differs in the padded layout.
    pub fn outputs_by_plan(&self, plan: &weft_moe::ReceivePlan) -> Vec<u8> {
        let bytes = self.twin.shape().expert_output_bytes() as usize;
        let local = self.twin.shape().local_experts() as usize;
        if self.is_dense() {
            return self.dense_outputs_by_plan(plan, bytes);
        }
        let offsets = self.received.offsets.i32s(0, local + 1);
        let mut outputs = vec![0xAA; plan.positions() * bytes];
        for (group, &count) in plan.expert_counts().iter().enumerate() {
            let from = offsets[group] as usize * bytes;
            let to = plan.expert_offsets()[group] as usize * bytes;
            let length = count as usize * bytes;
            outputs[to..to + length].copy_from_slice(&self.outputs.bytes(from, length));
        }
        outputs
    }

    /// A dense row's output at its first position, and zeros at the others.
    fn dense_outputs_by_plan(&self, plan: &weft_moe::ReceivePlan, bytes: usize) -> Vec<u8> {
        let shape = self.twin.shape();
        let max_tokens = shape.config().max_tokens;
        let before = self.received.offsets.i32s(0, shape.config().ranks as usize + 1);
        let mut outputs = vec![0; plan.positions() * bytes];
        let mut seen = HashSet::new();
        for (&slot, output) in plan.slots().iter().zip(outputs.chunks_exact_mut(bytes)) {
            let row = dense::device_row(plan, slot) as u32;
            if seen.insert(row) {
                let dense = before[(row / max_tokens) as usize] as u32 + row % max_tokens;
                output.copy_from_slice(&self.outputs.bytes(dense as usize * bytes, bytes));
            }
        }
        outputs
    }
}
