//! Engines over shm and over tcp: counters that are created and released, barriers that are repeated, drivers, event
//! loops.

#[path = "engines/barriers.rs"]
mod barriers;
#[path = "common/mod.rs"]
mod common;
#[path = "engines/counters.rs"]
mod counters;
#[path = "engines/drivers.rs"]
mod drivers;
#[path = "engines/event_loops.rs"]
mod event_loops;
#[path = "engines/flushes.rs"]
mod flushes;

use common::{AllGather, connect, on_threads, soon};
use std::sync::Arc;
use weft_fabric::providers::{ShmConfig, ShmDevice, TcpConfig, TcpDevice};
use weft_fabric::{CounterId, Device, Engine, EngineConfig, Generation, Grant, ProviderKind, Rank};

const KINDS: [ProviderKind; 2] = [ProviderKind::Shm, ProviderKind::Tcp];

fn device(kind: ProviderKind) -> Arc<dyn Device> {
    match kind {
        ProviderKind::Shm => Arc::new(ShmDevice::new(ShmConfig { host_id: "this".into() })),
        _ => Arc::new(TcpDevice::new(TcpConfig::default()).unwrap()),
    }
}

/// Two connected engines, each on a separate thread.
fn two(
    kind: ProviderKind,
    config: &EngineConfig,
    rank: impl Fn(Engine, &mut AllGather<'_>) + Send + Sync,
) {
    on_threads(2, |me, gather| {
        let config = config.clone();
        let mut engine = Engine::new(config, me, 2, Generation(3), &[device(kind)]).unwrap();
        connect(&mut engine, gather, soon(20)).unwrap();
        rank(engine, gather);
    });
}

fn peer_of(engine: &Engine) -> Rank {
    Rank(1 - engine.rank().0)
}

/// Links a counter between both ranks.
fn share(engine: &mut Engine, counter: CounterId, gather: &mut AllGather<'_>) {
    let peer = peer_of(engine);
    let grants = gather(engine.grant(peer, &[], &[counter]).unwrap().encode());
    let grant = Grant::decode(&grants[peer.0 as usize]).unwrap();
    engine.import(peer, &grant, &[counter], soon(20)).unwrap();
}

fn shared(engine: &mut Engine, gather: &mut AllGather<'_>) -> CounterId {
    let counter = engine.counter().unwrap();
    share(engine, counter, gather);
    counter
}

#[test]
fn an_engine_takes_a_provider_once() {
    let devices = [device(ProviderKind::Tcp), device(ProviderKind::Tcp)];
    let config = EngineConfig::default();
    let error = Engine::new(config, Rank(0), 2, Generation(3), &devices).err().unwrap();
    assert!(
        error.to_string().contains("tcp")
            && error.to_string().contains("named twice: expected once"),
        "{error}"
    );
}
