//! Interleavings between two ranks that exchange messages by mailboxes, with one or several messages
//! under way, and with waits that sleep at one rank or at both.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_mailbox`
//!
//! Sleeps in a model have no timeout, so that a lost wake-up is a deadlock.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::testing::{
    CacheLine, Lanes, MailboxArea, MailboxEnd, SLOTS, SleepMode, Wake, Word32, Word64,
};

/// Memory orders for a word's loads and stores.
#[derive(Clone, Copy)]
struct Orders {
    load: Ordering,
    store: Ordering,
}

/// The orders in [`Word64`].
const ORDERED: Orders = Orders { load: Ordering::Acquire, store: Ordering::Release };

/// Word with separate orders, for models with weaker ones.
struct AreaWord(AtomicU64, Orders);

impl Word64 for AreaWord {
    fn new(value: u64) -> AreaWord {
        AreaWord(AtomicU64::new(value), ORDERED)
    }
    fn load(&self) -> u64 {
        self.0.load(self.1.load)
    }
    fn store(&self, value: u64) {
        self.0.store(value, self.1.store);
    }
    fn swap(&self, _: u64) -> u64 {
        unreachable!("areas have only loads and stores")
    }
    fn fetch_or(&self, _: u64) -> u64 {
        unreachable!("areas have only loads and stores")
    }
    fn replace(&self, _: u64, _: u64) -> bool {
        unreachable!("areas have only loads and stores")
    }
    fn fence() {
        Word::fence();
    }
}

/// A rank's memory: an area for the one peer, announced waits, and a doorbell.
struct Rank {
    taken: CacheLine<AreaWord>,
    /// Heads and payloads. loom checks that accesses to a payload are ordered.
    slots: Vec<(AreaWord, UnsafeCell<[u64; 2]>)>,
    waits: Word,
    doorbell: CacheLine<Futex>,
}

// SAFETY: loom checks the accesses to the payloads.
unsafe impl Sync for Rank {}

impl MailboxArea for Rank {
    type Word = AreaWord;

    fn taken(&self) -> &CacheLine<AreaWord> {
        &self.taken
    }

    fn head(&self, slot: usize) -> &AreaWord {
        &self.slots[slot].0
    }
}

impl Rank {
    fn new() -> Rank {
        Rank::with(ORDERED, ORDERED)
    }

    fn with(heads: Orders, taken: Orders) -> Rank {
        let slot = |_| (AreaWord(AtomicU64::new(0), heads), UnsafeCell::new([0; 2]));
        Rank {
            taken: CacheLine(AreaWord(AtomicU64::new(0), taken)),
            slots: (0..SLOTS).map(slot).collect(),
            waits: Word::new(0),
            doorbell: CacheLine(Futex::new(0)),
        }
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { doorbell: &self.doorbell, leaves: &[], words: &[] }
    }

    /// Peer: wakes this rank after a store to this memory.
    fn flush(&self) {
        Word::fence();
        if self.waits.load() != 0 && self.lanes().announce_message() == Wake::Word {
            self.doorbell.0.wake();
        }
    }

    /// Owner: sleeps until `done`, with an announcement as the last step before.
    fn wait(&self, mut done: impl FnMut() -> bool) {
        if done() {
            return;
        }
        self.waits.store(1);
        Word::fence();
        while !done() {
            if self.lanes().prepare_sleep(SleepMode::Word) {
                self.lanes().sleep_on_word(Duration::MAX);
                self.lanes().finish_sleep(SleepMode::Word);
            }
            self.lanes().take_message();
        }
        self.waits.store(0);
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Sends a message with two equal words.
fn send(end: &mut MailboxEnd, peer: &Rank, value: u64) {
    // SAFETY: loom reports an access that is not ordered.
    end.send(peer, |slot| peer.slots[slot].1.with_mut(|payload| unsafe { *payload = [value; 2] }));
}

/// Reads the next message for `end`, which has arrived, and frees the slot.
fn take(end: &mut MailboxEnd, own: &Rank, peer: &Rank) -> u64 {
    let slot = end.ready(own).expect("a message");
    // SAFETY: loom reports an access that is not ordered.
    let words = own.slots[slot].1.with(|payload| unsafe { *payload });
    assert_eq!(words[0], words[1]);
    if end.free(own, peer) {
        peer.flush();
    }
    words[0]
}

#[test]
fn messages_of_both_ranks_are_whole() {
    check(|| {
        let ranks = Arc::new([Rank::new(), Rank::new()]);
        let run = |ranks: &[Rank; 2], me: usize| {
            let (own, peer) = (&ranks[me], &ranks[1 - me]);
            let mut end = MailboxEnd::default();
            for number in 1..=2 {
                send(&mut end, peer, number);
                while end.ready(own).is_none() {
                    loom::thread::yield_now();
                }
                assert_eq!(take(&mut end, own, peer), number);
            }
        };
        let other = ranks.clone();
        let other = loom::thread::spawn(move || run(&other, 1));
        run(&ranks, 0);
        other.join().unwrap();
    });
}

#[test]
fn a_rank_that_sleeps_misses_no_message() {
    check(|| {
        let ranks = Arc::new([Rank::new(), Rank::new()]);
        let other = ranks.clone();
        let other = loom::thread::spawn(move || {
            let mut end = MailboxEnd::default();
            for number in 1..=2 {
                send(&mut end, &other[0], number);
                other[0].flush();
            }
        });
        let mut end = MailboxEnd::default();
        for number in 1..=2 {
            ranks[0].wait(|| end.ready(&ranks[0]).is_some());
            assert_eq!(take(&mut end, &ranks[0], &ranks[1]), number);
        }
        other.join().unwrap();
    });
}

#[test]
fn a_sender_that_sleeps_misses_no_freed_slot() {
    check(|| {
        let ranks = Arc::new([Rank::new(), Rank::new()]);
        let mut end = MailboxEnd::default();
        for number in 1..=SLOTS {
            send(&mut end, &ranks[1], number);
        }
        assert!(!end.has_room(&ranks[0]));
        let other = ranks.clone();
        let other = loom::thread::spawn(move || {
            let mut end = MailboxEnd::default();
            for number in 1..=SLOTS {
                assert!(end.ready(&other[1]).is_some());
                assert_eq!(take(&mut end, &other[1], &other[0]), number);
            }
            // The first message's slot is used again.
            other[1].wait(|| end.ready(&other[1]).is_some());
            assert_eq!(take(&mut end, &other[1], &other[0]), SLOTS + 1);
        });
        ranks[0].wait(|| end.has_room(&ranks[0]));
        send(&mut end, &ranks[1], SLOTS + 1);
        ranks[1].flush();
        other.join().unwrap();
    });
}

/// Rank with calls in flight. Each call sends a message to the other rank and takes one from it, as short
/// collective calls do.
struct Caller {
    ranks: Arc<[Rank; 2]>,
    me: usize,
    end: MailboxEnd,
    calls: u64,
    sent: u64,
}

impl Caller {
    fn both(calls: u64) -> [Caller; 2] {
        let ranks = Arc::new([Rank::new(), Rank::new()]);
        [0, 1].map(|me| Caller {
            ranks: ranks.clone(),
            me,
            end: MailboxEnd::default(),
            calls,
            sent: 0,
        })
    }

    /// Sends the next call's message if there is room, and returns true then.
    fn try_send(&mut self) -> bool {
        let (own, peer) = (&self.ranks[self.me], &self.ranks[1 - self.me]);
        let sends = self.sent < self.calls && self.end.has_room(own);
        if sends {
            self.sent += 1;
            send(&mut self.end, peer, self.sent);
        }
        sends
    }

    /// Takes the oldest call's message if that call was sent and the message has arrived; returns true
    /// then.
    fn try_take(&mut self) -> bool {
        let (own, peer) = (&self.ranks[self.me], &self.ranks[1 - self.me]);
        let oldest = self.end.received() + 1;
        let takes = oldest <= self.sent && self.end.ready(own).is_some();
        if takes {
            assert_eq!(take(&mut self.end, own, peer), oldest);
        }
        takes
    }

    /// Sends at most `burst` messages, and takes at most one. Returns true if it did either.
    fn advance(&mut self, burst: u64) -> bool {
        let sends = (0..burst).take_while(|_| self.try_send()).count() > 0;
        self.try_take() || sends
    }

    fn is_done(&self) -> bool {
        self.end.received() == self.calls
    }
}

/// Two ranks that have each started `calls` calls, and send at most `bursts` messages for each that they
/// take. Only rank 0 takes `lead` steps at first. Then both take `steps` at once, and then steps in
/// turns: at least one always advances.
struct CallsModel {
    calls: u64,
    bursts: [u64; 2],
    lead: u64,
    steps: [u64; 2],
}

impl CallsModel {
    fn check(self) {
        let CallsModel { calls, bursts, lead, steps } = self;
        check(move || {
            let [mut first, second] = Caller::both(calls);
            for _ in 0..lead {
                assert!(first.advance(bursts[0]));
            }
            let run = move |mut caller: Caller| {
                for _ in 0..steps[caller.me] {
                    caller.advance(bursts[caller.me]);
                }
                caller
            };
            let second = loom::thread::spawn(move || run(second));
            let first = run(first);
            // All stores are visible to both from here on.
            let mut callers = [first, second.join().unwrap()];
            while !callers.iter().all(Caller::is_done) {
                let advances = [0, 1].map(|rank| callers[rank].advance(bursts[rank]));
                assert_ne!(advances, [false; 2], "neither rank has room or a message");
            }
        });
    }
}

#[test]
fn ranks_with_several_calls_in_flight_never_both_lack_room() {
    CallsModel { calls: SLOTS + 4, bursts: [1, 1], lead: SLOTS - 2, steps: [3, SLOTS + 1] }.check();
}

#[test]
fn a_rank_that_fills_all_slots_and_its_peer_never_both_lack_room() {
    CallsModel { calls: SLOTS + 4, bursts: [SLOTS, 1], lead: 1, steps: [2, SLOTS - 2] }.check();
}

/// Rank 1 sleeps until rank 0 reports free slots by messages, which rank 1 cannot take before it has sent
/// the next one.
#[test]
fn a_sender_that_sleeps_misses_no_report_by_a_message() {
    check(|| {
        let [mut ahead, mut behind] = Caller::both(SLOTS + 1);
        assert!(ahead.advance(SLOTS));
        for _ in 0..SLOTS {
            assert!(behind.advance(1));
        }
        let ranks = ahead.ranks.clone();
        let ahead = loom::thread::spawn(move || {
            assert!(ahead.try_take());
            while !ahead.try_send() {
                assert!(ahead.try_take());
            }
            ahead.ranks[1].flush();
        });
        ranks[1].wait(|| behind.end.has_room(&ranks[1]));
        assert!(behind.try_send() && behind.try_take());
        ahead.join().unwrap();
    });
}

/// Ranks that each send the messages for all calls and then sleep for the other's messages, one after
/// another, as threads in collectives do. `late` messages leave only after the first was taken.
fn check_sleepers(calls: u64, late: [u64; 2]) {
    check(move || {
        let [first, second] = Caller::both(calls);
        let run = move |mut caller: Caller| {
            let ranks = caller.ranks.clone();
            let (own, peer) = (&ranks[caller.me], &ranks[1 - caller.me]);
            let early = calls - late[caller.me];
            while caller.sent < early && caller.try_send() {}
            peer.flush();
            while !caller.is_done() {
                own.wait(|| caller.end.ready(own).is_some());
                // Takes it, frees the slot, and sends what is left.
                caller.advance(calls);
                peer.flush();
            }
        };
        let second = loom::thread::spawn(move || run(second));
        run(first);
        second.join().unwrap();
    });
}

#[test]
fn both_ranks_sleep_for_several_messages_under_way_and_miss_none() {
    check_sleepers(3, [0, 0]);
}

#[test]
fn both_ranks_sleep_for_messages_that_leave_one_by_one_and_miss_none() {
    check_sleepers(2, [1, 1]);
    check_sleepers(3, [2, 0]);
}

/// A rank leaves the last call once the message has arrived, and flushes no more; the peer still sleeps
/// until it receives one.
#[test]
fn a_rank_whose_peer_leaves_after_the_call_misses_no_message() {
    check(|| {
        let [mut stays, mut leaves] = Caller::both(1);
        let ranks = stays.ranks.clone();
        let other = loom::thread::spawn(move || {
            let ranks = leaves.ranks.clone();
            // The first call: it announces a wait before the peer has sent anything.
            ranks[1].wait(|| leaves.end.ready(&ranks[1]).is_some());
            assert!(leaves.advance(1));
            ranks[0].flush();
            assert!(leaves.is_done());
        });
        assert!(stays.try_send());
        ranks[1].flush();
        ranks[0].wait(|| stays.end.ready(&ranks[0]).is_some());
        assert!(stays.try_take());
        other.join().unwrap();
    });
}

/// A rank sends until a slot is used again, and another one takes the messages.
fn check_reuse(heads: Orders, taken: Orders) {
    check(move || {
        let ranks = Arc::new([Rank::with(heads, taken), Rank::with(heads, taken)]);
        let other = ranks.clone();
        let other = loom::thread::spawn(move || {
            let mut end = MailboxEnd::default();
            for number in 1..=SLOTS {
                while end.ready(&other[1]).is_none() {
                    loom::thread::yield_now();
                }
                assert_eq!(take(&mut end, &other[1], &other[0]), number);
            }
        });
        let mut end = MailboxEnd::default();
        for number in 1..=SLOTS + 1 {
            while !end.has_room(&ranks[0]) {
                loom::thread::yield_now();
            }
            send(&mut end, &ranks[1], number);
        }
        other.join().unwrap();
    });
}

#[test]
fn payloads_are_ordered_by_heads_and_reports() {
    check_reuse(ORDERED, ORDERED);
}

#[test]
#[should_panic = "Causality violation"]
fn a_head_stored_without_release_is_detected() {
    check_reuse(Orders { store: Ordering::Relaxed, ..ORDERED }, ORDERED);
}

#[test]
#[should_panic = "Causality violation"]
fn a_head_loaded_without_acquire_is_detected() {
    check_reuse(Orders { load: Ordering::Relaxed, ..ORDERED }, ORDERED);
}

#[test]
#[should_panic = "Causality violation"]
fn a_report_stored_without_release_is_detected() {
    check_reuse(ORDERED, Orders { store: Ordering::Relaxed, ..ORDERED });
}

#[test]
#[should_panic = "Causality violation"]
fn a_report_loaded_without_acquire_is_detected() {
    check_reuse(ORDERED, Orders { load: Ordering::Relaxed, ..ORDERED });
}
