//! Front ends and accelerator nodes under the simulator: every query is answered once with the right bytes, or fails
//! once with a cause that the run explains; no slot and no memory is lost.

#[path = "sim/echo.rs"]
mod echo;
#[path = "sim/program.rs"]
mod program;
#[path = "sim/scenario.rs"]
mod scenario;

use scenario::{Scenario, run, run_counted};
use std::sync::atomic::{AtomicU64, Ordering};
use weft_fabric::Rank;
use weft_scenarios::{before_each_event, seeds};

#[test]
fn every_query_ends_once_with_its_answer_or_its_cause() {
    seeds::each("every_query", 3_000, |seed| run(&Scenario::random(seed)).map(drop));
}

/// Nodes drain and join, and none is lost: no query fails but by the deadline, a cancel or the backend.
#[test]
fn no_query_fails_without_a_loss() {
    seeds::each("no_query_fails", 500, |seed| run(&Scenario::well(seed)).map(drop));
}

/// Tokens are reported in order, each once, before the answer; after a loss, from the first one.
#[test]
fn tokens_arrive_in_parts_and_begin_anew_after_a_loss() {
    let (parts, restarts) = (AtomicU64::new(0), AtomicU64::new(0));
    seeds::each("tokens_arrive", 1_000, |seed| {
        let (_, [streamed, restarted]) = run_counted(&Scenario::streaming(seed))?;
        parts.fetch_add(streamed, Ordering::Relaxed);
        restarts.fetch_add(restarted, Ordering::Relaxed);
        Ok(())
    });
    let counts = (parts.into_inner(), restarts.into_inner());
    let is_whole = std::env::var_os("WEFT_SEED").is_none() && !cfg!(miri);
    assert!(!is_whole || counts.0 > 1_000 && counts.1 > 10, "parts and restarts: {counts:?}");
}

/// A node is killed, cut off or paused just before an event, at each event.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs")]
fn any_step_may_be_the_last_of_a_node() {
    seeds::each("any_step", 3, |seed| {
        let scenario = Scenario::small(seed);
        let ends = |event| {
            let node = Rank(scenario.front_ends + event % scenario.nodes);
            (node, [Rank(0), node])
        };
        before_each_event(seed, run(&scenario)?, ends, |fault, at, random| {
            run(&Scenario::small(seed).with_fault(fault, at, random)).map(drop)
        })
    });
}

/// A node leaves without a drain just before an event, at each event: its queries are answered by the other node, or
/// fail with the loss; none waits for the deadline. A front end that leaves is removed by the nodes.
#[test]
#[cfg_attr(miri, ignore = "it is hundreds of runs")]
fn any_step_may_be_followed_by_a_departure() {
    seeds::each("any_step_may_be_followed", 10, |seed| {
        let (node, front_end) = (Rank(1), Rank(0));
        for at in run(&Scenario::small(seed))? {
            for rank in [node, front_end] {
                run(&Scenario::small(seed).with_departure(rank, at))
                    .map_err(|wrong| format!("{rank} leaves at {} ns: {wrong}", at.0))?;
            }
        }
        Ok(())
    });
}

/// A query is cancelled just before an event, at each event: before it is sent, in flight, in a batch, answered.
#[test]
fn a_cancel_may_meet_an_answer_at_any_step() {
    seeds::each("a_cancel", 20, |seed| {
        for at in run(&Scenario::one_query(seed, None))? {
            run(&Scenario::one_query(seed, Some(at)))?;
        }
        Ok(())
    });
}
