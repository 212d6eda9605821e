//! Every interleaving of threads that wait on one engine, an agent that raises, and a thread that polls.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_waiters`
//!
//! The waiters' protocol and the lanes are the code that runs; the engine is a lock, a count of polls that
//! found something, and the lanes that rose. Sleeps have no end of their own, so a lost wake-up shows as
//! a deadlock.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::sync::{Arc, Mutex};
use loom::thread::{self, JoinHandle};
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::Time;
use weft_fabric::atomics::{Line, Word32, Word64};
use weft_fabric::lanes::{Lanes, Sleep, Wake};
use weft_fabric::waiters::{Bed, Waiters};

/// What the lock of the engine protects.
#[derive(Default)]
struct Engine {
    epoch: u32,
    /// Lanes that rose, by number.
    rose: [bool; 2],
}

struct World {
    engine: Mutex<Engine>,
    waiters: Waiters<Futex>,
    bell: Line<Futex>,
    leaves: Vec<Line<Word>>,
    words: Vec<Line<[Word; 2]>>,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            engine: Mutex::new(Engine::default()),
            waiters: Waiters::default(),
            bell: Line(Futex::new(0)),
            leaves: vec![Line(Word::new(0))],
            words: vec![Line([Word::new(0), Word::new(0)])],
        })
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { bell: &self.bell, leaves: &self.leaves, words: &self.words }
    }

    fn wake(&self, wake: Wake) {
        if wake == Wake::Word {
            self.bell.0.wake();
        }
    }

    /// Agent: raises a lane.
    fn raise(&self, lane: usize) {
        self.wake(self.lanes().raise(lane, 1));
    }

    /// A step under the lock, as `EngineGuard` takes it: what it finds is passed on.
    fn poll(&self, own: u32, done: impl FnOnce(&Engine) -> bool) -> bool {
        let mut engine = self.engine.lock().unwrap();
        let before = engine.epoch;
        let mut rose = engine.rose;
        self.lanes().take_raised(|lane| rose[lane] = true);
        engine.epoch += u32::from(rose != engine.rose);
        engine.rose = rose;
        let found = engine.epoch != before;
        let done = done(&engine);
        drop(engine);
        if found && self.waiters.are_more_than(own) {
            self.notify();
        }
        done
    }

    fn notify(&self) {
        if self.waiters.notify() {
            self.wake(self.lanes().nudge());
        }
    }

    /// A wait, as `wait::run` over a `SharedHost` makes it.
    fn wait(&self, mut done: impl FnMut(&Engine) -> bool) {
        self.waiters.enter();
        loop {
            let ticket = self.waiters.ticket();
            if self.poll(1, &mut done) {
                break;
            }
            self.waiters.park(ticket, Time::MAX, &OnWord(self));
        }
        self.waiters.exit();
    }
}

struct OnWord<'a>(&'a World);

impl Bed for OnWord<'_> {
    type Park = ();

    fn prepare(&self) -> Option<()> {
        let _engine = self.0.engine.lock().unwrap();
        self.0.lanes().prepare_sleep(Sleep::Word).then_some(())
    }

    fn sleep(&self, (): &(), _: Time) {
        self.0.lanes().sleep_on_word(Duration::MAX);
    }

    fn finish(&self, (): ()) {
        let _engine = self.0.engine.lock().unwrap();
        self.0.lanes().finish_sleep(Sleep::Word);
    }
}

/// A thread of the model that works on the world.
fn beside(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || work(&world))
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Another thread's poll takes what the first waits for, and the nudges of others with it.
#[test]
fn a_thread_that_waits_misses_nothing_that_another_polls() {
    check(3, || {
        let world = World::new();
        let agent = beside(&world, |world| world.raise(0));
        let poller = beside(&world, |world| {
            world.poll(0, |_| false);
            world.poll(0, |_| false);
        });
        world.wait(|engine| engine.rose[0]);
        agent.join().unwrap();
        poller.join().unwrap();
    });
}

/// Both wait for the same raise: one leads, the other follows, and neither is forgotten.
#[test]
fn two_threads_wait_while_an_agent_raises_and_another_polls() {
    check(2, || {
        let world = World::new();
        let agent = beside(&world, |world| world.raise(0));
        let poller = beside(&world, |world| {
            world.poll(0, |_| false);
        });
        let second = beside(&world, |world| world.wait(|engine| engine.rose[0]));
        world.wait(|engine| engine.rose[0]);
        agent.join().unwrap();
        poller.join().unwrap();
        second.join().unwrap();
    });
}

/// The second raise comes once the first waiter has gone: a follower has to lead by then.
#[test]
fn a_follower_leads_when_the_leader_has_what_it_waited_for() {
    check(2, || {
        let world = World::new();
        let first = beside(&world, |world| {
            world.wait(|engine| engine.rose[0]);
            world.raise(1);
        });
        let second = beside(&world, |world| world.wait(|engine| engine.rose[1]));
        world.raise(0);
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// A state of the program that ends all waits, such as a close.
#[test]
fn a_notification_ends_the_waits_of_all() {
    check(2, || {
        let world = World::new();
        let closed = Arc::new(Futex::new(0));
        let its = closed.clone();
        let second = beside(&world, move |world| world.wait(|_| its.load() == 1));
        let its = closed.clone();
        let closer = beside(&world, move |world| {
            its.fetch_or(1);
            world.notify();
        });
        world.wait(|_| closed.load() == 1);
        second.join().unwrap();
        closer.join().unwrap();
    });
}

/// A nudge that another thread's poll takes on a sleeper's way to the bell wakes the sleeper all the same.
#[test]
fn a_nudge_is_not_taken_from_a_thread_on_its_way_to_sleep() {
    check(3, || {
        let world = World::new();
        let flag = Arc::new(Futex::new(0));
        let its = flag.clone();
        let nudger = beside(&world, move |world| {
            its.fetch_or(1);
            world.notify();
            world.poll(0, |_| false);
        });
        world.wait(|_| flag.load() == 1);
        nudger.join().unwrap();
    });
}
