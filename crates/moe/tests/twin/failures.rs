//! Device failure records in the twin: rank, phase, expected and seen values.

use proptest::prelude::*;
use std::thread;
use std::time::{Duration, Instant};
use weft_moe::device::{
    CombineOutputs, DeviceArea, DeviceConfig, DeviceLayout, DispatchInputs, DispatchOutputs,
    MoeCode as Own, StateWord, TransferPath,
};
use weft_moe::routing::Routing;
use weft_moe::{ExpertMap, Weighting};

use crate::dense;
use crate::group::{Group, Member};
use crate::rounds::{Plot, World, check_combined, check_received, in_turn, run};
use weft_gpu::{Code, Record};

/// A record from rank 0 that each test fills in.
fn blank(code: Code) -> Record {
    let (rank, phase, peer, channel, slot) = (0, 0, Some(0), 0, 0);
    Record { code, rank, phase, peer, channel, slot, expected: 0, seen: 0 }
}

fn plot(seed: u64) -> Plot {
    Plot { routing: Some(Routing::Uniform), masked: 0, wrong: false, surplus: 0, seed }
}

/// Every rank sends a full batch.
fn full(config: &DeviceConfig) -> World {
    let world = (0..).map(|seed| World::new(config, &plot(seed))).find(|world| {
        let tokens = |rank: usize| world.plans[rank].send.tokens() as u32;
        (0..config.ranks as usize).all(|rank| tokens(rank) == config.max_tokens)
    });
    world.unwrap()
}

fn is_filled(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}

fn assert_poisoned(member: &Member<'_>) {
    let (shape, received) = (member.twin.shape(), &member.received);
    let (positions, local) = (shape.positions() as usize, shape.local_experts() as usize);
    let tokens = received.tokens.bytes(0, positions * shape.wire_bytes() as usize);
    let kept = if shape.config().layout == DeviceLayout::Indexed { 0xAA } else { 0xFF };
    assert!(is_filled(&tokens, kept));
    assert!(is_filled(&received.rows.bytes(0, 4 * positions), 0xFF));
    assert!(is_filled(&received.weights.bytes(0, 4 * positions), 0xFF));
    assert!(is_filled(&received.counts.bytes(0, 4 * local), 0));
    assert!(is_filled(&received.offsets.bytes(0, 4 * (local + 1)), 0));
}

fn combined(member: &Member<'_>) -> Vec<u8> {
    member.combined.bytes(0, member.given as usize * member.twin.shape().output_bytes() as usize)
}

fn config(path: TransferPath) -> DeviceConfig {
    let config = DeviceConfig::new(3, 0, 6, 2).sized(5, 16);
    DeviceConfig { path: Some(path), ..config }
}

/// The room that a rank's rows, or its fullest expert's rows, need.
fn needed(world: &World, config: &DeviceConfig, rank: u32) -> u32 {
    let (positions, fullest) = world.needs(rank as usize);
    match config.layout {
        DeviceLayout::Padded { .. } => fullest,
        DeviceLayout::Dense => world.rows(rank),
        _ => positions,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 150 }))]

    #[test]
    fn a_round_without_room_fails_everywhere_and_the_next_one_goes_on(
        path in prop::sample::select(&TransferPath::ALL),
        layout in prop::sample::select(&[
            DeviceLayout::Contiguous { pad_to: 3 },
            DeviceLayout::Indexed,
            DeviceLayout::Padded { expert_capacity: None },
            DeviceLayout::Dense,
        ]),
        room in 1u32..30,
        seed in any::<u64>(),
    ) {
        let mut config = DeviceConfig { layout, ..config(path) };
        if layout == DeviceLayout::Dense {
            config.weighting = Weighting::AtExpert;
        }
        if layout == DeviceLayout::Indexed && path == TransferPath::Packets {
            config.path = None;
        }
        match layout {
            DeviceLayout::Padded { .. } => {
                config.layout = DeviceLayout::Padded { expert_capacity: Some(room) };
            }
            _ => config.max_positions = Some(room),
        }
        let group = Group::new(&config);
        let room = group.shape.room();
        let world = World::new(&config, &plot(seed));
        let lacking: Vec<u32> = (0..3)
            .filter(|rank| needed(&world, &config, *rank) > room)
            .collect();
        if lacking.is_empty() {
            run(&group, 0, &plot(seed), in_turn);
            return Ok(());
        }
        let keeps = layout != DeviceLayout::Dense;
        let members = world.members(&group, 0, 1).into_iter();
        let members = members.map(|member| if keeps { member.keeping() } else { member });
        let members: Vec<Member<'_>> = members.collect();
        in_turn(&members, &group, config.weighting);
        for (rank, member) in (0..).zip(&members) {
            let full = is_filled(&combined(member), 0xFF);
            prop_assert!(full, "every result is poisoned");
            let notice = member.twin.take_notice().unwrap();
            prop_assert_eq!((notice.code, notice.rank, notice.seen), (Own::Capacity.into(), rank, room.into()));
            prop_assert_eq!(member.twin.fatal(), None);
            let lacks = if lacking.contains(&rank) { rank } else { lacking[0] };
            prop_assert_eq!(notice.expected, u64::from(needed(&world, &config, lacks)));
            if lacks == rank {
                prop_assert_eq!((notice.phase, notice.peer), (1, Some(rank)));
                prop_assert_eq!(member.received.offsets.i32s(0, 3), [0; 3]);
                prop_assert_eq!(member.received.counts.i32s(0, 2), [0; 2]);
                // No token was placed, which dense rows show.
                let rows = member.received.rows.bytes(0, 4 * group.shape.positions() as usize);
                let untouched = is_filled(&rows, if member.is_dense() { 0xFF } else { 0xAA });
                prop_assert!(untouched);
            } else {
                prop_assert_eq!((notice.phase, notice.peer), (3, Some(lacks)));
            }
        }
        // Nor is there room for other tokens by the same plan.
        let again = world.members(&group, 0, 1).into_iter().zip(&members).filter(|_| keeps);
        let again: Vec<Member<'_>> = again.map(|(again, first)| again.by_plan_of(first)).collect();
        in_turn(&again, &group, config.weighting);
        for member in &again {
            prop_assert!(is_filled(&combined(member), 0xFF), "every result is poisoned");
            prop_assert_eq!(member.twin.take_notice().unwrap().code, Own::Capacity.into());
            prop_assert_eq!(member.twin.fatal(), None);
        }
        let nothing = Plot { masked: 8, ..plot(seed) };
        run(&group, 0, &nothing, in_turn);
        let next = (seed..).map(plot).find(|plot| {
            let world = World::new(&config, plot);
            (0..3).all(|rank| {
                let (positions, fullest) = world.needs(rank);
                positions <= room && fullest <= room
            })
        });
        run(&group, 0, &next.unwrap(), in_turn);
    }

    /// Rows and counts are a peer's word: none leads out of the areas, and no wait is without end.
    #[test]
    fn damaged_rows_and_counts_do_no_harm(
        path in prop::sample::select(&TransferPath::ALL),
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 1..40),
        in_counts in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let group = Group::new(&config(path));
        let world = World::new(group.shape.config(), &plot(seed));
        let members = world.members(&group, 0, 0);
        members.iter().for_each(Member::send);
        let area = if in_counts { DeviceArea::Counts } else { DeviceArea::Rows };
        let extent = group.shape.channel_layout().extent(area);
        for (place, value) in damages {
            let at = group.shape.at(0, area) + 8 * place.index(extent.bytes() as usize / 8) as u64;
            // Small numbers, and two of them, may be accepted.
            let value = (value % 9) | (((value >> 8) % 9) << 16);
            group.heaps[1].set(at as usize, &value.to_le_bytes());
        }
        group.twins.iter().for_each(|twin| twin.set_limit(Duration::from_millis(5)));
        members.iter().for_each(Member::receive);
        members.iter().for_each(|member| member.reply(false));
        members.iter().for_each(|member| member.combine(false));
        for twin in &group.twins {
            prop_assert!(twin.fatal().is_none_or(|record| record.code == Code::Timeout));
        }
    }
}

#[test]
fn what_a_source_did_not_announce_is_left_out() {
    let group = Group::new(&config(TransferPath::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members.iter().for_each(Member::send);
    // The first row from rank 0 would be the last of 65536 tokens for each of its experts.
    let row = group.shape.at(0, DeviceArea::Rows) + group.shape.channel_layout().row_meta_at;
    for record in 0..2 {
        group.heaps[1].set(row as usize + 8 * record + 2, &[0xFF; 2]);
    }
    members.iter().for_each(Member::receive);
    let rows = members[1].received.rows.i32s(0, world.needs(1).0 as usize);
    let plan = &world.plans[1].receive;
    let expected = plan.slots().iter().map(|&slot| dense::device_row(plan, slot));
    let expected: Vec<i32> = expected.map(|row| if row == 0 { -1 } else { row }).collect();
    assert_eq!(rows, expected);
    assert!(rows.contains(&-1));
    // It is replied all the same: with zeros.
    members.iter().for_each(|member| member.reply(false));
    members.iter().for_each(|member| member.combine(false));
    group.assert_quiet();
}

#[test]
fn calls_come_in_order() {
    let calls: [fn(&Member<'_>); 4] =
        [|m| m.send(), |m| m.receive(), |m| m.reply(false), |m| m.combine(false)];
    for (done, called) in (0..4).flat_map(|done| (0..4).map(move |called| (done, called))) {
        let config = DeviceConfig { ranks: 1, ..config(TransferPath::Latency) };
        let group = Group::new(&config);
        let world = full(&config);
        let members = world.members(&group, 1, 0);
        // A round, and then some calls for the next.
        calls.iter().for_each(|call| call(&members[0]));
        calls[..done].iter().for_each(|call| call(&members[0]));
        calls[called](&members[0]);
        let record = group.twins[0].fatal();
        if done == called {
            assert_eq!(record, None);
            continue;
        }
        let expected = Record {
            phase: called as u32,
            channel: 1,
            expected: done as u64,
            seen: called as u64,
            ..blank(Code::OutOfOrder)
        };
        assert_eq!(record, Some(expected));
        // From here on all data is rejected, on every channel.
        let rest = world.members(&group, 0, 0);
        calls.iter().for_each(|call| call(&rest[0]));
        assert_poisoned(&rest[0]);
        assert!(is_filled(&combined(&rest[0]), 0xFF));
        assert_eq!(group.twins[0].fatal(), Some(expected), "the first record stays");
    }
}

#[test]
fn a_timeout_names_whom_it_waited_for() {
    for path in TransferPath::ALL {
        let group = Group::new(&config(path));
        run(&group, 1, &plot(3), in_turn);
        let limit = Duration::from_millis(10);
        group.twins.iter().for_each(|twin| twin.set_limit(limit));
        let world = full(group.shape.config());
        let members = world.members(&group, 1, 0);

        // Rank 2 sends no counts: the first one is from the previous round.
        members[..2].iter().for_each(Member::send);
        let begun = Instant::now();
        members[0].receive();
        assert!(begun.elapsed() >= limit);
        let expected = Record {
            phase: 1,
            peer: Some(2),
            channel: 1,
            expected: 2,
            seen: 1,
            ..blank(Code::Timeout)
        };
        assert_eq!(group.twins[0].fatal(), Some(expected));
        assert_poisoned(&members[0]);

        // The third row from rank 0 gets stuck before rank 1.
        members[2].send();
        let (area, size) = match path {
            TransferPath::Packets => (DeviceArea::Rows, group.shape.channel_layout().row_stride),
            _ => (DeviceArea::RowFlags, 4),
        };
        let at = group.shape.at(1, area) + 2 * size;
        let epoch = if path == TransferPath::Packets { at + 4 } else { at };
        group.heaps[1].set(epoch as usize, &77u32.to_le_bytes());
        members[1].receive();
        let expected = Record { rank: 1, peer: Some(0), slot: 2, seen: 77, ..expected };
        assert_eq!(group.twins[1].fatal(), Some(expected));
        assert_poisoned(&members[1]);

        // Rank 2 has all tokens, and no rank replies to it.
        members[2].receive();
        members[2].reply(false);
        members[2].combine(false);
        let expected = Record { rank: 2, phase: 3, slot: 0, seen: 1, ..expected };
        assert_eq!(group.twins[2].fatal(), Some(expected));
        assert!(is_filled(&combined(&members[2]), 0xFF));
    }
}

#[test]
fn a_channel_that_was_closed_sends_nothing_and_poisons_what_is_received() {
    for path in [TransferPath::Packets, TransferPath::Latency, TransferPath::Bandwidth] {
        let group = Group::new(&config(path));
        let world = full(group.shape.config());
        let members = world.members(&group, 0, 0);
        let closed = group.shape.at(0, DeviceArea::State) + 4 * StateWord::Closed as u64;
        let before: Vec<Vec<u8>> = (0..3).map(|rank| group.heaps[rank].whole()).collect();
        group.heaps[0].set(closed as usize, &1u32.to_le_bytes());
        members[0].send();
        members[0].receive();
        assert_poisoned(&members[0]);
        members[0].reply(false);
        members[0].combine(false);
        assert!(is_filled(&combined(&members[0]), 0xFF));
        for (rank, (heap, before)) in group.heaps.iter().zip(&before).enumerate().skip(1) {
            assert!(heap.whole() == *before, "no store at rank {rank}");
        }
        // It is no rank's failure.
        assert_eq!(group.twins[0].fatal(), None);
    }
}

#[test]
fn the_host_ends_a_wait() {
    let group = Group::new(&config(TransferPath::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members[0].send();
    members[1].send();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| members[0].receive());
        group.until_entered(0, 1);
        thread::sleep(Duration::from_millis(20));
        group.abort(0);
        waiting.join().unwrap();
    });
    let record = group.twins[0].fatal().unwrap();
    let told = (record.code, record.phase, record.peer, record.expected, record.seen);
    assert_eq!(told, (Code::Aborted, 1, Some(2), 1, 0));
    assert_poisoned(&members[0]);
    // A call that need not wait does not begin either.
    group.abort(1);
    members[1].receive();
    let record = group.twins[1].fatal().unwrap();
    assert_eq!((record.code, record.rank, record.phase), (Code::Aborted, 1, 1));
    assert_poisoned(&members[1]);
}

#[test]
fn two_launches_at_once_on_one_channel_are_found() {
    let group = Group::new(&config(TransferPath::Bandwidth));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    let again = world.members(&group, 0, 0);
    members[0].send();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| members[0].receive());
        thread::sleep(Duration::from_millis(20));
        again[0].receive();
        waiting.join().unwrap();
    });
    let record = group.twins[0].fatal().unwrap();
    let expected = Record { phase: 1, seen: 1, ..blank(Code::Overlap) };
    assert_eq!(record, expected);
    assert_poisoned(&members[0]);
    assert_poisoned(&again[0]);
}

#[test]
fn a_round_may_be_released_by_all() {
    for path in TransferPath::ALL {
        let group = Group::new(&config(path));
        for seed in 0..3 {
            let world = World::new(group.shape.config(), &plot(seed));
            let members = world.members(&group, 0, 0);
            members.iter().for_each(Member::send);
            members.iter().for_each(Member::receive);
            members.iter().for_each(|member| member.reply(true));
            members.iter().for_each(|member| member.combine(true));
            assert!(members.iter().all(|member| is_filled(&combined(member), 0xAA)));
            group.assert_quiet();
            run(&group, 0, &plot(seed + 10), in_turn);
        }
    }
}

#[test]
fn who_combines_what_a_peer_released_is_told() {
    let group = Group::new(&config(TransferPath::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members.iter().for_each(Member::send);
    members.iter().for_each(Member::receive);
    for (rank, member) in members.iter().enumerate() {
        member.reply(rank == 1);
    }
    for (rank, member) in members.iter().enumerate() {
        member.combine(rank == 1);
    }
    for (rank, member) in members.iter().enumerate() {
        if rank == 1 {
            assert_eq!(member.twin.fatal(), None);
            continue;
        }
        let record = member.twin.fatal().unwrap();
        let told = (record.code, record.rank, record.phase, record.peer, record.seen);
        assert_eq!(told, (Own::Released.into(), rank as u32, 3, Some(1), 1));
        assert!(is_filled(&combined(member), 0xFF));
    }
}

#[test]
fn a_notice_waits_until_it_is_read() {
    let config = DeviceConfig { ranks: 1, ..config(TransferPath::Bandwidth) };
    let group = Group::new(&config);
    let twin = &group.twins[0];
    let ids = |ids: [i64; 4]| crate::group::Array::of(&ids.map(i64::to_le_bytes).concat());
    let tokens = crate::group::Array::new(2 * 32);
    let local = 4 * (group.shape.local_experts() as usize + 1);
    let counts = crate::group::Array::new(local);
    let round = |ids: &crate::group::Array| {
        let (tokens, ids) = (tokens.address(), ids.address());
        let inputs = DispatchInputs { tokens, ids, given: 2, ..Default::default() };
        let outputs = DispatchOutputs { counts: counts.address(), ..Default::default() };
        // SAFETY: the arrays are as long as two tokens need, and those not given are not asked for.
        unsafe {
            twin.dispatch(0, &inputs, &outputs);
            twin.combine(0, 0, &CombineOutputs::default(), true);
        }
        counts.i32s(0, group.shape.local_experts() as usize)
    };
    // The second token names expert 3 twice; the later one counts as masked.
    assert_eq!(round(&ids([1, 0, 3, 3])), [1, 1, 0, 1, 0, 0]);
    assert_eq!(round(&ids([6, i64::MAX, -1, i64::MIN])), [0; 6]);
    let notice = twin.take_notice().unwrap();
    let expected = Record {
        phase: 4,
        peer: Some(1),
        slot: 1,
        expected: 6,
        seen: 3,
        ..blank(Own::Expert.into())
    };
    assert_eq!(notice, expected);
    assert_eq!(twin.take_notice(), None);
    assert_eq!(round(&ids([0, i64::MAX, -1, -1])), [1, 0, 0, 0, 0, 0]);
    let expected = Record { peer: Some(1), slot: 0, seen: i64::MAX as u64, ..expected };
    assert_eq!(twin.take_notice(), Some(expected));
    assert_eq!(twin.fatal(), None);
}

/// All ranks go by one plan: a new one, or the same round's.
#[test]
fn ranks_that_go_by_different_plans_end_the_group() {
    for path in TransferPath::ALL {
        for odd in [true, false] {
            let config = config(path);
            let group = Group::new(&config);
            let rounds: Vec<(World, Vec<Member<'_>>)> = (0..2)
                .map(|seed| {
                    let world = World::new(&config, &plot(seed));
                    let members = world.members(&group, 0, 0).into_iter().map(Member::keeping);
                    let members: Vec<Member<'_>> = members.collect();
                    in_turn(&members, &group, config.weighting);
                    (world, members)
                })
                .collect();
            group.assert_quiet();
            // Rank 1 goes by a new plan, or by another round's.
            let (world, first) = &rounds[0];
            let again = world.members(&group, 0, 0).into_iter().zip(first).zip(&rounds[1].1);
            let again = again.enumerate().map(|(rank, ((member, first), second))| match rank {
                1 if odd => member,
                1 => member.by_plan_of(second),
                _ => member.by_plan_of(first),
            });
            let again: Vec<Member<'_>> = again.collect();
            again.iter().for_each(Member::send);
            again.iter().for_each(Member::receive);
            for (rank, member) in (0..).zip(&again) {
                let record = member.twin.fatal().unwrap();
                let blamed = if rank == 1 { 0 } else { 1 };
                let who = (record.code, record.rank, record.peer);
                assert_eq!(who, (Own::OtherPlan.into(), rank, Some(blamed)));
                assert_eq!(
                    (record.expected == 0, record.seen == 0),
                    (odd && rank == 1, odd && rank != 1)
                );
                assert_ne!(record.expected, record.seen);
                let tokens = member.received.tokens.whole();
                assert!(is_filled(&tokens, 0xFF), "outputs are poisoned");
            }
        }
    }
}

/// Fewer output rows than positions: no read beyond the end, and a record for the loss.
#[test]
fn outputs_that_do_not_fit_are_replied_by_nobody() {
    for path in TransferPath::ALL {
        let config = config(path);
        let group = Group::new(&config);
        let world = full(&config);
        let mut members = world.members(&group, 0, 0);
        members.iter().for_each(Member::send);
        let used = |member: &Member<'_>| *member.twin.counts(0).unwrap().offsets.last().unwrap();
        let used: Vec<u32> = members.iter().map(used).collect();
        members.iter().for_each(Member::receive);
        let lacks = (0..3).find(|&rank| used[rank] > 0).unwrap();
        for (rank, member) in members.iter_mut().enumerate() {
            member.fit(used[rank] - u32::from(rank == lacks));
        }
        members.iter().for_each(|member| member.reply(false));
        members.iter().for_each(|member| member.combine(false));
        for (rank, member) in members.iter().enumerate() {
            assert!(is_filled(&combined(member), 0xFF));
            assert_eq!(member.twin.fatal(), None);
            let notice = member.twin.take_notice().unwrap();
            assert_eq!(
                (notice.code, notice.peer, notice.expected),
                (Own::Capacity.into(), Some(lacks as u32), used[lacks].into())
            );
            let (phase, seen) =
                if rank == lacks { (2, used[lacks] - 1) } else { (3, group.shape.positions()) };
            assert_eq!((notice.phase, notice.seen), (phase, seen.into()));
        }
        run(&group, 0, &plot(9), in_turn);
    }
}

/// Two maps for six experts on three ranks that own different numbers.
fn two_maps() -> [ExpertMap; 2] {
    let held =
        [[vec![0, 1, 2], vec![3], vec![4, 5, 0, 0]], [vec![5, 0, 1], vec![4], vec![3, 2, 3, 1]]];
    held.map(|held| ExpertMap::new(6, &held).unwrap())
}

#[test]
fn ranks_that_dispatch_by_different_maps_are_found() {
    for path in TransferPath::ALL {
        let config = DeviceConfig { maps: two_maps().into(), ..config(path) };
        let group = Group::new(&config);
        let world = full(&config);
        let mut members = world.members(&group, 0, 0);
        members.iter_mut().for_each(|member| member.layer = 0);
        members[1].layer = 1;
        members.iter().for_each(Member::send);
        members.iter().for_each(Member::receive);
        for (rank, twin) in (0..).zip(&group.twins) {
            let record = twin.fatal().unwrap();
            let (peer, expected, seen) = if rank == 1 { (0, 2, 1) } else { (1, 1, 2) };
            assert_eq!(
                (record.code, record.rank, record.peer, record.expected, record.seen),
                (Own::Placement.into(), rank, Some(peer), expected, seen)
            );
        }
        members.iter().for_each(assert_poisoned);
    }
}

#[test]
fn rounds_go_by_the_map_that_was_written_last() {
    for path in TransferPath::ALL {
        let [first, second] = two_maps();
        let with = |map: &ExpertMap| DeviceConfig { maps: [map.clone()].into(), ..config(path) };
        let group = Group::new(&with(&first));
        for (generation, map) in (2..).zip([&second, &first, &second]) {
            group.twins.iter().for_each(|twin| twin.set_map(0, map, generation));
            let mut world = World::new(&with(map), &plot(generation.into()));
            let members = world.members(&group, 0, 0);
            in_turn(&members, &group, with(map).weighting);
            group.assert_quiet();
            check_received(&members, &world, &group);
            check_combined(&members, &mut world, with(map).weighting);
        }
    }
}
