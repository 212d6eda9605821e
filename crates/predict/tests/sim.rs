//! The network model under the fabric's simulator: its times are the engine's, whatever the clock says;
//! and whatever random worlds survive over a simple model they survive over this one.

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
#[path = "../../fabric/tests/common/fate.rs"]
mod fate;
#[path = "../../moe/tests/sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;
#[path = "../../fabric/tests/common/seeds.rs"]
mod seeds;
#[path = "../../fabric/tests/sim/traffic.rs"]
mod traffic;

use weft_fabric::providers::sim::Random;
use weft_predict::{MessageCosts, SimulatedNetwork};
use weft_topology::{EndpointId, Network, Router, Routing};

/// A model for so many ranks, on a network that the seed chooses.
pub fn any_network(random: &mut Random, ranks: u32) -> SimulatedNetwork {
    let (network, routing) = match random.below(4) {
        0 => ("bigraph:switches=4,endpoints=2,gbps=8,latency_us=0.5", Routing::Static),
        1 => {
            let seed = random.word();
            ("fat-tree:leaves=4,spines=2,hosts=2,gbps=8,latency_us=0.5", Routing::Ecmp { seed })
        }
        2 => ("fat-tree:leaves=4,spines=2,hosts=2,gbps=8,latency_us=0.5", Routing::Static),
        _ => ("fat-tree:leaves=2,spines=1,hosts=4,gbps=1,latency_us=2", Routing::Static),
    };
    let network = Network::parse(network).expect("a network of the tests is possible");
    let mut router = Router::new(&network, routing).expect("and has routes");
    let costs = match random.below(3) {
        0 => MessageCosts::default(),
        _ => MessageCosts { post_s: 0.2e-6, latency_s: 1e-6 },
    };
    // Two ranks of one endpoint, now and then.
    let shared = random.chance(0.2);
    let place = |rank: u32| EndpointId(if shared { rank / 2 } else { rank });
    let places: Vec<EndpointId> = (0..ranks).map(place).collect();
    SimulatedNetwork::new(&network, &mut router, &places, costs).expect("all ranks are reached")
}
