//! Engine shared by threads.
//!
//! Any thread may call at any time: the engine's lock is held for one step, never during a wait. One
//! waiting thread leads: it sleeps on the doorbell or on descriptors and makes progress for all
//! ([`crate::waiters`]). Events from any thread's poll wake the waiting threads. Threads that only submit
//! ([`crate::Submitter`]) try the lock and never block on it.

use crate::engine::{AnnouncedSleep, Engine};
use crate::error::{Error, Result};
use crate::inbox::{Inbox, Submission};
use crate::lane_table::LaneTable;
use crate::types::Time;
use crate::wait;
use crate::wait::EngineAccess;
use crate::waiters::{LeaderSleep, Waiters};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Engine, lock and waiting threads.
pub struct SharedEngine {
    engine: Mutex<Engine>,
    lanes: Arc<LaneTable>,
    /// Threads that wait for the lock for a call; spinning waits yield to them.
    callers: AtomicU32,
    waiters: Waiters<AtomicU32>,
    closed: AtomicBool,
    /// A progress thread runs.
    has_thread: AtomicBool,
    inbox: Inbox,
}

impl SharedEngine {
    /// Shares an engine.
    pub fn new(engine: Engine) -> SharedEngine {
        SharedEngine {
            lanes: engine.lane_table().clone(),
            engine: Mutex::new(engine),
            callers: AtomicU32::new(0),
            waiters: Waiters::default(),
            closed: AtomicBool::new(false),
            has_thread: AtomicBool::new(false),
            inbox: Inbox::default(),
        }
    }

    /// Locks the engine for one step. Never hold the guard during a wait.
    pub fn lock(&self) -> EngineGuard<'_> {
        let engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.wait_for_lock(),
        };
        EngineGuard::new(self, engine, 0)
    }

    #[cold]
    fn wait_for_lock(&self) -> MutexGuard<'_, Engine> {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.callers.fetch_sub(1, Ordering::Relaxed);
        engine
    }

    /// True if a poll finds lanes that peers have raised. Without the lock.
    pub fn has_raised(&self) -> bool {
        self.lanes.has_dirty()
    }

    /// Prefetches what a poll loads for lanes that peers have raised. Without the lock.
    #[inline]
    pub fn prefetch_raised(&self) {
        self.lanes.prefetch_dirty();
    }

    /// Access for a waiting thread; drop it after the wait.
    pub fn access(&self) -> SharedEngineAccess<'_> {
        self.waiters.enter();
        SharedEngineAccess { shared: self, own_waiters: 1 }
    }

    /// Access for a progress thread, which other threads' events do not wake.
    pub(crate) fn progress_access(&self) -> SharedEngineAccess<'_> {
        SharedEngineAccess { shared: self, own_waiters: 0 }
    }

    /// Records whether a thread makes progress.
    pub(crate) fn set_has_thread(&self, has_thread: bool) {
        self.has_thread.store(has_thread, Ordering::Relaxed);
    }

    /// Ends all present and later waits with [`weft_control::Error::Closed`].
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

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Submits what is in the inbox, unless another thread holds the lock, which then does so on release.
    pub(crate) fn drain_inbox(&self) {
        loop {
            // Either the lock holder, with the same fence after unlocking, sees the submission, or this
            // thread finds the lock free.
            fence(Ordering::SeqCst);
            if self.inbox.is_empty() {
                return;
            }
            let mut engine = match self.engine.try_lock() {
                Ok(engine) => engine,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let epoch = engine.epoch();
            self.inbox.drain(|submission| submit(&mut engine, submission));
            let (found, queued) = (engine.epoch() != epoch, engine.has_queued());
            if found && engine.has_watches() {
                engine.check_watches();
            }
            drop(engine);
            if found {
                self.notify_others(0, queued);
            }
        }
    }

    /// Wakes waiting threads other than the caller's `own_waiters`, and the progress thread if a poll has
    /// to post `queued` parts.
    fn notify_others(&self, own_waiters: u32, queued: bool) {
        if self.waiters.are_more_than(own_waiters)
            || queued && self.has_thread.load(Ordering::Relaxed)
        {
            self.notify();
        }
    }

    /// Wakes every waiting thread.
    pub(crate) fn notify(&self) {
        if self.waiters.notify() {
            self.lanes.notify();
        }
    }
}

/// Engine lock guard. On drop it wakes waiting threads if the holder found events.
pub struct EngineGuard<'a> {
    shared: &'a SharedEngine,
    engine: ManuallyDrop<MutexGuard<'a, Engine>>,
    epoch: u64,
    /// Waiting threads that the holder counts as.
    own_waiters: u32,
}

impl<'a> EngineGuard<'a> {
    fn new(
        shared: &'a SharedEngine,
        mut engine: MutexGuard<'a, Engine>,
        own_waiters: u32,
    ) -> EngineGuard<'a> {
        let epoch = engine.epoch();
        shared.inbox.drain(|submission| submit(&mut engine, submission));
        EngineGuard { shared, engine: ManuallyDrop::new(engine), epoch, own_waiters }
    }
}

fn submit(engine: &mut Engine, submission: Submission) {
    let Submission { descriptor, outcome } = submission;
    engine.submit_one(&descriptor, outcome);
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
        let (found, queued) = (self.engine.epoch() != self.epoch, self.engine.has_queued());
        if found && self.engine.has_watches() {
            self.engine.check_watches();
        }
        // SAFETY: the guard is dropped only here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.engine) };
        if found {
            self.shared.notify_others(self.own_waiters, queued);
        }
        if self.shared.inbox.is_used() {
            self.shared.drain_inbox();
        }
    }
}

/// Yields to callers before a waiting thread competes for the lock; the bound lets it keep the deadline
/// under constant calls.
const MAX_YIELDS: u32 = 16;

/// Access that a waiting thread has to an engine shared by threads.
pub struct SharedEngineAccess<'a> {
    shared: &'a SharedEngine,
    /// Waiting threads that it counts as.
    own_waiters: u32,
}

impl SharedEngineAccess<'_> {
    /// Locks the engine after waiting callers.
    fn lock(&self) -> EngineGuard<'_> {
        for _ in 0..MAX_YIELDS {
            if self.shared.callers.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        let engine = self.shared.engine.lock().unwrap_or_else(PoisonError::into_inner);
        EngineGuard::new(self.shared, engine, self.own_waiters)
    }
}

/// The leading thread's sleep on the engine.
struct EngineSleep<'a>(&'a SharedEngineAccess<'a>);

impl LeaderSleep for EngineSleep<'_> {
    type Announced = AnnouncedSleep;

    fn prepare(&self) -> Option<AnnouncedSleep> {
        self.0.lock().prepare_park()
    }

    fn sleep(&self, park: &AnnouncedSleep, until: Time) {
        park.sleep(until);
    }

    fn finish(&self, park: AnnouncedSleep) {
        self.0.lock().finish_park(&park);
    }
}

impl EngineAccess for SharedEngineAccess<'_> {
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(&mut self.lock())
    }

    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R {
        work(&mut self.lock(), Some(&self.shared.callers))
    }

    fn ticket(&self) -> u32 {
        self.shared.waiters.ticket()
    }

    fn park(&mut self, ticket: u32, until: Time) {
        self.shared.waiters.park(ticket, until, &EngineSleep(self));
    }

    fn yield_lead(&self) {
        self.shared.waiters.yield_lead();
    }

    fn closed(&self) -> Result<()> {
        self.shared.check_open()
    }
}

impl Drop for SharedEngineAccess<'_> {
    fn drop(&mut self) {
        if self.own_waiters > 0 {
            self.shared.waiters.exit();
        } else {
            self.shared.waiters.yield_lead();
        }
    }
}

/// Thread that makes progress until it is dropped.
pub(crate) struct ProgressThread {
    shared: Arc<SharedEngine>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ProgressThread {
    pub fn start(shared: &Arc<SharedEngine>, spin: std::time::Duration) -> Result<ProgressThread> {
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, stopped) = (shared.clone(), stop.clone());
        shared.has_thread.store(true, Ordering::Relaxed);
        let work = move || {
            let mut options =
                wait::WaitOptions { deadline: Time::MAX, spin, interrupted: &mut || false };
            let mut access = engine.progress_access();
            // Ends when stopped, or when the group is poisoned or closed.
            let ended = wait::run(
                &mut access,
                "progress",
                0,
                &mut options,
                |_, _| Ok::<_, Error>(stopped.load(Ordering::Acquire).then_some(())),
                |_| Vec::new(),
            );
            drop(access);
            if ended.is_err() || engine.check_open().is_err() {
                engine.lock().end_watches();
            }
        };
        let thread = std::thread::Builder::new().name("weft-progress".into()).spawn(work);
        let thread = thread.map_err(|e| {
            shared.has_thread.store(false, Ordering::Relaxed);
            Error::from(weft_control::Error::thread("the progress thread")(e))
        })?;
        Ok(ProgressThread { shared: shared.clone(), stop, thread: Some(thread) })
    }

    /// Ends the thread without waiting for it.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.shared.notify();
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.stop();
        self.shared.has_thread.store(false, Ordering::Relaxed);
        // A callback on this thread may drop the communicator.
        let thread =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(thread) = thread {
            // The thread has reported the panic.
            let _ = thread.join();
        }
    }
}
