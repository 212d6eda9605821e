//! Every interleaving between threads that wait on one engine, an agent that raises, and a thread that
//! polls.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_waiters`
//!
//! The waiters' protocol and the lanes are the production code; the engine is a lock, a count of
//! successful polls, and the raised lanes. Sleeps have no timeout, so that a lost wake-up is a deadlock.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::sync::{Arc, Mutex};
use loom::thread::{self, JoinHandle};
use loom_word::{Futex, Word};
use std::time::Duration;
use weft_fabric::Time;
use weft_fabric::testing::{CacheLine, Word32, Word64};
use weft_fabric::testing::{Lanes, SleepMode, Wake};
use weft_fabric::testing::{LeaderSleep, Waiters};

/// State under the engine's lock.
#[derive(Default)]
struct Engine {
    epoch: u32,
    /// Raised lanes, by number.
    rose: [bool; 2],
}

struct Model {
    engine: Mutex<Engine>,
    waiters: Waiters<Futex>,
    doorbell: CacheLine<Futex>,
    leaves: Vec<CacheLine<Word>>,
    words: Vec<CacheLine<[Word; 2]>>,
}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            engine: Mutex::new(Engine::default()),
            waiters: Waiters::default(),
            doorbell: CacheLine(Futex::new(0)),
            leaves: vec![CacheLine(Word::new(0))],
            words: vec![CacheLine([Word::new(0), Word::new(0)])],
        })
    }

    fn lanes(&self) -> Lanes<'_, Futex, Word> {
        Lanes { doorbell: &self.doorbell, leaves: &self.leaves, words: &self.words }
    }

    fn wake(&self, wake: Wake) {
        if wake == Wake::Word {
            self.doorbell.0.wake();
        }
    }

    /// Agent: raises a lane.
    fn raise(&self, lane: usize) {
        self.wake(self.lanes().raise(lane, 1));
    }

    /// Step under the lock, as in `EngineGuard`: findings are passed on.
    fn poll(&self, own: u32, done: impl FnOnce(&Engine) -> bool) -> bool {
        let mut engine = self.engine.lock().unwrap();
        let before = engine.epoch;
        let mut rose = engine.rose;
        self.lanes().take_dirty(|lane| rose[lane] = true);
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
            self.wake(self.lanes().notify());
        }
    }

    /// Wait, as `wait::run` over a `SharedEngineAccess`.
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

struct OnWord<'a>(&'a Model);

impl LeaderSleep for OnWord<'_> {
    type Announced = ();

    fn prepare(&self) -> Option<()> {
        let _engine = self.0.engine.lock().unwrap();
        self.0.lanes().prepare_sleep(SleepMode::Word).then_some(())
    }

    fn sleep(&self, (): &(), _: Time) {
        self.0.lanes().sleep_on_word(Duration::MAX);
    }

    fn finish(&self, (): ()) {
        let _engine = self.0.engine.lock().unwrap();
        self.0.lanes().finish_sleep(SleepMode::Word);
    }
}

/// Model thread.
fn spawn(model_state: &Arc<Model>, work: impl FnOnce(&Model) + 'static) -> JoinHandle<()> {
    let model_state = model_state.clone();
    thread::spawn(move || work(&model_state))
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Another thread's poll takes the raise that the first waits for, and with it the other threads'
/// wake-ups.
#[test]
fn a_thread_that_waits_misses_no_raise_that_another_polls() {
    check(3, || {
        let model_state = Model::new();
        let agent = spawn(&model_state, |model_state| model_state.raise(0));
        let poller = spawn(&model_state, |model_state| {
            model_state.poll(0, |_| false);
            model_state.poll(0, |_| false);
        });
        model_state.wait(|engine| engine.rose[0]);
        agent.join().unwrap();
        poller.join().unwrap();
    });
}

/// Both wait for the same raise: one leads, the other follows, and both return.
#[test]
fn two_threads_wait_while_an_agent_raises_and_another_polls() {
    check(2, || {
        let model_state = Model::new();
        let agent = spawn(&model_state, |model_state| model_state.raise(0));
        let poller = spawn(&model_state, |model_state| {
            model_state.poll(0, |_| false);
        });
        let second = spawn(&model_state, |model_state| model_state.wait(|engine| engine.rose[0]));
        model_state.wait(|engine| engine.rose[0]);
        agent.join().unwrap();
        poller.join().unwrap();
        second.join().unwrap();
    });
}

/// The second raise comes after the first waiter has returned: a follower leads by then.
#[test]
fn a_follower_leads_when_the_leader_has_what_it_waited_for() {
    check(2, || {
        let model_state = Model::new();
        let first = spawn(&model_state, |model_state| {
            model_state.wait(|engine| engine.rose[0]);
            model_state.raise(1);
        });
        let second = spawn(&model_state, |model_state| model_state.wait(|engine| engine.rose[1]));
        model_state.raise(0);
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// Program state that ends all waits, such as a close.
#[test]
fn a_notification_ends_the_waits_of_all() {
    check(2, || {
        let model_state = Model::new();
        let closed = Arc::new(Futex::new(0));
        let its = closed.clone();
        let second = spawn(&model_state, move |model_state| model_state.wait(|_| its.load() == 1));
        let its = closed.clone();
        let closer = spawn(&model_state, move |model_state| {
            its.fetch_or(1);
            model_state.notify();
        });
        model_state.wait(|_| closed.load() == 1);
        second.join().unwrap();
        closer.join().unwrap();
    });
}

/// A wake-up that another thread's poll takes before a sleeper reaches the doorbell still wakes the
/// sleeper.
#[test]
fn a_nudge_is_not_taken_from_a_thread_on_its_way_to_sleep() {
    check(3, || {
        let model_state = Model::new();
        let flag = Arc::new(Futex::new(0));
        let its = flag.clone();
        let nudger = spawn(&model_state, move |model_state| {
            its.fetch_or(1);
            model_state.notify();
            model_state.poll(0, |_| false);
        });
        model_state.wait(|_| flag.load() == 1);
        nudger.join().unwrap();
    });
}
