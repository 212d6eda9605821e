//! Every interleaving of two ranks that exchange messages by mailboxes, and of a wait for one that sleeps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_mailbox`
//!
//! Sleeps of a model have no timeout, so that a lost wake-up is a deadlock.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::sync::Arc;
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::testing::{
    CacheLine, Lanes, MailboxArea, MailboxEnd, SLOTS, SleepMode, Wake, Word32, Word64,
};

/// Memory of a rank: an area for its one peer, the announcement of its waits, and its doorbell.
struct Rank {
    taken: CacheLine<Word>,
    lines: Vec<CacheLine<[Word; 8]>>,
    waits: Word,
    doorbell: CacheLine<Futex>,
}

impl Rank {
    fn new() -> Rank {
        let word = |_| Word::new(0);
        let line = |_| CacheLine(std::array::from_fn(word));
        Rank {
            taken: CacheLine(Word::new(0)),
            lines: (0..SLOTS).map(line).collect(),
            waits: Word::new(0),
            doorbell: CacheLine(Futex::new(0)),
        }
    }

    fn area(&self) -> MailboxArea<'_, Word> {
        MailboxArea { taken: &self.taken, lines: &self.lines }
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { doorbell: &self.doorbell, leaves: &[], words: &[] }
    }

    /// Peer: wakes this rank after a store to its memory.
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

/// Reads the next message of `end`, of two equal words, and frees its slot.
fn take(end: &mut MailboxEnd, own: &Rank, peer: &Rank) -> u64 {
    let words = [1, 2].map(|index| end.word(&own.area(), index));
    assert_eq!(words[0], words[1], "a message is whole once its head is there");
    if end.free(&own.area(), &peer.area()) {
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
                end.send(&peer.area(), [number; 2]);
                while !end.is_ready(&own.area()) {
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
                end.send(&other[0].area(), [number; 2]);
                other[0].flush();
            }
        });
        let mut end = MailboxEnd::default();
        for number in 1..=2 {
            ranks[0].wait(|| end.is_ready(&ranks[0].area()));
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
            end.send(&ranks[1].area(), [number; 2]);
        }
        assert!(!end.has_room(&ranks[0].area()));
        let other = ranks.clone();
        let other = loom::thread::spawn(move || {
            let mut end = MailboxEnd::default();
            for number in 1..=SLOTS {
                assert!(end.is_ready(&other[1].area()));
                assert_eq!(take(&mut end, &other[1], &other[0]), number);
            }
            // The slot of the first message is used again.
            other[1].wait(|| end.is_ready(&other[1].area()));
            assert_eq!(take(&mut end, &other[1], &other[0]), SLOTS + 1);
        });
        ranks[0].wait(|| end.has_room(&ranks[0].area()));
        end.send(&ranks[1].area(), [SLOTS + 1; 2]);
        ranks[1].flush();
        other.join().unwrap();
    });
}
