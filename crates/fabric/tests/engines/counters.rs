//! Counters that are created, used once and released repeatedly; and one without enough lanes.

use crate::common::{PATIENCE, connect, on_threads, soon, waiting};
use crate::{KINDS, device, peer_of, shared, two};
use std::time::Duration;
use weft_fabric::{
    Engine, EngineConfig, Error, Generation, Grant, Lane, LaneId, ProviderKind, Rank,
};

/// Lanes for ten thousand counters: a two-lane block serves 255 counters.
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
                // The peer has this rank's signal and credit, and sends no more.
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

/// Rank 0 has lanes for one counter and half another. Rank 1 raises the lane that it would have had on
/// the other counter: the raise is dropped, and the created counter still counts.
#[test]
fn a_raise_of_a_half_made_counter_is_dropped() {
    on_threads(3, |me, gather| {
        let lanes = if me == Rank(0) { 6 } else { 16 };
        let config = EngineConfig { lanes, ..EngineConfig::default() };
        let device = device(ProviderKind::Tcp);
        let mut engine = Engine::new(config, me, 3, Generation(3), &[device]).unwrap();
        connect(&mut engine, gather, soon(20)).unwrap();
        let counter = engine.counter().unwrap();
        if me == Rank(0) {
            let half = engine.counter();
            assert!(matches!(half, Err(Error::Limit { .. })), "{half:?}");
        }
        // Ranks 0 and 1 link the created counter; rank 1 also links another one, with forged lanes.
        let peer = Rank(1 - me.0.min(1));
        let granted = match me {
            Rank(2) => Vec::new(),
            _ => engine.grant(peer, &[], &[counter]).unwrap().encode(),
        };
        let grants = gather(granted);
        if me != Rank(2) {
            let mut grant = Grant::decode(&grants[peer.index()]).unwrap();
            engine.import(peer, &grant, &[counter], soon(20)).unwrap();
            if me == Rank(1) {
                let forged = &mut grant.counters[0];
                let behind = |lane: Lane, places| {
                    Lane::new(LaneId::new(lane.id().get() + places).unwrap(), lane.generation())
                };
                // Rank 0 issued two lanes to each peer for the first counter.
                (forged.data, forged.credit) = (behind(forged.data, 4), behind(forged.credit, 4));
                let other = engine.counter().unwrap();
                engine.import(peer, &grant, &[other], soon(20)).unwrap();
                engine.signal(peer, other, 0).unwrap();
                engine.signal(peer, counter, 0).unwrap();
            } else {
                waiting(PATIENCE, Duration::ZERO, |w| engine.wait(counter, &[(peer, 1)], w))
                    .unwrap();
                let dropped = engine.statistics().refused_ungranted;
                assert_eq!(dropped, 1, "the lane belongs to no counter");
                engine.check().unwrap();
            }
        }
        gather(Vec::new());
    });
}
