//! Counters that are created and released: lanes are issued again, and late arrivals have no effect.

use std::sync::Arc;
use weft_fabric::link::{Introduction, Membership, Sink, WorkRequest};
use weft_fabric::providers::sim::{Cluster, Faults, World, WorldConfig};
use weft_fabric::{
    CounterConfig, CounterId, Engine, EngineAddress, EngineConfig, Error, Generation, Lane, LaneId,
    LaneTable, Link, ProviderKind, Rank, Time, TrafficClass, WaitLimit,
};

const MANY: u64 = if cfg!(miri) { 300 } else { 10_000 };
/// Lanes for a counter of each kind, issued 255 times each, and a few to spare.
const LANES: usize = 128;

fn cluster(ranks: u32, lanes: usize) -> Cluster {
    let world = World::new(WorldConfig::new(ranks, 5).with_faults(Faults::rough()));
    let config = EngineConfig { lanes, ..EngineConfig::default() };
    Cluster::with_config(&world, config).unwrap()
}

fn signal_and_credit(cluster: &mut Cluster, counter: CounterId) {
    for rank in cluster.ranks() {
        for peer in cluster.engine(rank).peers() {
            cluster.engine(rank).signal(peer, counter, 0).unwrap();
        }
    }
    cluster.settle().unwrap();
    for rank in cluster.ranks() {
        for peer in cluster.engine(rank).peers() {
            assert_eq!(cluster.engine(rank).count(counter, peer).unwrap(), 1);
            cluster.engine(rank).credit(peer, counter).unwrap();
        }
    }
    cluster.settle().unwrap();
    for rank in cluster.ranks() {
        for peer in cluster.engine(rank).peers() {
            assert_eq!(cluster.engine(rank).credits(counter, peer).unwrap(), 1);
        }
    }
}

#[test]
fn ten_thousand_counters_are_used_once_each_in_bounded_lanes() {
    let mut cluster = cluster(2, LANES);
    let (mut made, mut before) = (std::collections::HashSet::new(), None);
    for number in 0..MANY {
        let counter = cluster.counter().unwrap();
        assert!(made.insert(counter), "counter {number} has the name of another");
        cluster.share(|_, _| Vec::new(), &[counter]).unwrap();
        assert_eq!(cluster.engine(Rank(0)).count(counter, Rank(1)).unwrap(), 0);
        assert_eq!(cluster.engine(Rank(0)).credits(counter, Rank(1)).unwrap(), 0);
        signal_and_credit(&mut cluster, counter);
        for rank in cluster.ranks() {
            let engine = cluster.engine(rank);
            engine.release_counter(counter).unwrap();
            let again = engine.release_counter(counter);
            assert!(matches!(again, Err(Error::Unknown { what: "counter", .. })), "{again:?}");
            // The previous name stays unknown although the lanes are in use again.
            for old in [Some(counter), before].into_iter().flatten() {
                let used = engine.signal(Rank(1 - rank.0), old, 1);
                assert!(matches!(used, Err(Error::Unknown { what: "counter", .. })), "{used:?}");
            }
        }
        before = Some(counter);
    }
    for rank in cluster.ranks() {
        let statistics = cluster.engine(rank).statistics();
        assert_eq!((statistics.refused_stale, statistics.refused_ungranted), (0, 0));
        assert_eq!(statistics.requests, 0);
    }
    assert_eq!(cluster.world().violations(), []);
}

/// Rank 1 has no engine on the link, so it can raise a lane that it held before.
#[test]
fn a_late_arrival_raises_no_counter_that_has_its_lanes_now() {
    let world = World::new(WorldConfig::new(2, 1));
    let generation = Generation(1);
    let mut engine =
        Engine::new(EngineConfig::default(), Rank(0), 2, generation, &[world.device(Rank(0))])
            .unwrap();
    let lanes = Arc::new(LaneTable::new(8, generation).unwrap());
    let group = Membership { rank: Rank(1), size: 2, generation, lanes: lanes.clone() };
    let mut late = world.device(Rank(1)).open(group).unwrap();
    let mut limit = WaitLimit { deadline: Time::MAX, give_up: &mut || Ok(()) };
    let own = engine.address();
    let address = own.of(ProviderKind::Sim).unwrap();
    late.connect(&[Introduction { peer: Rank(0), address, message: &[] }], &mut limit).unwrap();
    let providers = vec![(ProviderKind::Sim, late.address())];
    let theirs = EngineAddress { providers, ..own.clone() };
    let addresses = [own.clone(), theirs];
    let messages = engine.introduce(&addresses).unwrap();
    engine.connect(&addresses, &messages, &mut limit).unwrap();
    let granted = |engine: &mut Engine| {
        let counter = engine.counter().unwrap();
        let grant = engine.grant(Rank(1), &[], &[counter]).unwrap().counters[0];
        (counter, grant)
    };
    let raise = |late: &mut Box<dyn Link>, lane| {
        let (peer, class) = (Rank(0), TrafficClass::Latency);
        let work =
            WorkRequest { token: 0, peer, lane, credits: None, piggyback: None, class, pages: &[] };
        late.post(&work, &mut Sink::default()).unwrap();
        while world.step() {}
    };
    let (first, old) = granted(&mut engine);
    raise(&mut late, old.data);
    assert_eq!(engine.count(first, Rank(1)).unwrap(), 1);
    engine.release_counter(first).unwrap();
    raise(&mut late, old.data);
    assert_eq!(engine.statistics().refused_ungranted, 1, "its lanes are free");
    let (second, new) = granted(&mut engine);
    assert_eq!(new.data.id(), old.data.id());
    assert_ne!(new.data.generation(), old.data.generation());
    assert_ne!(first, second);
    raise(&mut late, old.data);
    raise(&mut late, old.credit);
    engine.poll(world.now(), &mut Vec::new());
    assert_eq!(engine.count(second, Rank(1)).unwrap(), 0);
    assert_eq!(engine.credits(second, Rank(1)).unwrap(), 0);
    assert_eq!(engine.statistics().refused_stale, 2);
    raise(&mut late, new.data);
    assert_eq!(engine.count(second, Rank(1)).unwrap(), 1);
    let unissued = Lane::new(LaneId::new(5000).unwrap(), generation);
    raise(&mut late, unissued);
    assert_eq!(engine.statistics().refused_ungranted, 2);
}

#[test]
fn pairwise_counters_connect_the_peers_named_alone() {
    let mut cluster = cluster(3, 64);
    let pairs = [(0, 1), (1, 2), (2, 0)];
    let mut made = Vec::new();
    for (a, b) in pairs {
        let end = |cluster: &mut Cluster, rank: u32, peer: u32| {
            let peers = [Rank(peer)];
            let shape = CounterConfig { peers: Some(&peers), window: 2, class: TrafficClass::Bulk };
            cluster.engine(Rank(rank)).counter_with(shape).unwrap()
        };
        let (at_a, at_b) = (end(&mut cluster, a, b), end(&mut cluster, b, a));
        for (owner, ours, peer, theirs) in [(a, at_a, b, at_b), (b, at_b, a, at_a)] {
            let grant = cluster.engine(Rank(owner)).grant(Rank(peer), &[], &[ours]).unwrap();
            let importer = cluster.engine(Rank(peer));
            importer.import(Rank(owner), &grant, &[theirs], Time::MAX).unwrap();
        }
        made.push((Rank(a), at_a, Rank(b), at_b));
    }
    for (number, &(a, at_a, b, at_b)) in made.iter().enumerate() {
        for _ in 0..=number {
            cluster.engine(a).signal(b, at_a, 1).unwrap();
        }
        cluster.engine(b).signal(a, at_b, 0).unwrap();
        let third = Rank(3 - a.0 - b.0);
        for refused in [
            cluster.engine(a).signal(third, at_a, 0).map(drop),
            cluster.engine(a).count(at_a, third).map(drop),
            cluster.engine(a).grant(third, &[], &[at_a]).map(drop),
        ] {
            assert!(matches!(refused, Err(Error::Unknown { what: "rank", .. })), "{refused:?}");
        }
    }
    cluster.settle().unwrap();
    for (number, &(a, at_a, b, at_b)) in made.iter().enumerate() {
        assert_eq!(cluster.engine(b).count_in(at_b, a, 1).unwrap(), number as u64 + 1);
        assert_eq!(cluster.engine(b).count_in(at_b, a, 0).unwrap(), 0);
        assert_eq!(cluster.engine(a).count(at_a, b).unwrap(), 1);
    }
    let excluded = [Rank(3)];
    let shape = CounterConfig { peers: Some(&excluded), ..CounterConfig::default() };
    let error = cluster.engine(Rank(0)).counter_with(shape).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "rank", number: 3 }), "{error}");
}

#[test]
fn a_counter_beyond_the_lanes_leaves_nothing_taken() {
    // Three peers: a counter takes six lanes, and a three-round window takes four for each peer.
    let mut cluster = cluster(4, 14);
    let engine = cluster.engine(Rank(0));
    let wide = CounterConfig { window: 3, ..CounterConfig::default() };
    let first = engine.counter().unwrap();
    for _ in 0..1000 {
        // Eight lanes are left: two peers have theirs when it fails. A thousand failures are more than a
        // lane has generations.
        let error = engine.counter_with(wide).unwrap_err();
        assert!(matches!(error, Error::Limit { what: "lanes in one engine", .. }), "{error}");
    }
    engine.release_counter(first).unwrap();
    let one = engine.counter().unwrap();
    let peers = [Rank(1), Rank(3)];
    let narrow = CounterConfig { peers: Some(&peers), ..wide };
    let narrow = engine.counter_with(narrow).unwrap();
    assert_ne!(one, narrow);
}

/// Three lanes in a protocol, one credit for a round on all: empty rounds on a follower are closed too,
/// and the bytes may be written again.
#[test]
fn counters_that_are_credited_together_cost_one_credit() {
    for window in [1, 3] {
        let mut cluster = cluster(2, 64);
        let mut counters = Vec::new();
        for rank in cluster.ranks() {
            let engine = cluster.engine(rank);
            let shape = CounterConfig { window, ..CounterConfig::default() };
            let leader = engine.counter_with(shape).unwrap();
            let follow = |engine: &mut Engine| engine.counter_credited_with(leader).unwrap();
            counters = vec![leader, follow(engine), follow(engine)];
            let error = engine.counter_credited_with(counters[1]).unwrap_err();
            let what = "counter with credits of its own";
            assert!(matches!(error, Error::Unknown { what: seen, .. } if seen == what), "{error}");
        }
        let regions: Vec<_> =
            cluster.ranks().map(|rank| cluster.engine(rank).alloc(64).unwrap()).collect();
        let granted = |owner: Rank, _: Rank| vec![(regions[owner.index()].clone(), 0..64)];
        let remotes = cluster.share(granted, &counters).unwrap();
        let remote = remotes[0][1][0];
        let [leader, first, second] = counters[..] else { unreachable!() };
        for round in 0..20 {
            let engine = cluster.engine(Rank(0));
            let page = |at| weft_fabric::Page {
                source: regions[0].key(),
                source_offset: at,
                destination: remote.key,
                destination_offset: at,
                length: 16,
            };
            engine.signal(Rank(1), leader, round).unwrap();
            engine.write(Rank(1), first, round, &[page(0)]).unwrap();
            if round % 3 == 0 {
                engine.write(Rank(1), second, round, &[page(32)]).unwrap();
            }
            let beyond = engine.write(Rank(1), first, round + u64::from(window), &[page(16)]);
            assert!(matches!(beyond, Err(Error::NoCredit { .. })), "{beyond:?}");
            cluster.settle().unwrap();
            let engine = cluster.engine(Rank(1));
            let counts = |engine: &mut Engine| {
                [leader, first, second].map(|counter| engine.count(counter, Rank(0)).unwrap())
            };
            assert_eq!(counts(engine), [1, 1, u64::from(round % 3 == 0)]);
            assert!(engine.credit(Rank(0), first).is_err());
            engine.credit(Rank(0), leader).unwrap();
            assert_eq!(counts(engine), [0, 0, 0]);
            cluster.settle().unwrap();
            let engine = cluster.engine(Rank(0));
            for counter in [leader, first, second] {
                assert_eq!(engine.credits(counter, Rank(1)).unwrap(), round + 1);
                let old = engine.write(Rank(1), counter, round, &[page(16)]);
                assert!(matches!(old, Err(Error::OldRound { .. })), "{old:?}");
            }
        }
        let parts = cluster.engine(Rank(1)).statistics().peers[0].totals.parts;
        assert_eq!(parts, 20, "one credit a round");
        assert_eq!(cluster.world().violations(), []);
        for rank in cluster.ranks() {
            for counter in [first, second, leader] {
                cluster.engine(rank).release_counter(counter).unwrap();
            }
        }
    }
}
