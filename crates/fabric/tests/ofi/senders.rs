//! Senders: arrivals on another peer's lane, where the provider names senders.

use crate::common::{self, AllGather, on_processes, process_gather, soon, until};
use crate::{chosen, config, device, providers};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weft_fabric::link::{Introduction, Membership, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::{OfiConfig, OfiProvider, ofi};
use weft_fabric::{Generation, Lane, LaneTable, Link, Rank, TrafficClass, clock};

const RANKS: u32 = 3;
const OWNER: Rank = Rank(0);
const FORGER: Rank = Rank(2);
/// Signals from each writer on the writer's lane.
const SIGNALS: u64 = 50;

/// Connected link in a three-rank group, without an engine.
struct End {
    link: Box<dyn Link>,
    lanes: Arc<LaneTable>,
    sink: Sink,
}

impl End {
    fn connect(rank: Rank, config: OfiConfig, gather: &mut AllGather<'_>) -> End {
        let generation = Generation(0);
        let lanes = Arc::new(LaneTable::new(64, generation).unwrap());
        let group = Membership { rank, size: RANKS, generation, lanes: lanes.clone() };
        let mut link = device(config).open(group).unwrap();
        let addresses = gather(link.address());
        let others: Vec<Rank> = (0..RANKS).map(Rank).filter(|peer| *peer != rank).collect();
        let mut received = vec![Vec::new(); RANKS as usize];
        for to in (0..RANKS).map(Rank) {
            let is_other = to != rank;
            let mine = is_other.then(|| link.introduce(to, &addresses[to.index()]).unwrap());
            let all = gather(mine.unwrap_or_default());
            if !is_other {
                received = all;
            }
        }
        let introduction = |&peer: &Rank| Introduction {
            peer,
            address: &addresses[peer.index()],
            message: &received[peer.index()],
        };
        let peers: Vec<Introduction<'_>> = others.iter().map(introduction).collect();
        until(soon(20), |limit| link.connect(&peers, limit)).unwrap();
        End { link, lanes, sink: Sink::default() }
    }

    /// Raises an owner's lane `count` times and waits until all signals have left.
    fn signal(&mut self, lane: Lane, count: u64) {
        let mut under_way = 0;
        for token in 0..count {
            let (peer, class) = (OWNER, TrafficClass::Latency);
            let work = WorkRequest {
                token,
                peer,
                lane,
                credits: None,
                piggyback: None,
                class,
                pages: &[],
            };
            loop {
                match self.link.post(&work, &mut self.sink).unwrap() {
                    PostStatus::Done => break,
                    PostStatus::InFlight => {
                        under_way += 1;
                        break;
                    }
                    PostStatus::Full => self.link.poll(clock::now(), &mut self.sink),
                }
            }
        }
        let deadline = soon(20);
        while self.sink.completed.len() < under_way {
            assert!(clock::now() < deadline, "{} signals have left", self.sink.completed.len());
            self.link.poll(clock::now(), &mut self.sink);
        }
        self.sink.completed.clear();
    }

    /// Polls until `count` signals have arrived on these lanes or were dropped; returns how many were
    /// dropped.
    fn receive(&mut self, lanes: [Lane; 2], count: u64) -> u64 {
        let deadline = soon(20);
        loop {
            self.link.poll(clock::now(), &mut self.sink);
            let dropped = self.lanes.dropped().ungranted.load(Ordering::Relaxed);
            let raised: u64 = lanes.iter().map(|lane| self.lanes.value(lane.id())).sum();
            if raised + dropped == count {
                return dropped;
            }
            assert!(clock::now() < deadline, "{raised} raises, {dropped} dropped, of {count}");
        }
    }
}

/// Both writers raise their own lanes, and the forger also the other's. Returns how many arrivals the
/// owner dropped.
fn forge(rank: Rank, config: OfiConfig, gather: &mut AllGather<'_>) -> Option<u64> {
    let mut end = End::connect(rank, config, gather);
    let lanes = [1, 2].map(|peer| end.lanes.issue(Rank(peer), 2).unwrap());
    let issued = gather(lanes.iter().flat_map(|lane| lane.immediate().to_le_bytes()).collect());
    let granted: Vec<Lane> = issued[OWNER.index()]
        .chunks(4)
        .map(|lane| Lane::from_immediate(u32::from_le_bytes(lane.try_into().unwrap())))
        .collect();
    let dropped = if rank == OWNER {
        let dropped = end.receive(lanes, 2 * SIGNALS + 1);
        let raised = lanes.map(|lane| end.lanes.value(lane.id()));
        assert_eq!(raised, [SIGNALS + 1 - dropped, SIGNALS], "lanes of the two writers");
        Some(dropped)
    } else {
        end.signal(granted[rank.index() - 1], SIGNALS);
        if rank == FORGER {
            end.signal(granted[0], 1);
        }
        None
    };
    gather(Vec::new());
    drop(end);
    gather(Vec::new());
    dropped
}

/// Libfabric's shm and tcp name senders (tcp has such endpoints in 2.x). ofi_rxm does not: there an
/// arrival counts as the lane holder's.
#[test]
fn a_lane_that_was_granted_to_another_peer_is_not_raised_where_senders_are_named() {
    let name =
        "senders::a_lane_that_was_granted_to_another_peer_is_not_raised_where_senders_are_named";
    let Some(rank) = common::process_rank() else {
        if !providers().is_empty() {
            let ended = on_processes(name, RANKS);
            assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        }
        return;
    };
    let is_offered =
        |provider: &&str| ofi::offers(&OfiProvider::new(*provider), config(provider).bind).is_ok();
    let mut tested = vec!["tcp;ofi_rxm", "tcp", "shm"];
    if let Some(provider) = chosen() {
        tested = vec![provider];
    }
    for provider in tested.into_iter().filter(is_offered) {
        for checks_senders in [false, true] {
            let config = OfiConfig { checks_senders, ..config(provider) };
            let Some(dropped) = forge(rank, config, &mut process_gather) else { continue };
            let names_senders = !provider.ends_with(";ofi_rxm");
            let expected = u64::from(checks_senders && names_senders);
            assert_eq!(dropped, expected, "{provider}, checks_senders {checks_senders}");
        }
    }
}
