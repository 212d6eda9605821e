//! Traffic classes: queued bulk parts delay no latency-critical part.

use crate::ends::soon;
use crate::handmade::{Handmade, frame};
use std::io::Read;
use std::time::Duration;
use weft_fabric::providers::TcpConfig;
use weft_fabric::{CounterConfig, Page, Rank, RequestId, TrafficClass, clock};

const BULK: u64 = 64 << 20;

/// Rank 0, a rank 1 that reads only on request, a bulk counter between the two, and a 64 MiB write in
/// flight on it.
fn with_bulk_under_way(config: TcpConfig) -> (Handmade, RequestId) {
    let mut peer = Handmade::with(config);
    let shape = CounterConfig { class: TrafficClass::Bulk, ..CounterConfig::default() };
    let bulk = peer.engine.counter_with(shape).unwrap();
    let grant = peer.engine.grant(Rank(1), &[], &[bulk]).unwrap();
    peer.engine.import(Rank(1), &grant, &[bulk], soon(1)).unwrap();
    let source = peer.engine.alloc(BULK as usize).unwrap();
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length: BULK,
    };
    let request = peer.engine.write(Rank(1), bulk, 0, &[page]).unwrap();
    (peer, request)
}

/// Every byte in a latency-critical write arrives on the first stream while rank 1 reads no bulk bytes on
/// the second.
fn small_write_passes(mut peer: Handmade, bulk: RequestId, number: u64) {
    let source = peer.engine.alloc(8).unwrap();
    source.memory().copy_in(0, &number.to_le_bytes());
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 8 * number,
        length: 8,
    };
    let expected = frame(peer.lane, &[(page.destination.0, 8 * number, 8)], &number.to_le_bytes());
    // As many bulk bytes as the kernel accepts leave first.
    for _ in 0..100 {
        peer.engine.poll(clock::now(), &mut Vec::new());
    }
    assert!(!peer.engine.is_drained(bulk));
    let request = peer.engine.write(Rank(1), peer.counter, 0, &[page]).unwrap();
    for _ in 0..100 {
        peer.engine.poll(clock::now(), &mut Vec::new());
    }
    let mut seen = vec![0; expected.len()];
    peer.streams[0].set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    peer.streams[0].read_exact(&mut seen).expect("the small write waits behind the bulk");
    assert_eq!(seen, expected);
    assert!(peer.engine.is_drained(request) && !peer.engine.is_drained(bulk));
    peer.engine.check().unwrap();
}

#[test]
fn a_small_write_arrives_while_bulk_is_under_way() {
    let (peer, bulk) = with_bulk_under_way(TcpConfig::default());
    small_write_passes(peer, bulk, 3);
}

#[test]
fn a_small_write_arrives_although_the_queue_is_full_of_bulk() {
    let full = [
        TcpConfig { queue_bytes: 4 << 20, ..TcpConfig::default() },
        TcpConfig { queue_parts: 2, ..TcpConfig::default() },
    ];
    for config in full {
        let (peer, bulk) = with_bulk_under_way(config);
        small_write_passes(peer, bulk, 4);
    }
}
