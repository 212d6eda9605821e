//! Routes that get slots by themselves, and wrappers that step aside.

use super::*;
use crate::providers::staged::wire::{HEADER_ROOM, SlotLanes, StagedAddress};

pub const GPUS: StagedMode = StagedMode::Automatic { has_gpus: true };
pub const NO_GPUS: StagedMode = StagedMode::Automatic { has_gpus: false };

/// Lanes that a table has issued to a peer, counted by the number of the next one.
fn issued(end: &End) -> u32 {
    end.lanes.issue(Rank(5), 2).unwrap().id().get()
}

#[test]
fn a_wrapper_steps_aside_where_neither_end_has_gpus() {
    for modes in [[NO_GPUS; 2], [StagedMode::Never; 2], [NO_GPUS, StagedMode::Never]] {
        let mut ends = Ends::in_modes(modes);
        for end in [&mut ends.writer, &mut ends.owner] {
            assert!(end.link.peers.is_empty());
            assert!(end.link.allocate(0, 1).is_none());
            let inner = end.link.take_inner().expect("it steps aside");
            end.link.inner = Some(inner);
        }
        // Keys stay the same.
        ends.post(1, &[(HOST, HOST, 100)]).unwrap();
        ends.until("the raise", |ends| ends.raised() == 1);
        check_page(&ends, HOST, 100);
    }
    // A wrapper with GPUs refuses their memory where it is granted, by the peer that has no slots.
    let mut ends = Ends::in_modes([GPUS, StagedMode::Never]);
    assert!(ends.writer.link.take_inner().is_none() && ends.owner.link.take_inner().is_some());
    let mut ends = Ends::in_modes([GPUS, NO_GPUS]);
    assert!(ends.writer.link.take_inner().is_none() && ends.owner.link.take_inner().is_none());
}

#[test]
fn no_lane_is_issued_to_a_peer_without_slots() {
    let lanes = |modes: [StagedMode; 2]| issued(&Ends::in_modes(modes).writer);
    assert_eq!(lanes([NO_GPUS; 2]), lanes([StagedMode::Never; 2]));
    assert_eq!(lanes([GPUS, StagedMode::Never]), lanes([NO_GPUS; 2]));
    let slots = SlotLanes::count(SLOTS as u32);
    assert_eq!(lanes([NO_GPUS, GPUS]), lanes([NO_GPUS; 2]) + slots);
}

#[test]
fn one_end_with_gpus_gives_both_slots_and_host_memory_passes_until_a_part_takes_one() {
    // The owner has no GPU, and learns of the writer's GPU memory by the first slot.
    let mut ends = Ends::in_modes([GPUS, NO_GPUS]);
    assert!(!ends.owner.link.is_active && ends.writer.link.is_active);
    ends.post(1, &[(HOST, HOST, 100)]).unwrap();
    ends.until("host memory", |ends| ends.raised() == 1);
    assert!(!ends.owner.link.is_active);
    // More parts than slots.
    for (turn, at) in (0..12).map(|turn| (turn, 200 + 100 * turn)) {
        assert_eq!(ends.post(turn, &[(GPU, HOST, at)]), Ok(PostStatus::InFlight));
        ends.until("GPU memory", |ends| ends.raised() == 2 + turn);
        check_page(&ends, HOST, at);
    }
    ends.post(20, &[(HOST, HOST, 4000)]).unwrap();
    ends.until("host memory", |ends| ends.raised() == 14);
    assert!(ends.owner.link.is_active);
    check_page(&ends, HOST, 4000);
    // The other way round: the writer has none.
    let mut ends = Ends::in_modes([NO_GPUS, GPUS]);
    ends.post(1, &[(HOST, GPU, 300)]).unwrap();
    ends.until("GPU memory", |ends| ends.raised() == 1);
    check_page(&ends, GPU, 300);
    assert_eq!(ends.writer.counters.staged_parts.load(SeqCst), 1);
}

#[test]
fn a_sleeping_owner_without_gpu_memory_is_woken_by_the_first_slot() {
    let mut ends = Ends::in_modes([GPUS, NO_GPUS]);
    ends.post(1, &[(GPU, HOST, 100)]).unwrap();
    let deadline = clock::now().after(PATIENCE);
    let first = ends.owner.link.watched[0].1;
    while ends.owner.lanes.value(first) == 0 {
        assert!(clock::now() < deadline, "no slot arrives");
        ends.writer.link.flush(&mut ends.writer.sink);
        ends.writer.poll();
        // The inner link receives; the wrapper has not looked.
        let End { link, sink, .. } = &mut ends.owner;
        link.inner.as_mut().unwrap().poll(clock::now(), sink);
    }
    assert!(!ends.owner.link.is_active && !ends.owner.link.prepare_sleep());
}

#[test]
fn slots_are_allocated_by_the_first_grant() {
    let mut ends = Ends::unshared([GPUS, NO_GPUS]);
    let has_slots = |end: &End, peer| end.link.peers.get(Rank(peer)).unwrap().memory.is_some();
    assert!(!has_slots(&ends[0], 1) && !has_slots(&ends[1], 0));
    ends.iter_mut().for_each(End::register);
    assert!(!has_slots(&ends[0], 1) && !has_slots(&ends[1], 0));
    let ends = Ends::share(ends);
    assert!(has_slots(&ends.writer, 1) && has_slots(&ends.owner, 0));
}

#[test]
fn gpu_memory_is_refused_where_the_other_end_has_no_slots() {
    let mut ends = Ends::in_modes([GPUS, StagedMode::Never]);
    ends.post(1, &[(HOST, HOST, 100)]).unwrap();
    ends.until("host memory", |ends| ends.raised() == 1);
    check_page(&ends, HOST, 100);
    assert!(ends.post(2, &[(GPU, HOST, 100)]).unwrap_err().contains("WEFT_STAGED"));
    let granted = ends.writer.link.grant(RegionKey(GPU), Rank(1), 0..GRANTED);
    assert!(granted.unwrap_err().to_string().contains("WEFT_STAGED"));
    assert!(ends.writer.link.grant(RegionKey(HOST), Rank(1), 0..GRANTED).is_ok());
}

/// Parts in host memory are the same as over tcp itself, with slots or without.
#[test]
fn every_route_over_tcp_has_the_parts_of_an_unwrapped_one() {
    let device = |room| {
        let max_part_bytes = TcpConfig::default().max_part_bytes + room;
        TcpDevice::new(TcpConfig { max_part_bytes, ..TcpConfig::default() }).unwrap()
    };
    let lanes = Arc::new(LaneTable::new(64, Generation(0)).unwrap());
    let group = Membership { rank: Rank(0), size: 2, generation: Generation(0), lanes };
    let plain = device(0).open(group.clone()).unwrap();
    let expected = plain.route(&plain.address()).unwrap();
    let link = |mode| {
        let config = StagedConfig { mode, ..StagedConfig::default() };
        let wrapped = StagedDevice::over(Arc::new(device(HEADER_ROOM)), config).unwrap();
        wrapped.link(group.clone()).unwrap()
    };
    let modes = [StagedMode::Never, NO_GPUS, GPUS, StagedMode::Always];
    for (one, two) in modes.iter().flat_map(|one| modes.iter().map(move |two| (one, two))) {
        let (one, two) = (link(*one), link(*two));
        let rule = one.route(&two.address()).unwrap();
        assert_eq!(two.route(&one.address()), Some(rule));
        assert_eq!(rule.parts, expected.parts);
        let address = |link: &StagedLink| link.address();
        let (ours, theirs) = (address(&one), address(&two));
        let decoded = [&ours, &theirs].map(|bytes| StagedAddress::decode(bytes).unwrap());
        if !decoded[0].is_staged(&decoded[1]) {
            assert_eq!(rule, expected);
        }
    }
}
