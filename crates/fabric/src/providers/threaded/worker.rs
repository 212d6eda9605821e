//! The thread and what it works on.

use crate::atomics::Line;
use crate::clock;
use crate::error::{Error, Result};
use crate::lane_table::{LaneTable, wake};
use crate::lanes::{Lanes, Sleep};
use crate::provider::{Completion, Posted, Provider, Sink, Work};
use crate::ring::{Consumer, Producer};
use crate::types::{Lane, Page, Time};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weft_control::Rank;

/// For how long the idle thread spins.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What both threads touch.
pub(super) struct Shared {
    worker: Mutex<Worker>,
    /// Callers who want the worker; the thread lets them go first.
    callers: AtomicU32,
    /// Rung after posts; see [`Shared::bell`].
    bell: Line<AtomicU32>,
    wake: OwnedFd,
    stop: AtomicBool,
}

/// The provider and the thread's ends of the rings.
pub(super) struct Worker {
    pub inner: Box<dyn Provider>,
    pub posts: Consumer<OwnedWork>,
    pub endings: Producer<Ending>,
    /// Page lists that are done with go back here.
    pub spare: Producer<Vec<Page>>,
    /// Posts that the provider has not taken yet, in order.
    pub waiting: VecDeque<OwnedWork>,
    /// Peers whose queue was full in this step.
    pub full: Vec<Rank>,
    pub sink: Sink,
    /// Once connected.
    pub lanes: Option<Arc<LaneTable>>,
}

/// A [`Work`] that outlives its post.
pub(super) struct OwnedWork {
    pub token: u64,
    pub peer: Rank,
    pub lane: Lane,
    pub credits: Option<Lane>,
    pub pages: Vec<Page>,
}

pub(super) enum Ending {
    Completion(Completion),
    Lost(Rank, String),
}

impl Shared {
    pub fn new(worker: Worker) -> Result<Shared> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("cannot create an event descriptor", e))?;
        Ok(Shared {
            worker: Mutex::new(worker),
            callers: AtomicU32::new(0),
            bell: Line(AtomicU32::new(0)),
            wake,
            stop: AtomicBool::new(false),
        })
    }

    /// Ends the thread soon.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
    }

    /// The lanes' bell without any lanes: its nudge is all that is needed.
    fn bell(&self) -> Lanes<'_, AtomicU32, AtomicU64> {
        Lanes { bell: &self.bell, leaves: &[], words: &[] }
    }

    /// Wakes the thread if it sleeps.
    pub fn ring(&self) {
        wake(self.bell(), self.bell().nudge(), self.wake.as_fd());
    }

    /// Calls the provider from another thread than its own.
    pub fn call<R>(&self, f: impl FnOnce(&mut Worker) -> R) -> R {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        self.callers.fetch_sub(1, Ordering::Relaxed);
        let result = f(&mut worker);
        drop(worker);
        // The call may have left something to do.
        self.ring();
        result
    }

    /// The thread.
    pub fn run(&self, descriptor: Option<RawFd>) {
        let mut idle_since = clock::now();
        while !self.stop.load(Ordering::Acquire) {
            while self.callers.load(Ordering::Relaxed) > 0 {
                std::thread::yield_now();
            }
            let now = clock::now();
            let worked = self.worker.lock().unwrap_or_else(PoisonError::into_inner).step(now);
            if worked {
                idle_since = now;
            } else if now.since(idle_since) < SPIN {
                std::hint::spin_loop();
            } else if self.sleep(descriptor) {
                idle_since = clock::now();
            }
        }
    }

    /// Whether something woke it.
    fn sleep(&self, descriptor: Option<RawFd>) -> bool {
        // Marks are not looked at: every step looks at everything.
        let mut marks = 0;
        let mut ready = true;
        if self.bell().prepare_sleep(&mut marks, Sleep::Descriptor) {
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            // SAFETY: the provider that owns it lives in `self.worker`.
            let inner = descriptor.map(|inner| unsafe { BorrowedFd::borrow_raw(inner) });
            polled.extend(inner.map(|inner| PollFd::from_borrowed_fd(inner, PollFlags::IN)));
            ready = poll(&mut polled, Some(&NAP)).is_ok_and(|ready| ready > 0);
        }
        self.bell().finish_sleep(&mut marks);
        // Empty unless the thread was woken.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        ready
    }
}

impl Worker {
    /// One round of progress; whether there was any.
    fn step(&mut self, now: Time) -> bool {
        let posted = self.take_posts();
        self.offer();
        self.inner.flush(&mut self.sink);
        self.inner.poll(now, &mut self.sink);
        self.report() || posted
    }

    /// Cuts a peer off; returns all that ended and was not reported yet.
    pub fn fence(&mut self, peer: Rank) -> Sink {
        self.take_posts();
        let (cut, waiting) =
            std::mem::take(&mut self.waiting).into_iter().partition(|owned| owned.peer == peer);
        self.waiting = waiting;
        let cut: VecDeque<OwnedWork> = cut;
        for owned in cut {
            self.sink.failed(owned.token, format!("{peer} was cut off"));
        }
        self.inner.fence(peer, &mut self.sink);
        std::mem::take(&mut self.sink)
    }

    fn take_posts(&mut self) -> bool {
        let before = self.waiting.len();
        self.waiting.extend(std::iter::from_fn(|| self.posts.take()));
        self.waiting.len() > before
    }

    /// Offers each waiting part once; behind one that finds its peer's queue full, that peer's
    /// others wait too.
    fn offer(&mut self) {
        self.full.clear();
        for _ in 0..self.waiting.len() {
            let Some(owned) = self.waiting.pop_front() else { return };
            if self.full.contains(&owned.peer) {
                self.waiting.push_back(owned);
                continue;
            }
            let OwnedWork { token, peer, lane, credits, ref pages } = owned;
            let work = Work { token, peer, lane, credits, rider: None, pages };
            match self.inner.post(&work, &mut self.sink) {
                Ok(Posted::InFlight) => {}
                Ok(Posted::Done) => self.sink.done(token),
                Err(why) => self.sink.failed(token, why),
                Ok(Posted::Full) => {
                    self.full.push(peer);
                    self.waiting.push_back(owned);
                    continue;
                }
            }
            // A list that finds no room is freed.
            let _ = self.spare.put(owned.pages);
        }
    }

    /// Hands what ended to the engine and wakes it; whether there was anything.
    fn report(&mut self) -> bool {
        let mut any = false;
        while !self.endings.is_full() {
            let completion = self.sink.completions.pop().map(Ending::Completion);
            let lost = || self.sink.lost.pop().map(|(rank, why)| Ending::Lost(rank, why));
            let Some(ending) = completion.or_else(lost) else { break };
            any |= self.endings.put(ending).is_ok();
        }
        if let (true, Some(lanes)) = (any, &self.lanes) {
            lanes.nudge();
        }
        any
    }
}
