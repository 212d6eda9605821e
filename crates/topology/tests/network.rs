//! Networks and paths, as they are used from outside.

use proptest::prelude::*;
use weft_topology::{
    BiGraph, Description, EndpointId, LinkId, LinkSpec, Network, NetworkBuilder, NodeKind, Router,
    Routing,
};

const ROUTINGS: [Routing; 4] =
    [Routing::Ecmp { seed: 1 }, Routing::Ecmp { seed: 2 }, Routing::Static, Routing::Adaptive];

fn names(network: &Network, links: &[LinkId]) -> Vec<String> {
    links.iter().map(|&link| network.link_name(link)).collect()
}

fn path(router: &mut Router, from: u32, to: u32, flow: u64) -> Vec<LinkId> {
    let mut links = Vec::new();
    router.path(EndpointId(from), EndpointId(to), flow, &mut links).unwrap();
    links
}

#[test]
fn the_only_path_of_a_bigraph_crosses_the_halves() {
    let network = Network::parse("bigraph:switches=8,endpoints=2").unwrap();
    assert_eq!(network.endpoints(), 16);
    assert_eq!(network.links().len(), 2 * (16 + 16));
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let links = path(&mut router, 0, 8 + 2 * 3 + 1, 0);
    assert_eq!(names(&network, &links), ["U0.0->U0", "U0->L3", "L3->L3.1"]);
    assert_eq!(names(&network, &path(&mut router, 0, 1, 0)), ["U0.0->U0", "U0->U0.1"]);
    assert!(path(&mut router, 5, 5, 0).is_empty());
    let error = router.path(EndpointId(0), EndpointId(2), 0, &mut Vec::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "routing is unique, but from \"U0.0\" to \"U1.0\" there are 4 shortest paths from \"U0\" on, \
         by \"U0->L0\" and \"U0->L1\" among others"
    );
    assert_eq!(router.shortest_paths(EndpointId(0), EndpointId(2)).unwrap(), (4, 4));
}

#[test]
fn static_routing_on_a_fat_tree_goes_up_by_the_destinations_digits() {
    let network = Network::parse("fat-tree:leaves=4,spines=2,hosts=2").unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    for to in 2..8 {
        let links = path(&mut router, 0, to, 0);
        assert_eq!(network.link_name(links[1]), format!("leaf0->spine{}", to % 2));
    }
    let network = Network::parse("fat-tree3:k=4").unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    for to in 4..16 {
        let links = path(&mut router, 0, to, 0);
        assert_eq!(network.link_name(links[1]), format!("pod0.leaf0->pod0.agg{}", to % 2));
        let core = to % 2 * 2 + to / 2 % 2;
        assert_eq!(network.link_name(links[2]), format!("pod0.agg{}->core{core}", to % 2));
        assert_eq!(links.len(), 6);
    }
}

#[test]
fn hashes_depend_on_flow_seed_and_switch_and_spread_evenly() {
    let network = Network::parse("fat-tree:leaves=2,spines=8,hosts=1").unwrap();
    let mut counts = std::collections::BTreeMap::new();
    let mut router = Router::new(&network, Routing::Ecmp { seed: 3 }).unwrap();
    for flow in 0..8000 {
        *counts.entry(path(&mut router, 0, 1, flow)[1]).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 8);
    assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    let mut other = Router::new(&network, Routing::Ecmp { seed: 4 }).unwrap();
    let same =
        (0..8000).filter(|&flow| path(&mut router, 0, 1, flow) == path(&mut other, 0, 1, flow));
    assert!((850..1150).contains(&same.count()));
}

#[test]
fn adaptive_routing_takes_the_least_loaded_link_and_else_the_static_one() {
    let network = Network::parse("fat-tree:leaves=2,spines=4,hosts=4").unwrap();
    let mut router = Router::new(&network, Routing::Adaptive).unwrap();
    let mut loads = vec![0.0; network.links().len()];
    let mut links = Vec::new();
    let mut spines = Vec::new();
    for flow in 0..8 {
        let (from, to) = (EndpointId(flow % 4), EndpointId(4 + flow % 4));
        router.adaptive_path(from, to, |link| loads[link.0 as usize], &mut links).unwrap();
        links.iter().for_each(|link| loads[link.0 as usize] += 1.0);
        spines.push(network.link_name(links[1]));
    }
    spines.sort();
    spines.dedup();
    assert_eq!(spines.len(), 4);
    let worst = loads.iter().copied().fold(0.0, f64::max);
    assert_eq!(worst, 2.0);
    assert_eq!(path(&mut router, 0, 5, 0), {
        let mut fixed = Router::new(&network, Routing::Static).unwrap();
        path(&mut fixed, 0, 5, 0)
    });
}

#[test]
fn a_link_taken_out_is_avoided_until_it_is_put_back() {
    let network = Network::parse("bigraph:switches=4,endpoints=1").unwrap();
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let before = path(&mut router, 0, 2, 0);
    router.take_out(before[1]).unwrap();
    assert_eq!(
        names(&network, &path(&mut router, 0, 2, 0)),
        ["U0.0->U0", "U0->L1", "L1->U1", "U1->L0", "L0->L0.0"]
    );
    router.take_out(before[0]).unwrap();
    let error = router.path(EndpointId(0), EndpointId(2), 0, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "no path leads from \"U0.0\" to \"L0.0\"");
    router.put_back(before[0]).unwrap();
    router.put_back(before[1]).unwrap();
    assert_eq!(path(&mut router, 0, 2, 0), before);
}

#[test]
fn rails_meet_inside_hosts_or_in_spines() {
    let network = Network::parse("rail:hosts=4,gpus=2").unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let links = path(&mut router, 0, 2, 0);
    assert_eq!(names(&network, &links), ["host0.gpu0->rail0", "rail0->host1.gpu0"]);
    assert_eq!(path(&mut router, 0, 3, 0).len(), 4);
    let inside = names(&network, &path(&mut router, 0, 1, 0));
    assert_eq!(inside.len(), 2);
    let network = Network::parse("rail:hosts=4,gpus=2,hosts_per_leaf=2,spines=2").unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let links = names(&network, &path(&mut router, 0, 7, 0));
    assert_eq!(links.len(), 4);
    assert!(links[1].starts_with("rail0.leaf0->spine"), "{links:?}");
    assert_eq!(network.hosts().len(), 4);
    assert_eq!(network.hosts()[1], ("host1", vec![EndpointId(2), EndpointId(3)]));
}

#[test]
fn gpus_that_share_a_nic_share_its_link() {
    let network = Network::parse("bigraph:switches=4,endpoints=1,gpus_per_nic=4").unwrap();
    assert_eq!(network.endpoints(), 16);
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let links = path(&mut router, 1, 9, 0);
    assert_eq!(
        names(&network, &links),
        ["U0.0.gpu1->U0.0", "U0.0->U0", "U0->L0", "L0->L0.0", "L0.0->L0.0.gpu1"]
    );
    assert_eq!(network.kind(network.find("U0.0").unwrap()), NodeKind::Host);
    let Description::BiGraph(shape) =
        Description::parse("bigraph:switches=4,endpoints=1,gpus_per_nic=4").unwrap()
    else {
        panic!("it is a BiGraph")
    };
    assert!(shape.rank_map().unwrap_err().to_string().contains("4 GPUs share each NIC"));
}

#[test]
fn hosts_with_several_nics_have_consecutive_ranks() {
    let shape = BiGraph { nics: 4, ..BiGraph::new(8, 4) };
    let network = shape.network().unwrap();
    for (rank, endpoint) in shape.rank_map().unwrap().into_iter().enumerate() {
        assert_eq!(network.host(endpoint), format!("host{}", rank / 4));
    }
    assert!(BiGraph { nics: 3, ..shape.clone() }.network().is_err());
    assert!(BiGraph { nics: 4, ..BiGraph::new(6, 4) }.network().is_err());
}

#[test]
fn large_networks_are_made_and_routed() {
    let network = Network::parse("bigraph:switches=512,endpoints=128").unwrap();
    assert_eq!(network.endpoints(), 65_536);
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    assert_eq!(path(&mut router, 0, 65_535, 0).len(), 3);
    let network = Network::parse("fat-tree3:k=26").unwrap();
    assert_eq!(network.endpoints(), 4394);
    let mut router = Router::new(&network, Routing::Ecmp { seed: 0 }).unwrap();
    assert_eq!(path(&mut router, 0, 4393, 0).len(), 6);
}

const TEN_LINES: &str = r#"{
  "name": "two racks",
  "default": {"gbps": 200, "latency_us": 0.6},
  "switches": ["leaf[0-1]", "spine[0-1]"],
  "endpoints": [{"name": "gpu[0-3]", "host": "a"}, "gpu[4-7]"],
  "links": [
    ["gpu[0-3]", "leaf0"], ["gpu[4-7]", "leaf1"],
    {"from": "leaf[0-1]", "to": "spine[0-1]", "gbps": 400, "count": 2}
  ]
}"#;

#[test]
fn a_cluster_in_ten_lines_of_json() {
    let network = Network::from_json(TEN_LINES).unwrap();
    assert_eq!(network.endpoints(), 8);
    assert_eq!(network.links().len(), 2 * (8 + 8));
    assert_eq!(network.links()[0].bandwidth, 25e9);
    assert_eq!(network.host(EndpointId(2)), "a");
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let links = path(&mut router, 0, 7, 0);
    assert_eq!(network.link_name(links[1]), "leaf0->spine1#2");
}

#[test]
fn explicit_routes_are_followed_and_a_circle_is_named() {
    let with = |routes: &str| {
        let text =
            TEN_LINES.replacen("\"links\"", &format!("\"routes\": [{routes}],\n\"links\""), 1);
        Router::new(&Network::from_json(&text).unwrap(), Routing::Static)
    };
    let by = |at: &str, to: &str, via: &str| {
        format!(r#"{{"at": "{at}", "to": "{to}", "via": "{via}"}}"#)
    };
    let mut router = with(&by("leaf0", "gpu7", "spine0")).unwrap();
    let links = path(&mut router, 0, 7, 0);
    assert_eq!(router.network().link_name(links[1]), "leaf0->spine0");
    let circle = format!("{}, {}", by("leaf0", "gpu7", "spine0"), by("spine0", "gpu7", "leaf0"));
    assert_eq!(
        with(&circle).unwrap_err().to_string(),
        "the routes to \"gpu7\" lead in a circle: leaf0 -> spine0 -> leaf0"
    );
    // Everything else at leaf0 goes by spine1, and what is for its own endpoints comes back to it.
    let error = with(&by("leaf0", "*", "spine1")).unwrap_err().to_string();
    assert!(error.contains("lead in a circle: leaf0 -> spine1 -> leaf0"), "{error}");
}

#[test]
fn errors_name_the_place() {
    for (change, into, said) in [
        ("gbps\": 400", "gbps\": 0", "links[2]: bandwidth is 0; it must be a finite number above"),
        ("gbps\": 400", "gbps\": -4", "links[2]: bandwidth is -500000000"),
        ("gbps\": 400", "gbps\": 1e999", "line 8, column 59: number out of range"),
        ("0.6", "-1", "default: latency is -0.000001; it must be a finite number of seconds"),
        ("\"gpu[4-7]\"]", "\"gpu[3-7]\"]", "endpoints[1]: the name \"gpu3\" is given twice"),
        ("\"spine[0-1]\"]", "\"spine[0-1]\", \"leaf1\"]", "switches[2]: the name \"leaf1\" is"),
        (
            "\"leaf0\"]",
            "\"laef0\"]",
            "links[0].to: there is no node \"laef0\"; did you mean \"leaf0\"",
        ),
        ("\"leaf0\"]", "\"gpu2\"]", "links[0]: a link leads from \"gpu2\" to itself"),
        ("[\"gpu[4-7]\", \"leaf1\"],", "", "no path leads from \"gpu0\" to \"gpu4\""),
        ("\"count\": 2", "\"count\": 0", "links[2].count is 0; it must be at least 1"),
        ("\"count\": 2", "\"count\": 4000000000", "directed links: 32000000016 needed, 4194304 "),
        ("\"count\": 2", "\"bandwith\": 2", "a link is two names, or an object with from and to"),
        ("\"name\"", "\"nmae\"", "line 2, column 8: unknown field `nmae`"),
        (
            "gpu[0-3]\", \"host",
            "gpu[0-3000000]\", \"host",
            "names: 3000001 needed, 1048576 allowed",
        ),
        ("\"gpu[4-7]\"]", "\"gpu[4-7\"]", "endpoints[1]: \"gpu[4-7\" cannot be a name: a bracket"),
        (
            "\"latency_us\"",
            "\"latency_s\": 1, \"latency_us\"",
            "default: latency_us and latency_s are",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"gpu0\", \"gpu0\"], \"links\"",
            "ranks 0 and 1 are both at endpoint 0",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"leaf0\"], \"links\"",
            "rank_map[0]: \"leaf0\" is not an endpoint",
        ),
        (
            "\"links\"",
            "\"rank_map\": [\"gpu[0-7]\", \"gpu0\"], \"links\"",
            "ranks of the rank map: 9 needed, 8 allowed",
        ),
        ("\"links\"", "\"bigraph\": {}, \"links\"", "bigraph: it makes all nodes and links"),
        ("]\n}", "]\n", "line 10, column 0: EOF"),
    ] {
        let text = TEN_LINES.replacen(change, into, 1);
        assert_ne!(text, TEN_LINES, "{change}");
        let error = Network::from_json(&text).unwrap_err().to_string();
        assert!(error.contains(said), "{change} -> {into}: {error}");
    }
    for (spec, said) in [
        ("bigraph:switches=15,endpoints=4", "switches is 15; it must be even"),
        ("bigraph:switches=16", "endpoints is missing"),
        ("bigraph:switches=16,endpoints=4,gbs=1", "there is no option gbs; did you mean \"gbps\"?"),
        ("bigraph:switches=16,endpoints=4,gbps=NaN", "bandwidth is NaN"),
        ("bigraph:switches=16,endpoints=4,gbps=inf", "bandwidth is inf"),
        ("bigraph:switches=1e30,endpoints=4", "switches is 1000000000000000000000000000000;"),
        ("bigraph:switches=1.5,endpoints=4", "switches is 1.5; it must be a whole number"),
        ("bigraph:switches=4000000000,endpoints=4000000000", "1048576 allowed"),
        ("bigraph:switches=0,endpoints=4", "switches of each half is 0"),
        ("bigraph:switches=16,endpoints=4,physical=5", "physical is 5; it must be a divisor"),
        ("bigraph:switches=16,switches=16", "switches is given twice"),
        ("bigraph:switches", "\"switches\" is not of the form name=number"),
        ("fat-tree:leaves=4,spines=0,hosts=1", "spines is 0; it must be at least 1 where"),
        ("fat-tree3:k=5", "k is 5; it must be an even number"),
        ("fat-tree3:pods=2,leaves=2,aggs=2,cores=3,hosts=2", "cores is 3; it must be a multiple"),
        ("rail:hosts=4,gpus=2,hosts_per_leaf=2", "spines is 0; it must be at least 1 where a rail"),
        ("fattree:leaves=1", "neither a file nor one of"),
        ("bigrahp:leaves=1", "did you mean \"bigraph\"?"),
        ("", "neither a file nor"),
    ] {
        let error = Network::parse(spec).unwrap_err().to_string();
        assert!(error.contains(said), "{spec}: {error}");
    }
}

#[test]
fn names_that_no_node_can_have_are_refused_before_they_are_made() {
    let zeros = "0".repeat(70_000);
    for pattern in [
        format!("{}[0-1048575]", "a".repeat(100_000)),
        format!("a[{zeros}-9]"),
        format!("a[0-1048575]{}", "b".repeat(100_000)),
    ] {
        let text = format!("{{\"endpoints\": [\"{pattern}\"]}}");
        let error = Network::from_json(&text).unwrap_err().to_string();
        assert!(error.starts_with("endpoints[0]: ") && error.len() < 400, "{}", &error[..300]);
        assert!(error.contains("longer than 256 bytes"), "{error}");
    }
}

#[test]
fn a_large_network_of_one_way_links_is_checked_in_time() {
    // Nothing beside the first endpoint is reached by all; the hub is.
    let links = |back: &str| {
        format!(
            r#"{{"switches": ["hub", "up[0-99999]", "down[0-99999]"], "endpoints": ["e[0-99999]"],
            "links": [{{"from": "e[0-99999]", "to": "up[0-99999]", "pairwise": true, "oneway": true}},
                {{"from": "up[0-99999]", "to": "hub", "oneway": true}},
                {{"from": "hub", "to": "down[0-99999]", "oneway": true}},
                {{"from": "down[{back}]", "to": "e[{back}]", "pairwise": true, "oneway": true}}]}}"#
        )
    };
    assert!(Network::from_json(&links("0-99999")).is_ok());
    let error = Network::from_json(&links("0-99998")).unwrap_err().to_string();
    assert_eq!(error, "no path leads from \"e0\" to \"e99999\"");
}

#[test]
fn a_description_that_would_be_ignored_is_refused() {
    let text = r#"{"default": {"gbps": 400}, "rail": {"hosts": 4, "gpus": 2}}"#;
    let error = Network::from_json(text).unwrap_err().to_string();
    assert_eq!(error, "default: rail does not look at it; give its gbps and latency_us there");
}

#[test]
fn numbers_whose_sums_are_infinite_are_refused() {
    for (spec, said) in [
        ("gbps=1e300", "bandwidth is 1.25e308; it must be"),
        ("gbps=1e-310", "it must be a number of bytes/s from 1e-30 to 1e30"),
        ("latency_us=1e300", "it must be a number of seconds from 0 to 1e30"),
    ] {
        let spec = format!("fat-tree:leaves=1,spines=0,hosts=2,{spec}");
        let error = Network::parse(&spec).unwrap_err().to_string();
        assert!(error.contains(said.split("; ").last().unwrap()), "{spec}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_without_an_end_is_refused() {
    let error = Network::parse("/dev/zero").unwrap_err().to_string();
    assert!(error.contains("bytes of a description"), "{error}");
}

#[test]
fn builders_stand_in_json_too() {
    let text = r#"{"bigraph": {"switches": 16, "endpoints": 4, "gbps": 50.8}}"#;
    let short = Network::parse("bigraph:switches=16,endpoints=4,gbps=50.8").unwrap();
    assert_eq!(Network::from_json(text).unwrap(), short);
    for text in ["[\"a\", {}]", "[]", "nonsense", "", "7"] {
        let error = Network::from_json(text).unwrap_err().to_string();
        assert!(error.contains("line 1, column 1: a network is an object: {"), "{text}: {error}");
    }
    let error = Network::from_json(r#"{"rail": {"hosts": "four"}}"#).unwrap_err();
    assert_eq!(error.to_string(), "rail.hosts: \"four\" is not a number");
}

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

/// A connected network of switches with any links between them, some of them one-way, and endpoints of which
/// some forward and some have two switches.
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

/// Links from everywhere to an endpoint over nodes that forward, by relaxation until nothing changes.
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
