//! Connections that prove no membership in the group.

use crate::common::{Introduced, soon, until};
use crate::ends::{GENERATION, PROMPT, engine};
use crate::handmade::{hello, introduction, listening};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weft_fabric::Engine;
use weft_fabric::providers::{TcpConfig, TcpDevice};

#[test]
fn unproven_connections_are_refused_and_the_group_forms_among_them() {
    let devices = [(); 3].map(|()| TcpDevice::new(TcpConfig::default()).unwrap());
    let counters = devices[0].counters().clone();
    let mut engines: Vec<Engine> =
        (0..).zip(devices).map(|(rank, device)| engine(rank, 3, device)).collect();
    let introduced = &Introduced::of(&mut engines);
    let [(socket, token), (_, anothers)] =
        [1, 2].map(|rank| listening(&engines[0], &introduced.messages[0][rank]));
    let mut wrong = token;
    wrong[15] ^= 1;
    let good = GENERATION.0;
    let unproven: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost:80\r\n\r\n".to_vec(),
        vec![0xff; 5000],
        b"WEFT".to_vec(),
        Vec::new(),
        hello(good, 1, 1, 0, 0, wrong),
        hello(good, 1, 1, 0, 0, anothers),
        hello(good + 1, 1, 1, 0, 0, token),
        hello(good, 2, 1, 0, 0, token),
        hello(good, 1, 7, 0, 0, token),
        hello(good, 1, 1, 3, 0, token),
        hello(good, 1, 1, 0, 99, token),
    ];
    // They connect first and stay; silent ones must not delay any rank.
    let held: Vec<TcpStream> = (0..20)
        .flat_map(|_| &unproven)
        .map(|bytes| {
            let mut unproven_connection = TcpStream::connect(socket).unwrap();
            unproven_connection.write_all(bytes).unwrap();
            unproven_connection
        })
        .collect();
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| introduced.connect(engine, soon(20)).unwrap());
        }
    });
    assert!(counters.refused_connections.load(Ordering::Relaxed) >= 20 * 9);
    // The group is complete: the port is closed.
    assert!(TcpStream::connect(socket).is_err());
    drop(held);
}

/// Time until rank 0, which waits for rank 1, closes the first of so many silent connections.
fn closed_after(silent: usize) -> Duration {
    let device = || TcpDevice::new(TcpConfig::default()).unwrap();
    let mut engines = [engine(0, 2, device()), engine(1, 2, device())];
    let introduced = Introduced::of(&mut engines);
    let [mut zero, mut one] = engines;
    let (address, _) = listening(&zero, &introduced.messages[0][1]);
    std::thread::scope(|scope| {
        let forming = scope.spawn(|| introduced.connect(&mut zero, soon(20)).unwrap());
        let begin = Instant::now();
        let mut held: Vec<TcpStream> =
            (0..silent).map(|_| TcpStream::connect(address).unwrap()).collect();
        held[0].set_read_timeout(Some(PROMPT)).unwrap();
        let ended = held[0].read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)), "{ended:?}");
        let took = begin.elapsed();
        introduced.connect(&mut one, soon(20)).unwrap();
        forming.join().unwrap();
        took
    })
}

/// A silent connection is closed after 2 s; of more than are kept, the oldest at once.
#[test]
fn silent_connections_are_closed_while_ranks_wait_for_a_peer() {
    closed_after(1);
    // A busy machine may take longer for some of them.
    let took = (0..3).map(|_| closed_after(300)).min().unwrap();
    assert!(took < Duration::from_millis(1500), "{took:?}");
}

/// This process's resident memory, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Ten thousand connections, some with a hello that is nearly valid, some that send it a byte at a time:
/// the group forms among them, and keeps little state for them.
#[test]
fn ten_thousand_connections_delay_no_rank() {
    let device = || TcpDevice::new(TcpConfig::default()).unwrap();
    let (zero, one) = (device(), device());
    let counters = zero.counters().clone();
    let mut engines = [engine(0, 2, zero), engine(1, 2, one)];
    let introduced = Introduced::of(&mut engines);
    let [mut zero, mut one] = engines;
    let (address, token) = listening(&zero, &introduced.messages[0][1]);
    let before = resident();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let forming = scope.spawn(|| introduced.connect(&mut zero, soon(60)).unwrap());
        let loris = scope.spawn(|| {
            let slow: Vec<TcpStream> =
                (0..50).map_while(|_| TcpStream::connect(address).ok()).collect();
            let said = hello(GENERATION.0, 1, 1, 0, 0, token);
            for byte in said.iter().take(35).cycle() {
                for mut socket in &slow {
                    let _ = socket.write_all(&[*byte]);
                }
                std::thread::sleep(Duration::from_millis(20));
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for number in 0..10_000u32 {
            let mut socket = TcpStream::connect(address).unwrap();
            let mut said = hello(GENERATION.0, 1, 1, 0, 0, token);
            match number % 4 {
                0 => said[20 + number as usize % 16] ^= 1,
                1 => said[4] = 1,
                2 => said[6] = said[6].wrapping_sub(1),
                _ => said.truncate(number as usize % 36),
            }
            let _ = socket.write_all(&said);
        }
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes for ten thousand connections");
        assert!(!forming.is_finished());
        introduced.connect(&mut one, soon(60)).unwrap();
        forming.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        loris.join().unwrap();
    });
    assert!(counters.refused_connections.load(Ordering::Relaxed) >= 9_000);
}

/// A recorded hello from the real rank, sent again, connects to no stream.
#[test]
fn a_replayed_hello_connects_to_no_stream() {
    let device = TcpDevice::new(TcpConfig::default()).unwrap();
    let counters = device.counters().clone();
    let other = engine(1, 2, device.clone());
    let mut engine = engine(0, 2, device);
    let addresses = [engine.address(), other.address()];
    let introduced = engine.introduce(&addresses).unwrap();
    let (address, token) = listening(&engine, &introduced[1]);
    let messages = [Vec::new(), introduction()];
    std::thread::scope(|scope| {
        let forming = scope.spawn(|| {
            until(soon(20), |limit| engine.connect(&addresses, &messages, limit)).unwrap();
        });
        let dial = |stream: u32| {
            let mut socket = TcpStream::connect(address).unwrap();
            socket.write_all(&hello(GENERATION.0, 1, 1, 0, stream, token)).unwrap();
            let answered = socket.read_exact(&mut [0; 36]).is_ok();
            (socket, answered)
        };
        let (_first, answered) = dial(0);
        assert!(answered);
        for _ in 0..20 {
            assert!(!dial(0).1, "a place was given twice");
        }
        let (_second, answered) = dial(1);
        assert!(answered);
        forming.join().unwrap();
    });
    assert_eq!(counters.refused_connections.load(Ordering::Relaxed), 20);
}
