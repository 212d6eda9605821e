//! SimGrid's virtual times for four all-reduces among 16 ranks on a 2-tier fat tree, for comparison without SimGrid.
//!
//! The networks, routes and messages in `simgrid/` were written by `weft-bench-sim export` (whose
//! `platform.rs` defines the columns) with `--ranks 16 --topology
//! fat-tree:leaves=4,spines=2,hosts=4,gbps=100,latency_us=0.5`, static routes, and 1 MiB; for the
//! shuffled ones, in which links are shared, with `,trunk_latency_us=0`, 16 MiB and `--shuffle 1` (ring) and `3`
//! (halving-doubling). The times are those that `benchmarks/sim/simgrid/all_reduce FILE Full` prints with
//! SimGrid 3.32 (Debian 3.32-2+b2): model CM02, no cross-traffic, TCP gamma 0.

use std::str::FromStr;
use weft_netsim::{Engine, Link, LinkId, PathId, Tag};

/// A rank's program: writes (step, peer, bytes) and waits (step, peer), in step order.
struct Program {
    paths: Vec<(u32, PathId)>,
    writes: Vec<(u32, u32, u64)>,
    waits: Vec<(u32, u32)>,
    arrived: Vec<(u32, u32)>,
    next: (usize, usize),
}

impl Program {
    /// Runs until it blocks; starts the writes on the engine.
    fn go_on(&mut self, rank: u32, engine: &mut Engine) {
        loop {
            let write = self.writes.get(self.next.0);
            let wait = self.waits.get(self.next.1);
            match (write, wait) {
                (Some(&(step, to, bytes)), _) if wait.is_none_or(|wait| step <= wait.0) => {
                    let path = self.paths.iter().find(|path| path.0 == to).unwrap().1;
                    let tag = u64::from(step) << 32 | u64::from(rank) << 16 | u64::from(to);
                    engine.start_flow(path, bytes, 0.0, Tag(tag)).unwrap();
                    self.next.0 += 1;
                }
                (_, Some(wait)) if self.arrived.contains(wait) => self.next.1 += 1,
                _ => return,
            }
        }
    }

    fn done(&self) -> bool {
        self.next == (self.writes.len(), self.waits.len())
    }
}

/// Virtual time at which the last rank ends.
fn run(text: &str) -> f64 {
    let mut words = text.split_ascii_whitespace();
    fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> T {
        words.next().and_then(|word| word.parse().ok()).expect("a number")
    }
    let (ranks, links): (u32, usize) = (next(&mut words), next(&mut words));
    let links: Vec<Link> = (0..links)
        .map(|_| Link { bandwidth: next(&mut words), latency: next(&mut words) })
        .collect();
    let mut engine = Engine::new(&links).unwrap();
    let mut programs = Vec::new();
    for _ in 0..ranks {
        let mut paths = Vec::new();
        for _ in 0..next(&mut words) {
            let (to, hops): (u32, u32) = (next(&mut words), next(&mut words));
            let path: Vec<LinkId> = (0..hops).map(|_| LinkId(next(&mut words))).collect();
            paths.push((to, engine.add_path(&path).unwrap()));
        }
        let writes = (0..next(&mut words))
            .map(|_| (next(&mut words), next(&mut words), next(&mut words)))
            .collect();
        let waits = (0..next(&mut words)).map(|_| (next(&mut words), next(&mut words))).collect();
        programs.push(Program { paths, writes, waits, arrived: Vec::new(), next: (0, 0) });
    }
    assert_eq!(words.next(), None, "the file goes on");
    for (rank, program) in (0..).zip(&mut programs) {
        program.go_on(rank, &mut engine);
    }
    let (mut last, mut events) = (0.0, Vec::new());
    while let Some(time) = engine.next(&mut events).unwrap() {
        last = time;
        for event in events.drain(..) {
            let (step, from) = ((event.tag.0 >> 32) as u32, (event.tag.0 >> 16) as u32 & 0xffff);
            let to = event.tag.0 as u32 & 0xffff;
            programs[to as usize].arrived.push((step, from));
            programs[to as usize].go_on(to, &mut engine);
        }
    }
    assert!(programs.iter().all(Program::done));
    last
}

#[track_caller]
fn agrees(text: &str, simgrid_s: f64) {
    let time_s = run(text);
    let off = (time_s / simgrid_s - 1.0).abs();
    assert!(off < 1e-6, "{time_s} s, and SimGrid has {simgrid_s} s");
}

#[test]
fn a_ring_takes_as_long_as_in_simgrid() {
    agrees(include_str!("simgrid/ring.txt"), 0.00019528639999999997);
}

#[test]
fn halving_and_doubling_take_as_long_as_in_simgrid() {
    agrees(include_str!("simgrid/hd.txt"), 0.00020074367999999997);
}

#[test]
fn a_ring_whose_neighbours_are_far_apart_takes_as_long_as_in_simgrid() {
    agrees(include_str!("simgrid/ring-shuffled.txt"), 0.007816875063578109);
}

#[test]
fn halving_and_doubling_with_shared_links_take_as_long_as_in_simgrid() {
    agrees(include_str!("simgrid/hd-shuffled.txt"), 0.006472579131929649);
}
