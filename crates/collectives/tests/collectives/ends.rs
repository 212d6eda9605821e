//! Ends of collectives: timeouts, closes, peer death.

use crate::communicators::{communicators, process_communicator};
use crate::ranks::{on_processes, process_rank};
use crate::{KINDS, Member, on_threads, sum_of};
use rustix::process::{Resource, Signal, getpid, getrlimit, kill_process, setrlimit};
use std::sync::Barrier;
use std::time::Duration;
use weft_collectives::{Algorithm, Call, Collectives, CollectivesConfig, Options, RunError};
use weft_fabric::{Cause, Error, Poison, ProviderKind, Rank};

#[test]
fn a_wait_names_the_rank_that_it_lacks_and_may_be_repeated() {
    for kind in KINDS {
        let timed_out = Barrier::new(3);
        on_threads(3, kind, CollectivesConfig::default(), |member| {
            let mut vector = vec![1i64; 100];
            if member.rank() == 2 {
                timed_out.wait();
                return member.sum(&mut vector).unwrap();
            }
            let id = member.start(&sum_of(&mut vector)).unwrap();
            let error = member.wait_for(id, Duration::from_millis(50)).unwrap_err();
            let RunError::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert!(missing.iter().any(|missing| missing.rank == Rank(2)), "{error}");
            timed_out.wait();
            member.wait_for(id, crate::PATIENCE).unwrap();
            assert_eq!(vector, vec![3; 100]);
        });
    }
}

#[test]
fn a_call_that_is_only_polled_completes_and_releases_its_input() {
    for kind in KINDS {
        on_threads(2, kind, CollectivesConfig::default(), |member| {
            let next_key = || {
                let mut engine = member.communicator.engine();
                let region = engine.alloc(64).unwrap();
                engine.release(&region);
                region.key()
            };
            let (mut vector, free) = (vec![1i64; 200_000], next_key());
            let algorithm = Some((Algorithm::TwoShot, Options::default()));
            let call = Call { algorithm, ..sum_of(&mut vector) };
            let id = member.start(&call).unwrap();
            assert_ne!(next_key(), free, "the input is read in place");
            while !member.is_done(id).unwrap() {
                std::thread::yield_now();
            }
            assert_eq!(next_key(), free);
            assert!(vector.iter().all(|sum| *sum == 2));
        });
    }
}

#[test]
fn every_poll_of_a_poisoned_group_fails() {
    communicators(2, ProviderKind::Shm, None, |communicator| {
        let member = Member::new(communicator, CollectivesConfig::default());
        let mut vector = vec![1i64; 100];
        if member.rank() == 1 {
            member.barrier().unwrap();
            let detail = "no more".to_owned();
            member.communicator.poison(Poison { kind: Cause::User, rank: None, detail });
            return;
        }
        let id = member.start(&sum_of(&mut vector)).unwrap();
        // The poison may come before this returns.
        let _ = member.barrier();
        while member.is_done(id).is_ok() {
            std::thread::yield_now();
        }
        for _ in 0..3 {
            let error = member.is_done(id).unwrap_err();
            assert!(matches!(error, RunError::Fabric(Error::Poisoned(_))), "{error}");
        }
    });
}

#[test]
fn calls_after_a_close_are_rejected() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let mut member = Member::new(communicator, CollectivesConfig::default());
            let mut vector = vec![1i64; 10];
            for round in 1..20 {
                member.sum(&mut vector).unwrap();
                assert_eq!(vector, vec![1 << round; 10]);
                member.close().unwrap();
                member.close().unwrap();
                assert!(matches!(member.sum(&mut vector), Err(RunError::Closed)));
                member = Member::new(member.communicator, CollectivesConfig::default());
            }
            member.close().unwrap();
        });
    }
}

#[test]
fn a_close_completes_the_calls_under_way() {
    for kind in KINDS {
        communicators(2, kind, None, |communicator| {
            let config = CollectivesConfig { channel_bytes: 4096, ..CollectivesConfig::default() };
            let member = Member::new(communicator, config);
            let mut vector = vec![1i64; 100_000];
            let id = member.start(&sum_of(&mut vector)).unwrap();
            if member.rank() == 1 {
                member.wait_for(id, crate::PATIENCE).unwrap();
            }
            member.close().unwrap();
            assert!(vector.iter().all(|sum| *sum == 2));
        });
    }
}

#[test]
fn configurations_that_differ_are_reported_on_all_ranks() {
    communicators(2, ProviderKind::Shm, None, |communicator| {
        let own = communicator.rank().0;
        let same = CollectivesConfig::default();
        let configs = [
            ("channels", CollectivesConfig { channels: 1 + own, ..same }),
            ("bytes of a channel", CollectivesConfig { channel_bytes: 4096 << own, ..same }),
            (
                "bytes of inputs read in place",
                CollectivesConfig { in_place_bytes: Some(own.into()), ..same },
            ),
            (
                "request for reproducible sums (1: yes)",
                CollectivesConfig { reproducible: own == 1, ..same },
            ),
        ];
        for (name, config) in configs {
            let made = weft_collectives::Collectives::connect(&communicator, config, crate::soon());
            let Err(RunError::Disagreement { what, .. }) = made else { panic!("{name}: accepted") };
            assert_eq!(what, name);
        }
    });
}

fn survivors_name_a_killed_rank(name: &str, kind: ProviderKind) {
    let Some(rank) = process_rank() else {
        let outcomes = on_processes(name, 3);
        assert_eq!(outcomes, [Ok(()), Err("killed by 9".into()), Ok(())]);
        return;
    };
    let member = Member::new(process_communicator(rank, 3, kind), CollectivesConfig::default());
    let mut vector = vec![1i64; 50_000];
    if rank == Rank(1) {
        for _ in 0..20 {
            member.sum(&mut vector).unwrap();
        }
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    // A survivor may be in the killed rank's last sum: that call too may fail.
    let error = (0..).find_map(|_| member.sum(&mut vector).err()).unwrap();
    let RunError::Fabric(Error::Poisoned(poison)) = &error else { panic!("{error}") };
    assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(1))));
    member.close().unwrap();
}

#[test]
fn survivors_over_shm_name_a_killed_rank() {
    let name = "ends::survivors_over_shm_name_a_killed_rank";
    survivors_name_a_killed_rank(name, ProviderKind::Shm);
}

#[test]
fn survivors_over_tcp_name_a_killed_rank() {
    let name = "ends::survivors_over_tcp_name_a_killed_rank";
    survivors_name_a_killed_rank(name, ProviderKind::Tcp);
}

#[test]
fn ranks_name_one_that_cannot_allocate_and_may_connect_again() {
    let name = "ends::ranks_name_one_that_cannot_allocate_and_may_connect_again";
    let Some(rank) = process_rank() else {
        assert_eq!(on_processes(name, 3), [Ok(()), Ok(()), Ok(())]);
        return;
    };
    let communicator = process_communicator(rank, 3, ProviderKind::Shm);
    let large = CollectivesConfig { channel_bytes: 256 << 20, ..CollectivesConfig::default() };
    let limit = getrlimit(Resource::As);
    if rank == Rank(1) {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let room = pages * rustix::param::page_size() as u64 + (64 << 20);
        setrlimit(Resource::As, rustix::process::Rlimit { current: Some(room), ..limit }).unwrap();
    }
    let error = Collectives::connect(&communicator, large, crate::soon()).err().unwrap();
    setrlimit(Resource::As, limit).unwrap();
    match (rank, &error) {
        (Rank(1), RunError::Fabric(_)) => {}
        (_, RunError::PeerFailed { peer: Rank(1), detail }) => assert!(!detail.is_empty()),
        _ => panic!("{error}"),
    }
    let member = Member::new(communicator, CollectivesConfig::default());
    let mut vector = vec![1i64; 1000];
    member.sum(&mut vector).unwrap();
    assert_eq!(vector, vec![3; 1000]);
    member.close().unwrap();
}
