//! Mutation test: `verify` rejects every schedule that fails in the executor.

mod common;

use common::executor::Executor;
use common::mutate::mutate;
use common::{Random, all, credited};
use std::collections::BTreeMap;
use weft_collectives::{Collective, Program, Schedule, verify};

/// Vector elements, chosen so that blocks differ in length where permitted.
fn units(schedule: &impl Schedule) -> u64 {
    let blocks = u64::from(schedule.blocks());
    if schedule.collective() == Collective::AllToAll { 2 * blocks } else { 2 * blocks - 1 }
}

fn wrong(schedule: &impl Schedule, seeds: u64, seed: u64) -> Option<(u64, String)> {
    (seed..seed + seeds).find_map(|seed| {
        Executor::new(schedule, units(schedule), seed).run().err().map(|error| (seed, error))
    })
}

#[test]
fn schedules_run_in_every_order() {
    for ranks in 1..=9 {
        for schedule in all(ranks) {
            if let Some((seed, error)) = wrong(&schedule, 40, 1) {
                panic!(
                    "{} {} of {ranks}: {error} (seed {seed})",
                    schedule.name(),
                    schedule.collective()
                );
            }
        }
    }
}

#[test]
fn schedules_with_credits_are_verified_and_run() {
    for (ranks, number) in (2..6).flat_map(|ranks| (1..6).map(move |n| (ranks, n))) {
        for program in [credited::chain(ranks, number), credited::star(ranks, number)] {
            verify(&program).unwrap_or_else(|error| panic!("{error}\n{program}"));
            assert_eq!(wrong(&program, 200, 1), None, "{program}");
        }
    }
}

#[test]
fn mutations_that_run_wrong_are_refused() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let mutants = number("WEFT_MUTANTS", 14_000);
    let seeds = number("WEFT_MUTANT_SEEDS", 60);
    let mut schedules: Vec<_> =
        (2..=6).flat_map(all).map(|schedule| Program::new(&schedule)).collect();
    // A fifth reuse slots.
    let by_hand = (2..=4).flat_map(|ranks| [3, 5].map(|n| (ranks, n)));
    let by_hand: Vec<_> =
        by_hand.flat_map(|(r, n)| [credited::chain(r, n), credited::star(r, n)]).collect();
    schedules.extend(by_hand.iter().cycle().take(schedules.len() / 4).cloned());
    let (mut refused, mut found, mut made) = (0, 0, 0);
    let mut kinds = BTreeMap::new();
    for mutant in 0..mutants {
        let mut random = Random::new(mutant + 1);
        let schedule = &schedules[random.below(schedules.len() as u32) as usize];
        let mut program = schedule.clone();
        for _ in 0..random.choose(&[1, 1, 1, 2, 3]) {
            mutate(&mut program, &mut random);
        }
        if program == *schedule {
            continue;
        }
        made += 1;
        match verify(&program) {
            Ok(_) => {
                if let Some((seed, error)) = wrong(&program, seeds, mutant * seeds) {
                    panic!(
                        "mutant {mutant} of {} {} of {}: {error} (seed {seed}), but it was verified\n{program:#?}",
                        schedule.name(),
                        schedule.collective(),
                        schedule.ranks()
                    );
                }
            }
            Err(error) => {
                refused += 1;
                let wrong = wrong(&program, seeds.min(40), mutant * seeds).is_some();
                found += u64::from(wrong);
                let kind = format!("{error:?}").split([' ', '(']).next().unwrap_or("").to_owned();
                let (all, bad) = kinds.entry(kind).or_insert((0, 0));
                *all += 1;
                *bad += u64::from(wrong);
            }
        }
    }
    // No verified mutant has failed, or the test would have panicked.
    let outcome = serde_json::json!({
        "mutants": made, "refused": refused, "refused_and_ran_wrong": found,
        "verified": made - refused, "orders_each": seeds, "refused_and_ran_wrong_by_reason": kinds,
    });
    println!("outcome {outcome}");
    assert!(made >= 10_000.min(mutants / 2) && found > mutants / 2);
}
