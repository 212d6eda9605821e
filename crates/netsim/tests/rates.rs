//! Engine rates against exact max-min fair shares, and against the definition.

mod support;

use proptest::prelude::*;
use support::{check_fair, engine, exact_rates, path};
use weft_netsim::{Engine, Event, FlowHandle, LinkId, Tag};

/// A network and the paths over it: each path has at least one link, and none twice.
fn network(
    links: std::ops::Range<usize>,
    paths: std::ops::Range<usize>,
) -> impl Strategy<Value = (Vec<u64>, Vec<Vec<u32>>)> {
    links.prop_flat_map(move |links| {
        let all: Vec<u32> = (0..links as u32).collect();
        let path = prop::sample::subsequence(all, 1..=links.min(6)).prop_shuffle();
        (prop::collection::vec(1..=12_u64, links), prop::collection::vec(path, paths.clone()))
    })
}

/// Step in a random run; numbers are taken modulo the present counts.
#[derive(Clone, Debug)]
enum Change {
    Start { path: usize, bytes: u64 },
    Cancel { flow: usize },
    Bandwidth { link: usize, bandwidth: u64 },
    Next,
    Advance { seconds: f64 },
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (any::<usize>(), 1..2000_u64).prop_map(|(path, bytes)| Change::Start { path, bytes }),
        2 => any::<usize>().prop_map(|flow| Change::Cancel { flow }),
        1 => (any::<usize>(), 0..12_u64)
            .prop_map(|(link, bandwidth)| Change::Bandwidth { link, bandwidth }),
        3 => Just(Change::Next),
        2 => (0.0..50.0).prop_map(|seconds| Change::Advance { seconds }),
    ]
}

/// Engine with flows in flight, by path.
struct World {
    engine: Engine,
    bandwidths: Vec<u64>,
    paths: Vec<Vec<u32>>,
    flows: Vec<(u64, usize, FlowHandle)>,
    started: u64,
    events: Vec<Event>,
}

impl World {
    fn new(bandwidths: &[u64], paths: &[Vec<u32>]) -> World {
        let as_f64: Vec<f64> = bandwidths.iter().map(|&bandwidth| bandwidth as f64).collect();
        World {
            engine: engine(&as_f64),
            bandwidths: bandwidths.to_vec(),
            paths: paths.to_vec(),
            flows: Vec::new(),
            started: 0,
            events: Vec::new(),
        }
    }

    fn start(&mut self, number: usize, bytes: u64) {
        let path = path(&mut self.engine, &self.paths[number]);
        let handle = self.engine.start_flow(path, bytes, 0.0, Tag(self.started)).unwrap();
        self.flows.push((self.started, number, handle));
        self.started += 1;
    }

    fn apply(&mut self, change: &Change) {
        match *change {
            Change::Start { path, bytes } => self.start(path % self.paths.len(), bytes),
            Change::Cancel { flow } if !self.flows.is_empty() => {
                let (_, _, handle) = self.flows.swap_remove(flow % self.flows.len());
                self.engine.cancel(handle);
            }
            Change::Cancel { .. } => {}
            Change::Bandwidth { link, bandwidth } => {
                let link = link % self.bandwidths.len();
                self.bandwidths[link] = bandwidth;
                self.engine.set_bandwidth(LinkId(link as u32), bandwidth as f64).unwrap();
            }
            // Stalled flows are expected where links fail.
            Change::Next => drop(self.engine.next(&mut self.events)),
            Change::Advance { seconds } => {
                let to = self.engine.now() + seconds;
                self.engine.advance(to, &mut self.events).unwrap();
            }
        }
        for event in self.events.drain(..) {
            self.flows.retain(|flow| flow.0 != event.tag.0);
        }
    }

    /// Moving flows with rates.
    fn rates(&mut self) -> Vec<(usize, f64)> {
        // Flows just started begin to move at the next instant, which is the present time.
        let now = self.engine.now();
        self.engine.advance(now, &mut self.events).unwrap();
        for event in self.events.drain(..) {
            self.flows.retain(|flow| flow.0 != event.tag.0);
        }
        let engine = &mut self.engine;
        self.flows.iter().map(|&(_, path, flow)| (path, engine.rate(flow).unwrap())).collect()
    }

    fn check_exact(&mut self) -> Result<(), TestCaseError> {
        let rates = self.rates();
        let flows: Vec<&[u32]> = rates.iter().map(|&(path, _)| &self.paths[path][..]).collect();
        let exact = exact_rates(&self.bandwidths, &flows);
        for ((path, rate), exact) in rates.into_iter().zip(exact) {
            let exact = exact.to_f64();
            prop_assert!((rate - exact).abs() <= 1e-8 * exact, "path {path}: {rate}, not {exact}");
        }
        Ok(())
    }

    fn check_fair(&mut self) -> Result<(), TestCaseError> {
        let rates = self.rates();
        let flows: Vec<(&[u32], f64)> =
            rates.iter().map(|&(path, rate)| (&self.paths[path][..], rate)).collect();
        let bandwidths: Vec<f64> = self.bandwidths.iter().map(|&b| b as f64).collect();
        check_fair(&bandwidths, &flows).map_err(TestCaseError::fail)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn flows_that_start_together_have_the_exact_rates((bandwidths, paths) in network(1..7, 1..10)) {
        let mut world = World::new(&bandwidths, &paths);
        for number in 0..paths.len() {
            world.start(number, 1_000_000);
        }
        world.check_exact()?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn after_any_change_rates_are_those_of_a_solution_from_scratch(
        (bandwidths, paths) in network(1..7, 1..8),
        changes in prop::collection::vec(change(), 1..40),
    ) {
        let mut world = World::new(&bandwidths, &paths);
        for change in &changes {
            world.apply(change);
            if world.flows.len() < 16 {
                world.check_exact()?;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn many_flows_keep_to_the_links_and_each_has_a_bottleneck(
        (bandwidths, paths) in network(20..60, 30..90),
        changes in prop::collection::vec(change(), 300),
    ) {
        let mut world = World::new(&bandwidths, &paths);
        for (number, change) in changes.iter().enumerate() {
            world.apply(change);
            if number % 3 == 0 {
                world.check_fair()?;
            }
        }
    }
}

/// Link chain with rising bandwidth and a long flow over each two neighbours: each link is a separate level, and one
/// change may affect all.
#[test]
fn a_change_reaches_as_far_as_it_must() {
    let links = 400;
    let bandwidths: Vec<u64> = (0..links).map(|link| 1000 + link).collect();
    let mut paths: Vec<Vec<u32>> = (0..links as u32 - 1).map(|link| vec![link, link + 1]).collect();
    paths.push(vec![0]);
    let mut world = World::new(&bandwidths, &paths);
    for number in 0..paths.len() - 1 {
        world.start(number, u64::MAX);
    }
    world.check_fair().unwrap();
    for change in 0..20 {
        world.start(paths.len() - 1, u64::MAX);
        world.check_fair().unwrap();
        if change % 3 == 0 {
            world.apply(&Change::Cancel { flow: world.flows.len() - 1 });
            world.check_fair().unwrap();
        }
    }
    world.apply(&Change::Bandwidth { link: 200, bandwidth: 0 });
    world.check_fair().unwrap();
    world.apply(&Change::Bandwidth { link: 200, bandwidth: 5000 });
    world.check_fair().unwrap();
}
