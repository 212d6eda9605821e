//! Peers that violate the protocol behind a correct handshake: each is cut off by name, and the others go on.

use crate::rogue::{CANCELS, HEADERS, Rogue};
use crate::setup::pairs::providers;
use crate::setup::{Front, Node, PATIENCE, listen, pair_with, until};
use std::time::Duration;
use weft_dispatch::Role;

/// Changes a slot's bytes from offset `at`.
fn patched(mut bytes: Vec<u8>, at: usize, patch: &[u8]) -> Vec<u8> {
    bytes[at..at + patch.len()].copy_from_slice(patch);
    bytes
}

type Violation = (&'static str, fn(&Rogue));

/// In place of the answer to the first query, which is in slot 0.
const ANSWERS: [Violation; 11] = [
    ("part 1: expected 0, without an output of tokens", |rogue| {
        rogue.write(0, &rogue.part(1, 16, 16), HEADERS);
    }),
    ("turn 2: expected 1", |rogue| rogue.write(0, &rogue.slot(2, 0, 16), HEADERS)),
    ("17 bytes of output", |rogue| rogue.write(0, &rogue.slot(1, 0, 17), HEADERS)),
    ("bytes of output", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 16), 32, &u64::MAX.to_le_bytes()), HEADERS);
    }),
    ("2 tensors: expected 1", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 16), 16, &[2]), HEADERS);
    }),
    ("1 tensors: expected 0", |rogue| rogue.write(0, &rogue.slot(1, 5, 16), HEADERS)),
    ("bytes 24 to 31: expected zero", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 16), 31, &[1]), HEADERS);
    }),
    ("checksum", |rogue| rogue.write(0, &patched(rogue.slot(1, 0, 16), 70, &[1]), HEADERS)),
    ("turn 2779096485: expected 1", |rogue| rogue.write(0, &[0xa5; 128], HEADERS)),
    ("2 arrivals in slot 0: expected 1", |rogue| {
        rogue.write(0, &rogue.slot(1, 0, 16), HEADERS);
        rogue.write(0, &rogue.slot(1, 0, 16), HEADERS);
    }),
    ("answer in slot 3, which has no query in flight", |rogue| {
        rogue.write(3, &rogue.slot(0, 0, 16), HEADERS);
    }),
];

#[test]
fn a_node_that_violates_the_protocol_is_named_and_its_query_is_answered_elsewhere() {
    for (provider, (expected, violate)) in
        providers().into_iter().flat_map(|provider| ANSWERS.map(|violation| (provider, violation)))
    {
        let listener = listen(provider);
        let mut front = Front::new(8);
        let (pair, rogue) =
            pair_with(&listener, provider, |pair| Rogue::over(pair, Role::Accelerator));
        front.join(pair);
        let rogue = rogue.join().unwrap();
        front.submit(PATIENCE).unwrap();
        front.poll().unwrap();
        violate(&rogue);
        let mut error = None;
        until(expected, || {
            rogue.poll();
            error = front.poll().err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(front.nodes.is_empty());
        let (pair, node) = pair_with(&listener, provider, |pair| {
            let mut node = Node::new(4, Duration::ZERO);
            node.join(pair);
            node
        });
        front.join(pair);
        let mut node = node.join().unwrap();
        until("an answer of the next node", || {
            node.poll().unwrap();
            front.poll().unwrap();
            front.take(|report| panic!("{report:?}"));
            front.answered == 1
        });
        assert_eq!(front.front_end.counts().resent, 1);
    }
}

/// In place of the first query, or after a correct one in slot 0.
const QUERIES: [Violation; 9] = [
    ("turn 2: expected 1", |rogue| rogue.write(0, &rogue.slot(2, 0, 1000), HEADERS)),
    ("1001 bytes of input", |rogue| rogue.write(0, &rogue.slot(1, 0, 1001), HEADERS)),
    ("bytes of input", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 1000), 32, &u64::MAX.to_le_bytes()), HEADERS);
    }),
    ("0 tensors: expected 1", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 1000), 16, &[0]), HEADERS);
    }),
    ("17 tensors: expected 1", |rogue| {
        rogue.write(0, &patched(rogue.slot(1, 0, 1000), 16, &[17]), HEADERS);
    }),
    ("checksum", |rogue| rogue.write(0, &patched(rogue.slot(1, 0, 1000), 70, &[1]), HEADERS)),
    ("turn 2779096485: expected 1", |rogue| rogue.write(7, &[0xa5; 128], HEADERS)),
    ("2 arrivals in slot 0: expected 1", |rogue| {
        rogue.write(0, &rogue.slot(1, 0, 1000), HEADERS);
        rogue.write(0, &rogue.slot(1, 0, 1000), HEADERS);
    }),
    // Cancels in slots without a query, and a query that counts cancels which were not sent, have no effect.
    ("a query in slot 0, whose query has no answer yet", |rogue| {
        rogue.write(1, &[], CANCELS);
        rogue.write(0, &rogue.slot(1, 1000, 1000), HEADERS);
    }),
];

#[test]
fn a_front_end_that_violates_the_protocol_is_named_and_the_other_one_is_served() {
    for (provider, (expected, violate)) in
        providers().into_iter().flat_map(|provider| QUERIES.map(|violation| (provider, violation)))
    {
        let listener = listen(provider);
        // A query in a batch for two waits for the window.
        let mut node = Node::new(2, Duration::from_millis(5));
        let (pair, rogue) =
            pair_with(&listener, provider, |pair| Rogue::over(pair, Role::FrontEnd));
        node.join(pair);
        let rogue = rogue.join().unwrap();
        let (pair, front) = pair_with(&listener, provider, |pair| {
            let mut front = Front::new(8);
            front.join(pair);
            front
        });
        node.join(pair);
        let mut front = front.join().unwrap();
        violate(&rogue);
        let (mut error, mut turn) = (None, 1);
        until(expected, || {
            rogue.poll();
            error = node.poll().err();
            if error.is_none() && expected.starts_with("a query in slot 0") && turn < 3 {
                turn += 1;
                rogue.write(0, &rogue.slot(turn, 0, 1000), HEADERS);
            }
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert_eq!(node.pairs.len(), 1);
        for _ in 0..20 {
            front.submit(PATIENCE).unwrap();
            let next = front.next;
            until("an answer to the other front end", || {
                node.poll().unwrap();
                front.poll().unwrap();
                front.take(|report| panic!("{report:?}"));
                front.answered == next
            });
        }
    }
}
