//! Handshakes between front ends and nodes: names by round trips, and refusals.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_dispatch::{AcceleratorConfig, Schema};
use weft_qdl::network::{End, ask_names, connect};
use weft_qdl::{Counts, Error, Model, ModelBackend, Node, NodeConfig};

const PATIENCE: Duration = Duration::from_secs(20);

fn end() -> End {
    End { slots: 16, patience: PATIENCE, ..End::default() }
}

/// Runs `body` with the addresses of nodes with these names.
fn with_nodes(names: &[&str], body: impl FnOnce(&[String])) {
    with_nodes_of(names, end(), NodeConfig::HANDSHAKES, |addresses, _| body(addresses));
}

/// Runs `body` with the addresses of nodes at this end, and the last node's counts.
fn with_nodes_of(
    names: &[&str],
    end: End,
    handshakes: usize,
    body: impl FnOnce(&[String], &Counts),
) {
    let mut last = Arc::default();
    let nodes: Vec<_> = names
        .iter()
        .map(|name| {
            let config = NodeConfig {
                address: "127.0.0.1:0".into(),
                name: (*name).into(),
                schema: Schema::bytes(100, 8),
                batches: AcceleratorConfig::default(),
                handshakes,
                end: end.clone(),
            };
            let counts = Arc::new(Counts::default());
            last = counts.clone();
            let backend = ModelBackend::new(Model::default(), 8, counts.clone()).unwrap();
            Node::bind(config, backend, counts).unwrap()
        })
        .collect();
    let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_string()).collect();
    let stops: Vec<_> = nodes.iter().map(Node::stop_flag).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            nodes.into_iter().map(|node| scope.spawn(move || node.serve().unwrap())).collect();
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&addresses, &last)));
        stops.iter().for_each(|stop| stop.store(true, std::sync::atomic::Ordering::Relaxed));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn each_node_returns_its_name_as_often_as_it_is_asked() {
    with_nodes(&["alpha", ""], |addresses| {
        let links = connect(addresses, &end()).unwrap();
        for _ in 0..3 {
            let hellos = ask_names(&links, PATIENCE).unwrap();
            let names: Vec<String> = hellos.into_iter().map(|hello| hello.name).collect();
            assert_eq!(names, ["alpha".to_owned(), addresses[1].clone()]);
        }
        links.iter().for_each(|link| link.begin(PATIENCE).unwrap());
    });
}

#[test]
fn two_nodes_of_one_name_are_refused() {
    with_nodes(&["alpha", "alpha"], |addresses| {
        let links = connect(addresses, &end()).unwrap();
        let refused = ask_names(&links, PATIENCE).unwrap_err();
        assert!(matches!(refused, Error::SameName { .. }), "{refused}");
        assert!(refused.to_string().contains(&addresses[1]), "{refused}");
    });
}

#[test]
fn a_connection_may_come_from_a_chosen_address() {
    with_nodes(&["alpha"], |addresses| {
        let node = &addresses[0];
        let both = format!("{node},{node}@127.0.0.2,{node}@127.0.0.3");
        let links = connect(&[both], &end()).unwrap();
        assert_eq!((links.len(), ask_names(&links, PATIENCE).unwrap().len()), (3, 1));
        links.iter().for_each(|link| link.begin(PATIENCE).unwrap());
        for (source, expected) in [
            ("eth0", "IP address of this host"),
            ("", "IP address of this host"),
            ("[127.0.0.2]", "IP address of this host"),
            ("203.0.113.9", "this host does not have it"),
        ] {
            let refused = connect(&[format!("{node}@{source}")], &end()).unwrap_err();
            assert!(refused.to_string().contains(expected), "{refused}");
        }
        let twice = format!("{node}@::1,{node}@[::1]");
        let refused = connect(&[twice], &end()).unwrap_err();
        assert!(refused.to_string().contains("distinct"), "{refused}");
    });
}

#[test]
fn a_node_may_have_several_addresses_and_nodes_of_other_names_are_not_one() {
    with_nodes(&["alpha", "beta"], |addresses| {
        let twice = format!("{}, {}", addresses[0], addresses[0]);
        assert!(connect(&[twice], &end()).is_err());
        // Another address for the same node.
        let both = format!("{}, {}", addresses[0], addresses[0].replace("127.0.0.1", "localhost"));
        let links = connect(&[both, addresses[1].clone()], &end()).unwrap();
        assert_eq!(links.len(), 3);
        let hellos = ask_names(&links, PATIENCE).unwrap();
        let names: Vec<&str> = hellos.iter().map(|hello| &*hello.name).collect();
        assert_eq!(names, ["alpha", "beta"]);
        let links = connect(&[addresses.join(",")], &end()).unwrap();
        let refused = ask_names(&links, PATIENCE).unwrap_err().to_string();
        let expected = format!(
            "address {}, of node \"beta\": expected an address of node \"alpha\", as the first one",
            addresses[1]
        );
        assert_eq!(refused, expected);
    });
}

#[test]
fn a_node_serves_again_after_a_front_end_that_vanished_in_the_handshake() {
    with_nodes(&["alpha"], |addresses| {
        drop(connect(addresses, &end()).unwrap());
        let links = connect(addresses, &end()).unwrap();
        assert_eq!(ask_names(&links, PATIENCE).unwrap()[0].name, "alpha");
    });
}

#[test]
fn an_absent_node_is_named_by_its_address() {
    let soon = End { patience: Duration::from_millis(300), ..end() };
    let refused = connect(&["127.0.0.1:1".into()], &soon).unwrap_err();
    assert!(refused.to_string().starts_with("node 127.0.0.1:1: "), "{refused}");
    let none = connect(&[], &soon).unwrap_err();
    assert_eq!(none.to_string(), "nodes 0: expected at least one address");
}

#[test]
fn a_front_end_that_asks_for_the_name_without_end_is_refused_by_the_node() {
    let brief = End { patience: Duration::from_secs(1), ..end() };
    with_nodes_of(&["alpha"], brief, NodeConfig::HANDSHAKES, |addresses, counts| {
        let links = connect(addresses, &end()).unwrap();
        let since = Instant::now();
        while ask_names(&links, Duration::from_secs(2)).is_ok() {
            assert!(since.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(10));
        }
        while counts.departures().is_empty() {
            assert!(since.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(10));
        }
        let departure = &counts.departures()[0];
        assert_eq!((&*departure.name, departure.lost), ("front end", true));
        assert!(departure.cause.contains("handshake"), "{departure:?}");
    });
}

#[test]
fn front_ends_beyond_the_handshakes_at_a_time_wait() {
    with_nodes_of(&["alpha"], end(), 1, |addresses, _| {
        let first = connect(addresses, &end()).unwrap();
        ask_names(&first, PATIENCE).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let links = connect(addresses, &end()).unwrap();
                ask_names(&links, PATIENCE).map(|_| Instant::now()).unwrap()
            });
            std::thread::sleep(Duration::from_millis(300));
            let dropped = Instant::now();
            drop(first);
            assert!(second.join().unwrap() > dropped);
        });
    });
}
