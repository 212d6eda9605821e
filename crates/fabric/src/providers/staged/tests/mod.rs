//! Two wrapped links without engines: when lanes rise and slots are free, garbage in slots, fences, losses.

mod automatic;
mod counted;
mod ends;
mod idle;

use self::ends::{
    BYTES, End, Ends, GPU, GRANTED, HOST, PATIENCE, SLOTS, check_page, page, shm, tcp, value,
};
use super::link::{CONTROL_SLOT, StagedLink, own_token};
use super::wire::{Header, turn_word};
use super::{StagedConfig, StagedDevice, StagedMode};
use crate::clock;
use crate::device::Device;
use crate::lane_table::LaneTable;
use crate::link::{Link, Membership, PostStatus, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::providers::{TcpConfig, TcpDevice};
use crate::random::SplitMix64;
use crate::types::{Generation, Lane, LaneId, Page, RegionKey, TrafficClass};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use weft_control::Rank;

/// Lane that no table has.
const NO_LANE: Lane = Lane::from_immediate(u32::MAX);

#[test]
fn engines_that_are_opened_later_use_no_kernels_either() {
    let mut end = End::new(tcp(), 0, PATIENCE);
    end.link.use_copy_engines_only();
    assert_eq!(end.controls.engines_only.load(SeqCst), 0);
    end.register();
    assert_eq!(end.controls.engines_only.load(SeqCst), 1);
    end.link.use_copy_engines_only();
    assert_eq!(end.controls.engines_only.load(SeqCst), 2);
}

#[test]
fn a_lane_rises_once_every_byte_is_copied_and_not_before() {
    for inner in [tcp, shm] {
        let mut ends = Ends::over(inner, PATIENCE);
        for (turn, (from, to)) in (0..).zip([(GPU, GPU), (GPU, HOST), (HOST, GPU)]) {
            let (one, two) = (400 * turn, 400 * turn + 150);
            let paused = if to == GPU { &ends.owner } else { &ends.writer };
            paused.pause(true);
            assert_eq!(
                ends.post(turn, &[(from, to, one), (from, to, two)]),
                Ok(PostStatus::InFlight)
            );
            ends.settle();
            assert_eq!(ends.raised(), turn);
            [&ends.owner, &ends.writer].iter().for_each(|end| end.pause(false));
            ends.until("the raise", |ends| ends.raised() > turn);
            check_page(&ends, to, one);
            check_page(&ends, to, two);
            ends.until("the end", |ends| ends.ended() == (turn as usize + 1, 0));
        }
        assert_eq!(ends.writer.counters.staged_parts.load(SeqCst), 3);
        assert_eq!((ends.raised(), ends.refused()), (3, 0));
    }
}

#[test]
fn a_slot_is_filled_again_only_after_the_receiver_has_copied_out_of_it() {
    for inner in [tcp, shm] {
        let mut ends = Ends::over(inner, PATIENCE);
        ends.owner.pause(true);
        // Bulk parts leave a slot to others.
        for turn in 0..SLOTS - 1 {
            let posted = ends.post_as(TrafficClass::Bulk, turn, &[(GPU, GPU, 100 * turn)]);
            assert_eq!(posted, Ok(PostStatus::InFlight));
        }
        let posted = ends.post_as(TrafficClass::Bulk, 9, &[(GPU, GPU, 0)]);
        assert_eq!(posted, Ok(PostStatus::Full));
        assert_eq!(
            ends.post(SLOTS - 1, &[(GPU, GPU, 100 * SLOTS - 100)]),
            Ok(PostStatus::InFlight)
        );
        ends.settle();
        assert_eq!(ends.post(9, &[(GPU, GPU, 0)]), Ok(PostStatus::Full));
        // Host memory takes no slot.
        assert!(matches!(ends.post(9, &[(HOST, HOST, 0)]), Ok(PostStatus::Done)));
        ends.until("a part in host memory", |ends| ends.raised() == 1);
        ends.owner.pause(false);
        ends.until("all raises", |ends| ends.raised() == 1 + SLOTS);
        (0..SLOTS).for_each(|turn| check_page(&ends, GPU, 100 * turn));
        // Many rounds over the same slots.
        let mut posted = SLOTS;
        let deadline = clock::now().after(PATIENCE);
        while posted < 70 {
            match ends.post(posted, &[(GPU, GPU, 100 * posted)]).unwrap() {
                PostStatus::InFlight => posted += 1,
                _ => ends.step(),
            }
            assert!(clock::now() < deadline, "a slot is lost after {posted} parts");
        }
        ends.until("all raises", |ends| ends.raised() == 1 + posted);
        (0..posted).for_each(|turn| check_page(&ends, GPU, 100 * turn));
        ends.until("all ends", |ends| ends.ended() == (posted as usize, 0));
    }
}

#[test]
fn host_memory_passes_through_without_a_slot() {
    let mut ends = Ends::over(tcp, PATIENCE);
    for at in 0..20 {
        ends.post(at, &[(HOST, HOST, 100 * at), (HOST, HOST, 4000)]).unwrap();
    }
    ends.post(30, &[]).unwrap();
    ends.until("all raises", |ends| ends.raised() == 21);
    (0..20).for_each(|at| check_page(&ends, HOST, 100 * at));
    assert_eq!(ends.writer.counters.staged_parts.load(SeqCst), 0);
    for end in [&ends.writer, &ends.owner] {
        assert_eq!(
            (end.controls.events.load(SeqCst), end.controls.live_handles.load(SeqCst)),
            (0, 0)
        );
    }
    // One page in a GPU takes the part's other pages along.
    ends.post(31, &[(HOST, HOST, 5000), (HOST, GPU, 6000)]).unwrap();
    ends.until("the last raise", |ends| ends.raised() == 22);
    check_page(&ends, HOST, 5000);
    check_page(&ends, GPU, 6000);
    assert_eq!(ends.writer.counters.staged_parts.load(SeqCst), 1);
}

#[test]
fn a_part_outside_the_grant_or_the_source_is_refused_where_it_is_posted() {
    let mut ends = Ends::over(tcp, PATIENCE);
    for (from, to, at) in
        [(GPU, GPU, GRANTED), (GPU, GPU, u64::MAX - 50), (GPU, 5, 0), (GPU, HOST, 7950)]
    {
        let why = ends.post(1, &[(from, to, at)]).unwrap_err();
        assert!(why.contains("region") || why.contains("overflow"), "{why}");
    }
    let beyond = [Page { source_offset: BYTES as u64 - 50, ..page(GPU, GPU, 0) }];
    let work = ends.work(1, TrafficClass::Latency, &beyond);
    assert!(ends.writer.link.post(&work, &mut Sink::default()).is_err());
    assert_eq!(ends.writer.counters.staged_parts.load(SeqCst), 0);
}

/// Posts a valid part and replaces the header in the slot before it leaves.
fn forge(ends: &mut Ends, random: &mut SplitMix64) {
    assert_eq!(ends.post(1, &[(HOST, GPU, 100), (HOST, HOST, 300)]), Ok(PostStatus::InFlight));
    let peer = ends.writer.link.peers.get(Rank(1)).unwrap();
    let begin = peer.shape.bytes() as usize;
    let (lane, other) = (ends.lane, ends.other);
    let mut pages = vec![page(HOST, GPU, 100), page(HOST, HOST, 300)];
    let mut header = Vec::new();
    let (mut lane_in_it, mut turn) = (lane, turn_word(0));
    let at = random.below(2) as usize;
    match random.below(8) {
        0 => pages[at].destination = RegionKey(random.below(5) as u32),
        1 => pages[at].destination = RegionKey(random.bits() as u32),
        2 => pages[at].destination_offset = GRANTED - 100 + random.below(300),
        3 => pages[at].destination_offset = random.bits(),
        4 => {
            pages[at].length = [0, 5000, random.bits() as u32 as u64][random.below(3) as usize];
        }
        5 => turn = random.below(3) as u32,
        6 => {
            lane_in_it = [other, NO_LANE, Lane::from_immediate(random.bits() as u32)]
                [random.below(3) as usize]
        }
        _ => {}
    }
    Header::put(&mut header, lane_in_it, turn, &pages);
    // Random bytes, in the whole header or in one place.
    match random.below(8) {
        0 => header.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        1 => {
            let place = random.below(header.len() as u64) as usize;
            header[place] = random.bits() as u8;
        }
        _ => {}
    }
    peer.memory.as_ref().unwrap().copy_in(begin, &header);
}

#[test]
fn garbage_in_a_slot_writes_nothing_outside_the_grant_and_costs_the_connection() {
    let (mut refused, mut dropped, mut accepted) = (0, 0, 0);
    for seed in 0..150 {
        let mut ends = Ends::over(tcp, PATIENCE);
        let mut random = SplitMix64::new(seed);
        [GPU, HOST].iter().for_each(|&key| ends.owner.bytes(key).fill(0));
        forge(&mut ends, &mut random);
        let counts = |ends: &Ends| {
            let drops = ends.owner.lanes.dropped();
            (ends.raised(), drops.ungranted.load(SeqCst) + drops.stale.load(SeqCst), ends.refused())
        };
        ends.until("an outcome", |ends| counts(ends) != (0, 0, 0) || all_lanes(ends) > 0);
        let outcome = counts(&ends);
        for key in [GPU, HOST] {
            let bytes = ends.owner.bytes(key);
            let outside = &bytes[GRANTED as usize..];
            assert!(outside.iter().all(|byte| *byte == 0), "seed {seed}: bytes outside the grant");
            if outcome.2 > 0 {
                assert!(
                    bytes.iter().all(|byte| *byte == 0),
                    "seed {seed}: a refused part left bytes"
                );
            }
        }
        assert_eq!(ends.owner.lanes.value(ends.other.id()), 0, "seed {seed}: another rank's lane");
        if outcome.2 > 0 {
            ends.owner.poll();
            let lost = &ends.owner.sink.lost;
            assert!(
                lost.iter().any(|(rank, why)| *rank == Rank(0) && why.contains("violation")),
                "{lost:?}"
            );
            assert_eq!(outcome.0, 0);
        }
        refused += outcome.2;
        dropped += outcome.1;
        accepted += outcome.0;
    }
    assert!(refused > 20 && dropped > 2 && accepted > 20, "{refused} {dropped} {accepted}");
}

/// Raises by the forged lane, which may be any that the writer holds: the wrapper's, too.
fn all_lanes(ends: &Ends) -> u64 {
    let ours = ends.owner.link.peers.get(Rank(0)).map(|peer| peer.ours);
    let ours = ours.into_iter().flat_map(|lanes| [lanes.freed(), lanes.left()]);
    let beside = LaneId::new(ends.lane.id().get() + 1).unwrap();
    let all = ours.map(|lane| lane.id()).chain([beside]);
    all.map(|lane| ends.owner.lanes.value(lane)).sum()
}

#[test]
fn raises_without_a_part_cost_the_connection() {
    // A slot that was not filled, one that is filled twice, slots freed that were not filled.
    for case in 0..3 {
        let mut ends = Ends::over(tcp, PATIENCE);
        let theirs = ends.writer.link.peers.get(Rank(1)).unwrap().theirs;
        if case == 2 {
            // The owner counts slots only while it has parts.
            let grant = ends.writer.link.grant(RegionKey(GPU), Rank(1), 0..GRANTED).unwrap();
            let mut limit =
                WaitLimit { deadline: clock::now().after(PATIENCE), give_up: &mut || Ok(()) };
            ends.owner
                .link
                .import(Rank(0), RegionKey(GPU), BYTES as u64, &grant, &mut limit)
                .unwrap();
            let pages = [page(GPU, GPU, 0)];
            let work = WorkRequest { peer: Rank(0), ..ends.work(1, TrafficClass::Latency, &pages) };
            ends.owner.pause(true);
            ends.owner.link.post(&work, &mut Sink::default()).unwrap();
        }
        let lanes = [vec![theirs.filled(1)], vec![theirs.filled(0); 2], vec![theirs.freed()]];
        for &lane in &lanes[case] {
            let work = WorkRequest { lane, ..ends.work(0, TrafficClass::Latency, &[]) };
            ends.writer.link.inner.as_mut().unwrap().post(&work, &mut Sink::default()).unwrap();
        }
        ends.until("the refusal", |ends| ends.refused() == 1);
        ends.until("the loss", |ends| !ends.owner.sink.lost.is_empty());
        ends.settle();
        assert_eq!((ends.refused(), ends.raised()), (1, 0), "case {case}");
        ends.owner.pause(false);
    }
}

#[test]
fn a_slot_that_is_raised_again_without_a_new_header_is_refused() {
    let mut ends = Ends::over(tcp, PATIENCE);
    ends.post(1, &[(GPU, GPU, 0)]).unwrap();
    ends.until("the part", |ends| ends.raised() == 1);
    ends.owner.bytes(GPU).fill(0);
    let theirs = ends.writer.link.peers.get(Rank(1)).unwrap().theirs;
    let again = WorkRequest { lane: theirs.filled(0), ..ends.work(0, TrafficClass::Latency, &[]) };
    ends.writer.link.inner.as_mut().unwrap().post(&again, &mut Sink::default()).unwrap();
    ends.until("an outcome", |ends| ends.refused() == 1 || ends.raised() > 1);
    assert_eq!((ends.refused(), ends.raised()), (1, 1));
    assert!(ends.owner.bytes(GPU).iter().all(|byte| *byte == 0));
}

/// A second agent would overwrite the sender's raises.
#[test]
fn only_the_sender_raises_a_lane_that_it_raises_by_stores() {
    let mut ends = Ends::over(shm, PATIENCE);
    ends.owner.pause(true);
    ends.post(1, &[(GPU, GPU, 0)]).unwrap();
    let is_copying = |ends: &Ends| ends.owner.link.peers.get(Rank(0)).unwrap().has_incoming();
    ends.until("the part", is_copying);
    ends.owner.pause(false);
    while is_copying(&ends) {
        ends.owner.poll();
    }
    assert_eq!((ends.raised(), ends.ended()), (0, (0, 0)));
    ends.writer.poll();
    assert_eq!((ends.raised(), ends.ended()), (1, (1, 0)));
}

#[test]
fn copies_are_complete_before_the_loss_of_a_peer_is_reported() {
    let mut ends = Ends::over(tcp, PATIENCE);
    ends.owner.pause(true);
    ends.post(1, &[(GPU, GPU, 0)]).unwrap();
    ends.until("the part", |ends| ends.owner.link.peers.get(Rank(0)).unwrap().has_incoming());
    let Ends { writer, mut owner, lane, other } = ends;
    drop(writer);
    for _ in 0..1000 {
        owner.poll();
        std::thread::sleep(Duration::from_micros(500));
    }
    assert!(owner.sink.lost.is_empty() && owner.lanes.value(lane.id()) == 0);
    owner.pause(false);
    let deadline = clock::now().after(PATIENCE);
    while owner.sink.lost.is_empty() {
        assert!(clock::now() < deadline, "the loss is not reported");
        owner.poll();
    }
    assert_eq!((owner.lanes.value(lane.id()), owner.lanes.value(other.id())), (1, 0));
    assert!(owner.bytes(GPU)[..100].iter().enumerate().all(|(at, byte)| *byte == value(at)));
}

#[test]
fn a_copy_that_fails_raises_nothing() {
    // A copy into a slot fails the part; a copy out of one loses the peer.
    let mut ends = Ends::over(tcp, PATIENCE);
    ends.writer.controls.refuse_copies.store(true, SeqCst);
    assert!(ends.post(1, &[(GPU, GPU, 0)]).unwrap_err().contains("refuses"));
    ends.writer.controls.refuse_copies.store(false, SeqCst);
    ends.writer.controls.fail_events.store(true, SeqCst);
    assert_eq!(ends.post(2, &[(GPU, GPU, 0)]), Ok(PostStatus::InFlight));
    ends.until("the failure", |ends| ends.ended() == (0, 1));
    assert_eq!(ends.raised(), 0);

    let mut ends = Ends::over(tcp, PATIENCE);
    ends.owner.controls.fail_events.store(true, SeqCst);
    ends.post(3, &[(GPU, GPU, 0)]).unwrap();
    ends.until("the loss", |ends| !ends.owner.sink.lost.is_empty());
    assert!(ends.owner.sink.lost[0].1.contains("fails events"));
    assert_eq!((ends.raised(), ends.refused()), (0, 0));
}

#[test]
fn a_peer_that_cannot_be_told_of_freed_slots_is_lost() {
    let mut ends = Ends::over(tcp, PATIENCE);
    ends.owner.link.events.failed(own_token(CONTROL_SLOT, Rank(0)), "the queue failed");
    ends.owner.poll();
    assert_eq!(ends.owner.sink.lost, [(Rank(0), "the queue failed".to_owned())]);
    assert!(ends.owner.sink.failures.is_empty());
}

#[test]
fn a_fence_ends_every_part_once_and_keeps_memory_that_a_stuck_device_may_touch() {
    for stuck in [false, true] {
        let limit = if stuck { Duration::from_millis(50) } else { PATIENCE };
        let mut ends = Ends::over(tcp, limit);
        ends.owner.pause(stuck);
        for token in 0..3 {
            ends.post(token, &[(GPU, GPU, 100 * token)]).unwrap();
        }
        ends.until("a part", |ends| {
            ends.owner.link.peers.get(Rank(0)).unwrap().has_incoming() || ends.raised() > 0
        });
        ends.writer.pause(stuck);
        ends.post(3, &[(GPU, GPU, 300)]).unwrap();
        ends.writer.link.fence(Rank(1), &mut ends.writer.sink);
        ends.owner.link.fence(Rank(0), &mut ends.owner.sink);
        let Sink { completed, failures, .. } = &ends.writer.sink;
        let failed = failures.iter().map(|(token, _)| token);
        let mut tokens: Vec<u64> = completed.iter().chain(failed).copied().collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3]);
        assert!(ends.post(9, &[(GPU, GPU, 0)]).is_err());
        let raised = ends.raised();
        ends.owner.bytes(GPU).fill(0);
        ends.settle();
        assert_eq!((ends.raised(), ends.ended().0 + ends.ended().1), (raised, 4));
        assert!(stuck || ends.owner.bytes(GPU).iter().all(|byte| *byte == 0));
        let Ends { writer, owner, .. } = ends;
        for End { link, regions, controls, .. } in [writer, owner] {
            drop(link);
            assert_eq!(Arc::strong_count(&regions[GPU as usize]) > 1, stuck);
            assert!(stuck || controls.live_handles.load(SeqCst) == 0);
        }
    }
}

#[test]
fn a_region_that_is_released_under_a_write_is_kept_until_the_copy_is_over() {
    let mut ends = Ends::over(tcp, PATIENCE);
    ends.owner.pause(true);
    ends.post(1, &[(GPU, GPU, 0)]).unwrap();
    ends.until("the part", |ends| ends.owner.link.peers.get(Rank(0)).unwrap().has_incoming());
    ends.owner.link.deregister(RegionKey(GPU));
    let memory = Arc::downgrade(&ends.owner.regions.remove(0));
    ends.settle();
    assert!(memory.upgrade().is_some(), "a copy writes to freed memory");
    ends.owner.pause(false);
    ends.until("the raise", |ends| ends.raised() == 1);
    assert!(memory.upgrade().is_none());
}

#[test]
fn a_wrapped_link_reaches_no_other() {
    let inner = tcp();
    let lanes = Arc::new(LaneTable::new(8, Generation(0)).unwrap());
    let group = Membership { rank: Rank(0), size: 2, generation: Generation(0), lanes };
    let plain = inner.open(group.clone()).unwrap();
    let wrapped = StagedDevice::over(tcp(), StagedConfig::default()).unwrap().link(group).unwrap();
    assert!(wrapped.route(&plain.address()).is_none() && plain.route(&wrapped.address()).is_none());
    assert!(wrapped.route(&wrapped.address()).is_some());
    let none = StagedConfig { slots: 0, ..StagedConfig::default() };
    assert!(StagedDevice::over(tcp(), none).is_err());
    let automatic = StagedMode::Automatic { has_gpus: true };
    for mode in [StagedMode::Never, automatic] {
        let config = || StagedConfig { mode, ..StagedConfig::default() };
        assert!(StagedDevice::over(shm(), config()).is_err());
        assert!(StagedDevice::over(tcp(), config()).is_ok());
    }
}
