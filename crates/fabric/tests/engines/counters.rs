//! Counters that are made, used once and released, many times over.

use crate::common::{PATIENCE, waiting};
use crate::{KINDS, peer_of, shared, two};
use std::time::Duration;
use weft_fabric::{EngineConfig, Error, ProviderKind};

/// Lanes of ten thousand counters: a block of two serves 255 of them.
const LANES: usize = 128;

#[test]
fn ten_thousand_counters_are_used_once_each_in_bounded_lanes() {
    for kind in KINDS {
        let many = if kind == ProviderKind::Shm { 10_000 } else { 1_000 };
        let config = EngineConfig { lanes: LANES, ..EngineConfig::default() };
        two(kind, &config, |mut engine, gather| {
            let peer = peer_of(&engine);
            for number in 0..many {
                let counter = shared(&mut engine, gather);
                let seen = engine.count(counter, peer).unwrap();
                assert!(seen <= 1, "counter {number} began at {seen}");
                engine.signal(peer, counter, 0).unwrap();
                waiting(PATIENCE, Duration::ZERO, |waiter| {
                    engine.wait(counter, &[(peer, 1)], waiter).unwrap();
                    engine.credit(peer, counter).unwrap();
                    engine.wait_for_credit(counter, peer, 1, waiter).unwrap();
                });
                assert_eq!(engine.count(counter, peer).unwrap(), 0);
                // The peer has this rank's signal and credit, and sends nothing more.
                gather(Vec::new());
                engine.release_counter(counter).unwrap();
                let used = engine.signal(peer, counter, 1);
                assert!(matches!(used, Err(Error::Unknown { what: "counter", .. })), "{used:?}");
            }
            let statistics = engine.statistics();
            assert_eq!((statistics.refused_stale, statistics.refused_ungranted), (0, 0));
            gather(Vec::new());
        });
    }
}
