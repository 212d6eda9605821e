//! Send and receive tests: batches on ranks as threads, against the bytes that each message should have.

use super::super::super::family::OTHER_LENGTH;
use super::super::super::transfers::{Transfer, TransferPlan};
use super::group::Group;
use super::memory::Memory;
use super::*;

/// Message in a round.
#[derive(Clone, Copy, Debug)]
struct Sent {
    from: u32,
    to: u32,
    bytes: usize,
    /// Tensor places behind a multiple of 16.
    shifts: [usize; 2],
    /// Position among the transfers on both ranks.
    order: [u32; 2],
}

/// Message bytes, which differ between messages.
fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mix =
        |at: usize| (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize + at * 31 + at / 251;
    (0..bytes).map(|at| mix(at) as u8).collect()
}

/// A message with memory at both ends.
struct Held {
    sent: Sent,
    content: Vec<u8>,
    memory: [Memory; 2],
}

impl Held {
    fn new(sent: Sent, seed: u64) -> Held {
        let content = content(seed, sent.bytes);
        let memory = sent.shifts.map(|shift| Memory::new(shift + sent.bytes + 16));
        memory[0].raw().write(sent.shifts[0] as u64, &content);
        Held { sent, content, memory }
    }

    fn transfer(&self, receives: bool) -> Transfer {
        let (end, Sent { from, to, bytes, shifts, .. }) = (usize::from(receives), self.sent);
        let address = self.memory[end].address + shifts[end] as u64;
        let peer = if receives { from } else { to };
        Transfer { peer, receives, address, bytes: bytes as u64 }
    }

    fn received(&self) -> Vec<u8> {
        let shift = self.sent.shifts[1];
        self.memory[1].bytes(shift + self.sent.bytes)[shift..].to_vec()
    }

    fn check(&self) {
        assert!(self.received() == self.content, "{:?}", self.sent);
        let end = self.sent.shifts[1] + self.sent.bytes;
        assert!(self.memory[1].bytes(end + 16)[end..] == [0; 16], "written behind the end");
    }
}

/// A rank's batch in a round: messages between two ranks keep the order, others come in the drawn `order`.
fn batch_of(round: &[Held], rank: u32) -> Vec<Transfer> {
    let mut queues: Vec<Vec<Transfer>> = Vec::new();
    let mut draws = Vec::new();
    for held in round {
        for (receives, end) in [(false, held.sent.from), (true, held.sent.to)] {
            if end == rank {
                let transfer = held.transfer(receives);
                draws.push(held.sent.order[usize::from(receives)] as usize);
                let key = |each: &Transfer| (each.peer, each.receives);
                match queues.iter_mut().find(|queue| key(&queue[0]) == key(&transfer)) {
                    Some(queue) => queue.push(transfer),
                    None => queues.push(vec![transfer]),
                }
            }
        }
    }
    let mut next = |draw: usize| {
        let queue = draw % queues.len();
        let transfer = queues[queue].remove(0);
        queues.retain(|queue| !queue.is_empty());
        transfer
    };
    draws.into_iter().map(&mut next).collect()
}

/// Runs a rank's batch.
fn run(group: &Group, rank: u32, batch: &[Transfer]) {
    if batch.is_empty() {
        return;
    }
    let plan = TransferPlan::new(batch, rank, &group.layout).unwrap();
    // SAFETY: the message memory outlives the test threads, and each tensor belongs to only one message.
    unsafe { group.ranks[rank as usize].twin.run_transfers(&plan) };
}

fn run_rounds(group: &Group, rounds: &[Vec<Held>]) {
    thread::scope(|scope| {
        for rank in 0..group.layout.ranks {
            scope.spawn(move || {
                rounds.iter().for_each(|round| run(group, rank, &batch_of(round, rank)));
            });
        }
    });
    assert!(group.ranks.iter().all(|rank| rank.watch.fatal().is_none()));
    rounds.iter().flatten().for_each(Held::check);
}

fn set_counts(group: &Group, count: u32) {
    let layout = group.layout;
    for heap in &group.heaps {
        let set = |at: u64| heap.raw().word(at).store(count, Relaxed);
        for (lane, peer) in
            (0..layout.lanes).flat_map(|lane| (0..layout.ranks).map(move |peer| (lane, peer)))
        {
            set(layout.transferred(false, lane, peer));
            set(layout.transferred(true, lane, peer));
            set(layout.arrival(lane, peer));
            set(layout.credit(lane, peer));
        }
    }
}

fn rounds() -> impl Strategy<Value = (u32, u32, Vec<Vec<(Sent, u64)>>)> {
    (2u32..5, 1u32..5).prop_flat_map(|(ranks, blocks)| {
        let bytes = prop_oneof![
            3 => 0usize..200,
            2 => (0usize..5, 0usize..3).prop_map(|(chunks, odd)| (chunks * 16384 + odd).saturating_sub(1)),
            1 => 0usize..700_000,
        ];
        let sent = (0..ranks, 1..ranks, bytes, [0usize..17, 0usize..17], any::<[u32; 2]>(), any::<u64>());
        let sent = sent.prop_map(move |(from, step, bytes, shifts, order, seed)| {
            (Sent { from, to: (from + step) % ranks, bytes, shifts, order }, seed)
        });
        let rounds = prop::collection::vec(prop::collection::vec(sent, 0..9), 1..5);
        (Just(ranks), Just(blocks), rounds)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    #[test]
    fn batches_of_messages_arrive_whole_and_in_order(
        (ranks, blocks, rounds) in rounds(),
        count in prop_oneof![Just(0), (0u32..12).prop_map(|less| 0u32.wrapping_sub(less))],
        seed: u64,
    ) {
        let group = Group::new(ranks, blocks);
        set_counts(&group, count);
        for (rank, state) in (0..).zip(&group.ranks) {
            state.twin.set_jitter(seed.wrapping_add(rank));
        }
        let held = |round: &Vec<(Sent, u64)>| -> Vec<Held> {
            round.iter().map(|(sent, seed)| Held::new(*sent, *seed)).collect()
        };
        run_rounds(&group, &rounds.iter().map(held).collect::<Vec<_>>());
    }
}

fn message(from: u32, to: u32, bytes: usize, order: u32) -> Held {
    Held::new(Sent { from, to, bytes, shifts: [0, 3], order: [order; 2] }, u64::from(order) + 7)
}

/// A batch in both directions that is longer than all rings.
#[test]
fn long_messages_in_both_directions_reuse_their_rings() {
    for blocks in [1, 2, 5] {
        let group = Group::new(3, blocks);
        let bytes = 3
            * (group.layout.lanes * group.layout.lane_chunks) as usize
            * group.layout.chunk_capacity as usize;
        let pairs = (0..3).flat_map(|from| [1, 2].map(|step| (from, (from + step) % 3)));
        let round =
            |_| pairs.clone().map(|(from, to)| message(from, to, bytes + 5, from)).collect();
        run_rounds(&group, &[0, 1].map(round));
    }
}

/// Messages without a batch: a sender runs ahead until the ring is full, through several ring wraps.
#[test]
fn messages_without_a_batch_arrive_in_order() {
    let group = Group::new(2, 2);
    set_counts(&group, u32::MAX - 20);
    let messages: Vec<Vec<Held>> =
        (0..200).map(|order| vec![message(0, 1, 1000 * (order as usize % 50), order)]).collect();
    run_rounds(&group, &messages);
}

#[test]
fn short_messages_are_sent_before_their_receive() {
    let group = Group::new(2, 2);
    let (there, back) = (message(0, 1, 40_000, 0), message(1, 0, 0, 1));
    run(&group, 0, &[there.transfer(false)]);
    run(&group, 1, &[back.transfer(false)]);
    run(&group, 1, &[there.transfer(true)]);
    run(&group, 0, &[back.transfer(true)]);
    there.check();
    assert!(group.ranks.iter().all(|rank| rank.watch.fatal().is_none()));
}

fn assert_poisoned(held: &Held) {
    assert!(held.received().iter().all(|byte| *byte == 0xFF), "{:?}", held.sent);
}

#[test]
fn a_peer_that_does_not_call_is_named_and_receives_are_poisoned() {
    let group = Group::new(3, 2);
    group.set_limit(Duration::from_millis(100));
    let (from_one, from_two) = (message(1, 0, 50_000, 0), message(2, 0, 70_000, 0));
    thread::scope(|scope| {
        scope.spawn(|| run(&group, 2, &[from_two.transfer(false)]));
        run(&group, 0, &[from_one.transfer(true), from_two.transfer(true)]);
    });
    let record = group.ranks[0].watch.fatal().expect("a record");
    assert_eq!((record.code, record.peer), (Code::Timeout, Some(1)));
    assert_eq!((record.phase, record.slot), (FAMILY.first_phase + Phase::Receive as u32, 0));
    assert_poisoned(&from_one);
    assert_poisoned(&from_two);
    // Later ones end at once.
    run(&group, 0, &[from_one.transfer(true)]);
}

/// Two sends that are longer than the rings, without a batch: both ranks time out.
#[test]
fn long_sends_towards_each_other_time_out_at_both() {
    let group = Group::new(2, 1);
    group.set_limit(Duration::from_millis(100));
    let bytes = 2 * (group.layout.lane_chunks * group.layout.chunk_capacity) as usize;
    let messages = [message(0, 1, bytes, 0), message(1, 0, bytes, 0)];
    thread::scope(|scope| {
        for (rank, (ours, theirs)) in [(0, (0, 1)), (1, (1, 0))] {
            let (group, messages) = (&group, &messages);
            scope.spawn(move || {
                run(group, rank, &[messages[ours].transfer(false)]);
                run(group, rank, &[messages[theirs].transfer(true)]);
            });
        }
    });
    for (rank, received) in [(0, 1), (1, 0)] {
        let record = group.ranks[rank].watch.fatal().expect("a record");
        assert_eq!((record.code, record.peer), (Code::Timeout, Some(1 - rank as u32)));
        assert_eq!(record.phase, FAMILY.first_phase + Phase::Send as u32);
        assert_poisoned(&messages[received]);
    }
}

#[test]
fn lengths_that_differ_are_reported_with_both() {
    for (sent, expected) in [(0, 8), (8, 0), (8, 100_000), (100_000, 99_999)] {
        let group = Group::new(2, 2);
        group.set_limit(Duration::from_secs(60));
        let (ours, theirs) = (message(0, 1, sent, 0), message(0, 1, expected, 0));
        run(&group, 0, &[ours.transfer(false)]);
        run(&group, 1, &[theirs.transfer(true)]);
        let record = group.ranks[1].watch.fatal().expect("a record");
        assert_eq!((record.code, record.peer), (Code::Family(OTHER_LENGTH), Some(0)));
        assert_eq!((record.expected, record.seen), (expected as u64, sent as u64));
        assert_poisoned(&theirs);
        let report =
            (FAMILY.explain)(&record, weft_gpu::Phase { number: record.phase, name: None });
        assert_eq!(
            (report.class, report.rank),
            ("ConfigurationMismatchError", Some(weft_control::Rank(0)))
        );
        assert!(
            report
                .text
                .contains(&format!("receives {expected} bytes from rank 0, which sends {sent}"))
        );
    }
}

#[test]
fn an_abort_ends_a_batch() {
    let group = Group::new(2, 1);
    let awaited = message(1, 0, 30_000, 0);
    thread::scope(|scope| {
        scope.spawn(|| run(&group, 0, &[awaited.transfer(true)]));
        thread::sleep(Duration::from_millis(10));
        group.ranks[0].watch.abort();
    });
    let record = group.ranks[0].watch.fatal().expect("a record");
    assert_eq!((record.code, record.peer), (Code::Aborted, Some(1)));
    assert_poisoned(&awaited);
}

#[test]
fn batches_of_closed_memory_poison_receives_and_send_nothing() {
    let group = Group::new(2, 1);
    group.heaps[0].raw().word(group.layout.closed).store(1, Relaxed);
    let (there, back) = (message(0, 1, 100, 0), message(1, 0, 100, 0));
    run(&group, 0, &[there.transfer(false), back.transfer(true)]);
    assert_eq!(group.ranks[0].watch.fatal(), None);
    assert_poisoned(&back);
    assert_eq!(group.heaps[1].raw().word(group.layout.arrival(0, 0)).load(Relaxed), 0);
}
