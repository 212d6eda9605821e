//! A seed's world: words, windows, commands, faults, and how it must end.

use crate::kernel::{Memory, Program};
use crate::model::Model;
use std::cell::RefCell;
use weft_fabric::providers::sim::{Cluster, Faults, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{PartRule, Time};
use weft_scenarios::{InjectedFault, pick, settle, shuffled_ranks, within, world_config};

pub struct Scenario {
    pub seed: u64,
    pub ranks: u32,
    /// By word: true if kernels credit the rounds.
    pub holds: Vec<bool>,
    /// Rounds in a window.
    pub rounds: u32,
    /// Ring slots.
    pub slots: usize,
    /// Parts without credit or completion; more than all of a run if a word is held.
    pub max_outstanding: u32,
    /// Puts, signals and scatters that each kernel pushes.
    pub commands: u32,
    /// Source chunks of a kernel.
    pub chunks: u32,
    pub faults: Faults,
    pub fault: InjectedFault,
    /// Probability that a kernel which could proceed pauses first.
    pub laziness: f64,
}

/// Under miri a larger run takes minutes, not milliseconds.
const MOST_RANKS: u32 = if cfg!(miri) { 2 } else { 5 };
const MOST_COMMANDS: u32 = if cfg!(miri) { 6 } else { 40 };
/// Longest put in bytes.
pub const MAX_PUT: u64 = 24;

impl Scenario {
    /// Anything that may happen.
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let ranks = within(&mut random, 2, MOST_RANKS);
        let holds: Vec<bool> = (0..within(&mut random, 1, 4)).map(|_| random.chance(0.5)).collect();
        let faults = if random.chance(0.1) { Faults::default() } else { Faults::rough() };
        let ends = shuffled_ranks(&mut random, ranks);
        let at = Time(random.below(300_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends, 0.005);
        let scenario = Scenario {
            seed,
            ranks,
            rounds: pick(&mut random, &[1, 2, 3, 8]),
            slots: pick(&mut random, &[1, 2, 4, 64]),
            max_outstanding: 4096,
            commands: within(&mut random, 0, MOST_COMMANDS),
            chunks: within(&mut random, ranks, 3 * ranks),
            laziness: pick(&mut random, &[0.0, 0.2, 0.6]),
            holds,
            faults,
            fault: InjectedFault::None,
        };
        let scenario = if random.chance(0.3) {
            scenario.without_holds(random.below(4) as u32)
        } else {
            scenario
        };
        scenario.with_fault(fault, at, &mut random)
    }

    /// No word is held, so that few outstanding parts suffice: as many as the largest scatter has, and `more`.
    pub fn without_holds(mut self, more: u32) -> Scenario {
        self.holds.fill(false);
        self.max_outstanding = self.ranks - 1 + more;
        self
    }

    /// Adds a fault at a time. Until then the run is the same.
    pub fn with_fault(
        mut self,
        fault: InjectedFault,
        at: Time,
        random: &mut SplitMix64,
    ) -> Scenario {
        self.fault = fault;
        fault.add_to(&mut self.faults, self.ranks, at, random);
        self
    }

    /// The same seed where every rank must finish.
    pub fn well(seed: u64) -> Scenario {
        let faults = Faults::rough();
        Scenario { fault: InjectedFault::None, faults, ..Scenario::random(seed) }
    }
}

/// Runs a scenario and returns each event's time, or the failure.
pub fn run(scenario: Scenario) -> Result<Vec<Time>, String> {
    let Scenario { seed, ranks, fault, .. } = scenario;
    // A put is one part.
    let parts = PartRule { max_part_bytes: MAX_PUT, max_pages_per_part: 1, ..PartRule::WHOLE };
    let world = World::new(world_config(ranks, seed, 200, parts, &scenario.faults));
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let model = RefCell::new(Model::new(ranks as usize, scenario.holds.len()));
    let memories: Vec<Memory> = (0..ranks).map(|_| Memory::new(&scenario)).collect();
    let mut programs = Program::connect(&mut cluster, &scenario, &model, &memories)
        .map_err(|error| error.to_string())?;
    let moments = weft_scenarios::run(&mut cluster, &mut programs, fault)?;
    settle(&mut cluster)?;
    // A loss after the last round may end the links before the last credits.
    if !fault.is_loss() {
        for (rank, program) in cluster.ranks().zip(&programs) {
            program.check_credits(cluster.engine(rank))?;
        }
    }
    Ok(moments)
}
