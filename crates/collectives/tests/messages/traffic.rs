//! Random traffic: several threads on each rank at once, ranks as processes, the hostile wrapper.

use crate::ranks::{on_processes, process_rank};
use crate::{KINDS, Member, SMALL, communicators, on_threads, pattern, process_communicator};
use weft_collectives::messages::MessagesConfig;
use weft_fabric::random::SplitMix64;
use weft_fabric::{ProviderKind, Rank};

/// Message length: mostly short, sometimes several rings with small slots.
fn length(random: &mut SplitMix64) -> usize {
    let longest = [2, 100, 1000, 20_000][random.below(4) as usize];
    random.below(longest) as usize
}

/// Messages from each rank to each rank, itself included, on this thread's tags. Up to 8 are under way.
fn exchange(member: &Member, size: u32, thread: u64, messages: u64) {
    let me = member.rank();
    let seed = |from: Rank, to: Rank| (u64::from(from.0) << 20 | u64::from(to.0)) << 20 | thread;
    let mut sends: Vec<SplitMix64> =
        (0..size).map(|to| SplitMix64::new(seed(me, Rank(to)))).collect();
    let mut receives: Vec<SplitMix64> =
        (0..size).map(|from| SplitMix64::new(seed(Rank(from), me))).collect();
    for number in 0..messages {
        let mut under_way = Vec::new();
        for (rank, random) in (0..).map(Rank).zip(&mut receives) {
            let expected = pattern(length(random), random.bits());
            let mut memory = vec![0; expected.len()];
            let id = member.start_receive(Some(rank), thread, &mut memory).unwrap();
            under_way.push((id, Some(expected), memory));
        }
        for (rank, random) in (0..).map(Rank).zip(&mut sends) {
            let memory = pattern(length(random), random.bits());
            let id = member.start_send(rank, thread, &memory).unwrap();
            under_way.push((id, None, memory));
        }
        if number % 2 == 1 {
            under_way.reverse();
        }
        for (id, expected, memory) in under_way {
            let completed = member.wait(id).unwrap();
            assert_eq!(completed.bytes, memory.len() as u64);
            assert!(expected.is_none_or(|expected| expected == memory), "bytes of {completed:?}");
        }
    }
}

fn threads_exchange(member: &Member, size: u32, threads: u64, messages: u64) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || exchange(member, size, thread, messages));
        }
    });
}

#[test]
fn several_threads_of_each_rank_send_and_receive_at_once() {
    for kind in KINDS {
        on_threads(3, kind, SMALL, |member| threads_exchange(member, 3, 3, 60));
        on_threads(2, kind, MessagesConfig::default(), |member| {
            threads_exchange(member, 2, 2, 60);
        });
    }
}

#[test]
fn messages_arrive_over_links_that_delay_and_reorder() {
    for kind in KINDS {
        for seed in 0..3 {
            communicators(3, kind, Some(seed), |communicator| {
                let member = Member::new(communicator, SMALL);
                threads_exchange(&member, 3, 2, 10);
                member.close().unwrap();
            });
        }
    }
}

/// Thread tags differ only by the call to this function, so two providers need two tests.
fn processes_exchange(name: &str, kind: ProviderKind) {
    let Some(rank) = process_rank() else {
        return assert_eq!(on_processes(name, 3), vec![Ok(()); 3]);
    };
    let member = Member::new(process_communicator(rank, 3, kind), SMALL);
    threads_exchange(&member, 3, 2, 60);
    member.close().unwrap();
}

#[test]
fn processes_exchange_messages_over_shm() {
    processes_exchange("traffic::processes_exchange_messages_over_shm", ProviderKind::Shm);
}

#[test]
fn processes_exchange_messages_over_tcp() {
    processes_exchange("traffic::processes_exchange_messages_over_tcp", ProviderKind::Tcp);
}
