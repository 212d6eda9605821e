//! Group rounds and the expected results.

use std::thread;
use weft_fabric::random::SplitMix64 as Random;
use weft_moe::device::{DeviceArea, DeviceConfig, DeviceLayout, IdWidth, MoeCode};
use weft_moe::routing::Routing;
use weft_moe::{Config, ExpertMap, TokenType, Weighting};

use crate::common::{Batch, batches, busiest, check_output};
use crate::dense::{self, Plans};
use crate::group::{Group, Member};

/// Round parameters.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Without one, everything goes to the last expert.
    pub routing: Option<Routing>,
    /// Number of empty slots in eight.
    pub masked: u64,
    /// True if some name an expert that does not exist, or repeat one.
    pub wrong: bool,
    /// Rows behind those that exist.
    pub surplus: u32,
    pub seed: u64,
}

/// All ranks' batches, as they travel, and what each rank is given.
pub struct World {
    /// As they are given.
    given: Vec<Batch>,
    /// The layer whose replicas tokens go to.
    layer: u32,
    /// With the physical experts that count, and tokens as they travel.
    pub batches: Vec<Batch>,
    /// The ids that are given.
    ids: Vec<Vec<i64>>,
    pub plans: Vec<Plans>,
}

impl World {
    pub fn new(config: &DeviceConfig, plot: &Plot) -> World {
        let plain = Config {
            token_type: config.token_type,
            experts: config.experts,
            placement: None,
            ..dense::config(config)
        };
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
        let layer = plot.seed.checked_rem(config.maps.len() as u64).unwrap_or(0) as u32;
        if let Some(map) = config.maps.get(layer as usize) {
            for (rank, batch) in (0..).zip(&mut batches) {
                place(map, rank, config.top_k, &mut batch.ids);
            }
        }
        let plans = dense::plan(config, &batches);
        World { given, batches, ids, layer, plans }
    }

    /// Other tokens by the same ids and weights.
    pub fn with_other_tokens(mut self, config: &DeviceConfig) -> World {
        for batch in self.given.iter_mut().chain(&mut self.batches) {
            let tokens = batch.ids.len() / config.top_k as usize;
            for rows in [&mut batch.tokens, &mut batch.scales] {
                let bytes = rows.len() / tokens.max(1);
                if bytes > 0 {
                    *rows = rows.chunks_exact(bytes).rev().flatten().copied().collect();
                }
            }
        }
        self.plans = dense::plan(config, &self.batches);
        self
    }

    pub fn members<'a>(&self, group: &'a Group, channel: u32, surplus: u32) -> Vec<Member<'a>> {
        let batches = self.given.iter().zip(&self.ids);
        let members = group.twins.iter().zip(batches);
        members
            .map(|(twin, (batch, ids))| {
                let mut member = Member::new(twin, channel, batch, ids, surplus);
                member.layer = self.layer;
                member
            })
            .collect()
    }

    /// True if `rank` has an invalid id.
    pub fn is_wrong(&self, rank: usize) -> bool {
        self.ids[rank] != self.given[rank].ids
    }

    /// Rows that go to `rank`.
    pub fn rows(&self, rank: u32) -> u32 {
        self.plans.iter().map(|plans| plans.send.rows_for(rank).len() as u32).sum()
    }

    /// Positions that `rank` needs, and that its fullest expert needs.
    pub fn needs(&self, rank: usize) -> (u32, u32) {
        let counts = self.plans[rank].receive.expert_counts();
        (self.plans[rank].receive.positions() as u32, counts.iter().copied().max().unwrap_or(0))
    }
}

/// The replicas that `rank` sends tokens to, in place of the experts that they name: in turn, by token number and
/// rank.
fn place(map: &ExpertMap, rank: usize, top_k: u32, ids: &mut [i64]) {
    for (token, ids) in ids.chunks_exact_mut(top_k as usize).enumerate() {
        for id in ids.iter_mut().filter(|id| **id >= 0) {
            let held = map.logical().iter().enumerate();
            let replicas: Vec<usize> = held
                .filter(|(_, logical)| i64::from(**logical) == *id)
                .map(|held| held.0)
                .collect();
            *id = replicas[(token + rank) % 64 % replicas.len()] as i64;
        }
    }
}

/// Ids with some masked ones made wrong, so that the same ones count.
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

/// Sequentially: all send, then all receive. Send halves never wait.
pub fn in_turn(members: &[Member<'_>], group: &Group, weighting: Weighting) {
    members.iter().for_each(Member::send);
    members.iter().for_each(Member::receive);
    for (member, heap) in members.iter().zip(&group.heaps) {
        member.compute(weighting, heap);
    }
    members.iter().rev().for_each(|member| member.reply(false));
    members.iter().rev().for_each(|member| member.combine(false));
}

/// Each on a separate thread.
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
    member.reply(false);
    member.combine(false);
}

/// Compares what was received with the planner: counts, offsets, rows, weights, and tokens bit by bit.
pub fn check_received(members: &[Member<'_>], world: &World, group: &Group) {
    let rows = group.heaps.iter().zip(members).map(|(heap, member)| {
        let ranks = members.len();
        let received = member.plan_numbers(heap, DeviceArea::Received, ranks + 1);
        assert_eq!(received[ranks], 0, "there was room");
        received[..ranks].iter().sum::<i32>() as u32
    });
    assert_eq!(rows.max(), Some(busiest(world.plans[0].send.shape(), &world.batches)));
    for (rank, member) in members.iter().enumerate() {
        if member.is_dense() {
            check_dense(rank, member, world, &group.heaps[rank]);
            continue;
        }
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
            DeviceLayout::Padded { .. } => {
                let own = plan.expert_counts().len() as i32;
                (0..=local as i32).map(|at| at.min(own) * capacity).collect()
            }
            _ => plan.expert_offsets().iter().map(|offset| *offset as i32).collect(),
        };
        expected.resize(local + 1, plan.positions() as i32);
        assert_eq!(offsets, expected, "offsets of rank {rank}");

        check_load(member, &totals);

        let end = offsets[local] as usize;
        assert!(end <= shape.positions() as usize);
        let rows = member.received.rows.i32s(0, end);
        let weights = member.received.weights.bytes(0, 4 * end);
        let room = member.positions.unwrap_or(shape.positions()) as usize;
        let experts = member.received.experts.i32s(0, room);
        assert!(experts[end..].iter().all(|expert| *expert == -1), "no group is there");
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
                assert_eq!(experts[position], group_number as i32);
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
                assert_eq!(experts[position], -1, "padding has no expert");
                assert_eq!(weights[4 * position..][..4], [0; 4], "padding has weight 0");
            }
        }
    }
}

/// Each of a rank's experts has as many more tokens as it got, and no other expert has.
fn check_load(member: &Member<'_>, totals: &[i32]) {
    let shape = member.twin.shape();
    let (bytes, load) = (member.load_bytes() as usize, member.received.load.whole());
    let own = shape.placement().experts_of(shape.config().rank);
    for (expert, load) in (0..shape.placement().experts()).zip(load.chunks_exact(bytes)) {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(load);
        let before = if bytes == 8 { 0x1111_1111_1111_1111 } else { 0x1111_1111 };
        let got = own.contains(&expert).then(|| totals[(expert - own.start) as usize] as u64);
        assert_eq!(u64::from_le_bytes(wide) - before, got.unwrap_or(0), "expert {expert}");
    }
}

/// Compares a rank's dense rows with the batches: where each source's begin, tokens and scales bit by bit, and for
/// each choice the local expert and the weight.
fn check_dense(rank: usize, member: &Member<'_>, world: &World, heap: &crate::group::Array) {
    let shape = member.twin.shape();
    let config = shape.config();
    let (top_k, positions) = (config.top_k as usize, shape.positions() as usize);
    let experts = shape.placement().experts_of(rank as u32);
    let (token_bytes, scale_bytes) = (shape.wire_bytes() as usize, shape.scale_bytes() as usize);
    let (mut offsets, mut ids, mut weights) = (vec![0], Vec::new(), Vec::new());
    let mut counts = vec![0; shape.local_experts() as usize];
    for (plans, batch) in world.plans.iter().zip(&world.batches) {
        for row in plans.send.rows_for(rank as u32) {
            let token = plans.send.token_of(row);
            let (elements, scales) = member.token(ids.len() / top_k, heap);
            assert!(elements == batch.tokens[token * token_bytes..][..token_bytes]);
            assert!(scales == batch.scales[token * scale_bytes..][..scale_bytes]);
            for choice in token * top_k..(token + 1) * top_k {
                let id = batch.ids[choice];
                let local = id - i64::from(experts.start);
                let here = (i64::from(experts.start)..i64::from(experts.end)).contains(&id);
                let weight = batch.weights.as_ref().map_or(1.0, |weights| weights[choice]);
                ids.push(if here { local } else { -1 });
                weights.push(if here { weight.to_bits() as i32 } else { 0 });
                if here {
                    counts[local as usize] += 1;
                }
            }
        }
        offsets.push((ids.len() / top_k) as i32);
    }
    ids.resize(positions * top_k, -1);
    weights.resize(positions * top_k, 0);
    assert_eq!(member.received.offsets.i32s(0, offsets.len()), offsets, "offsets of rank {rank}");
    assert_eq!(member.received.counts.i32s(0, counts.len()), counts, "counts of rank {rank}");
    assert_eq!(member.received.weights.i32s(0, weights.len()), weights, "weights of rank {rank}");
    let bytes = member.received.rows.bytes(0, ids.len() * config.ids.bytes());
    let seen: Vec<i64> = match config.ids {
        IdWidth::I32 => {
            bytes.as_chunks().0.iter().map(|id| i32::from_le_bytes(*id).into()).collect()
        }
        IdWidth::I64 => bytes.as_chunks().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
    };
    assert_eq!(seen, ids, "ids of rank {rank}");
    check_load(member, &counts);
    let experts = member.received.experts.i32s(0, positions);
    assert!(experts.iter().all(|expert| *expert == -1), "a row has several experts");
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
        if !member.is_dense() {
            check_output(
                world.plans[rank].send.shape(),
                &world.batches[rank],
                weighting,
                &combined,
            );
        }
        let bytes = member.twin.shape().output_bytes() as usize;
        let surplus = member.given as usize * bytes - expected.len();
        let rest = member.combined.bytes(expected.len(), surplus);
        // A plan that was kept has no count: combine is asked for all.
        let untouched = if member.kept { 0 } else { 0xAA };
        assert!(
            rest.iter().all(|byte| *byte == untouched),
            "tokens that do not exist have no result"
        );
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
            assert_eq!((notice.code, notice.rank), (MoeCode::Expert.into(), rank as u32));
            let at = notice.slot as usize * config.top_k as usize + notice.peer.unwrap() as usize;
            assert_eq!(world.ids[rank][at], notice.seen as i64);
            assert_ne!(world.batches[rank].ids[at], notice.seen as i64);
        }
    }
    check_received(&members, &world, group);
    check_combined(&members, &mut world, weighting);
}
