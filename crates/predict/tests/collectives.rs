//! Collectives against formulas, against exact times, and against the link checker.

use serde_json::{Value, json};

fn run(spec: Value) -> Value {
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true);
    serde_json::from_str(&outcome.unwrap_or_else(|error| panic!("{spec}: {error}"))).unwrap()
}

fn fails(spec: Value) -> String {
    match weft_predict::run(&spec.to_string(), &mut |_, _| true) {
        Ok(outcome) => panic!("{spec} ran: {outcome}"),
        Err(error) => error.to_string(),
    }
}

/// One switch: every rank has a separate link in each direction, and no two pairs share any.
fn star(algorithm: &str, ranks: u32, bytes: u64, constants: Value) -> Value {
    json!({
        "scenario": "collective",
        "cluster": {
            "topology": format!("fat-tree:leaves=1,spines=1,hosts={ranks},gbps=100,latency_us=0.5"),
            "constants": {"set": constants},
        },
        "job": {"algorithm": algorithm, "bytes": bytes},
    })
}

fn time(spec: Value) -> f64 {
    run(spec)["time_s"].as_f64().unwrap()
}

fn assert_close(seen: f64, expected: f64, what: &str) {
    let off = (seen - expected).abs() / expected;
    assert!(off < 1e-6, "{what}: {seen} s, expected {expected} s by the formula (off by {off:e})");
}

const BANDWIDTH: f64 = 12.5e9;
/// Two links and the message.
const LATENCY: f64 = 2.0 * 0.5e-6 + 1.5e-6;

#[test]
fn a_ring_takes_the_time_of_its_formula() {
    for ranks in [2u32, 3, 5, 16, 64] {
        for bytes in [1024 * 15 * u64::from(ranks), 15 << 20] {
            let steps = f64::from(2 * (ranks - 1));
            let wire = steps / f64::from(ranks) * bytes as f64 / BANDWIDTH;
            let reduce = f64::from(ranks - 1) / f64::from(ranks) * bytes as f64 / 2e11;
            let constants = json!({"message_latency_s": 1.5e-6, "reduce_bytes_per_s": 2e11});
            if bytes % u64::from(ranks) == 0 {
                let seen = time(star("ring", ranks, bytes, constants));
                assert_close(seen, steps * LATENCY + wire + reduce, &format!("ring of {ranks}"));
            }
        }
    }
}

#[test]
fn halving_doubling_takes_the_time_of_its_formula() {
    for (ranks, log) in [(2u32, 1), (8, 3), (64, 6)] {
        for algorithm in ["hd", "hdrm"] {
            let bytes = 1 << 20;
            let share = f64::from(ranks - 1) / f64::from(ranks) * f64::from(bytes);
            let steps = 2.0 * f64::from(log);
            let constants = json!({
                "post_s": 3e-7, "wait_s": 4e-7, "reduce_launch_s": 1e-6, "launch_s": 2e-5,
                "reduce_bytes_per_s": 2e11, "wire_efficiency": 0.9,
            });
            let expected = 2e-5
                + steps * (LATENCY + 3e-7 + 4e-7)
                + 2.0 * share / (BANDWIDTH * 0.9)
                + f64::from(log) * 1e-6
                + share / 2e11;
            let seen = time(star(algorithm, ranks, bytes.try_into().unwrap(), constants));
            assert_close(seen, expected, &format!("{algorithm} of {ranks}"));
        }
    }
}

#[test]
fn circulant_takes_the_time_of_its_formula_for_any_number_of_ranks() {
    for ranks in [2u32, 3, 5, 8, 17, 24, 31, 33] {
        let bytes = 65_536 * u64::from(ranks);
        let steps = 2.0 * f64::from(ranks).log2().ceil();
        let wire = 2.0 * f64::from(ranks - 1) * 65_536.0 / BANDWIDTH;
        let seen = time(star("circulant", ranks, bytes, json!({"message_latency_s": 1.5e-6})));
        assert_close(seen, steps * LATENCY + wire, &format!("circulant of {ranks}"));
    }
}

/// Times that docs/collectives.md states, in tenths of a millisecond.
#[test]
fn circulant_takes_the_stated_times_beside_folded_ranks() {
    let tenths = |topology: &str, algorithm: &str, ranks: u32| {
        let seconds = time(json!({
            "scenario": "collective",
            "cluster": {"topology": format!("{topology},gbps=100,latency_us=0.5")},
            "job": {"algorithm": algorithm, "bytes": 64 << 20, "ranks": ranks},
        }));
        (seconds * 1e4).round() as u32
    };
    let star = "fat-tree:leaves=1,spines=1,hosts=32";
    let found = [("circulant", 16), ("circulant", 17), ("hd", 17)];
    assert_eq!(found.map(|(algorithm, ranks)| tenths(star, algorithm, ranks)), [101, 101, 160]);
    let bigraph = "bigraph:switches=8,endpoints=3";
    let found = ["circulant", "hd", "hdrm", "ring"];
    assert_eq!(found.map(|algorithm| tenths(bigraph, algorithm, 24)), [302, 172, 116, 104]);
}

#[test]
fn hdrm_on_a_bigraph_takes_the_time_of_its_formula_and_loads_each_link_once() {
    for (switches, endpoints) in [(4u32, 2u32), (8, 4), (16, 4), (16, 8), (64, 32)] {
        let ranks = switches * endpoints;
        let outcome = run(json!({
            "scenario": "collective",
            "cluster": {"topology": format!("bigraph:switches={switches},endpoints={endpoints}")},
            "job": {"algorithm": "hdrm", "bytes": 1 << 28},
        }));
        let steps = 2.0 * f64::from(ranks.ilog2());
        let share = f64::from(ranks - 1) / f64::from(ranks) * f64::from(1 << 28);
        // An edge link, a trunk, an edge link, and the message.
        let expected = steps * (3.0 * 0.5e-6 + 1.5e-6) + 2.0 * share / BANDWIDTH;
        assert_close(outcome["time_s"].as_f64().unwrap(), expected, &format!("hdrm of {ranks}"));
        assert_eq!(outcome["max_link_load"], 1);
    }
}

#[test]
fn virtual_times_are_pinned_exactly() {
    // 64 ranks on 16 switches: 126 or 12 messages one after the other, and 1008 or 1 KiB/64 bytes a time.
    let small = |algorithm: &str, switches: u32, endpoints: u32| {
        time(json!({
            "scenario": "collective",
            "cluster": {
                "topology": format!("bigraph:switches={switches},endpoints={endpoints}"),
                "routing": "static",
            },
            "job": {"algorithm": algorithm, "bytes": 64_000, "placement": "map"},
        }))
    };
    // HDRM: 12 x 3 us + 2 x 63 000 B / 12.5 GB/s.
    assert_eq!(format!("{:.12}", small("hdrm", 16, 4)), "0.000046080000");
    // Two ranks on two switches: 2 x (3 us + 32 000 B / 12.5 GB/s).
    assert_eq!(format!("{:.12}", small("ring", 2, 1)), "0.000011120000");
    assert_eq!(format!("{:.12}", small("hdrm", 2, 1)), "0.000011120000");
}

#[test]
fn two_flows_on_one_link_take_twice_as_long() {
    // Ranks 0 and 1 on one leaf, 2 and 3 on the other, one spine: with this placement each step's four
    // writes cross, two on each trunk.
    let spec = |placement: Value| {
        json!({
            "scenario": "collective",
            "cluster": {"topology": "fat-tree:leaves=2,spines=1,hosts=2,latency_us=0"},
            "job": {"algorithm": "ring", "bytes": 4 << 20, "placement": placement},
        })
    };
    let crossing = run(spec(json!({"endpoints": [0, 2, 1, 3]})));
    assert_eq!(crossing["max_link_load"], 2);
    let step = |share: f64| 1.5e-6 + share * f64::from(1 << 20) / BANDWIDTH;
    assert_close(crossing["time_s"].as_f64().unwrap(), 6.0 * step(2.0), "crossing");
    let local = run(spec(json!("order")));
    assert_eq!(local["max_link_load"], 1);
    assert_close(local["time_s"].as_f64().unwrap(), 6.0 * step(1.0), "local");
}

/// Two fast endpoints, and two behind links with a hundredth the bandwidth, which have the first ranks.
fn mapped(map: Value) -> Value {
    let pair = |first: &str, second: &str, leaf: &str, gbps: u32| {
        let joins = |endpoint: &str| json!({"from": endpoint, "to": leaf, "gbps": gbps});
        [joins(first), joins(second)]
    };
    let mut links = pair("g0", "g1", "fast", 100).to_vec();
    links.extend(pair("g2", "g3", "slow", 1));
    links.push(json!(["fast", "slow"]));
    let endpoints = ["g0", "g1", "g2", "g3"];
    json!({"switches": ["fast", "slow"], "endpoints": endpoints, "links": links, "rank_map": map})
}

#[test]
fn every_scenario_has_its_ranks_at_the_endpoints_of_the_rank_map() {
    let mib = 1_048_576;
    let model = json!({
        "name": "tiny", "layers": [{"name": "a", "forward_s": 1e-6, "backward_s": 1e-6, "gradient_bytes": mib}],
        "optimizer_s": 0.0,
    });
    let jobs = [
        ("collective", json!({"algorithm": "ring", "bytes": mib, "ranks": 2})),
        ("collective", json!({"algorithm": "hd", "bytes": mib, "ranks": 2})),
        (
            "train",
            json!({"model": model, "reduction": {"algorithm": "ring", "bytes": 0, "ranks": 2}}),
        ),
        ("moe", json!({"ranks": 2})),
        ("dlrm", json!({"ranks": 2})),
    ];
    for (scenario, job) in jobs {
        let spec = |map: Value| json!({"scenario": scenario, "cluster": {"topology": mapped(map)}, "job": job.clone()});
        let fast = time(spec(json!(["g0", "g1", "g2", "g3"])));
        let slow = time(spec(json!(["g2", "g3", "g0", "g1"])));
        assert!(slow > 3.0 * fast, "{scenario}: {slow} s, {fast} s");
        // A map that covers the ranks is enough, a shorter one is not.
        assert_eq!(time(spec(json!(["g2", "g3"]))), slow, "{scenario}");
        let error = fails(spec(json!(["g2"])));
        assert!(error.starts_with("rank_map of 1: expected at least 2 endpoints"), "{error}");
    }
    let order = json!({
        "scenario": "collective", "cluster": {"topology": mapped(json!(["g2", "g3"]))},
        "job": {"algorithm": "ring", "bytes": mib, "ranks": 2, "placement": "order"},
    });
    let ring = json!({
        "scenario": "collective", "cluster": {"topology": mapped(json!(["g0", "g1"]))},
        "job": {"algorithm": "ring", "bytes": mib, "ranks": 2},
    });
    assert_eq!(time(order), time(ring), "an explicit placement is not the map's");
}

#[test]
fn equal_seeds_give_equal_outcomes() {
    let spec = |seed: u64| {
        json!({
            "scenario": "collective",
            "cluster": {
                "topology": "fat-tree:leaves=4,spines=4,hosts=4",
                "routing": "ecmp",
                "seed": seed,
                "constants": {"set": {"jitter_s": 1e-6, "jitter_share": 0.01}},
            },
            "job": {"algorithm": "hd", "bytes": 1 << 22},
        })
    };
    let times: Vec<f64> = [1, 1, 2].map(|seed| time(spec(seed))).to_vec();
    assert_eq!(times[0].to_bits(), times[1].to_bits());
    assert_ne!(times[0].to_bits(), times[2].to_bits());
}

#[test]
fn segments_of_a_vector_follow_each_other() {
    let bytes = 1u64 << 22;
    let whole = time(star("ring", 8, bytes / 4, json!({"message_latency_s": 1.5e-6})));
    let constants =
        json!({"message_latency_s": 1.5e-6, "segment_bytes": bytes / 4, "launch_s": 1e-5});
    let cut = time(star("ring", 8, bytes, constants));
    assert_close(cut, 4.0 * whole + 1e-5, "four segments");
}

#[test]
fn a_slow_and_a_late_rank_delay_the_others() {
    let spec = |stragglers: Value| {
        let constants = json!({"message_latency_s": 1.5e-6, "reduce_bytes_per_s": 1e10});
        let mut spec = star("ring", 4, 4 << 20, constants);
        spec["cluster"]["stragglers"] = stragglers;
        spec
    };
    let even = time(spec(json!([])));
    let late = time(spec(json!([{"rank": 2, "late_s": 0.01}])));
    assert_close(late, even + 0.01, "late");
    let reduce = f64::from(1 << 20) / 1e10;
    // Every block is reduced by every rank but one; the longest chain passes the slow one three times.
    let slow = time(spec(json!([{"rank": 2, "slow": 3.0}])));
    assert!(slow > even + 2.0 * reduce && slow < even + 6.1 * reduce, "{slow} {even}");
}

#[test]
fn links_fail_and_recover() {
    let spec = |fault: Value| {
        let mut spec = star("ring", 4, 4 << 20, json!({"message_latency_s": 1.5e-6}));
        spec["cluster"]["faults"] = json!([fault]);
        spec
    };
    let names = run(star("ring", 4, 4 << 20, json!({})));
    let (from, to) = (names["links"][0]["from"].clone(), names["links"][0]["to"].clone());
    let even = time(spec(json!({"from": from, "to": to, "bandwidth": 1.0})));
    let half = time(spec(json!({"from": from, "to": to, "bandwidth": 0.5})));
    // The slow link is never idle once it has begun, so latencies pass while it works: all but the first, and the one
    // in the step that others still make when it is done.
    let wire = 6.0 * f64::from(1 << 20) / BANDWIDTH;
    assert_close(half, 2.0 * LATENCY + 2.0 * wire, "half the bandwidth");
    let back = time(spec(
        json!({"from": from, "to": to, "bandwidth": 0.0, "at_s": 1e-4, "until_s": 1e-3}),
    ));
    assert_close(back, even + 9e-4, "a link that was away for 0.9 ms");
    let error = fails(spec(json!({"from": from, "to": to, "bandwidth": 0.0, "at_s": 1e-4})));
    assert!(error.contains("has failed") && error.contains("rank"), "{error}");
}

#[test]
fn invalid_inputs_are_rejected_before_the_run() {
    let mut refused = Vec::new();
    for (path, value) in [
        ("/cluster/stragglers", json!([{"rank": 9, "late_s": 1.0}])),
        ("/cluster/stragglers", json!([{"rank": 1, "slow": 0.0}])),
        ("/cluster/stragglers", json!([{"rank": 1, "slow": 2.0}, {"rank": 1, "late_s": 1.0}])),
        ("/cluster/faults", json!([{"from": "node9", "to": "leaf0", "bandwidth": 0.5}])),
        ("/cluster/constants", json!({"set": {"post_s": -1.0}})),
        ("/cluster/constants", json!({"set": {"wire_efficiency": 1.5}})),
        ("/cluster/constants", json!({"set": {"no_such_constant": 1.0}})),
        ("/cluster/routing", json!("random")),
        ("/cluster/topology", json!("bigraph:switches=15,endpoints=4")),
        ("/job/algorithm", json!("magic")),
        ("/job/collective", json!("all-to-some")),
        ("/job/ranks", json!(5)),
        ("/job/ranks", json!(0)),
        ("/job/placement", json!({"endpoints": [0, 1, 1, 2]})),
        ("/job/bytes", json!(-5)),
        ("/job/rounds", json!(0)),
        ("/job/rounds", json!(4_000_000_000u32)),
        ("/cluster/constants", json!({"set": {"segment_bytes": 0}})),
    ] {
        let mut spec = star("ring", 4, 1 << 20, json!({}));
        let (parent, field) = path.rsplit_once('/').unwrap();
        spec.pointer_mut(parent).unwrap()[field] = value;
        refused.push(fails(spec));
    }
    for error in refused {
        assert!(error.len() > 20, "{error}");
    }
}

#[test]
fn a_run_can_be_cancelled() {
    let spec = star("ring", 256, 1 << 20, json!({}));
    let error = weft_predict::run(&spec.to_string(), &mut |_, _| false).unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
}

#[test]
fn adaptive_routes_spread_over_links() {
    // Four rank pairs from leaf to leaf, four spines: hashes collide, adaptive routes do not.
    let load = |routing: &str| {
        let outcome = run(json!({
            "scenario": "collective",
            "cluster": {
                "topology": "fat-tree:leaves=2,spines=4,hosts=4", "routing": routing, "seed": 3,
            },
            "job": {
                "algorithm": "hd", "bytes": 8 << 20,
                "placement": {"endpoints": [0, 4, 1, 5, 2, 6, 3, 7]},
            },
        }));
        outcome["max_link_load"].as_u64().unwrap()
    };
    assert_eq!(load("adaptive"), 1);
    assert!(load("ecmp") > 1);
}

#[test]
fn a_hierarchical_all_reduce_uses_nvlink_inside_hosts_whose_nics_share_a_leaf() {
    let mut endpoints = Vec::new();
    let mut links = vec![json!({"from": "rack[0-1]", "to": "spine[0-7]"})];
    for host in 0..16 {
        let gpus = format!("host{host}.gpu[0-7]");
        endpoints.push(json!({"name": gpus, "host": format!("host{host}")}));
        links.push(json!([gpus, format!("rack{}", host / 8)]));
        links.push(json!({"from": gpus, "to": format!("host{host}"), "gbps": 3600}));
    }
    let topology = json!({
        "switches": ["rack[0-1]", "spine[0-7]"],
        "hosts": ["host[0-15]"],
        "endpoints": endpoints,
        "links": links,
    });
    let bytes = 128 << 20;
    let outcome = run(json!({
        "scenario": "collective",
        "cluster": {"topology": topology, "routing": "static"},
        "job": {"algorithm": "hierarchical", "bytes": bytes, "local": 8},
        "links": 1000,
    }));
    // Each GPU's NIC carries an eighth of the vector, 15/16 of it twice, and its NVLink 7/8 of the whole twice.
    for link in outcome["links"].as_array().unwrap() {
        let name = |end: &str| link[end].as_str().unwrap().to_owned();
        let (from, to) = (name("from"), name("to"));
        if from.contains("gpu") {
            let expected = if to.starts_with("rack") { 15.0 / 64.0 } else { 7.0 / 4.0 };
            let carried = link["bytes"].as_f64().unwrap();
            assert_close(carried, f64::from(bytes) * expected, &format!("{from} to {to}"));
        }
    }
    let warning = outcome["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with("host0.gpu0 to host0.gpu1: 2 links inside host host0"),
        "{warning}"
    );
}

#[test]
fn a_run_in_zero_time_ends() {
    let mut spec = star("ring", 64, 0, json!({"message_latency_s": 0.0}));
    spec["cluster"]["topology"] = json!("fat-tree:leaves=1,spines=1,hosts=64,latency_us=0");
    assert!(run(spec)["time_s"].as_f64().unwrap() == 0.0);
}

#[test]
fn a_reduction_may_overlap_with_the_arrival_of_its_input() {
    let constants = |tail: Option<u64>| json!({"message_latency_s": 1.5e-6, "reduce_bytes_per_s": 1e10, "reduce_tail_bytes": tail});
    let bare = time(star("ring", 4, 4 << 20, json!({"message_latency_s": 1.5e-6})));
    let reduced = |bytes: u32| bare + 3.0 * f64::from(bytes) / 1e10;
    assert_close(time(star("ring", 4, 4 << 20, constants(None))), reduced(1 << 20), "all of it");
    assert_close(
        time(star("ring", 4, 4 << 20, constants(Some(1 << 16)))),
        reduced(1 << 16),
        "its end",
    );
}

#[test]
fn posts_of_one_nic_queue() {
    // Direct among four ranks: three writes are posted one after the other, and all share the rank's link.
    let mut spec = star("two-shot", 4, 4 << 20, json!({"message_latency_s": 0.0, "post_s": 1e-3}));
    spec["cluster"]["topology"] = json!("fat-tree:leaves=1,spines=1,hosts=4,latency_us=0");
    let wire = f64::from(1 << 20) / BANDWIDTH;
    assert_close(time(spec), 2.0 * (3e-3 + wire), "posts");
}
