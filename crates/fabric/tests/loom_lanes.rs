//! Every interleaving of agents that raise and an owner that takes and sleeps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_lanes`
//!
//! A lost wake-up shows as a deadlock: a model's sleep has no end of its own. An owner here learns of
//! raises from marks alone, so a lost mark shows as a deadlock too.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::atomics::{Line, Word32, Word64};
use weft_fabric::lanes::{Lanes, Sleep, Wake};

/// An eventfd and the owner's poll of it.
struct Event {
    readable: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    fn signal(&self) {
        *self.readable.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn sleep(&self) {
        let mut readable = self.readable.lock().unwrap();
        while !*readable {
            readable = self.changed.wait(readable).unwrap();
        }
    }
}

/// A table of two leaves, of which each model uses a few lanes, and a payload for each raise.
struct Table {
    bell: Line<Futex>,
    leaves: Vec<Line<Word>>,
    words: Vec<Line<[Word; 2]>>,
    event: Event,
    payload: [UnsafeCell<u32>; 2],
}

// SAFETY: loom checks that the payloads are never touched by two threads at once.
unsafe impl Sync for Table {}
// SAFETY: as above.
unsafe impl Send for Table {}

/// Lanes that share a leaf, and one in the other leaf.
const ALONE: usize = 64;
const LANES: usize = 65;

impl Table {
    fn new() -> Arc<Table> {
        let word = |_| Line(Word::new(0));
        Arc::new(Table {
            bell: Line(Futex::new(0)),
            leaves: (0..2).map(word).collect(),
            // Words that no model raises are made once all the same; they are never touched.
            words: (0..LANES.div_ceil(2)).map(|_| Line([Word::new(0), Word::new(0)])).collect(),
            event: Event { readable: Mutex::new(false), changed: Condvar::new() },
            payload: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { bell: &self.bell, leaves: &self.leaves, words: &self.words }
    }

    /// Agent: writes payload `index`, then raises.
    fn write(&self, index: usize, lane: usize, value: u64) {
        // SAFETY: nobody reads this payload before it is counted; loom checks.
        self.payload[index].with_mut(|payload| unsafe { *payload = 7 });
        self.wake(self.lanes().raise(lane, value));
    }

    fn wake(&self, wake: Wake) {
        match wake {
            Wake::No => {}
            Wake::Word => self.bell.0.wake(),
            Wake::Descriptor => self.event.signal(),
            Wake::WordAndDescriptor => {
                self.bell.0.wake();
                self.event.signal();
            }
        }
    }

    /// Owner: payload `index` was counted.
    fn read(&self, index: usize) {
        // SAFETY: it was counted, so nobody writes it any more; loom checks.
        assert_eq!(self.payload[index].with(|payload| unsafe { *payload }), 7);
    }

    /// Owner: takes marks and sleeps until `done`, which is called for each lane that rose and
    /// once for each time awake.
    fn own(&self, how: Sleep, mut done: impl FnMut(Option<usize>) -> bool) {
        loop {
            let mut finished = false;
            self.lanes().take_raised(|lane| finished |= done(Some(lane)));
            if finished || done(None) {
                return;
            }
            if !self.lanes().prepare_sleep(how) {
                continue;
            }
            match how {
                Sleep::Word => self.lanes().sleep_on_word(Duration::MAX),
                Sleep::Descriptor | Sleep::EventLoop => self.event.sleep(),
            }
            if self.lanes().finish_sleep(how) && how != Sleep::Word {
                *self.event.readable.lock().unwrap() = false;
            }
        }
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// One agent raises twice; the owner sees each payload that the value counts.
fn one_agent(how: Sleep) {
    check(move || {
        let table = Table::new();
        let agent = table.clone();
        let agent = loom::thread::spawn(move || {
            agent.write(0, 0, 1);
            agent.write(1, 0, 2);
        });
        let mut seen = 0;
        table.own(how, |rose| {
            if let Some(lane) = rose {
                let value = table.lanes().value(lane);
                (seen..value).for_each(|index| table.read(index as usize));
                seen = value;
            }
            seen == 2
        });
        agent.join().unwrap();
    });
}

#[test]
fn one_agent_and_an_owner_asleep_on_the_bell() {
    one_agent(Sleep::Word);
}

#[test]
fn one_agent_and_an_owner_asleep_on_its_descriptor() {
    one_agent(Sleep::Descriptor);
}

#[test]
fn whoever_sees_one_of_two_lanes_raised_together_sees_the_other() {
    check(|| {
        let table = Table::new();
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.wake(agent.lanes().raise_both(0, 1, 5)));
        let mut seen = [false; 2];
        table.own(Sleep::Word, |rose| {
            if table.lanes().value(0) == 1 {
                assert_eq!(table.lanes().value(1), 5);
            }
            if let Some(lane) = rose {
                assert!(!std::mem::replace(&mut seen[lane], true), "one raise was marked twice");
            }
            seen == [true; 2]
        });
        agent.join().unwrap();
    });
}

/// Two agents raise a lane each; the owner hears of both.
fn two_agents(how: Sleep, other: usize) {
    check(move || {
        let table = Table::new();
        let agents = [(0, 0), (1, other)].map(|(index, lane)| {
            let agent = table.clone();
            loom::thread::spawn(move || agent.write(index, lane, 1))
        });
        let mut seen = [false; 2];
        table.own(how, |rose| {
            if let Some(lane) = rose {
                let index = usize::from(lane == other);
                assert_eq!(table.lanes().value(lane), 1);
                table.read(index);
                assert!(!std::mem::replace(&mut seen[index], true), "one raise was marked twice");
            }
            seen == [true; 2]
        });
        for agent in agents {
            agent.join().unwrap();
        }
    });
}

#[test]
fn two_agents_of_one_leaf_and_an_owner_asleep_on_the_bell() {
    two_agents(Sleep::Word, 1);
}

#[test]
fn two_agents_of_one_leaf_and_an_owner_asleep_on_its_descriptor() {
    two_agents(Sleep::Descriptor, 1);
}

#[test]
fn two_agents_of_two_leaves_and_an_owner_asleep_on_the_bell() {
    two_agents(Sleep::Word, ALONE);
}

#[test]
fn a_nudge_beside_a_raise_wakes_the_owner() {
    check(|| {
        let table = Table::new();
        let poisoned = Arc::new(AtomicU32::new(0));
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.write(0, 0, 1));
        let (nudger, flag) = (table.clone(), poisoned.clone());
        let nudger = loom::thread::spawn(move || {
            flag.store(1, Ordering::Release);
            nudger.wake(nudger.lanes().nudge());
        });
        let mut rose = false;
        table.own(Sleep::Word, |lane| {
            rose |= lane.is_some();
            rose && poisoned.load(Ordering::Acquire) == 1
        });
        agent.join().unwrap();
        nudger.join().unwrap();
    });
}

/// A second thread of the owner takes the marks. Whatever it takes it passes on with a nudge, so the
/// thread that sleeps misses nothing.
fn a_thread_sleeps_while_another_looks(how: Sleep) {
    check(move || {
        let table = Table::new();
        let taken = Arc::new(AtomicU32::new(0));
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.write(0, 0, 1));
        let (other, by_other) = (table.clone(), taken.clone());
        let other = loom::thread::spawn(move || {
            let mut rose = false;
            if other.lanes().take_raised(|_| rose = true) {
                by_other.fetch_or(u32::from(rose), Ordering::AcqRel);
                other.wake(other.lanes().nudge());
            }
        });
        let mut rose = false;
        table.own(how, |lane| {
            rose |= lane.is_some();
            rose || taken.load(Ordering::Acquire) == 1
        });
        assert_eq!(table.lanes().value(0), 1);
        agent.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_thread_asleep_on_the_bell_misses_nothing_that_another_takes() {
    a_thread_sleeps_while_another_looks(Sleep::Word);
}

#[test]
fn an_event_loop_misses_nothing_that_another_thread_takes() {
    a_thread_sleeps_while_another_looks(Sleep::EventLoop);
}

#[test]
fn two_threads_asleep_in_different_ways_are_both_woken() {
    check(|| {
        let table = Table::new();
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.write(0, 0, 1));
        let looped = table.clone();
        let event_loop = loom::thread::spawn(move || {
            while looped.lanes().value(0) == 0 {
                if looped.lanes().prepare_sleep(Sleep::EventLoop) {
                    looped.event.sleep();
                    looped.lanes().finish_sleep(Sleep::EventLoop);
                }
            }
        });
        while table.lanes().value(0) == 0 {
            if table.lanes().prepare_sleep(Sleep::Word) {
                table.lanes().sleep_on_word(Duration::MAX);
                table.lanes().finish_sleep(Sleep::Word);
            }
        }
        agent.join().unwrap();
        event_loop.join().unwrap();
    });
}
