//! Networks and paths by the public API.

mod common;

use common::path;
use weft_topology::{BiGraph, Description, EndpointId, LinkId, Network, NodeKind, Router, Routing};

fn names(network: &Network, links: &[LinkId]) -> Vec<String> {
    links.iter().map(|&link| network.link_name(link)).collect()
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
         among them by \"U0->L0\" and \"U0->L1\"; choose static, ecmp or adaptive"
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
fn a_failed_link_is_avoided_until_it_is_restored() {
    let network = Network::parse("bigraph:switches=4,endpoints=1").unwrap();
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let before = path(&mut router, 0, 2, 0);
    router.fail_link(before[1]).unwrap();
    assert_eq!(
        names(&network, &path(&mut router, 0, 2, 0)),
        ["U0.0->U0", "U0->L1", "L1->U1", "U1->L0", "L0->L0.0"]
    );
    router.fail_link(before[0]).unwrap();
    let error = router.path(EndpointId(0), EndpointId(2), 0, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "no path leads from \"U0.0\" to \"L0.0\"");
    router.restore_link(before[0]).unwrap();
    router.restore_link(before[1]).unwrap();
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

/// Hosts with four GPUs on one leaf, each GPU with a NIC and joined to the others by `inside`.
fn nics_on_one_leaf(inside: &str) -> Network {
    Network::from_json(&format!(
        r#"{{"switches": ["leaf", "spine"], "hosts": ["a.nvlink[0-1]", "b.nvlink[0-1]"],
            "endpoints": [{{"name": "a[0-3]", "host": "a"}},
                          {{"name": "b[0-3]", "host": "b"}}],
            "links": [["a[0-3]", "leaf"], ["b[0-3]", "leaf"], ["leaf", "spine"], {inside}]}}"#
    ))
    .unwrap()
}

#[test]
fn traffic_inside_a_host_stays_there_where_the_nic_is_as_near() {
    let joined = r#"["a[0-3]", "a.nvlink[0-1]"], ["b[0-3]", "b.nvlink[0-1]"]"#;
    let network = nics_on_one_leaf(joined);
    for routing in [Routing::Static, Routing::Ecmp { seed: 1 }, Routing::Adaptive] {
        let mut router = Router::new(&network, routing).unwrap();
        for (from, to) in (0..8).flat_map(|from| (0..8).map(move |to| (from, to))) {
            let links = names(&network, &path(&mut router, from, to, 7));
            let inside = links.iter().all(|name| !name.contains("leaf"));
            assert_eq!(inside, from / 4 == to / 4, "{routing:?}: {links:?}");
        }
        // Two NVLink switches, and not the leaf.
        let (ways, length) = router.shortest_paths(EndpointId(0), EndpointId(1)).unwrap();
        assert_eq!((ways, length), (2, 2));
    }
    assert_eq!(
        network.warnings(),
        [
            "a0 to a1: 2 links inside host a, 2 through switches: routing stays inside the host; hosts \
          with such endpoints: 2"
        ]
    );
}

#[test]
fn a_host_whose_inner_paths_are_longer_is_warned_about() {
    let chain = r#"["a[0-2]", "a.nvlink0"], ["a.nvlink0", "a.nvlink1"], ["a3", "a.nvlink1"],
                   ["b0", "b.nvlink0"], ["b1", "b.nvlink1"]"#;
    let network = nics_on_one_leaf(chain);
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let links = names(&network, &path(&mut router, 0, 3, 0));
    assert_eq!(links, ["a0->leaf", "leaf->a3"]);
    let warnings = network.warnings();
    assert_eq!(warnings.len(), 2);
    assert_eq!(
        warnings[0],
        "a0 to a3: 3 links inside host a, 2 through switches: routing leaves the host; join its endpoints \
         by fewer links, or add routes; hosts with such endpoints: 1"
    );
    assert!(warnings[1].starts_with("a0 to a1: 2 links inside host a, 2 through"), "{warnings:?}");
}

#[test]
fn the_usual_networks_are_not_warned_about() {
    for spec in [
        "bigraph:switches=8,endpoints=4,nics=4",
        "bigraph:switches=4,endpoints=2,gpus_per_nic=4",
        "fat-tree:leaves=4,spines=2,hosts=2,gpus_per_nic=8",
        "rail:hosts=4,gpus=8",
        "rail:hosts=4,gpus=8,hosts_per_leaf=2,spines=2",
    ] {
        assert_eq!(Network::parse(spec).unwrap().warnings(), [""; 0], "{spec}");
    }
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
