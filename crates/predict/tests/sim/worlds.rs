//! The fabric's random traffic, on networks.

use std::time::Duration;

use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{PartRule, Rank, Time};

use crate::injected_fault::InjectedFault;
use crate::traffic::{TrafficError, traffic};
use crate::{any_network, seeds};

/// Runs a seed's world; its log stands for all that happened.
fn run(seed: u64) -> Result<u64, String> {
    let mut random = SplitMix64::new(seed);
    let ranks = 2 + random.below(5) as u32;
    let mut faults = if random.chance(0.2) { Faults::default() } else { Faults::rough() };
    faults.reorder = Duration::from_nanos(random.below(20_000));
    let mut ends: Vec<Rank> = (0..ranks).map(Rank).collect();
    random.shuffle(&mut ends);
    let fault = InjectedFault::draw(&mut random, 8, &ends);
    if matches!(fault, InjectedFault::FailedParts) {
        faults.fail = 0.02;
    }
    fault.add_to(&mut faults, ranks, Time(random.below(200_000)), &mut random);
    let model = any_network(&mut random, ranks);
    let world = World::new(WorldConfig {
        queue_parts: 1 + random.below(6) as u32,
        queue_bytes: 1 + random.below(400),
        parts: PartRule {
            max_part_bytes: 8 + random.below(100),
            max_pages_per_part: 1 + random.below(4) as u32,
            ..PartRule::WHOLE
        },
        model: Box::new(model),
        ..WorldConfig::new(ranks, seed).with_faults(faults)
    });
    let rounds = 1 + random.below(6);
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let mut drivers = traffic(&mut cluster, rounds).map_err(|error| error.to_string())?;
    let outcomes = cluster
        .run_drivers(&mut drivers, |driver| driver.is_done())
        .map_err(|hang| format!("{fault:?}: {hang}"))?;
    for (rank, outcome) in (0..).map(Rank).zip(&outcomes) {
        if !is_right(rank, outcome, fault) {
            return Err(format!("{fault:?}, but {rank} ended in {outcome:?}"));
        }
    }
    cluster.settle().map_err(|hang| hang.to_string())?;
    if let Some(driver) = drivers.iter().find(|driver| driver.was_written_after_poison()) {
        return Err(format!("{} was written to after the poison", driver.rank()));
    }
    match world.violations().first() {
        Some(violation) => Err(violation.to_string()),
        None => Ok(world.log_hash()),
    }
}

fn is_right(rank: Rank, outcome: &Outcome<TrafficError>, fault: InjectedFault) -> bool {
    match (outcome, fault) {
        (Outcome::Done, _) => true,
        (Outcome::Killed, InjectedFault::Killed(killed)) => killed == rank,
        (Outcome::Failed(TrafficError::Poisoned(poison)), fault) => {
            fault.explains(rank, poison.rank)
        }
        _ => false,
    }
}

#[test]
fn random_traffic_ends_in_the_right_bytes_or_the_right_error() {
    seeds::each("random_traffic", 2_000, |seed| run(seed).map(drop));
}

#[test]
fn one_seed_is_one_run() {
    let log = |seed| run(seed).unwrap();
    let logs: Vec<u64> = (0..20).map(log).collect();
    assert_eq!(logs, (0..20).map(log).collect::<Vec<u64>>());
    assert!(logs.windows(2).all(|pair| pair[0] != pair[1]));
}
