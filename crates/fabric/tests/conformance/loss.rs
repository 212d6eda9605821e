//! Peers that are killed, stopped, or leave in order; writes whose writer leaves at once.

use crate::common::{
    self, Member, MemberConfig, PATIENCE, SplitMix64, fill, on_processes, process_gather, take,
    waiting,
};
use crate::provider::{Provider, Shape, waited};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::sim::World;
use weft_fabric::{Cause, Error, Page, Poison, Rank, clock};

/// The rank that is killed or stopped.
const VICTIM: Rank = Rank(1);
const LARGE: usize = 64 << 20;

/// Three processes; one kills itself during the rounds. The others fail and name it if the provider
/// detects losses; otherwise a survivor may wait for the other one, which waits for the killed rank.
pub fn a_killed_peer_is_named(provider: &Provider) {
    if !provider.survives_kills {
        return println!("skipped: {}: a killed rank may leave its locks locked", provider.name);
    }
    if let Some(world) = provider.world {
        return a_rank_killed_by_its_world_is_named(provider, &world());
    }
    let Some(rank) = common::process_rank() else {
        if provider.has_processes() && provider.has(Shape::Default) {
            let ended = on_processes(&provider.test("a_killed_peer_is_named"), 3);
            assert_eq!(ended, [Ok(()), Err("killed by 9".into()), Ok(())]);
        }
        return;
    };
    let joining = MemberConfig::default();
    let mut member = provider.join(Shape::Default, joining, rank, 3, &mut process_gather);
    if rank == VICTIM {
        std::thread::spawn(move || {
            std::thread::sleep(moment());
            kill_process(rustix::process::getpid(), Signal::KILL)
        });
    }
    survive(provider, &mut member);
}

/// The same for ranks that are threads.
fn a_rank_killed_by_its_world_is_named(provider: &Provider, world: &World) {
    provider.on_ranks(3, |rank, gather| {
        let mut member = provider.join(Shape::Default, MemberConfig::default(), rank, 3, gather);
        if rank == VICTIM {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(moment());
                    world.kill(VICTIM);
                });
                member.patience = Duration::from_secs(1);
                (0..).find_map(|round| member.round(13, round).err()).unwrap();
            });
        } else {
            survive(provider, &mut member);
        }
        gather(Vec::new());
    });
}

/// Random time during the first rounds.
fn moment() -> Duration {
    Duration::from_micros(SplitMix64::new(u64::from(std::process::id())).below(20_000))
}

/// Runs rounds until the victim's loss ends them.
fn survive(provider: &Provider, member: &mut Member) {
    let seconds = if provider.notices_death { 10 } else { 1 };
    member.patience = Duration::from_secs(seconds);
    let error = (0..).find_map(|round| member.round(13, round).err()).unwrap();
    match &error {
        // Providers without this guarantee may detect it too, by a broken connection.
        Error::Poisoned(poison) => assert_eq!(poison.rank, Some(VICTIM), "{error}"),
        Error::Timeout { missing, .. } if !provider.notices_death => {
            assert!(!missing.is_empty(), "{error}");
        }
        _ => panic!("{error}"),
    }
    // Memory shared with the killed rank is still valid.
    fill(&member.inbox, 0, common::SLOT, 7);
}

/// A stopped process receives no more than the kernel buffers take.
pub fn a_stopped_peer_is_named_and_a_fence_drains_its_requests(provider: &Provider) {
    if let Some(world) = provider.world {
        return a_rank_stopped_by_its_world_is_named(provider, &world());
    }
    let case = "a_stopped_peer_is_named_and_a_fence_drains_its_requests";
    let Some(rank) = common::process_rank() else {
        if provider.has_processes() && provider.has(Shape::Default) {
            let ended = on_processes(&provider.test(case), 2);
            assert_eq!(ended, [Ok(()), Err("killed by 9".into())]);
        }
        return;
    };
    let joining = MemberConfig { slot: LARGE, source: LARGE, ..MemberConfig::default() };
    let mut member = provider.join(Shape::Default, joining, rank, 2, &mut process_gather);
    let pids = process_gather(std::process::id().to_string().into_bytes());
    if rank == VICTIM {
        if provider.survives_kills {
            let _ = waited(|w| member.engine.wait(member.counter, &[(Rank(0), u64::MAX)], w));
        }
        // All locks are unlocked: it stops outside the provider.
        std::thread::sleep(PATIENCE);
        unreachable!("it was to be stopped and killed");
    }
    let pid: i32 = std::str::from_utf8(&pids[1]).unwrap().parse().unwrap();
    let peer = Pid::from_raw(pid).unwrap();
    kill_process(peer, Signal::STOP).unwrap();
    write_and_give_up(provider, member);
    kill_process(peer, Signal::KILL).unwrap();
}

/// The same for ranks that are threads. The stopped rank resumes later, and finds itself fenced.
fn a_rank_stopped_by_its_world_is_named(provider: &Provider, world: &World) {
    provider.on_ranks(2, |rank, gather| {
        let joining = MemberConfig { slot: LARGE, source: LARGE, ..MemberConfig::default() };
        let mut member = provider.join(Shape::Default, joining, rank, 2, gather);
        gather(Vec::new());
        if rank == VICTIM {
            let wait = [(Rank(0), u64::MAX)];
            let error = waited(|w| member.engine.wait(member.counter, &wait, w)).unwrap_err();
            let Error::Poisoned(poison) = &error else { panic!("{error}") };
            assert_eq!(poison.rank, Some(Rank(0)), "{error}");
        } else {
            world.stop(VICTIM);
            write_and_give_up(provider, member);
            world.resume(VICTIM);
        }
        gather(Vec::new());
    });
}

/// Writes to the stopped rank, waits until the loss, and leaves the group: the source is free at once.
fn write_and_give_up(provider: &Provider, mut member: Member) {
    let counter = member.counter;
    let page = member.page(VICTIM, 0, 0, LARGE);
    let engine = &mut member.engine;
    let request = engine.write(VICTIM, counter, 0, &[page]).unwrap();
    let patience = Duration::from_millis(500);
    let written = waiting(patience, Duration::ZERO, |w| engine.wait_for_request(request, w));
    assert!(
        written.is_err() || provider.may_be_done_at_once,
        "64 MiB were taken by a stopped peer"
    );
    let late = written.and_then(|()| {
        waiting(patience, Duration::ZERO, |w| engine.wait_for_credit(counter, VICTIM, 1, w))
    });
    let error = late.unwrap_err();
    let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [VICTIM], "{error}");
    let (kind, detail) = (Cause::User, "it is stopped".into());
    engine.poison(Poison { kind, rank: Some(VICTIM), detail });
    engine.poll(clock::now(), &mut Vec::new());
    assert!(engine.is_drained(request));
    let memory = member.source.memory().clone();
    engine.release(&member.source);
    drop(member.source);
    assert_eq!(Arc::strong_count(&memory), 1, "the source is still borrowed");
}

/// Poisons the group with a window of writes at every stage between this engine and the peer.
pub fn a_fence_under_load_gives_every_source_back(provider: &Provider) {
    const WRITES: usize = 64;
    const CELL: usize = 20_000;
    if !provider.has(Shape::Default) {
        return;
    }
    provider.on_ranks(2, |rank, gather| {
        let slot = WRITES * CELL;
        let joining =
            MemberConfig { slot, source: slot, window: WRITES as u32, ..MemberConfig::default() };
        let mut member = provider.join(Shape::Default, joining, rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let mut requests = Vec::new();
        for write in 0..WRITES {
            let page = member.page(peer, write * CELL, write * CELL, CELL);
            let round = write as u64;
            requests.push(member.engine.write(peer, counter, round, &[page]).unwrap());
            if write == WRITES / 2 {
                member.engine.poll(clock::now(), &mut Vec::new());
            }
        }
        let engine = &mut member.engine;
        let (kind, detail) = (Cause::User, "enough".into());
        engine.poison(Poison { kind, rank: None, detail });
        engine.poll(clock::now(), &mut Vec::new());
        assert!(requests.iter().all(|request| engine.is_drained(*request)));
        let memory = member.source.memory().clone();
        engine.release(&member.source);
        drop(member.source);
        assert_eq!(Arc::strong_count(&memory), 1, "the source is still borrowed");
        gather(Vec::new());
    });
}

/// A rank writes, announces that it departs through the control plane and leaves; the other one
/// continues.
pub fn a_peer_that_left_in_peace_poisons_nothing(provider: &Provider) {
    const LENGTH: usize = 1 << 20;
    if !provider.has(Shape::Default) {
        return;
    }
    provider.on_ranks(2, |rank, gather| {
        let joining = MemberConfig { slot: LENGTH, source: LENGTH, ..MemberConfig::default() };
        let mut member = provider.join(Shape::Default, joining, rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let page = member.page(peer, 0, 0, LENGTH);
        if rank == Rank(1) {
            fill(&member.source, 0, LENGTH, 5);
            let request = member.engine.write(peer, counter, 0, &[page]).unwrap();
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            drop(member);
            gather(Vec::new());
            return;
        }
        let raises = member.raises(peer, [LENGTH]);
        waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
        assert!(member.slot_of(peer).iter().all(|seen| *seen == 5));
        gather(Vec::new());
        let engine = &mut member.engine;
        engine.poison_flag().peer_left(peer);
        engine.credit(peer, counter).unwrap();
        let requests: Vec<_> =
            (0..20).map(|_| engine.write(peer, counter, 0, &[page]).unwrap()).collect();
        let until = clock::now().after(Duration::from_millis(1500));
        while clock::now() < until {
            engine.poll(clock::now(), &mut Vec::new());
            std::thread::sleep(Duration::from_millis(1));
        }
        for request in requests {
            waited(|w| engine.wait_for_request(request, w)).unwrap();
        }
        engine.check().unwrap();
    });
}

/// Writes in all sizes in one window, over queues that accept them all and over one that accepts one part
/// at a time: once links have accepted all writes, the rank may leave.
pub fn what_was_posted_arrives_although_its_writer_leaves(provider: &Provider) {
    const WRITES: usize = 8;
    const CELL: usize = 40_000;
    for shape in [Shape::Default, Shape::Queue(1)] {
        if !provider.has(shape) {
            continue;
        }
        let slot = WRITES * CELL;
        let joining =
            MemberConfig { slot, source: slot, window: WRITES as u32, ..MemberConfig::default() };
        provider.on_ranks(2, |rank, gather| {
            let mut member = provider.join(shape, joining, rank, 2, gather);
            let (peer, counter) = (Rank(1 - rank.0), member.counter);
            let length =
                |write: usize| if write.is_multiple_of(2) { 100 + write } else { CELL - write };
            let value = |write: usize| 1 + write as u8;
            if rank == Rank(0) {
                for write in 0..WRITES {
                    let at = write * CELL;
                    fill(&member.source, at, length(write), value(write));
                    let page: Page = member.page(peer, at, at, length(write));
                    member.engine.write(peer, counter, write as u64, &[page]).unwrap();
                }
                waited(|w| member.engine.drain_queues(w)).unwrap();
                drop(member);
            } else {
                for write in 0..WRITES {
                    let raises = member.raises(peer, [length(write)]);
                    waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
                    let seen = take(&member.inbox, write * CELL, length(write));
                    assert!(seen.iter().all(|seen| *seen == value(write)), "write {write}");
                    member.engine.credit(peer, counter).unwrap();
                }
            }
            gather(Vec::new());
        });
    }
}
