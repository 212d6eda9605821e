//! A seed's world: shape, batches, faults, and how it must end.

use crate::common::{Batch, batches, token_types};
use crate::injected_fault::InjectedFault;
use crate::program::{Program, Wrong};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{LatencyBandwidth, PartRule, Rank, Time};
use weft_moe::routing::Routing;
use weft_moe::{CombineMode, Config, DType, Error, Layout, Shape, Weighting};

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

fn pick<T: Copy>(random: &mut SplitMix64, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize]
}

/// A number in `from..=to`.
fn within(random: &mut SplitMix64, from: u32, to: u32) -> u32 {
    from + random.below(u64::from(to - from) + 1) as u32
}

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
        let mut faults = if random.chance(0.1) { Faults::default() } else { Faults::rough() };
        let mut ends: Vec<Rank> = (0..config.ranks).map(Rank).collect();
        random.shuffle(&mut ends);
        let at = Time(random.below(300_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends);
        if matches!(fault, InjectedFault::FailedParts) {
            faults.fail = 0.005;
        }
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

    /// The same seed where every rank must come to its end.
    pub fn well(seed: u64) -> Scenario {
        let mut scenario = Scenario::random(seed);
        scenario.fault = InjectedFault::None;
        scenario.faults = Faults::rough();
        scenario
    }

    /// As [`Scenario::well`], with what `change` makes of the configuration.
    pub fn shaped(seed: u64, change: impl FnOnce(&mut Config)) -> Scenario {
        let mut scenario = Scenario::well(seed);
        change(&mut scenario.config);
        let (config, mut random) = (&scenario.config, SplitMix64::new(!seed));
        scenario.rounds = scenario.rounds.iter().map(|_| round(config, &mut random)).collect();
        scenario
    }
}

fn world(scenario: &Scenario) -> World {
    let mut random = SplitMix64::new(scenario.seed ^ 0x0077_6f72_6c64);
    let model = LatencyBandwidth::new(Duration::from_micros(2), 1_000_000_000);
    World::new(WorldConfig {
        queue_parts: 1 + random.below(20) as u32,
        queue_bytes: 1 + random.below(2000),
        parts: scenario.parts,
        model: Box::new(if random.chance(0.5) { model.serialised() } else { model }),
        ..WorldConfig::new(scenario.config.ranks, scenario.seed)
            .with_faults(scenario.faults.clone())
    })
}

/// Runs a scenario and returns the time of each event, or the failure.
pub fn run(scenario: Scenario) -> Result<Vec<Time>, String> {
    run_programs(scenario).map(|(moments, _)| moments)
}

/// Runs a scenario and returns, by rank and round, the bytes received and the sums of the replies.
pub fn results(scenario: Scenario) -> Result<Vec<BTreeMap<usize, Vec<u8>>>, String> {
    let (_, programs) = run_programs(scenario)?;
    Ok(programs.into_iter().map(|program| program.results).collect())
}

fn run_programs(scenario: Scenario) -> Result<(Vec<Time>, Vec<Program>), String> {
    let world = world(&scenario);
    let fault = scenario.fault;
    let scenario = Rc::new(scenario);
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let mut programs = Program::connect(&mut cluster, &scenario).map_err(|e| e.to_string())?;
    let mut moments = Vec::new();
    let outcomes = cluster.run(|engine, now, events, requests| {
        if moments.last() != Some(&now) {
            moments.push(now);
        }
        programs[engine.rank().0 as usize].step(&world, engine, now, events, requests)
    });
    let outcomes = outcomes.map_err(|hang| {
        let waiting: Vec<String> = programs.iter().map(Program::waits_for).collect();
        format!("{hang}\n{}", waiting.join("\n"))
    })?;
    let wrong: Vec<String> = (0..)
        .zip(&outcomes)
        .filter(|(rank, outcome)| !is_right(Rank(*rank), outcome, fault))
        .map(|(rank, outcome)| format!("rank {rank} ended in {outcome:?}"))
        .collect();
    if !wrong.is_empty() {
        return Err(format!("{fault:?}, but {}", wrong.join("; ")));
    }
    cluster.settle().map_err(|hang| hang.to_string())?;
    match world.violations().first() {
        Some(violation) => Err(violation.to_string()),
        None => Ok((moments, programs)),
    }
}

/// Each unfinished rank was killed, or reports the rank or link at fault.
fn is_right(rank: Rank, outcome: &Outcome<Wrong>, fault: InjectedFault) -> bool {
    match (outcome, fault) {
        (Outcome::Done, _) => true,
        (Outcome::Killed, InjectedFault::Killed(killed)) => killed == rank,
        (
            Outcome::Failed(Wrong::Moe(Error::Fabric(weft_fabric::Error::Poisoned(poison)))),
            fault,
        ) => fault.explains(rank, poison.rank),
        _ => false,
    }
}

/// The shape as `rank` sees it.
pub fn shape(config: &Config, rank: Rank) -> Shape {
    Shape::new(Config { rank: rank.0, ..config.clone() }).expect("a shape of the tests is possible")
}
