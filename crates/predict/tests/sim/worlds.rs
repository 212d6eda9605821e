//! The fabric's random traffic, on networks.

use std::time::Duration;

use weft_fabric::providers::sim::{Cluster, Faults, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{PartRule, Time};
use weft_scenarios::{InjectedFault, check_outcomes, seeds, settle, shuffled_ranks};

use crate::any_network;
use crate::traffic::traffic;

/// Runs a seed's world; the log stands for all that happened.
fn run(seed: u64) -> Result<u64, String> {
    let mut random = SplitMix64::new(seed);
    let ranks = 2 + random.below(5) as u32;
    let mut faults = if random.chance(0.2) { Faults::default() } else { Faults::rough() };
    faults.reorder = Duration::from_nanos(random.below(20_000));
    let ends = shuffled_ranks(&mut random, ranks);
    let fault = InjectedFault::draw(&mut random, 8, &ends, 0.02);
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
    check_outcomes(&outcomes, fault)?;
    settle(&mut cluster)?;
    if let Some(driver) = drivers.iter().find(|driver| driver.was_written_after_poison()) {
        return Err(format!("{} was written to after the poison", driver.rank()));
    }
    Ok(world.log_hash())
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
