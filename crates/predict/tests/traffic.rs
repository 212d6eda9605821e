//! Recommendation models, queries and all-to-alls: exact times where a formula has them, and what must not change with
//! the seed, the rank order or how a write is cut.

use serde_json::{Value, json};

const STAR: &str = "fat-tree:leaves=1,spines=1,hosts=16,gbps=8,latency_us=0.5";
/// Two links with half a microsecond each.
const LATENCY_S: f64 = 1e-6;
/// Bytes a second.
const BANDWIDTH: f64 = 1e9;

fn run(spec: Value) -> Value {
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true);
    serde_json::from_str(&outcome.expect("the scenario is possible")).expect("JSON comes back")
}

fn refused(spec: Value) -> String {
    weft_predict::run(&spec.to_string(), &mut |_, _| true)
        .expect_err("the scenario is invalid")
        .to_string()
}

fn seconds(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
}

fn dlrm(changes: &[(&str, Value)]) -> Value {
    let mut job = json!({
        "ranks": 4, "batch": 100, "tables": 2, "dimension": 50, "element_bytes": 4, "pooling": 10.0,
        "gather_bytes_per_s": 1e10, "bottom_flops": 0.0, "top_flops": 1e6, "flops_per_s": 1e12,
        "update_passes": 2.0,
    });
    for (name, value) in changes {
        job[*name] = value.clone();
    }
    let cluster = json!({"topology": STAR, "routing": "static", "constants": {"set": {"message_latency_s": 0.0}}});
    json!({"scenario": "dlrm", "cluster": cluster, "job": job})
}

#[test]
fn an_iteration_is_the_sum_of_its_parts() {
    let found = run(dlrm(&[]));
    // Each rank sends three others 40,000 bytes each; it gathers for all four.
    let exchange_s = LATENCY_S + 3.0 * 40_000.0 / BANDWIDTH;
    let pooling_s = 4.0 * 40_000.0 * 10.0 / 1e10;
    let top_s = 100.0 * 1e6 / 1e12;
    let all = pooling_s + exchange_s + 3.0 * top_s + exchange_s + 2.0 * pooling_s;
    close(seconds(&found["results"]["unfused_s"]), all);
    close(seconds(&found["results"]["forward_exchange_s"]["unfused"]), exchange_s);
    // Pooling takes 160 us and the exchange 120 us: fused, only the last slice for others and the latency are not
    // hidden, and the own slice is pooled meanwhile.
    let slice_s = pooling_s / 4.0;
    let last_s = 3.0 * slice_s + LATENCY_S + 40_000.0 / BANDWIDTH;
    let fused = last_s.max(pooling_s) + 3.0 * top_s + exchange_s + 2.0 * pooling_s;
    close(seconds(&found["results"]["fused_s"]), fused);
    close(seconds(&found["results"]["gain"]), 1.0 - fused / all);
    let forward = run(dlrm(&[("training", json!(false))]));
    close(seconds(&forward["results"]["unfused_s"]), pooling_s + exchange_s + top_s);
}

#[test]
fn smaller_slices_overlap_more_of_an_exchange() {
    let slow = ("gather_bytes_per_s", json!(2e10));
    let time = |slices: u32| {
        let found = run(dlrm(&[slow.clone(), ("slices_per_peer", json!(slices))]));
        seconds(&found["results"]["fused_s"])
    };
    assert!(time(8) < time(2) && time(2) < time(1));
    let one = run(dlrm(&[("ranks", json!(1))]));
    close(seconds(&one["results"]["unfused_s"]), seconds(&one["results"]["fused_s"]));
}

fn query(changes: &[(&str, Value)]) -> Value {
    let mut job = json!({
        "front_ends": 1, "accelerators": 1, "queries": 1, "arrivals": "offline", "query_bytes": 3000,
        "answer_bytes": 500, "service_s": 20e-6,
    });
    for (name, value) in changes {
        job[*name] = value.clone();
    }
    let constants = json!({"set": {"message_latency_s": 0.0, "post_s": 1e-6}});
    let cluster = json!({"topology": STAR, "routing": "static", "constants": constants});
    json!({"scenario": "query", "cluster": cluster, "job": job})
}

#[test]
fn a_query_takes_its_transfer_its_service_and_its_response() {
    let found = run(query(&[]));
    let there_s = 1e-6 + LATENCY_S + 3000.0 / BANDWIDTH;
    let back_s = 1e-6 + LATENCY_S + 500.0 / BANDWIDTH;
    let latency = &found["results"]["latency"];
    close(seconds(&latency["p50_s"]), there_s + 20e-6 + back_s);
    close(seconds(&found["results"]["on_the_way"]["max_s"]), there_s);
    close(seconds(&found["results"]["latency_without_network"]["max_s"]), 20e-6);
    // Ten at once are served one after the other; the first has come with all others beside it.
    let ten = run(query(&[("queries", json!(10)), ("query_bytes", json!(0))]));
    close(seconds(&ten["time_s"]), 1e-6 + LATENCY_S + 10.0 * 20e-6 + back_s);
}

#[test]
fn one_slot_serves_one_query_at_a_time() {
    let round_s =
        1e-6 + LATENCY_S + 3000.0 / BANDWIDTH + 20e-6 + 1e-6 + LATENCY_S + 500.0 / BANDWIDTH;
    let found = run(query(&[("queries", json!(7)), ("slots", json!(1))]));
    close(seconds(&found["time_s"]), 7.0 * round_s);
    close(seconds(&found["results"]["waiting_for_a_slot"]["max_s"]), 6.0 * round_s);
}

#[test]
fn arrivals_depend_on_the_seed_alone() {
    let poisson = |seed: u64, policy: &str| {
        let mut spec = query(&[
            ("front_ends", json!(3)),
            ("accelerators", json!(4)),
            ("queries", json!(3000)),
            ("arrivals", json!("poisson")),
            ("rate_per_s", json!(150_000.0)),
            ("policy", json!(policy)),
        ]);
        spec["cluster"]["seed"] = json!(seed);
        run(spec)["results"].clone()
    };
    for policy in ["round-robin", "least-loaded", "random"] {
        assert_eq!(poisson(1, policy), poisson(1, policy));
        assert_ne!(poisson(1, policy), poisson(2, policy));
    }
    let p99 = |policy: &str| seconds(&poisson(5, policy)["latency"]["p99_s"]);
    assert!(p99("least-loaded") < p99("random"), "it looks before it asks");
    // The mean arrival distance is what was asked for.
    let rate = seconds(&poisson(9, "random")["throughput_without_network_per_s"]);
    assert!((rate / 150_000.0 - 1.0).abs() < 0.06, "{rate}");
}

fn moe(changes: &[(&str, Value)]) -> Value {
    let mut job = json!({
        "ranks": 8, "experts": 16, "top_k": 2, "tokens": 32, "hidden": 128, "rounds": 2,
    });
    for (name, value) in changes {
        job[*name] = value.clone();
    }
    let constants = json!({"set": {"message_latency_s": 2e-6, "post_s": 1e-7}});
    let cluster = json!({"topology": STAR, "routing": "static", "constants": constants});
    json!({"scenario": "moe", "cluster": cluster, "job": job})
}

#[test]
fn rows_kept_by_a_rank_use_no_link() {
    let alone = run(moe(&[("ranks", json!(1))]));
    assert_eq!(alone["time_s"], 0.0);
    assert_eq!(alone["flows"], 0);
    let costs = json!({"dispatch_start_s": 1e-6, "dispatch_end_s": 2e-6, "combine_start_s": 3e-6});
    let costly = run(moe(&[("ranks", json!(1)), ("costs", costs)]));
    close(seconds(&costly["time_s"]), 2.0 * 6e-6);
}

#[test]
fn rows_for_a_nic_are_posted_one_by_one() {
    // All 32 tokens on each of 8 ranks go to experts 14 and 15, on rank 7: one write with 32 rows, the private ones.
    let to_7 = json!({"kind": "trace", "layers": [[14, 15]]});
    let job = [("rounds", json!(1)), ("token_routing", to_7), ("private_rows", json!(32))];
    let outcome = |changes: &[(&str, Value)]| run(moe(&[&job[..], changes].concat()));
    let posted_in = |row_s: f64| ("costs", json!({"post_row_s": row_s}));
    let [plain, one, two] = [0.0, 1e-6, 2e-6].map(|row_s| outcome(&[posted_in(row_s)]));
    let dispatch_s = |outcome: &Value| seconds(&outcome["results"]["dispatch"]["max_s"]);
    close(dispatch_s(&two) - dispatch_s(&one), 32e-6);
    // Replies are contiguous: the round takes no longer than dispatch.
    close(seconds(&two["time_s"]) - seconds(&one["time_s"]), 32e-6);
    // The link into rank 7 takes rows from the seven others: a bound that does not depend on the model.
    let bytes = 7.0 * 32.0 * seconds(&plain["results"]["row_bytes"]);
    let bound_s = LATENCY_S + 2e-6 + bytes / BANDWIDTH;
    let found_s = dispatch_s(&plain);
    assert!(found_s >= bound_s && found_s < bound_s + 2e-6, "{found_s} s, at least {bound_s} s");
    // Within an NVLink domain no NIC posts.
    let nvlink = ("nvlink", json!({"ranks": 8, "bytes_per_s": 1e9}));
    let posted = outcome(&[nvlink.clone(), posted_in(1e-6)]);
    assert_eq!(outcome(&[nvlink])["time_s"], posted["time_s"]);
}

#[test]
fn a_late_rank_delays_all_others() {
    let mut spec = moe(&[("rounds", json!(1))]);
    let calm = seconds(&run(spec.clone())["time_s"]);
    spec["cluster"]["stragglers"] = json!([{"rank": 3, "late_s": 1e-3}]);
    let late = run(spec);
    assert!(seconds(&late["time_s"]) > 1e-3 && seconds(&late["time_s"]) < 1e-3 + 1.5 * calm);
    let dispatch = &late["results"]["dispatch"];
    assert!(seconds(&dispatch["p50_s"]) > 1e-3 && seconds(&dispatch["min_s"]) < 1.5 * calm);
}

#[test]
fn two_nics_of_half_the_speed_equal_one() {
    let one = run(moe(&[]));
    let mut spec = moe(&[("nics_per_rank", json!(2))]);
    spec["cluster"]["topology"] =
        json!("fat-tree:leaves=1,spines=1,hosts=16,gbps=4,latency_us=0.5");
    let two = run(spec);
    let ratio = seconds(&two["time_s"]) / seconds(&one["time_s"]);
    // Headers are too short to be cut, and take the first of them.
    assert!((ratio - 1.0).abs() < 0.06, "{ratio}");
}

#[test]
fn rounds_that_begin_together_end_in_order() {
    let incast = ("token_routing", json!({"kind": "incast"}));
    let together = |rounds: u32| {
        run(moe(&[("barrier", json!(true)), ("rounds", json!(rounds)), incast.clone()]))
    };
    // Equal rounds: three take three times as long as one.
    let (one, three) = (together(1), together(3));
    assert_eq!(three["results"]["dispatch"]["count"], 24);
    close(seconds(&three["time_s"]), 3.0 * seconds(&one["time_s"]));
}

#[test]
fn an_error_names_the_invalid_field() {
    for (spec, field) in [
        (dlrm(&[("ranks", json!(17))]), "endpoints"),
        (dlrm(&[("batch", json!(0))]), "batch"),
        (dlrm(&[("pooling", json!(-1.0))]), "pooling"),
        (dlrm(&[("flops_per_s", json!(0.0))]), "flops_per_s"),
        (dlrm(&[("batch", json!(u32::MAX)), ("dimension", json!(u32::MAX))]), "bytes for one peer"),
        (query(&[("queries", json!(0))]), "queries"),
        (query(&[("rate_per_s", json!(5.0))]), "rate_per_s"),
        (query(&[("front_ends", json!(16))]), "endpoints"),
        (query(&[("front_ends", json!(u32::MAX))]), "front_ends"),
        (query(&[("service_s", json!(-1.0))]), "service_s"),
        (moe(&[("ranks", json!(17))]), "endpoints"),
        (moe(&[("ranks", json!(0))]), "ranks"),
        (moe(&[("tokens", json!(0))]), "max_tokens"),
        (moe(&[("rounds", json!(65))]), "rounds"),
        (moe(&[("nics_per_rank", json!(3))]), "endpoints"),
        (moe(&[("nvlink", json!({"ranks": 0, "bytes_per_s": 1.0}))]), "nvlink.ranks"),
        (moe(&[("nvlink", json!({"ranks": 8, "bytes_per_s": 0.0}))]), "nvlink.bytes_per_s"),
        (moe(&[("token_routing", json!({"kind": "trace", "layers": [[1]]}))]), "layers"),
        (moe(&[("token_routing", json!({"kind": "trace", "layers": [[1, 99]]}))]), "99"),
        (moe(&[("token_routing", json!({"kind": "zipf", "exponent": -2.0}))]), "exponent"),
        (moe(&[("costs", json!({"route_s": -1.0}))]), "route_s"),
        (moe(&[("costs", json!({"post_row_s": -1e-9}))]), "post_row_s"),
        (moe(&[("speed", json!(1))]), "speed"),
        (moe(&[("tokens", json!(99_999_999))]), "tokens times top_k"),
    ] {
        let message = refused(spec);
        assert!(message.contains(field), "{message} does not name {field}");
    }
}

#[test]
fn progress_rises_and_a_run_can_be_cancelled() {
    let spec = moe(&[("ranks", json!(16)), ("tokens", json!(256)), ("rounds", json!(16))]);
    let mut shares = Vec::new();
    weft_predict::run(&spec.to_string(), &mut |share, _| {
        shares.push(share);
        true
    })
    .expect("the run ends");
    assert!(shares.len() > 2 && shares.is_sorted(), "{shares:?}");
    assert!(shares[0] < 0.5 && shares[shares.len() - 1] > 0.5, "{shares:?}");
    let cancelled = weft_predict::run(&spec.to_string(), &mut |share, _| share < 0.5);
    assert!(cancelled.expect_err("it is cancelled").to_string().contains("cancelled"));
}

#[test]
fn planning_of_moe_rounds_can_be_cancelled() {
    let spec = moe(&[("ranks", json!(16)), ("tokens", json!(4096)), ("rounds", json!(64))]);
    let mut plans = 0;
    let cancelled = weft_predict::run(&spec.to_string(), &mut |_, stage| {
        plans += u32::from(stage == "planning");
        plans < 3
    });
    assert!(cancelled.expect_err("it is cancelled").to_string().contains("cancelled"));
    assert_eq!(plans, 3);
}
