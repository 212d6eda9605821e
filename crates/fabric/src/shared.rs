//! An engine that threads share.
//!
//! Any thread may call at any time: the engine's lock is held for one step, never for a wait. Of the
//! threads that wait, one leads: it sleeps on the bell or on the descriptors and makes progress for all.
//! The others follow: they sleep on a sequence number that rises whenever a poll finds something. A leader
//! whose wait ends raises it too, and a follower takes its place. Threads that only submit
//! ([`Submitter`]) never take the lock for longer than it takes to try.

use crate::atomics::{Line, Word32};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::inbox::{Inbox, Submission, Submitter};
use crate::lane_table::LaneTable;
use crate::types::Time;
use crate::wait::Host;
use crate::{clock, wait};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// An engine, its lock, and its waiting threads.
pub struct SharedEngine {
    engine: Mutex<Engine>,
    lanes: Arc<LaneTable>,
    /// Threads that want the lock for a call; spinning waits give way to them.
    callers: AtomicU32,
    /// Threads inside a wait.
    waiting: AtomicU32,
    /// One of them sleeps on the bell or the descriptors, or is about to.
    leads: AtomicBool,
    /// Followers that sleep on `sequence`, or are about to.
    followers: AtomicU32,
    /// Rises with everything that may end a wait.
    sequence: Line<AtomicU32>,
    closed: AtomicBool,
    inbox: Inbox,
}

impl SharedEngine {
    /// Shares an engine.
    pub fn new(engine: Engine) -> SharedEngine {
        SharedEngine {
            lanes: engine.lane_table().clone(),
            engine: Mutex::new(engine),
            callers: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            leads: AtomicBool::new(false),
            followers: AtomicU32::new(0),
            sequence: Line(AtomicU32::new(0)),
            closed: AtomicBool::new(false),
            inbox: Inbox::default(),
        }
    }

    /// The engine, for one step. Hold it for no wait of any kind.
    pub fn lock(&self) -> EngineGuard<'_> {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.callers.fetch_sub(1, Ordering::Relaxed);
        EngineGuard::new(self, engine, 0)
    }

    /// A waiting thread's access. Drop it when the wait is over.
    pub fn host(&self) -> SharedHost<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        SharedHost { shared: self }
    }

    /// Ends all waits, now and later, with [`weft_control::Error::Closed`].
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.notify();
    }

    /// The error after [`SharedEngine::close`].
    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(weft_control::Error::Closed.into());
        }
        Ok(())
    }

    /// A producer of submissions for threads that must not wait for the lock, such as the proxy of a GPU.
    pub fn submitter(self: &Arc<Self>) -> Submitter {
        Submitter::new(self.clone())
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Submits what lies in the inbox, unless another thread holds the lock: that one does on its way out.
    pub(crate) fn drain_inbox(&self) {
        // Against the fence of a guard that is dropped: the holder sees the submission, or this thread
        // finds the lock free.
        fence(Ordering::SeqCst);
        let engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        drop(EngineGuard::new(self, engine, 0));
    }

    /// Makes every waiting thread look again.
    fn notify(&self) {
        self.sequence.0.fetch_add(1, Ordering::SeqCst);
        if self.leads.load(Ordering::SeqCst) {
            self.lanes.nudge();
        }
        if self.followers.load(Ordering::SeqCst) > 0 {
            self.sequence.0.wake();
        }
    }
}

/// The engine, locked. What its holder found is passed on to waiting threads when it is dropped.
pub struct EngineGuard<'a> {
    shared: &'a SharedEngine,
    engine: ManuallyDrop<MutexGuard<'a, Engine>>,
    epoch: u64,
    /// Waiting threads that the holder itself is.
    own: u32,
}

impl<'a> EngineGuard<'a> {
    fn new(
        shared: &'a SharedEngine,
        mut engine: MutexGuard<'a, Engine>,
        own: u32,
    ) -> EngineGuard<'a> {
        let epoch = engine.epoch();
        shared.inbox.drain(|submission| submit(&mut engine, submission));
        EngineGuard { shared, engine: ManuallyDrop::new(engine), epoch, own }
    }
}

fn submit(engine: &mut Engine, submission: Submission) {
    let Submission { descriptor, outcomes } = submission;
    if let Err(error) = engine.submit_one(&descriptor, &outcomes) {
        outcomes(descriptor.tag, Err(error.to_string()));
    }
}

impl Deref for EngineGuard<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for EngineGuard<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl Drop for EngineGuard<'_> {
    fn drop(&mut self) {
        let found = self.engine.epoch() != self.epoch;
        // SAFETY: the guard is dropped here alone, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.engine) };
        if found && self.shared.waiting.load(Ordering::Relaxed) > self.own {
            self.shared.notify();
        }
        if self.shared.inbox.is_used() {
            fence(Ordering::SeqCst);
            if !self.shared.inbox.is_empty() {
                self.shared.drain_inbox();
            }
        }
    }
}

/// A waiting thread's access to a [`SharedEngine`].
pub struct SharedHost<'a> {
    shared: &'a SharedEngine,
}

impl SharedHost<'_> {
    /// The lock, behind all callers that want it.
    fn lock(&self) -> EngineGuard<'_> {
        while self.shared.callers.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let engine = self.shared.engine.lock().unwrap_or_else(PoisonError::into_inner);
        EngineGuard::new(self.shared, engine, 1)
    }

    fn lead(&self, ticket: u32, until: Time) {
        let shared = self.shared;
        let park = self.lock().prepare_park();
        let Some(park) = park else { return };
        // Whatever was found since the ticket was drawn either shows here or nudges the bell.
        if shared.sequence.0.load(Ordering::SeqCst) == ticket {
            park.sleep(until);
        }
        self.lock().finish_park(&park);
    }

    fn follow(&self, ticket: u32, until: Time) {
        let shared = self.shared;
        shared.followers.fetch_add(1, Ordering::SeqCst);
        shared.sequence.0.wait(ticket, until.since(clock::now()));
        shared.followers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Host for SharedHost<'_> {
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(&mut self.lock())
    }

    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R {
        work(&mut self.lock(), Some(&self.shared.callers))
    }

    fn ticket(&self) -> u32 {
        self.shared.sequence.0.load(Ordering::SeqCst)
    }

    fn park(&mut self, ticket: u32, until: Time) {
        if self.shared.leads.swap(true, Ordering::SeqCst) {
            self.follow(ticket, until);
        } else {
            self.lead(ticket, until);
            self.shared.leads.store(false, Ordering::SeqCst);
        }
    }

    fn closed(&self) -> Result<()> {
        self.shared.check_open()
    }
}

impl Drop for SharedHost<'_> {
    fn drop(&mut self) {
        // A follower may have to lead now.
        if self.shared.waiting.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.shared.notify();
        }
    }
}

/// A thread that makes progress until it is dropped.
pub(crate) struct ProgressThread {
    shared: Arc<SharedEngine>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ProgressThread {
    pub fn start(shared: &Arc<SharedEngine>, spin: std::time::Duration) -> Result<ProgressThread> {
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, stopped) = (shared.clone(), stop.clone());
        let work = move || {
            let mut stopped = || stopped.load(Ordering::Acquire);
            let deadline = Time::MAX;
            let mut waiter = wait::Waiter { deadline, spin, interrupted: &mut stopped };
            let mut host = engine.host();
            // It ends when it is stopped, or when the group is poisoned: then no progress is possible.
            let _ = wait::run(
                &mut host,
                "progress",
                0,
                &mut waiter,
                |_, _| Ok::<Option<()>, Error>(None),
                |_| Vec::new(),
            );
        };
        let thread = std::thread::Builder::new().name("weft-progress".into()).spawn(work);
        let thread = thread.map_err(|e| Error::system("cannot start a progress thread", e))?;
        Ok(ProgressThread { shared: shared.clone(), stop, thread: Some(thread) })
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by it.
            let _ = thread.join();
        }
    }
}
