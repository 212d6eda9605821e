//! Ranks in this process, connected over real sockets.

use crate::common::connect_all;
pub use crate::common::soon;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::{TcpConfig, TcpDevice};
use weft_fabric::{
    CounterId, Device, Engine, EngineConfig, Generation, Grant, Rank, Region, RemoteRegion,
    WaitOptions,
};

pub const GENERATION: Generation = Generation(3);
/// Time limit for what ends at once, on a busy machine: below the limit in [`waiting`].
pub const PROMPT: Duration = Duration::from_secs(10);

/// Rank with a destination that is divided into a slot for each peer, and a source likewise.
pub struct End {
    pub engine: Engine,
    pub counter: CounterId,
    pub source: Region,
    pub destination: Region,
    /// By rank; `None` for itself.
    pub remotes: Vec<Option<RemoteRegion>>,
}

/// Waits without spinning, so that every wait depends on the descriptors.
pub fn waiting<T>(wait: impl FnOnce(&mut WaitOptions<'_>) -> T) -> T {
    let deadline = soon(30);
    wait(&mut WaitOptions { deadline, spin: Duration::ZERO, interrupted: &mut || false })
}

pub fn engine(rank: u32, size: u32, device: TcpDevice) -> Engine {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(device)];
    Engine::new(EngineConfig::default(), Rank(rank), size, GENERATION, &devices).unwrap()
}

pub fn connected(size: u32, config: &TcpConfig) -> Vec<Engine> {
    let device = || TcpDevice::new(config.clone()).unwrap();
    let mut engines: Vec<Engine> = (0..size).map(|rank| engine(rank, size, device())).collect();
    connect_all(&mut engines);
    engines
}

/// Connected ranks, each with a slot in every other's destination.
pub fn linked(size: u32, config: &TcpConfig, slot: usize) -> Vec<End> {
    link(connected(size, config), slot)
}

/// Grants every rank a slot in every other's destination.
pub fn link(engines: Vec<Engine>, slot: usize) -> Vec<End> {
    let size = engines.len();
    let end = |mut engine: Engine| {
        let counter = engine.counter().unwrap();
        let source = engine.alloc(slot * size).unwrap();
        let destination = engine.alloc(slot * size).unwrap();
        End { engine, counter, source, destination, remotes: vec![None; size] }
    };
    let mut ends: Vec<End> = engines.into_iter().map(end).collect();
    for owner in 0..size {
        for writer in (0..size).filter(|writer| *writer != owner) {
            let begin = (writer * slot) as u64;
            let end = &mut ends[owner];
            let range = begin..begin + slot as u64;
            let regions = [(&end.destination, range)];
            let grant = end.engine.grant(Rank(writer as u32), &regions, &[end.counter]).unwrap();
            let grant = Grant::decode(&grant.encode()).unwrap();
            let (end, owner_rank) = (&mut ends[writer], Rank(owner as u32));
            let imported = end.engine.import(owner_rank, &grant, &[end.counter], soon(1));
            end.remotes[owner] = imported.unwrap().pop();
        }
    }
    ends
}

/// Runs each rank on a separate thread.
pub fn on_threads<T: Send>(ends: Vec<End>, body: impl Fn(End) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || body(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
