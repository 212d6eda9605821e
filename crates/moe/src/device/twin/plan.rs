//! Batch plan: validated ids, and token indexes within experts and ranks.

use super::call::TwinCall;
use crate::device::abi::record::MoeCode;
use crate::device::options::types::IdWidth;
use crate::device::shape::channel_layout::{CHUNK, DeviceArea, PlanWord};
use crate::device::shape::replica_table::turn_at;
use weft_gpu::raw_memory::RawMemory;

/// A slot without an expert.
const NO_EXPERT: i32 = -1;

/// Batch plan.
pub(super) struct BatchPlan {
    /// Physical expert, or [`NO_EXPERT`], by token and top-k slot.
    ids: Vec<i32>,
    /// Number of earlier tokens that name the expert, by token and top-k slot.
    index: Vec<u32>,
    /// Number of earlier tokens in the same chunk that name the expert.
    index_in_chunk: Vec<u32>,
    /// Token counts in earlier chunks, by expert.
    before: Vec<u32>,
    /// Slot, or -1, by token and rank.
    slots: Vec<i32>,
    /// Token counts, by physical expert.
    pub(super) tokens_of_expert: Vec<u32>,
    /// Row counts, by rank.
    pub(super) rows_to_rank: Vec<u32>,
    /// Map generation; 0 without a map.
    pub(super) generation: u32,
    top_k: usize,
    ranks: usize,
}

impl BatchPlan {
    /// Token count in the batch.
    pub(super) fn tokens(&self) -> u32 {
        (self.slots.len() / self.ranks) as u32
    }

    /// Expert for each top-k slot in `token`, and the token's index within the expert.
    pub(super) fn experts(&self, token: u32) -> impl Iterator<Item = Option<(u16, u16)>> + '_ {
        let slots = token as usize * self.top_k..(token as usize + 1) * self.top_k;
        let index = &self.index[slots.clone()];
        self.ids[slots].iter().zip(index).map(|(&id, &index)| {
            // Experts and tokens fit into 16 bits.
            (id != NO_EXPERT).then_some((id as u16, index as u16))
        })
    }

    /// Destination ranks for `token`, and the slot at each.
    pub(super) fn ranks(&self, token: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let ranks = token as usize * self.ranks..(token as usize + 1) * self.ranks;
        let slots = (0..).zip(&self.slots[ranks]);
        slots.filter_map(|(rank, &slot)| Some((rank, u32::try_from(slot).ok()?)))
    }
}

impl TwinCall<'_> {
    /// An earlier round's kept plan for `given` tokens: only ranks and slots.
    pub(super) fn kept_plan(&self, given: u32) -> BatchPlan {
        let config = self.twin.shape.config();
        let (top_k, ranks) = (config.top_k as usize, config.ranks as usize);
        let tokens = self.plan_word(PlanWord::Sent).min(given) as usize;
        let (kept, at) = self.plan_area(DeviceArea::Slots);
        let slot = |place| i32::from_le_bytes(kept.element(at, place));
        BatchPlan {
            generation: 0,
            ids: vec![NO_EXPERT; tokens * top_k],
            index: vec![0; tokens * top_k],
            index_in_chunk: Vec::new(),
            before: Vec::new(),
            slots: (0..(tokens * ranks) as u64).map(slot).collect(),
            tokens_of_expert: Vec::new(),
            rows_to_rank: Vec::new(),
            top_k,
            ranks,
        }
    }

    /// Plans the first `tokens` tokens in the id array, and writes the plan areas.
    pub(super) fn plan(&self, tokens: u32, ids: RawMemory<'_>, layer: u32) -> BatchPlan {
        let shape = &self.twin.shape;
        let config = shape.config();
        let (top_k, ranks) = (config.top_k as usize, config.ranks as usize);
        let (batch, experts) = (tokens as usize, shape.placement().experts() as usize);
        let map = shape.map_at(layer);
        let mut plan = BatchPlan {
            ids: vec![NO_EXPERT; batch * top_k],
            index: vec![0; batch * top_k],
            index_in_chunk: vec![0; batch * top_k],
            before: vec![0; experts],
            slots: vec![-1; batch * ranks],
            tokens_of_expert: vec![0; experts],
            rows_to_rank: vec![0; ranks],
            generation: map.map_or(0, |at| self.generation_of(at)),
            top_k,
            ranks,
        };
        for token in 0..tokens {
            if token.is_multiple_of(CHUNK) {
                plan.before.copy_from_slice(&plan.tokens_of_expert);
                self.write_histogram(token / CHUNK, &plan);
            }
            self.plan_token(token, ids, map, &mut plan);
        }
        self.write_plan(&plan);
        self.set_plan_word(PlanWord::Sent, tokens);
        self.set_plan_word(PlanWord::Key, self.own_key());
        plan
    }

    fn plan_token(&self, token: u32, ids: RawMemory<'_>, map: Option<u64>, plan: &mut BatchPlan) {
        let placement = self.twin.shape.placement();
        let experts = self.twin.shape.config().experts;
        let first = token as usize * plan.top_k;
        let mut named: Vec<i64> = Vec::with_capacity(plan.top_k);
        for slot in 0..plan.top_k {
            let at = first + slot;
            let id = self.id(ids, at as u64);
            if id < 0 {
                continue;
            }
            if named.contains(&id) || id >= experts.into() {
                self.notice(MoeCode::Expert, slot as u32, token, experts.into(), id as u64);
                continue;
            }
            named.push(id);
            let physical = map.map_or(id as u32, |map| self.replica(map, id as u32, token));
            let count = &mut plan.tokens_of_expert[physical as usize];
            (plan.ids[at], plan.index[at]) = (physical as i32, *count);
            plan.index_in_chunk[at] = *count - plan.before[physical as usize];
            *count += 1;
            let rank = placement.owner(physical) as usize;
            let slot = &mut plan.slots[token as usize * plan.ranks + rank];
            if *slot < 0 {
                *slot = plan.rows_to_rank[rank] as i32;
                plan.rows_to_rank[rank] += 1;
            }
        }
    }

    /// Generation of the map at `at`.
    fn generation_of(&self, at: u64) -> u32 {
        u32::from_ne_bytes(self.twin.own().element(at, 0))
    }

    /// Physical expert that the map at `at` gives `token` for `expert`.
    fn replica(&self, at: u64, expert: u32, token: u32) -> u32 {
        let turn = turn_at(expert, self.twin.rank(), token);
        u16::from_ne_bytes(self.twin.own().element(at + turn, 0)).into()
    }

    fn id(&self, ids: RawMemory<'_>, at: u64) -> i64 {
        match self.twin.shape.config().ids {
            IdWidth::I32 => i32::from_le_bytes(ids.element(0, at)).into(),
            IdWidth::I64 => i64::from_le_bytes(ids.element(0, at)),
        }
    }

    /// Writes the earlier chunks' counts, if the plan has areas by chunk.
    fn write_histogram(&self, chunk: u32, plan: &BatchPlan) {
        if self.twin.plans_by_chunk() {
            let row = plan.tokens_of_expert.len() + plan.ranks;
            let at = self.twin.shape.at(self.channel, DeviceArea::Histogram);
            let counts = plan.tokens_of_expert.iter().chain(&plan.rows_to_rank);
            for (place, count) in (u64::from(chunk) * row as u64..).zip(counts) {
                self.twin.own().set_element(at, place, count.to_le_bytes());
            }
        }
    }

    /// Writes the slots, for combine, and the other plan areas that the path has.
    fn write_plan(&self, plan: &BatchPlan) {
        let (shape, heap) = (&self.twin.shape, self.twin.own());
        let (kept, slots) = self.plan_area(DeviceArea::Slots);
        let all = shape.config().max_tokens as usize * plan.ranks;
        // Tokens beyond the batch have no slots, regardless of combine's token count.
        let none = std::iter::repeat_n(&-1, all - plan.slots.len());
        for (place, slot) in (0..).zip(plan.slots.iter().chain(none)) {
            kept.set_element(slots, place, slot.to_le_bytes());
        }
        if self.twin.plans_by_chunk() {
            let ids = shape.at(self.channel, DeviceArea::Ids);
            let index = shape.at(self.channel, DeviceArea::Index);
            for (place, (id, earlier)) in (0..).zip(plan.ids.iter().zip(&plan.index_in_chunk)) {
                heap.set_element(ids, place, id.to_le_bytes());
                heap.set_element(index, place, earlier.to_le_bytes());
            }
        }
    }
}
