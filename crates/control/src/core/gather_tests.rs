//! Collective calls on several ranks; a test or a seed decides when frames are delivered.

use super::super::tests::{member, sent};
use super::*;
use crate::core::Action;
use crate::member::number_members;
use proptest::prelude::*;
use std::collections::VecDeque;

fn world(size: u32) -> Vec<Core> {
    (0..size).map(|me| Core::new(Rank(me), number_members((0..size).map(member)))).collect()
}

fn deliver_all(world: &mut [Core]) {
    for from in 0..world.len() {
        for to in (0..world.len()).filter(|to| *to != from) {
            for message in sent(&mut world[from], Rank(to as u32)) {
                world[to].receive(Rank(from as u32), message, 0).unwrap();
            }
        }
    }
}

const BARRIER: (Operation, Payload) = (Operation::Barrier, Payload::Same(b""));

#[test]
fn a_repeated_call_continues_the_unfinished_one() {
    let mut world = world(2);
    let begin = |core: &mut Core, bytes| {
        core.gather(0, Operation::AllGather, Payload::Same(bytes))
            .map_err(|error| error.to_string())
    };
    let first = begin(&mut world[0], b"zero").unwrap();
    world[0].gather_pause(0, first);
    deliver_all(&mut world);
    let other = begin(&mut world[0], b"other").unwrap_err();
    assert!(other.contains("all_gather") && other.contains("the same bytes"), "{other}");
    assert_eq!(begin(&mut world[0], b"zero").unwrap(), first);
    assert!(world[0].actions.is_empty(), "no part is sent twice");
    let theirs = begin(&mut world[1], b"one").unwrap();
    deliver_all(&mut world);
    for (core, sequence) in world.iter_mut().zip([first, theirs]) {
        assert_eq!(core.gather_done(0, sequence).unwrap().unwrap(), [&b"zero"[..], b"one"]);
    }
    assert_eq!(begin(&mut world[0], b"zero").unwrap(), first + 1, "it has ended");
}

#[test]
fn a_call_that_another_thread_waits_for_is_not_continued() {
    let mut world = world(2);
    let first = world[0].gather(0, BARRIER.0, BARRIER.1).unwrap();
    assert_eq!(world[0].gather(0, BARRIER.0, BARRIER.1).unwrap(), first + 1);
}

#[test]
fn parts_of_an_abandoned_call_are_dropped() {
    let mut world = world(2);
    let first = world[0].gather(0, BARRIER.0, BARRIER.1).unwrap();
    world[0].gather_pause(0, first);
    let second = world[0].gather(0, Operation::AllGather, Payload::Same(b"a")).unwrap();
    let theirs = world[1].gather(0, BARRIER.0, BARRIER.1).unwrap();
    deliver_all(&mut world);
    assert!(world[0].gather_done(0, second).is_none());
    assert_eq!(world[0].groups[&0].gathers.len(), 1);
    assert!(world[1].gather_done(0, theirs).unwrap().is_ok());
}

#[test]
fn mismatched_calls_are_named_at_once_even_if_a_third_rank_is_missing() {
    let mut world = world(3);
    let zero = world[0].gather(0, Operation::AllGather, Payload::Same(b"data")).unwrap();
    let bytes = vec![b"internal".to_vec(); 3];
    let one = world[1].gather(0, Operation::Share, Payload::Each(&bytes)).unwrap();
    deliver_all(&mut world);
    let (gather, share) = (Operation::AllGather, Operation::Share);
    for (me, sequence, peer, theirs, ours) in
        [(0, zero, Rank(1), share, gather), (1, one, Rank(0), gather, share)]
    {
        let error = world[me].gather_done(0, sequence).unwrap().unwrap_err();
        let Error::CallMismatch { peer: named, theirs: other, ours: own } = error else {
            panic!("{error:?}")
        };
        assert_eq!((named, other, own), (peer, theirs, ours));
    }
}

#[test]
fn an_exchange_sends_each_element_to_its_rank_only() {
    let mut world = world(3);
    let to_each = [b"zero".to_vec(), b"one".to_vec(), b"two".to_vec()];
    world[0].gather(0, Operation::Exchange, Payload::Each(&to_each)).unwrap();
    let frames: Vec<(Rank, Vec<u8>)> = world[0]
        .actions
        .drain(..)
        .filter_map(|action| match action {
            Action::Send(to, frame) => Some((to, frame.to_vec())),
            _ => None,
        })
        .collect();
    assert_eq!(frames.len(), 2);
    for (to, frame) in frames {
        assert!(frame.ends_with(&to_each[to.index()]), "{to}");
    }
}

/// A rank's part in a call during a random run.
fn part(call: usize, rank: u32) -> Vec<u8> {
    vec![call as u8, rank as u8]
}

const KINDS: [Operation; 3] = [Operation::AllGather, Operation::Barrier, Operation::Share];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// For any early ends, repeats and deliveries: every call ends at every rank with that call's parts.
    #[test]
    fn repeated_calls_always_pair_with_the_same_call_of_the_others(
        kinds in prop::collection::vec(0usize..3, 1..6),
        steps in prop::collection::vec((0usize..3, 0u8..4), 0..200),
    ) {
        let mut world = world(3);
        let mut links = vec![vec![VecDeque::new(); 3]; 3];
        // By rank: ended call count, and sequence number that it waits for.
        let mut ended = [0usize; 3];
        let mut waits: [Option<u64>; 3] = [None; 3];
        let rest = (0..3 * 200).map(|n: usize| (n % 3, if n.is_multiple_of(2) { 3 } else { 0 }));
        for (rank, step) in steps.into_iter().chain(rest) {
            match (step, waits[rank]) {
                (1, Some(sequence)) => {
                    world[rank].gather_pause(0, sequence);
                    waits[rank] = None;
                }
                (3, _) => {
                    for from in (0..3).filter(|from| *from != rank) {
                        for message in sent(&mut world[from], Rank(rank as u32)) {
                            links[from][rank].push_back(message);
                        }
                        if let Some(message) = links[from][rank].pop_front() {
                            world[rank].receive(Rank(from as u32), message, 0).unwrap();
                        }
                    }
                }
                (_, None) if ended[rank] < kinds.len() => {
                    let (call, kind) = (ended[rank], KINDS[kinds[ended[rank]]]);
                    let each: Vec<Vec<u8>> = vec![part(call, rank as u32); 3];
                    let payload = if kind == Operation::Share {
                        Payload::Each(&each)
                    } else {
                        Payload::Same(&each[0])
                    };
                    waits[rank] = Some(world[rank].gather(0, kind, payload).unwrap());
                }
                (_, Some(sequence)) => {
                    if let Some(result) = world[rank].gather_done(0, sequence) {
                        let expected: Vec<_> = (0..3).map(|r| part(ended[rank], r)).collect();
                        prop_assert_eq!(result.unwrap(), expected);
                        ended[rank] += 1;
                        waits[rank] = None;
                    }
                }
                _ => {}
            }
        }
        prop_assert_eq!(ended, [kinds.len(); 3], "a call never ended");
    }
}
