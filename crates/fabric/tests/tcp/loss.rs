//! Every kind of peer loss.

use crate::ends::{PROMPT, linked, soon, waiting};
use crate::handmade::{Handmade, frame};
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use weft_fabric::providers::TcpConfig;
use weft_fabric::{Cause, Error, Page, Poison, Rank, clock};

#[test]
fn a_peer_that_dies_within_a_write_is_named() {
    let mut peer = Handmade::new();
    let bytes = frame(peer.lane, &[(peer.key(), 100, 100)], &[5; 100]);
    peer.streams[0].write_all(&bytes[..80]).unwrap();
    peer.streams.clear();
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(cause.detail.contains("in the middle of a write"), "{}", cause.detail);
    assert!(after < PROMPT, "{after:?}");
    assert_eq!(peer.engine.count(peer.counter, Rank(1)).unwrap(), 0);
}

#[test]
fn one_broken_stream_of_several_is_a_loss() {
    let mut peer = Handmade::new();
    peer.streams.pop();
    assert!(!peer.streams.is_empty(), "one connection per peer");
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(after < PROMPT, "{after:?}");
    // The other end finds the rest closed, which is the same loss there.
    for stream in &mut peer.streams {
        stream.set_read_timeout(Some(PROMPT)).unwrap();
        let ended = stream.read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)), "{ended:?}");
    }
}

#[test]
fn writes_toward_a_peer_that_dies_drain_with_its_loss() {
    let mut peer = Handmade::new();
    let source = peer.engine.alloc(64 << 20).unwrap();
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length: 64 << 20,
    };
    let request = peer.engine.write(Rank(1), peer.counter, 0, &[page]).unwrap();
    let mut some = [0; 1000];
    peer.streams[0].read_exact(&mut some).unwrap();
    assert!(!peer.engine.is_drained(request));
    peer.streams.clear();
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(after < PROMPT, "{after:?}");
    assert!(peer.engine.is_drained(request));
    let memory = source.memory().clone();
    peer.engine.release(&source);
    drop(source);
    assert_eq!(Arc::strong_count(&memory), 1, "the source is still borrowed");
}

/// Poisons the group after one write has ended and while another is half sent. Polls in other waits drain
/// it.
#[test]
fn a_wait_on_a_request_that_poison_drained_returns_the_poison() {
    let mut peer = Handmade::new();
    let source = peer.engine.alloc(64 << 20).unwrap();
    let page = |length| Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length,
    };
    let ended = peer.engine.write(Rank(1), peer.counter, 0, &[page(100)]).unwrap();
    waiting(|w| peer.engine.wait_for_request(ended, w)).unwrap();
    let half = peer.engine.write(Rank(1), peer.counter, 0, &[page(64 << 20)]).unwrap();
    let last = peer.engine.write(Rank(1), peer.counter, 0, &[page(64 << 20)]).unwrap();
    let enough = Poison { kind: Cause::User, rank: None, detail: "enough".into() };
    peer.engine.poison(enough.clone());
    peer.engine.poll(clock::now(), &mut Vec::new());
    waiting(|w| peer.engine.wait_for_request(ended, w)).unwrap();
    for request in [half, last] {
        assert!(peer.engine.is_drained(request));
        let error = waiting(|w| peer.engine.wait_for_request(request, w));
        assert!(matches!(&error, Err(Error::Poisoned(cause)) if *cause == enough), "{error:?}");
    }
}

/// A peer leaves with a write toward it half sent, and another that no link has accepted: both drain, as
/// does a later write, and the group continues.
#[test]
fn requests_toward_a_peer_that_left_drain_and_poison_nothing() {
    let mut peer = Handmade::new();
    let length = 64 << 20;
    let source = peer.engine.alloc(length).unwrap();
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length: length as u64,
    };
    let write = |peer: &mut Handmade| peer.engine.write(Rank(1), peer.counter, 0, &[page]).unwrap();
    let requests = [write(&mut peer), write(&mut peer)];
    peer.streams[0].read_exact(&mut [0; 1000]).unwrap();
    assert!(requests.iter().all(|request| !peer.engine.is_drained(*request)));
    peer.engine.poison_flag().peer_left(Rank(1));
    peer.streams.clear();
    for request in requests {
        waiting(|w| peer.engine.wait_for_request(request, w)).unwrap();
    }
    let late = write(&mut peer);
    waiting(|w| peer.engine.wait_for_request(late, w)).unwrap();
    let memory = source.memory().clone();
    peer.engine.release(&source);
    drop(source);
    assert_eq!(Arc::strong_count(&memory), 1, "the source is still borrowed");
    peer.engine.check().unwrap();
}

#[test]
fn a_fence_under_load_gives_every_source_back() {
    let mut peer = Handmade::new();
    let source = peer.engine.alloc(1 << 20).unwrap();
    let page = |length| Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length,
    };
    let mut requests = Vec::new();
    for number in 0..200u64 {
        let pages = [page(1 << 20), page(number * 40)];
        requests.push(peer.engine.write(Rank(1), peer.counter, 0, &pages).unwrap());
    }
    peer.engine.poison(Poison { kind: Cause::User, rank: None, detail: "enough".into() });
    peer.engine.poll(clock::now(), &mut Vec::new());
    assert!(requests.iter().all(|request| peer.engine.is_drained(*request)));
    let memory = source.memory().clone();
    peer.engine.release(&source);
    drop(source);
    assert_eq!(Arc::strong_count(&memory), 1);
    // Bytes that arrive after the fence change no memory.
    let bytes = frame(peer.lane, &[(peer.key(), 100, 100)], &[5; 100]);
    let _ = peer.streams[0].write_all(&bytes);
    peer.engine.poll(clock::now(), &mut Vec::new());
    assert_eq!(peer.bytes(), vec![0; 300]);
}

#[test]
fn bytes_sent_just_before_a_peer_leaves_arrive() {
    const BYTES: usize = 8 << 20;
    let mut ends = linked(2, &TcpConfig::default(), BYTES);
    let (mut leaver, mut stayer) = (ends.pop().unwrap(), ends.pop().unwrap());
    let peer = Rank(1);
    // Unread signals at the leaver: closing the sockets will reset the connections.
    for _ in 0..100 {
        stayer.engine.signal(peer, stayer.counter, 0).unwrap();
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            leaver.source.memory().fill(0, BYTES, 0x5a);
            let page = Page {
                source: leaver.source.key(),
                source_offset: 0,
                destination: leaver.remotes[0].unwrap().key,
                destination_offset: BYTES as u64,
                length: BYTES as u64,
            };
            let request = leaver.engine.write(Rank(0), leaver.counter, 0, &[page]).unwrap();
            waiting(|w| leaver.engine.wait_for_request(request, w)).unwrap();
            leaver.engine.flush();
        });
        let parts = stayer.engine.route(peer).unwrap().parts.count_contiguous(BYTES as u64);
        waiting(|w| stayer.engine.wait(stayer.counter, &[(peer, parts)], w)).unwrap();
    });
    let mut seen = vec![0; BYTES];
    stayer.destination.memory().copy_out(BYTES, &mut seen);
    assert!(seen.iter().all(|byte| *byte == 0x5a));
    // It has announced that it leaves, so neither the closed connection nor parts toward it matter.
    stayer.engine.poison_flag().peer_left(peer);
    stayer.engine.credit(peer, stayer.counter).unwrap();
    let until = soon(2);
    while clock::now() < until {
        stayer.engine.poll(clock::now(), &mut Vec::new());
        stayer.engine.signal(peer, stayer.counter, 0).unwrap();
    }
    stayer.engine.check().unwrap();
}
