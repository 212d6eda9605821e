//! SimGrid's virtual times of all-reduces of 16 ranks and 1 MiB, for comparison without SimGrid.
//!
//! `crates/netsim/tests/simgrid.rs` says how they were made. Only cases in which no connection has two
//! writes under way at a time are compared: SimGrid sends such at the same time, the executor in order.

use serde_json::{Value, json};
use weft_predict::{Spec, run_spec};

#[track_caller]
fn agrees(algorithm: &str, simgrid_s: f64) {
    let spec = json!({
        "scenario": "collective",
        "cluster": {
            "topology": "fat-tree:leaves=4,spines=2,hosts=4,gbps=100,latency_us=0.5",
            "routing": "static",
            "constants": { "set": { "message_latency_s": 0.0 } },
        },
        "job": { "algorithm": algorithm, "bytes": 1 << 20, "ranks": 16 },
    });
    let spec: Spec =
        serde_json::from_value::<Value>(spec).and_then(serde_json::from_value).unwrap();
    let time_s = run_spec(&spec, &mut |_, _| true).unwrap().time_s;
    assert!((time_s / simgrid_s - 1.0).abs() < 1e-6, "{time_s} s, SimGrid has {simgrid_s} s");
}

#[test]
fn a_ring_takes_as_long_as_in_simgrid() {
    agrees("ring", 0.000_195_286_4);
}

#[test]
fn halving_and_doubling_take_as_long_as_in_simgrid() {
    agrees("hd", 0.000_200_743_68);
}
