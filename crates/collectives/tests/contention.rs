//! Contention tests: HDRM has none on the BiGraphs that it supports; other algorithms and graphs have.

use weft_collectives::contention::{BiGraphPaths, contention};
use weft_collectives::{Algorithm, AnySchedule, Collective, Options, Rank, Schedule, build};
use weft_topology::{BiGraph, EndpointId, FatTree, LinkSpec, Router, Routing};

fn all_reduce(algorithm: Algorithm, ranks: u32) -> AnySchedule {
    build(Collective::AllReduce, algorithm, ranks, &Options::default()).unwrap()
}

fn in_order(ranks: u32) -> Vec<EndpointId> {
    (0..ranks).map(EndpointId).collect()
}

/// BiGraphs with `least` to `most` endpoints, H a power of two and M up to H.
fn sizes(least: u32, most: u32) -> impl Iterator<Item = (u32, u32)> {
    let half = (0..).map(|power| 1u32 << power).take_while(move |half| 2 * half <= most);
    half.flat_map(|half| (1..=half).map(move |endpoints| (half, endpoints)))
        .filter(move |(half, endpoints)| (least..=most).contains(&(2 * half * endpoints)))
}

#[test]
fn hdrm_loads_no_link_twice_on_any_bigraph_from_8_to_4096_endpoints() {
    let (mut graphs, mut writes) = (0, 0u64);
    for (half, endpoints) in sizes(8, 4096) {
        let graph = BiGraph::new(half, endpoints);
        // All ranks, or the largest power of two among them.
        let ranks = 1 << (2 * half * endpoints).ilog2();
        let schedule = all_reduce(Algorithm::Hdrm, ranks);
        // The limit on network links does not bind here: none is built.
        let map: Vec<_> =
            (0..ranks).map(|rank| graph.number(weft_topology::hdrm_port(rank, half))).collect();
        if let Ok(theirs) = graph.rank_map() {
            assert_eq!(theirs[..ranks as usize], map);
        }
        let mut paths = BiGraphPaths::new(&graph).unwrap();
        let report = contention(&schedule, &mut paths, &map).unwrap();
        assert_eq!(report.max_load, 1, "H {half}, M {endpoints}: {:?}", report.collisions.first());
        assert_eq!(report.steps.len() as u32, schedule.steps());
        report.require_no_collision().unwrap();
        graphs += 1;
        writes += report.steps.iter().map(|step| u64::from(step.writes)).sum::<u64>();
    }
    println!("{graphs} BiGraphs, {writes} writes: load 1");
}

#[test]
fn so_do_built_networks_and_every_smaller_power_of_two_of_ranks() {
    for (half, endpoints) in sizes(8, 512) {
        let graph = BiGraph::new(half, endpoints);
        let network = graph.network().unwrap();
        let mut router = Router::new(&network, Routing::Unique).unwrap();
        for bits in 1..=(2 * half * endpoints).ilog2() {
            let schedule = all_reduce(Algorithm::Hdrm, 1 << bits);
            let map = graph.rank_map_of(1 << bits).unwrap();
            let report = contention(&schedule, &mut router, &map).unwrap();
            assert_eq!(report.max_load, 1, "H {half}, M {endpoints}, {bits} bits");
        }
    }
}

#[test]
fn levels_of_two_load_no_link_twice_for_any_core() {
    // With 3, 5 or 7 times a power of two ranks, only the odd digit's level has pairs within a switch half.
    for (half, endpoints) in sizes(8, 512) {
        let graph = BiGraph::new(half, endpoints);
        let mut router = Router::new(&graph.network().unwrap(), Routing::Static).unwrap();
        let ranks = 2 * half * endpoints;
        let odd = ranks >> ranks.trailing_zeros();
        if ![3, 5, 7].contains(&odd) {
            continue;
        }
        let schedule = all_reduce(Algorithm::Hdrm, ranks);
        let map = graph.rank_map_of(ranks).unwrap();
        let report = contention(&schedule, &mut router, &map).unwrap();
        let levels = ranks.trailing_zeros();
        for (step, load) in report.steps.iter().enumerate() {
            let of_odd_digit = (levels..levels + 2).contains(&(step as u32));
            assert!(of_odd_digit || load.max == 1, "H {half}, M {endpoints}, step {step}");
            assert!(!of_odd_digit || load.max >= odd - 1, "H {half}, M {endpoints}, step {step}");
        }
    }
}

#[test]
fn computed_paths_are_those_of_the_network() {
    let graph = BiGraph::new(4, 3);
    let network = graph.network().unwrap();
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let mut computed = BiGraphPaths::new(&graph).unwrap();
    for from in in_order(24) {
        for to in in_order(24) {
            use weft_collectives::contention::Paths;
            let (mut one, mut other) = (Vec::new(), Vec::new());
            let theirs = Paths::path(&mut router, from, to, 0, &mut one);
            let ours = computed.path(from, to, 0, &mut other);
            assert_eq!(theirs.is_ok(), ours.is_ok(), "{from} {to}: {theirs:?} {ours:?}");
            if ours.is_err() {
                continue;
            }
            let names = |paths: &dyn Fn(_) -> String, links: &[_]| {
                links.iter().map(|&link| paths(link)).collect::<Vec<_>>()
            };
            assert_eq!(
                names(&|link| network.link_name(link), &one),
                names(&|link| computed.name(link), &other)
            );
        }
    }
}

/// A rank's port by the HDRM formula, for any half.
fn port(rank: u32, half: u32) -> weft_topology::Port {
    let (port, i) = (rank / (2 * half), rank % (2 * half) / 2);
    let lower = rank.count_ones() % 2 == 1;
    let switch = if lower { i } else { (i + port) % half };
    weft_topology::Port { lower, switch, port }
}

#[test]
fn other_halves_have_load_2_and_are_refused_or_embedded() {
    // Load by the formula for the largest power of two: never above 2, which most have.
    let (mut loaded, mut graphs) = (0, 0);
    for half in [3, 5, 6, 7, 9, 10, 12, 20, 24, 48] {
        for endpoints in 1..=half {
            let graph = BiGraph::new(half, endpoints);
            let ranks = 1 << (2 * half * endpoints).ilog2();
            let map: Vec<_> = (0..ranks).map(|rank| graph.number(port(rank, half))).collect();
            let mut paths = BiGraphPaths::new(&graph).unwrap();
            let schedule = all_reduce(Algorithm::Hdrm, ranks);
            let load = contention(&schedule, &mut paths, &map).unwrap().max_load;
            assert!(load <= 2, "H {half}, M {endpoints}: {load}");
            graphs += 1;
            loaded += u32::from(load == 2);
        }
    }
    assert!(2 * loaded > graphs, "{loaded} of {graphs} have load 2");
    for (half, endpoints) in [(3, 2), (6, 2), (6, 5), (12, 12), (100, 3), (4, 5), (8, 9)] {
        let graph = BiGraph::new(half, endpoints);
        let error = graph.rank_map().unwrap_err().to_string();
        assert!(error.contains("power of two") || error.contains("exceed its"), "{error}");
        let embedded = graph.embedded_rank_map().unwrap();
        assert!(embedded.reason.is_some());
        let ranks = 1 << embedded.endpoints.len().ilog2();
        let mut paths = BiGraphPaths::new(&graph).unwrap();
        let schedule = all_reduce(Algorithm::Hdrm, ranks);
        let map = &embedded.endpoints[..ranks as usize];
        assert_eq!(contention(&schedule, &mut paths, map).unwrap().max_load, 1);
    }
    // More endpoints on a switch than ways to the other half.
    let graph = BiGraph::new(2, 4);
    let map: Vec<_> = (0..16).map(|rank| graph.number(weft_topology::hdrm_port(rank, 2))).collect();
    let mut paths = BiGraphPaths::new(&graph).unwrap();
    let report = contention(&all_reduce(Algorithm::Hdrm, 16), &mut paths, &map).unwrap();
    assert_eq!(report.max_load, 2);
    let error = report.require_no_collision().unwrap_err().to_string();
    assert!(error.contains("2 writes share"), "{error}");
}

#[test]
fn halving_doubling_without_the_placement_collides_with_a_location() {
    let graph = BiGraph::new(4, 2);
    let network = graph.network().unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let schedule = all_reduce(Algorithm::HalvingDoubling, 16);
    let report = contention(&schedule, &mut router, &in_order(16)).unwrap();
    assert_eq!(report.max_load, 2);
    let first = report.collisions[0].to_string();
    assert_eq!(first, "step 1: 2 writes share L1->U0: 3 -> 1, 10 -> 8");
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    assert!(contention(&schedule, &mut router, &in_order(16)).is_err());
}

#[test]
fn a_ring_is_free_of_contention_on_a_fat_tree_in_order_but_not_shuffled() {
    let network = FatTree::new(8, 8, 8).network().unwrap();
    let ring = all_reduce(Algorithm::Ring, 64);
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let report = contention(&ring, &mut router, &in_order(64)).unwrap();
    assert_eq!(report.max_load, 1);
    let shuffled: Vec<_> = (0..64).map(|rank| EndpointId(rank * 29 % 64)).collect();
    let mut hashed = Router::new(&network, Routing::Ecmp { seed: 1 }).unwrap();
    let report = contention(&ring, &mut hashed, &shuffled).unwrap();
    assert!(report.max_load > 1);
    let hd = all_reduce(Algorithm::HalvingDoubling, 64);
    let report = contention(&hd, &mut hashed, &in_order(64)).unwrap();
    assert!(report.max_load > 2, "{}", report.max_load);
}

#[test]
fn a_ring_on_a_bigraph() {
    let graph = BiGraph::new(4, 2);
    let mut router = Router::new(&graph.network().unwrap(), Routing::Static).unwrap();
    let ring = all_reduce(Algorithm::Ring, 16);
    let mut load = |map: &[EndpointId]| contention(&ring, &mut router, map).unwrap().max_load;
    // Neighbours on one switch, or in one half: over a switch in the other half, chosen by destination.
    assert_eq!((load(&in_order(16)), load(&graph.rank_map().unwrap())), (2, 2));
    // Up and down: U0 L0 U1 L1 ..., then the other ports the same way, one switch further.
    let zigzag: Vec<_> = (0..16u32)
        .map(|rank| {
            let (port, lower) = (rank / 8, rank % 2 == 1);
            let switch = (rank / 2 + if lower { 2 * port } else { 0 }) % 4;
            graph.number(weft_topology::Port { lower, switch, port })
        })
        .collect();
    assert_eq!(load(&zigzag), 1);
}

#[test]
fn invalid_placements_are_refused() {
    let graph = BiGraph::new(2, 2);
    let mut paths = BiGraphPaths::new(&graph).unwrap();
    let schedule = all_reduce(Algorithm::Hdrm, 8);
    let mut try_map =
        |map: Vec<EndpointId>| contention(&schedule, &mut paths, &map).unwrap_err().to_string();
    assert_eq!(try_map(in_order(7)), "the rank placement has 7 endpoints for 8 ranks");
    let mut map = in_order(8);
    map[5] = EndpointId(2);
    assert_eq!(try_map(map.clone()), "the rank placement puts ranks 2 and 5 on endpoint 2");
    map[5] = EndpointId(8);
    assert_eq!(try_map(map), "the rank placement puts rank 5 on endpoint 8 of 8");
}

#[test]
fn eight_ranks_by_hand() {
    let graph = BiGraph::new(2, 2);
    let map = graph.rank_map().unwrap();
    let mut paths = BiGraphPaths::new(&graph).unwrap();
    let report = contention(&all_reduce(Algorithm::Hdrm, 8), &mut paths, &map).unwrap();
    // 8 ways up, 8 down, and all 4 trunks in both directions.
    assert!(report.steps.iter().all(|step| step.writes == 8 && step.loads.len() == 24));
    assert_eq!(report.steps.len(), 6);
    let one = all_reduce(Algorithm::OneShot, 8);
    let mut router = Router::new(&graph.network().unwrap(), Routing::Static).unwrap();
    let report = contention(&one, &mut router, &map).unwrap();
    assert_eq!((report.steps.len(), report.max_load), (1, 8));
    assert_eq!(report.collisions[0].pairs[0].0, Rank(0));
    assert_eq!(report.steps[0].writes, 56);
}

#[test]
fn a_hierarchy_has_one_hdrm_on_each_rail() {
    // 16 nodes with 3 GPUs each; the GPUs with one number are the endpoints in a separate BiGraph.
    let (nodes, local, half) = (16u32, 3u32, 4u32);
    let mut network = weft_topology::NetworkBuilder::new("rails");
    let link = LinkSpec::default();
    let mut switches = Vec::new();
    for rail in 0..local {
        for lower in ["U", "L"] {
            for switch in 0..half {
                switches.push(network.switch(format!("r{rail}{lower}{switch}")).unwrap());
            }
        }
        for upper in 0..half {
            for lower in half..2 * half {
                let at = |switch| switches[(rail * 2 * half + switch) as usize];
                network.cable(at(upper), at(lower), link).unwrap();
            }
        }
    }
    for node in 0..nodes {
        let host = network.host(format!("n{node}")).unwrap();
        for rail in 0..local {
            let port = weft_topology::hdrm_port(node, half);
            let switch = rail * 2 * half + u32::from(port.lower) * half + port.switch;
            let name = format!("n{node}.{rail}");
            let gpu = network.forwarding_endpoint(name, Some(&format!("n{node}"))).unwrap();
            network.cable(gpu, host, link).unwrap();
            network.cable(gpu, switches[switch as usize], link).unwrap();
        }
    }
    let network = network.finish().unwrap();
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let options = Options { local, chunks: 1 };
    let ranks = nodes * local;
    let schedule = build(Collective::AllReduce, Algorithm::Hierarchical, ranks, &options).unwrap();
    let report = contention(&schedule, &mut router, &in_order(ranks)).unwrap();
    let loads: Vec<_> = report.steps.iter().map(|step| step.max).collect();
    // Inside the node two writes leave each GPU at once; between nodes no link is shared.
    assert_eq!(loads, [2, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
}
