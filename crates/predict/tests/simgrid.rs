//! SimGrid's virtual times for all-reduces among 16 ranks with 1 MiB, for comparison without SimGrid.
//!
//! `crates/netsim/tests/simgrid.rs` describes where they come from. The compared cases have at most one write in flight
//! per connection: SimGrid sends several at the same time, the executor in order.

use serde_json::json;
use weft_predict::Scenario;

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
    let scenario: Scenario = serde_json::from_value(spec).unwrap();
    let time_s = scenario.run(&mut |_, _| true).unwrap().time_s;
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
