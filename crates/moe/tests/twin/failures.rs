//! What a twin writes when something goes wrong: who, where, what was expected and what was seen.

use proptest::prelude::*;
use std::thread;
use std::time::{Duration, Instant};
use weft_moe::device::{
    DeviceArea, DeviceConfig, DeviceLayout, DispatchInputs, DispatchOutputs, Path, Record,
    StateWord,
};
use weft_moe::routing::Routing;

use crate::dense;
use crate::group::{Group, Member};
use crate::rounds::{Plot, World, in_turn, run};

const TIMEOUT: u32 = 1;
const ABORTED: u32 = 2;
const TWO_LAUNCHES: u32 = 3;
const OUT_OF_ORDER: u32 = 4;
const EXPERT: u32 = 5;
const CAPACITY: u32 = 6;
const RELEASED: u32 = 7;

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

fn config(path: Path) -> DeviceConfig {
    let config = DeviceConfig::new(3, 0, 6, 2).sized(5, 16);
    DeviceConfig { path: Some(path), ..config }
}

/// The room that a rank's rows, or those of its fullest expert, need.
fn needed(world: &World, config: &DeviceConfig, rank: u32) -> u32 {
    let (positions, fullest) = world.needs(rank as usize);
    if matches!(config.layout, DeviceLayout::Padded { .. }) { fullest } else { positions }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 150 }))]

    #[test]
    fn a_round_without_room_fails_everywhere_and_the_next_one_goes_on(
        path in prop::sample::select(&Path::ALL),
        layout in prop::sample::select(&[
            DeviceLayout::Contiguous { pad_to: 3 },
            DeviceLayout::Indexed,
            DeviceLayout::Padded { expert_capacity: None },
        ]),
        room in 1u32..30,
        seed in any::<u64>(),
    ) {
        let mut config = DeviceConfig { layout, ..config(path) };
        if layout == DeviceLayout::Indexed && path == Path::Packets {
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
        let members = world.members(&group, 0, 1);
        in_turn(&members, &group, config.weighting);
        for (rank, member) in (0..).zip(&members) {
            let full = is_filled(&combined(member), 0xFF);
            prop_assert!(full, "every result is poisoned");
            let notice = member.twin.take_notice().unwrap();
            prop_assert_eq!((notice.code, notice.rank, notice.seen), (CAPACITY, rank, room.into()));
            prop_assert_eq!(member.twin.fatal(), None);
            let lacks = if lacking.contains(&rank) { rank } else { lacking[0] };
            prop_assert_eq!(notice.expected, u64::from(needed(&world, &config, lacks)));
            if lacks == rank {
                prop_assert_eq!((notice.phase, notice.peer), (1, rank));
                prop_assert_eq!(member.received.offsets.i32s(0, 3), [0; 3]);
                prop_assert_eq!(member.received.counts.i32s(0, 2), [0; 2]);
                // Nothing was placed.
                let rows = member.received.rows.bytes(0, 4 * group.shape.positions() as usize);
                prop_assert!(is_filled(&rows, 0xAA));
            } else {
                prop_assert_eq!((notice.phase, notice.peer), (3, lacks));
            }
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
        path in prop::sample::select(&Path::ALL),
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 1..40),
        in_counts in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let group = Group::new(&config(path));
        let world = World::new(group.shape.config(), &plot(seed));
        let members = world.members(&group, 0, 0);
        members.iter().for_each(Member::send);
        let area = if in_counts { DeviceArea::Counts } else { DeviceArea::Rows };
        let extent = group.shape.areas().extent(area);
        for (place, value) in damages {
            let at = group.shape.at(0, area) + 8 * place.index(extent.bytes() as usize / 8) as u64;
            // Small numbers, and two of them, are those that may be believed.
            let value = (value % 9) | (((value >> 8) % 9) << 16);
            group.heaps[1].set(at as usize, &value.to_le_bytes());
        }
        group.twins.iter().for_each(|twin| twin.set_limit(Duration::from_millis(5)));
        members.iter().for_each(Member::receive);
        members.iter().for_each(|member| member.answer(false));
        members.iter().for_each(|member| member.combine(false));
        for twin in &group.twins {
            prop_assert!(twin.fatal().is_none_or(|record| record.code == TIMEOUT));
        }
    }
}

#[test]
fn what_a_source_did_not_announce_is_left_out() {
    let group = Group::new(&config(Path::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members.iter().for_each(Member::send);
    // The first row of rank 0 would be the last of 65536 tokens of each of its experts.
    let row = group.shape.at(0, DeviceArea::Rows) + group.shape.areas().row_meta_at;
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
    // It is answered all the same: with zeros.
    members.iter().for_each(|member| member.answer(false));
    members.iter().for_each(|member| member.combine(false));
    group.assert_quiet();
}

#[test]
fn calls_come_in_order() {
    let calls: [fn(&Member<'_>); 4] =
        [|m| m.send(), |m| m.receive(), |m| m.answer(false), |m| m.combine(false)];
    for (done, called) in (0..4).flat_map(|done| (0..4).map(move |called| (done, called))) {
        let config = DeviceConfig { ranks: 1, ..config(Path::Latency) };
        let group = Group::new(&config);
        let world = full(&config);
        let members = world.members(&group, 1, 0);
        // A round, and then some calls of the next.
        calls.iter().for_each(|call| call(&members[0]));
        calls[..done].iter().for_each(|call| call(&members[0]));
        calls[called](&members[0]);
        let record = group.twins[0].fatal();
        if done == called {
            assert_eq!(record, None);
            continue;
        }
        let expected = Record {
            code: OUT_OF_ORDER,
            phase: called as u32,
            channel: 1,
            expected: done as u64,
            seen: called as u64,
            ..Record::default()
        };
        assert_eq!(record, Some(expected));
        // From here on nothing is believed, on no channel.
        let rest = world.members(&group, 0, 0);
        calls.iter().for_each(|call| call(&rest[0]));
        assert_poisoned(&rest[0]);
        assert!(is_filled(&combined(&rest[0]), 0xFF));
        assert_eq!(group.twins[0].fatal(), Some(expected), "the first record stays");
    }
}

#[test]
fn a_timeout_names_whom_it_waited_for() {
    for path in Path::ALL {
        let group = Group::new(&config(path));
        let limit = Duration::from_millis(10);
        group.twins.iter().for_each(|twin| twin.set_limit(limit));
        run(&group, 1, &plot(3), in_turn);
        let world = full(group.shape.config());
        let members = world.members(&group, 1, 0);

        // Rank 2 sends nothing: the first of its counts is of the round before.
        members[..2].iter().for_each(Member::send);
        let begun = Instant::now();
        members[0].receive();
        assert!(begun.elapsed() >= limit);
        let expected = Record {
            code: TIMEOUT,
            rank: 0,
            phase: 1,
            peer: 2,
            channel: 1,
            slot: 0,
            expected: 2,
            seen: 1,
        };
        assert_eq!(group.twins[0].fatal(), Some(expected));
        assert_poisoned(&members[0]);

        // The third row of rank 0 gets stuck on its way to rank 1.
        members[2].send();
        let (area, size) = match path {
            Path::Packets => (DeviceArea::Rows, group.shape.areas().row_stride),
            _ => (DeviceArea::RowFlags, 4),
        };
        let at = group.shape.at(1, area) + 2 * size;
        let epoch = if path == Path::Packets { at + 4 } else { at };
        group.heaps[1].set(epoch as usize, &77u32.to_le_bytes());
        members[1].receive();
        let expected = Record { rank: 1, peer: 0, slot: 2, seen: 77, ..expected };
        assert_eq!(group.twins[1].fatal(), Some(expected));
        assert_poisoned(&members[1]);

        // Rank 2 has everything, and nobody answers it.
        members[2].receive();
        members[2].answer(false);
        members[2].combine(false);
        let expected = Record { rank: 2, phase: 3, slot: 0, seen: 1, ..expected };
        assert_eq!(group.twins[2].fatal(), Some(expected));
        assert!(is_filled(&combined(&members[2]), 0xFF));
    }
}

#[test]
fn a_channel_that_was_closed_sends_nothing_and_poisons_what_is_received() {
    for path in [Path::Packets, Path::Latency, Path::Bandwidth] {
        let group = Group::new(&config(path));
        let world = full(group.shape.config());
        let members = world.members(&group, 0, 0);
        let closed = group.shape.at(0, DeviceArea::State) + 4 * StateWord::Closed as u64;
        let before: Vec<Vec<u8>> = (0..3).map(|rank| group.heaps[rank].whole()).collect();
        group.heaps[0].set(closed as usize, &1u32.to_le_bytes());
        members[0].send();
        members[0].receive();
        assert_poisoned(&members[0]);
        members[0].answer(false);
        members[0].combine(false);
        assert!(is_filled(&combined(&members[0]), 0xFF));
        for (rank, (heap, before)) in group.heaps.iter().zip(&before).enumerate().skip(1) {
            assert!(heap.whole() == *before, "nothing was stored at rank {rank}");
        }
        // It is no failure, of nobody.
        assert_eq!(group.twins[0].fatal(), None);
    }
}

#[test]
fn the_host_ends_a_wait() {
    let group = Group::new(&config(Path::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members[0].send();
    members[1].send();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| members[0].receive());
        thread::sleep(Duration::from_millis(20));
        group.abort(0);
        waiting.join().unwrap();
    });
    let record = group.twins[0].fatal().unwrap();
    let told = (record.code, record.phase, record.peer, record.expected, record.seen);
    assert_eq!(told, (ABORTED, 1, 2, 1, 0));
    assert_poisoned(&members[0]);
    // A call that need not wait does not begin either.
    group.abort(1);
    members[1].receive();
    let record = group.twins[1].fatal().unwrap();
    assert_eq!((record.code, record.rank, record.phase), (ABORTED, 1, 1));
    assert_poisoned(&members[1]);
}

#[test]
fn two_launches_at_once_on_one_channel_are_found() {
    let group = Group::new(&config(Path::Bandwidth));
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
    let expected = Record { code: TWO_LAUNCHES, phase: 1, seen: 1, ..Record::default() };
    assert_eq!(record, expected);
    assert_poisoned(&members[0]);
    assert_poisoned(&again[0]);
}

#[test]
fn a_round_may_be_released_by_all() {
    for path in Path::ALL {
        let group = Group::new(&config(path));
        for seed in 0..3 {
            let world = World::new(group.shape.config(), &plot(seed));
            let members = world.members(&group, 0, 0);
            members.iter().for_each(Member::send);
            members.iter().for_each(Member::receive);
            members.iter().for_each(|member| member.answer(true));
            members.iter().for_each(|member| member.combine(true));
            assert!(members.iter().all(|member| is_filled(&combined(member), 0xAA)));
            group.assert_quiet();
            run(&group, 0, &plot(seed + 10), in_turn);
        }
    }
}

#[test]
fn who_combines_what_a_peer_released_is_told() {
    let group = Group::new(&config(Path::Latency));
    let world = full(group.shape.config());
    let members = world.members(&group, 0, 0);
    members.iter().for_each(Member::send);
    members.iter().for_each(Member::receive);
    for (rank, member) in members.iter().enumerate() {
        member.answer(rank == 1);
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
        assert_eq!(told, (RELEASED, rank as u32, 3, 1, 1));
        assert!(is_filled(&combined(member), 0xFF));
    }
}

#[test]
fn a_notice_waits_until_it_is_read() {
    let config = DeviceConfig { ranks: 1, ..config(Path::Bandwidth) };
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
            twin.combine(0, 0, 0, 0, 0, true);
        }
        counts.i32s(0, group.shape.local_experts() as usize)
    };
    // The second token names expert 3 twice; the later one counts as masked.
    assert_eq!(round(&ids([1, 0, 3, 3])), [1, 1, 0, 1, 0, 0]);
    assert_eq!(round(&ids([6, i64::MAX, -1, i64::MIN])), [0; 6]);
    let notice = twin.take_notice().unwrap();
    let expected = Record {
        code: EXPERT,
        phase: 4,
        peer: 1,
        slot: 1,
        expected: 6,
        seen: 3,
        ..Record::default()
    };
    assert_eq!(notice, expected);
    assert_eq!(twin.take_notice(), None);
    assert_eq!(round(&ids([0, i64::MAX, -1, -1])), [1, 0, 0, 0, 0, 0]);
    let expected = Record { peer: 1, slot: 0, seen: i64::MAX as u64, ..expected };
    assert_eq!(twin.take_notice(), Some(expected));
    assert_eq!(twin.fatal(), None);
}
