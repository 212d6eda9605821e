//! Every interleaving between agents that raise and an owner that takes and sleeps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_lanes`
//!
//! Sleeps in a model have no timeout, so that a lost wake-up is a deadlock. An owner here finds raises
//! only by dirty bits, so that a lost dirty bit is a deadlock too.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::testing::{CacheLine, Word32, Word64};
use weft_fabric::testing::{Lanes, SleepMode, Wake};

/// Eventfd, with the owner's poll on it.
struct EventFd {
    readable: Mutex<bool>,
    changed: Condvar,
}

impl EventFd {
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

/// Table with two leaves, where each model uses a few lanes, and a payload for each raise.
struct Table {
    doorbell: CacheLine<Futex>,
    leaves: Vec<CacheLine<Word>>,
    words: Vec<CacheLine<[Word; 2]>>,
    event: EventFd,
    payload: [UnsafeCell<u32>; 2],
}

// SAFETY: loom checks that two threads never access a payload at once.
unsafe impl Sync for Table {}
// SAFETY: as above.
unsafe impl Send for Table {}

/// Lanes that share a leaf, and one in the other leaf.
const ALONE: usize = 64;
const LANES: usize = 65;

impl Table {
    fn new() -> Arc<Table> {
        let word = |_| CacheLine(Word::new(0));
        Arc::new(Table {
            doorbell: CacheLine(Futex::new(0)),
            leaves: (0..2).map(word).collect(),
            // Words without raises are created once and never accessed.
            words: (0..LANES.div_ceil(2))
                .map(|_| CacheLine([Word::new(0), Word::new(0)]))
                .collect(),
            event: EventFd { readable: Mutex::new(false), changed: Condvar::new() },
            payload: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { doorbell: &self.doorbell, leaves: &self.leaves, words: &self.words }
    }

    /// Agent: writes payload `index`, then raises.
    fn write(&self, index: usize, lane: usize, value: u64) {
        // SAFETY: this payload is read only after it is counted; loom checks.
        self.payload[index].with_mut(|payload| unsafe { *payload = 7 });
        self.wake(self.lanes().raise(lane, value));
    }

    fn wake(&self, wake: Wake) {
        match wake {
            Wake::No => {}
            Wake::Word => self.doorbell.0.wake(),
            Wake::Descriptor => self.event.signal(),
            Wake::WordAndDescriptor => {
                self.doorbell.0.wake();
                self.event.signal();
            }
        }
    }

    /// Owner: payload `index` was counted.
    fn read(&self, index: usize) {
        // SAFETY: it was counted, so the writes are over; loom checks.
        assert_eq!(self.payload[index].with(|payload| unsafe { *payload }), 7);
    }

    /// Owner: takes dirty bits and sleeps until `done`, which is called for each raised lane and once for
    /// each wake-up.
    fn own(&self, how: SleepMode, mut done: impl FnMut(Option<usize>) -> bool) {
        loop {
            let mut finished = false;
            self.lanes().take_dirty(|lane| finished |= done(Some(lane)));
            if finished || done(None) {
                return;
            }
            if !self.lanes().prepare_sleep(how) {
                continue;
            }
            match how {
                SleepMode::Word => self.lanes().sleep_on_word(Duration::MAX),
                SleepMode::Descriptor | SleepMode::EventLoop => self.event.sleep(),
            }
            if self.lanes().finish_sleep(how) && how != SleepMode::Word {
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
fn one_agent(how: SleepMode) {
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
fn one_agent_and_an_owner_asleep_on_the_doorbell() {
    one_agent(SleepMode::Word);
}

#[test]
fn one_agent_and_an_owner_asleep_on_its_descriptor() {
    one_agent(SleepMode::Descriptor);
}

#[test]
fn an_owner_that_sees_one_of_two_lanes_raised_together_sees_the_other() {
    check(|| {
        let table = Table::new();
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.wake(agent.lanes().raise_both(0, 1, 5)));
        let mut seen = [false; 2];
        table.own(SleepMode::Word, |rose| {
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

/// Two agents raise a lane each; the owner observes both.
fn two_agents(how: SleepMode, other: usize) {
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
fn two_agents_of_one_leaf_and_an_owner_asleep_on_the_doorbell() {
    two_agents(SleepMode::Word, 1);
}

#[test]
fn two_agents_of_one_leaf_and_an_owner_asleep_on_its_descriptor() {
    two_agents(SleepMode::Descriptor, 1);
}

#[test]
fn two_agents_of_two_leaves_and_an_owner_asleep_on_the_doorbell() {
    two_agents(SleepMode::Word, ALONE);
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
            nudger.wake(nudger.lanes().notify());
        });
        let mut rose = false;
        table.own(SleepMode::Word, |lane| {
            rose |= lane.is_some();
            rose && poisoned.load(Ordering::Acquire) == 1
        });
        agent.join().unwrap();
        nudger.join().unwrap();
    });
}

/// A second owner thread takes the dirty bits. It passes them on with a wake-up, so that the sleeping
/// thread misses none.
fn a_thread_sleeps_while_another_polls(how: SleepMode) {
    check(move || {
        let table = Table::new();
        let taken = Arc::new(AtomicU32::new(0));
        let agent = table.clone();
        let agent = loom::thread::spawn(move || agent.write(0, 0, 1));
        let (other, by_other) = (table.clone(), taken.clone());
        let other = loom::thread::spawn(move || {
            let mut rose = false;
            if other.lanes().take_dirty(|_| rose = true) {
                by_other.fetch_or(u32::from(rose), Ordering::AcqRel);
                other.wake(other.lanes().notify());
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
fn a_thread_asleep_on_the_doorbell_misses_no_raise_that_another_takes() {
    a_thread_sleeps_while_another_polls(SleepMode::Word);
}

#[test]
fn an_event_loop_misses_no_raise_that_another_thread_takes() {
    a_thread_sleeps_while_another_polls(SleepMode::EventLoop);
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
                if looped.lanes().prepare_sleep(SleepMode::EventLoop) {
                    looped.event.sleep();
                    looped.lanes().finish_sleep(SleepMode::EventLoop);
                }
            }
        });
        while table.lanes().value(0) == 0 {
            if table.lanes().prepare_sleep(SleepMode::Word) {
                table.lanes().sleep_on_word(Duration::MAX);
                table.lanes().finish_sleep(SleepMode::Word);
            }
        }
        agent.join().unwrap();
        event_loop.join().unwrap();
    });
}
