//! Send and receive semantics: order, tags, lengths, any sender, the own rank, waits.

use crate::{KINDS, Member, PATIENCE, SMALL, communicators, on_threads, pattern, soon};
use std::time::Duration;
use weft_collectives::RunError;
use weft_collectives::messages::{Completed, Messages, MessagesConfig};
use weft_fabric::Rank;

const A: Rank = Rank(0);
const B: Rank = Rank(1);

/// Runs `a` and `b` on two ranks, over each provider.
fn two(config: MessagesConfig, a: impl Fn(&Member) + Sync, b: impl Fn(&Member) + Sync) {
    for kind in KINDS {
        on_threads(
            2,
            kind,
            config,
            |member| if member.rank() == A { a(member) } else { b(member) },
        );
    }
}

#[test]
fn messages_of_other_tags_are_received_before_earlier_ones() {
    two(
        SMALL,
        |a| {
            for (tag, length) in [(3, 300), (7, 5), (3, 0), (7, 1000)] {
                a.send(B, tag, &pattern(length, tag)).unwrap();
            }
        },
        |b| {
            for (tag, length) in [(7, 5), (7, 1000), (3, 300), (3, 0)] {
                let mut bytes = vec![0; length];
                let completed = b.receive(Some(A), tag, &mut bytes).unwrap();
                assert_eq!(completed, Completed { from: A, bytes: length as u64 });
                assert!(bytes == pattern(length, tag));
            }
        },
    );
}

#[test]
fn a_message_longer_than_its_receive_is_an_error_and_the_next_one_arrives() {
    two(
        SMALL,
        |a| {
            for length in [1000, 10, 0] {
                a.send(B, 1, &pattern(length, 1)).unwrap();
            }
        },
        |b| {
            let error = b.receive(Some(A), 1, &mut [0; 999]).unwrap_err();
            let RunError::MessageTooLong { peer: A, tag: 1, sent: 1000, room: 999 } = error else {
                panic!("{error}");
            };
            let text = "the message with tag 1 from rank 0 has 1000 bytes: the receive has 999";
            assert_eq!(error.to_string(), format!("{text}; pass as many at both ranks"));
            let mut bytes = [9; 20];
            assert_eq!(b.receive(Some(A), 1, &mut bytes).unwrap().bytes, 10);
            assert_eq!((&bytes[..10], &bytes[10..]), (&pattern(10, 1)[..], &[9; 10][..]));
            assert_eq!(b.receive(None, 1, &mut []).unwrap(), Completed { from: A, bytes: 0 });
        },
    );
}

#[test]
fn both_ranks_send_before_they_receive_within_the_buffers() {
    let config = MessagesConfig { max_unexpected_bytes: 200_000, ..SMALL };
    let exchange = |member: &Member| {
        let peer = Rank(1 - member.rank().0);
        for tag in 0..4 {
            member.send(peer, tag, &pattern(40_000, tag)).unwrap();
        }
        for tag in (0..4).rev() {
            let mut bytes = vec![0; 40_000];
            member.receive(Some(peer), tag, &mut bytes).unwrap();
            assert!(bytes == pattern(40_000, tag));
        }
    };
    two(config, exchange, exchange);
}

#[test]
fn a_send_beyond_the_buffers_waits_for_its_receive_and_names_the_peer() {
    let config = MessagesConfig { max_unexpected_bytes: 0, ..SMALL };
    two(
        config,
        |a| {
            let bytes = pattern(4 * 128 - 32 + 1, 0);
            let id = a.start_send(B, 5, &bytes).unwrap();
            let error = a.wait_for(id, Duration::from_millis(30)).unwrap_err();
            let RunError::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!((missing[0].rank, missing.len()), (B, 1));
            let text = error.to_string();
            let begin = "the send of 481 bytes with tag 5 to rank 1 (480 taken) did not finish";
            assert!(text.starts_with(begin), "{text}");
            // Outside the ring, so that the receive is called now.
            a.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
            assert_eq!(a.wait(id).unwrap(), Completed { from: A, bytes: 481 });
            assert!(matches!(a.wait(id), Err(RunError::Invalid { what: "operation", .. })));
        },
        |b| {
            b.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
            let mut bytes = [0; 481];
            b.receive(Some(A), 5, &mut bytes).unwrap();
            assert!(bytes[..] == pattern(481, 0));
        },
    );
}

#[test]
fn a_rank_sends_to_itself() {
    let config = MessagesConfig { max_unexpected_bytes: 500, ..SMALL };
    let alone = |member: &Member| {
        let me = member.rank();
        // Buffered, then beyond the buffers, then into a receive that waits.
        member.send(me, 1, &pattern(300, 1)).unwrap();
        let long = pattern(900, 2);
        let pending = member.start_send(me, 1, &long).unwrap();
        assert!(!member.messages.is_done(&mut member.communicator.access(), pending).unwrap());
        let mut bytes = vec![0; 900];
        assert_eq!(member.receive(Some(me), 1, &mut bytes).unwrap().bytes, 300);
        assert!(bytes[..300] == pattern(300, 1));
        assert_eq!(
            member.receive(None, 1, &mut bytes).unwrap(),
            Completed { from: me, bytes: 900 }
        );
        assert!(bytes == long);
        assert_eq!(member.wait(pending).unwrap().bytes, 900);
        let mut late = vec![0; 700];
        let id = member.start_receive(None, 9, &mut late).unwrap();
        member.send(me, 9, &pattern(700, 3)).unwrap();
        assert_eq!(member.wait(id).unwrap().bytes, 700);
        assert!(late == pattern(700, 3));
        // A message that is too long for its receive.
        member.send(me, 2, &[0; 3]).unwrap();
        let error = member.receive(Some(me), 2, &mut [0; 2]).unwrap_err();
        assert!(matches!(error, RunError::MessageTooLong { sent: 3, room: 2, .. }), "{error}");
    };
    two(config, alone, alone);
    on_threads(1, KINDS[0], config, alone);
}

#[test]
fn ranks_outside_of_the_group_are_rejected() {
    two(
        SMALL,
        |a| {
            let send = a.start_send(Rank(2), 0, &[1]).unwrap_err();
            assert_eq!(send.to_string(), "rank of a message: 2: expected 0 to 1");
            let receive = a.start_receive(Some(Rank(7)), 0, &mut [0]).unwrap_err();
            assert!(matches!(receive, RunError::Invalid { .. }), "{receive}");
        },
        |_| {},
    );
}

#[test]
fn ranks_with_other_rings_are_refused_on_every_rank_and_may_try_again() {
    for kind in KINDS {
        communicators(3, kind, None, |communicator| {
            let me = communicator.rank().0;
            let config = MessagesConfig { slots: if me == 1 { 5 } else { 4 }, ..SMALL };
            let error = Messages::connect(&communicator, config, soon()).err().unwrap();
            let RunError::Disagreement { peer, what: "slots", ours, theirs } = error else {
                panic!("{error}");
            };
            let expected = if me == 1 { (Rank(0), 5, 4) } else { (Rank(1), 4, 5) };
            assert_eq!((peer, ours, theirs), expected);

            let config = MessagesConfig { slots: u32::from(me != 2) * 4, ..SMALL };
            let error = Messages::connect(&communicator, config, soon()).err().unwrap();
            match me {
                2 => assert!(matches!(error, RunError::Invalid { what: "slots", .. }), "{error}"),
                _ => assert!(
                    error.to_string().starts_with("rank 2 could not create its part: slots: 0"),
                    "{error}"
                ),
            }
            let member = Member::new(communicator, SMALL);
            member.send(Rank((me + 1) % 3), 0, &[1]).unwrap();
            member.receive(Some(Rank((me + 2) % 3)), 0, &mut [0]).unwrap();
            member.close().unwrap();
        });
    }
}

/// Waits with no time left return what has ended, and do not block.
#[test]
fn a_wait_may_be_repeated_until_the_message_comes() {
    two(
        SMALL,
        |a| {
            a.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
            a.send(B, 1, &pattern(2000, 1)).unwrap();
        },
        |b| {
            let mut bytes = vec![0; 2000];
            let id = b.start_receive(Some(A), 1, &mut bytes).unwrap();
            let error = b.wait_for(id, Duration::ZERO).unwrap_err();
            assert!(matches!(error, RunError::Timeout { .. }), "{error}");
            b.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
            let begin = std::time::Instant::now();
            let completed = loop {
                match b.wait_for(id, Duration::ZERO) {
                    Err(RunError::Timeout { .. }) if begin.elapsed() < PATIENCE => {}
                    ended => break ended.unwrap(),
                }
            };
            assert_eq!(completed.bytes, 2000);
            assert!(bytes == pattern(2000, 1));
        },
    );
}
