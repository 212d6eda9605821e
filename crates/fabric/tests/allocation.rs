//! Loops over counts and credits that never call `raised` allocate no memory for each round.

mod common;
#[path = "common/counting.rs"]
mod counting;

use common::{PATIENCE, connect, on_threads, soon};
use counting::counting;
use std::sync::Arc;
use std::time::Instant;
use weft_fabric::providers::{ShmConfig, ShmDevice, TcpConfig, TcpDevice};
use weft_fabric::{CounterId, Device, Engine, EngineConfig, Generation, Grant, ProviderKind, Rank};

/// Rounds before allocations are counted, after which buffers no longer grow.
const WARM: u64 = 100;
/// A list with an entry for each raise would grow six times in this many.
const ROUNDS: u64 = 4_000;
/// Buffers may stop growing late: when two arrivals happen to meet.
const MOST_GROWTHS: usize = 3;

/// One round in each direction, observed only by counts and credits.
fn run_round(engine: &mut Engine, counter: CounterId, round: u64) {
    let peer = Rank(1 - engine.rank().0);
    let begin = Instant::now();
    engine.signal(peer, counter, round).unwrap();
    while engine.count(counter, peer).unwrap() == 0 {
        engine.progress();
        assert!(begin.elapsed() < PATIENCE, "the signal of round {round} does not come");
    }
    engine.credit(peer, counter).unwrap();
    engine.flush();
    while engine.credits(counter, peer).unwrap() == round {
        engine.progress();
        assert!(begin.elapsed() < PATIENCE, "the credit of round {round} does not come");
    }
}

#[test]
fn rounds_without_calls_of_raised_allocate_no_memory_each() {
    for kind in [ProviderKind::Shm, ProviderKind::Tcp] {
        on_threads(2, |me, gather| {
            let device: Arc<dyn Device> = match kind {
                ProviderKind::Shm => Arc::new(ShmDevice::new(ShmConfig { host_id: "this".into() })),
                _ => Arc::new(TcpDevice::new(TcpConfig::default()).unwrap()),
            };
            let config = EngineConfig::default();
            let mut engine = Engine::new(config, me, 2, Generation(3), &[device]).unwrap();
            connect(&mut engine, gather, soon(20)).unwrap();
            let (counter, peer) = (engine.counter().unwrap(), Rank(1 - me.0));
            let grants = gather(engine.grant(peer, &[], &[counter]).unwrap().encode());
            let grant = Grant::decode(&grants[peer.0 as usize]).unwrap();
            engine.import(peer, &grant, &[counter], soon(20)).unwrap();
            (0..WARM).for_each(|round| run_round(&mut engine, counter, round));
            let rounds = WARM..WARM + ROUNDS;
            let ((), allocations) =
                counting(|| rounds.for_each(|round| run_round(&mut engine, counter, round)));
            assert!(
                allocations <= MOST_GROWTHS,
                "{kind}: {allocations} allocations in {ROUNDS} rounds"
            );
            // `raised` still returns the lane, once.
            assert!(engine.raised().len() <= 1);
            gather(Vec::new());
        });
    }
}
