//! Large schedule spot checks, with times (`cargo test --release -- --nocapture`).

use std::time::Instant;
use weft_collectives::contention::{BiGraphPaths, contention};
use weft_collectives::{Algorithm, Collective, Options, Rank, Schedule, build, verify};
use weft_topology::BiGraph;

fn check(collective: Collective, algorithm: Algorithm, ranks: u32, options: &Options) {
    let schedule = build(collective, algorithm, ranks, options).unwrap();
    let start = Instant::now();
    let proof = verify(&schedule).unwrap();
    println!("{:>8.3} s: {proof}", start.elapsed().as_secs_f64());
}

#[test]
fn schedules_of_512_and_1024_ranks() {
    let options = Options { chunks: 8, local: 8 };
    let reduce = Collective::AllReduce;
    check(reduce, Algorithm::Hdrm, 512, &options);
    check(reduce, Algorithm::Hdrm, 1000, &options);
    check(reduce, Algorithm::Hdrm, 1024, &options);
    check(reduce, Algorithm::Circulant, 1000, &options);
    check(reduce, Algorithm::Tree, 1023, &options);
    check(reduce, Algorithm::Hierarchical, 1024, &options);
    check(Collective::ReduceScatter, Algorithm::HalvingDoubling, 999, &options);
    check(Collective::AllGather, Algorithm::HalvingDoubling, 1024, &options);
    check(reduce, Algorithm::Ring, 256, &options);
    check(Collective::AllToAll, Algorithm::Pairwise, 256, &options);
}

#[test]
#[ignore = "takes seconds and, for the ring of 1024, a gigabyte"]
fn rings_of_512_and_1024_ranks() {
    let options = Options::default();
    check(Collective::AllReduce, Algorithm::Ring, 512, &options);
    check(Collective::AllReduce, Algorithm::TwoShot, 512, &options);
    check(Collective::AllReduce, Algorithm::Ring, 1024, &options);
}

#[test]
fn hdrm_of_65536_ranks_is_never_stored() {
    let ranks = 65536;
    let schedule =
        build(Collective::AllReduce, Algorithm::Hdrm, ranks, &Options::default()).unwrap();
    let start = Instant::now();
    let all = (0..ranks).map(Rank).flat_map(|rank| {
        let schedule = &schedule;
        (0..schedule.len(rank)).map(move |index| schedule.op(rank, index))
    });
    let operations = all.map(std::hint::black_box).count();
    println!("{operations} operations in {:.3} s", start.elapsed().as_secs_f64());
    assert_eq!(operations, 5_242_880);
    let graph = BiGraph::new(256, 128);
    let map: Vec<_> =
        (0..ranks).map(|rank| graph.number(weft_topology::hdrm_port(rank, 256))).collect();
    let start = Instant::now();
    let report = contention(&schedule, &mut BiGraphPaths::new(&graph).unwrap(), &map).unwrap();
    println!("contention of 2^21 writes in {:.3} s", start.elapsed().as_secs_f64());
    assert_eq!(report.max_load, 1);
}
