//! Rounds of a group and what must come out of them.

use std::thread;
use weft_fabric::random::SplitMix64 as Random;
use weft_moe::device::{DeviceArea, DeviceConfig, DeviceLayout};
use weft_moe::routing::Routing;
use weft_moe::{Config, TokenType, Weighting};

use crate::common::{Batch, batches, busiest, check_output};
use crate::dense::{self, Plans};
use crate::group::{Group, Member};

/// What a round is made of.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Without one, everything goes to the last expert.
    pub routing: Option<Routing>,
    /// Of eight slots, so many name no expert.
    pub masked: u64,
    /// Whether some of those name one that does not exist, or one a second time.
    pub wrong: bool,
    /// Rows behind those that exist.
    pub surplus: u32,
    pub seed: u64,
}

/// The batches of all ranks, as they travel, and what each rank is given.
pub struct World {
    /// As they are given.
    given: Vec<Batch>,
    /// With the ids that count, and tokens as they travel.
    pub batches: Vec<Batch>,
    /// The ids that are given.
    ids: Vec<Vec<i64>>,
    pub plans: Vec<Plans>,
}

impl World {
    pub fn new(config: &DeviceConfig, plot: &Plot) -> World {
        let plain = Config { token_type: config.token_type, ..dense::config(config) };
        let given = batches(&plain, plot.routing, plot.masked, plot.seed);
        let mut random = Random::new(plot.seed ^ 0xD1);
        let ids = given.iter().map(|batch| spoiled(config, batch, plot, &mut random)).collect();
        let mut batches = given.clone();
        if let (true, TokenType::Plain(from), Some(to)) =
            (config.casts(), config.token_type, config.scaled())
        {
            let bytes = config.hidden as usize * from.bytes();
            for batch in &mut batches {
                let (mut codes, mut scales) = (Vec::new(), Vec::new());
                for token in batch.tokens.chunks_exact(bytes) {
                    let cast = dense::cast(from, token, to.scale, to.block);
                    codes.extend(cast.0);
                    scales.extend(cast.1);
                }
                (batch.tokens, batch.scales) = (codes, scales);
            }
        }
        let plans = dense::plan(config, &batches);
        World { given, batches, ids, plans }
    }

    pub fn members<'a>(&self, group: &'a Group, channel: u32, surplus: u32) -> Vec<Member<'a>> {
        let batches = self.given.iter().zip(&self.ids);
        let members = group.twins.iter().zip(batches);
        members
            .map(|(twin, (batch, ids))| Member::new(twin, channel, batch, ids, surplus))
            .collect()
    }

    /// Whether `rank` was given an id that is not used.
    pub fn is_wrong(&self, rank: usize) -> bool {
        self.ids[rank] != self.batches[rank].ids
    }

    /// Positions that `rank` needs, and those of its fullest expert.
    pub fn needs(&self, rank: usize) -> (u32, u32) {
        let counts = self.plans[rank].receive.expert_counts();
        (self.plans[rank].receive.positions() as u32, counts.iter().copied().max().unwrap_or(0))
    }
}

/// Ids with some of the masked ones made wrong, so that the same ones count.
fn spoiled(config: &DeviceConfig, batch: &Batch, plot: &Plot, random: &mut Random) -> Vec<i64> {
    let mut ids = batch.ids.clone();
    if !plot.wrong {
        return ids;
    }
    for ids in ids.chunks_exact_mut(config.top_k as usize) {
        for slot in 0..ids.len() {
            if ids[slot] >= 0 || random.below(2) == 0 {
                continue;
            }
            let earlier = ids[..slot].iter().find(|id| (0..config.experts.into()).contains(*id));
            ids[slot] = match earlier {
                Some(id) if random.below(2) == 0 => *id,
                _ => i64::from(config.experts) + random.below(1 << 20) as i64,
            };
        }
    }
    ids
}

/// One after the other: all send, then all receive. Whoever sends never waits.
pub fn in_turn(members: &[Member<'_>], group: &Group, weighting: Weighting) {
    members.iter().for_each(Member::send);
    members.iter().for_each(Member::receive);
    for (member, heap) in members.iter().zip(&group.heaps) {
        member.compute(weighting, heap);
    }
    members.iter().rev().for_each(|member| member.answer(false));
    members.iter().rev().for_each(|member| member.combine(false));
}

/// Each on a thread of its own.
pub fn at_once(members: &[Member<'_>], group: &Group, weighting: Weighting) {
    thread::scope(|scope| {
        for (member, heap) in members.iter().zip(&group.heaps) {
            scope.spawn(move || alone(member, heap, weighting));
        }
    });
}

pub fn alone(member: &Member<'_>, heap: &crate::group::Array, weighting: Weighting) {
    member.send();
    member.receive();
    member.compute(weighting, heap);
    member.answer(false);
    member.combine(false);
}

/// Compares what was received with the planner: counts, offsets, rows, weights, and tokens bit by bit.
pub fn check_received(members: &[Member<'_>], world: &World, group: &Group) {
    let rows = group.heaps.iter().map(|heap| {
        let ranks = members.len();
        let at = group.shape.at(members[0].channel, DeviceArea::Received) as usize;
        let received = heap.i32s(at, ranks + 1);
        assert_eq!(received[ranks], 0, "there was room");
        received[..ranks].iter().sum::<i32>() as u32
    });
    assert_eq!(rows.max(), Some(busiest(world.plans[0].send.shape(), &world.batches)));
    for (rank, member) in members.iter().enumerate() {
        let shape = member.twin.shape();
        let plan = &world.plans[rank].receive;
        let local = shape.local_experts() as usize;
        let counts = member.received.counts.i32s(0, local);
        let offsets = member.received.offsets.i32s(0, local + 1);
        let mut totals: Vec<i32> = plan.expert_counts().iter().map(|count| *count as i32).collect();
        totals.resize(local, 0);
        assert_eq!(counts, totals, "counts of rank {rank}");
        let capacity = shape.expert_capacity() as i32;
        let mut expected: Vec<i32> = match shape.config().layout {
            DeviceLayout::Padded { .. } => (0..=local as i32).map(|at| at * capacity).collect(),
            _ => plan.expert_offsets().iter().map(|offset| *offset as i32).collect(),
        };
        expected.resize(local + 1, plan.positions() as i32);
        assert_eq!(offsets, expected, "offsets of rank {rank}");

        let end = offsets[local] as usize;
        assert!(end <= shape.positions() as usize);
        let rows = member.received.rows.i32s(0, end);
        let weights = member.received.weights.bytes(0, 4 * end);
        let (token_bytes, scale_bytes) =
            (shape.wire_bytes() as usize, shape.scale_bytes() as usize);
        for group_number in 0..local {
            let begin = offsets[group_number] as usize;
            let tokens = counts[group_number] as usize;
            for at in 0..tokens {
                let position = begin + at;
                let planned = plan.expert_offsets()[group_number] as usize + at;
                assert_eq!(rows[position], dense::device_row(plan, plan.slots()[planned]));
                let weight = plan.weights()[planned].to_le_bytes();
                assert_eq!(weights[4 * position..][..4], weight);
                let (source, slot) = (
                    rows[position] as u32 / shape.config().max_tokens,
                    rows[position] as u32 % shape.config().max_tokens,
                );
                let sent = &world.plans[source as usize].send;
                let row = sent.rows_for(rank as u32).start + slot as usize;
                let batch = &world.batches[source as usize];
                let token = sent.token_of(row);
                let (elements, scales) = member.token(position, &group.heaps[rank]);
                assert!(elements == batch.tokens[token * token_bytes..][..token_bytes]);
                assert!(scales == batch.scales[token * scale_bytes..][..scale_bytes]);
            }
            for position in begin + tokens..offsets[group_number + 1] as usize {
                assert_eq!(rows[position], -1, "padding has no row");
                assert_eq!(weights[4 * position..][..4], [0; 4], "padding weighs nothing");
            }
        }
    }
}

/// Compares the result with weft-moe's sums bit by bit, and with the documented order and the dense bound.
pub fn check_combined(members: &[Member<'_>], world: &mut World, weighting: Weighting) {
    let outputs: Vec<Vec<u8>> = members
        .iter()
        .zip(&world.plans)
        .map(|(member, plans)| member.outputs_by_plan(&plans.receive))
        .collect();
    let expected = dense::combined(&mut world.plans, weighting, &outputs);
    for (rank, (member, expected)) in members.iter().zip(&expected).enumerate() {
        let combined = member.combined.bytes(0, expected.len());
        assert!(combined == *expected, "result of rank {rank}");
        check_output(world.plans[rank].send.shape(), &world.batches[rank], weighting, &combined);
        let bytes = member.twin.shape().output_bytes() as usize;
        let surplus = member.given as usize * bytes - expected.len();
        let rest = member.combined.bytes(expected.len(), surplus);
        assert!(rest.iter().all(|byte| *byte == 0xAA), "tokens that do not exist have no result");
    }
}

/// A whole round, checked at each step.
pub fn run(
    group: &Group,
    channel: u32,
    plot: &Plot,
    run: impl Fn(&[Member<'_>], &Group, Weighting),
) {
    let config = group.shape.config();
    let weighting = config.weighting;
    let mut world = World::new(config, plot);
    let members = world.members(group, channel, plot.surplus);
    run(&members, group, weighting);
    for (rank, twin) in group.twins.iter().enumerate() {
        assert_eq!(twin.fatal(), None);
        let notice = twin.take_notice();
        assert_eq!(notice.is_some(), world.is_wrong(rank), "{notice:?}");
        if let Some(notice) = notice {
            assert_eq!((notice.code, notice.rank), (5, rank as u32));
            let at = notice.slot as usize * config.top_k as usize + notice.peer as usize;
            assert_eq!(world.ids[rank][at], notice.seen as i64);
            assert_ne!(world.batches[rank].ids[at], notice.seen as i64);
        }
    }
    check_received(&members, &world, group);
    check_combined(&members, &mut world, weighting);
}
