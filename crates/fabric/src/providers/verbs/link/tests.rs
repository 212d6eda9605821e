//! Scatters over simulated NICs: the parts have the same outcomes as when posted one by one.

use super::super::config::VerbsConfig;
use super::super::device::VerbsDevice;
use super::super::{TwinConfig, TwinNic};
use super::VerbsLink;
use crate::clock;
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Link, Membership, Scatter, ScatterPart, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::providers::scatter_posts::{self, Outcome};
use crate::types::{Generation, Lane, LaneId, Page, RegionKey, TrafficClass};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Peers that rank 0 has.
const PEERS: u32 = 2;
/// Bytes in a region, and in the grant for it.
const BYTES: u64 = 2048;
const GRANTED: std::ops::Range<u64> = 64..2000;
/// Work requests toward a peer on each NIC, and unconsumed arrivals from it.
const REQUESTS: u32 = 5;
const UNCONSUMED: u32 = 14;

/// Step in a run.
#[derive(Clone, Debug)]
enum Step {
    Scatter {
        parts: Vec<(u32, Page)>,
        class: TrafficClass,
    },
    /// Overwrites the sources.
    Fill(u8),
    /// Holds writes from rank 0 back, or sends them on.
    Pause(bool),
    /// Refuses the post after some others.
    Refuse(u64),
    /// Polls rank 0, and the peers.
    Poll(bool),
    Fence(u32),
}

/// Rank 0 with regions 0 and 1, each granted to it by the peers in part.
struct World {
    links: Vec<VerbsLink>,
    nics: Vec<Arc<TwinNic>>,
    memories: Vec<[Arc<Memory>; 2]>,
    tables: Vec<Arc<LaneTable>>,
    /// Lanes that rank 0 raises, by rank; rank 0's entry is unused.
    raised: Vec<Lane>,
    sinks: Vec<Sink>,
    scatters: u64,
}

impl World {
    /// Connected ranks with this many NICs each.
    fn new(nics: usize) -> World {
        let config = VerbsConfig {
            queue_requests: REQUESTS,
            max_unconsumed: UNCONSUMED,
            ..VerbsConfig::default()
        };
        let size = 1 + PEERS;
        let mut world = World {
            links: Vec::new(),
            nics: Vec::new(),
            memories: Vec::new(),
            tables: Vec::new(),
            raised: Vec::new(),
            sinks: Vec::new(),
            scatters: 0,
        };
        for rank in 0..size {
            let twins: Vec<_> = (0..nics).map(|_| TwinNic::new(TwinConfig::default())).collect();
            let device = VerbsDevice::over(config.clone(), &twins).unwrap();
            let generation = Generation(0);
            let lanes = Arc::new(LaneTable::new(64, generation).unwrap());
            let group = Membership { rank: Rank(rank), size, generation, lanes: lanes.clone() };
            let mut link =
                VerbsLink::open(device.library, &device.config, &device.nics, &device.gpus, group)
                    .unwrap();
            let memories = [0, 1].map(|key| {
                let memory = Arc::new(Memory::shared(BYTES as usize).unwrap());
                link.register(RegionKey(key), &memory).unwrap();
                memory
            });
            world.raised.push(lanes.issue(Rank(0), 2).unwrap());
            world.links.push(link);
            world.nics.extend(twins);
            world.memories.push(memories);
            world.tables.push(lanes);
            world.sinks.push(Sink::default());
        }
        world.connect();
        world
    }

    fn connect(&mut self) {
        let addresses: Vec<Vec<u8>> = self.links.iter().map(Link::address).collect();
        let (first, others) = self.links.split_first_mut().unwrap();
        let to_peers: Vec<Vec<u8>> = (1..=PEERS)
            .map(|peer| first.introduce(Rank(peer), &addresses[peer as usize]).unwrap())
            .collect();
        let to_first: Vec<Vec<u8>> =
            others.iter_mut().map(|link| link.introduce(Rank(0), &addresses[0]).unwrap()).collect();
        let connect = |link: &mut VerbsLink, peers: &[Introduction<'_>]| {
            let deadline = clock::now().after(Duration::from_secs(20));
            link.connect(peers, &mut WaitLimit { deadline, give_up: &mut || Ok(()) }).unwrap();
        };
        std::thread::scope(|scope| {
            for (link, message) in others.iter_mut().zip(&to_peers) {
                let address = &addresses[0];
                scope.spawn(move || {
                    connect(link, &[Introduction { peer: Rank(0), address, message }]);
                });
            }
            let mut peers = Vec::new();
            for (peer, message) in (1..).zip(&to_first) {
                let address = &addresses[peer as usize];
                peers.push(Introduction { peer: Rank(peer), address, message });
            }
            connect(first, &peers);
        });
        for (peer, link) in (1..).zip(others) {
            for key in [0, 1].map(RegionKey) {
                let entry = link.grant(key, Rank(0), GRANTED).unwrap();
                let mut limit = WaitLimit { deadline: clock::now(), give_up: &mut || Ok(()) };
                first.import(Rank(peer), key, BYTES, &entry, &mut limit).unwrap();
            }
        }
    }

    /// Posts a scatter's parts: by one call as far as it goes, or all one by one. The parts behind one
    /// that was not accepted follow one by one, as the engine posts them.
    fn scatter(
        &mut self,
        parts: &[(u32, Page)],
        class: TrafficClass,
        is_one_call: bool,
    ) -> Vec<Outcome> {
        self.scatters += 1;
        let part = |&(peer, page): &(u32, Page)| {
            let lane = self.raised[peer as usize];
            ScatterPart { peer: Rank(peer), lane, page, ..ScatterPart::EMPTY }
        };
        let parts: Vec<ScatterPart> = parts.iter().map(part).collect();
        let token = self.scatters << 24;
        let scatter = Scatter { token, class, parts: &parts };
        let (link, sink) = (&mut self.links[0], &mut self.sinks[0]);
        scatter_posts::post(link, sink, &scatter, is_one_call)
    }

    fn poll(&mut self, ranks: std::ops::Range<usize>) {
        for rank in ranks {
            for _ in 0..4 {
                self.links[rank].poll(clock::now(), &mut self.sinks[rank]);
            }
        }
    }

    /// Runs a step; returns the outcomes of posts in it, and all events at rank 0.
    fn run(&mut self, step: &Step, is_one_call: bool) -> String {
        let mut outcomes = Vec::new();
        match *step {
            Step::Scatter { ref parts, class } => {
                outcomes = self.scatter(parts, class, is_one_call);
            }
            Step::Fill(value) => {
                self.memories[0].iter().for_each(|it| it.fill(0, BYTES as usize, value));
            }
            Step::Pause(is_paused) => self.own_nics().for_each(|nic| nic.pause(is_paused)),
            Step::Refuse(posts) => {
                self.own_nics().for_each(|nic| nic.refuse_after(posts, libc::ENOMEM));
            }
            Step::Poll(false) => self.poll(0..1),
            Step::Poll(true) => self.poll(0..1 + PEERS as usize),
            Step::Fence(peer) => self.links[0].fence(Rank(peer), &mut self.sinks[0]),
        }
        let Sink { completed, failures, lost, .. } = &mut self.sinks[0];
        // A NIC that goes on after a pause serves queue pairs in any order.
        completed.sort();
        let mut text = format!("{outcomes:?} {completed:?} {failures:?} {lost:?}");
        for (index, nic) in self.own_nics().enumerate() {
            text = text.replace(&nic.name(), &format!("nic {index}"));
        }
        text
    }

    fn own_nics(&self) -> impl Iterator<Item = &Arc<TwinNic>> {
        self.nics[..self.nics.len() / (1 + PEERS as usize)].iter()
    }

    /// Raised lane values, and the peers' memory.
    fn arrived(&self) -> Vec<(u64, [Vec<u8>; 2])> {
        let at = |rank: usize| {
            let bytes = self.memories[rank].each_ref().map(|memory| {
                let mut bytes = vec![0; BYTES as usize];
                memory.copy_out(0, &mut bytes);
                bytes
            });
            (self.tables[rank].value(self.raised[rank].id()), bytes)
        };
        (1..=PEERS as usize).map(at).collect()
    }
}

impl Drop for World {
    /// Ends all connections: none waits until a farewell is delivered.
    fn drop(&mut self) {
        let (links, sink) = (&mut self.links, &mut Sink::default());
        for peer in 1..=PEERS {
            links[0].fence(Rank(peer), sink);
            links[peer as usize].fence(Rank(0), sink);
        }
    }
}

/// Mostly within the regions, with a length up to and beyond what is copied into a work request.
fn page() -> impl Strategy<Value = Page> {
    let key = || prop_oneof![20 => Just(0), 10 => Just(1), 1 => Just(7)].prop_map(RegionKey);
    let length = prop_oneof![Just(0), Just(8), Just(64), Just(65), Just(700)];
    let offset = || prop_oneof![20 => 64..1300_u64, 1 => 0..2100_u64, 1 => Just(u64::MAX - 20)];
    (key(), offset(), key(), offset(), length).prop_map(
        |(source, source_offset, destination, destination_offset, length)| Page {
            source,
            source_offset,
            destination,
            destination_offset,
            length,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let peer = || prop_oneof![30 => 1..=PEERS, 1 => Just(0)];
    let class = prop_oneof![Just(TrafficClass::Latency), Just(TrafficClass::Bulk)];
    let parts = prop::collection::vec((peer(), page()), 0..12);
    prop_oneof![
        12 => (parts, class).prop_map(|(parts, class)| Step::Scatter { parts, class }),
        3 => any::<u8>().prop_map(Step::Fill),
        3 => any::<bool>().prop_map(Step::Pause),
        4 => any::<bool>().prop_map(Step::Poll),
        1 => (0..9_u64).prop_map(Step::Refuse),
        1 => peer().prop_map(Step::Fence),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_scatter_has_the_outcomes_of_its_parts_posted_one_by_one(
        nics in 1_usize..3,
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let (mut scattered, mut separate) = (World::new(nics), World::new(nics));
        let ends = [Step::Pause(false), Step::Poll(true), Step::Fence(1), Step::Fence(2)];
        for step in steps.iter().chain(&ends) {
            prop_assert_eq!(scattered.run(step, true), separate.run(step, false), "{:?}", step);
        }
        prop_assert_eq!(scattered.arrived(), separate.arrived());
    }
}

/// The queue toward peer 1 is full, that toward peer 2 has room for one part.
#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_scatter_stops_at_the_first_full_queue_and_loses_no_part() {
    let mut world = World::new(1);
    world.nics[0].pause(true);
    let (source, destination) = (RegionKey(0), RegionKey(1));
    let page = |length| Page {
        source,
        source_offset: 0,
        destination,
        destination_offset: GRANTED.start,
        length,
    };
    let to_one = vec![(1, page(100)); REQUESTS as usize];
    let class = TrafficClass::Latency;
    assert_eq!(world.scatter(&to_one, class, true), [(5, 5, None)]);
    let parts = [(2, page(100)), (1, page(0)), (2, page(8))];
    assert_eq!(world.scatter(&parts, class, true), [(1, 1, None), (1, 1, None)]);
    world.nics[0].pause(false);
    world.poll(0..3);
    let counts: Vec<u64> = world.arrived().into_iter().map(|(count, _)| count).collect();
    assert_eq!(counts, [5, 2]);
    assert_eq!(world.sinks[0].completed.len(), 7);
    assert_eq!(world.scatter(&parts, class, true), [(3, 3, None)]);
}

#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_credit_rides_on_a_write_whose_lane_a_scatter_has_named() {
    let mut world = World::new(1);
    let lane = world.raised[1];
    let credit = Lane::new(LaneId::new(lane.id().get() + 1).unwrap(), lane.generation());
    let (source, destination) = (RegionKey(0), RegionKey(1));
    let page = Page {
        source,
        source_offset: 0,
        destination,
        destination_offset: GRANTED.start,
        length: 100,
    };
    let (peer, class) = (Rank(1), TrafficClass::Latency);
    let signal = WorkRequest {
        token: 1,
        peer,
        lane: credit,
        credits: None,
        piggyback: None,
        class,
        pages: &[],
    };
    let write = WorkRequest { token: 2, lane, piggyback: Some(credit), pages: &[page], ..signal };
    world.links[0].post(&signal, &mut world.sinks[0]).unwrap();
    world.scatter(&[(1, page)], class, true);
    let before = world.nics[0].statistics().requests;
    world.links[0].post(&write, &mut world.sinks[0]).unwrap();
    assert_eq!(world.nics[0].statistics().requests - before, 1);
    world.poll(0..2);
    assert_eq!([lane, credit].map(|it| world.tables[1].value(it.id())), [2, 2]);
}

/// A rank's live registrations, in a world with one NIC for each rank.
fn registered(world: &World, rank: usize) -> (usize, u64) {
    world.nics[rank].statistics().registered
}

#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_region_granted_before_it_is_a_source_is_registered_once() {
    let mut world = World::new(1);
    // Rank 0's regions are sources only; the peers' are granted.
    for rank in 0..=PEERS as usize {
        assert_eq!(registered(&world, rank), (2, 2 * BYTES));
    }
    world.links[0].deregister(RegionKey(1));
    assert_eq!(registered(&world, 0), (1, BYTES));
    world.links[1].deregister(RegionKey(0));
    assert_eq!(registered(&world, 1), (1, BYTES));
}

/// A page from the first region to the start of what the peer grants.
fn granted_page() -> Page {
    Page {
        source: RegionKey(0),
        source_offset: 8,
        destination: RegionKey(1),
        destination_offset: GRANTED.start,
        length: 700,
    }
}

#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_granted_region_is_also_a_source() {
    let mut world = World::new(1);
    world.links[0].grant(RegionKey(0), Rank(1), GRANTED).unwrap();
    assert_eq!(registered(&world, 0), (2, 2 * BYTES));
    let page = granted_page();
    world.memories[0][0].fill(8, 700, 9);
    assert_eq!(world.scatter(&[(1, page)], TrafficClass::Latency, true), [(1, 1, None)]);
    world.poll(0..2);
    assert_eq!(world.sinks[0].completed.len(), 1);
    let (count, [_, bytes]) = &world.arrived()[0];
    assert_eq!((*count, &bytes[64..764]), (1, &[9; 700][..]));
}

#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_grant_leaves_the_source_registrations_that_parts_in_flight_name() {
    let mut world = World::new(1);
    world.nics[0].pause(true);
    let page = granted_page();
    assert_eq!(world.scatter(&[(1, page)], TrafficClass::Latency, true), [(1, 1, None)]);
    world.links[0].grant(RegionKey(0), Rank(1), GRANTED).unwrap();
    assert_eq!(registered(&world, 0), (3, 3 * BYTES));
    world.nics[0].pause(false);
    world.poll(0..2);
    assert_eq!((world.sinks[0].completed.len(), world.sinks[0].lost.len()), (1, 0));
    assert_eq!(world.arrived()[0].0, 1);
}

/// A pair's link over a NIC, and the entry by which it grants a memory as region 0.
fn pair_with(nic: &Arc<TwinNic>, memory: &Arc<Memory>) -> (VerbsLink, Vec<u8>) {
    let device = VerbsDevice::over(VerbsConfig::default(), std::slice::from_ref(nic)).unwrap();
    let generation = Generation(0);
    let lanes = Arc::new(LaneTable::new(64, generation).unwrap());
    let group = Membership { rank: Rank(1), size: 2, generation, lanes };
    let VerbsDevice { library, config, nics, gpus, .. } = &device;
    let mut link = VerbsLink::open(library, config, nics, gpus, group).unwrap();
    link.register(RegionKey(0), memory).unwrap();
    let entry = link.grant(RegionKey(0), Rank(0), GRANTED).unwrap();
    (link, entry)
}

/// Writes with the key by which another group in the peer's process grants the same memory.
#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn a_key_is_void_on_the_connections_of_other_groups() {
    let mut world = World::new(1);
    let memory = world.memories[1][0].clone();
    let (_pair, entry) = pair_with(&world.nics[1], &memory);
    let mut limit = WaitLimit { deadline: clock::now(), give_up: &mut || Ok(()) };
    world.links[0].import(Rank(1), RegionKey(0), BYTES, &entry, &mut limit).unwrap();
    world.memories[0][0].fill(0, BYTES as usize, 9);
    let page = Page {
        source: RegionKey(0),
        source_offset: 0,
        destination: RegionKey(0),
        destination_offset: GRANTED.start,
        length: 700,
    };
    assert_eq!(world.scatter(&[(1, page)], TrafficClass::Latency, true), [(1, 1, None)]);
    world.poll(0..2);
    let lost = &world.sinks[0].lost;
    assert!(lost.len() == 1 && lost[0].1.contains("remote access error"), "{lost:?}");
    let (count, [bytes, _]) = &world.arrived()[0];
    assert_eq!((*count, bytes), (0, &vec![0; BYTES as usize]));
}

/// 64 pairs in one process share a NIC and an allocation.
#[test]
#[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
fn each_pair_registers_an_allocation_once_under_a_key_of_its_own() {
    const PAIRS: usize = 64;
    let nic = TwinNic::new(TwinConfig::default());
    let memory = Arc::new(Memory::shared(BYTES as usize).unwrap());
    let pairs: Vec<_> = (0..PAIRS).map(|_| pair_with(&nic, &memory)).collect();
    let entries: BTreeSet<&Vec<u8>> = pairs.iter().map(|(_, entry)| entry).collect();
    assert_eq!(nic.statistics().registered, (PAIRS, PAIRS as u64 * BYTES));
    assert_eq!(entries.len(), PAIRS, "pairs have a key in common");
    drop(pairs);
    assert_eq!(nic.statistics().registered, (0, 0));
}
