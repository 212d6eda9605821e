//! Provider shm between threads and between processes.

mod common;

use common::{
    AllGather, Member, PATIENCE, bare_link, connect_all, connect_bare, on_processes, on_threads,
    process_gather, waiting,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_fabric::link::{PostStatus, Sink, WorkRequest};
use weft_fabric::providers::{ShmConfig, ShmDevice};
use weft_fabric::{
    CounterId, Device, Engine, EngineConfig, Error, Generation, Lane, LaneId, Link, Memory, Rank,
    TrafficClass, WaitOptions, clock,
};

fn shm() -> ShmDevice {
    ShmDevice::new(ShmConfig { host_id: "this".into() })
}

fn join(rank: Rank, size: u32, gather: &mut AllGather<'_>) -> Member {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(shm())];
    Member::join(rank, size, &devices, gather)
}

#[test]
fn processes_leave_no_sockets_behind() {
    let Some(rank) = common::process_rank() else {
        let ended = on_processes("processes_leave_no_sockets_behind", 3);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        return;
    };
    let mut names = Vec::new();
    let mut member = join(rank, 3, &mut |mine| {
        let all = process_gather(mine);
        for text in all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()) {
            names.extend(text.find("weft-").map(|at| text[at..at + 37].to_owned()));
        }
        all
    });
    for round in 0..3 {
        member.round(12, round).unwrap();
    }
    drop(member);
    process_gather(Vec::new());
    assert_eq!(names.len(), 3);
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(names.iter().all(|name| !sockets.contains(name)), "sockets are left");
}

#[test]
fn a_waiter_asleep_on_its_descriptor_is_woken() {
    sleepers_are_woken(|engine, peer, counter| {
        while engine.count(counter, peer)? == 0 {
            if engine.arm() {
                let descriptor = engine.descriptor();
                let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
                poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 })).unwrap();
            }
            engine.disarm();
            engine.poll(clock::now(), &mut Vec::new());
        }
        Ok(())
    });
}

/// Two ranks take turns, each asleep until the other writes.
fn sleepers_are_woken(sleep: fn(&mut Engine, Rank, CounterId) -> weft_fabric::Result<()>) {
    const TURNS: u64 = 100;
    on_threads(2, |rank, gather| {
        let mut member = join(rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let begin = Instant::now();
        for turn in 0..TURNS {
            if rank == Rank(1) {
                sleep(&mut member.engine, peer, counter).unwrap();
            }
            member.engine.signal(peer, counter, turn).unwrap();
            if rank == Rank(0) {
                sleep(&mut member.engine, peer, counter).unwrap();
            }
            member.engine.credit(peer, counter).unwrap();
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                member.engine.wait_for_credit(counter, peer, turn + 1, waiter).unwrap();
            });
        }
        // A sleeper without a wake-up sleeps 50 ms, three times a turn.
        assert!(begin.elapsed() < TURNS as u32 * Duration::from_millis(50), "wake-ups were lost");
        gather(Vec::new());
    });
}

/// Waiting for a second takes few wake-ups, and under 1% of a core. On a busy virtual machine even a
/// thread that only sleeps is sometimes charged more than that, so the limit is relative to such a
/// thread.
#[test]
fn an_idle_waiter_costs_little() {
    let second = Duration::from_secs(1);
    on_threads(2, |rank, gather| {
        let mut member = join(rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let costs_little = |_| {
            let before = thread_cpu_time();
            let mut naps = 0;
            let mut nap = || {
                naps += 1;
                false
            };
            let (deadline, spin) = (clock::now().after(second), Duration::from_micros(20));
            let mut waiter = WaitOptions { deadline, spin, interrupted: &mut nap };
            let error = member.engine.wait(counter, &[(peer, 1)], &mut waiter).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert!(naps < 40, "woke up {naps} times in a second of waiting");
            thread_cpu_time() - before < second / 100
        };
        let sleeper_costs_little = |_| {
            let before = thread_cpu_time();
            (0..20).for_each(|_| std::thread::sleep(second / 20));
            thread_cpu_time() - before < second / 100
        };
        let fine = (0..3).any(costs_little) || !(0..3).all(sleeper_costs_little);
        assert!(fine, "an idle waiter takes over 1% of a core");
        gather(Vec::new());
    });
}

fn thread_cpu_time() -> Duration {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(at.tv_sec as u64, at.tv_nsec as u32)
}

#[test]
fn more_regions_than_a_socket_holds_cross_in_both_directions() {
    const REGIONS: usize = 300;
    on_threads(2, |rank, gather| {
        let mut member = join(rank, 2, gather);
        let (engine, peer) = (&mut member.engine, Rank(1 - rank.0));
        let mine: Vec<_> = (0..REGIONS).map(|_| engine.alloc(1).unwrap()).collect();
        let ranges: Vec<_> = mine.iter().map(|region| (region, 0..1)).collect();
        let said = gather(engine.grant(peer, &ranges, &[]).unwrap().encode());
        let theirs = weft_fabric::Grant::decode(&said[peer.0 as usize]).unwrap();
        let remotes = engine.import(peer, &theirs, &[], clock::now().after(PATIENCE)).unwrap();
        assert_eq!(remotes.len(), REGIONS);
        // The last descriptors leave when the engine is polled.
        waiting(PATIENCE, Duration::ZERO, |waiter| engine.barrier(waiter)).unwrap();
        gather(Vec::new());
    });
}

/// A part and the credit piggybacked on it, between two links: lanes in one cache line, in adjacent ones,
/// and far apart. Each lane rises by one, in either order.
#[test]
fn a_credit_piggybacks_on_a_part_wherever_its_lane_lies() {
    const LANES: u32 = 130;
    on_threads(2, |rank, gather| {
        let peer = Rank(1 - rank.0);
        let (mut link, lanes) = bare_link(&shm(), rank, LANES as usize);
        lanes.issue(peer, LANES).unwrap();
        let addresses = gather(link.address());
        let deadline = clock::now().after(PATIENCE);
        connect_bare(&mut *link, peer, &addresses[peer.0 as usize], deadline).unwrap();
        let lane = |number| Lane::new(LaneId::new(number).unwrap(), Generation(0));
        let mut sink = Sink::default();
        for (part, piggyback) in [(0, 1), (3, 2), (4, 7), (129, 5)] {
            let (lane, piggyback) = (lane(part), Some(lane(piggyback)));
            let class = TrafficClass::Latency;
            let work =
                WorkRequest { token: 0, peer, lane, credits: None, piggyback, class, pages: &[] };
            assert_eq!(link.post(&work, &mut sink), Ok(PostStatus::Done));
        }
        gather(Vec::new());
        let rose = (0..LANES).filter(|&number| lanes.value(lane(number).id()) == 1);
        assert_eq!(rose.collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 7, 129]);
        let mut marked = Vec::new();
        lanes.take_dirty(|number| marked.push(number));
        marked.sort_unstable();
        assert_eq!(marked, [0, 1, 2, 3, 4, 5, 7, 129]);
        gather(Vec::new());
    });
}

/// Parts in a batch are visible at once, and marked at the flush or before.
#[test]
fn a_batch_of_parts_is_marked_by_its_flush() {
    const LANES: u32 = 640;
    on_threads(2, |rank, gather| {
        let peer = Rank(1 - rank.0);
        let (mut link, lanes) = bare_link(&shm(), rank, LANES as usize);
        lanes.issue(peer, LANES).unwrap();
        let addresses = gather(link.address());
        let deadline = clock::now().after(PATIENCE);
        connect_bare(&mut *link, peer, &addresses[peer.0 as usize], deadline).unwrap();
        let mut sink = Sink::default();
        let mut raised: Vec<u32> = Vec::new();
        // One lane, lanes in few and in many leaves.
        for batch in [vec![9], (0..40).collect(), (0..10).map(|leaf| 64 * leaf + 3).collect()] {
            for &number in &batch {
                let lane = Lane::new(LaneId::new(number).unwrap(), Generation(0));
                let class = TrafficClass::Latency;
                let (credits, piggyback) = (None, None);
                let work =
                    WorkRequest { token: 0, peer, lane, credits, piggyback, class, pages: &[] };
                assert_eq!(link.post_in_batch(&work, &mut sink), Ok(PostStatus::Done));
            }
            raised.extend(&batch);
            gather(Vec::new());
            for number in 0..LANES {
                let expected = raised.iter().filter(|raised| **raised == number).count() as u64;
                assert_eq!(lanes.value(LaneId::new(number).unwrap()), expected, "lane {number}");
            }
            gather(Vec::new());
            link.flush(&mut sink);
            gather(Vec::new());
            let mut marked = Vec::new();
            lanes.take_dirty(|number| marked.push(number as u32));
            marked.sort_unstable();
            assert_eq!(marked, batch);
            gather(Vec::new());
        }
    });
}

#[test]
fn registered_memory_is_a_source_and_no_destination() {
    on_threads(2, |rank, gather| {
        let mut member = join(rank, 2, gather);
        let region = member.engine.register(Memory::from_bytes([1, 2, 3])).unwrap();
        let error = member.engine.grant(Rank(1 - rank.0), &[(&region, 0..3)], &[]).unwrap_err();
        assert!(matches!(error, Error::Unusable { .. }), "{error}");
        assert!(error.to_string().contains("alloc"), "{error}");
    });
}

#[test]
fn pretended_hosts_do_not_reach_each_other() {
    let open =
        |host: &str| bare_link(&ShmDevice::new(ShmConfig { host_id: host.into() }), Rank(0), 4).0;
    let (a, b, c) = (open("a"), open("b"), open("a"));
    let reaches = |link: &dyn Link, address: &[u8]| link.route(address).is_some();
    assert!(reaches(&*a, &c.address()) && reaches(&*c, &a.address()));
    assert!(!reaches(&*a, &b.address()) && !reaches(&*b, &a.address()));
    assert!(!reaches(&*a, b"garbage"));
}

#[test]
fn connecting_ends_at_the_deadline_and_names_who_is_missing() {
    let [(mut here, _), (there, _)] = [0, 1].map(|rank| bare_link(&shm(), Rank(rank), 4));
    let deadline = clock::now().after(Duration::from_millis(50));
    let error = connect_bare(&mut *here, Rank(1), &there.address(), deadline).unwrap_err();
    assert!(matches!(error, Error::Connect { peer: Rank(1), .. }), "{error}");
}

#[test]
fn a_peer_that_is_gone_refuses_the_connection_at_once() {
    let [(mut here, _), (there, _)] = [0, 1].map(|rank| bare_link(&shm(), Rank(rank), 4));
    let address = there.address();
    drop(there);
    let begin = Instant::now();
    let deadline = clock::now().after(PATIENCE);
    let connected = connect_bare(&mut *here, Rank(1), &address, deadline);
    assert!(matches!(connected, Err(Error::Connect { .. })));
    assert!(begin.elapsed() < PATIENCE);
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let descriptor = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&descriptor, 4096).unwrap();
    assert!(matches!(Memory::map(descriptor, 4096), Err(Error::Allocate { .. })));
}

#[test]
fn memory_of_peers_is_readable_unless_one_end_turns_it_off() {
    for (here, there) in [(true, true), (true, false), (false, false)] {
        let reads = [here, there];
        let mut engines = [0, 1].map(|rank| {
            let devices: [Arc<dyn Device>; 1] = [Arc::new(shm().with_reads(reads[rank]))];
            let config = EngineConfig::default();
            Engine::new(config, Rank(rank as u32), 2, Generation(0), &devices).unwrap()
        });
        connect_all(&mut engines);
        let source = [7u8, 8, 9];
        let address = source.as_ptr().expose_provenance() as u64;
        for engine in &engines {
            let reader = engine.memory_reader(Rank(1 - engine.rank().0));
            assert_eq!(reader.is_some(), here && there);
            assert!(engine.memory_reader(engine.rank()).is_none());
            if let Some(reader) = reader {
                let mut target = [0u8; 3];
                // SAFETY: the array has three bytes.
                unsafe { reader.read(address, target.as_mut_ptr(), 3) }.unwrap();
                assert_eq!(target, source);
            }
        }
    }
}
