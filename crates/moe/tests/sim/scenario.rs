//! A seed's world: shape, batches, faults, and how it must end.

use crate::common::{Batch, batches, token_types};
use crate::program::Program;
use std::collections::BTreeMap;
use std::rc::Rc;
use weft_fabric::providers::sim::{Cluster, Faults, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{PartRule, Rank, Time};
use weft_moe::routing::Routing;
use weft_moe::{CombineMode, Config, DType, Layout, Shape, Weighting};
use weft_scenarios::{InjectedFault, pick, settle, shuffled_ranks, within, world_config};

/// One round on all ranks.
pub struct Round {
    pub batches: Vec<Batch>,
    /// True if the ranks combine the received tokens, false if they release them.
    pub combined: bool,
    pub weighting: Weighting,
}

pub struct Scenario {
    pub seed: u64,
    pub config: Config,
    pub rounds: Vec<Round>,
    pub faults: Faults,
    pub parts: PartRule,
    pub fault: InjectedFault,
    /// Probability that a rank which could proceed pauses first.
    pub laziness: f64,
}

/// Under miri a larger run takes minutes, not milliseconds.
const MOST_RANKS: u32 = if cfg!(miri) { 2 } else { 6 };
const MOST_ROUNDS: u32 = if cfg!(miri) { 1 } else { 8 };

fn config(random: &mut SplitMix64) -> Config {
    let ranks = within(random, 1, MOST_RANKS);
    let experts = within(random, 1, 13);
    let top_k = within(random, 1, 5);
    let max_tokens = within(random, 1, 9);
    let hidden = within(random, 1, 19);
    let block = pick(random, &[1, 4, 7, 128]);
    let layout = match random.below(2) {
        0 => Layout::Indexed,
        _ => Layout::Contiguous { pad_to: within(random, 1, 5) },
    };
    Config {
        private_rows: within(random, 0, max_tokens),
        // Tight enough that some rounds do not fit.
        max_receive_rows: random.chance(0.4).then(|| within(random, 0, ranks * max_tokens)),
        channels: within(random, 1, 3),
        token_type: pick(random, &token_types(block)),
        combine_dtype: pick(random, &DType::ALL),
        reply_dtype: pick(random, &DType::ALL),
        output_dtype: pick(random, &DType::ALL),
        layout,
        combine: pick(random, &[CombineMode::ReduceAtExpert, CombineMode::PerExpert]),
        ..Config::new(ranks, 0, experts, top_k).sized(max_tokens, hidden)
    }
}

fn round(config: &Config, random: &mut SplitMix64) -> Round {
    let routings = [
        Some(Routing::Uniform),
        Some(Routing::Zipf { exponent: 1.2 }),
        Some(Routing::Incast),
        None,
    ];
    let masked = pick(random, &[0, 0, 1, 4, 8]);
    Round {
        batches: batches(config, pick(random, &routings), masked, random.bits()),
        combined: !random.chance(0.1),
        weighting: pick(random, &[Weighting::AtCombine, Weighting::AtExpert]),
    }
}

fn parts(random: &mut SplitMix64) -> PartRule {
    if random.chance(0.3) {
        return PartRule::WHOLE;
    }
    let most = pick(random, &[16, 100, 400]);
    PartRule {
        max_part_bytes: 1 + random.below(most),
        max_pages_per_part: pick(random, &[1, 1, 2, 4, 4, 5, 20, u32::MAX]),
        stripes: pick(random, &[1, 1, 2, 3]),
        stripe_from: random.below(300),
    }
}

impl Scenario {
    /// Anything that may happen.
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let config = config(&mut random);
        let rounds =
            (0..within(&mut random, 1, MOST_ROUNDS)).map(|_| round(&config, &mut random)).collect();
        let faults = if random.chance(0.1) { Faults::default() } else { Faults::rough() };
        let ends = shuffled_ranks(&mut random, config.ranks);
        let at = Time(random.below(300_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends, 0.005);
        let (parts, laziness) = (parts(&mut random), pick(&mut random, &[0.0, 0.2, 0.6]));
        Scenario { seed, config, rounds, faults, parts, fault: InjectedFault::None, laziness }
            .with_fault(fault, at, &mut random)
    }

    /// Adds a fault at a time. Until then the run is the same.
    pub fn with_fault(
        mut self,
        fault: InjectedFault,
        at: Time,
        random: &mut SplitMix64,
    ) -> Scenario {
        self.fault = fault;
        fault.add_to(&mut self.faults, self.config.ranks, at, random);
        self
    }

    /// The same seed where every rank must finish.
    pub fn well(seed: u64) -> Scenario {
        let mut scenario = Scenario::random(seed);
        scenario.fault = InjectedFault::None;
        scenario.faults = Faults::rough();
        scenario
    }

    /// As [`Scenario::well`], with `change` applied to the configuration.
    pub fn shaped(seed: u64, change: impl FnOnce(&mut Config)) -> Scenario {
        let mut scenario = Scenario::well(seed);
        change(&mut scenario.config);
        let (config, mut random) = (&scenario.config, SplitMix64::new(!seed));
        scenario.rounds = scenario.rounds.iter().map(|_| round(config, &mut random)).collect();
        scenario
    }
}

/// Runs a scenario and returns each event's time, or the failure.
pub fn run(scenario: Scenario) -> Result<Vec<Time>, String> {
    run_programs(scenario).map(|(moments, _)| moments)
}

/// Runs a scenario and returns, by rank and round, the bytes received and the reply sums.
pub fn results(scenario: Scenario) -> Result<Vec<BTreeMap<usize, Vec<u8>>>, String> {
    let (_, programs) = run_programs(scenario)?;
    Ok(programs.into_iter().map(|program| program.results).collect())
}

fn run_programs(scenario: Scenario) -> Result<(Vec<Time>, Vec<Program>), String> {
    let Scenario { seed, fault, parts, .. } = scenario;
    let ranks = scenario.config.ranks;
    let world = World::new(world_config(ranks, seed, 2000, parts, &scenario.faults));
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let mut programs =
        Program::connect(&mut cluster, &Rc::new(scenario)).map_err(|error| error.to_string())?;
    let moments = weft_scenarios::run(&mut cluster, &mut programs, fault)?;
    settle(&mut cluster).map(|()| (moments, programs))
}

/// The shape as `rank` sees it.
pub fn shape(config: &Config, rank: Rank) -> Shape {
    Shape::new(Config { rank: rank.0, ..config.clone() }).expect("a shape of the tests is possible")
}
