//! Random worlds, and small ones that break at every single step.

use crate::fate::Fate;
use crate::scenario::Scenario;
use crate::seeds;
use weft_fabric::Rank;
use weft_fabric::providers::sim::Random;

/// Anything that may happen; under miri, which takes minutes for most of it, a small world.
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

/// Whoever is killed, cut off or paused just before anything happens, at every such moment.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_step_may_be_the_last() {
    seeds::each("any_step", 6, |seed| {
        let ranks = 2 + (seed % 2) as u32;
        let well = || Scenario::well(seed, ranks, 2);
        let mut random = Random::new(!seed);
        for (step, at) in well().run()?.moments.into_iter().enumerate() {
            let (a, b) = (Rank(step as u32 % ranks), Rank((step as u32 + 1) % ranks));
            for fate in [Fate::Killed(a), Fate::Cut(a, b), Fate::Paused, Fate::Silent(a)] {
                let run = well().with_fate(fate, at, &mut random).run();
                run.map_err(|wrong| format!("{fate:?} at {} ns: {wrong}", at.0))?;
            }
        }
        Ok(())
    });
}

/// One part fails, whichever it is.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_part_may_fail() {
    seeds::each("any_part", 6, |seed| {
        let well = || Scenario::well(seed, 2 + (seed % 2) as u32, 2);
        let nothing_failed = well().run()?.log_hash;
        for part in 1.. {
            let mut scenario = well();
            scenario.fate = Fate::FailedParts;
            scenario.faults.failing_part = Some(part);
            let seen = scenario.run().map_err(|wrong| format!("part {part} fails: {wrong}"))?;
            if seen.log_hash == nothing_failed {
                // There were not as many.
                return if part > 10 { Ok(()) } else { Err(format!("part {part} did not fail")) };
            }
        }
        Ok(())
    });
}
