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

use group::Group;
use proptest::prelude::*;
use rounds::{Plot, World, at_once, in_turn, run};
use std::thread;
use weft_moe::device::{DeviceArea, DeviceConfig, DeviceLayout, IdWidth, Path};
use weft_moe::routing::Routing;
use weft_moe::{BlockScaled, DType, Float8, ScaleType, TokenType, Weighting};

/// Miri takes its time.
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

prop_compose! {
    fn configs()(
        (ranks, experts, top_k) in (1u32..10, 1u32..20, 1u32..7),
        (hidden, max_tokens) in (
            prop_oneof![4 => 1u32..5, 1 => 16u32..20],
            prop_oneof![6 => 1u32..14, 1 => 60u32..140],
        ),
        (token_type, wire) in token_types(),
        (combine_dtype, answer_dtype, output_dtype) in (dtypes(), dtypes(), dtypes()),
        ids in prop::sample::select(&[IdWidth::I32, IdWidth::I64]),
        layout in prop_oneof![
            Just(DeviceLayout::Indexed),
            (1u32..9).prop_map(|pad_to| DeviceLayout::Contiguous { pad_to }),
            Just(DeviceLayout::Padded { expert_capacity: None }),
        ],
        weighting in prop::sample::select(&[Weighting::AtCombine, Weighting::AtExpert]),
        path in prop::option::of(prop::sample::select(&Path::ALL)),
    ) -> DeviceConfig {
        let packets = path == Some(Path::Packets) && layout == DeviceLayout::Indexed;
        DeviceConfig {
            token_type, wire, combine_dtype, answer_dtype, output_dtype, ids, layout, weighting,
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

/// Earlier tokens of the chunk that name the expert, earlier chunks, and what is left of wrong ids.
#[test]
fn the_bandwidth_path_keeps_its_plan() {
    let config = DeviceConfig::new(3, 0, 7, 2).sized(150, 16);
    let config = DeviceConfig { path: Some(Path::Bandwidth), ..config };
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]

    /// Whatever bits tokens have, their codes and scales are those of the stated arithmetic.
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
        // Fewer bits of exponent make blocks whose elements all count.
        let mut words: Vec<u32> =
            words.iter().map(|word| (word & !(0x7F80_0000 << shift)) | 0x3000_0000 >> shift).collect();
        // And fewer of the mantissa some that fall between two codes.
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
