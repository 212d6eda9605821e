//! Properties for all networks, and for arbitrary text as input.

mod common;

use common::path;
use proptest::prelude::*;
use weft_topology::{EndpointId, LinkSpec, Network, NetworkBuilder, NodeKind, Router, Routing};

const ROUTINGS: [Routing; 4] =
    [Routing::Ecmp { seed: 1 }, Routing::Ecmp { seed: 2 }, Routing::Static, Routing::Adaptive];

/// The example in `docs/topology.md`.
const TEN_LINES: &str = include_str!("data/ten-lines.json");

fn shape() -> impl Strategy<Value = String> {
    prop_oneof![
        (1u32..6, 1u32..4, 1u32..3, 1u32..3).prop_map(|(half, endpoints, trunks, gpus)| format!(
            "bigraph:switches={},endpoints={endpoints},trunks={trunks},gpus_per_nic={gpus}",
            2 * half
        )),
        (1u32..6, 1u32..5, 1u32..4, 1u32..3).prop_map(|(leaves, spines, hosts, trunks)| format!(
            "fat-tree:leaves={leaves},spines={spines},hosts={hosts},trunks={trunks},gbps=0.3"
        )),
        (1u32..4, 1u32..4, 1u32..3, 1u32..3, 1u32..3).prop_map(
            |(pods, leaves, aggs, plane, hosts)| format!(
                "fat-tree3:pods={pods},leaves={leaves},aggs={aggs},cores={},hosts={hosts}",
                aggs * plane
            )
        ),
        (1u32..5, 1u32..4, 1u32..3, 1u32..3).prop_map(|(hosts, gpus, per_leaf, spines)| format!(
            "rail:hosts={hosts},gpus={gpus},hosts_per_leaf={per_leaf},spines={spines}"
        )),
        (1u32..6, 1u32..5).prop_map(|(hosts, gpus)| format!("rail:hosts={hosts},gpus={gpus}")),
    ]
}

/// Connected network with switches, random links, some one-way, and endpoints, some of which forward and some have two
/// switches.
fn random() -> impl Strategy<Value = Network> {
    let switches = 1usize..8;
    let links = proptest::collection::vec((0usize..8, 0usize..8, any::<bool>(), 1u32..1000), 0..20);
    let endpoints = proptest::collection::vec((0usize..8, 0usize..8, any::<bool>()), 1..12);
    (switches, links, endpoints).prop_map(|(switches, links, endpoints)| {
        let mut network = NetworkBuilder::new("random");
        let nodes: Vec<_> =
            (0..switches).map(|number| network.switch(format!("s{number}")).unwrap()).collect();
        let spec = LinkSpec::new(100.0, 0.5);
        for pair in nodes.windows(2) {
            network.cable(pair[0], pair[1], spec).unwrap();
        }
        for (one, other, oneway, gbps) in links {
            let (one, other) = (nodes[one % switches], nodes[other % switches]);
            let spec = LinkSpec::new(f64::from(gbps) / 7.0, f64::from(gbps) / 3.0);
            if one != other && oneway {
                network.link(one, other, spec).unwrap();
            } else if one != other {
                network.cable(one, other, spec).unwrap();
            }
        }
        for (number, (one, other, forwards)) in endpoints.into_iter().enumerate() {
            let name = format!("e{number}");
            let endpoint = if forwards {
                network.forwarding_endpoint(name, Some("host")).unwrap()
            } else {
                network.endpoint(name, None).unwrap()
            };
            let (one, other) = (nodes[one % switches], nodes[other % switches]);
            network.cable(endpoint, one, spec).unwrap();
            if one != other {
                network.cable(other, endpoint, spec).unwrap();
            }
        }
        network.finish().unwrap()
    })
}

/// Number of links from each node to an endpoint over forwarding nodes, by relaxation to a fixed point.
fn distances(network: &Network, to: EndpointId, forwards: &dyn Fn(u32) -> bool) -> Vec<u32> {
    let mut distances = vec![u32::MAX; network.nodes() as usize];
    let target = network.endpoint(to);
    distances[target.0 as usize] = 0;
    loop {
        let mut changed = false;
        for link in network.links() {
            let there = distances[link.to.0 as usize];
            let usable = there != u32::MAX && (link.to == target || forwards(link.to.0));
            if usable && there + 1 < distances[link.from.0 as usize] {
                distances[link.from.0 as usize] = there + 1;
                changed = true;
            }
        }
        if !changed {
            return distances;
        }
    }
}

fn check_paths(network: &Network, forwards: &dyn Fn(u32) -> bool, flow: u64) {
    for routing in ROUTINGS {
        let mut router = Router::new(network, routing).unwrap();
        let mut again = Router::new(network, routing).unwrap();
        let mut unique = Router::new(network, Routing::Unique).unwrap();
        for to in 0..network.endpoints() {
            let distances = distances(network, EndpointId(to), forwards);
            for from in 0..network.endpoints() {
                let links = path(&mut router, from, to, flow);
                let start = network.endpoint(EndpointId(from));
                let mut at = start;
                for &link in &links {
                    assert_eq!(network.link(link).from, at, "connected");
                    at = network.link(link).to;
                }
                assert_eq!(at, network.endpoint(EndpointId(to)));
                assert_eq!(links.len() as u32, distances[start.0 as usize], "shortest");
                assert_eq!(path(&mut again, from, to, flow), links, "deterministic");
                let (ways, length) =
                    router.shortest_paths(EndpointId(from), EndpointId(to)).unwrap();
                assert_eq!(length as usize, links.len());
                let mut found = Vec::new();
                let only = unique.path(EndpointId(from), EndpointId(to), flow, &mut found);
                assert_eq!(only.is_ok(), ways == 1);
                assert!(only.is_err() || found == links);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn paths_of_builders_are_connected_shortest_and_deterministic(spec in shape(), flow: u64) {
        let network = Network::parse(&spec).unwrap();
        let rail = spec.starts_with("rail") && !spec.contains("spines");
        let forwards = |node| rail || network.kind(weft_topology::NodeId(node)) != NodeKind::Endpoint;
        check_paths(&network, &forwards, flow);
    }

    #[test]
    fn paths_of_any_network_are_too(network in random(), flow: u64) {
        let json = network.to_json();
        let forwards = |node| {
            let id = weft_topology::NodeId(node);
            let name = format!("\"{}\", \"host\": \"host\", \"forwards\": true", network.node_name(id));
            network.kind(id) != NodeKind::Endpoint || json.contains(&name)
        };
        check_paths(&network, &forwards, flow);
    }

    #[test]
    fn json_there_and_back_is_the_same_network(
        network in prop_oneof![random(), shape().prop_map(|spec| Network::parse(&spec).unwrap())],
        flow: u64,
    ) {
        let json = network.to_json();
        let back = Network::from_json(&json).unwrap();
        prop_assert_eq!(back.to_json(), json);
        prop_assert_eq!(back.links().len(), network.links().len());
        for (one, other) in network.links().iter().zip(back.links()) {
            prop_assert_eq!(one.bandwidth.to_bits(), other.bandwidth.to_bits());
            prop_assert_eq!(one.latency.to_bits(), other.latency.to_bits());
            prop_assert_eq!(one.reverse, other.reverse);
        }
        for routing in ROUTINGS {
            let mut one = Router::new(&network, routing).unwrap();
            let mut other = Router::new(&back, routing).unwrap();
            for to in 0..network.endpoints() {
                prop_assert_eq!(path(&mut one, 0, to, flow), path(&mut other, 0, to, flow));
            }
        }
    }

    #[test]
    fn no_text_makes_the_parsers_panic(text in ".{0,200}", bytes: Vec<u8>) {
        let _ = Network::from_json(&text);
        let _ = Network::parse(&text);
        let _ = Network::parse(&format!("bigraph:{text}"));
        let _ = Network::from_json(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn no_change_to_good_json_makes_the_parser_panic(
        place in 0usize..TEN_LINES.len(),
        length in 0usize..12,
        with in prop_oneof![
            Just(""), Just("\""), Just("{"), Just("]"), Just("[0-9999999]"), Just("-1"), Just("null"),
            Just("1e308"), Just(","), Just("leaf0"), Just("\"gpu0\""), Just(":"), Just("[]"),
        ],
    ) {
        let mut text = TEN_LINES.to_owned();
        text.replace_range(place..(place + length).min(text.len()), with);
        let _ = Network::from_json(&text);
    }
}
