//! Scatters over peer groups: same bytes and counts as plain scatters, and rejections.

use weft_control::Cause;
use weft_fabric::providers::sim::{Cluster, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{CounterId, Error, MemberWrite, PartRule, PeerGroup, Rank, Region, RemoteRegion};
use weft_scenarios::seeds;

const LENGTH: u64 = 512;
const RANKS: u32 = 5;

/// Rank 0 with a peer group that holds all others.
struct Group {
    cluster: Cluster,
    counter: CounterId,
    regions: Vec<Region>,
    remotes: Vec<RemoteRegion>,
    peers: PeerGroup,
}

fn group(config: WorldConfig) -> Group {
    let mut cluster = Cluster::new(&World::new(config)).unwrap();
    let counter = cluster.counter().unwrap();
    let regions: Vec<Region> =
        cluster.ranks().map(|rank| cluster.engine(rank).alloc(LENGTH as usize).unwrap()).collect();
    let granted = |owner: Rank, _| vec![(regions[owner.0 as usize].clone(), 0..LENGTH)];
    let shared = cluster.share(granted, &[counter]).unwrap();
    let remotes: Vec<RemoteRegion> = shared[0].iter().flatten().copied().collect();
    let peers = cluster.engine(Rank(0)).peer_group(counter, &regions[0], &remotes).unwrap();
    Group { cluster, counter, regions, remotes, peers }
}

fn write(member: u32, length: u64) -> MemberWrite {
    MemberWrite { member, length, ..MemberWrite::default() }
}

impl Group {
    fn scatter(&mut self, round: u64, writes: &[MemberWrite]) -> Result<(), Error> {
        let engine = self.cluster.engine(Rank(0));
        engine.scatter_group(&mut self.peers, round, writes, None).map(|_| ())
    }

    fn bytes(&self, rank: u32) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        self.regions[rank as usize].memory().copy_out(0, &mut bytes);
        bytes
    }
}

/// Random writes behind each member's earlier ones, up to `at`.
fn random_writes(random: &mut SplitMix64, at: &mut [u64]) -> Vec<MemberWrite> {
    let mut writes = Vec::new();
    for _ in 0..random.below(20) {
        let member = random.below(u64::from(RANKS) - 1) as u32;
        let place = &mut at[member as usize];
        let length = random.below(LENGTH - *place + 1).min(random.below(100));
        let source_offset = random.below(LENGTH - length + 1);
        writes.push(MemberWrite { member, source_offset, destination_offset: *place, length });
        *place += length;
    }
    random.shuffle(&mut writes);
    writes
}

#[test]
fn random_scatters_arrive_whole() {
    seeds::each("random_scatters_arrive_whole", 300, |seed| {
        let mut random = SplitMix64::new(seed);
        let parts = PartRule {
            max_part_bytes: [16, 64, u64::MAX][random.below(3) as usize],
            max_pages_per_part: 1 + random.below(3) as u32,
            ..PartRule::WHOLE
        };
        let queue_parts = [1, 3, 64][random.below(3) as usize];
        let mut group = group(WorldConfig { parts, queue_parts, ..WorldConfig::new(RANKS, seed) });
        let source: Vec<u8> = (0..LENGTH).map(|_| random.below(256) as u8).collect();
        group.regions[0].memory().copy_in(0, &source);
        let mut expected = vec![vec![0; LENGTH as usize]; RANKS as usize];
        let mut parts_of = [0; RANKS as usize];
        // Several scatters in one round, also while parts from earlier ones wait.
        let mut at = [0; RANKS as usize - 1];
        for _ in 0..1 + random.below(3) {
            let writes = random_writes(&mut random, &mut at);
            for write in &writes {
                let peer = write.member as usize + 1;
                let (from, to) = (write.source_offset as usize, write.destination_offset as usize);
                let length = write.length as usize;
                expected[peer][to..to + length].copy_from_slice(&source[from..from + length]);
                parts_of[peer] += parts.count([write.length]);
            }
            group.scatter(0, &writes).unwrap();
        }
        group.cluster.settle().unwrap();
        for rank in 1..RANKS {
            let counted = group.cluster.engine(Rank(rank)).count(group.counter, Rank(0)).unwrap();
            assert_eq!(counted, parts_of[rank as usize], "parts to rank {rank}");
            assert_eq!(group.bytes(rank), expected[rank as usize], "bytes of rank {rank}");
        }
        let statistics = group.cluster.engine(Rank(0)).statistics();
        assert_eq!(statistics.requests, 0);
        for peer in &statistics.peers {
            assert_eq!(peer.totals.parts, parts_of[peer.rank.0 as usize]);
        }
        Ok(())
    });
}

#[test]
fn a_scatter_that_is_refused_has_entered_no_round() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let before = group.cluster.engine(Rank(0)).statistics();
    let beyond = MemberWrite { destination_offset: 1, ..write(2, LENGTH) };
    let error = group.scatter(0, &[write(0, 8), beyond]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { side: "remote", .. }), "{error}");
    let beyond = MemberWrite { source_offset: u64::MAX, ..write(2, 8) };
    let error = group.scatter(0, &[write(0, 8), beyond]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { side: "local", .. }), "{error}");
    let error = group.scatter(0, &[write(0, 8), write(RANKS - 1, 8)]).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "member of the peer group", .. }), "{error}");
    let error = group.scatter(1, &[write(0, 8)]).unwrap_err();
    assert!(matches!(error, Error::NoCredit { peer: Rank(1), round: 1, .. }), "{error}");
    let engine = group.cluster.engine(Rank(0));
    assert_eq!(engine.statistics(), before);
    assert_eq!(engine.next_round(group.counter, Rank(1)).unwrap(), 0);
}

#[test]
fn a_round_that_was_credited_is_over_for_every_member() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    group.scatter(0, &[write(0, 8), write(1, 8)]).unwrap();
    group.cluster.settle().unwrap();
    let counter = group.counter;
    group.cluster.engine(Rank(2)).credit(Rank(0), counter).unwrap();
    group.cluster.settle().unwrap();
    let error = group.scatter(0, &[write(0, 8), write(1, 8)]).unwrap_err();
    assert!(matches!(error, Error::OldRound { peer: Rank(2), round: 0, .. }), "{error}");
    group.scatter(0, &[write(0, 8)]).unwrap();
    group.scatter(1, &[write(1, 8)]).unwrap();
}

#[test]
fn a_group_outlives_the_release_of_regions_of_others() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let engine = group.cluster.engine(Rank(0));
    let other = engine.alloc(64).unwrap();
    engine.release(&other);
    group.scatter(0, &[write(3, LENGTH)]).unwrap();
    group.cluster.settle().unwrap();
    assert_eq!(group.cluster.engine(Rank(4)).count(group.counter, Rank(0)).unwrap(), 1);
}

#[test]
fn a_group_whose_source_was_released_is_refused_also_if_the_key_was_reused() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let engine = group.cluster.engine(Rank(0));
    engine.release(&group.regions[0]);
    let next = engine.alloc(LENGTH as usize).unwrap();
    assert_eq!(next.key(), group.regions[0].key());
    let error = group.scatter(0, &[write(0, 8)]).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "region", .. }), "{error}");
}

#[test]
fn a_group_with_a_removed_region_is_refused() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let RemoteRegion { peer, key, .. } = group.remotes[1];
    group.cluster.engine(Rank(0)).remove_remote(peer, key);
    let error = group.scatter(0, &[write(0, 8)]).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "remote region", .. }), "{error}");
}

#[test]
fn a_group_whose_counter_was_released_is_refused() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    group.cluster.engine(Rank(0)).release_counter(group.counter).unwrap();
    let error = group.scatter(0, &[write(0, 8)]).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "counter", .. }), "{error}");
}

#[test]
fn a_group_of_another_engine_is_refused() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let engine = group.cluster.engine(Rank(1));
    let error = engine.scatter_group(&mut group.peers, 0, &[write(1, 8)], None).unwrap_err();
    assert!(matches!(error, Error::Unknown { what: "peer group", .. }), "{error}");
}

#[test]
fn a_group_of_a_counter_that_was_not_shared_is_refused() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    let engine = group.cluster.engine(Rank(0));
    let counter = engine.counter().unwrap();
    let error = engine.peer_group(counter, &group.regions[0], &group.remotes).unwrap_err();
    assert!(matches!(error, Error::NotLinked { .. }), "{error}");
}

#[test]
fn a_cut_link_is_named_and_the_callback_runs_once() {
    let mut group = group(WorldConfig::new(RANKS, 0));
    group.cluster.world().cut(Rank(0), Rank(3));
    let (sender, outcomes) = std::sync::mpsc::channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    let writes = [0, 1, 2, 3].map(|member| write(member, 8));
    let engine = group.cluster.engine(Rank(0));
    engine.scatter_group(&mut group.peers, 0, &writes, Some(done)).unwrap();
    let _ = group.cluster.settle();
    let poison = group.cluster.engine(Rank(0)).check().unwrap_err();
    let Error::Poisoned(poison) = poison else { panic!("{poison}") };
    assert_eq!((poison.kind, poison.rank), (Cause::Failed, Some(Rank(3))));
    assert_eq!(outcomes.iter().collect::<Vec<_>>(), [Err("the link is cut".to_owned())]);
}
