//! Ends of messages: close, abandon, poison, a peer that departs or dies.

use crate::ranks::{on_processes, process_rank};
use crate::{KINDS, Member, SMALL, communicators, on_threads, pattern, process_communicator, soon};
use std::time::Duration;
use weft_collectives::RunError;
use weft_collectives::messages::MessagesConfig;
use weft_fabric::{Cause, Error, Poison, ProviderKind, Rank};

fn poison_of(error: RunError) -> Poison {
    match error {
        RunError::Fabric(Error::Poisoned(poison)) => poison,
        error => panic!("{error}"),
    }
}

#[test]
fn a_close_drops_messages_under_way_and_ends_waits() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let member = Member::new(communicator, SMALL);
            let peer = Rank(1 - member.rank().0);
            let mut bytes = vec![0; 100];
            let long = pattern(100_000, 1);
            // It has no receive: a part is in the peer's ring.
            member.start_send(peer, 1, &long).unwrap();
            let receive = member.start_receive(Some(peer), 2, &mut bytes).unwrap();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| member.wait(receive));
                std::thread::sleep(Duration::from_millis(20));
                member.close().unwrap();
                assert!(matches!(waiting.join().unwrap(), Err(RunError::Closed)));
            });
            assert!(member.messages.is_closed());
            assert!(matches!(member.send(peer, 1, &[1]), Err(RunError::Closed)));
            assert!(matches!(member.wait(receive), Err(RunError::Closed)));
            member.close().unwrap();
            // The communicator has room for the next ones.
            let member = Member::new(member.communicator, SMALL);
            member.send(peer, 1, &[1]).unwrap();
            assert_eq!(member.receive(Some(peer), 1, &mut bytes).unwrap().bytes, 1);
            member.close().unwrap();
        });
    }
}

/// Lanes and memory from closed messages are used again.
#[test]
fn messages_may_be_created_and_closed_many_times() {
    let config = MessagesConfig { slots: 500, ..SMALL };
    for kind in KINDS {
        communicators(2, kind, None, |mut communicator| {
            for round in 0..200 {
                let member = Member::new(communicator, config);
                let peer = Rank(1 - member.rank().0);
                member.send(peer, round, &[1]).unwrap();
                assert_eq!(member.receive(Some(peer), round, &mut [0]).unwrap().bytes, 1);
                member.close().unwrap();
                communicator = member.communicator;
            }
        });
    }
}

#[test]
fn a_close_by_one_rank_alone_times_out_and_ends_its_messages() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let member = Member::new(communicator, SMALL);
            if member.rank() == Rank(0) {
                let error = member.close_within(Duration::from_millis(50)).unwrap_err();
                assert!(matches!(error, RunError::Fabric(_)), "{error}");
                assert!(matches!(member.send(Rank(1), 0, &[1]), Err(RunError::Closed)));
            } else {
                member.messages.abandon(&member.communicator);
                assert!(matches!(member.send(Rank(0), 0, &[1]), Err(RunError::Closed)));
                std::thread::sleep(Duration::from_millis(100));
            }
        });
    }
}

#[test]
fn poison_ends_messages_with_its_cause() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let member = Member::new(communicator, SMALL);
            let mut bytes = [0; 9];
            if member.rank() == Rank(0) {
                let poison = poison_of(member.receive(Some(Rank(1)), 1, &mut bytes).unwrap_err());
                assert_eq!(poison.detail, "for the test");
                poison_of(member.send(Rank(1), 1, &[1]).unwrap_err());
                poison_of(member.start_receive(None, 1, &mut bytes).unwrap_err());
            } else {
                let (kind, rank) = (Cause::User, Some(Rank(1)));
                let detail = "for the test".to_owned();
                member.communicator.poison(Poison { kind, rank, detail });
                poison_of(member.send(Rank(0), 1, &[1]).unwrap_err());
            }
            member.close().unwrap();
        });
    }
}

/// Rank 1 is killed while both a send and a receive on rank 0 wait for it.
fn a_killed_peer(name: &str, kind: ProviderKind) {
    let Some(rank) = process_rank() else {
        let outcomes = on_processes(name, 2);
        assert_eq!(outcomes[0], Ok(()));
        return assert!(outcomes[1].is_err(), "{outcomes:?}");
    };
    let member = Member::new(process_communicator(rank, 2, kind), SMALL);
    let mut bytes = [0; 9];
    if rank == Rank(1) {
        assert_eq!(member.receive(Some(Rank(0)), 1, &mut bytes).unwrap().bytes, 9);
        let _ = member.communicator.exchange(&vec![vec![]; 2], soon());
        std::process::abort();
    }
    member.send(Rank(1), 1, &bytes).unwrap();
    let (long, mut target) = (pattern(1 << 20, 1), [0; 9]);
    let send = member.start_send(Rank(1), 2, &long).unwrap();
    let receive = member.start_receive(Some(Rank(1)), 3, &mut target).unwrap();
    // The peer dies once both are under way.
    let _ = member.communicator.exchange(&vec![vec![]; 2], soon());
    assert_eq!(poison_of(member.wait(receive).unwrap_err()).rank, Some(Rank(1)));
    assert_eq!(poison_of(member.wait(send).unwrap_err()).rank, Some(Rank(1)));
    member.close().unwrap();
}

#[test]
fn a_killed_peer_ends_messages_over_shm() {
    a_killed_peer("ends::a_killed_peer_ends_messages_over_shm", ProviderKind::Shm);
}

#[test]
fn a_killed_peer_ends_messages_over_tcp() {
    a_killed_peer("ends::a_killed_peer_ends_messages_over_tcp", ProviderKind::Tcp);
}

#[test]
fn a_peer_that_leaves_ends_a_receive_from_it() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let member = Member::new(communicator, SMALL);
            if member.rank() == Rank(1) {
                member.send(Rank(0), 1, &[7]).unwrap();
                member.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
                return member.communicator.leave();
            }
            member.communicator.exchange(&vec![vec![]; 2], soon()).unwrap();
            // The last message has arrived; no other one will.
            assert_eq!(member.receive(Some(Rank(1)), 1, &mut [0]).unwrap().bytes, 1);
            let poison = poison_of(member.receive(Some(Rank(1)), 1, &mut [0]).unwrap_err());
            assert_eq!((poison.kind, poison.rank), (Cause::Left, Some(Rank(1))));
        });
    }
}

#[test]
fn a_message_of_many_rings_arrives_whole() {
    for kind in KINDS {
        on_threads(2, kind, MessagesConfig::default(), |member| {
            let bytes = pattern(20_000_003, 4);
            if member.rank() == Rank(0) {
                member.send(Rank(1), 0, &bytes).unwrap();
            } else {
                let mut got = vec![0; bytes.len()];
                member.receive(None, 0, &mut got).unwrap();
                assert!(got == bytes);
            }
        });
    }
}
