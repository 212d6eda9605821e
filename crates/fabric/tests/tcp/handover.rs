//! Small write requests toward a peer that reads late: each ends only once the kernel has all bytes.

use crate::ends::{End, connected, link, linked, soon, waiting};
use crate::handmade::{Handmade, frame};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use weft_fabric::providers::TcpConfig;
use weft_fabric::{
    Error, Event, Page, PeerWrite, Rank, Region, RequestId, Requests, ScatterWrite, WaitOptions,
    clock,
};

/// Payload length that a post copies.
const SMALL: u64 = 1000;
/// More parts than a connection's buffers hold.
const MANY: u64 = 1 << 16;
/// More parts than a link's queue takes.
const QUEUED: usize = 9000;

fn page(peer: &Handmade, source: &Region) -> Page {
    Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length: SMALL,
    }
}

/// Posts small parts until one finds the socket full; returns the last request and the part count.
fn fill(
    peer: &mut Handmade,
    mut write: impl FnMut(&mut Handmade) -> RequestId,
) -> (RequestId, usize) {
    for number in 1..=MANY {
        let request = write(peer);
        if !peer.engine.is_drained(request) {
            return (request, number as usize);
        }
    }
    panic!("all requests ended although the peer does not read")
}

/// Reads `bytes` on the first stream: polls the engine until `request` has ended, then reads the rest
/// without polls.
fn read_all(peer: &mut Handmade, request: RequestId, bytes: usize) {
    let mut left = bytes;
    let mut buffer = vec![0; 1 << 16];
    peer.streams[0].set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    while left > 0 {
        let room = buffer.len().min(left);
        left -= peer.streams[0].read(&mut buffer[..room]).expect("all of it has left");
        if !peer.engine.is_drained(request) {
            peer.engine.poll(clock::now(), &mut Vec::new());
        }
    }
    assert!(peer.engine.is_drained(request));
    peer.engine.check().unwrap();
}

fn single_stream() -> Handmade {
    Handmade::with(TcpConfig { streams: 1, ..TcpConfig::default() })
}

#[test]
fn a_small_write_ends_when_the_kernel_has_all_of_it() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let page = page(&peer, &source);
    let counter = peer.counter;
    let (request, parts) =
        fill(&mut peer, |peer| peer.engine.write(Rank(1), counter, 0, &[page]).unwrap());
    read_all(&mut peer, request, parts * (12 + 16 + SMALL as usize));
}

#[test]
fn a_signal_ends_when_the_kernel_has_all_of_it() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let page = page(&peer, &source);
    let counter = peer.counter;
    let (_, parts) =
        fill(&mut peer, |peer| peer.engine.write(Rank(1), counter, 0, &[page]).unwrap());
    let signal = peer.engine.signal(Rank(1), counter, 0).unwrap();
    read_all(&mut peer, signal, parts * (12 + 16 + SMALL as usize) + 12);
}

#[test]
fn a_scatter_ends_and_calls_back_when_the_kernel_has_all_of_it() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let pages = [page(&peer, &source)];
    let (counter, ended) = (peer.counter, Arc::new(AtomicU64::new(0)));
    let (request, parts) = fill(&mut peer, |peer| {
        let ended = ended.clone();
        let done = Box::new(move |_| {
            ended.fetch_add(1, Ordering::SeqCst);
        });
        let write = [PeerWrite { peer: Rank(1), pages: &pages }];
        peer.engine.scatter(&write, counter, 0, Some(done)).unwrap()
    });
    assert_eq!(ended.load(Ordering::SeqCst), parts as u64 - 1);
    read_all(&mut peer, request, parts * (12 + 16 + SMALL as usize));
    assert_eq!(ended.load(Ordering::SeqCst), parts as u64);
}

#[test]
fn a_drivers_scatter_ends_when_the_kernel_has_all_of_it() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let (page, counter) = (page(&peer, &source), peer.counter);
    let Page { source_offset, destination, destination_offset, length, .. } = page;
    let write = ScatterWrite {
        peer: Rank(1),
        round: 0,
        source_offset,
        destination,
        destination_offset,
        length,
    };
    let mut requests = Requests::default();
    let mut last = 0;
    while peer.engine.statistics().requests == 0 {
        last += 1;
        assert!(last < MANY, "all scatters ended although the peer does not read");
        let mut list = requests.scatter(counter, source.key());
        (0..2).for_each(|_| list.push(write));
        list.finish(last);
        peer.engine.submit(&mut requests).unwrap();
    }
    let mut events = Vec::new();
    peer.engine.poll(clock::now(), &mut events);
    let ended = |events: &[Event]| -> Vec<u64> {
        let tag = |event: &Event| match event {
            Event::Completed { tag } => Some(*tag),
            _ => None,
        };
        events.iter().filter_map(tag).collect()
    };
    assert_eq!(ended(&events), (1..last).collect::<Vec<_>>());
    let (each, mut buffer) = (2 * (12 + 16 + SMALL as usize), vec![0; 1 << 16]);
    peer.streams[0].set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // Without polls: the kernel has all of what has ended.
    for (bytes, polls) in [((last as usize - 1) * each, false), (each, true)] {
        let mut left = bytes;
        while left > 0 {
            let room = buffer.len().min(left);
            left -= peer.streams[0].read(&mut buffer[..room]).expect("all of it has left");
            if polls {
                peer.engine.poll(clock::now(), &mut events);
            }
        }
    }
    assert_eq!(ended(&events), (1..=last).collect::<Vec<_>>());
    assert_eq!(peer.engine.statistics().requests, 0);
}

/// More parts than the link's own queue takes.
#[test]
fn small_writes_that_waited_for_the_queue_end_when_the_kernel_has_all_of_them() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let page = page(&peer, &source);
    let counter = peer.counter;
    let mut write = |peer: &mut Handmade| peer.engine.write(Rank(1), counter, 0, &[page]).unwrap();
    let (_, parts) = fill(&mut peer, &mut write);
    let later: Vec<RequestId> = (0..QUEUED).map(|_| write(&mut peer)).collect();
    // The kernel may have made room for the first one meanwhile.
    assert!(!peer.engine.is_drained(later[QUEUED - 1]));
    read_all(&mut peer, later[QUEUED - 1], (parts + QUEUED) * (12 + 16 + SMALL as usize));
    assert!(later.iter().all(|&request| peer.engine.is_drained(request)));
}

/// The queue toward one peer is full; a write to another peer ends at once.
#[test]
fn a_peer_that_reads_late_holds_up_no_request_to_another() {
    let mut ends = linked(3, &TcpConfig { streams: 1, ..TcpConfig::default() }, 2000);
    let End { engine, counter, source, remotes, .. } = &mut ends[0];
    let mut write = |to: usize| {
        let page = Page {
            source: source.key(),
            source_offset: 0,
            destination: remotes[to].unwrap().key,
            destination_offset: 0,
            length: SMALL,
        };
        engine.write(Rank(to as u32), *counter, 0, &[page]).unwrap()
    };
    let mut last = write(1);
    for _ in 0..MANY {
        last = write(1);
    }
    let other = write(2);
    assert!(!engine.is_drained(last), "the queue is empty");
    assert!(engine.is_drained(other));
}

/// A barrier's signals lie behind small writes that a peer has not read yet.
#[test]
fn a_barrier_returns_when_the_kernel_has_its_signals() {
    let mut engines = connected(2, &TcpConfig { streams: 1, ..TcpConfig::default() });
    let barriers: Vec<_> = engines.iter_mut().map(|engine| engine.counter().unwrap()).collect();
    for rank in 0..2 {
        let grant = engines[1 - rank].grant(Rank(rank as u32), &[], &[barriers[1 - rank]]).unwrap();
        let owner = Rank(1 - rank as u32);
        engines[rank].import(owner, &grant, &[barriers[rank]], soon(1)).unwrap();
    }
    for (engine, &barrier) in engines.iter_mut().zip(&barriers) {
        engine.use_for_barriers(barrier);
    }
    let mut ends = link(engines, 2000);
    let [zero, one] = &mut ends[..] else { panic!() };
    let page = Page {
        source: zero.source.key(),
        source_offset: 0,
        destination: zero.remotes[1].unwrap().key,
        destination_offset: 0,
        length: SMALL,
    };
    // More than the kernel takes, now and as the buffers grow.
    let mut left_behind = 0;
    for _ in 0..MANY {
        let request = zero.engine.write(Rank(1), zero.counter, 0, &[page]).unwrap();
        left_behind += u32::from(!zero.engine.is_drained(request));
        if left_behind == 6000 {
            break;
        }
    }
    // Rank 1 enters and times out: the signal is at rank 0, and rank 1 has read no bytes.
    one.engine.signal(Rank(0), barriers[1], 0).unwrap();
    let mut waiter = WaitOptions {
        deadline: clock::now().after(Duration::from_millis(200)),
        spin: Duration::ZERO,
        interrupted: &mut || false,
    };
    let late = zero.engine.barrier(&mut waiter);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    std::thread::scope(|scope| {
        scope.spawn(|| waiting(|w| zero.engine.barrier(w)).unwrap());
        // It receives the signal whatever rank 0 does after returning.
        waiting(|w| one.engine.wait(barriers[1], &[(Rank(0), 1)], w)).unwrap();
    });
}

#[test]
fn a_credit_ends_when_the_kernel_has_it() {
    let mut peer = single_stream();
    let source = peer.engine.alloc(SMALL as usize).unwrap();
    let page = page(&peer, &source);
    let counter = peer.counter;
    // Rank 1 raises the lane once, for which the credit is due.
    let arrival = frame(peer.lane, &[], &[]);
    peer.streams[0].write_all(&arrival).unwrap();
    waiting(|w| peer.engine.wait(counter, &[(Rank(1), 1)], w)).unwrap();
    let (_, parts) =
        fill(&mut peer, |peer| peer.engine.write(Rank(1), counter, 0, &[page]).unwrap());
    let credit = peer.engine.credit_now(Rank(1), counter).unwrap();
    assert!(!peer.engine.is_drained(credit));
    read_all(&mut peer, credit, parts * (12 + 16 + SMALL as usize) + 12);
}
