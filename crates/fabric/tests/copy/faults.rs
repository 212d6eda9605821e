//! Failed copies, fenced peers, and engines that are dropped with copies in flight.

use crate::common::{AllGather, Member, MemberDevices, PATIENCE, on_threads, waiting};
use crate::ends::{DEVICE, HOST, Pair, bytes, controlled, copy, fill};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use weft_fabric::link::PostStatus;
use weft_fabric::providers::copy::TwinControls;
use weft_fabric::{Device, Error, Page, Rank};

#[test]
fn a_copy_that_is_refused_fails_its_part_and_raises_nothing() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(1, &controls), copy(2));
    controls.refuse_copies.store(true, SeqCst);
    let why = pair.post(1, 0, &[(HOST, HOST, 0), (DEVICE, DEVICE, 0)]).unwrap_err();
    assert!(why.contains("refuse"), "{why}");
    // A part beyond the region fails once the started copies are complete, and not before.
    controls.refuse_copies.store(false, SeqCst);
    controls.pause.store(true, SeqCst);
    let beyond = u64::MAX - 50;
    assert_eq!(
        pair.post(2, 0, &[(DEVICE, DEVICE, 0), (DEVICE, HOST, beyond)]),
        Ok(PostStatus::InFlight)
    );
    pair.flush();
    (0..100).for_each(|_| pair.poll());
    assert_eq!(pair.ended_parts(), 0);
    controls.pause.store(false, SeqCst);
    let ended = pair.ended(1);
    assert!(matches!(&ended[..], [(2, Some(why))] if why.contains("bounds")), "{ended:?}");
    assert_eq!(pair.raised(0), 0);
}

#[test]
fn copies_that_fail_under_way_fail_every_part_of_their_batch() {
    let controls = Arc::new(TwinControls::default());
    let mut pair = Pair::of(controlled(1, &controls), copy(2));
    controls.fail_events.store(true, SeqCst);
    for token in 0..3 {
        assert_eq!(pair.post(token, 0, &[(DEVICE, DEVICE, 0)]), Ok(PostStatus::InFlight));
    }
    let ended = pair.ended(3);
    assert!(ended.len() == 3 && ended.iter().all(|(_, why)| why.is_some()), "{ended:?}");
    assert_eq!(pair.raised(0), 0);
}

#[test]
fn after_a_fence_no_byte_is_written_and_every_part_has_ended() {
    for seed in 0..50 {
        let controls = Arc::new(TwinControls::default());
        let mut pair = Pair::of(controlled(seed, &controls), copy(2));
        fill(&pair.sources[0], 7);
        for token in 0..5 {
            pair.post(token, 0, &[(DEVICE, DEVICE, 200 * token), (DEVICE, HOST, 0)]).unwrap();
        }
        pair.flush();
        pair.writer.fence(Rank(1), &mut pair.sink);
        let mut tokens: Vec<u64> = pair.ended(5).into_iter().map(|(token, _)| token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4]);
        let inbox = pair.inboxes[0].clone();
        fill(&inbox, 1);
        (0..100).for_each(|_| pair.poll());
        assert_eq!(bytes(&inbox, 0), [1; 100]);
        assert_eq!(controls.live_handles.load(SeqCst), 0);
        assert!(pair.post(9, 0, &[]).is_err());
    }
}

#[test]
fn a_fence_does_not_wait_for_ever_for_a_device_that_is_stuck() {
    let controls = Arc::new(TwinControls::default());
    let writer = controlled(1, &controls).with_limits(100, Duration::from_millis(50));
    let mut pair = Pair::of(writer, copy(2));
    controls.pause.store(true, SeqCst);
    pair.post(1, 0, &[(DEVICE, DEVICE, 0)]).unwrap();
    let begin = Instant::now();
    pair.writer.fence(Rank(1), &mut pair.sink);
    assert!(begin.elapsed() < PATIENCE);
    assert_eq!((pair.sink.completed.len(), pair.sink.failures.len()), (0, 1));
    // Memory that the stuck device may still access stays mapped after the last handle.
    let address = pair.sources[0].address();
    drop(pair);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains(&format!("{address:x}-")), "the source was unmapped");
}

fn waited<T>(f: impl FnOnce(&mut weft_fabric::WaitOptions<'_>) -> T) -> T {
    waiting(PATIENCE, Duration::ZERO, f)
}

fn whole(member: &Member, peer: Rank, length: usize) -> Page {
    Page {
        source: member.source.key(),
        source_offset: 0,
        destination: member.remotes[&peer].key,
        destination_offset: 0,
        length: length as u64,
    }
}

const ON_DEVICES: MemberDevices = MemberDevices { source: Some(0), inbox: Some(1) };

#[test]
fn a_device_that_fails_poisons_the_group_and_drains_its_requests() {
    let failing = |rank: Rank, gather: &mut AllGather<'_>, controls: &Arc<TwinControls>| {
        let device = controlled(1, controls);
        let devices: [Arc<dyn Device>; 1] = [Arc::new(device)];
        Member::join_on(ON_DEVICES, rank, 2, &devices, gather)
    };
    on_threads(2, |rank, gather| {
        let controls = Arc::new(TwinControls::default());
        let mut member = failing(rank, gather, &controls);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        if rank == Rank(0) {
            controls.fail_events.store(true, SeqCst);
            let page = whole(&member, peer, 10_000);
            let request = member.engine.write(peer, counter, 0, &[page]).unwrap();
            let error = waited(|waiter| member.engine.wait(counter, &[(peer, 1)], waiter));
            assert!(matches!(error, Err(Error::Poisoned(_))), "{error:?}");
            assert!(member.engine.is_drained(request));
            assert!(error.unwrap_err().to_string().contains("fails events"));
            let error = waited(|waiter| member.engine.wait_for_request(request, waiter));
            assert!(matches!(error, Err(Error::Poisoned(_))), "{error:?}");
        }
        gather(Vec::new());
    });
}
