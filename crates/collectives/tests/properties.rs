//! Properties for all schedules, and for arbitrary stored programs.

mod common;

use common::executor::Executor;
use common::{Random, all};
use proptest::prelude::*;
use weft_collectives::contention::{BiGraphPaths, contention};
use weft_collectives::tune::{Costs, estimate};
use weft_collectives::{
    Algorithm, AnySchedule, Buffer, Collective, Op, Options, Program, Rank, Schedule, Span, build,
    verify,
};
use weft_topology::{BiGraph, EndpointId};

fn any_schedule(most: u32) -> impl Strategy<Value = AnySchedule> {
    (1..=most, any::<prop::sample::Index>(), 0u32..5, 1u32..10, any::<prop::sample::Index>())
        .prop_map(|(ranks, pick, collective, chunks, local)| {
            let collective = match collective {
                0 => Collective::AllReduce,
                1 => Collective::ReduceScatter,
                2 => Collective::AllGather,
                3 => Collective::AllToAll,
                _ => Collective::Broadcast { root: Rank(local.index(ranks as usize) as u32) },
            };
            let divisors: Vec<_> =
                (1..=ranks).filter(|local| ranks.is_multiple_of(*local)).collect();
            let options = Options { chunks, local: *local.get(&divisors) };
            let algorithm = *pick.get(Algorithm::of(collective));
            build(collective, algorithm, ranks, &options).unwrap()
        })
}

fn wild_number() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..4, Just(u32::MAX), Just(u32::MAX - 1), any::<u32>()]
}

fn wild_span() -> impl Strategy<Value = Span> {
    let buffer = prop_oneof![Just(Buffer::Input), Just(Buffer::Output), Just(Buffer::Scratch)];
    (buffer, wild_number(), wild_number()).prop_map(|(buffer, first, blocks)| Span {
        buffer,
        first,
        blocks,
    })
}

fn wild_op() -> impl Strategy<Value = Op> {
    let n = wild_number;
    (0..5, wild_span(), wild_span(), n(), n(), n()).prop_map(
        |(kind, source, target, peer, lane, step)| match kind {
            0 => Op::Write { to: Rank(peer), source, target, lane, step },
            1 => Op::Wait { from: Rank(peer), lane, count: step },
            2 => Op::Drain { to: Rank(peer) },
            3 => Op::Reduce { source, target },
            _ => Op::Copy { source, target },
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn schedules_are_verified_whether_computed_or_written_down(schedule in any_schedule(70)) {
        let proof = verify(&schedule).unwrap();
        let program = Program::new(&schedule);
        program.check().unwrap();
        prop_assert_eq!(verify(&program).unwrap(), proof);
        // All steps, lanes and scratch slots are used.
        let ops = || program.ops.iter().flatten();
        let writes = || ops().filter_map(|op| match op {
            Op::Write { step, lane, to, target, .. } => Some((*step, *lane, *to, *target)),
            _ => None,
        });
        prop_assert_eq!(writes().map(|w| w.0 + 1).max().unwrap_or(0), schedule.steps());
        if schedule.name() != "tree" && schedule.name() != "chain" && schedule.ranks() > 1 {
            prop_assert_eq!(writes().map(|w| w.1 + 1).max().unwrap_or(0), schedule.lanes());
        }
        for rank in (0..schedule.ranks()).map(Rank) {
            let arrivals = writes().filter(|w| w.2 == rank).map(|w| w.3);
            let copies = program.ops[rank.0 as usize].iter().filter_map(|op| match op {
                Op::Copy { target, .. } => Some(*target),
                _ => None,
            });
            let slots = arrivals.chain(copies).filter(|span| span.buffer == Buffer::Scratch);
            let used = slots.map(|span| span.first + span.blocks).max().unwrap_or(0);
            prop_assert_eq!(used, schedule.scratch_blocks(rank), "rank {}", rank);
        }
    }

    #[test]
    fn vectors_of_any_length(schedule in any_schedule(20), length in 0u64..100, seed in any::<u64>()) {
        let length = match schedule.collective() {
            Collective::AllToAll => length * u64::from(schedule.blocks()),
            _ => length,
        };
        let result = Executor::new(&schedule, length, seed).run();
        prop_assert!(result.is_ok(), "{}: {:?}", schedule.name(), result);
    }

    #[test]
    fn json_gives_back_the_same(schedule in any_schedule(9)) {
        let program = Program::new(&schedule);
        prop_assert_eq!(Program::from_json(&program.to_json()).unwrap(), program);
    }

    #[test]
    fn nonsense_is_an_error_not_a_panic(
        ops in prop::collection::vec(prop::collection::vec(wild_op(), 0..6), 0..4),
        (blocks, steps, lanes) in (wild_number(), wild_number(), wild_number()),
        scratch_blocks in prop::collection::vec(wild_number(), 0..4),
        collective in 0u32..5,
        root in wild_number(),
    ) {
        let collective = match collective {
            0 => Collective::AllReduce,
            1 => Collective::ReduceScatter,
            2 => Collective::AllGather,
            3 => Collective::AllToAll,
            _ => Collective::Broadcast { root: Rank(root) },
        };
        let name = "nonsense".to_owned();
        let program = Program { name, collective, blocks, scratch_blocks, steps, lanes, ops };
        let checked = program.check();
        let verified = verify(&program);
        prop_assert!(checked.is_ok() || Program::from_json(&program.to_json()).is_err());
        prop_assert!(verified.is_err() || checked.is_ok() || program.scratch_blocks.len() != program.ops.len());
        let map: Vec<_> = (0..program.ops.len() as u32).map(EndpointId).collect();
        let _ = contention(&program, &mut BiGraphPaths::new(&BiGraph::new(2, 1)).unwrap(), &map);
        let _ = program.to_string();
        let mut paths = BiGraphPaths::new(&BiGraph::new(2, 1)).unwrap();
        let (ring, options, costs) = (Algorithm::Ring, Options::default(), Costs::default());
        let _ = estimate(ring, &options, &program, &mut paths, &map, u64::MAX, &costs);
    }

    #[test]
    fn damaged_json_is_an_error_not_a_panic(seed in any::<u64>()) {
        let mut random = Random::new(seed);
        let schedules = all(3);
        let program = Program::new(&schedules[random.below(schedules.len() as u32) as usize]);
        let mut text = program.to_json().into_bytes();
        for _ in 0..1 + random.below(3) {
            let at = random.below(text.len() as u32) as usize;
            text[at] = random.choose(b"0123456789{}[]\",: abz-.");
        }
        if let Ok(program) = Program::from_json(&String::from_utf8(text).unwrap()) {
            let _ = verify(&program);
        }
    }
}
