//! Scenario for a seed: a world, a fault, and a check on the outcome. A run ends with the right bytes or,
//! after a fault, with the error that names it; never in a deadlock.

use crate::traffic::traffic;
use std::time::Duration;
use weft_fabric::providers::sim::{Cluster, Faults, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{LatencyBandwidth, PartRule, Time};
use weft_scenarios::{InjectedFault, check_outcomes, settle, shuffled_ranks};

pub struct Scenario {
    pub seed: u64,
    pub ranks: u32,
    pub rounds: u64,
    pub faults: Faults,
    pub fault: InjectedFault,
    queue_parts: u32,
    queue_bytes: u64,
    parts: PartRule,
    serialised: bool,
}

/// Observations in a run.
pub struct Observations {
    pub log_hash: u64,
    /// Event times, in order.
    pub moments: Vec<Time>,
}

impl Scenario {
    /// Random scenario.
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let ranks = 2 + random.below(4) as u32;
        let scenario = Scenario {
            seed,
            ranks,
            rounds: 1 + random.below(6),
            faults: Faults::rough(),
            fault: InjectedFault::None,
            queue_parts: 1 + random.below(6) as u32,
            queue_bytes: 1 + random.below(400),
            parts: PartRule {
                max_part_bytes: 8 + random.below(100),
                max_pages_per_part: 1 + random.below(4) as u32,
                ..PartRule::WHOLE
            },
            serialised: random.chance(0.5),
        };
        let at = Time(random.below(200_000));
        let ends = shuffled_ranks(&mut random, ranks);
        let fault = InjectedFault::draw(&mut random, 8, &ends, 0.02);
        scenario.with_fault(fault, at, &mut random)
    }

    /// Scenario with only reordering, with these ranks and rounds.
    pub fn well(seed: u64, ranks: u32, rounds: u64) -> Scenario {
        Scenario {
            ranks,
            rounds,
            faults: Faults::rough(),
            fault: InjectedFault::None,
            ..Scenario::random(seed)
        }
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

    fn world(&self) -> World {
        let model = LatencyBandwidth::new(Duration::from_micros(2), 1_000_000_000);
        World::new(WorldConfig {
            queue_parts: self.queue_parts,
            queue_bytes: self.queue_bytes,
            parts: self.parts,
            model: Box::new(if self.serialised { model.serialised() } else { model }),
            ..WorldConfig::new(self.ranks, self.seed).with_faults(self.faults.clone())
        })
    }

    /// Runs the scenario.
    ///
    /// # Errors
    /// Text that describes the wrong outcome.
    pub fn run(&self) -> Result<Observations, String> {
        let world = self.world();
        let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
        let mut drivers = traffic(&mut cluster, self.rounds).map_err(|error| error.to_string())?;
        let mut moments = Vec::new();
        let outcomes = cluster.run_drivers(&mut drivers, |driver| {
            if moments.last() != Some(&world.now()) {
                moments.push(world.now());
            }
            driver.is_done()
        });
        check_outcomes(&outcomes.map_err(|hang| hang.to_string())?, self.fault)?;
        settle(&mut cluster)?;
        if let Some(driver) = drivers.iter().find(|driver| driver.was_written_after_poison()) {
            return Err(format!("{} was written to after the poison", driver.rank()));
        }
        Ok(Observations { log_hash: world.log_hash(), moments })
    }
}
