//! All ranks' drivers under the simulator: every run ends in the right reply on every rank or, where
//! something died, in the error that names it; never in a hang.

mod common;
#[path = "sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;

use scenario::{Scenario, results, run};
use weft_fabric::PartRule;
use weft_moe::Layout;
use weft_scenarios::{before_each_event, in_turn, seeds};

#[test]
fn every_run_ends_in_the_right_reply_or_the_right_error() {
    seeds::each("every_run", 6_000, |seed| run(Scenario::random(seed)).map(drop));
}

/// A rank is killed, cut off or paused just before an event, at each event.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_step_may_be_the_last() {
    seeds::each("any_step", 4, |seed| {
        let well = || {
            let mut scenario = Scenario::shaped(seed, |config| {
                (config.ranks, config.experts, config.top_k) = (2 + (seed % 2) as u32, 3, 2);
            });
            scenario.rounds.truncate(2);
            scenario
        };
        let ranks = well().config.ranks;
        before_each_event(seed, run(well())?, in_turn(ranks), |fault, at, random| {
            run(well().with_fault(fault, at, random)).map(drop)
        })
    });
}

/// Runs as many seeds as given of the cases that `scenario` makes from each.
fn well(test: &str, seeds: u64, scenario: impl Fn(u64) -> Scenario + Sync) {
    seeds::each(test, seeds, |seed| run(scenario(seed)).map(drop));
}

#[test]
fn a_header_may_come_in_many_parts() {
    well("a_header", 40, |seed| {
        let parts = PartRule {
            max_part_bytes: 1 + seed % 20,
            max_pages_per_part: u32::MAX,
            ..PartRule::WHOLE
        };
        Scenario { parts, ..Scenario::well(seed) }
    });
}

/// Every byte received and every sum is the same, whether rows are packed or leave one by one.
#[test]
fn packed_rows_arrive_as_rows_that_are_not_packed() {
    seeds::each("packed_rows", 200, |seed| {
        let by = |parts| results(Scenario { parts, ..Scenario::well(seed) });
        let unpacked = by(PartRule::WHOLE)?;
        for max_pages_per_part in [1, 4] {
            for max_part_bytes in [1 + seed % 300, u64::MAX] {
                let parts = PartRule { max_part_bytes, max_pages_per_part, ..PartRule::WHOLE };
                if by(parts)? != unpacked {
                    return Err(format!("results differ by {parts:?}"));
                }
            }
        }
        Ok(())
    });
}

/// A rank without rows for a peer may be one round ahead of it.
#[test]
fn rows_of_the_next_round_are_not_taken_for_rows_of_this_one() {
    well("rows_of_the_next", 150, |seed| {
        let mut scenario = Scenario::shaped(seed, |config| {
            (config.ranks, config.experts, config.top_k) = (3, 3, 1);
            (config.channels, config.max_tokens, config.private_rows) = (1, 2, 2);
            config.layout = Layout::Contiguous { pad_to: 1 };
            config.max_receive_rows = None;
        });
        scenario.rounds.iter_mut().for_each(|round| round.combined = false);
        scenario
    });
}

/// Rounds within and beyond the capacity, interleaved: each handle gets the matching result.
#[test]
fn a_refused_round_leaves_the_others_alone() {
    well("a_refused_round", 150, |seed| {
        Scenario::shaped(seed, |config| {
            config.channels = 2 + (seed % 2) as u32;
            config.max_receive_rows = Some(config.max_tokens);
        })
    });
}

#[test]
fn without_private_rows_everything_waits_for_the_headers() {
    well("without_private", 60, |seed| Scenario::shaped(seed, |config| config.private_rows = 0));
}

#[test]
#[cfg_attr(miri, ignore = "six ranks take minutes")]
fn most_ranks_may_own_no_expert() {
    well("most_ranks", 60, |seed| {
        Scenario::shaped(seed, |config| (config.ranks, config.experts) = (6, 1 + (seed % 3) as u32))
    });
}

#[test]
fn one_rank_alone_needs_no_wire() {
    well("one_rank_alone", 60, |seed| Scenario::shaped(seed, |config| config.ranks = 1));
}
