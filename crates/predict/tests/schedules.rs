//! Schedules from all algorithms and from JSON, link loads, and deadlocks.

use serde_json::{Value, json};
use weft_collectives::{
    Algorithm, AnySchedule, Collective, Op, Options, Program, Rank, Schedule, Span, build,
    contention,
};
use weft_predict::collective::CollectiveWorkload;
use weft_predict::{Cluster, World};
use weft_topology::{EndpointId, Network, Router, Routing};

const LATENCY: f64 = 2.0 * 0.5e-6 + 1.5e-6;
const BANDWIDTH: f64 = 12.5e9;

fn cluster(topology: &str, routing: &str) -> Cluster {
    serde_json::from_value(json!({"topology": topology, "routing": routing, "seed": 7})).unwrap()
}

/// Time and maximum link load for a schedule with `bytes`.
fn run(cluster: &Cluster, schedule: AnySchedule, map: &[EndpointId], bytes: u64) -> (f64, u32) {
    let mut world = World::new(cluster).unwrap();
    let mut workload =
        CollectiveWorkload::of(&mut world, schedule, map.to_vec(), bytes, 1, &[], 0).unwrap();
    let time_s = world.run(&mut [&mut workload], &mut |_, _| true).unwrap();
    (time_s, world.max_link_load())
}

fn all_reduce(algorithm: Algorithm, ranks: u32) -> AnySchedule {
    build(Collective::AllReduce, algorithm, ranks, &Options::default()).unwrap()
}

fn in_order(ranks: u32) -> Vec<EndpointId> {
    (0..ranks).map(EndpointId).collect()
}

#[test]
fn link_loads_of_ranks_in_step_are_those_of_the_link_checker() {
    for topology in ["fat-tree:leaves=4,spines=2,hosts=4", "bigraph:switches=8,endpoints=2"] {
        for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling] {
            let network = Network::parse(topology).unwrap();
            let map = in_order(16);
            let schedule = all_reduce(algorithm, 16);
            let mut router = Router::new(&network, Routing::Ecmp { seed: 7 }).unwrap();
            let report = contention(&schedule, &mut router, &map).unwrap();
            // Short messages: all messages in a step are over before the next step.
            let (_, load) = run(&cluster(topology, "ecmp"), schedule, &map, 16 * 64);
            assert!(
                load <= report.max_load,
                "{topology} {algorithm}: {load} > {}",
                report.max_load
            );
            // As long as a step's writes have the same way to go they share it all at once.
            if topology.starts_with("fat-tree") {
                assert_eq!(load, report.max_load, "{topology} {algorithm}");
            }
        }
    }
}

#[test]
fn hdrm_loads_every_link_once_as_in_the_link_checker() {
    for (half, ports) in [(2u32, 2u32), (4, 2), (8, 8), (16, 4)] {
        let shape = weft_topology::BiGraph::new(half, ports);
        let map = shape.rank_map().unwrap();
        let topology = format!("bigraph:switches={},endpoints={ports}", 2 * half);
        let schedule = all_reduce(Algorithm::Hdrm, map.len() as u32);
        let mut router = Router::new(&shape.network().unwrap(), Routing::Unique).unwrap();
        assert_eq!(contention(&schedule, &mut router, &map).unwrap().max_load, 1);
        assert_eq!(run(&cluster(&topology, "unique"), schedule, &map, 1 << 26).1, 1);
    }
}

#[test]
fn direct_and_tree_take_the_times_of_their_formulas() {
    // One switch with eight endpoints: in two-shot every rank sends a block to each other rank, seven at a time, twice.
    let topology = "fat-tree:leaves=1,spines=1,hosts=8";
    let bytes = 8 << 20;
    let (two_shot, load) =
        run(&cluster(topology, "unique"), all_reduce(Algorithm::TwoShot, 8), &in_order(8), bytes);
    assert_eq!(load, 7);
    let expected = 2.0 * (LATENCY + 7.0 * f64::from(1 << 20) / BANDWIDTH);
    assert!((two_shot / expected - 1.0).abs() < 1e-6, "{two_shot} {expected}");
    // Two ranks: both trees are one edge, one chunk: up and down, each vector half, both ways at once.
    let options = Options { chunks: 1, ..Options::default() };
    let tree = build(Collective::AllReduce, Algorithm::Tree, 2, &options).unwrap();
    let topology = "fat-tree:leaves=1,spines=1,hosts=2";
    let (tree, _) = run(&cluster(topology, "unique"), tree, &in_order(2), bytes);
    let expected = 2.0 * (LATENCY + f64::from(4 << 20) / BANDWIDTH);
    assert!((tree / expected - 1.0).abs() < 1e-6, "{tree} {expected}");
}

#[test]
fn every_algorithm_ends_for_every_number_of_ranks() {
    let topology = "fat-tree:leaves=4,spines=2,hosts=5";
    for collective in [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast { root: Rank(0) },
        Collective::AllToAll,
    ] {
        for algorithm in Algorithm::ALL {
            for ranks in 1..=20 {
                let Ok(schedule) = build(collective, *algorithm, ranks, &Options::default()) else {
                    continue;
                };
                let map = in_order(ranks);
                let (time_s, _) = run(&cluster(topology, "ecmp"), schedule, &map, 1_000_003);
                assert!(time_s.is_finite() && (ranks == 1 || time_s > 0.0));
            }
        }
    }
}

fn written(change: impl FnOnce(&mut Program)) -> Value {
    let mut program = Program::new(&all_reduce(Algorithm::Ring, 4));
    change(&mut program);
    json!({
        "scenario": "collective",
        "cluster": {"topology": "fat-tree:leaves=1,spines=1,hosts=4"},
        "job": {"program": program, "bytes": 4096},
    })
}

fn outcome(spec: &Value) -> Result<Value, String> {
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true);
    outcome.map(|json| serde_json::from_str(&json).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn a_schedule_from_json_takes_as_long_as_its_algorithm() {
    let (time_s, _) = run(
        &cluster("fat-tree:leaves=1,spines=1,hosts=4", "unique"),
        all_reduce(Algorithm::Ring, 4),
        &in_order(4),
        4096,
    );
    assert_eq!(outcome(&written(|_| {})).unwrap()["time_s"].as_f64(), Some(time_s));
}

#[test]
fn a_deadlock_names_rank_operation_and_step() {
    // Rank 2 does not post its step-1 write.
    let error = outcome(&written(|program| {
        let write = |op: &Op| matches!(op, Op::Write { step: 1, .. });
        let index = program.ops[2].iter().position(write).unwrap();
        program.ops[2].remove(index);
    }))
    .unwrap_err();
    assert!(error.contains("schedule ring: deadlock of rank 3 at operation 4 (step 1)"), "{error}");
    assert!(error.contains("waiting for rank 2 to raise lane 1"), "{error}");

    // All ranks wait before they write: a cycle.
    let error = outcome(&written(|program| {
        for ops in &mut program.ops {
            ops.swap(0, 1);
        }
    }))
    .unwrap_err();
    assert!(error.contains("deadlock of") && error.contains("which is blocked on rank"), "{error}");
}

#[test]
fn an_invalid_schedule_from_json_is_rejected_precisely() {
    let refused = |change: fn(&mut Program)| outcome(&written(change)).unwrap_err();
    let error = refused(|program| {
        program.ops[1][0] = Op::Drain { to: Rank(9) };
    });
    assert!(error.contains("rank 1, operation 0") && error.contains("rank 9"), "{error}");
    let error = refused(|program| {
        program.ops[0][2] = Op::Reduce { source: Span::input(3, 2), target: Span::output(0, 2) };
    });
    assert!(error.contains("rank 0, operation 2") && error.contains("4 blocks"), "{error}");
    let mut spec = written(|_| {});
    spec["job"]["program"]["operations"][0][0]["teleport"] = json!({});
    assert!(outcome(&spec).is_err());
    assert_eq!(all_reduce(Algorithm::Ring, 4).ranks(), 4);
}
