//! Tests for the simulator's checks: violations are recorded, correct programs record none.

use crate::traffic::TrafficError;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::link::{Introduction, Link, Membership, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::sim::{
    Cluster, Faults, Outcome, Violation, ViolationKind, World, WorldConfig,
};
use weft_fabric::{
    CounterId, Event, Generation, Lane, LaneId, LaneTable, LatencyBandwidth, Memory, Page, Rank,
    Region, RegionKey, RemoteRegion, Time, TrafficClass, WaitLimit,
};

const KEY: RegionKey = RegionKey(0);
const LENGTH: usize = 256;
const GRANTED: u64 = 128;

/// One rank's link without an engine, free to violate the rules.
struct RawLink {
    rank: Rank,
    end: Box<dyn Link>,
    lanes: Arc<LaneTable>,
    memory: Arc<Memory>,
    /// Lanes for the peer's parts and for the peer's credits.
    data: Lane,
    credit: Lane,
}

fn raw_links(world: &World) -> [RawLink; 2] {
    let opened = [0, 1].map(|rank| {
        let (rank, generation) = (Rank(rank), Generation(3));
        let lanes = Arc::new(LaneTable::new(16, generation).unwrap());
        let group = Membership { rank, size: 2, generation, lanes: lanes.clone() };
        (rank, world.device(rank).open(group).unwrap(), lanes)
    });
    let addresses: Vec<Vec<u8>> = opened.iter().map(|(_, end, _)| end.address()).collect();
    opened.map(|(rank, mut end, lanes)| {
        let peer = Rank(1 - rank.0);
        let address = addresses[peer.index()].as_slice();
        let mut limit = WaitLimit { deadline: Time::MAX, give_up: &mut || Ok(()) };
        end.connect(&[Introduction { peer, address, message: &[] }], &mut limit).unwrap();
        let memory = Arc::new(Memory::from_bytes(vec![rank.0 as u8 + 1; LENGTH]));
        end.register(KEY, &memory).unwrap();
        end.grant(KEY, peer, 0..GRANTED).unwrap();
        let data = lanes.issue(peer, 2).unwrap();
        let credit = Lane::new(LaneId::new(data.id().get() + 1).unwrap(), data.generation());
        RawLink { rank, end, lanes, memory, data, credit }
    })
}

fn work(peer: Rank, lane: Lane, credits: Option<Lane>, pages: &[Page]) -> WorkRequest<'_> {
    WorkRequest {
        token: 0,
        peer,
        lane,
        credits,
        piggyback: None,
        class: TrafficClass::Latency,
        pages,
    }
}

impl RawLink {
    fn write(&mut self, to: &RawLink, begin: u64, length: u64) {
        let page = Page {
            source: KEY,
            source_offset: 0,
            destination: KEY,
            destination_offset: begin,
            length,
        };
        let pages = [page];
        let work = work(to.rank, to.data, None, &pages);
        assert_eq!(self.end.post(&work, &mut Sink::default()), Ok(PostStatus::InFlight));
    }

    fn credit(&mut self, to: &RawLink) {
        let work = work(to.rank, to.credit, Some(self.data), &[]);
        assert_eq!(self.end.post(&work, &mut Sink::default()), Ok(PostStatus::InFlight));
    }

    fn bytes(&self, begin: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.copy_out(begin, &mut bytes);
        bytes
    }
}

fn finish(world: &World) {
    while world.step() {}
}

fn violations(world: &World) -> Vec<ViolationKind> {
    world.violations().into_iter().map(|violation| violation.kind).collect()
}

fn quiet_world() -> World {
    World::new(WorldConfig::new(2, 1))
}

#[test]
fn bytes_are_random_until_they_land_and_after_they_are_credited() {
    let world = quiet_world();
    let [mut a, mut b] = raw_links(&world);
    a.write(&b, 0, 64);
    assert_ne!(b.bytes(0, 64), [1; 64]);
    assert_ne!(b.bytes(0, 64), [2; 64]);
    assert_eq!(b.bytes(64, 64), [2; 64]);
    finish(&world);
    assert_eq!((b.bytes(0, 64), b.lanes.value(b.data.id())), (vec![1; 64], 1));
    b.credit(&a);
    assert_ne!(b.bytes(0, 64), [1; 64]);
    finish(&world);
    a.write(&b, 32, 64);
    finish(&world);
    assert_eq!(b.bytes(32, 64), [1; 64]);
    assert_eq!(world.violations(), []);
}

#[test]
fn a_write_onto_bytes_in_flight_is_found() {
    let world = quiet_world();
    let [mut a, b] = raw_links(&world);
    a.write(&b, 0, 64);
    a.write(&b, 64, 8);
    assert_eq!(violations(&world), []);
    a.write(&b, 60, 4);
    let expected = Violation {
        at: Time(0),
        kind: ViolationKind::Overlap,
        rank: Rank(0),
        peer: Rank(1),
        bytes: Some((Rank(1), KEY, 60..64)),
        lane: Some(b.data.id()),
    };
    assert_eq!(world.violations(), [expected]);
    finish(&world);
}

#[test]
fn a_write_that_does_not_wait_for_credit_is_found() {
    let world = quiet_world();
    let [mut a, b] = raw_links(&world);
    a.write(&b, 10, 20);
    finish(&world);
    a.write(&b, 29, 20);
    assert_eq!(violations(&world), [ViolationKind::Overlap]);
    finish(&world);
}

#[test]
fn a_write_outside_of_its_grant_is_found_and_fails() {
    let world = quiet_world();
    let [mut a, b] = raw_links(&world);
    a.write(&b, GRANTED - 1, 2);
    finish(&world);
    assert_eq!(violations(&world), [ViolationKind::OutsideGrant]);
    assert_eq!((b.bytes(0, LENGTH), b.lanes.value(b.data.id())), (vec![2; LENGTH], 0));
    let mut sink = Sink::default();
    a.end.poll(world.now(), &mut sink);
    assert_eq!((sink.completed.len(), sink.failures.len()), (0, 1));
}

#[test]
fn a_source_that_changes_in_flight_is_found() {
    for late_source in [0.0, 1.0] {
        let faults = Faults { late_source, ..Faults::default() };
        let world = World::new(WorldConfig::new(2, 1).with_faults(faults));
        let [mut a, b] = raw_links(&world);
        a.write(&b, 0, 64);
        a.memory.fill(63, 1, 9);
        finish(&world);
        assert_eq!(violations(&world), [ViolationKind::SourceChanged]);
        assert_eq!(b.bytes(63, 1), [if late_source > 0.0 { 9 } else { 1 }]);
    }
}

#[test]
fn a_source_may_change_once_its_write_is_completed() {
    let faults = Faults { early_completion: 1.0, ..Faults::default() };
    let world = World::new(WorldConfig::new(2, 1).with_faults(faults));
    let [mut a, b] = raw_links(&world);
    a.write(&b, 0, 64);
    let mut sink = Sink::default();
    while sink.completed.is_empty() && world.step() {
        a.end.poll(world.now(), &mut sink);
    }
    assert_eq!(b.lanes.value(b.data.id()), 0, "it completes before it arrives");
    a.memory.fill(0, 64, 9);
    finish(&world);
    assert_eq!((b.bytes(0, 64), violations(&world)), (vec![1; 64], vec![]));
}

#[test]
fn a_region_released_in_flight_is_found_at_both_ends() {
    for (rank, kind) in
        [(0, ViolationKind::SourceReleased), (1, ViolationKind::DestinationReleased)]
    {
        let world = quiet_world();
        let [mut a, mut b] = raw_links(&world);
        a.write(&b, 0, 64);
        if rank == 0 {
            a.end.deregister(KEY)
        } else {
            b.end.deregister(KEY)
        }
        finish(&world);
        assert_eq!(violations(&world), [kind]);
    }
}

#[test]
fn a_region_may_be_released_when_nothing_is_in_flight() {
    let world = quiet_world();
    let [mut a, mut b] = raw_links(&world);
    a.write(&b, 0, 64);
    finish(&world);
    a.end.deregister(KEY);
    b.end.deregister(KEY);
    assert_eq!(world.violations(), []);
}

#[test]
fn credit_before_all_of_the_round_has_arrived_is_found() {
    let world = quiet_world();
    let [mut a, mut b] = raw_links(&world);
    a.write(&b, 0, 64);
    b.credit(&a);
    finish(&world);
    assert_eq!(violations(&world), [ViolationKind::EarlyCredit]);
    a.write(&b, 0, 1);
    finish(&world);
    assert_eq!(
        violations(&world)[1..],
        [ViolationKind::Overlap],
        "the early credit released bytes"
    );
}

#[test]
fn a_lane_raised_by_another_rank_is_found() {
    let world = quiet_world();
    let [mut a, b] = raw_links(&world);
    assert_eq!(b.lanes.arrive(b.data), Some(Rank(0)));
    a.write(&b, 0, 1);
    finish(&world);
    assert_eq!(violations(&world), [ViolationKind::RaisedBeyondPosted]);
}

/// Two engines, one counter, an inbox at rank 1 and a source at rank 0.
struct Pair {
    cluster: Cluster,
    counter: CounterId,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
}

fn pair(faults: Faults) -> Pair {
    let model = Box::new(LatencyBandwidth::new(Duration::from_micros(1), 1 << 30));
    let world = World::new(WorldConfig { model, ..WorldConfig::new(2, 7).with_faults(faults) });
    let mut cluster = Cluster::new(&world).unwrap();
    let counter = cluster.counter().unwrap();
    let source = cluster.engine(Rank(0)).alloc(LENGTH).unwrap();
    let inbox = cluster.engine(Rank(1)).alloc(LENGTH).unwrap();
    let regions = |owner: Rank, _: Rank| {
        if owner.0 == 1 { vec![(inbox.clone(), 0..LENGTH as u64)] } else { Vec::new() }
    };
    let remote = cluster.share(regions, &[counter]).unwrap()[0][1][0];
    Pair { cluster, counter, source, inbox, remote }
}

impl Pair {
    fn page(&self, begin: u64, length: u64) -> Page {
        Page {
            source: self.source.key(),
            source_offset: begin,
            destination: self.remote.key,
            destination_offset: begin,
            length,
        }
    }
}

#[test]
fn a_driver_that_reuses_its_source_early_is_found() {
    let mut pair = pair(Faults { late_source: 1.0, ..Faults::default() });
    let page = pair.page(0, 64);
    let request = pair.cluster.engine(Rank(0)).write(Rank(1), pair.counter, 0, &[page]).unwrap();
    assert!(!pair.cluster.engine(Rank(0)).is_drained(request));
    pair.source.memory().fill(0, 64, 1);
    pair.cluster.settle().unwrap();
    assert_eq!(violations(pair.cluster.world()), [ViolationKind::SourceChanged]);
}

#[test]
fn a_driver_that_writes_twice_in_a_round_is_found() {
    let mut pair = pair(Faults::default());
    let (page, again) = (pair.page(0, 64), pair.page(32, 64));
    let engine = pair.cluster.engine(Rank(0));
    engine.write(Rank(1), pair.counter, 0, &[page]).unwrap();
    engine.write(Rank(1), pair.counter, 0, &[again]).unwrap();
    assert_eq!(violations(pair.cluster.world()), [ViolationKind::Overlap]);
}

/// Rank 1 reads the bytes from rank 0 once `ready` returns true, given the count and rank 1's credit.
fn reads(ready: impl Fn(u64, bool) -> bool) -> bool {
    let mut pair = pair(Faults::default());
    pair.source.memory().fill(0, LENGTH, 5);
    let page = pair.page(0, LENGTH as u64);
    let (counter, inbox) = (pair.counter, pair.inbox.clone());
    let (mut seen, mut credited, mut right) = (0, false, false);
    let outcomes = pair.cluster.run(|engine, _, events, requests| {
        if engine.rank() == Rank(0) {
            if engine.next_round(counter, Rank(1))? == 0 {
                requests.write(Rank(1), counter, 0, [page], 0);
            }
            return Ok::<bool, TrafficError>(true);
        }
        for event in events {
            if let Event::Raised { count, .. } = event {
                seen = *count;
            }
        }
        if ready(seen, credited) {
            let mut bytes = vec![0; LENGTH];
            inbox.memory().copy_out(0, &mut bytes);
            right = bytes == [5; LENGTH];
            return Ok(true);
        }
        if seen > 0 && !credited {
            engine.credit(Rank(0), counter)?;
            credited = true;
        }
        Ok(false)
    });
    assert!(outcomes.unwrap().iter().all(|outcome| matches!(outcome, Outcome::Done)));
    assert_eq!(pair.cluster.world().violations(), []);
    right
}

#[test]
fn a_reader_of_uncounted_or_credited_bytes_gets_random_bytes() {
    assert!(reads(|seen, _| seen == 1));
    assert!(!reads(|_, _| true));
    assert!(!reads(|_, credited| credited));
}
