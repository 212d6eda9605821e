//! Network model for the fabric's simulator: times are the engine's at any clock origin, and random worlds from the
//! fabric and MoE suites end correctly over it.

#[path = "sim/moe.rs"]
mod moe;
#[path = "sim/times.rs"]
mod times;
#[path = "sim/timing.rs"]
mod timing;
#[path = "sim/worlds.rs"]
mod worlds;

#[path = "../../moe/tests/common/mod.rs"]
mod common;
#[path = "../../moe/tests/sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;
#[path = "../../fabric/tests/sim/traffic.rs"]
mod traffic;

use weft_fabric::random::SplitMix64;
use weft_predict::{MessageCosts, SimulatedNetwork};
use weft_topology::{EndpointId, Network, Router, Routing};

/// Model for `ranks` ranks on a random network.
pub fn any_network(random: &mut SplitMix64, ranks: u32) -> SimulatedNetwork {
    let (network, routing) = match random.below(4) {
        0 => ("bigraph:switches=4,endpoints=2,gbps=8,latency_us=0.5", Routing::Static),
        1 => {
            let seed = random.bits();
            ("fat-tree:leaves=4,spines=2,hosts=2,gbps=8,latency_us=0.5", Routing::Ecmp { seed })
        }
        2 => ("fat-tree:leaves=4,spines=2,hosts=2,gbps=8,latency_us=0.5", Routing::Static),
        _ => ("fat-tree:leaves=2,spines=1,hosts=4,gbps=1,latency_us=2", Routing::Static),
    };
    let network = Network::parse(network).expect("the network is valid");
    let mut router = Router::new(&network, routing).expect("the network has routes");
    let costs = match random.below(3) {
        0 => MessageCosts::default(),
        _ => MessageCosts { post_s: 0.2e-6, latency_s: 1e-6 },
    };
    // One time in five, two ranks share an endpoint.
    let shared = random.chance(0.2);
    let place = |rank: u32| EndpointId(if shared { rank / 2 } else { rank });
    let places: Vec<EndpointId> = (0..ranks).map(place).collect();
    SimulatedNetwork::new(&network, &mut router, &places, costs).expect("all ranks are reachable")
}
