//! Credits that ride on writes, over simulated NICs.

use crate::links::Links;
use weft_fabric::link::PostStatus;
use weft_fabric::providers::VerbsConfig;
use weft_fabric::providers::verbs::{TwinConfig, TwinPort};
use weft_fabric::{Lane, LaneId};

/// The other lane in the block that a writer raises.
fn beside(lane: Lane) -> Lane {
    Lane::new(LaneId::new(lane.id().get() + 1).unwrap(), lane.generation())
}

/// Posts a one-page part from rank 0 to rank 1 with a credit on it.
fn post_with_credit(links: &mut Links, token: u64) {
    let lane = links.0[1].granted[0];
    let posted = links.post_to(0, 1, token, 1, lane, Some(beside(lane)));
    assert_eq!(posted, PostStatus::InFlight);
}

#[test]
fn a_credit_costs_no_work_request_once_its_lane_has_a_name() {
    let mut links = Links::connected(&VerbsConfig::default(), 2);
    let before = links.0[0].nic.statistics().requests;
    let credit = beside(links.0[1].granted[0]).id();
    for token in 1..=100 {
        post_with_credit(&mut links, token);
        links.settle();
        assert_eq!(links.raised(1, 0), token);
        assert_eq!(links.0[1].lanes.value(credit), token);
    }
    // The first credit precedes the part.
    assert_eq!(links.0[0].nic.statistics().requests - before, 101);
    assert_eq!(links.0[0].sink.completed.len(), 100);
}

#[test]
fn credits_keep_the_bound_on_unconsumed_arrivals() {
    let config = VerbsConfig { max_unconsumed: 4, ..VerbsConfig::default() };
    let mut links = Links::connected(&config, 2);
    // A separate message and the part's.
    post_with_credit(&mut links, 1);
    links.post(0, 1, 2, 1);
    let lane = links.0[1].granted[0];
    let posted = links.post_to(0, 1, 3, 1, lane, Some(beside(lane)));
    assert_eq!(posted, PostStatus::Full);
    links.settle();
    links.settle();
    post_with_credit(&mut links, 3);
    links.settle();
    assert_eq!((links.raised(1, 0), links.0[1].lanes.value(beside(lane).id())), (3, 2));
}

#[test]
fn each_of_two_nics_has_names_of_its_own() {
    let nic = TwinConfig { ports: vec![TwinPort::default(); 2], ..TwinConfig::default() };
    let mut links = Links::open(&VerbsConfig::default(), &nic, 2);
    links.connect(|_| {});
    let before = links.0[0].nic.statistics().requests;
    for token in 1..=10 {
        post_with_credit(&mut links, token);
        links.settle();
    }
    let credit = beside(links.0[1].granted[0]).id();
    assert_eq!((links.raised(1, 0), links.0[1].lanes.value(credit)), (10, 10));
    assert_eq!(links.0[0].nic.statistics().requests - before, 12);
}
