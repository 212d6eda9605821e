//! A seed's world, what is done to it, and how it must end: in the right bytes or, where something
//! broke, in the error that names it; never in a hang.

use crate::fate::Fate;
use crate::traffic::{Wrong, traffic};
use std::time::Duration;
use weft_fabric::model::LatencyBandwidth;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, Random, World, WorldConfig};
use weft_fabric::{PartRule, Rank, Time};

pub struct Scenario {
    pub seed: u64,
    pub ranks: u32,
    pub rounds: u64,
    pub faults: Faults,
    pub fate: Fate,
    queue_parts: u32,
    queue_bytes: u64,
    parts: PartRule,
    serialised: bool,
}

/// What was seen of a run.
pub struct Seen {
    pub log_hash: u64,
    /// Every moment at which something happened, in order.
    pub moments: Vec<Time>,
}

impl Scenario {
    /// Anything that may happen.
    pub fn random(seed: u64) -> Scenario {
        let mut random = Random::new(seed);
        let ranks = 2 + random.below(4) as u32;
        let mut scenario = Scenario {
            seed,
            ranks,
            rounds: 1 + random.below(6),
            faults: Faults::rough(),
            fate: Fate::Well,
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
        let mut ends: Vec<Rank> = (0..ranks).map(Rank).collect();
        random.shuffle(&mut ends);
        let fate = Fate::draw(&mut random, 8, &ends);
        if matches!(fate, Fate::FailedParts) {
            scenario.faults.fail = 0.02;
        }
        scenario.with_fate(fate, at, &mut random)
    }

    /// The same seed where nothing worse than disorder happens, in this many ranks and rounds.
    pub fn well(seed: u64, ranks: u32, rounds: u64) -> Scenario {
        Scenario {
            ranks,
            rounds,
            faults: Faults::rough(),
            fate: Fate::Well,
            ..Scenario::random(seed)
        }
    }

    /// The same with a fate at a time. Until then the run is the same.
    pub fn with_fate(mut self, fate: Fate, at: Time, random: &mut Random) -> Scenario {
        self.fate = fate;
        fate.befall(&mut self.faults, self.ranks, at, random);
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

    /// Runs it; `Err` says what was wrong.
    pub fn run(&self) -> Result<Seen, String> {
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
        let outcomes = outcomes.map_err(|hang| hang.to_string())?;
        for (rank, outcome) in (0..).map(Rank).zip(&outcomes) {
            if !self.is_right(rank, outcome) {
                return Err(format!("{:?}, but {rank} ended in {outcome:?}", self.fate));
            }
        }
        cluster.settle().map_err(|hang| hang.to_string())?;
        if let Some(driver) = drivers.iter().find(|driver| driver.was_written_after_poison()) {
            return Err(format!("{} was written to after the poison", driver.rank()));
        }
        match world.violations().first() {
            Some(violation) => Err(violation.to_string()),
            None => Ok(Seen { log_hash: world.log_hash(), moments }),
        }
    }

    /// Whoever is not done was killed, or says who or what link was at fault.
    fn is_right(&self, rank: Rank, outcome: &Outcome<Wrong>) -> bool {
        match (outcome, self.fate) {
            (Outcome::Done, _) => true,
            (Outcome::Killed, Fate::Killed(killed)) => killed == rank,
            (Outcome::Failed(Wrong::Poisoned(poison)), fate) => fate.explains(rank, poison.rank),
            _ => false,
        }
    }
}
