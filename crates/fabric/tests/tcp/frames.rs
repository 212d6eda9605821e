//! Valid and invalid frames from a connected peer.

use crate::ends::{GENERATION, PROMPT, linked, waiting};
use crate::handmade::{Handmade, frame};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use weft_fabric::providers::TcpConfig;
use weft_fabric::{Cause, Error, Page, Rank, RegionKey, clock};

#[test]
fn a_frame_within_its_grant_lands_whole_however_it_is_cut() {
    let mut peer = Handmade::new();
    let (key, lane) = (peer.key(), peer.lane);
    let mut bytes = frame(lane, &[(key, 199, 1), (key, 100, 3)], &[9, 1, 2, 3]);
    bytes.extend(frame(lane, &[], &[]));
    bytes.extend(frame(lane, &[(key, 150, 2)], &[7, 8]));
    let stream = &mut peer.streams[1];
    stream.set_nodelay(true).unwrap();
    let (last, most) = bytes.split_last().unwrap();
    for byte in most {
        stream.write_all(&[*byte]).unwrap();
        let mut events = Vec::new();
        peer.engine.poll(clock::now(), &mut events);
    }
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 2)], w)).unwrap();
    assert_eq!(peer.engine.count(peer.counter, Rank(1)).unwrap(), 2);
    peer.streams[1].write_all(&[*last]).unwrap();
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 3)], w)).unwrap();
    let mut expected = vec![0; 300];
    (expected[199], expected[100], expected[101], expected[102]) = (9, 1, 2, 3);
    (expected[150], expected[151]) = (7, 8);
    assert_eq!(peer.bytes(), expected);
}

#[test]
fn what_was_not_granted_is_refused_before_memory_is_touched() {
    let payload = [0xee; 100];
    type Malformed = fn(u32, u32, &[u8]) -> Vec<u8>;
    let malformed: [(&str, Malformed); 9] = [
        ("one byte before", |key, lane, p| frame(lane, &[(key, 99, 100)], p)),
        ("one byte behind", |key, lane, p| frame(lane, &[(key, 101, 100)], p)),
        ("the second page outside", |key, lane, p| {
            frame(lane, &[(key, 100, 50), (key, 160, 50)], p)
        }),
        ("an end that overflows", |key, lane, p| frame(lane, &[(key, u64::MAX - 5, 100)], p)),
        ("another region", |key, lane, p| frame(lane, &[(key + 1, 100, 100)], p)),
        ("a payload that its pages lack", |key, lane, p| frame(lane, &[(key, 100, 99)], p)),
        ("too many pages", |key, lane, _| frame(lane, &[(key, 100, 0); 257], &[])),
        ("too long", |key, lane, _| {
            let mut bytes = frame(lane, &[(key, 100, u32::MAX)], &[]);
            bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes
        }),
        ("garbage", |_, _, p| p.to_vec()),
    ];
    for (what, malformed) in malformed {
        let mut peer = Handmade::new();
        let bytes = malformed(peer.key(), peer.lane, &payload);
        peer.streams[0].write_all(&bytes).unwrap();
        let (cause, after) = peer.poisoned();
        assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))), "{what}");
        assert!(cause.detail.contains("protocol violation"), "{what}: {}", cause.detail);
        assert!(after < PROMPT, "{what}: {after:?}");
        assert_eq!(peer.bytes(), vec![0; 300], "{what}");
        assert_eq!(peer.counters.refused_frames.load(Ordering::Relaxed), 1, "{what}");
        // Both connections are closed.
        for stream in &mut peer.streams {
            assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "{what}");
        }
    }
}

#[test]
fn an_ungranted_lane_is_dropped_and_the_group_goes_on() {
    let mut peer = Handmade::new();
    let mut bytes = frame(peer.lane ^ 0xff, &[], &[]);
    bytes.extend(frame(0x00ff_ff00 | u32::from(GENERATION.0), &[], &[]));
    bytes.extend(frame(peer.lane, &[], &[]));
    peer.streams[0].write_all(&bytes).unwrap();
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 1)], w)).unwrap();
    let statistics = peer.engine.statistics();
    assert_eq!((statistics.refused_stale, statistics.refused_ungranted), (1, 1));
}

#[test]
fn a_lane_that_was_granted_to_another_rank_is_dropped_and_the_group_goes_on() {
    let mut peer = Handmade::among(3, TcpConfig::default());
    let granted = peer.engine.grant(Rank(2), &[], &[peer.counter]).unwrap();
    let mut bytes = frame(granted.counters[0].data.immediate(), &[], &[]);
    bytes.extend(frame(peer.lane, &[], &[]));
    peer.streams[0].write_all(&bytes).unwrap();
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 1)], w)).unwrap();
    assert_eq!(peer.engine.count(peer.counter, Rank(2)).unwrap(), 0);
    assert_eq!(peer.engine.statistics().refused_ungranted, 1);
}

#[test]
fn a_write_beyond_the_grant_is_refused_by_the_writer_itself() {
    let mut ends = linked(2, &TcpConfig::default(), 4096);
    let end = &mut ends[0];
    // Within the region, so the engine accepts it; outside what rank 1 granted to rank 0.
    let page = Page {
        source: RegionKey(end.source.key().0),
        source_offset: 0,
        destination: end.remotes[1].unwrap().key,
        destination_offset: 4096,
        length: 8,
    };
    end.engine.write(Rank(1), end.counter, 0, &[page]).unwrap();
    let Err(Error::Poisoned(cause)) = end.engine.check() else { panic!("not refused") };
    assert!(cause.detail.contains("outside of the granted ranges"), "{}", cause.detail);
}

static LINES: AtomicU64 = AtomicU64::new(0);

/// Counts the log lines about one lane that other tests do not use.
struct Counting;

impl log::Log for Counting {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains("lane 11259375") {
            LINES.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

/// A peer raises a lane that nobody was granted 100,000 times, between valid raises: the valid ones all
/// count, the others are counted and rarely logged.
#[test]
fn a_flood_of_forged_lanes_disturbs_nothing_and_fills_no_log() {
    const FORGED: u64 = 100_000;
    log::set_logger(&Counting).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let mut peer = Handmade::new();
    let forged = frame(0x00ab_cdef << 8 | u32::from(GENERATION.0), &[], &[]);
    let (stop_at, right) = (FORGED / 1000, frame(peer.lane, &[(peer.key(), 150, 1)], &[7]));
    let mut stream = peer.streams[0].try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..stop_at {
                stream.write_all(&forged.repeat(1000)).unwrap();
                stream.write_all(&right).unwrap();
            }
        });
        waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), stop_at)], w)).unwrap();
    });
    assert_eq!(peer.engine.statistics().refused_ungranted, FORGED);
    assert_eq!(peer.bytes().iter().filter(|byte| **byte != 0).count(), 1);
    let lines = LINES.load(Ordering::Relaxed);
    assert!((1..=20).contains(&lines), "{lines} lines");
}
