//! An engine that threads share.
//!
//! Any thread may call at any time: the engine's lock is held for one step, never for a wait. Of the
//! threads that wait, one leads: it sleeps on the bell or on the descriptors and makes progress for all
//! ([`crate::waiters`]). What any thread's poll finds is passed on to those that wait. Threads that only
//! submit ([`Submitter`]) never take the lock for longer than it takes to try.

use crate::engine::Engine;
use crate::engine::Park;
use crate::error::{Error, Result};
use crate::inbox::{Inbox, Submission, Submitter};
use crate::lane_table::LaneTable;
use crate::types::Time;
use crate::wait;
use crate::wait::Host;
use crate::waiters::{Bed, Waiters};
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

    /// The engine, for one step. Hold it for no wait of any kind.
    pub fn lock(&self) -> EngineGuard<'_> {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.callers.fetch_sub(1, Ordering::Relaxed);
        EngineGuard::new(self, engine, 0)
    }

    /// A waiting thread's access. Drop it when the wait is over.
    pub fn host(&self) -> SharedHost<'_> {
        self.waiters.enter();
        SharedHost { shared: self, own: 1 }
    }

    /// Access of a thread that waits for nothing but makes progress: what others find is not passed on to it.
    fn host_of_progress(&self) -> SharedHost<'_> {
        SharedHost { shared: self, own: 0 }
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
        self.inbox.open();
        // A thread that takes the lock from here on finds the inbox made, and has it to drain on the way out.
        drop(self.lock());
        Submitter::new(self.clone())
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Submits what lies in the inbox, unless another thread holds the lock: that one does on its way out.
    pub(crate) fn drain_inbox(&self) {
        loop {
            // The holder of the lock, which has this fence behind its unlock, sees the submission; or this
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
            drop(engine);
            if found {
                self.pass_on(0, queued);
            }
        }
    }

    /// Makes waiting threads look again, but for the caller's `own`; and the progress thread, if parts are
    /// `queued` that a poll has to post.
    fn pass_on(&self, own: u32, queued: bool) {
        if self.waiters.are_more_than(own) || queued && self.has_thread.load(Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Makes every waiting thread look again.
    fn notify(&self) {
        if self.waiters.notify() {
            self.lanes.nudge();
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
        // SAFETY: the guard is dropped here alone, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.engine) };
        if found {
            self.shared.pass_on(self.own, queued);
        }
        if self.shared.inbox.is_used() {
            self.shared.drain_inbox();
        }
    }
}

/// How often a waiting thread gives way to callers before it takes the lock beside them: without a bound,
/// threads that call all the time would keep it from its deadline.
const GIVE_WAY: u32 = 16;

/// A waiting thread's access to a [`SharedEngine`].
pub struct SharedHost<'a> {
    shared: &'a SharedEngine,
    /// Waiting threads that it counts as.
    own: u32,
}

impl SharedHost<'_> {
    /// The lock, behind callers that want it.
    fn lock(&self) -> EngineGuard<'_> {
        for _ in 0..GIVE_WAY {
            if self.shared.callers.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        let engine = self.shared.engine.lock().unwrap_or_else(PoisonError::into_inner);
        EngineGuard::new(self.shared, engine, self.own)
    }
}

/// Where a leader sleeps.
struct EngineBed<'a>(&'a SharedHost<'a>);

impl Bed for EngineBed<'_> {
    type Park = Park;

    fn prepare(&self) -> Option<Park> {
        self.0.lock().prepare_park()
    }

    fn sleep(&self, park: &Park, until: Time) {
        park.sleep(until);
    }

    fn finish(&self, park: Park) {
        self.0.lock().finish_park(&park);
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
        self.shared.waiters.ticket()
    }

    fn park(&mut self, ticket: u32, until: Time) {
        self.shared.waiters.park(ticket, until, &EngineBed(self));
    }

    fn step_aside(&self) {
        self.shared.waiters.step_aside();
    }

    fn closed(&self) -> Result<()> {
        self.shared.check_open()
    }
}

impl Drop for SharedHost<'_> {
    fn drop(&mut self) {
        if self.own > 0 {
            self.shared.waiters.exit();
        } else {
            self.shared.waiters.step_aside();
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
        shared.has_thread.store(true, Ordering::Relaxed);
        let work = move || {
            let mut waiter = wait::Waiter { deadline: Time::MAX, spin, interrupted: &mut || false };
            let mut host = engine.host_of_progress();
            // It ends when it is stopped, or when the group is poisoned: then no progress is possible.
            let _ = wait::run(
                &mut host,
                "progress",
                0,
                &mut waiter,
                |_, _| Ok::<_, Error>(stopped.load(Ordering::Acquire).then_some(())),
                |_| Vec::new(),
            );
        };
        let thread = std::thread::Builder::new().name("weft-progress".into()).spawn(work);
        let thread = thread.map_err(|e| Error::system("cannot start a progress thread", e))?;
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
        // A callback that the thread runs may drop its communicator.
        let thread =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(thread) = thread {
            // A panic of the thread was reported by it.
            let _ = thread.join();
        }
    }
}
