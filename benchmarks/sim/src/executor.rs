//! Schedule executor: a case as a scenario for `weft-predict`.

use crate::{Case, Failure, Found};
use serde_json::json;
use weft_predict::collective::CollectiveWorkload;
use weft_predict::{CpuTime, Scenario, World};
use weft_topology::Network;

/// Runs a case as `weft sim` does.
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
    let Scenario::Collective(spec) = serde_json::from_value(spec)? else {
        return Err("expected a collective".into());
    };
    let setup = CpuTime::start();
    let mut world = World::new(&spec.cluster)?;
    let setup_cpu_s = setup.seconds();
    let cpu = CpuTime::start();
    let mut workload = CollectiveWorkload::new(&mut world, &spec.job, &[], 0)?;
    let time_s = world.run(&mut [&mut workload], &mut |_, _| true)?;
    let (cpu_s, flows, max_link_load) = (cpu.seconds(), world.flows(), world.max_link_load());
    Ok(Found { time_s, setup_cpu_s, cpu_s, flows, max_link_load })
}
