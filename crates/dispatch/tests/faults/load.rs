//! Departures, slow readers and late answers.

use crate::setup::pairs::providers;
use crate::setup::{Front, Node, PATIENCE, SLOTS, is_full, listen, pair_with, until};
use std::time::Duration;
use weft_dispatch::{Failure, Report};
use weft_fabric::ProviderKind;
use weft_fabric::pair::Listener;

/// Connects a node to a front end.
fn add(listener: &Listener, provider: ProviderKind, front: &mut Front, max_batch: u32) -> Node {
    let (pair, node) = pair_with(listener, provider, move |pair| {
        let mut node = Node::new(max_batch, PATIENCE);
        node.join(pair);
        node
    });
    front.join(pair);
    node.join().unwrap()
}

#[test]
fn queries_of_a_node_that_leaves_without_a_drain_are_answered_by_another() {
    for provider in providers() {
        let (listener, mut front) = (listen(provider), Front::new(8));
        // The batches never fill.
        let mut leaving = add(&listener, provider, &mut front, 100);
        for _ in 0..4 {
            front.submit(PATIENCE).unwrap();
        }
        front.poll().unwrap();
        until("queries at the node", || {
            leaving.poll().unwrap();
            leaving.accelerator.next_deadline().is_some()
        });
        let (_, pair) = leaving.pairs.pop().unwrap();
        pair.leave();
        drop(pair);
        until("the loss", || {
            front.poll().unwrap();
            front.nodes.is_empty()
        });
        let mut node = add(&listener, provider, &mut front, 1);
        until("answers", || {
            node.poll().unwrap();
            front.poll().unwrap();
            front.take(|report| panic!("{report:?}"));
            front.answered == 4
        });
        assert_eq!(front.front_end.counts().resent, 4);
    }
}

#[test]
fn a_front_end_that_takes_no_answers_is_refused_more_queries() {
    for provider in providers() {
        let (listener, mut front) = (listen(provider), Front::new(12));
        let mut node = add(&listener, provider, &mut front, 1);
        let mut accepted = 0;
        for _ in 0..200 {
            let result = front.submit(PATIENCE);
            accepted += u32::from(result.is_ok());
            assert!(result.is_ok() || is_full(&result), "{result:?}");
            front.poll().unwrap();
            node.poll().unwrap();
        }
        // The slots hold answers, and the other queries wait for slots.
        until("all slots answered", || {
            front.poll().unwrap();
            node.poll().unwrap();
            front.front_end.counts().answered == u64::from(SLOTS)
        });
        let counts = front.front_end.counts();
        assert_eq!((accepted, counts.in_flight, counts.queued), (12, SLOTS, 12 - SLOTS));
        until("all answers", || {
            front.take(|report| panic!("{report:?}"));
            front.poll().unwrap();
            node.poll().unwrap();
            front.answered == 12
        });
    }
}

#[test]
fn memory_of_a_query_returns_with_its_late_answer() {
    for provider in providers() {
        let (listener, mut front) = (listen(provider), Front::new(8));
        let mut node = add(&listener, provider, &mut front, 4);
        // Three queries wait in the node for a fourth one, and the deadline passes.
        for _ in 0..3 {
            front.submit(Duration::from_millis(20)).unwrap();
        }
        let (mut failed, mut returned) = (0, 0);
        let mut count = |report: &Report<'_>| match report {
            Report::Failed { failure: Failure::NotAnswered(_), quarantined: true, .. } => {
                failed += 1
            }
            Report::Returned { .. } => returned += 1,
            other => panic!("{other:?}"),
        };
        until("queries at the node", || {
            front.poll().unwrap();
            front.take(&mut count);
            // It receives the cancels with the queries at the earliest.
            node.accelerator.next_deadline().is_some()
                || front.front_end.counts().failed == 3
                || node.poll().is_err()
        });
        until("the deadlines", || {
            front.poll().unwrap();
            front.take(&mut count);
            front.front_end.counts().failed == 3
        });
        assert_eq!(front.front_end.counts().quarantined, 3);
        until("the memory", || {
            front.poll().unwrap();
            node.poll().unwrap();
            front.take(&mut count);
            front.front_end.counts().quarantined == 0
        });
        assert_eq!((failed, returned), (3, 3));
        assert_eq!((front.answered, front.front_end.counts().late), (0, 3));
    }
}
