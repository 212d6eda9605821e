//! The ledger against a model: every step sequence in small cases, random ones in larger cases. Each accepted
//! query ends exactly once, its memory returns exactly once, and no slot is lost.

#[path = "ledger/machine.rs"]
mod machine;

#[path = "../../fabric/tests/common/counting.rs"]
mod counting;

use counting::counting;
use machine::{Machine, Step};
use proptest::prelude::*;
use std::collections::HashSet;
use weft_dispatch::{Error, Ledger, LedgerConfig, Policy};
use weft_fabric::Time;

fn config(queries: u32, nodes: u32, slots: u32) -> LedgerConfig {
    LedgerConfig {
        queries,
        nodes,
        slots,
        max_quarantined: slots,
        max_sends: 2,
        policy: Policy::RoundRobin,
    }
}

/// Breadth-first search over all states within `depth` steps. Returns the distinct state count.
fn exhaust(config: LedgerConfig, depth: usize) -> usize {
    let start = Machine::new(config);
    let (mut seen, mut frontier) = (HashSet::from([start.clone()]), vec![start]);
    for _ in 0..depth {
        let mut next = Vec::new();
        for machine in frontier {
            for step in Step::all(&config) {
                let mut after = machine.clone();
                if let Err(wrong) = after.step(step) {
                    panic!("{wrong}\nafter {:?}", after.steps());
                }
                after.check_end();
                if seen.insert(after.clone()) {
                    next.push(after);
                }
            }
        }
        frontier = next;
    }
    seen.len()
}

/// A cancel, a deadline or a loss at each position relative to the send, the answer and the notices.
#[test]
fn every_sequence_of_steps_on_one_slot_ends_each_query_once() {
    assert!(exhaust(config(1, 1, 1), 12) > 4);
}

#[test]
fn every_sequence_of_steps_on_two_nodes_ends_each_query_once() {
    assert!(exhaust(config(2, 2, 1), 8) > 5_000);
}

#[test]
fn every_sequence_of_steps_on_two_slots_ends_each_query_once() {
    assert!(exhaust(config(3, 1, 2), 9) > 20_000);
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0usize..64;
    prop_oneof![
        4 => Just(Step::Submit),
        6 => Just(Step::Send),
        4 => index.clone().prop_map(Step::Stream),
        5 => index.clone().prop_map(Step::Answer),
        1 => index.clone().prop_map(Step::Refuse),
        1 => index.clone().prop_map(Step::Cancel),
        1 => Just(Step::Expire),
        4 => Just(Step::Notice),
        3 => index.clone().prop_map(Step::Release),
        1 => Just(Step::Join),
        1 => index.clone().prop_map(Step::Lose),
        1 => index.prop_map(Step::Drain),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::RoundRobin), Just(Policy::LeastInFlight), Just(Policy::LatencyAware)]
}

proptest! {
    #[test]
    fn random_sequences_of_steps_end_each_query_once(
        (queries, nodes, slots) in (1u32..24, 1u32..5, 1u32..9),
        (max_quarantined, max_sends, policy) in (1u32..9, 1u32..4, policy()),
        steps in prop::collection::vec(step(), 0..300),
    ) {
        let mut machine =
            Machine::new(LedgerConfig { queries, nodes, slots, max_quarantined, max_sends, policy });
        for step in steps {
            if let Err(wrong) = machine.step(step) {
                return Err(TestCaseError::fail(wrong));
            }
        }
        machine.check_end();
    }
}

#[test]
fn a_ledger_allocates_at_construction_alone() {
    let mut ledger =
        Ledger::new(LedgerConfig { queries: 64, nodes: 4, slots: 16, ..LedgerConfig::default() })
            .unwrap();
    let run = |ledger: &mut Ledger| {
        for turn in 0..50u64 {
            let nodes = [ledger.join(16).unwrap(), ledger.join(9).unwrap()];
            for token in 0..64 {
                let id = ledger.submit(token, Time(turn * 1000 + 500 + token)).unwrap();
                if token % 7 == 3 {
                    ledger.cancel(id).unwrap();
                }
            }
            let mut sends = 0;
            while let Some(send) = ledger.next_send(Time(turn * 1000)) {
                sends += 1;
                if send.slot % 2 == 0 {
                    ledger.answered(Time(turn * 1000 + 10), send.node, send.slot).unwrap();
                }
            }
            assert!(sends >= 25);
            while ledger.expire(Time(turn * 1000 + 600), |_| ()) {}
            nodes.iter().for_each(|node| ledger.lose(*node).unwrap());
            while let Some(notice) = ledger.next_notice() {
                if let weft_dispatch::Notice::Ended {
                    query,
                    outcome: weft_dispatch::Outcome::Answered { .. },
                    ..
                } = notice
                {
                    ledger.release(query).unwrap();
                }
            }
            assert!(nodes.iter().all(|node| ledger.is_gone(*node)));
        }
    };
    let ((), allocations) = counting(|| run(&mut ledger));
    assert_eq!(allocations, 0);
}

#[test]
fn a_ledger_of_many_queries_takes_them_and_refuses_one_more() {
    let mut ledger = Ledger::new(LedgerConfig::default()).unwrap();
    let node = ledger.join(8192).unwrap();
    for token in 0..8192 {
        ledger.submit(token, Time::MAX).unwrap();
    }
    let refusal = ledger.submit(0, Time::MAX);
    assert!(matches!(refusal, Err(Error::Full { what: "queries under way", limit: 8192 })));
    while ledger.next_send(Time(0)).is_some() {}
    assert_eq!((ledger.counts().in_flight, ledger.in_flight(node).unwrap()), (8192, 8192));
    assert!(matches!(ledger.leave(node), Err(Error::NotIdle { in_flight: 8192, .. })));
}

#[test]
fn a_node_with_many_quarantined_slots_takes_no_more_queries() {
    let mut ledger = Ledger::new(LedgerConfig { max_quarantined: 2, ..config(8, 1, 8) }).unwrap();
    let node = ledger.join(8).unwrap();
    for token in 0..2 {
        let id = ledger.submit(token, Time::MAX).unwrap();
        ledger.next_send(Time(0)).unwrap();
        assert!(ledger.cancel(id).unwrap().is_some());
    }
    ledger.submit(2, Time::MAX).unwrap();
    assert_eq!(ledger.next_send(Time(0)), None);
    ledger.answered(Time(1), node, 1).unwrap();
    assert!(ledger.next_send(Time(1)).is_some(), "the late answer ended a quarantine");
    assert_eq!(ledger.counts().late, 1);
}
