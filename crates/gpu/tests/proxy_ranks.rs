//! Proxies in a process for each rank. `make rdma-lab` runs these tests with a guest for each rank, over its NICs.

#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;
mod common {
    pub mod station;
}

use common::station::{BYTES, FREE, HELD, Station, failure};
use ranks::{on_processes, process_gather, process_rank};
use rustix::process::{Signal, getpid, kill_process};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weft_fabric::{Communicator, CommunicatorConfig, ProviderKind, Rank};
use weft_gpu::proxy::{Command, ProxyOptions};

const RANKS: u32 = 3;
/// Rounds in flight toward a peer, and cells for them: the group's window.
const CELLS: u64 = 16;
const CELL: u64 = BYTES / CELLS / 4;
/// A peer's silence until it counts as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// Joins the group over `WEFT_TEST_PROVIDER`, or tcp.
fn join(rank: Rank, size: u32) -> Station {
    let bind = std::env::var("WEFT_TEST_BIND")
        .map_or(Ipv4Addr::LOCALHOST.into(), |address| address.parse::<IpAddr>().unwrap());
    let provider = std::env::var("WEFT_TEST_PROVIDER").unwrap_or_default();
    let listener = TcpListener::bind((bind, 0)).unwrap();
    let addresses = process_gather(listener.local_addr().unwrap().to_string().into_bytes());
    let first: SocketAddr = String::from_utf8(addresses[0].clone()).unwrap().parse().unwrap();
    let mut control = weft_control::Config::new(rank.0, size);
    control.host = first.ip().to_string();
    control.port = first.port();
    control.bind = Some(bind);
    control.secret = Some(weft_control::Secret::new("of this test").unwrap());
    control.silence_timeout = SILENCE;
    let mut config = CommunicatorConfig::new(control);
    config.providers = vec![match provider.as_str() {
        "verbs" => ProviderKind::Verbs,
        "shm" => ProviderKind::Shm,
        _ => ProviderKind::Tcp,
    }];
    let communicator = match rank {
        Rank(0) => Communicator::init_with_listener(config, listener),
        _ => Communicator::init(config),
    };
    Station::new(communicator.unwrap(), ProxyOptions::default())
}

/// Write from one rank to another in a round: offset in the cell, length and first word.
fn content(from: Rank, to: Rank, round: u64) -> (u64, u64, u32) {
    let mixed = (round * 9 + u64::from(from.0) * 3 + u64::from(to.0) + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = 1 + (mixed >> 40) % (CELL / 4);
    let first = (mixed >> 20) % (CELL / 4 - words + 1);
    (first * 4, words * 4, mixed as u32)
}

/// First byte of a cell for traffic with `peer`.
fn cell(peer: Rank, round: u64) -> u64 {
    (u64::from(peer.0) * CELLS + round % CELLS) * CELL
}

/// Rounds between all pairs of ranks, each checked before it is given back; `before` runs before each.
/// False once the group has failed.
fn exchange(station: &Station, rounds: u64, mut before: impl FnMut(u64)) -> bool {
    let (kernel, own) = (station.kernel(), station.communicator.rank());
    let peers: Vec<Rank> =
        (0..station.communicator.world_size()).map(Rank).filter(|peer| *peer != own).collect();
    let arrived = |source: Rank, word: u32, count: u64| {
        while kernel.word(source.0, word) < count as u32 {
            if station.proxy.check().is_err() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    };
    for round in 0..rounds {
        before(round);
        for &peer in &peers {
            let (offset, length, first) = content(own, peer, round);
            let (here, there) = (cell(peer, round) + offset, cell(own, round) + offset);
            for at in (0..length).step_by(4) {
                Station::at(&station.outbox, here + at)
                    .store(first.wrapping_add(at as u32), Ordering::Relaxed);
            }
            kernel.push(station.put_to(peer, HELD, (here, there), length));
        }
        // Sources are stored to again in the next round but 15.
        kernel.push(Command::Drained { word: FREE });
        for &peer in &peers {
            if !arrived(peer, HELD, round + 1) {
                return false;
            }
            let (offset, length, first) = content(peer, own, round);
            for at in (0..length).step_by(4) {
                let seen = Station::at(&station.inbox, cell(peer, round) + offset + at)
                    .load(Ordering::Relaxed);
                assert_eq!(seen, first.wrapping_add(at as u32), "{peer}, round {round}, {at}");
            }
            kernel.push(Command::Release { peer, word: HELD, count: 1 });
        }
        if !arrived(own, FREE, round + 1) {
            return false;
        }
    }
    true
}

#[test]
fn puts_between_processes_arrive_whole_and_in_their_rounds() {
    let Some(rank) = process_rank() else {
        let ended = on_processes("puts_between_processes_arrive_whole_and_in_their_rounds", RANKS);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        return;
    };
    let station = join(rank, RANKS);
    assert!(exchange(&station, 300, |_| {}), "{:?}", station.proxy.check());
    station.close();
    process_gather(Vec::new());
}

/// Rank 1 kills itself. With `WEFT_TEST_STARTED` it waits for its end instead: rank 0 makes this file for the
/// test that kills or stops it.
#[test]
fn a_lost_rank_is_named_and_ends_waits() {
    let Some(rank) = process_rank() else {
        let ended = on_processes("a_lost_rank_is_named_and_ends_waits", RANKS);
        assert_eq!(ended, [Ok(()), Err("killed by 9".into()), Ok(())]);
        return;
    };
    let size = std::env::var("WEFT_TEST_RANKS").map_or(RANKS, |ranks| ranks.parse().unwrap());
    let (station, started) = (join(rank, size), std::env::var("WEFT_TEST_STARTED").ok());
    let mut last = Instant::now();
    let completed = exchange(&station, u64::MAX, |round| {
        last = Instant::now();
        match (&started, rank, round) {
            (Some(file), Rank(0), 50) => std::fs::write(file, "").unwrap(),
            (None, Rank(1), 50) => kill_process(getpid(), Signal::KILL).unwrap(),
            _ => {}
        }
    });
    assert!(!completed);
    let error = failure(&station).to_string();
    let named = ["rank 1 was lost", "rank 1 is silent"];
    assert!(named.iter().any(|text| error.starts_with(text)), "{error}");
    station.wait_for_abort();
    assert!(last.elapsed() < 5 * SILENCE, "{:?}", last.elapsed());
}
