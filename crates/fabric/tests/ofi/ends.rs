//! Ranks that leave, die, stop or are slow, and regions that are released.

use crate::common::{self, Member, PATIENCE, on_processes, process_gather, waiting};
use crate::traffic::{join, on_ranks};
use crate::{any_host, config, providers};
use rustix::process::{Signal, getpid, kill_process};
use std::time::{Duration, Instant};
use weft_fabric::providers::OfiConfig;
use weft_fabric::{Cause, Error, Page, Poison, Rank, clock};

/// Poisons the group and checks that all requests end soon after.
fn poisoned_group_ends(member: &mut Member, lost: Rank) {
    let poison = Poison { kind: Cause::Lost, rank: Some(lost), detail: "for the test".into() };
    let begin = Instant::now();
    member.engine.poison(poison);
    member.engine.poll(clock::now(), &mut Vec::new());
    assert_eq!(member.engine.statistics().requests, 0);
    assert!(begin.elapsed() < PATIENCE / 3, "{:?}", begin.elapsed());
}

#[test]
fn what_was_posted_arrives_although_its_sender_leaves_at_once() {
    let name = "ends::what_was_posted_arrives_although_its_sender_leaves_at_once";
    on_ranks(name, 2, |provider, rank, gather| {
        let mut member = join(rank, 2, config(provider), gather);
        if rank == Rank(0) {
            member.source.memory().fill(0, common::SLOT, 7);
            let page = Page {
                source: member.source.key(),
                source_offset: 0,
                destination: member.remotes[&Rank(1)].key,
                destination_offset: 0,
                length: common::SLOT as u64,
            };
            member.engine.write(Rank(1), member.counter, 0, &[page]).unwrap();
            drop(member);
            gather(Vec::new());
            return;
        }
        std::thread::sleep(Duration::from_millis(300));
        waiting(PATIENCE, Duration::ZERO, |waiter| {
            member.engine.wait(member.counter, &[(Rank(0), 1)], waiter).unwrap();
        });
        assert_eq!(common::take(&member.inbox, 0, common::SLOT), [7; common::SLOT]);
        drop(member);
        gather(Vec::new());
    });
}

#[test]
fn a_link_closes_at_once_when_its_peers_have_left() {
    let name = "ends::a_link_closes_at_once_when_its_peers_have_left";
    on_ranks(name, 2, |provider, rank, gather| {
        // A close waits for 1 s if peers have not left; a busy machine delays one close, not all.
        let mut closes = [Duration::MAX; 3];
        for close in &mut closes {
            let mut member = join(rank, 2, config(provider), gather);
            for round in 0..3 {
                member.round(15, round).unwrap();
            }
            gather(Vec::new());
            let begin = Instant::now();
            drop(member);
            *close = begin.elapsed();
            gather(Vec::new());
        }
        closes.sort();
        assert!(closes[1] < Duration::from_millis(900), "{provider}: {closes:?}");
    });
}

#[test]
fn a_rank_killed_over_tcp_leaves_the_others_with_an_error_and_nothing_under_way() {
    let provider = any_host();
    let name = "ends::a_rank_killed_over_tcp_leaves_the_others_with_an_error_and_nothing_under_way";
    let Some(rank) = common::process_rank() else {
        if providers().contains(&provider) {
            let ended = on_processes(name, 3);
            assert_eq!(ended, [Ok(()), Err("killed by 9".into()), Ok(())]);
        }
        return;
    };
    let mut member = join(rank, 3, config(provider), &mut process_gather);
    if rank == Rank(1) {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(7));
            kill_process(getpid(), Signal::KILL)
        });
    }
    member.patience = Duration::from_secs(1);
    let error = (0..).find_map(|round| member.round(13, round).err()).unwrap();
    assert!(matches!(error, Error::Timeout { .. } | Error::Poisoned(_)), "{error}");
    poisoned_group_ends(&mut member, Rank(1));
}

/// The stopped rank resumes after the group was poisoned without it. It stops outside libfabric's calls:
/// libfabric's shm keeps locks in shared memory, and a call that waits for one does not return.
#[test]
fn a_stopped_rank_is_cut_off_and_goes_on_later_without_harm() {
    let name = "ends::a_stopped_rank_is_cut_off_and_goes_on_later_without_harm";
    on_ranks(name, 2, |provider, rank, gather| {
        let mut member = join(rank, 2, config(provider), gather);
        let pids = gather(getpid().as_raw_nonzero().get().to_le_bytes().to_vec());
        let stopped = i32::from_le_bytes(pids[1].clone().try_into().unwrap());
        let stopped = rustix::process::Pid::from_raw(stopped).unwrap();
        (0..3).for_each(|round| member.round(16, round).unwrap());
        // Both have all that was sent before the stop.
        waiting(PATIENCE, Duration::ZERO, |waiter| member.engine.barrier(waiter)).unwrap();
        if rank == Rank(1) {
            common::stop_here();
            member.patience = Duration::from_secs(1);
            let error = (4..).find_map(|round| member.round(16, round).err()).unwrap();
            assert!(matches!(error, Error::Timeout { .. } | Error::Poisoned(_)), "{error}");
            poisoned_group_ends(&mut member, Rank(0));
            drop(member);
            gather(Vec::new());
            return;
        }
        common::until_stopped(stopped);
        member.patience = Duration::from_millis(500);
        let error = (4..).find_map(|round| member.round(16, round).err()).unwrap();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        poisoned_group_ends(&mut member, Rank(1));
        let inbox = member.inbox.clone();
        drop(member);
        inbox.memory().fill(0, inbox.memory().len(), 9);
        kill_process(stopped, Signal::CONT).unwrap();
        gather(Vec::new());
        // Libfabric's shm writes directly into a peer's memory, and is not checked.
        if provider != "shm" {
            let length = inbox.memory().len();
            assert!(common::take(&inbox, 0, length).iter().all(|&byte| byte == 9));
        }
    });
}

/// More parts than any queue holds: the senders are slowed down, and all parts arrive.
#[test]
fn an_owner_that_does_not_poll_loses_nothing() {
    let name = "ends::an_owner_that_does_not_poll_loses_nothing";
    on_ranks(name, 4, |provider, rank, gather| {
        const SIGNALS: u64 = 5000;
        let few = OfiConfig { max_unconsumed: 64, ..config(provider) };
        let mut member = join(rank, 4, few, gather);
        gather(Vec::new());
        let counter = member.counter;
        if rank == Rank(0) {
            std::thread::sleep(Duration::from_secs(2));
            let expected = [1, 2, 3].map(|peer| (Rank(peer), SIGNALS));
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                member.engine.wait(counter, &expected, waiter).unwrap();
            });
        } else {
            for _ in 0..SIGNALS {
                member.engine.signal(Rank(0), counter, 0).unwrap();
            }
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                while member.engine.statistics().requests > 0 {
                    member.engine.poll(clock::now(), &mut Vec::new());
                    assert!(clock::now() < waiter.deadline);
                }
            });
        }
        drop(member);
        gather(Vec::new());
    });
}
