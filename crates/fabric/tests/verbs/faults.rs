//! Failing NICs, queue pairs, posts and writes, over simulated NICs.

use crate::links::{Links, devices, membership};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use weft_fabric::link::PostStatus;
use weft_fabric::providers::verbs::{TwinConfig, TwinEvent, TwinFault, TwinPort};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{Device, Error, ProviderKind, Rank, RegionKey};

fn config() -> VerbsConfig {
    VerbsConfig::default()
}

/// The only loss that a rank reported: the peer and the reason.
fn only_loss(links: &Links, rank: u32) -> (Rank, String) {
    let lost = &links.0[rank as usize].sink.lost;
    assert_eq!(lost.len(), 1, "{lost:?}");
    lost[0].clone()
}

#[test]
fn writes_arrive_byte_for_byte_and_raise_their_lanes_once() {
    let mut links = Links::connected(&config(), 3);
    assert_eq!(links.post(0, 1, 7, 4), PostStatus::InFlight);
    assert_eq!(links.post(2, 1, 8, 0), PostStatus::InFlight);
    links.settle();
    assert_eq!(links.0[0].sink.completed, [7]);
    assert_eq!((links.raised(1, 0), links.raised(1, 2), links.raised(0, 1)), (1, 1, 0));
    assert_eq!((links.byte(1, 0), links.byte(1, 3), links.byte(1, 4)), (1, 1, 2));
}

#[test]
fn the_first_error_of_a_chain_is_the_only_cause_and_names_status_code_and_queue_pair() {
    let mut links = Links::connected(&config(), 3);
    let nic = links.0[0].nic.clone();
    nic.pause(true);
    nic.fault_after(1, TwinFault::Fail { status: 4, vendor: 0x51 });
    links.post(0, 1, 1, 3);
    links.post(0, 1, 2, 8);
    links.post(0, 2, 3, 1);
    nic.pause(false);
    links.settle();
    let (peer, why) = only_loss(&links, 0);
    let pair = nic.pair_toward(&links.0[1].nic).unwrap();
    assert_eq!(peer, Rank(1));
    let expected = format!(
        "{}:1: an RDMA write of queue pair {pair}, in a part of 3 work requests, failed: \
         local protection error (vendor code 0x51)",
        nic.name()
    );
    assert_eq!(why, expected);
    // Parts toward it end with the fence; parts toward others are complete.
    assert_eq!(links.0[0].sink.completed, [3]);
    assert_eq!(links.fence(0, 1), [1, 2]);
    assert_eq!((links.raised(1, 0), links.raised(2, 0)), (0, 1));
}

#[test]
fn a_wrong_key_or_range_writes_nothing_and_costs_the_writer_its_connection() {
    for fault in [TwinFault::WrongKey, TwinFault::BeyondRange] {
        let mut links = Links::connected(&config(), 3);
        links.0[0].nic.fault_after(0, fault);
        links.post(0, 1, 1, 2);
        links.settle();
        let (peer, why) = only_loss(&links, 0);
        assert!(peer == Rank(1) && why.contains("failed: remote access error"), "{peer}: {why}");
        let (peer, why) = only_loss(&links, 1);
        assert!(peer == Rank(0) && why.contains("access violation"), "{peer}: {why}");
        assert_eq!((links.raised(1, 0), links.byte(1, 0), links.byte(1, 1)), (0, 2, 2));
        // The owner still serves the other peer.
        links.post(2, 1, 5, 1);
        links.settle();
        assert_eq!((links.raised(1, 2), links.byte(1, 0)), (1, 3));
    }
}

#[test]
fn the_key_of_a_released_region_is_void() {
    let mut links = Links::connected(&config(), 2);
    links.0[1].link.deregister(RegionKey(0));
    links.post(0, 1, 1, 1);
    links.settle();
    assert!(only_loss(&links, 0).1.contains("remote access error"));
    assert_eq!(links.byte(1, 0), 2);
}

#[test]
fn a_failed_device_loses_all_its_peers_and_an_event_of_a_queue_pair_its_own() {
    let mut links = Links::connected(&config(), 3);
    links.0[0].nic.raise(TwinEvent::PortDown(1));
    links.0[0].nic.raise(TwinEvent::PortUp(1));
    links.settle();
    assert!(links.0[0].sink.lost.is_empty());
    let pair = links.0[0].nic.pair_toward(&links.0[2].nic).unwrap();
    links.0[0].nic.raise(TwinEvent::PairFatal(pair));
    links.settle();
    let (peer, why) = only_loss(&links, 0);
    let expected = format!("{}:1: its queue pair failed: queue pair failed", links.0[0].nic.name());
    assert_eq!((peer, why), (Rank(2), expected));
    links.post(0, 1, 1, 1);
    links.settle();
    assert_eq!((links.0[0].sink.completed.clone(), links.raised(1, 0)), (vec![1], 1));

    links.0[1].nic.raise(TwinEvent::DeviceFatal);
    links.settle();
    let name = links.0[1].nic.name();
    let lost = std::mem::take(&mut links.0[1].sink.lost);
    let expected = [0, 2].map(|peer| (Rank(peer), format!("{name}:1: device failed")));
    assert_eq!(lost, expected);
}

#[test]
fn a_refused_post_loses_its_peer_and_its_part_ends_with_the_fence() {
    let mut links = Links::connected(&config(), 3);
    links.0[0].nic.refuse_after(1, libc::ENOMEM);
    links.post(0, 2, 1, 1);
    assert_eq!(links.post(0, 1, 2, 1), PostStatus::InFlight);
    let (peer, why) = only_loss(&links, 0);
    assert_eq!(peer, Rank(1));
    assert!(why.contains("ibv_post_send: Cannot allocate memory"), "{why}");
    links.settle();
    assert_eq!(links.0[0].sink.completed, [1]);
    assert_eq!(links.fence(0, 1), [2]);
}

#[test]
fn an_arrival_on_a_lane_granted_to_another_peer_is_dropped_and_counted() {
    let mut links = Links::connected(&config(), 3);
    let lane = links.0[0].granted[1];
    links.post_to(2, 0, 1, 1, lane, None);
    links.settle();
    assert_eq!((links.raised(0, 1), links.raised(0, 2)), (0, 0));
    assert_eq!(links.0[0].lanes.dropped().ungranted.load(Relaxed), 1);
    assert_eq!(links.0[2].sink.completed, [1]);
    links.post(1, 0, 2, 0);
    links.settle();
    assert_eq!(links.raised(0, 1), 1);
}

/// Rank 0 does not poll: both peers write to it until they may no longer, and rank 0's requests to both
/// are flushed at once, each with a completion.
#[test]
fn a_completion_queue_has_an_entry_for_all_that_its_peers_may_send() {
    const CONTROL: usize = 6;
    let config = VerbsConfig { queue_requests: 9, max_unconsumed: 10, ..config() };
    let mut links = Links::connected(&config, 3);
    let nic = links.0[0].nic.clone();
    let (capacity, before) = nic.statistics().queues[0];
    assert_eq!(capacity, 2 * (9 + CONTROL + 10 + CONTROL));
    assert!(before <= capacity);
    links.settle();
    nic.pause(true);
    for peer in [1, 2] {
        nic.fault_after(0, TwinFault::Fail { status: 4, vendor: 0 });
        let mut posted = 0;
        while links.post(0, peer, 1, 3) == PostStatus::InFlight {
            posted += 3;
        }
        assert_eq!(posted, 9);
        let mut sent = 0;
        while links.post(peer, 0, 1, 1) == PostStatus::InFlight {
            sent += 1;
            // This rank's own completions.
            let end = &mut links.0[peer as usize];
            end.link.poll(weft_fabric::clock::now(), &mut end.sink);
        }
        assert_eq!(sent, 10);
    }
    nic.pause(false);
    let statistics = nic.statistics();
    assert_eq!(statistics.queues, [(capacity, 2 * (9 + 10))]);
    assert_eq!(statistics.overflows, 0);
    links.settle();
    assert_eq!(links.0[0].sink.lost.len(), 2);
    assert_eq!((links.raised(0, 1), links.raised(0, 2)), (10, 10));
}

#[test]
fn queues_shrink_with_the_group_and_one_that_is_too_large_is_refused() {
    let nic = TwinConfig { max_cqe: 34 * 10, ..TwinConfig::default() };
    let found = devices(&config(), &nic, 1);
    let (nic, device) = &found[0];
    // 20 peers with 17 entries each: 6 control requests, 6 control arrivals, 1 part and 4 arrivals.
    let link = device.open(membership(Rank(0), 21)).map_err(|e| e.to_string()).unwrap();
    assert_eq!(nic.statistics().queues[0].0, 340);
    drop(link);
    let refused = device.open(membership(Rank(0), 22)).map(drop);
    let Err(Error::Provider { provider: ProviderKind::Verbs, detail }) = refused else {
        panic!("{refused:?}")
    };
    let expected = format!(
        "22 ranks: {}:1 has completion queues of 340 entries, too few for so large a group",
        nic.name()
    );
    assert_eq!(detail, expected);
}

/// A lost packet is repeated by the NIC after 2.4 hours here.
#[test]
fn a_greeting_to_a_peer_that_is_not_yet_connected_is_repeated() {
    let config = VerbsConfig { ack_timeout: 31, ..config() };
    let mut links = Links::open(&config, &TwinConfig::default(), 3);
    links.connect(|rank| std::thread::sleep(Duration::from_millis(70 * u64::from(rank.0))));
    assert!(links.0[0].nic.statistics().lost_packets > 0);
    for (from, to) in [(0, 1), (1, 0), (2, 0), (1, 2)] {
        links.post(from, to, 1, 2);
        links.settle();
        assert_eq!(links.raised(to, from), 1, "{from} to {to}");
    }
}

/// The greeting arrived and the acknowledgement is lost. The peer has answered, so the packet numbers
/// have advanced: the queue pair must not be reset.
#[test]
fn a_greeting_whose_acknowledgement_is_lost_is_not_repeated_once_the_peer_has_answered() {
    // The NIC itself repeats the packet after 134 ms.
    let config = VerbsConfig { ack_timeout: 15, ..config() };
    let mut links = Links::open(&config, &TwinConfig::default(), 2);
    links.0[0].nic.fault_after(0, TwinFault::LoseAcknowledgement);
    // Rank 1 is connected when the greeting arrives.
    links.connect(|rank| std::thread::sleep(Duration::from_millis(100 * u64::from(1 - rank.0))));
    assert_eq!(links.0[0].nic.statistics().lost_packets, 1);
    for turn in 1..5 {
        links.post(0, 1, turn, 2);
        links.post(1, 0, turn, 2);
        links.settle();
        assert_eq!((links.raised(1, 0), links.raised(0, 1)), (turn, turn));
    }
}

#[test]
fn a_closed_group_leaves_no_object_of_its_nics() {
    let links = Links::connected(&config(), 3);
    let nics: Vec<_> = links.0.iter().map(|end| end.nic.clone()).collect();
    assert!(nics.iter().all(|nic| nic.statistics().live_objects > 5));
    std::thread::scope(|scope| {
        links.0.into_iter().for_each(|end| drop(scope.spawn(move || drop(end))));
    });
    let live = || nics.iter().map(|nic| nic.statistics().live_objects).collect::<Vec<_>>();
    // Other tests open each NIC in this process for a moment, to choose among them.
    let deadline = Instant::now() + Duration::from_secs(10);
    while live() != [0, 0, 0] && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(live(), [0, 0, 0]);
}

#[test]
fn ports_of_infiniband_are_addressed_by_their_local_identifiers() {
    let port = TwinPort { is_ethernet: false, ..TwinPort::default() };
    let nic = TwinConfig { ports: vec![port], ..TwinConfig::default() };
    let mut links = Links::open(&config(), &nic, 2);
    links.connect(|_| {});
    links.post(0, 1, 1, 3);
    links.settle();
    assert_eq!((links.raised(1, 0), links.byte(1, 2)), (1, 1));
}

#[test]
fn a_port_that_is_down_and_ports_of_both_kinds_are_refused() {
    let (down, infiniband) = (
        TwinPort { is_active: false, ..TwinPort::default() },
        TwinPort { is_ethernet: false, ..TwinPort::default() },
    );
    for (ports, expected) in [
        (vec![down], "state of the port DOWN: expected ACTIVE"),
        (vec![TwinPort::default(), infiniband], "InfiniBand and Ethernet ports together"),
    ] {
        let nic = weft_fabric::providers::verbs::TwinNic::new(TwinConfig {
            ports,
            ..TwinConfig::default()
        });
        let refused = VerbsDevice::over(config(), &[nic]).map(drop).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}
