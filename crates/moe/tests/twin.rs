//! The kernels' twin against weft-moe's planner and reference: the same positions, rows and bits, over any
//! shape, whichever rank is fast.

mod common;
#[path = "twin/dense.rs"]
mod dense;
#[path = "twin/failures.rs"]
mod failures;
#[path = "twin/group.rs"]
mod group;
#[path = "twin/rounds.rs"]
mod rounds;

use group::{Group, Member};
use proptest::prelude::*;
use rounds::{Plot, World, at_once, check_combined, check_received, in_turn, run};
use std::thread;
use weft_fabric::random::SplitMix64 as Random;
use weft_moe::device::{
    DeviceArea, DeviceConfig, DeviceLayout, IdWidth, ScaleLayout, TransferPath,
};
use weft_moe::routing::Routing;
use weft_moe::{BlockScaled, DType, ExpertMap, Float8, ScaleType, TokenType, Weighting};

/// Miri is slow.
const MOST_RANKS: u32 = if cfg!(miri) { 3 } else { 9 };
const MOST_TOKENS: u32 = if cfg!(miri) { 3 } else { 140 };
const MOST_ROUNDS: usize = if cfg!(miri) { 3 } else { 8 };

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL)
}

fn plots() -> impl Strategy<Value = Plot> {
    let routing = prop::sample::select(&[
        Some(Routing::Uniform),
        Some(Routing::Zipf { exponent: 1.2 }),
        Some(Routing::Incast),
        None,
    ]);
    (routing, 0u64..9, any::<bool>(), 0u32..4, any::<u64>()).prop_map(
        |(routing, masked, wrong, surplus, seed)| Plot { routing, masked, wrong, surplus, seed },
    )
}

/// Tokens as they are given and as they travel.
fn token_types() -> impl Strategy<Value = (TokenType, TokenType)> {
    let plain = dtypes().prop_map(|dtype| (dtype.into(), dtype.into()));
    let as_given = (1u32..50).prop_flat_map(|block| {
        prop::sample::select(common::token_types(block)).prop_map(|token| (token, token))
    });
    let scales = prop::sample::select(&ScaleType::ALL);
    let cast = (dtypes(), scales, prop::sample::select(&[32u32, 64, 128, 256])).prop_map(
        |(dtype, scale, block)| {
            let format = Float8::E4M3;
            (dtype.into(), TokenType::Scaled(BlockScaled { format, scale, block }))
        },
    );
    prop_oneof![plain, as_given, cast]
}

/// Maps for some layers: every expert somewhere, and some more replicas, on ranks that own different numbers.
fn maps(ranks: u32, experts: u32) -> impl Strategy<Value = Vec<ExpertMap>> {
    let held = prop::collection::vec((0..ranks, 0..experts), 0..2 * ranks as usize);
    (prop::collection::vec(0..ranks, experts as usize), held, 0usize..4, any::<u64>()).prop_map(
        move |(first, more, layers, seed)| {
            let every = first.into_iter().zip(0..experts);
            let held: Vec<(u32, u32)> = every.chain(more).collect();
            let (places, mut logical): (Vec<u32>, Vec<u32>) = held.into_iter().unzip();
            let mut random = Random::new(seed);
            let mut layer = || {
                let mut ranks = vec![Vec::new(); ranks as usize];
                for (rank, expert) in places.iter().zip(&logical) {
                    ranks[*rank as usize].push(*expert);
                }
                (1..logical.len()).rev().for_each(|at| {
                    logical.swap(at, random.below(at as u64 + 1) as usize);
                });
                ExpertMap::new(experts, &ranks).unwrap()
            };
            (0..layers).map(|_| layer()).collect()
        },
    )
}

prop_compose! {
    fn configs()(config in plain_configs())(
        maps in maps(config.ranks, config.experts),
        config in Just(config),
    ) -> DeviceConfig {
        DeviceConfig { maps: maps.into(), ..config }
    }
}

prop_compose! {
    fn plain_configs()(
        (ranks, experts, top_k) in (1u32..10, 1u32..20, 1u32..7),
        (hidden, max_tokens) in (
            prop_oneof![4 => 1u32..5, 1 => 16u32..20],
            prop_oneof![6 => 1u32..14, 1 => 60u32..140],
        ),
        (token_type, wire) in token_types(),
        (combine_dtype, reply_dtype, output_dtype) in (dtypes(), dtypes(), dtypes()),
        ids in prop::sample::select(&[IdWidth::I32, IdWidth::I64]),
        layout in prop_oneof![
            Just(DeviceLayout::Indexed),
            (1u32..9).prop_map(|pad_to| DeviceLayout::Contiguous { pad_to }),
            Just(DeviceLayout::Padded { expert_capacity: None }),
            Just(DeviceLayout::Dense),
        ],
        weighting in prop::sample::select(&[Weighting::AtCombine, Weighting::AtExpert]),
        scale_layout in prop::sample::select(&ScaleLayout::ALL),
        path in prop::option::of(prop::sample::select(&TransferPath::ALL)),
    ) -> DeviceConfig {
        let packets = path == Some(TransferPath::Packets) && layout == DeviceLayout::Indexed;
        let scale_layout = match (wire, scale_layout) {
            _ if layout == DeviceLayout::Indexed => ScaleLayout::Row,
            (TokenType::Plain(_), _) => ScaleLayout::Row,
            (TokenType::Scaled(scaled), ScaleLayout::ColumnPacked)
                if scaled.scale == ScaleType::F32 => ScaleLayout::Column,
            (_, scale_layout) => scale_layout,
        };
        let dense = layout == DeviceLayout::Dense;
        let weighting = if dense { Weighting::AtExpert } else { weighting };
        DeviceConfig {
            token_type, wire, combine_dtype, reply_dtype, output_dtype, ids, layout, weighting,
            scale_layout,
            path: path.filter(|_| !packets),
            ..DeviceConfig::new(ranks.min(MOST_RANKS), 0, experts, top_k)
                .sized(max_tokens.min(MOST_TOKENS), hidden.min(MOST_TOKENS) * 16)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    #[test]
    fn dispatch_and_combine_equal_the_planner_and_the_reference(
        config in configs(),
        plots in prop::collection::vec(plots(), 1..4),
        epoch in prop_oneof![Just(0), (0u32..4).prop_map(|less| u32::MAX - less)],
    ) {
        let group = Group::new(&config);
        group.twins.iter().for_each(|twin| twin.set_epoch(0, epoch));
        for plot in &plots {
            run(&group, 0, plot, in_turn);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 60 }))]

    #[test]
    fn whichever_rank_is_fast_the_result_is_the_same(
        config in configs(),
        plots in prop::collection::vec(prop::collection::vec(plots(), 1..MOST_ROUNDS), 2),
        seed in 1u64..u64::MAX,
        epoch in prop_oneof![Just(0), (0u32..4).prop_map(|less| u32::MAX - less)],
    ) {
        let config = DeviceConfig { max_tokens: config.max_tokens.min(20), ..config };
        let right = |plot: &Plot| Plot { wrong: false, ..plot.clone() };
        let plots: Vec<Vec<Plot>> =
            plots.iter().map(|plots| plots.iter().map(right).collect()).collect();
        let group = Group::new(&config);
        for (rank, twin) in (0..).zip(&group.twins) {
            (0..2).for_each(|channel| twin.set_epoch(channel, epoch));
            twin.set_jitter(seed.wrapping_add(rank).max(1));
        }
        thread::scope(|scope| {
            for (channel, plots) in (0..).zip(&plots) {
                let group = &group;
                scope.spawn(move || {
                    for plot in plots {
                        run(group, channel, plot, at_once);
                    }
                });
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 500 }))]

    #[test]
    fn a_plan_that_was_kept_takes_other_tokens_to_the_same_places(
        config in configs(),
        plot in plots(),
        between in prop::collection::vec((0u32..2, plots()), 0..3),
        channels in prop::collection::vec(0u32..2, 1..3),
        epoch in prop_oneof![Just(0), (0u32..4).prop_map(|less| u32::MAX - less)],
        threads in any::<bool>(),
    ) {
        prop_assume!(config.layout != DeviceLayout::Dense);
        let group = Group::new(&config);
        (0..2).for_each(|channel| group.twins.iter().for_each(|twin| twin.set_epoch(channel, epoch)));
        let mut world = World::new(&config, &plot);
        let members = world.members(&group, 0, plot.surplus);
        let first: Vec<Member<'_>> = members.into_iter().map(Member::keeping).collect();
        in_turn(&first, &group, config.weighting);
        group.twins.iter().for_each(|twin| {
            twin.take_notice();
        });
        check_received(&first, &world, &group);
        check_combined(&first, &mut world, config.weighting);
        for (channel, plot) in &between {
            run(&group, *channel, plot, in_turn);
        }
        let mut world = world.with_other_tokens(&config);
        for channel in channels {
            let members = world.members(&group, channel, plot.surplus);
            let again = members.into_iter().zip(&first).map(|(member, first)| member.by_plan_of(first));
            let again: Vec<Member<'_>> = again.collect();
            if threads {
                at_once(&again, &group, config.weighting);
            } else {
                in_turn(&again, &group, config.weighting);
            }
            group.assert_quiet();
            check_received(&again, &world, &group);
            check_combined(&again, &mut world, config.weighting);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 500 }))]

    #[test]
    fn counts_are_known_before_there_are_arrays_which_fit_then(
        config in configs(),
        plots in prop::collection::vec(plots(), 1..3),
        keep in any::<bool>(),
    ) {
        prop_assume!(config.layout != DeviceLayout::Dense);
        let group = Group::new(&config);
        for plot in &plots {
            let mut world = World::new(&config, plot);
            prop_assert_eq!(group.twins[0].counts(1), None, "no tokens are in flight");
            let members = world.members(&group, 0, plot.surplus).into_iter();
            let members = members.map(|member| if keep { member.keeping() } else { member });
            let mut members: Vec<Member<'_>> = members.collect();
            members.iter().for_each(Member::send);
            for (rank, member) in members.iter_mut().enumerate() {
                let counts = member.twin.counts(member.at()).unwrap();
                let plan = &world.plans[rank].receive;
                let experts = plan.expert_counts().to_vec();
                prop_assert_eq!((&counts.experts, counts.needed), (&experts, 0));
                prop_assert_eq!(counts.offsets.len(), experts.len() + 1);
                member.fit(*counts.offsets.last().unwrap());
            }
            members.iter().for_each(Member::receive);
            for (member, heap) in members.iter().zip(&group.heaps) {
                member.compute(config.weighting, heap);
            }
            members.iter().for_each(|member| member.reply(false));
            members.iter().for_each(|member| member.combine(false));
            for twin in &group.twins {
                prop_assert_eq!(twin.fatal(), None);
                twin.take_notice();
            }
            check_received(&members, &world, &group);
            check_combined(&members, &mut world, config.weighting);
        }
    }
}

/// Plan areas: index within the chunk, earlier chunks' counts, and masked ids.
#[test]
fn the_bandwidth_path_keeps_its_plan() {
    let config = DeviceConfig::new(3, 0, 7, 2).sized(150, 16);
    let config = DeviceConfig { path: Some(TransferPath::Bandwidth), ..config };
    let group = Group::new(&config);
    let routing = Some(Routing::Zipf { exponent: 1.0 });
    for seed in 0..if cfg!(miri) { 1 } else { 20 } {
        let plot = Plot { routing, masked: 2, wrong: true, surplus: 0, seed };
        let world = World::new(&config, &plot);
        in_turn(&world.members(&group, 0, 0), &group, config.weighting);
        for (rank, (heap, batch)) in group.heaps.iter().zip(&world.batches).enumerate() {
            let at = |area| group.shape.at(0, area) as usize;
            let ids: Vec<i32> = batch.ids.iter().map(|id| (*id).max(-1) as i32).collect();
            assert_eq!(heap.i32s(at(DeviceArea::Ids), ids.len()), ids);
            let index = heap.i32s(at(DeviceArea::Index), ids.len());
            for (place, (id, index)) in ids.iter().zip(index).enumerate() {
                let chunk = place / 128 * 128;
                let earlier = ids[chunk..place].iter().filter(|other| *other == id).count();
                assert_eq!(index, if *id < 0 { 0 } else { earlier as i32 });
            }
            let placement = group.shape.placement();
            let goes = |ids: &[i32], rank: u32| {
                ids.iter().any(|id| *id >= 0 && placement.owner(*id as u32) == rank)
            };
            for chunk in 0..ids.len().div_ceil(128) {
                let before = &ids[..chunk * 128];
                let of_experts = (0..7).map(|e| before.iter().filter(|id| **id == e).count());
                let to_ranks = (0..3).map(|r| before.chunks(2).filter(|t| goes(t, r)).count());
                let expected: Vec<i32> = of_experts.chain(to_ranks).map(|n| n as i32).collect();
                let row = at(DeviceArea::Histogram) + chunk * 4 * 10;
                assert_eq!(heap.i32s(row, 10), expected, "rank {rank}");
            }
            let slots = heap.i32s(at(DeviceArea::Slots), 150 * 3);
            let mut next = [0; 3];
            for (token, slots) in slots.chunks(3).enumerate() {
                let ids = ids.get(2 * token..2 * token + 2).unwrap_or_default();
                for (rank, next) in (0..).zip(&mut next) {
                    let expected = if goes(ids, rank) { *next } else { -1 };
                    *next += i32::from(goes(ids, rank));
                    assert_eq!(slots[rank as usize], expected);
                }
            }
        }
        let noticed = group.twins.iter().filter(|twin| twin.take_notice().is_some()).count();
        assert_eq!(noticed, (0..3).filter(|rank| world.is_wrong(*rank)).count());
    }
}

/// Elements in a type that differ from row to row.
fn rows_of(dtype: DType, elements: usize, seed: usize) -> Vec<u8> {
    let value = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 7.0 - 6.0;
    let mut bytes = vec![0; elements * dtype.bytes()];
    dtype.store(&(0..elements).map(value).collect::<Vec<f32>>(), &mut bytes);
    bytes
}

#[test]
fn what_is_added_comes_after_the_sums_and_before_the_rounding() {
    let routing = Some(Routing::Uniform);
    let plot = Plot { routing, masked: 3, wrong: false, surplus: 2, seed: 5 };
    for path in [None, Some(TransferPath::Latency), Some(TransferPath::Bandwidth)] {
        for (turn, output_dtype) in (1..).zip(DType::ALL) {
            let config = DeviceConfig { path, ..DeviceConfig::new(3, 0, 7, 2).sized(9, 32) };
            // With float32, sums are not rounded.
            let exact = DeviceConfig { output_dtype: DType::F32, ..config.clone() };
            let (group, world) = (Group::new(&exact), World::new(&exact, &plot));
            let plain = world.members(&group, 0, plot.surplus);
            in_turn(&plain, &group, config.weighting);

            let config = DeviceConfig { output_dtype, ..config };
            let (group, world) = (Group::new(&config), World::new(&config, &plot));
            let mut members = world.members(&group, 0, plot.surplus);
            let mut held = Vec::new();
            for member in &mut members {
                let elements = member.given as usize * 32;
                let rows = |seed| group::Array::of(&rows_of(output_dtype, elements, seed));
                member.added = [(turn & 1 != 0).then(|| rows(1)), (turn & 2 != 0).then(|| rows(2))];
                member.accumulates = turn != 3;
                member.combined = rows(3);
                held.push(member.combined.whole());
            }
            in_turn(&members, &group, config.weighting);
            group.assert_quiet();
            for (rank, (member, plain)) in members.iter().zip(&plain).enumerate() {
                let elements = world.batches[rank].ids.len() / 2 * 32;
                let mut sums = vec![0f32; elements];
                DType::F32.load(&plain.combined.bytes(0, 4 * elements), &mut sums);
                let bytes = elements * output_dtype.bytes();
                let mut given: Vec<Vec<u8>> =
                    member.added.iter().flatten().map(group::Array::whole).collect();
                given.extend(member.accumulates.then(|| held[rank].clone()));
                for rows in &given {
                    output_dtype.accumulate(&mut sums, &rows[..bytes], 1.0);
                }
                let mut expected = vec![0; bytes];
                output_dtype.store(&sums, &mut expected);
                assert!(given.len() == 2, "{turn}");
                assert_eq!(member.combined.bytes(0, bytes), expected, "rank {rank}");
                // Tokens that do not exist have no result.
                let rest = member.combined.whole().split_off(bytes);
                assert_eq!(rest, held[rank][bytes..]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]

    /// For any token bits, codes and scales follow the stated arithmetic.
    #[test]
    fn any_bits_are_cast_as_stated(
        words in prop::collection::vec(any::<u32>(), 272),
        (shift, coarse) in (0u32..8, prop::sample::select(&[0u32, 16, 19, 21])),
        special in prop::collection::vec(
            (0usize..272, prop::sample::select(&[0u32, 1 << 31, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001])),
            0..4,
        ),
        scale in prop::sample::select(&ScaleType::ALL),
        block in prop::sample::select(&[32u32, 64, 128, 256]),
    ) {
        // Fewer exponent bits make blocks whose elements all count.
        let mut words: Vec<u32> =
            words.iter().map(|word| (word & !(0x7F80_0000 << shift)) | 0x3000_0000 >> shift).collect();
        // And fewer mantissa bits make some that fall between two codes.
        words.iter_mut().for_each(|word| *word &= u32::MAX << coarse);
        special.iter().for_each(|(at, word)| words[*at] = *word);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let scaled = BlockScaled { format: Float8::E4M3, scale, block };
        let config = DeviceConfig {
            token_type: DType::F32.into(),
            wire: TokenType::Scaled(scaled),
            ..DeviceConfig::new(1, 0, 1, 1).sized(1, 272)
        };
        let group = Group::new(&config);
        let batch = common::Batch {
            ids: vec![0],
            weights: None,
            tokens: bytes.clone(),
            scales: Vec::new(),
        };
        let member = group::Member::new(&group.twins[0], 0, &batch, &[0], 0);
        member.send();
        member.receive();
        prop_assert_eq!(member.token(0, &group.heaps[0]), dense::cast(DType::F32, &bytes, scale, block));
    }
}
