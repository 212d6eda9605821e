//! Watches that end by a thread's progress on demand, by calls, and with the group.

use crate::{KINDS, PATIENCE, counters, two, waiting};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use weft_control::{Cause, Poison};
use weft_fabric::{Communicator, CounterId, Error, Progress, Rank, WatchCondition, WatchId, clock};

/// An accepted watch's id, and the outcome once it ends.
type Watch = (Option<WatchId>, Receiver<Result<(), Error>>);

fn watch(communicator: &Communicator, condition: WatchCondition) -> Watch {
    let (send, ended) = channel();
    let callback = Box::new(move |outcome| send.send(outcome).unwrap());
    (communicator.engine().watch(condition, callback).unwrap(), ended)
}

fn raised(counter: CounterId, round: u64, peer: Rank, raises: u64) -> WatchCondition {
    WatchCondition::Raised { counter, round: Some(round), expected: vec![(peer, raises)] }
}

#[test]
fn a_thread_ends_watches_while_progress_is_demanded() {
    for kind in KINDS {
        for progress in [Progress::Caller, Progress::Thread] {
            two(kind, progress, Duration::ZERO, |communicator, peer| {
                let [counter] = counters(communicator);
                for round in 0..20 {
                    let demand = communicator.demand_progress().unwrap();
                    let (_, arrived) = watch(communicator, raised(counter, round, peer, 1));
                    let credit = WatchCondition::Credited { counter, peer, round: Some(round + 1) };
                    let (_, credited) = watch(communicator, credit);
                    let request = communicator.engine().signal(peer, counter, round).unwrap();
                    let (_, left) = watch(communicator, WatchCondition::Ended(request));
                    for ended in [left, arrived] {
                        ended.recv_timeout(PATIENCE).unwrap().unwrap();
                    }
                    communicator.engine().credit_now(peer, counter).unwrap();
                    credited.recv_timeout(PATIENCE).unwrap().unwrap();
                    drop(demand);
                }
            });
        }
    }
}

#[test]
fn a_credit_ends_a_watch_that_expected_more() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [counter] = counters(communicator);
            communicator.engine().signal(peer, counter, 0).unwrap();
            waiting(communicator, |waiter| communicator.wait(counter, &[(peer, 1)], waiter))
                .unwrap();
            let (id, now) = watch(communicator, raised(counter, 0, peer, 1));
            assert_eq!(id, None, "it holds");
            now.try_recv().unwrap().unwrap();
            let (_, more) = watch(communicator, raised(counter, 0, peer, 2));
            assert!(more.try_recv().is_err());
            communicator.engine().credit_now(peer, counter).unwrap();
            let outcome = more.try_recv().unwrap();
            assert!(matches!(outcome, Err(Error::OldRound { current: 1, .. })), "{outcome:?}");
        });
    }
}

#[test]
fn a_watch_that_is_given_up_names_the_missing_peers_and_ends_silently() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [counter] = counters(communicator);
            let (id, ended) = watch(communicator, raised(counter, 0, peer, 2));
            let (id, now) = (id.unwrap(), clock::now());
            let error = communicator.engine().unwatch(id, now, now).unwrap();
            assert!(error.to_string().contains("raised 0 of 2"), "{error}");
            assert!(communicator.engine().unwatch(id, now, now).is_none());
            assert!(ended.try_recv().is_err());
        });
    }
}

#[test]
fn watches_end_with_their_counter_and_their_group() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [released, last] = counters(communicator);
            let (_, of_released) = watch(communicator, raised(released, 0, peer, 1));
            communicator.engine().release_counter(released).unwrap();
            let outcome = of_released.try_recv().unwrap();
            assert!(matches!(outcome, Err(Error::Unknown { .. })), "{outcome:?}");
            let _demand = communicator.demand_progress().unwrap();
            let (_, ended) = watch(communicator, raised(last, 0, peer, 1));
            communicator.control().all_gather(&[], PATIENCE).unwrap();
            if communicator.rank() == Rank(0) {
                let (rank, detail) = (Some(Rank(0)), "test".into());
                communicator.poison(Poison { kind: Cause::User, rank, detail });
            }
            let outcome = ended.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(outcome, Err(Error::Poisoned(_))), "{outcome:?}");
            let never = Box::new(|_| panic!("a rejected watch calls back"));
            let refused = communicator.engine().watch(raised(last, 0, peer, 1), never);
            assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
        });
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [counter] = counters(communicator);
            let (_, ended) = watch(communicator, raised(counter, 0, peer, 1));
            communicator.engine().end_watches();
            let closed = ended.try_recv().unwrap();
            assert!(
                matches!(closed, Err(Error::Control(weft_control::Error::Closed))),
                "{closed:?}"
            );
        });
    }
}

/// The poison may come between the last poll and the end.
#[test]
fn watches_that_are_ended_in_a_poisoned_group_name_the_poison() {
    two(KINDS[0], Progress::Caller, Duration::ZERO, |communicator, peer| {
        let [counter] = counters(communicator);
        let (_, ended) = watch(communicator, raised(counter, 0, peer, 1));
        communicator.control().all_gather(&[], PATIENCE).unwrap();
        let mut engine = communicator.engine();
        engine.poison(Poison { kind: Cause::User, rank: None, detail: "test".into() });
        engine.end_watches();
        let outcome = ended.try_recv().unwrap();
        assert!(matches!(outcome, Err(Error::Poisoned(_))), "{outcome:?}");
    });
}

#[test]
fn watches_end_with_the_thread_that_makes_progress_for_them() {
    for kind in KINDS {
        for progress in [Progress::Caller, Progress::Thread] {
            two(kind, progress, Duration::ZERO, |communicator, peer| {
                let [counter] = counters(communicator);
                let _demand = communicator.demand_progress().unwrap();
                let (_, ended) = watch(communicator, raised(counter, 0, peer, 1));
                communicator.close();
                let outcome = ended.recv_timeout(PATIENCE).unwrap();
                let is_closed =
                    |error| matches!(error, Error::Control(weft_control::Error::Closed));
                assert!(outcome.is_err_and(is_closed));
                assert!(communicator.demand_progress().err().is_some_and(is_closed));
            });
        }
    }
}
