//! Training iterations, concurrent jobs, and traces.

use serde_json::{Value, json};

fn run(spec: Value) -> Value {
    let outcome = weft_predict::run(&spec.to_string(), &mut |_, _| true);
    serde_json::from_str(&outcome.unwrap_or_else(|error| panic!("{spec}: {error}"))).unwrap()
}

fn seconds(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

fn assert_close(seen: f64, expected: f64, what: &str) {
    assert!((seen / expected - 1.0).abs() < 1e-6, "{what}: {seen} s, expected {expected} s");
}

/// Two layers with 10 ms forward and 20 ms back, 12.5 MB gradients each: 1.75 ms on a ring of four.
fn train(overlap: bool, bucket_bytes: u64) -> Value {
    let layer = |name| json!({"name": name, "forward_s": 0.01, "backward_s": 0.02, "gradient_bytes": 12_500_000});
    json!({
        "scenario": "train",
        "cluster": {
            "topology": "fat-tree:leaves=1,spines=1,hosts=4,latency_us=0",
            "constants": {"set": {"message_latency_s": 0.0}},
        },
        "job": {
            "model": {"name": "two layers", "layers": [layer("a"), layer("b")], "optimizer_s": 0.001},
            "reduction": {"algorithm": "ring", "bytes": 0},
            "bucket_bytes": bucket_bytes,
            "overlap": overlap,
            "iterations": 3,
        },
    })
}

/// 12.5 MB by a ring of four at 12.5 GB/s.
const REDUCTION: f64 = 2.0 * 0.75 * 0.001;

#[test]
fn without_overlap_an_iteration_is_compute_and_then_communication() {
    let results = &run(train(false, 1))["results"];
    assert_close(seconds(&results["iteration_s"]), 0.061 + 2.0 * REDUCTION, "iteration");
    assert_close(seconds(&results["communication_s"]), 2.0 * REDUCTION, "communication");
    assert_close(seconds(&results["exposed_communication_s"]), 2.0 * REDUCTION, "exposed");
}

#[test]
fn with_overlap_the_last_bucket_alone_is_exposed() {
    let results = &run(train(true, 1))["results"];
    assert_close(seconds(&results["iteration_s"]), 0.061 + REDUCTION, "iteration");
    assert_close(seconds(&results["exposed_communication_s"]), REDUCTION, "exposed");
    // One bucket with both layers leaves at the end.
    let results = &run(train(true, 1 << 30))["results"];
    assert_close(seconds(&results["iteration_s"]), 0.061 + 2.0 * REDUCTION, "one bucket");
}

#[test]
fn a_slow_rank_sets_the_pace() {
    let mut spec = train(false, 1);
    spec["cluster"]["stragglers"] = json!([{"rank": 2, "slow": 1.5}]);
    let results = &run(spec)["results"];
    assert_close(seconds(&results["iteration_s"]), 0.061 * 1.5 + 2.0 * REDUCTION, "iteration");
}

#[test]
fn jobs_share_links() {
    let job = |endpoints: [u32; 2]| {
        json!({"collective": {
            "algorithm": "ring", "bytes": 12_500_000, "ranks": 2, "rounds": 4,
            "placement": {"endpoints": endpoints},
        }})
    };
    let mixture = |jobs: Value| {
        run(json!({
            "scenario": "mixture",
            "cluster": {
                "topology": "fat-tree:leaves=2,spines=1,hosts=2,latency_us=0",
                "constants": {"set": {"message_latency_s": 0.0}},
            },
            "jobs": jobs,
        }))
    };
    let alone = mixture(json!([job([0, 2])]));
    assert_close(seconds(&alone["time_s"]), 4.0 * 0.001, "alone");
    // Both jobs cross the one spine, each way.
    let both = mixture(json!([job([0, 2]), job([1, 3])]));
    assert_close(seconds(&both["time_s"]), 8.0 * 0.001, "both");
    assert_eq!(both["max_link_load"], 2);
    // On separate leaves they do not meet.
    let apart = mixture(json!([job([0, 1]), job([2, 3])]));
    assert_close(seconds(&apart["time_s"]), 4.0 * 0.001, "apart");
}

#[test]
fn jobs_at_one_nic_post_in_the_order_of_time() {
    // The second job's long reductions run ahead of the world's clock; the first job's posts must not wait.
    let spec = json!({
        "scenario": "mixture",
        "cluster": {
            "topology": "fat-tree:leaves=1,spines=1,hosts=2,gbps=100",
            "constants": {"set": {"post_s": 1e-6, "reduce_bytes_per_s": 1e9}},
        },
        "jobs": [
            {"collective": {"algorithm": "ring", "bytes": 64, "rounds": 3}},
            {"collective": {"algorithm": "ring", "bytes": 10_000_000}},
        ],
    });
    let outcome = run(spec);
    let first = seconds(&outcome["results"]["jobs"][0]["time_s"]);
    // While the other job's five megabytes move, these few bytes have half the link: they do not notice.
    assert!(first < 3.0 * 2.0 * 6e-6, "{first}");
}

#[test]
fn a_trace_has_compute_collectives_and_messages() {
    let mut spec = train(true, 1);
    spec["trace"] = json!(10_000);
    let trace = &run(spec)["trace"];
    let events = trace["traceEvents"].as_array().unwrap();
    let has = |row: &str| events.iter().any(|event| event["cat"] == row);
    assert!(has("compute") && has("collective") && has("network"));
    let bytes: u64 = events
        .iter()
        .filter(|event| event["cat"] == "network")
        .map(|event| event["args"]["bytes"].as_u64().unwrap())
        .sum();
    // Three iterations with 25 MB each; each of four ranks sends three quarters twice.
    assert_eq!(bytes, 3 * 25_000_000 * 6);
}

#[test]
fn invalid_models_are_rejected() {
    for (path, value) in [
        ("/job/iterations", json!(0)),
        ("/job/iterations", json!(1_000_000_000)),
        ("/job/model/layers", json!([])),
        ("/job/model/layers/0/forward_s", json!(-1.0)),
        ("/job/model/layers/1/gradient_bytes", json!(1u64 << 60)),
        ("/job/model/optimizer_s", json!(-0.5)),
        ("/job/reduction/algorithm", json!("magic")),
        ("/job/reduction/ranks", json!(99)),
    ] {
        let mut spec = train(true, 1);
        let (parent, field) = path.rsplit_once('/').unwrap();
        spec.pointer_mut(parent).unwrap()[field] = value;
        let error = weft_predict::run(&spec.to_string(), &mut |_, _| true).unwrap_err();
        assert!(error.to_string().len() > 20, "{path}: {error}");
    }
}
