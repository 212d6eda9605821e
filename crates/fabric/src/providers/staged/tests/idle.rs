//! Wrappers whose ranks have no GPU memory yet: nothing beyond tcp's own work, and the change to slots.

use super::automatic::{GPUS, NO_GPUS};
use super::counted::{Calls, Counted};
use super::*;
use crate::memory::Memory;

/// Parts in host memory.
const PARTS: u64 = 5;

/// Ends over tcp that count, with host memory only.
fn host_only(modes: [StagedMode; 2]) -> (Ends, [Arc<Calls>; 2]) {
    let calls = [(); 2].map(|()| Arc::<Calls>::default());
    let end = |rank: usize| {
        let inner = Counted { inner: tcp(), calls: calls[rank].clone() };
        End::with_mode(Arc::new(inner), rank as u32, PATIENCE, modes[rank])
    };
    let mut ends = Ends::connected([end(0), end(1)]);
    for end in &mut ends {
        let memory = [(); 2].map(|()| Arc::new(Memory::shared(BYTES).unwrap()));
        end.link.register(RegionKey(HOST), &memory[HOST as usize]).unwrap();
        end.regions = memory.into();
    }
    (Ends::share_some(ends, &[HOST]), calls)
}

/// Letter for a mapping that child processes share (`s`) or copy (`p`), and bytes of it in memory.
fn mapping(memory: &Memory) -> (char, u64) {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines();
    let is_here = |line: &&str| {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        let range = range.and_then(|(begin, end)| Some(number(begin)?..number(end)?));
        range.is_some_and(|range| range.contains(&memory.address()))
    };
    let head = lines.find(is_here).expect("it is mapped");
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    let kilobytes: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
    (head.split(' ').nth(1).unwrap().chars().nth(3).unwrap(), 1024 * kilobytes)
}

fn slots(end: &End) -> Option<&Arc<Memory>> {
    end.link.peers.values().find_map(|peer| peer.memory.as_ref())
}

#[test]
fn ranks_without_gpu_memory_send_and_touch_nothing_more_than_tcp_itself() {
    for modes in [[StagedMode::Never; 2], [NO_GPUS; 2], [GPUS, NO_GPUS], [GPUS; 2]] {
        let (mut ends, calls) = host_only(modes);
        for turn in 0..PARTS {
            ends.post(turn, &[(HOST, HOST, 100 * turn)]).unwrap();
            ends.until("host memory", |ends| ends.raised() == turn + 1);
        }
        ends.settle();
        let posts = calls.each_ref().map(|calls| calls.posts.load(SeqCst));
        assert_eq!(posts, [PARTS, 0], "{modes:?}");
        let has_gpus = modes.iter().any(|mode| mode.has_gpus());
        let regions = calls.each_ref().map(|calls| calls.regions.load(SeqCst));
        assert_eq!(regions, [1 + u64::from(has_gpus); 2], "{modes:?}");
        for end in [&ends.writer, &ends.owner] {
            assert!(!end.link.is_active && end.link.engine.is_none(), "{modes:?}");
            assert_eq!(slots(end).is_some(), has_gpus, "{modes:?}");
            // A device that reads pages which a fork has moved would read a stale copy.
            assert!(slots(end).is_none_or(|slots| mapping(slots) == ('s', 0)), "{modes:?}");
        }
    }
}

#[test]
fn parts_that_were_posted_before_gpu_memory_was_registered_end_after_it() {
    let (mut ends, calls) = host_only([GPUS, NO_GPUS]);
    // Tcp copies short parts, which are done at once.
    let mut in_flight = 0;
    let mut count = |posted| in_flight += usize::from(posted == Ok(PostStatus::InFlight));
    (0..PARTS).for_each(|turn| count(ends.post(turn, &[(HOST, HOST, 100 * turn)])));
    // The owner has polled once, the writer has parts in flight.
    ends.owner.poll();
    let gpu = Arc::new(ends.writer.link.allocate(0, BYTES).unwrap().unwrap());
    ends.writer.link.register(RegionKey(GPU), &gpu).unwrap();
    ends.writer.regions[GPU as usize] = gpu;
    assert!(ends.writer.link.is_active && !ends.owner.link.is_active);
    ends.writer.bytes(GPU).iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at));
    count(ends.post(PARTS, &[(GPU, HOST, 3000)]));
    count(ends.post(PARTS + 1, &[(HOST, HOST, 4000)]));
    let all = PARTS + 2;
    ends.until("all parts", |ends| ends.raised() == all && ends.ended().0 == in_flight);
    for at in (0..PARTS).map(|turn| 100 * turn).chain([3000, 4000]) {
        check_page(&ends, HOST, at);
    }
    assert_eq!(ends.ended(), (in_flight, 0));
    // One message more: the freed slot.
    ends.until("the freed slot", |ends| {
        !ends.writer.link.peers.values().any(|it| it.has_outgoing())
    });
    assert_eq!(calls.each_ref().map(|calls| calls.posts.load(SeqCst)), [all, 1]);
    assert!(slots(&ends.owner).is_some_and(|slots| mapping(slots).1 > 0));
}

#[test]
fn a_peer_may_be_fenced_before_it_has_slots_and_while_calls_pass_through() {
    for end in &mut Ends::unshared([GPUS, NO_GPUS]) {
        let peer = Rank(1 - end.link.group.rank.0);
        end.link.fence(peer, &mut Sink::default());
        assert!(end.link.peers.get(peer).is_none() && end.link.watched.is_empty());
        end.poll();
    }
    let (mut ends, _) = host_only([GPUS, NO_GPUS]);
    let in_flight = ends.post(1, &[(HOST, HOST, 100)]) == Ok(PostStatus::InFlight);
    ends.writer.link.fence(Rank(1), &mut ends.writer.sink);
    ends.writer.poll();
    assert_eq!(ends.ended().0 + ends.ended().1, usize::from(in_flight));
    assert!(ends.post(2, &[(HOST, HOST, 100)]).is_err());
}

/// The owner has looked at no slot when the writer's process ends.
#[test]
fn a_part_in_the_first_slot_arrives_before_the_loss_of_the_peer_that_filled_it() {
    let mut ends = Ends::in_modes([GPUS, NO_GPUS]);
    ends.post(1, &[(GPU, HOST, 100)]).unwrap();
    let deadline = clock::now().after(PATIENCE);
    while ends.ended().0 == 0 {
        assert!(clock::now() < deadline, "the slot does not leave");
        ends.writer.link.flush(&mut ends.writer.sink);
        ends.writer.poll();
    }
    assert!(!ends.owner.link.is_active);
    let Ends { writer, owner, .. } = &mut ends;
    // It closes the connections, as a process that ends.
    writer.link.inner = None;
    while owner.sink.lost.is_empty() {
        assert!(clock::now() < deadline, "no loss is reported");
        owner.poll();
    }
    assert_eq!(ends.raised(), 1);
    check_page(&ends, HOST, 100);
    (0..10).for_each(|_| ends.owner.poll());
    assert_eq!(ends.owner.sink.lost.len(), 1);
}
