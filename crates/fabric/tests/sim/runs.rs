//! Random worlds, and small ones with a fault before every single step. For example,
//! `WEFT_SEED=17 cargo test -p weft-fabric --test sim random_traffic` replays a world.

use crate::scenario::Scenario;
use weft_scenarios::{InjectedFault, before_each_event, in_turn, seeds};

/// Random scenario; under miri, where most take minutes, a small world.
fn any_world(seed: u64) -> Scenario {
    if cfg!(miri) { Scenario::well(seed, 2, 1) } else { Scenario::random(seed) }
}

#[test]
fn random_traffic_ends_in_the_right_bytes_or_the_right_error() {
    seeds::each("random_traffic", 14_000, |seed| any_world(seed).run().map(drop));
}

#[test]
fn one_seed_is_one_run() {
    let log = |seed| any_world(seed).run().unwrap().log_hash;
    let seeds = if cfg!(miri) { 0..2 } else { 0..20 };
    let logs: Vec<u64> = seeds.clone().map(log).collect();
    assert_eq!(logs, seeds.map(log).collect::<Vec<u64>>());
    assert!(logs.windows(2).all(|pair| pair[0] != pair[1]));
}

/// Kills, cuts off or pauses a rank just before each event in a run.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_step_may_be_the_last() {
    seeds::each("any_step", 6, |seed| {
        let ranks = 2 + (seed % 2) as u32;
        let well = || Scenario::well(seed, ranks, 2);
        before_each_event(seed, well().run()?.moments, in_turn(ranks), |fault, at, random| {
            well().with_fault(fault, at, random).run().map(drop)
        })
    });
}

/// Lets each single part in a run fail.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_part_may_fail() {
    seeds::each("any_part", 6, |seed| {
        let well = || Scenario::well(seed, 2 + (seed % 2) as u32, 2);
        let nothing_failed = well().run()?.log_hash;
        for part in 1.. {
            let mut scenario = well();
            scenario.fault = InjectedFault::FailedParts(0.0);
            scenario.faults.failing_part = Some(part);
            let seen = scenario.run().map_err(|wrong| format!("part {part} fails: {wrong}"))?;
            if seen.log_hash == nothing_failed {
                // The run has fewer parts.
                return if part > 10 { Ok(()) } else { Err(format!("part {part} did not fail")) };
            }
        }
        Ok(())
    });
}
