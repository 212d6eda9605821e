//! Services: submissions by several threads, joins and departures under load, stop, back-pressure, panics.

#[path = "common/answers.rs"]
mod answers;
#[path = "../../control/tests/common/certificates.rs"]
mod certificates;
#[path = "service/changes.rs"]
mod changes;
#[path = "service/limits.rs"]
mod limits;
#[path = "common/pairs.rs"]
mod pairs;
#[path = "service/submissions.rs"]
mod submissions;
#[path = "service/world.rs"]
mod world;

use certificates::Files;
use pairs::{pair_config, providers};
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_control::Tls;
use weft_dispatch::service::Unsubmitted;
use weft_dispatch::{AcceleratorConfig, Error, Failure, Input, Query};
use weft_fabric::{ProviderKind, Time, clock};
use world::*;

const QUERIES: u64 = 2000;

/// Queries from four threads, two nodes, one of which leaves under load, and another that stops.
fn every_query_is_answered_once(provider: ProviderKind) {
    every_query_is_answered_once_in(World::new(provider, QUERIES));
}

fn every_query_is_answered_once_in(world: World) {
    let (first, first_service) = world.add_node();
    let (_, second_service) = world.add_node();
    world.submit(0..QUERIES / 4, 4);
    std::thread::scope(|scope| {
        scope.spawn(|| world.submit(QUERIES / 4..QUERIES / 2, 3));
        world.front_end.leave(first, by()).unwrap();
    });
    assert!(matches!(world.front_end.leave(first, by()), Err(Error::UnknownNode(_))));
    let first_node = first_service.stop(by()).unwrap();
    assert!(first_node.batches() > 0);
    let (_, third_service) = world.add_node();
    std::thread::scope(|scope| {
        scope.spawn(|| world.submit(QUERIES / 2..QUERIES, 3));
        second_service.stop(by()).unwrap();
    });
    assert_eq!(world.front_end.nodes().unwrap().len(), 1);
    let World { front_end, ends, .. } = world;
    let handle = front_end.handle();
    let (_, counts) = front_end.stop(by()).unwrap();
    assert_eq!((counts.submitted, counts.answered, counts.failed), (QUERIES, QUERIES, 0));
    assert!(ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    assert_eq!(ends.gone.load(Ordering::Acquire), 2);
    assert!(ends.losses.lock().unwrap().is_empty());
    assert!(matches!(handle.submit(World::query(0)), Err(Error::Stopped { .. })));
    third_service.stop(by()).unwrap();
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_shm() {
    every_query_is_answered_once(ProviderKind::Shm);
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_tcp() {
    every_query_is_answered_once(ProviderKind::Tcp);
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_tcp_with_tls() {
    let files = Files::new("service", "127.0.0.1");
    let here = Tls::default().with_certificate(&files.path("cert"), &files.path("key")).unwrap();
    let there = Tls::default().with_authorities(&files.path("ca")).unwrap();
    let tls = [here, there].map(Tls::with_payloads);
    every_query_is_answered_once_in(World::with_tls(ProviderKind::Tcp, tls, QUERIES));
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_ofi() {
    if providers().contains(&ProviderKind::Ofi) {
        every_query_is_answered_once(ProviderKind::Ofi);
    }
}

/// With more than eight connections a turn visits only those for which epoll reports events.
#[test]
fn every_query_is_answered_once_by_twelve_nodes_of_which_some_leave_and_one_is_lost() {
    let world = World::new(ProviderKind::Tcp, QUERIES);
    let mut nodes: Vec<_> = (0..12).map(|_| world.add_node()).collect();
    world.submit(0..QUERIES / 2, 4);
    std::thread::scope(|scope| {
        scope.spawn(|| world.submit(QUERIES / 2..QUERIES, 3));
        let (leaving, service) = nodes.remove(3);
        world.front_end.leave(leaving, by()).unwrap();
        service.stop(by()).unwrap();
        nodes.remove(5).1.stop(by()).unwrap();
        // It owes answers, or leaves without a drain.
        drop(nodes.remove(7));
        world.wait_for("three nodes are gone", |ends| ends.gone.load(Ordering::Acquire) == 3);
    });
    world.wait_for("all have ended", |ends| ends.ended.load(Ordering::Acquire) == QUERIES);
    let states = world.front_end.nodes().unwrap();
    assert!(states.len() == 9 && states.iter().all(|state| state.in_flight == 0), "{states:?}");
    let World { front_end, ends, .. } = world;
    let (_, counts) = front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (QUERIES, 0));
    assert!(ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    for (_, service) in nodes {
        assert!(service.stop(by()).unwrap().batches() > 0);
    }
}

#[test]
fn a_node_of_twelve_connections_answers_batches_that_wait_for_their_window() {
    let world = World::new(ProviderKind::Tcp, QUERIES);
    let window = Duration::from_millis(1);
    let config = AcceleratorConfig { front_ends: 12, window, ..AcceleratorConfig::default() };
    let node = world.start_node(config);
    let first = world.join(&node);
    (1..12).for_each(|_| _ = world.join(&node));
    world.submit(0..QUERIES / 2, 4);
    world.front_end.leave(first, by()).unwrap();
    world.submit(QUERIES / 2..QUERIES, 4);
    let World { front_end, ends, .. } = world;
    let (_, counts) = front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (QUERIES, 0));
    assert!(ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    node.stop(by()).unwrap();
}

#[test]
fn a_full_queue_is_an_error_at_once_or_at_the_deadline() {
    let world = World::new(ProviderKind::Shm, 100);
    let handle = world.front_end.handle();
    // Without a node: 24 in the ledger, 8 in the queue.
    handle.submit_all((0..24).map(World::query), by()).unwrap();
    let until = by();
    while world.front_end.counts().unwrap().submitted < 24 {
        assert!(clock::now() < until);
    }
    let soon = clock::now().after(Duration::from_millis(20));
    let Unsubmitted { submitted, error } =
        handle.submit_all((24..100).map(World::query), soon).unwrap_err();
    assert_eq!(submitted, 8);
    assert!(matches!(error, Error::Full { limit: 8, .. }), "{error}");
    assert!(matches!(handle.submit(World::query(32)), Err(Error::Full { .. })));
    let (_, service) = world.add_node();
    world.wait_for("answers", |ends| ends.ended.load(Ordering::Acquire) == 32);
    handle.submit(World::query(32)).unwrap();
    let (_, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (33, 0));
    service.stop(by()).unwrap();
}

#[test]
fn a_query_that_the_schema_excludes_is_refused_by_the_submission() {
    let world = World::new(ProviderKind::Shm, 1);
    let handle = world.front_end.handle();
    let refused = |input| {
        let error = handle.submit(Query::new(0, &[input], by())).unwrap_err();
        assert!(matches!(error, Error::Query { .. }), "{error}");
    };
    let good = Input { memory: 0, offset: 0, length: BYTES };
    refused(Input { length: BYTES + 1, ..good });
    refused(Input { memory: 1, ..good });
    refused(Input { offset: BYTES * SAMPLES - 1, ..good });
    assert!(matches!(handle.submit(Query::new(0, &[good; 4], by())), Err(Error::Query { .. })));
    assert_eq!(world.front_end.counts().unwrap().submitted, 0);
}

#[test]
fn a_cancel_finds_queries_in_flight_in_the_ledger_and_in_the_queue() {
    let world = World::new(ProviderKind::Shm, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..32, 1);
    // 16 in flight, 8 in the ledger, 8 in the queue.
    for token in [0, 20, 31] {
        assert!(world.front_end.cancel(token).unwrap(), "{token}");
        assert!(!world.front_end.cancel(token).unwrap(), "{token}");
    }
    assert!(!world.front_end.cancel(77).unwrap());
    world.gate.store(true, Ordering::Release);
    let (recorder, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (29, 3));
    let counts = recorder.ends.counts.lock().unwrap().clone();
    for (token, count) in counts.into_iter().enumerate() {
        let cancelled = [0, 20, 31].contains(&token);
        assert_eq!(count, if cancelled { [0, 1, 1] } else { [1, 0, 1] }, "{token}");
    }
    assert!(recorder.ends.failures.lock().unwrap().iter().all(|f| *f == Failure::Cancelled));
    service.stop(by()).unwrap();
}

#[test]
fn a_stop_cancels_at_its_deadline_and_returns_all_memory() {
    let world = World::new(ProviderKind::Shm, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..32, 2);
    let soon = clock::now().after(Duration::from_millis(50));
    let (recorder, counts) = world.front_end.stop(soon).unwrap();
    assert_eq!((counts.submitted, counts.answered, counts.failed), (32, 0, 32));
    assert!(recorder.ends.counts.lock().unwrap().iter().all(|count| *count == [0, 1, 1]));
    world.gate.store(true, Ordering::Release);
    service.stop(by()).unwrap();
}

#[test]
fn a_node_that_vanishes_costs_no_query() {
    let world = World::new(ProviderKind::Tcp, 200);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..16, 1);
    world.wait_for("queries at the node", |_| world.front_end.nodes().unwrap()[0].in_flight == 16);
    // It owes all answers: without a query it would leave in order.
    drop(service);
    world.wait_for("departure", |ends| ends.gone.load(Ordering::Acquire) == 1);
    assert_eq!(world.ends.losses.lock().unwrap().len(), 1);
    world.gate.store(true, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(16..200, 1);
    let (recorder, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (200, 0));
    assert!(recorder.ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    service.stop(by()).unwrap();
}

#[test]
fn a_node_returns_why_it_lost_a_front_end() {
    let world = World::new(ProviderKind::Tcp, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    assert!(service.take_losses().unwrap().is_empty());
    world.submit(0..16, 1);
    let until = by();
    while service.state().unwrap().batches == 0 {
        assert!(clock::now() < until);
        std::thread::yield_now();
    }
    // The queries are with the node.
    world.front_end.stop(Time(0)).unwrap();
    world.gate.store(true, Ordering::Release);
    let mut losses = Vec::new();
    while losses.is_empty() {
        assert!(clock::now() < until);
        losses = service.take_losses().unwrap();
    }
    assert!(losses[0].contains("stopped before its last answers"), "{losses:?}");
    assert_eq!(service.state().unwrap().front_ends, 0);
    service.stop(by()).unwrap();
}

#[test]
fn a_panic_of_the_handler_is_the_error_of_later_calls() {
    let world = World::new(ProviderKind::Shm, 2);
    world.ends.panics.store(true, Ordering::Relaxed);
    let (_, service) = world.add_node();
    let handle = world.front_end.handle();
    handle.submit(World::query(0)).unwrap();
    let until = by();
    while !matches!(world.front_end.counts(), Err(Error::Stopped { .. })) {
        assert!(clock::now() < until);
        std::thread::yield_now();
    }
    assert!(matches!(handle.submit(World::query(1)), Err(Error::Stopped { .. })));
    match world.front_end.stop(by()) {
        Err(Error::Panicked { message, .. }) => assert_eq!(message, "asked to"),
        other => panic!("{:?}", other.map(|(_, counts)| counts)),
    }
    service.stop(by()).unwrap();
}
