//! Posts and flushes on a link: parts that leave together cost one flush.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use weft_fabric::link::{
    Introduction, Membership, PostStatus, Scatter, ScatterStatus, Sink, WorkRequest,
};
use weft_fabric::{
    CounterId, Device, Engine, EngineAddress, EngineConfig, Event, Generation, Lane, Link,
    MemberWrite, Memory, Page, PeerWrite, ProviderKind, Rank, Region, RegionKey, RemoteRegion,
    Requests, Result, RouteRule, ScatterWrite, Time, WaitLimit, clock,
};

use crate::common::soon;

/// Recorded link call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Credit,
    Write(Rank),
    /// Scatter with this many parts.
    Scatter(usize),
    Flush,
}

/// Device whose writes complete at the next poll and move no bytes.
#[derive(Default)]
struct Recorder {
    calls: Arc<Mutex<Vec<Call>>>,
    /// The engine's lane table.
    group: Mutex<Option<Membership>>,
}

struct RecorderLink {
    calls: Arc<Mutex<Vec<Call>>>,
    posted: Vec<u64>,
}

impl RecorderLink {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Device for Recorder {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        *self.group.lock().unwrap() = Some(group);
        Ok(Box::new(RecorderLink { calls: self.calls.clone(), posted: Vec::new() }))
    }
}

impl Link for RecorderLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn route(&self, _theirs: &[u8]) -> Option<RouteRule> {
        Some(RouteRule { inline: false, ..RouteRule::STORES })
    }

    fn connect(&mut self, _: &[Introduction<'_>], _: &mut WaitLimit<'_>) -> Result<()> {
        Ok(())
    }

    fn register(&mut self, _: RegionKey, _: &Arc<Memory>) -> Result<()> {
        Ok(())
    }

    fn grant(&mut self, _: RegionKey, _: Rank, _: Range<u64>) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn import(
        &mut self,
        _: Rank,
        _: RegionKey,
        _: u64,
        _: &[u8],
        _: &mut WaitLimit<'_>,
    ) -> Result<()> {
        Ok(())
    }

    fn deregister(&mut self, _: RegionKey) {}

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.note(if work.credits.is_some() { Call::Credit } else { Call::Write(work.peer) });
        self.posted.push(work.token);
        Ok(PostStatus::InFlight)
    }

    fn post_scatter(&mut self, scatter: &Scatter<'_>, _: &mut Sink) -> ScatterStatus {
        self.note(Call::Scatter(scatter.parts.len()));
        self.posted.extend(scatter.parts.iter().map(|part| scatter.token(part)));
        let taken = scatter.parts.len();
        ScatterStatus { taken, in_flight: taken as u32, failed: None }
    }

    fn flush(&mut self, _: &mut Sink) {
        self.note(Call::Flush);
    }

    fn poll(&mut self, _: Time, sink: &mut Sink) {
        sink.completed.append(&mut self.posted);
    }

    fn fence(&mut self, _: Rank, _: &mut Sink) {}
}

const RANKS: u32 = 4;

/// Rank 0 in a group whose peers are grants without processes.
struct SingleRank {
    engine: Engine,
    device: Arc<Recorder>,
    counter: CounterId,
    /// Lane that rank 1 raises here.
    lane: Lane,
    source: Region,
    remotes: Vec<RemoteRegion>,
}

fn single_rank() -> SingleRank {
    let devices: Vec<Arc<Recorder>> = (0..RANKS).map(|_| Arc::default()).collect();
    let make = |rank: u32| {
        let device: Arc<dyn Device> = devices[rank as usize].clone();
        Engine::new(EngineConfig::default(), Rank(rank), RANKS, Generation(0), &[device]).unwrap()
    };
    let mut engines: Vec<Engine> = (0..RANKS).map(make).collect();
    let addresses: Vec<EngineAddress> = engines.iter().map(Engine::address).collect();
    let messages = vec![Vec::new(); RANKS as usize];
    for engine in &mut engines {
        engine.introduce(&addresses).unwrap();
        let mut limit = WaitLimit { deadline: soon(20), give_up: &mut || Ok(()) };
        engine.connect(&addresses, &messages, &mut limit).unwrap();
    }
    let mut peers = engines.into_iter();
    let mut engine = peers.next().unwrap();
    let (source, counter) = (engine.alloc(64).unwrap(), engine.counter().unwrap());
    let lane = engine.grant(Rank(1), &[], &[counter]).unwrap().counters[0].data;
    let mut remotes = Vec::new();
    for mut peer in peers {
        let (inbox, its_counter) = (peer.alloc(64).unwrap(), peer.counter().unwrap());
        let grant = peer.grant(Rank(0), &[(&inbox, 0..64)], &[its_counter]).unwrap();
        remotes.extend(engine.import(peer.rank(), &grant, &[counter], soon(20)).unwrap());
    }
    let device = devices[0].clone();
    device.calls.lock().unwrap().clear();
    SingleRank { engine, device, counter, lane, source, remotes }
}

impl SingleRank {
    /// Raises our lane as rank 1, for which a credit is due.
    fn owe_a_credit(&mut self) {
        self.device.group.lock().unwrap().as_ref().unwrap().lanes.arrive(self.lane).unwrap();
        self.engine.poll(clock::now(), &mut Vec::new());
        self.engine.credit(Rank(1), self.counter).unwrap();
    }

    fn page(&self, peer: u32) -> Page {
        let destination = self.remotes[peer as usize - 1].key;
        let source = self.source.key();
        Page { source, source_offset: 0, destination, destination_offset: 0, length: 8 }
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.device.calls.lock().unwrap())
    }
}

#[test]
fn a_credit_leaves_with_the_flush_of_the_write_that_follows_it() {
    let mut single_rank = single_rank();
    single_rank.owe_a_credit();
    single_rank.calls();
    let page = single_rank.page(1);
    single_rank.engine.write(Rank(1), single_rank.counter, 0, &[page]).unwrap();
    assert_eq!(single_rank.calls(), [Call::Write(Rank(1)), Call::Credit, Call::Flush]);
}

#[test]
fn a_scatter_is_one_batch_and_one_flush() {
    let mut single_rank = single_rank();
    let pages: Vec<[Page; 1]> = (1..RANKS).map(|peer| [single_rank.page(peer)]).collect();
    let writes: Vec<PeerWrite<'_>> =
        (1..RANKS).zip(&pages).map(|(peer, pages)| PeerWrite { peer: Rank(peer), pages }).collect();
    single_rank.owe_a_credit();
    single_rank.calls();
    single_rank.engine.scatter(&writes, single_rank.counter, 0, None).unwrap();
    assert_eq!(single_rank.calls(), [Call::Scatter(3), Call::Credit, Call::Flush]);
    let mut group = single_rank
        .engine
        .peer_group(single_rank.counter, &single_rank.source, &single_rank.remotes)
        .unwrap();
    let members = [0, 1, 2].map(|member| MemberWrite { member, length: 8, ..Default::default() });
    single_rank.engine.scatter_group(&mut group, 0, &members, None).unwrap();
    assert_eq!(single_rank.calls(), [Call::Scatter(3), Call::Flush]);
}

/// Requests behind each other share a flush, and each scatter has one completion.
#[test]
fn a_drivers_scatters_are_a_batch_each_and_one_flush() {
    let mut single_rank = single_rank();
    let write = |member: &RemoteRegion| ScatterWrite {
        peer: member.peer,
        round: 0,
        source_offset: 0,
        destination: member.key,
        destination_offset: 8,
        length: 8,
    };
    let SingleRank { engine, counter, source, remotes, .. } = &mut single_rank;
    let mut requests = Requests::default();
    for tag in [5, Requests::NO_EVENT, 6] {
        let mut list = requests.scatter(*counter, source.key());
        remotes.iter().for_each(|remote| list.push(write(remote)));
        list.finish(tag);
    }
    requests.scatter(*counter, source.key()).push(write(&remotes[0]));
    requests.scatter(*counter, source.key()).finish(7);
    engine.submit(&mut requests).unwrap();
    assert!(requests.is_empty());
    let scatter = Call::Scatter(3);
    assert_eq!(single_rank.calls(), [scatter, scatter, scatter, Call::Flush]);
    let mut events = Vec::new();
    single_rank.engine.poll(clock::now(), &mut events);
    events.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(events, [5, 6].map(|tag| Event::Completed { tag }));
    assert_eq!(single_rank.engine.statistics().requests, 0);
}
