//! All ranks of a group in one process: heaps, records, arrays, and one round on each rank.

use std::alloc::{Layout as Place, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_gpu::domain::TABLE_BYTES;
use weft_moe::device::{
    DeviceConfig, DeviceLayout, DeviceShape, DispatchInputs, DispatchOutputs, IdWidth, Twin,
};
use weft_moe::{Placement, Weighting};

use crate::common::{Batch, run_expert};
use crate::dense;

/// Memory by its address, aligned to 256 bytes, zeros at first.
pub struct Array {
    pointer: *mut u8,
    place: Place,
}

// SAFETY: plain memory; whoever shares it keeps accesses apart.
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
        // SAFETY: within the array, which nobody writes just now.
        unsafe { self.pointer.add(at).copy_to_nonoverlapping(out.as_mut_ptr(), bytes) };
        out
    }

    pub fn whole(&self) -> Vec<u8> {
        self.bytes(0, self.place.size())
    }

    pub fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.place.size());
        // SAFETY: within the array, which nobody reads just now.
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
        Group { shape: shape(0), heaps, records, twins }
    }

    pub fn abort(&self, rank: usize) {
        let word = self.records[rank].pointer.wrapping_add(128).cast::<u32>();
        // SAFETY: within the array, aligned, and an atomic for all.
        unsafe { AtomicU32::from_ptr(word) }.store(1, Ordering::Release);
    }

    /// No group dies in silence, and no notice goes unread.
    pub fn assert_quiet(&self) {
        for twin in &self.twins {
            assert_eq!(twin.fatal(), None);
            assert_eq!(twin.take_notice(), None);
        }
    }
}

/// What a rank is given in one round, and what it gets.
pub struct Member<'a> {
    pub twin: &'a Twin,
    pub channel: u32,
    inputs: [Array; 5],
    pub given: u32,
    counted: bool,
    weighted: bool,
    pub received: Received,
    outputs: Array,
    pub combined: Array,
}

pub struct Received {
    pub tokens: Array,
    pub scales: Array,
    pub counts: Array,
    pub offsets: Array,
    pub rows: Array,
    pub weights: Array,
}

impl<'a> Member<'a> {
    /// `surplus` rows follow those of the batch in its arrays; then `count` says how many exist.
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
        let array = |rows: usize, bytes: u64| Array::filled(rows * bytes as usize, 0xAA);
        let received = Received {
            tokens: array(positions, shape.wire_bytes()),
            scales: array(positions, shape.scale_bytes()),
            counts: array(local, 4),
            offsets: array(local + 1, 4),
            rows: array(positions, 4),
            weights: array(positions, 4),
        };
        Member {
            twin,
            channel,
            inputs,
            given,
            counted: surplus > 0 || tokens % 2 == 1,
            weighted: batch.weights.is_some(),
            received,
            outputs: array(positions, shape.expert_output_bytes()),
            combined: array(given as usize, shape.output_bytes()),
        }
    }

    pub fn inputs(&self) -> DispatchInputs {
        let [tokens, scales, ids, weights, _] = &self.inputs;
        let scaled = self.twin.shape().scales() > 0 && !self.twin.shape().config().casts();
        DispatchInputs {
            tokens: tokens.address(),
            scales: if scaled { scales.address() } else { 0 },
            ids: ids.address(),
            weights: if self.weighted { weights.address() } else { 0 },
            count: self.count(),
            given: self.given,
        }
    }

    fn count(&self) -> u64 {
        if self.counted { self.inputs[4].address() } else { 0 }
    }

    pub fn send(&self) {
        // SAFETY: the member's arrays, which live as long as it does.
        unsafe { self.twin.dispatch_send(self.channel, &self.inputs()) };
    }

    pub fn receive(&self) {
        let received = &self.received;
        let outputs = DispatchOutputs {
            tokens: received.tokens.address(),
            scales: received.scales.address(),
            counts: received.counts.address(),
            offsets: received.offsets.address(),
            rows: received.rows.address(),
            weights: received.weights.address(),
        };
        // SAFETY: as in `send`.
        unsafe { self.twin.dispatch_recv(self.channel, &outputs) };
    }

    /// Runs this rank's experts on what it received, wherever the layout leaves it.
    pub fn compute(&self, weighting: Weighting, heap: &Array) {
        let shape = self.twin.shape();
        let config = dense::config(shape.config());
        let placement = Placement::new(config.ranks, config.experts);
        let first = placement.experts_of(config.rank).start;
        let output_bytes = shape.expert_output_bytes() as usize;
        let mut output = vec![0; output_bytes];
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

    /// The token and the scales at a position.
    pub fn token(&self, position: usize, heap: &Array) -> (Vec<u8>, Vec<u8>) {
        let shape = self.twin.shape();
        let (token, scales) = (shape.wire_bytes() as usize, shape.scale_bytes() as usize);
        if shape.config().layout != DeviceLayout::Indexed {
            let received = &self.received;
            let scales = received.scales.bytes(position * scales, scales);
            return (received.tokens.bytes(position * token, token), scales);
        }
        let row = self.received.rows.i32s(4 * position, 1)[0] as u64;
        let rows = shape.at(self.channel, weft_moe::device::DeviceArea::Rows);
        let at = (rows + row * shape.areas().row_stride) as usize;
        let scales_at = at + shape.areas().row_scales_at as usize;
        (heap.bytes(at, token), heap.bytes(scales_at, scales))
    }

    pub fn answer(&self, release: bool) {
        // SAFETY: as in `send`.
        unsafe { self.twin.combine_send(self.channel, self.outputs.address(), release) };
    }

    pub fn combine(&self, release: bool) {
        let (combined, count) = (self.combined.address(), self.count());
        // SAFETY: as in `send`.
        unsafe { self.twin.combine_recv(self.channel, combined, count, self.given, release) };
    }
}

impl Member<'_> {
    /// The experts' outputs in the order of the planner's positions, which in the padded layout are others.
    pub fn outputs_by_plan(&self, plan: &weft_moe::ReceivePlan) -> Vec<u8> {
        let bytes = self.twin.shape().expert_output_bytes() as usize;
        let local = self.twin.shape().local_experts() as usize;
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
}
