//! Allocations per round: none for counts and credits where `raised` is never called, and none for scatters
//! over a peer group.

mod common;
#[path = "common/counting.rs"]
mod counting;

use common::{PATIENCE, connect, on_threads, soon};
use counting::counting;
use std::sync::Arc;
use std::time::Instant;
use weft_fabric::providers::{
    OfiConfig, OfiDevice, ShmConfig, ShmDevice, TcpConfig, TcpDevice, ofi,
};
use weft_fabric::{
    CounterId, Device, Engine, EngineConfig, Generation, Grant, MemberWrite, PeerGroup,
    ProviderKind, Rank, Region, RemoteRegion,
};

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

/// Bytes that a scatter writes to a peer.
const LENGTH: u64 = 300;

/// A rank with source, destination and counter, and the peers' destinations.
struct Scattering {
    engine: Engine,
    regions: [Region; 2],
    counter: CounterId,
    remotes: Vec<RemoteRegion>,
}

impl Scattering {
    fn join(me: Rank, size: u32, gather: &mut common::AllGather<'_>) -> Scattering {
        let device: Arc<dyn Device> = Arc::new(OfiDevice::new(OfiConfig::default()).unwrap());
        let mut engine =
            Engine::new(EngineConfig::default(), me, size, Generation(3), &[device]).unwrap();
        connect(&mut engine, gather, soon(20)).unwrap();
        let regions = [(); 2].map(|()| engine.alloc(4 * LENGTH as usize).unwrap());
        let counter = engine.counter().unwrap();
        let granted = [(&regions[1], 0..4 * LENGTH)];
        let others: Vec<Rank> = (0..size).map(Rank).filter(|it| *it != me).collect();
        let mut entry = |peer| engine.grant(peer, &granted, &[counter]).unwrap().encode();
        let entries: Vec<(Rank, Vec<u8>)> = others.iter().map(|it| (*it, entry(*it))).collect();
        let mut remotes = Vec::new();
        // Each rank in turn receives the grants for it.
        for to in (0..size).map(Rank) {
            let sent = entries.iter().find(|(peer, _)| *peer == to);
            let received = gather(sent.map_or_else(Vec::new, |(_, entry)| entry.clone()));
            for &from in others.iter().filter(|_| to == me) {
                let grant = Grant::decode(&received[from.0 as usize]).unwrap();
                remotes.extend(engine.import(from, &grant, &[counter], soon(20)).unwrap());
            }
        }
        Scattering { engine, regions, counter, remotes }
    }

    fn until(&mut self, what: &str, is_done: impl Fn(&mut Engine) -> bool) {
        let begin = Instant::now();
        while !is_done(&mut self.engine) {
            self.engine.progress();
            assert!(begin.elapsed() < PATIENCE, "{what} does not come");
        }
    }

    /// Scatters a round, after all peers have released the last; returns the allocations in the call.
    fn scatter(&mut self, group: &mut PeerGroup, writes: &[MemberWrite], round: u64) -> usize {
        let counter = self.counter;
        let peers: Vec<Rank> = self.engine.peers().collect();
        for peer in peers {
            self.until("a credit", |it| it.credits(counter, peer).unwrap() >= round);
        }
        let (request, allocations) =
            counting(|| self.engine.scatter_group(group, round, writes, None).unwrap());
        self.until("the end of a scatter", |it| it.is_drained(request));
        allocations
    }

    /// Waits for the next round, and releases it.
    fn receive(&mut self) {
        let counter = self.counter;
        self.until("a scatter", |it| it.count(counter, Rank(0)).unwrap() > 0);
        self.engine.credit(Rank(0), counter).unwrap();
        self.engine.flush();
    }
}

#[test]
fn scatters_over_ofi_allocate_no_memory_each() {
    const SIZE: u32 = 4;
    const SCATTERS: u64 = 100;
    if let Err(why) = ofi::library() {
        return println!("skipped: {why}");
    }
    on_threads(SIZE, |me, gather| {
        let mut it = Scattering::join(me, SIZE, gather);
        let rounds = 0..WARM + SCATTERS;
        if me != Rank(0) {
            rounds.for_each(|_| it.receive());
            return drop(gather(Vec::new()));
        }
        let Scattering { engine, regions, counter, remotes } = &mut it;
        let mut group = engine.peer_group(*counter, &regions[0], remotes).unwrap();
        let mut allocations = 0;
        for round in rounds {
            let write = |member: u32| MemberWrite {
                member,
                source_offset: round % 3,
                destination_offset: (round + u64::from(member)) % LENGTH,
                length: LENGTH,
            };
            let writes = [0, 1, 2].map(write);
            let made = it.scatter(&mut group, &writes, round);
            allocations += if round < WARM { 0 } else { made };
        }
        assert!(allocations <= MOST_GROWTHS, "{allocations} allocations in {SCATTERS} scatters");
        gather(Vec::new());
    });
}
