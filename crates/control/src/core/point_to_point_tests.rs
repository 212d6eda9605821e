//! Messages between two ranks; a test or a seed decides when frames are delivered.

use super::super::tests::{member, sent};
use super::*;
use crate::MAX_PAYLOAD;
use crate::core::Action;
use crate::member::number_members;
use proptest::prelude::*;
use std::collections::VecDeque;

fn pair() -> [Core; 2] {
    [0, 1].map(|me| Core::new(Rank(me), number_members((0..2).map(member))))
}

/// Delivers queued messages from `from` to the other rank.
fn deliver(pair: &mut [Core; 2], from: usize) {
    for message in sent(&mut pair[from], Rank(1 - from as u32)) {
        pair[1 - from].receive(Rank(from as u32), message, 0).unwrap();
    }
}

#[test]
fn messages_of_a_channel_come_in_order_and_channels_are_independent() {
    let mut pair = pair();
    for (channel, text) in [(1, "a"), (2, "x"), (1, "b"), (1, "")] {
        pair[0].post(0, Rank(1), channel, text.as_bytes()).unwrap();
    }
    assert_eq!(pair[1].take_message(0, Rank(0), 1).unwrap(), None, "undelivered");
    deliver(&mut pair, 0);
    assert_eq!(pair[1].take_message(0, Rank(0), 2).unwrap().unwrap(), b"x");
    for text in ["a", "b", ""] {
        assert_eq!(pair[1].take_message(0, Rank(0), 1).unwrap().unwrap(), text.as_bytes());
    }
    assert_eq!(pair[1].take_message(0, Rank(0), 1).unwrap(), None);
    assert_eq!(pair[1].take_message(0, Rank(1), 1).unwrap(), None, "the own queue is separate");
}

#[test]
fn a_rank_sends_to_itself() {
    let mut pair = pair();
    pair[0].post(0, Rank(0), 3, b"me").unwrap();
    assert_eq!(pair[0].take_message(0, Rank(0), 3).unwrap().unwrap(), b"me");
    assert!(pair[0].actions.is_empty());
}

#[test]
fn messages_sent_before_a_departure_are_received() {
    let mut pair = pair();
    pair[0].post(0, Rank(1), 1, b"last").unwrap();
    pair[0].leave();
    deliver(&mut pair, 0);
    assert_eq!(pair[1].take_message(0, Rank(0), 1).unwrap().unwrap(), b"last");
    assert!(matches!(pair[1].take_message(0, Rank(0), 1), Err(Error::Left { rank: Rank(0), .. })));
    assert!(matches!(pair[1].post(0, Rank(0), 1, b""), Err(Error::Left { rank: Rank(0), .. })));
}

#[test]
fn a_rank_beyond_the_world_size_is_named() {
    let error = pair()[0].post(0, Rank(2), 1, b"").unwrap_err();
    assert!(matches!(error, Error::NoSuchRank { rank: Rank(2), world_size: 2 }));
    assert!(error.to_string().contains("0 to 1"), "{error}");
}

#[test]
fn a_sender_that_is_faster_than_its_peer_is_refused_until_the_peer_receives() {
    let mut pair = pair();
    let message = vec![7; MAX_PAYLOAD];
    pair[0].post(0, Rank(1), 1, &message).unwrap();
    let refused = pair[0].post(0, Rank(1), 1, &message).unwrap_err();
    assert!(matches!(refused, Error::Backlog { peer: Rank(1), .. }), "{refused}");
    deliver(&mut pair, 0);
    assert!(pair[0].post(0, Rank(1), 1, &message).is_err(), "not received yet");
    assert_eq!(pair[1].take_message(0, Rank(0), 1).unwrap().unwrap().len(), MAX_PAYLOAD);
    deliver(&mut pair, 1);
    pair[0].post(0, Rank(1), 1, &message).unwrap();
}

#[test]
fn a_flooding_peer_violates_the_protocol() {
    let mut pair = pair();
    let message =
        || Message::PointToPoint { generation: 0, channel: 1, payload: vec![0; MAX_PAYLOAD] };
    pair[1].receive(Rank(0), message(), 0).unwrap();
    assert!(pair[1].receive(Rank(0), message(), 0).is_err());
    // So does one that acknowledges unsent bytes.
    let report = Message::Acknowledge { generation: 0, bytes: 1 };
    assert!(pair[1].receive(Rank(0), report, 0).is_err());
}

#[test]
fn a_flood_of_empty_messages_is_bounded_too() {
    let mut pair = pair();
    let message = || Message::PointToPoint { generation: 0, channel: 1, payload: Vec::new() };
    let taken = (0..).take_while(|_| pair[1].receive(Rank(0), message(), 0).is_ok()).count();
    assert_eq!(taken, MAX_QUEUED / 256);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// For sends, deliveries and receives in any order: channels are FIFO and lossless, and a sender is refused
    /// only while its messages are unreceived.
    #[test]
    fn messages_are_never_lost_reordered_or_stuck(
        steps in prop::collection::vec((0u8..4, 0u32..3, 0usize..20 << 20), 1..40),
    ) {
        let mut pair = pair();
        let mut queued: [VecDeque<(usize, u8)>; 3] = Default::default();
        for (number, (step, channel, length)) in (0u8..).zip(steps) {
            let queue = &mut queued[channel as usize];
            match step {
                0 | 1 => {
                    let mut payload = vec![0; length];
                    payload.extend([number]);
                    match pair[0].post(0, Rank(1), channel, &payload) {
                        Ok(()) => queue.push_back((payload.len(), number)),
                        Err(error) => {
                            prop_assert!(matches!(error, Error::Backlog { .. }), "{}", error);
                            prop_assert!(queued.iter().any(|queue| !queue.is_empty()));
                        }
                    }
                }
                2 => [0, 1].into_iter().for_each(|from| deliver(&mut pair, from)),
                _ => {
                    deliver(&mut pair, 0);
                    let received = pair[1].take_message(0, Rank(0), channel).unwrap();
                    let seen = received.map(|payload| (payload.len(), payload[payload.len() - 1]));
                    prop_assert_eq!(seen, queue.pop_front());
                    deliver(&mut pair, 1);
                }
            }
        }
        let sends = |action: &Action| matches!(action, Action::Send(..));
        prop_assert!(pair[1].actions.iter().filter(|action| sends(action)).count() <= 8);
    }
}
