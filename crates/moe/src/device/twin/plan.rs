//! The plan of a batch: which ids count, and each token's number among those of its experts and ranks.

use super::call::Call;
use super::region::Region;
use crate::device::areas::{CHUNK, DeviceArea};
use crate::device::config::IdWidth;
use crate::device::record::Code;

/// Marks a slot that names no expert.
const NOBODY: i32 = -1;

/// A batch's plan.
pub(super) struct Plan {
    /// By token and top-k slot: the expert, or [`NOBODY`].
    ids: Vec<i32>,
    /// By token and top-k slot: how many earlier tokens name the expert.
    index: Vec<u32>,
    /// The same, of the same chunk of tokens.
    index_in_chunk: Vec<u32>,
    /// By expert: tokens of earlier chunks.
    before: Vec<u32>,
    /// By token and rank: the slot, or -1.
    slots: Vec<i32>,
    /// By expert of the group.
    pub(super) tokens_of_expert: Vec<u32>,
    /// By rank.
    pub(super) rows_to_rank: Vec<u32>,
    top_k: usize,
    ranks: usize,
}

impl Plan {
    /// The expert of each top-k slot of `token`, and the token's number among the expert's.
    pub(super) fn experts(&self, token: u32) -> impl Iterator<Item = Option<(u16, u16)>> + '_ {
        let slots = token as usize * self.top_k..(token as usize + 1) * self.top_k;
        let index = &self.index[slots.clone()];
        self.ids[slots].iter().zip(index).map(|(&id, &index)| {
            // The shape has no more experts and tokens than 16 bits count.
            (id != NOBODY).then_some((id as u16, index as u16))
        })
    }

    /// The ranks that `token` goes to, and its slot at each.
    pub(super) fn ranks(&self, token: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let ranks = token as usize * self.ranks..(token as usize + 1) * self.ranks;
        let slots = (0..).zip(&self.slots[ranks]);
        slots.filter_map(|(rank, &slot)| Some((rank, u32::try_from(slot).ok()?)))
    }
}

impl Call<'_> {
    /// Plans the first `tokens` tokens of the array of ids, and writes the areas that the plan has.
    pub(super) fn plan(&self, tokens: u32, ids: Region<'_>) -> Plan {
        let shape = &self.twin.shape;
        let config = shape.config();
        let (top_k, ranks) = (config.top_k as usize, config.ranks as usize);
        let (batch, experts) = (tokens as usize, config.experts as usize);
        let mut plan = Plan {
            ids: vec![NOBODY; batch * top_k],
            index: vec![0; batch * top_k],
            index_in_chunk: vec![0; batch * top_k],
            before: vec![0; experts],
            slots: vec![-1; batch * ranks],
            tokens_of_expert: vec![0; experts],
            rows_to_rank: vec![0; ranks],
            top_k,
            ranks,
        };
        for token in 0..tokens {
            if token.is_multiple_of(CHUNK) {
                plan.before.copy_from_slice(&plan.tokens_of_expert);
                self.write_histogram(token / CHUNK, &plan);
            }
            self.plan_token(token, ids, &mut plan);
        }
        self.write_plan(&plan);
        plan
    }

    fn plan_token(&self, token: u32, ids: Region<'_>, plan: &mut Plan) {
        let placement = self.twin.shape.placement();
        let experts = placement.experts();
        let first = token as usize * plan.top_k;
        for slot in 0..plan.top_k {
            let at = first + slot;
            let id = self.id(ids, at as u64);
            if id < 0 {
                continue;
            }
            let twice = plan.ids[first..at].iter().any(|earlier| i64::from(*earlier) == id);
            if twice || id >= experts.into() {
                self.notice(Code::Expert, slot as u32, token, experts.into(), id as u64);
                continue;
            }
            let count = &mut plan.tokens_of_expert[id as usize];
            (plan.ids[at], plan.index[at]) = (id as i32, *count);
            plan.index_in_chunk[at] = *count - plan.before[id as usize];
            *count += 1;
            let rank = placement.owner(id as u32) as usize;
            let slot = &mut plan.slots[token as usize * plan.ranks + rank];
            if *slot < 0 {
                *slot = plan.rows_to_rank[rank] as i32;
                plan.rows_to_rank[rank] += 1;
            }
        }
    }

    fn id(&self, ids: Region<'_>, at: u64) -> i64 {
        match self.twin.shape.config().ids {
            IdWidth::I32 => i32::from_le_bytes(ids.element(0, at)).into(),
            IdWidth::I64 => i64::from_le_bytes(ids.element(0, at)),
        }
    }

    /// What earlier chunks hold, where the plan is kept.
    fn write_histogram(&self, chunk: u32, plan: &Plan) {
        if self.twin.plans_by_chunk() {
            let row = plan.tokens_of_expert.len() + plan.ranks;
            let at = self.twin.shape.at(self.channel, DeviceArea::Histogram);
            let counts = plan.tokens_of_expert.iter().chain(&plan.rows_to_rank);
            for (place, count) in (u64::from(chunk) * row as u64..).zip(counts) {
                self.twin.own().set_element(at, place, count.to_le_bytes());
            }
        }
    }

    /// Slots are always kept, for combine; the rest where there are areas for it.
    fn write_plan(&self, plan: &Plan) {
        let (shape, heap) = (&self.twin.shape, self.twin.own());
        let slots = shape.at(self.channel, DeviceArea::Slots);
        let all = shape.config().max_tokens as usize * plan.ranks;
        // A token that does not exist goes nowhere, whatever combine is told of their number.
        let none = std::iter::repeat_n(&-1, all - plan.slots.len());
        for (place, slot) in (0..).zip(plan.slots.iter().chain(none)) {
            heap.set_element(slots, place, slot.to_le_bytes());
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
