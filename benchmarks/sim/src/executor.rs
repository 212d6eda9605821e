//! Through the executor of schedules.

use crate::{Case, Failure, Found};
use serde_json::{Value, json};
use weft_predict::Spec;
use weft_topology::Network;

/// Runs a case as `weft sim` would.
pub fn run(case: &Case) -> Result<Found, Failure> {
    let placement = match case.shuffle {
        Some(_) => {
            let endpoints = Network::parse(&case.topology)?.endpoints();
            json!({ "endpoints": case.shuffled(endpoints) })
        }
        None => json!("auto"),
    };
    let spec = json!({
        "scenario": "collective",
        "cluster": {
            "topology": case.topology,
            "routing": case.routing,
            "seed": case.seed,
            "constants": { "set": { "message_latency_s": 0.0 } },
        },
        "job": {
            "algorithm": case.algorithm,
            "bytes": case.bytes,
            "ranks": case.ranks,
            "placement": placement,
        },
    });
    let spec: Spec = serde_json::from_value::<Value>(spec).and_then(serde_json::from_value)?;
    let outcome = weft_predict::run_spec(&spec, &mut |_, _| true)?;
    Ok(Found { time_s: outcome.time_s, flows: outcome.flows, max_link_load: outcome.max_link_load })
}
