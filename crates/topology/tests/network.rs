//! Networks and paths, as they are used from outside.

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
