//! The drivers of all ranks under the simulator: every run ends in the right answer on every rank or,
//! where something died, in the error that names it; never in a hang.
//!
//! `WEFT_SEED=n` replays one seed, `WEFT_SEEDS=n` runs another number of them.

mod common;
#[path = "sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;

use scenario::Scenario;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use weft_fabric::PartRule;
use weft_moe::Layout;

const SEEDS: u64 = 2400;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs what `scenario` makes of each seed.
fn run_seeds(count: u64, scenario: impl Fn(u64) -> Scenario) {
    let seeds = number("WEFT_SEED").map_or(0..count, |seed| seed..seed + 1);
    for seed in seeds {
        match catch_unwind(AssertUnwindSafe(|| scenario::run(scenario(seed)))) {
            Ok(Ok(())) => {}
            Ok(Err(wrong)) => panic!("WEFT_SEED={seed}: {wrong}"),
            Err(panic) => {
                eprintln!("WEFT_SEED={seed} panicked");
                resume_unwind(panic);
            }
        }
    }
}

#[test]
fn every_run_ends_in_the_right_answer_or_the_right_error() {
    run_seeds(number("WEFT_SEEDS").unwrap_or(SEEDS), Scenario::random);
}

#[test]
fn a_header_may_come_in_many_parts() {
    run_seeds(40, |seed| {
        let parts = PartRule { max_part_bytes: 1 + seed % 20, max_pages_per_part: u32::MAX };
        Scenario { parts, ..Scenario::well(seed) }
    });
}

/// A rank that sends a peer nothing in one round may be in the next while the peer is not.
#[test]
fn rows_of_the_next_round_are_not_taken_for_rows_of_this_one() {
    run_seeds(150, |seed| {
        let mut scenario = Scenario::shaped(seed, |config| {
            (config.ranks, config.experts, config.top_k) = (3, 3, 1);
            (config.buffers, config.max_tokens, config.private_rows) = (1, 2, 2);
            config.layout = Layout::Contiguous { pad_to: 1 };
            config.max_receive_rows = None;
        });
        scenario.rounds.iter_mut().for_each(|round| round.combined = false);
        scenario
    });
}

/// Rounds that fit and rounds that do not, side by side: each handle hears of its own.
#[test]
fn a_refused_round_leaves_the_others_alone() {
    run_seeds(150, |seed| {
        Scenario::shaped(seed, |config| {
            config.buffers = 2 + (seed % 2) as u32;
            config.max_receive_rows = Some(config.max_tokens);
        })
    });
}

#[test]
fn without_private_rows_everything_waits_for_the_headers() {
    run_seeds(60, |seed| Scenario::shaped(seed, |config| config.private_rows = 0));
}

#[test]
fn most_ranks_may_own_no_expert() {
    run_seeds(60, |seed| {
        Scenario::shaped(seed, |config| (config.ranks, config.experts) = (6, 1 + (seed % 3) as u32))
    });
}

#[test]
fn one_rank_alone_needs_no_wire() {
    run_seeds(60, |seed| Scenario::shaped(seed, |config| config.ranks = 1));
}
