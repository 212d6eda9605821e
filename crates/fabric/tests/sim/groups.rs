//! Several groups in one world: ranks are in many at a time, groups are created while others run, and a
//! loss poisons only the lost rank's groups.

use crate::traffic::{Traffic, TrafficError, traffic};
use std::time::Duration;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig, run_groups};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Driver, EngineConfig, PartRule, Rank, Time};
use weft_scenarios::seeds;

/// Group in the world, with traffic.
struct Group {
    hosts: Vec<Rank>,
    drivers: Vec<Traffic>,
}

struct Groups {
    world: World,
    killed: Option<Rank>,
    clusters: Vec<Cluster>,
    groups: Vec<Group>,
}

fn world(random: &mut SplitMix64, seed: u64, ranks: u32, killed: Option<(Time, Rank)>) -> World {
    let mut faults = Faults::rough();
    faults.kills.extend(killed);
    World::new(WorldConfig {
        queue_parts: 1 + random.below(6) as u32,
        queue_bytes: 1 + random.below(400),
        parts: PartRule {
            max_part_bytes: 8 + random.below(100),
            max_pages_per_part: 1 + random.below(4) as u32,
            ..PartRule::WHOLE
        },
        ..WorldConfig::new(ranks, seed).with_faults(faults)
    })
}

impl Groups {
    /// Creates a group with these ranks.
    fn make(&mut self, hosts: &[Rank], rounds: u64) -> Result<(), String> {
        let config = EngineConfig {
            lanes: 64,
            loss_grace: Duration::from_micros(200),
            ..EngineConfig::default()
        };
        let made = Cluster::among(&self.world, hosts, config);
        let mut cluster = made.map_err(|error| error.to_string())?;
        let drivers = traffic(&mut cluster, rounds).map_err(|error| error.to_string())?;
        self.clusters.push(cluster);
        self.groups.push(Group { hosts: hosts.to_vec(), drivers });
        Ok(())
    }

    /// Runs all groups until they end and checks the outcomes.
    fn run(&mut self) -> Result<(), String> {
        let groups = &mut self.groups;
        let outcomes = run_groups(&mut self.clusters, |place, engine, now, events, requests| {
            let driver = &mut groups[place].drivers[engine.rank().index()];
            if engine.check().is_ok() || !driver.is_done() {
                driver.poll(now, events, requests)?;
            }
            engine.submit(requests)?;
            Ok::<bool, TrafficError>(driver.is_done())
        });
        let outcomes = outcomes.map_err(|hang| hang.to_string())?;
        for (group, outcomes) in self.groups.iter().zip(outcomes) {
            let lost = group.hosts.iter().position(|host| Some(*host) == self.killed);
            for (rank, outcome) in (0..).zip(&outcomes) {
                let right = match (outcome, lost) {
                    (Outcome::Done, _) => true,
                    (Outcome::Killed, Some(lost)) => lost == rank,
                    (Outcome::Failed(TrafficError::Poisoned(poison)), Some(lost)) => {
                        poison.rank == Some(Rank(lost as u32))
                    }
                    _ => false,
                };
                if !right {
                    let (hosts, killed) = (&group.hosts, self.killed);
                    return Err(format!("{hosts:?}, killed {killed:?}: rank {rank}: {outcome:?}"));
                }
            }
        }
        for cluster in &mut self.clusters {
            cluster.settle().map_err(|hang| hang.to_string())?;
        }
        let drivers = self.groups.iter().flat_map(|group| &group.drivers);
        if let Some(driver) = drivers.into_iter().find(|d| d.was_written_after_poison()) {
            return Err(format!("{} was written to after the poison", driver.rank()));
        }
        self.world.violations().first().map_or(Ok(()), |breach| Err(breach.to_string()))
    }
}

fn some(random: &mut SplitMix64, ranks: u32, least: u64) -> Vec<Rank> {
    let mut hosts: Vec<Rank> = (0..ranks).map(Rank).collect();
    random.shuffle(&mut hosts);
    hosts.truncate((least + random.below(u64::from(ranks) - least + 1)) as usize);
    hosts
}

fn groups(seed: u64) -> Result<(), String> {
    let mut random = SplitMix64::new(seed ^ 0x6707);
    let ranks = if cfg!(miri) { 3 } else { 3 + random.below(3) as u32 };
    let killed = random
        .chance(0.4)
        .then(|| (Time(random.below(150_000)), Rank(random.below(ranks.into()) as u32)));
    let world = world(&mut random, seed, ranks, killed);
    let killed = killed.map(|(_, rank)| rank);
    let mut all = Groups { world, killed, clusters: Vec::new(), groups: Vec::new() };
    for _ in 0..1 + random.below(3) {
        let hosts = some(&mut random, ranks, 2);
        all.make(&hosts, 1 + random.below(3))?;
    }
    all.run()?;
    // Pairs form at run time, between ranks that are in other groups, or have lost some.
    for _ in 0..random.below(3) {
        let mut pair = some(&mut random, ranks, 2);
        pair.truncate(2);
        if pair.iter().all(|host| all.world.is_running(*host)) {
            all.make(&pair, 1 + random.below(3))?;
        }
    }
    all.run()
}

#[test]
fn a_loss_costs_the_groups_of_the_lost_rank_alone() {
    seeds::each("a_loss_costs", 2_000, groups);
}

#[test]
fn a_group_that_is_poisoned_leaves_the_other_groups_of_its_ranks_alone() {
    let mut random = SplitMix64::new(7);
    let world = world(&mut random, 7, 3, None);
    let mut all = Groups { world, killed: None, clusters: Vec::new(), groups: Vec::new() };
    let hosts: Vec<Rank> = (0..3).map(Rank).collect();
    all.make(&hosts, 2).unwrap();
    let poison = weft_fabric::Poison {
        kind: weft_fabric::Cause::User,
        rank: Some(Rank(1)),
        detail: "only of this group".into(),
    };
    all.clusters[0].engine(Rank(1)).poison(poison);
    let outcomes = all.clusters[0].run(|_, _, _, _| Ok::<bool, TrafficError>(false)).unwrap();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))));
    let mut others = Groups { clusters: Vec::new(), groups: Vec::new(), ..all };
    others.make(&hosts, 3).unwrap();
    others.make(&hosts[1..], 3).unwrap();
    others.run().unwrap();
}
