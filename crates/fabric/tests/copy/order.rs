//! Lane and copy order, event sharing, and the bound on copies in flight.

use crate::ends::{DEVICE, HOST, Pair, bytes, controlled, copy, fill};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use weft_fabric::link::PostStatus;
use weft_fabric::providers::copy::TwinControls;
use weft_fabric::{Rank, RegionKey};

#[test]
fn a_lane_rises_only_when_every_byte_is_there() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(1, &controls), copy(2));
    fill(&pair.sources[0], 7);
    for (from, to) in [(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE)] {
        let (value, inbox) =
            (if from == DEVICE { 7 } else { 0 }, pair.inboxes[to as usize].clone());
        fill(&inbox, 1);
        let before = pair.raised(0);
        controls.pause.store(true, SeqCst);
        assert_eq!(pair.post(5, 0, &[(from, to, 0), (from, to, 900)]), Ok(PostStatus::InFlight));
        pair.flush();
        (0..100).for_each(|_| pair.poll());
        assert_eq!((pair.raised(0), pair.ended_parts()), (before, 0));
        controls.pause.store(false, SeqCst);
        while pair.raised(0) == before {
            pair.poll();
        }
        assert_eq!(bytes(&inbox, 0), [value; 100]);
        assert_eq!(bytes(&inbox, 900), [value; 100]);
        assert_eq!(pair.ended(1), [(5, None)]);
        assert_eq!(pair.raised(0), before + 1);
    }
}

#[test]
fn signals_and_host_pages_do_not_wait_for_copies() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(1, &controls), copy(2));
    controls.pause.store(true, SeqCst);
    fill(&pair.sources[1], 9);
    assert_eq!(pair.post(1, 0, &[(DEVICE, DEVICE, 0)]), Ok(PostStatus::InFlight));
    assert_eq!(pair.post(2, 1, &[]), Ok(PostStatus::Done));
    assert_eq!(pair.post(3, 0, &[(HOST, HOST, 300)]), Ok(PostStatus::Done));
    assert_eq!((pair.raised(0), pair.raised(1)), (1, 1));
    assert_eq!(bytes(&pair.inboxes[1], 300), [9; 100]);
    controls.pause.store(false, SeqCst);
    assert_eq!(pair.ended(1), [(1, None)]);
    assert_eq!((pair.raised(0), pair.raised(1)), (2, 1));
}

#[test]
fn what_is_posted_between_two_flushes_shares_a_mark() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(3, &controls), copy(2));
    for token in 0..50 {
        assert_eq!(pair.post(token, 2, &[(DEVICE, DEVICE, token)]), Ok(PostStatus::InFlight));
    }
    assert_eq!(controls.events.load(SeqCst), 0);
    pair.flush();
    pair.flush();
    assert_eq!(controls.events.load(SeqCst), 1);
    assert_eq!(pair.ended(50).len(), 50);
    assert_eq!((pair.raised(2), controls.events.load(SeqCst)), (50, 1));
    // The queue toward the peer stays, the event is released.
    assert_eq!(controls.live_handles.load(SeqCst), 1);
}

#[test]
fn a_full_queue_takes_nothing_until_copies_are_over() {
    let controls = Arc::new(TwinControls::default());
    let writer = controlled(4, &controls).with_limits(3, Duration::from_secs(5));
    let mut pair = Pair::of(writer, copy(2));
    controls.pause.store(true, SeqCst);
    let page = (DEVICE, DEVICE, 0);
    assert_eq!(pair.post(1, 0, &[page; 2]), Ok(PostStatus::InFlight));
    assert_eq!(pair.post(2, 0, &[page; 2]), Ok(PostStatus::Full));
    assert_eq!(pair.post(3, 0, &[page]), Ok(PostStatus::InFlight));
    assert_eq!(pair.post(4, 0, &[page]), Ok(PostStatus::Full));
    // Posts without copies have room.
    assert_eq!(pair.post(5, 0, &[]), Ok(PostStatus::Done));
    controls.pause.store(false, SeqCst);
    assert_eq!(pair.ended(2).len(), 2);
    // A post above the limit is accepted by an empty queue.
    assert_eq!(pair.post(6, 0, &[page; 9]), Ok(PostStatus::InFlight));
    assert_eq!(pair.post(7, 0, &[page]), Ok(PostStatus::Full));
    assert_eq!(pair.ended(1), [(6, None)]);
    assert_eq!(pair.raised(0), 4);
}

#[test]
fn host_memory_is_pinned_at_its_first_copy_and_until_it_is_forgotten() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(1, &controls), copy(2));
    let held = || controls.live_handles.load(SeqCst);
    assert_eq!(pair.post(1, 0, &[(HOST, HOST, 0)]), Ok(PostStatus::Done));
    assert_eq!(held(), 0);
    for (from, to, more) in [(HOST, DEVICE, 1), (DEVICE, HOST, 2), (HOST, DEVICE, 2)] {
        assert_eq!(pair.post(1, 0, &[(from, to, 0); 3]), Ok(PostStatus::InFlight));
        assert_eq!(pair.ended(1), [(1, None)]);
        // And the one queue.
        assert_eq!(held(), more + 1);
    }
    pair.writer.deregister(RegionKey(HOST));
    assert_eq!(held(), 2);
    pair.writer.remove_remote(Rank(1), RegionKey(HOST));
    assert_eq!(held(), 1);
    drop(pair);
    assert_eq!(held(), 0);
}
