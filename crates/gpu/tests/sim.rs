//! All ranks' proxies under the simulator: every run puts all bytes, raises all words and gives all credits as the model
//! does or, where something died, ends in the error that names it; never in a hang.

#[path = "sim/kernel.rs"]
mod kernel;
#[path = "sim/model.rs"]
mod model;
#[path = "sim/scenario.rs"]
mod scenario;

use scenario::{Scenario, run};
use weft_scenarios::{before_each_event, in_turn, seeds};

#[test]
fn every_run_ends_as_the_model_or_in_the_right_error() {
    seeds::each("every_run", 2_000, |seed| run(Scenario::random(seed)).map(drop));
}

/// A rank is killed, cut off or paused just before an event, at each event.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs")]
fn any_step_may_be_the_last() {
    seeds::each("any_step", 4, |seed| {
        let ranks = 2 + (seed % 2) as u32;
        let well = || Scenario { ranks, commands: 6, ..Scenario::well(seed) };
        before_each_event(seed, run(well())?, in_turn(ranks), |fault, at, random| {
            run(well().with_fault(fault, at, random)).map(drop)
        })
    });
}

#[test]
fn a_ring_and_a_pool_may_be_as_small_as_one_command() {
    seeds::each("a_ring_and_a_pool", 300, |seed| {
        let scenario = Scenario { slots: 1, rounds: 1, ..Scenario::well(seed) };
        run(scenario.without_holds(0)).map(drop)
    });
}

#[test]
fn held_words_are_credited_by_kernels_only() {
    seeds::each("held_words", 300, |seed| {
        let holds = vec![true; 2];
        let scenario = Scenario { holds, rounds: 2, max_outstanding: 4096, ..Scenario::well(seed) };
        run(scenario).map(drop)
    });
}
