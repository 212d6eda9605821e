//! Harness for tests whose ranks are processes: each rank ends in time, or is killed.

#[path = "common/mod.rs"]
mod common;

use common::{Limits, PATIENCE, on_processes_with, process_gather, process_rank, stop_here};
use std::sync::mpsc;
use std::time::Duration;
use weft_fabric::Rank;

/// Outcomes for two ranks that run this test; a harness that waits for ever fails the test.
fn outcomes(limits: Limits, name: &'static str) -> Vec<Result<(), String>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(on_processes_with(limits, &[], name, 2)));
    receiver.recv_timeout(PATIENCE).expect("the harness returns")
}

fn was_killed(outcome: &Result<(), String>, rank: u32) -> bool {
    let started = format!("rank {rank} was killed after ");
    outcome.as_ref().is_err_and(|why| why.starts_with(&started) && why.ends_with("did not end"))
}

#[test]
fn a_rank_that_stays_stopped_is_killed() {
    let Some(rank) = process_rank() else {
        let limits = Limits { total: Duration::from_secs(6), ..Limits::default() };
        let ended = outcomes(limits, "a_rank_that_stays_stopped_is_killed");
        assert_eq!(ended[0], Ok(()));
        return assert!(was_killed(&ended[1], 1), "{ended:?}");
    };
    if rank == Rank(1) {
        stop_here();
    }
}

#[test]
fn a_rank_that_spins_after_another_has_failed_is_killed_after_a_grace() {
    let Some(rank) = process_rank() else {
        let limits = Limits { grace: Duration::from_millis(500), ..Limits::default() };
        let name = "a_rank_that_spins_after_another_has_failed_is_killed_after_a_grace";
        let ended = outcomes(limits, name);
        assert!(was_killed(&ended[0], 0), "{ended:?}");
        return assert_eq!(ended[1], Err("exit status: 101".into()));
    };
    if rank == Rank(0) {
        loop {
            std::hint::spin_loop();
        }
    }
    panic!("for the test");
}

#[test]
fn a_gather_without_a_stopped_rank_fails_and_both_ranks_end() {
    let Some(rank) = process_rank() else {
        let limits = Limits { grace: Duration::from_millis(1500), ..Limits::default() };
        let ended = outcomes(limits, "a_gather_without_a_stopped_rank_fails_and_both_ranks_end");
        assert_eq!(ended[0], Err("rank 1 did not come to gather 1".into()));
        return assert!(was_killed(&ended[1], 1), "{ended:?}");
    };
    process_gather(vec![1]);
    if rank == Rank(1) {
        stop_here();
    }
    process_gather(vec![2]);
}
