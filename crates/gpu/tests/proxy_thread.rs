//! Running proxies, with kernels on the CPU that push into their rings.

mod common {
    pub mod station;
}

use common::station::{
    BYTES, FREE, HELD, Kernel, MEMBER_BYTES, MEMBERS, PATIENCE, Station, failure, soon,
};
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use weft_control::{Cause, Control, Poison, local_world};
use weft_fabric::{Communicator, CommunicatorConfig, CoreSet, Rank, clock};
use weft_gpu::proxy::{
    Command, CommandFields, CoreClaim, Idle, Place, Proxy, ProxyConfig, ProxyCore, ProxyOptions,
    Target, WordConfig,
};
use weft_gpu::{Error, Result};

/// Two ranks on threads of their own, with proxies.
fn on_two<T: Send>(options: ProxyOptions, rank: impl Fn(Station) -> T + Sync) -> Vec<T> {
    on_two_over(None, options, rank)
}

/// The same over a link that delays, reorders and refuses parts by this seed.
fn on_two_over<T: Send>(
    hostile: Option<u64>,
    options: ProxyOptions,
    rank: impl Fn(Station) -> T + Sync,
) -> Vec<T> {
    let world = local_world(2, |_| {}).unwrap();
    // A rank that has left the barrier in `Station::new` may fail before the other one has.
    let made = Barrier::new(2);
    std::thread::scope(|scope| {
        let start = |control: Control| {
            let (rank, made, options) = (&rank, &made, options.clone());
            scope.spawn(move || {
                let config = weft_control::Config::new(control.rank().0, 2);
                let config = CommunicatorConfig { hostile, ..CommunicatorConfig::new(config) };
                let communicator = Communicator::over(control, config);
                let station = Station::new(communicator.unwrap(), options);
                made.wait();
                rank(station)
            })
        };
        let threads: Vec<_> = world.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Words in each thread's part of a window.
const PART: u64 = BYTES / 4 / THREADS;
const THREADS: u64 = 4;
const ROUNDS: u64 = 200;

fn value(rank: Rank, at: u64, round: u64) -> u32 {
    (at * 31 + round * 1009 + u64::from(rank.0) * 7 + 1) as u32
}

#[test]
fn puts_by_several_threads_arrive_whole_and_are_counted() {
    let options = ProxyOptions { slots: 8, ..ProxyOptions::default() };
    on_two(options, |station| {
        let (kernel, own, peer) = (station.kernel(), station.communicator.rank(), station.peer());
        for round in 0..ROUNDS {
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (kernel, station) = (&kernel, &station);
                    scope.spawn(move || {
                        let words = thread * PART + round % 7..(thread + 1) * PART - round % 5;
                        let (first, bytes) = (words.start * 4, (words.end - words.start) * 4);
                        for at in words {
                            Station::at(&station.outbox, at * 4)
                                .store(value(own, at, round), Ordering::Relaxed);
                        }
                        kernel.push(station.put(FREE, first, bytes));
                    });
                }
            });
            kernel.push(Command::Drained { word: FREE });
            // Also that the sources may be stored to again.
            kernel.wait(own.0, FREE, round as u32 + 1);
            kernel.wait(peer.0, FREE, ((round + 1) * THREADS) as u32);
            for thread in 0..THREADS {
                for at in thread * PART + round % 7..(thread + 1) * PART - round % 5 {
                    let seen = Station::at(&station.inbox, at * 4).load(Ordering::Relaxed);
                    assert_eq!(seen, value(peer, at, round), "round {round}, word {at}");
                }
            }
            station.meet();
        }
        station.proxy.check().unwrap();
        station.close();
        assert_eq!(kernel.fields().ring, 0, "kernels that start later push nothing");
        station.proxy.check().unwrap();
    });
}

/// Five puts to one peer in each, more than fit in two windows, so that some wait for credits.
#[test]
fn scatters_arrive_whole_in_a_small_ring_over_hostile_links() {
    let options = ProxyOptions { slots: 2, ..ProxyOptions::default() };
    on_two_over(Some(7), options, |station| {
        let (kernel, own, peer) = (station.kernel(), station.communicator.rank(), station.peer());
        let list = kernel.fields().list;
        let words = MEMBER_BYTES / 4;
        let mut rounds = 0;
        for turn in 0..40 {
            let lengths: Vec<u64> =
                (0..MEMBERS).map(|at| (turn * 7 + at * 3) % (words + 1)).collect();
            for (member, length) in (0..).zip(&lengths) {
                Kernel::atomic(list + 4 * member).store(4 * *length as u32, Ordering::Relaxed);
                for at in member * words..member * words + length {
                    Station::at(&station.outbox, at * 4)
                        .store(value(own, at, turn), Ordering::Relaxed);
                }
            }
            for _ in 0..7 {
                let place = Place { window: 0, offset: 0 };
                kernel.push(Command::Scatter {
                    template: 0,
                    target: Target { word: FREE, hold: false },
                    source: place,
                    destination: place,
                    count: MEMBERS as u32,
                    list: 0,
                });
            }
            kernel.push(Command::Drained { word: FREE });
            kernel.wait(own.0, FREE, turn as u32 + 1);
            rounds += 7 * MEMBERS as u32;
            kernel.wait(peer.0, FREE, rounds);
            for (member, length) in (0..).zip(&lengths) {
                for at in member * words..member * words + length {
                    let seen = Station::at(&station.inbox, at * 4).load(Ordering::Relaxed);
                    assert_eq!(seen, value(peer, at, turn), "turn {turn}, word {at}");
                }
            }
            station.meet();
        }
        station.close();
    });
}

#[test]
fn held_rounds_keep_the_seventeenth_put_until_a_release() {
    on_two(ProxyOptions::default(), |station| {
        let (kernel, peer) = (station.kernel(), station.peer());
        for number in 0..17 {
            Station::at(&station.outbox, number * 4).store(number as u32 + 1, Ordering::Relaxed);
            kernel.push(station.put(HELD, number * 4, 4));
        }
        kernel.wait(peer.0, HELD, 16);
        station.meet();
        let begin = clock::now();
        let kept = format!("1 puts wait for credits, for example from {peer} (proxy word 0)");
        let is_taken = |busy: &Result<()>| match busy {
            Err(error @ Error::ProxyBusy { pushed: 17, sent: 17, .. }) => {
                error.to_string().contains(&kept)
            }
            _ => false,
        };
        while !is_taken(&station.proxy.drain(clock::now(), &mut || false)) {
            assert!(
                clock::now().since(begin) < PATIENCE,
                "the seventeenth command stays in the ring"
            );
        }
        let interrupted = station.proxy.drain(soon(), &mut || true).unwrap_err();
        assert!(matches!(interrupted, Error::Fabric(weft_fabric::Error::Interrupted)));
        assert_eq!(kernel.word(peer.0, HELD), 16);
        assert_eq!(Station::at(&station.inbox, 64).load(Ordering::Acquire), 0);
        station.meet();
        kernel.push(Command::Release { peer, word: HELD, count: 16 });
        kernel.wait(peer.0, HELD, 17);
        assert_eq!(Station::at(&station.inbox, 64).load(Ordering::Acquire), 17);
        station.close();
    });
}

#[test]
fn a_command_out_of_range_ends_the_group_and_all_waits() {
    let errors = on_two(ProxyOptions::default(), |station| {
        if station.communicator.rank() == Rank(0) {
            station.kernel().push(station.put(FREE, BYTES - 4, 8));
        }
        let errors = [failure(&station), failure(&station)];
        station.wait_for_abort();
        let drained = station.proxy.drain(soon(), &mut || false).unwrap_err();
        station.proxy.stop().unwrap();
        errors.into_iter().chain([drained]).collect::<Vec<_>>()
    });
    for error in &errors[0] {
        let Error::Command(refused) = error else { panic!("{error}") };
        assert_eq!((refused.ticket, refused.fields.length), (0, 8));
    }
    for error in &errors[1] {
        let text = error.to_string();
        assert!(text.starts_with("rank 0 poisoned the group: command 0 (PUT"), "{text}");
    }
}

#[test]
fn random_commands_are_refused_or_stay_within_the_windows() {
    let mut state = 1u64;
    let mut draw = || {
        // Xorshift (Marsaglia, 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..20 {
        let mut fields: Vec<CommandFields> = Vec::new();
        for _ in 0..4 {
            let bits = [draw(), draw(), draw(), draw(), draw()];
            fields.push(CommandFields {
                kind: (bits[0] % 8) as u8,
                flags: (bits[0] >> 8) as u8 % 3,
                peer: (bits[0] >> 16) as u16,
                length: bits[1],
                source_window: bits[2] as u16,
                destination_window: (bits[2] >> 16) as u16,
                word: (bits[2] >> 32) as u32,
                source_offset: bits[3],
                count: bits[0] as u32,
                destination_offset: bits[4],
                list: (bits[4] >> 32) as u32,
                ..CommandFields::default()
            });
        }
        on_two(ProxyOptions::default(), |station| {
            if station.communicator.rank() == Rank(0) {
                let kernel = station.kernel();
                fields.iter().for_each(|fields| kernel.push_fields(fields));
            }
            let error = failure(&station);
            assert!(matches!(error, Error::Command(_) | Error::Fabric(_)), "{error}");
        });
    }
}

#[test]
fn a_damaged_ring_ends_the_group() {
    on_two(ProxyOptions::default(), |station| {
        if station.communicator.rank() == Rank(0) {
            station.kernel().ring().slots[0][3].store(9, Ordering::Release);
        }
        let error = failure(&station);
        match station.communicator.rank() {
            Rank(0) => assert!(matches!(error, Error::Ring(_)), "{error}"),
            _ => assert!(error.to_string().contains("use number 9"), "{error}"),
        }
    });
}

#[test]
fn a_lost_peer_ends_waits_and_is_named() {
    on_two(ProxyOptions::default(), |station| {
        let lost = Poison { kind: Cause::Lost, rank: Some(Rank(1)), detail: "killed".into() };
        if station.communicator.rank() == Rank(0) {
            station.communicator.poison(lost);
        }
        let error = failure(&station).to_string();
        assert_eq!(error, "rank 1 was lost: killed");
        station.wait_for_abort();
    });
}

#[test]
fn what_cannot_be_started_is_refused() {
    let start = |options: ProxyOptions| -> Vec<Result<()>> {
        on_two(ProxyOptions::default(), |station| {
            let config = ProxyConfig {
                words: vec![WordConfig { counter: station.counter, hold: false }],
                max_put_bytes: 1,
                ..ProxyConfig::default()
            };
            let (domain, group) = (station.domain.clone(), station.communicator.clone());
            let second = Proxy::start(domain, group, config, options.clone()).map(drop);
            station.close();
            second
        })
    };
    let texts = |options| -> Vec<String> {
        start(options).into_iter().map(|refused| refused.unwrap_err().to_string()).collect()
    };
    for text in texts(ProxyOptions::default()) {
        assert_eq!(text, "this host's ranks have a proxy on this device: close it first");
    }
    for slots in [0, 1, 12, 1 << 17] {
        for text in texts(ProxyOptions { slots, ..ProxyOptions::default() }) {
            assert!(text.starts_with(&format!("{slots} command slots, a power of two")), "{text}");
        }
    }
    for text in texts(ProxyOptions { core: ProxyCore::Number(1 << 20), ..ProxyOptions::default() })
    {
        assert!(text.starts_with("core 1048576 for the proxy's thread"), "{text}");
    }
}

#[test]
fn threads_run_where_and_as_they_are_told() {
    for idle in [Idle::Nap, Idle::Spin] {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let core = (0..1024).find(|core| allowed.is_set(*core)).unwrap();
        let core = ProxyCore::Number(core as u32);
        let options = ProxyOptions { idle, core, ..ProxyOptions::default() };
        on_two(options, |station| {
            let kernel = station.kernel();
            let turns = Kernel::count(kernel.fields().alive);
            let before = turns.load(Ordering::Relaxed);
            kernel.push(Command::Drained { word: FREE });
            kernel.wait(station.communicator.rank().0, FREE, 1);
            assert!(turns.load(Ordering::Relaxed) > before, "its turns are counted");
            station.close();
        });
    }
}

/// True if a proxy's thread of this rank may run on these cores only.
fn has_thread_on(rank: Rank, cores: &str) -> bool {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let name = format!("weft-proxy-{}", rank.0);
    let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.any(|task| {
        let allowed = format!("Cpus_allowed_list:\t{cores}");
        read(task.path().join("comm")).trim() == name
            && read(task.path().join("status")).lines().any(|line| line == allowed)
    })
}

#[test]
fn a_claim_moves_the_thread_to_a_core_unless_ranks_share_cores() {
    let allowed = CoreSet::of_thread();
    let core = allowed.cores().last().unwrap();
    // Both ranks claim all cores of one NUMA node; threads of one process have one mask.
    let claims = vec![CoreClaim::on(&allowed, &allowed), CoreClaim::none()];
    let core_of_first = ProxyCore::Claimed { claims, place: 0 };
    let options = ProxyOptions { core: core_of_first, ..ProxyOptions::default() };
    let pinned = on_two(options, |station| {
        let rank = station.communicator.rank();
        // The thread pins itself before its first turn.
        let kernel = station.kernel();
        kernel.push(Command::Drained { word: FREE });
        kernel.wait(rank.0, FREE, 1);
        let shares_cores = station.communicator.engine().shares_cores();
        let is_pinned = has_thread_on(rank, &core.to_string());
        station.close();
        (is_pinned, shares_cores)
    });
    for (is_pinned, shares_cores) in pinned {
        let has_choice = allowed.cores().count() > 1;
        assert!(is_pinned || shares_cores || !has_choice, "no thread on core {core}");
    }
}
