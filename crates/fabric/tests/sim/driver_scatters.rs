//! Drivers' scatters beside the same writes one by one: equal bytes, counts and rounds, and one completion.

use std::collections::BTreeSet;
use weft_control::Cause;
use weft_fabric::providers::sim::{Cluster, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterConfig, CounterId, Engine, Error, Event, Page, PartRule, Rank, Region, RegionKey,
    RemoteRegion, Requests, ScatterWrite,
};
use weft_scenarios::seeds;

const LENGTH: u64 = 512;
const RANKS: u32 = 5;
const WINDOW: u64 = 3;
/// Longest write.
const MOST: u64 = 60;

/// Rank 0 with regions at all others.
struct Group {
    cluster: Cluster,
    counter: CounterId,
    regions: Vec<Region>,
    /// By rank.
    remotes: Vec<Option<RemoteRegion>>,
}

fn group(config: WorldConfig) -> Group {
    let mut cluster = Cluster::new(&World::new(config)).unwrap();
    let shape = CounterConfig { window: WINDOW as u32, ..CounterConfig::default() };
    let counter = cluster.counter_with(shape).unwrap();
    let regions: Vec<Region> =
        cluster.ranks().map(|rank| cluster.engine(rank).alloc(LENGTH as usize).unwrap()).collect();
    let granted = |owner: Rank, _| vec![(regions[owner.0 as usize].clone(), 0..LENGTH)];
    let shared = cluster.share(granted, &[counter]).unwrap();
    let remotes = shared[0].iter().map(|regions| regions.first().copied()).collect();
    Group { cluster, counter, regions, remotes }
}

/// A write before it has keys.
#[derive(Clone, Copy, Debug)]
struct Planned {
    peer: Rank,
    round: u64,
    from: u64,
    to: u64,
    length: u64,
}

impl Group {
    fn sized(&self, length: u64, peer: u32, round: u64) -> Planned {
        Planned { peer: Rank(peer), round, from: 0, to: 0, length }
    }

    fn key(&self, peer: Rank) -> RegionKey {
        self.remotes[peer.index()].map_or(RegionKey(0), |remote| remote.key)
    }

    /// Adds the writes to `requests`: a scatter with this tag, or one by one with tags from it on.
    fn add(&self, requests: &mut Requests, writes: &[Planned], tag: u64, scatters: bool) {
        let source = self.regions[0].key();
        if !scatters {
            for (tag, write) in (tag..).zip(writes) {
                let Planned { peer, round, from, to, length } = *write;
                let destination = self.key(peer);
                let page = Page {
                    source,
                    source_offset: from,
                    destination,
                    destination_offset: to,
                    length,
                };
                requests.write(peer, self.counter, round, Some(page), tag);
            }
            return;
        }
        let mut list = requests.scatter(self.counter, source);
        for write in writes {
            let Planned { peer, round, from, to, length } = *write;
            let destination = self.key(peer);
            list.push(ScatterWrite {
                peer,
                round,
                source_offset: from,
                destination,
                destination_offset: to,
                length,
            });
        }
        assert_eq!(list.len(), writes.len());
        list.finish(tag);
    }

    fn submit(&mut self, requests: &mut Requests) -> Result<(), Error> {
        self.cluster.engine(Rank(0)).submit(requests)
    }

    fn bytes(&self, rank: u32) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        self.regions[rank as usize].memory().copy_out(0, &mut bytes);
        bytes
    }
}

/// Scatters in one submit each, with random peers in random order. A peer's writes are in the open rounds, and to
/// places that no other write has.
fn plan(random: &mut SplitMix64) -> Vec<Vec<Planned>> {
    let mut at = [0; RANKS as usize];
    let mut scatters = Vec::new();
    for _ in 0..1 + random.below(4) {
        let mut writes = Vec::new();
        for _ in 0..random.below(12) {
            let peer = 1 + random.below(u64::from(RANKS) - 1) as u32;
            let to = at[peer as usize];
            let length = random.below(MOST + 1).min(LENGTH - to);
            at[peer as usize] += length;
            let (round, from) = (random.below(WINDOW), random.below(LENGTH - length + 1));
            writes.push(Planned { peer: Rank(peer), round, from, to, length });
        }
        scatters.push(writes);
    }
    scatters
}

/// State that a run leaves: bytes by rank, counts by rank and round, and parts written to each peer.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    bytes: Vec<Vec<u8>>,
    counts: Vec<u64>,
    parts: Vec<u64>,
}

fn run(seed: u64, scatters: bool) -> Left {
    let mut random = SplitMix64::new(seed);
    let parts = PartRule {
        max_part_bytes: [16, 64, u64::MAX][random.below(3) as usize],
        ..PartRule::WHOLE
    };
    let queue_parts = [1, 3, 64][random.below(3) as usize];
    let mut group = group(WorldConfig { parts, queue_parts, ..WorldConfig::new(RANKS, seed) });
    let source: Vec<u8> = (0..LENGTH).map(|_| random.below(256) as u8).collect();
    group.regions[0].memory().copy_in(0, &source);
    let planned = plan(&mut random);
    let mut expected = BTreeSet::new();
    let mut requests = Requests::default();
    for (first, writes) in (1..).step_by(100).zip(&planned) {
        group.add(&mut requests, writes, first, scatters);
        let tags = if scatters { writes.len().min(1) } else { writes.len() };
        expected.extend(first..first + tags as u64);
        // Also several scatters in one submit.
        if random.chance(0.7) {
            group.submit(&mut requests).unwrap();
        }
    }
    group.submit(&mut requests).unwrap();
    let mut tags = Vec::new();
    let step = |engine: &mut Engine, _, events: &[Event], _: &mut Requests| {
        if engine.rank() == Rank(0) {
            tags.extend(events.iter().filter_map(|event| match event {
                Event::Completed { tag } => Some(*tag),
                _ => None,
            }));
        }
        Ok::<_, Error>(engine.rank() != Rank(0) || tags.len() == expected.len())
    };
    group.cluster.run(step).unwrap();
    group.cluster.settle().unwrap();
    tags.sort_unstable();
    assert_eq!(tags, expected.into_iter().collect::<Vec<_>>(), "each request completes once");
    let engine = group.cluster.engine(Rank(0));
    assert_eq!(engine.statistics().requests, 0);
    let parts = engine.statistics().peers.iter().map(|peer| peer.totals.parts).collect();
    let mut counts = Vec::new();
    for rank in (1..RANKS).map(Rank) {
        let (counter, engine) = (group.counter, group.cluster.engine(rank));
        counts.extend((0..WINDOW).map(|round| engine.count_in(counter, Rank(0), round).unwrap()));
    }
    Left { bytes: (1..RANKS).map(|rank| group.bytes(rank)).collect(), counts, parts }
}

#[test]
fn a_scatter_leaves_what_single_writes_leave() {
    seeds::each("a_scatter_leaves_what_single_writes_leave", 300, |seed| {
        assert_eq!(run(seed, true), run(seed, false));
        Ok(())
    });
}

#[test]
fn a_scatter_that_is_refused_has_entered_no_round() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let before = group.cluster.engine(Rank(0)).statistics();
    let right = group.sized(8, 1, 0);
    let refused = |group: &mut Group, wrong: Planned| {
        let mut requests = Requests::default();
        group.add(&mut requests, &[right, wrong, right], 1, true);
        let error = group.submit(&mut requests).unwrap_err();
        assert!(requests.is_empty());
        error
    };
    let error = refused(&mut group, Planned { to: 1, length: LENGTH, ..right });
    assert!(matches!(error, Error::OutOfRange { side: "remote", .. }), "{error}");
    let error = refused(&mut group, Planned { from: u64::MAX, ..right });
    assert!(matches!(error, Error::OutOfRange { side: "local", .. }), "{error}");
    let error = refused(&mut group, Planned { peer: Rank(2), round: WINDOW, ..right });
    assert!(matches!(error, Error::NoCredit { peer: Rank(2), round: WINDOW, .. }), "{error}");
    for peer in [Rank(0), Rank(RANKS)] {
        group.remotes.resize(RANKS as usize + 1, group.remotes[1]);
        let error = refused(&mut group, Planned { peer, ..right });
        assert!(matches!(error, Error::Unknown { what: "rank", .. }), "{error}");
    }
    let RemoteRegion { peer, key, .. } = group.remotes[3].unwrap();
    group.cluster.engine(Rank(0)).remove_remote(peer, key);
    let error = refused(&mut group, Planned { peer, ..right });
    assert!(matches!(error, Error::Unknown { what: "remote region", .. }), "{error}");
    assert_eq!(group.cluster.engine(Rank(0)).statistics(), before);
    let source = group.regions[0].clone();
    group.cluster.engine(Rank(0)).release(&source);
    let error = refused(&mut group, right);
    assert!(matches!(error, Error::Unknown { what: "region", .. }), "{error}");
    let counter = group.counter;
    let engine = group.cluster.engine(Rank(0));
    assert_eq!(engine.next_round(counter, Rank(1)).unwrap(), 0);
}

#[test]
fn a_cut_link_is_named_and_its_scatter_has_no_completion() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    group.cluster.world().cut(Rank(0), Rank(3));
    let writes = [1, 2, 3, 4].map(|peer| group.sized(8, peer, 0));
    let mut requests = Requests::default();
    group.add(&mut requests, &writes, 1, true);
    group.submit(&mut requests).unwrap();
    let mut completed = 0;
    let step = |_: &mut Engine, _, events: &[Event], _: &mut Requests| {
        completed += events.iter().filter(|it| matches!(it, Event::Completed { .. })).count();
        Ok::<_, Error>(false)
    };
    let _ = group.cluster.run(step);
    let poison = group.cluster.engine(Rank(0)).check().unwrap_err();
    let Error::Poisoned(poison) = poison else { panic!("{poison}") };
    assert_eq!((poison.kind, poison.rank, completed), (Cause::Failed, Some(Rank(3)), 0));
}
