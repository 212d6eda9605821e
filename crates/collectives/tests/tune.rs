//! Tests estimates against closed formulas, and the chosen algorithms.

use weft_collectives::contention::BiGraphPaths;
use weft_collectives::tune::{Costs, Estimate, RankPlacements, estimate, tune};
use weft_collectives::{Algorithm, Collective, Options, build};
use weft_topology::{BiGraph, EndpointId, FatTree, LinkSpec, Router, Routing};

const COSTS: Costs = Costs { step_s: 2e-6, post_s: 1e-7, add_bytes_per_s: 1e11 };

fn graph() -> BiGraph {
    BiGraph { link: LinkSpec { bandwidth: 12.5e9, latency: 5e-7 }, ..BiGraph::new(8, 4) }
}

fn hdrm(bytes: u64) -> Estimate {
    let graph = graph();
    let schedule = build(Collective::AllReduce, Algorithm::Hdrm, 64, &Options::default()).unwrap();
    let mut paths = BiGraphPaths::new(&graph).unwrap();
    let map = graph.rank_map().unwrap();
    estimate(Algorithm::Hdrm, &Options::default(), &schedule, &mut paths, &map, bytes, &COSTS)
        .unwrap()
}

#[test]
fn hdrm_is_its_formula() {
    let bytes = 1 << 26;
    let found = hdrm(bytes);
    let share = 63.0 / 64.0 * bytes as f64;
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(close(found.latency_s, 12.0 * (2e-6 + 1e-7 + 3.0 * 5e-7)));
    assert!(close(found.wire_s, 2.0 * share / 12.5e9));
    assert!(close(found.add_s, share / 1e11));
    assert_eq!((found.steps, found.max_load), (12, 1));
}

#[test]
fn small_and_large_vectors_on_a_bigraph() {
    let graph = graph();
    let mut router = Router::new(&graph.network().unwrap(), Routing::Ecmp { seed: 7 }).unwrap();
    let placements = RankPlacements {
        plain: (0..64).map(EndpointId).collect(),
        hdrm: Some(graph.rank_map().unwrap()),
    };
    let mut chosen = |bytes| {
        let choice =
            tune(Collective::AllReduce, bytes, 1, &mut router, &placements, &COSTS).unwrap();
        assert!(choice.skipped.is_empty());
        assert!(choice.estimates.windows(2).all(|two| two[0].seconds() <= two[1].seconds()));
        choice
    };
    assert_eq!(chosen(64).best.algorithm, Algorithm::OneShot);
    let large = chosen(1 << 28);
    let of = |algorithm| large.estimates.iter().find(|one| one.algorithm == algorithm).unwrap();
    let (hdrm, hd, ring) =
        (of(Algorithm::Hdrm), of(Algorithm::HalvingDoubling), of(Algorithm::Ring));
    assert!(hdrm.max_load == 1 && hd.max_load > 1);
    assert!(hd.seconds() > 1.5 * hdrm.seconds() && ring.seconds() > hdrm.seconds());
    assert_eq!(large.best.algorithm, Algorithm::Hdrm);
    let why = large.to_string();
    assert!(why.starts_with("hdrm: 44.96 ms (12 steps take 43.2 us besides 42.28 ms"), "{why}");
    assert!(why.contains("two-shot: 44.94 ms") && why.contains(", but more load"), "{why}");
}

#[test]
fn hdrm_needs_a_rank_placement_and_hierarchical_needs_nodes() {
    let network = FatTree::new(8, 8, 8).network().unwrap();
    let mut router = Router::new(&network, Routing::Static).unwrap();
    let placements = RankPlacements { plain: (0..64).map(EndpointId).collect(), hdrm: None };
    let choice = tune(Collective::AllReduce, 1 << 28, 8, &mut router, &placements, &COSTS).unwrap();
    assert!(choice.estimates.iter().any(|one| one.algorithm == Algorithm::Hierarchical));
    assert!(choice.to_string().contains("not considered: hdrm, it has no rank placement"));
    let choice = tune(Collective::AllToAll, 1 << 20, 1, &mut router, &placements, &COSTS).unwrap();
    assert_eq!(choice.estimates.len(), 2);
    // No endpoint pair has a unique path.
    let mut router = Router::new(&network, Routing::Unique).unwrap();
    let error = tune(Collective::AllReduce, 64, 1, &mut router, &placements, &COSTS).unwrap_err();
    assert!(error.to_string().starts_with("no algorithm can be chosen: "), "{error}");
}

/// Halving-doubling core, the largest `q 2^k` up to `ranks` with `q` in 1, 3, 5, 7: its levels, the vector share that
/// each core rank sends while it halves, and the share that a folded rank sends to each proxy.
fn core(ranks: u32) -> (f64, f64, f64) {
    let fits = |(odd, bits): &(u32, u32)| odd << bits <= ranks;
    let all = [1, 3, 5, 7].into_iter().flat_map(|odd| (0..16).map(move |bits| (odd, bits)));
    let (odd, bits) = all.filter(fits).max_by_key(|(odd, bits)| odd << bits).unwrap();
    let size = odd << bits;
    let parts = if bits > 1 { 4.0 } else { f64::from(2 * odd) };
    let folds = if ranks > size { 1.0 / parts } else { 0.0 };
    (f64::from(bits + u32::from(odd > 1)), 1.0 - 1.0 / f64::from(size), folds)
}

#[test]
fn costs_are_those_of_the_documents_on_one_switch() {
    let (latency, speed) = (1e-6, 1e9);
    for ranks in [2u32, 3, 5, 8, 9, 11, 12, 13, 15, 16, 20, 31, 48] {
        let mut network = weft_topology::NetworkBuilder::new("star");
        let switch = network.switch("s").unwrap();
        for rank in 0..ranks {
            let endpoint = network.endpoint(format!("e{rank}"), None).unwrap();
            network.cable(switch, endpoint, LinkSpec { bandwidth: speed, latency: 0.0 }).unwrap();
        }
        let mut router = Router::new(&network.finish().unwrap(), Routing::Unique).unwrap();
        let map: Vec<_> = (0..ranks).map(EndpointId).collect();
        let costs = Costs { step_s: latency, post_s: 0.0, add_bytes_per_s: 1e10 };
        // Divisible by every block count.
        let bytes = 13 * 31 * 693 * 240_000u64;
        let mut estimated = |collective, algorithm, chunks, local| {
            let options = Options { chunks, local };
            let schedule = build(collective, algorithm, ranks, &options).unwrap();
            let found =
                estimate(algorithm, &options, &schedule, &mut router, &map, bytes, &costs).unwrap();
            let (wire, add) = (found.wire_s * speed, found.add_s * 1e10);
            [found.latency_s / latency, wire / bytes as f64, add / bytes as f64]
        };
        let same = |found: [f64; 3], expected: [f64; 3], what: &str| {
            for (found, expected) in found.into_iter().zip(expected) {
                let error = (found - expected).abs();
                assert!(
                    error < 1e-9 * (1.0 + expected),
                    "{what}, {ranks} ranks: {found} is not {expected}"
                );
            }
        };
        let mut check = |collective, algorithm, chunks, a: f64, b: f64, g: f64| {
            let found = estimated(collective, algorithm, chunks, 1);
            same(found, [a, b, g], &format!("{collective} by {algorithm}"));
        };
        let n = f64::from(ranks);
        let p = f64::from(1u32 << ranks.ilog2());
        let fold = if p < n { 1.0 } else { 0.0 };
        let share = (n - 1.0) / n;
        let reduce = Collective::AllReduce;
        check(reduce, Algorithm::Ring, 1, 2.0 * (n - 1.0), 2.0 * share, share);
        let levels = p.log2();
        for algorithm in [Algorithm::Hdrm, Algorithm::HalvingDoubling] {
            let (depth, part, folds) = core(ranks);
            check(reduce, algorithm, 1, 2.0 * depth, 2.0 * part + 4.0 * folds, part + folds);
        }
        let depth = n.log2().ceil();
        check(reduce, Algorithm::Circulant, 1, 2.0 * depth, 2.0 * share, share);
        check(Collective::ReduceScatter, Algorithm::Circulant, 1, depth, share, share);
        check(Collective::AllGather, Algorithm::Circulant, 1, depth, share, 0.0);
        check(reduce, Algorithm::OneShot, 1, 1.0, n - 1.0, n - 1.0);
        check(reduce, Algorithm::TwoShot, 1, 2.0, 2.0 * share, share);
        for algorithm in [Algorithm::Ring, Algorithm::Direct] {
            let a = if algorithm == Algorithm::Ring { n - 1.0 } else { 1.0 };
            check(Collective::ReduceScatter, algorithm, 1, a, share, share);
            check(Collective::AllGather, algorithm, 1, a, share, 0.0);
        }
        // Maximum block count for 2^k members: each proxy has two.
        let most = |k: u32| f64::from(1u32 << k) + f64::from(1u32 << k).min(n - p);
        let halves = (0..ranks.ilog2()).map(most).sum::<f64>() / n;
        let (a, b, g) = (levels + 2.0 * fold, halves + fold * (1.0 + 1.0 / n), halves + fold);
        assert!(b.max(g) <= share + fold * (7.0 / 5.0 + 1e-9));
        check(Collective::ReduceScatter, Algorithm::HalvingDoubling, 1, a, b, g);
        check(Collective::AllGather, Algorithm::HalvingDoubling, 1, a, b, 0.0);
        check(Collective::AllToAll, Algorithm::Pairwise, 1, n - 1.0, share, 0.0);
        check(Collective::AllToAll, Algorithm::Direct, 1, 1.0, share, 0.0);
        let root = Collective::Broadcast { root: weft_collectives::Rank(1) };
        let steps = (n - 1.0).log2().floor() + 1.0;
        check(root, Algorithm::Binomial, 1, steps, steps, 0.0);
        check(root, Algorithm::Chain, 6, 6.0 + n - 2.0, (6.0 + n - 2.0) / 6.0, 0.0);
        for local in (1..=ranks).filter(|local| ranks.is_multiple_of(*local)) {
            let (inside, nodes) = (f64::from(local), ranks / local);
            let (depth, rail, folds) = core(nodes);
            let (shots, part) = (f64::from(u8::from(local > 1)), (inside - 1.0) / inside);
            let a = 2.0 * shots + 2.0 * depth;
            let b = 2.0 * part + (2.0 * rail + 4.0 * folds) / inside;
            let g = part + (rail + folds) / inside;
            let found = estimated(reduce, Algorithm::Hierarchical, 1, local);
            same(found, [a, b, g], &format!("hierarchical, {local} on a node"));
        }
        for chunks in [1, 4, 16] {
            let c = f64::from(chunks);
            let steps = c + 2.0 * n.log2().ceil() - 1.0;
            let [a, b, g] = estimated(reduce, Algorithm::Tree, chunks, 1);
            same([a, 0.0, 0.0], [steps, 0.0, 0.0], "tree");
            assert!(b <= 2.0 * steps / c && (b >= 2.0 || ranks < 5), "tree, {ranks} ranks: {b}");
            same([0.0, 0.0, g], [0.0, 0.0, if ranks == 2 { 0.5 } else { 1.0 }], "tree");
            let steps = c + (n - 1.0).log2().ceil();
            let [a, b, g] = estimated(root, Algorithm::Tree, chunks, 1);
            assert!(b <= steps / c + 1e-9, "broadcast by tree, {ranks} ranks: {b}");
            let full = if chunks < 4 || ranks < 5 { b } else { steps / c };
            same([a, b, g], [steps, full, 0.0], "broadcast by tree");
        }
    }
}

#[test]
fn impossible_costs_are_refused() {
    let mut paths = BiGraphPaths::new(&graph()).unwrap();
    let placements = RankPlacements { plain: graph().rank_map().unwrap(), hdrm: None };
    for (costs, expected) in [
        (
            Costs { add_bytes_per_s: 0.0, ..COSTS },
            "the cost add_bytes_per_s is 0: expected a finite number above 0",
        ),
        (
            Costs { step_s: f64::NAN, ..COSTS },
            "the cost step_s is NaN: expected a finite number of at least 0",
        ),
        (
            Costs { post_s: -1e-9, ..COSTS },
            "the cost post_s is -0.000000001: expected a finite number of at least 0",
        ),
    ] {
        let error =
            tune(Collective::AllReduce, 64, 1, &mut paths, &placements, &costs).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}
