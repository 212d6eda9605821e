//! Properties for every collective on every network.

use proptest::prelude::*;
use serde_json::{Value, json};
use weft_collectives::{Algorithm, Collective, Op, Options, Rank, Schedule, build};

fn run(spec: &Value) -> Value {
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true);
    serde_json::from_str(&outcome.unwrap_or_else(|error| panic!("{spec}: {error}"))).unwrap()
}

/// Total bytes in all writes in a schedule.
fn written(algorithm: Algorithm, ranks: u32, bytes: u64) -> u64 {
    let schedule = build(Collective::AllReduce, algorithm, ranks, &Options::default()).unwrap();
    let mut sum = 0;
    for rank in (0..ranks).map(Rank) {
        for index in 0..schedule.len(rank) {
            if let Op::Write { to, source, target, .. } = schedule.op(rank, index) {
                let (here, there) = (
                    schedule.span_bytes(rank, source, bytes),
                    schedule.span_bytes(to, target, bytes),
                );
                sum += here.min(there);
            }
        }
    }
    sum
}

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::Ring,
    Algorithm::Tree,
    Algorithm::HalvingDoubling,
    Algorithm::OneShot,
    Algorithm::TwoShot,
];

prop_compose! {
    fn scenarios()(
        leaves in 1u32..5,
        spines in 1u32..4,
        hosts in 1u32..5,
        algorithm in 0..ALGORITHMS.len(),
        bytes in 0u64..5_000_000,
        routing in prop::sample::select(vec!["ecmp", "static", "adaptive"]),
        seed in 0u64..100,
        jitter in prop::bool::ANY,
        segment in prop::option::of(100_000u64..2_000_000),
        slow in prop::option::of((0u32..100, 1.0f64..4.0)),
    ) -> (Value, Algorithm, u32, u64) {
        let ranks = leaves * hosts;
        let stragglers: Vec<Value> = slow
            .into_iter()
            .map(|(rank, slow)| json!({"rank": rank % ranks, "slow": slow, "late_s": slow * 1e-6}))
            .collect();
        let constants = json!({
            "post_s": 1e-7, "wait_s": 1e-6, "reduce_bytes_per_s": 1e11,
            "jitter_s": if jitter { 1e-6 } else { 0.0 }, "segment_bytes": segment,
        });
        let spec = json!({
            "scenario": "collective",
            "cluster": {
                "topology": format!("fat-tree:leaves={leaves},spines={spines},hosts={hosts}"),
                "routing": routing, "seed": seed, "constants": {"set": constants},
                "stragglers": stragglers,
            },
            "job": {"algorithm": ALGORITHMS[algorithm].name(), "bytes": bytes},
            "links": 100_000,
        });
        (spec, ALGORITHMS[algorithm], ranks, bytes)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn links_carry_what_is_written_in_no_less_time_than_they_need(
        (spec, algorithm, ranks, bytes) in scenarios()
    ) {
        let outcome = run(&spec);
        let again = run(&spec);
        let time_s = outcome["time_s"].as_f64().unwrap();
        prop_assert_eq!(time_s.to_bits(), again["time_s"].as_f64().unwrap().to_bits());
        let links = outcome["links"].as_array().unwrap();
        let mut left = 0.0;
        for link in links {
            let carried = link["bytes"].as_f64().unwrap();
            let needed = carried / 12.5e9;
            prop_assert!(time_s >= needed * (1.0 - 1e-9), "{} in {} s", link, time_s);
            if link["from"].as_str().unwrap().contains('.') {
                left += carried;
            }
        }
        // Segments cut a vector elsewhere than whole-vector blocks do: bytes are the same except for rounding.
        let sent = written(algorithm, ranks, bytes) as f64;
        let rounding = f64::from(ranks * ranks) * 200.0;
        prop_assert!((left - sent).abs() <= rounding + 1e-6 * sent, "{} left, {} written", left, sent);
    }

    #[test]
    fn a_slower_link_never_makes_a_ring_faster(
        (mut spec, _, ranks, _) in scenarios(),
        share in 0.1f64..1.0,
    ) {
        prop_assume!(ranks > 1);
        spec["job"]["algorithm"] = json!("ring");
        spec["job"]["bytes"] = json!(1 << 20);
        // Jitter is drawn in message order, which a slower link changes.
        spec["cluster"]["constants"]["set"]["jitter_s"] = json!(0.0);
        let even = run(&spec)["time_s"].as_f64().unwrap();
        spec["cluster"]["faults"] = json!([{"from": "leaf0.0", "to": "leaf0", "bandwidth": share}]);
        let slow = run(&spec)["time_s"].as_f64().unwrap();
        prop_assert!(slow >= even * (1.0 - 1e-9), "{} < {}", slow, even);
    }
}
