//! Peers that are refused before any query.

use crate::setup::pairs::providers;
use crate::setup::{Front, Node, PATIENCE, by, config, hello, listen, pair_with, until};
use std::time::Duration;
use weft_dispatch::wire::VERSION;
use weft_dispatch::{Connection, Error, Hello, Role};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{ProviderKind, Rank};

#[test]
fn a_peer_with_another_secret_is_refused_and_the_next_one_is_served() {
    for provider in providers() {
        let listener = Listener::bind(config("127.0.0.1:0", provider, Some("apple"))).unwrap();
        let address = listener.address().to_string();
        let dialers = std::thread::spawn(move || {
            let dial = |secret| connect(&config(&address, provider, secret), by(PATIENCE));
            for secret in [Some("pear"), None] {
                let error = dial(secret).err().unwrap().to_string();
                assert!(error.contains("secret"), "{error}");
            }
            let mut node = Node::new(4, Duration::ZERO);
            node.join(dial(Some("apple")).unwrap());
            until("the front end leaves", || {
                node.poll().unwrap();
                node.pairs.is_empty()
            });
        });
        let mut front = Front::new(8);
        front.join(listener.accept(by(PATIENCE), &mut || false).unwrap());
        front.submit(PATIENCE).unwrap();
        until("an answer", || {
            front.poll().unwrap();
            front.take(|report| panic!("{report:?}"));
            front.answered == 1
        });
        drop(front);
        dialers.join().unwrap();
    }
}

/// A node's hello, changed.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = hello(Role::Accelerator).encode();
    change(&mut bytes);
    bytes
}

#[test]
fn hellos_of_another_version_role_or_program_are_refused_by_name() {
    let provider = ProviderKind::Shm;
    let listener = listen(provider);
    let other_version = changed(|bytes| bytes[8..10].copy_from_slice(&(VERSION + 1).to_le_bytes()));
    let no_slots = Hello { slots: 0, ..hello(Role::Accelerator) }.encode();
    let too_many_slots = Hello { slots: Hello::MAX_SLOTS + 1, ..hello(Role::Accelerator) }.encode();
    let hellos = [
        (other_version, format!("version {} of the query protocol", VERSION + 1)),
        (hello(Role::FrontEnd).encode(), "both ends are FrontEnd".into()),
        (changed(|bytes| bytes[0] ^= 1), "magic number".into()),
        (changed(|bytes| bytes[10] = 9), "role 9: expected 1 or 2".into()),
        (Vec::new(), "magic number: expected 8 bytes, 0 are left".into()),
        (vec![0xa5; 4096], "magic number".into()),
        (no_slots, "0 slots: expected 1 to".into()),
        (too_many_slots, "slots: expected 1 to".into()),
        (changed(|bytes| bytes.truncate(40)), "bytes, ".into()),
        (changed(|bytes| bytes.resize(1 << 20, 0)), "bytes behind the last field".into()),
        (changed(|bytes| *bytes.last_mut().unwrap() = 0xff), "bytes, expected at most".into()),
    ];
    for (bytes, expected) in hellos {
        let (pair, peer) = pair_with(&listener, provider, move |pair| {
            let mut messages = vec![Vec::new(), Vec::new()];
            messages[1 - pair.rank().index()] = bytes;
            pair.exchange(&messages, by(PATIENCE)).unwrap();
            pair
        });
        assert_eq!(pair.rank(), Rank(0));
        let error = Connection::over(&pair, &hello(Role::FrontEnd), by(PATIENCE)).unwrap_err();
        assert!(!matches!(error, Error::Fabric(_)), "{expected}: {error}");
        assert!(error.to_string().contains(&expected), "{expected}: {error}");
        drop(peer.join().unwrap());
    }
}
