//! Path lookup benchmark, as JSON lines: `make bench-paths`.

use std::time::Instant;
use weft_topology::{BiGraph, EndpointId, Network, Router, Routing};

fn main() {
    let shape = BiGraph::new(256, 128);
    let start = Instant::now();
    let network = shape.network().expect("it is a network");
    let made_s = start.elapsed().as_secs_f64();
    println!(
        "{}",
        serde_json::json!({ "network": "bigraph of 65,536 endpoints", "made_s": made_s })
    );
    let map = shape.rank_map().expect("it has a rank map");
    let partners = |rank: u32, step: u32| (map[rank as usize], map[(rank ^ 1 << step) as usize]);
    let pairs: Vec<_> =
        (0..16).flat_map(|step| (0..65_536).map(move |rank| partners(rank, step))).collect();
    measure("bigraph of 65,536 endpoints", &network, Routing::Unique, &pairs);
    for (spec, hosts) in [("fat-tree:leaves=64,spines=64,hosts=64", 4096), ("fat-tree3:k=26", 4394)]
    {
        let network = Network::parse(spec).expect("it is a network");
        let pairs: Vec<_> = (0..1_000_000u64)
            .map(|n| (n * 0x9e37 % hosts, n * 0x85eb / 7 % hosts))
            .map(|(from, to)| (EndpointId(from as u32), EndpointId(to as u32)))
            .collect();
        for routing in [Routing::Static, Routing::Ecmp { seed: 1 }] {
            measure(spec, &network, routing, &pairs);
        }
    }
}

fn measure(name: &str, network: &Network, routing: Routing, pairs: &[(EndpointId, EndpointId)]) {
    let mut router = Router::new(network, routing).expect("it routes");
    let mut links = Vec::new();
    for pass in ["first", "second", "third"] {
        let start = Instant::now();
        for (flow, &(from, to)) in pairs.iter().enumerate() {
            router.path(from, to, flow as u64, &mut links).expect("there is a path");
        }
        let each = 1e9 * start.elapsed().as_secs_f64() / pairs.len() as f64;
        let routing = format!("{routing:?}");
        let line = serde_json::json!({
            "network": name, "routing": routing, "pass": pass, "ns_per_path": each.round(),
        });
        println!("{line}");
    }
}
