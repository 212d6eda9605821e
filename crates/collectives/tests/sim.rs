//! Collectives and messages on all ranks under the simulator: every run ends with the right bytes on every rank or,
//! after a fault, in the error that names it; never in a hang.

#[path = "sim/collectives.rs"]
mod collectives;
#[path = "sim/hostile.rs"]
mod hostile;
#[path = "sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;

use scenario::{Order, Scenario, run};
use weft_scenarios::{before_each_event, in_turn, seeds};

#[test]
fn every_run_ends_with_the_right_bytes_or_the_right_error() {
    seeds::each("every_run", 3_000, |seed| run(Scenario::random(seed)).map(drop));
}

/// A rank is killed, cut off or paused just before an event, at each event.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs, of some seconds each")]
fn any_step_may_be_the_last() {
    seeds::each("any_step", 4, |seed| {
        let well = || Scenario::shaped(seed, |shape| (shape.ranks, shape.messages) = (2, 8));
        before_each_event(seed, run(well())?, in_turn(2), |fault, at, random| {
            run(well().with_fault(fault, at, random)).map(drop)
        })
    });
}

/// Blocking calls in one order over all messages need no buffer: each receive has its message next.
#[test]
fn blocking_calls_in_one_order_need_no_buffers() {
    seeds::each("blocking_calls", 300, |seed| {
        run(Scenario::shaped(seed, |shape| {
            (shape.order, shape.buffers) = (Order::Blocking, 0);
        }))
        .map(drop)
    });
}

/// All ranks send all messages before the first receive: the buffers take them.
#[test]
fn sends_before_receives_end_in_buffers() {
    seeds::each("sends_before", 300, |seed| {
        run(Scenario::shaped(seed, |shape| {
            (shape.order, shape.buffers) = (Order::SendsFirst, 1 << 20);
        }))
        .map(drop)
    });
}

#[test]
fn one_slot_and_no_buffer_suffice() {
    seeds::each("one_slot", 300, |seed| {
        run(Scenario::shaped(seed, |shape| (shape.slots, shape.buffers) = (1, 0))).map(drop)
    });
}

#[test]
fn one_rank_alone_needs_no_wire() {
    seeds::each("one_rank", 100, |seed| {
        run(Scenario::shaped(seed, |shape| shape.ranks = 1)).map(drop)
    });
}

#[test]
fn every_call_ends_in_its_result_or_in_the_right_error() {
    seeds::each("every_call", 3_000, |seed| collectives::run(collectives::Scenario::random(seed)));
}

/// With reordered, delayed and paused writes, but without losses, all calls complete.
#[test]
fn all_calls_complete_without_losses() {
    seeds::each("all_calls", 1_000, |seed| collectives::run(collectives::Scenario::well(seed)));
}
