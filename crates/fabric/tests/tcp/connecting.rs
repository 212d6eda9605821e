//! Ranks that connect, and ranks that are missing.

use crate::common::{Introduced, soon};
use crate::ends::{PROMPT, engine};
use std::time::{Duration, Instant};
use weft_fabric::providers::{TcpConfig, TcpDevice};
use weft_fabric::{Engine, Error, Rank, clock};

#[test]
fn ranks_may_connect_in_any_order() {
    let size = 4;
    let config = TcpConfig { streams: 3, ..TcpConfig::default() };
    for order in [[3, 2, 1, 0], [0, 3, 1, 2]] {
        let device = || TcpDevice::new(config.clone()).unwrap();
        let mut engines: Vec<Engine> = (0..size).map(|rank| engine(rank, size, device())).collect();
        let introduced = &Introduced::of(&mut engines);
        let mut engines: Vec<Option<Engine>> = engines.into_iter().map(Some).collect();
        std::thread::scope(|scope| {
            for rank in order {
                let mut engine = engines[rank].take().unwrap();
                scope.spawn(move || introduced.connect(&mut engine, soon(20)).unwrap());
                // Gives the previous rank a head start; the outcome must not depend on it.
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn a_peer_that_does_not_come_is_named_at_the_deadline() {
    for rank in [0, 1] {
        let device = || TcpDevice::new(TcpConfig::default()).unwrap();
        let mut engines: Vec<Engine> = (0..2).map(|rank| engine(rank, 2, device())).collect();
        let introduced = Introduced::of(&mut engines);
        let begin = Instant::now();
        let deadline = clock::now().after(Duration::from_millis(200));
        let error = introduced.connect(&mut engines[rank], deadline).unwrap_err();
        assert!(begin.elapsed() < PROMPT);
        let absent = Rank(1 - rank as u32);
        assert!(matches!(&error, Error::Connect { peer, .. } if *peer == absent), "{error}");
    }
}

#[test]
fn a_peer_that_is_gone_is_named_at_once() {
    let device = || TcpDevice::new(TcpConfig::default()).unwrap();
    let mut engines: Vec<Engine> = (0..2).map(|rank| engine(rank, 2, device())).collect();
    let introduced = Introduced::of(&mut engines);
    let mut survivor = engines.pop().unwrap();
    drop(engines);
    let begin = Instant::now();
    let error = introduced.connect(&mut survivor, soon(20)).unwrap_err();
    assert!(matches!(&error, Error::Connect { peer: Rank(0), .. }), "{error}");
    assert!(begin.elapsed() < PROMPT);
}
