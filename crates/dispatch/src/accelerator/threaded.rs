//! Backends on separate threads: the node polls while a batch runs and the next one is ready.

use super::backend::Backend;
use super::batch::Batch;
use super::executor::Executor;
use super::job::Job;
use super::tokens::{JobQuery, Waker};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use weft_fabric::Time;

/// Executor with one thread per backend. Each runs one batch; as many wait for the next free one, where a cancel
/// still removes queries. The threads end with the executor, after the batches that have begun.
pub struct Threaded {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Batches that were started and not returned.
    under_way: usize,
}

struct Shared {
    queues: Mutex<Queues>,
    /// Notified with each batch in `ready`, and at the end.
    changed: Condvar,
    /// Length of `finished`, so that a poll without one takes no lock.
    finished: AtomicUsize,
    waker: Waker,
}

#[derive(Default)]
struct Queues {
    ready: VecDeque<Job>,
    finished: VecDeque<Job>,
    is_over: bool,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs batches until the end.
    fn work(&self, backend: &mut impl Backend) {
        loop {
            let mut queues = self.queues();
            let mut job = loop {
                if queues.is_over {
                    return;
                }
                if let Some(job) = queues.ready.pop_front() {
                    break job;
                }
                queues = self.changed.wait(queues).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queues);
            if !job.is_empty() {
                let run = AssertUnwindSafe(|| backend.run(&mut Batch::of(&mut job)));
                if catch_unwind(run).is_err() {
                    job.fail(Threaded::PANICKED);
                }
            }
            let mut queues = self.queues();
            queues.finished.push_back(job);
            self.finished.store(queues.finished.len(), Ordering::Release);
            drop(queues);
            (self.waker)();
        }
    }
}

impl Threaded {
    /// Error for queries in a batch whose backend panicked.
    pub const PANICKED: u32 = u32::MAX - 1;

    /// Starts a thread for each backend.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a backend; [`Error::System`] if a thread cannot be started.
    pub fn new<B: Backend + Send + 'static>(
        backends: impl IntoIterator<Item = B>,
        waker: Waker,
    ) -> Result<Threaded> {
        let (queues, changed, finished) = Default::default();
        let shared = Arc::new(Shared { queues, changed, finished, waker });
        let mut threaded = Threaded { shared, threads: Vec::new(), under_way: 0 };
        for mut backend in backends {
            let shared = threaded.shared.clone();
            let builder = std::thread::Builder::new().name("weft-backend".into());
            let thread = builder.spawn(move || shared.work(&mut backend));
            let what = "cannot start a backend thread";
            threaded.threads.push(thread.map_err(|error| Error::System { what, error })?);
        }
        if threaded.threads.is_empty() {
            let expected = "at least 1".into();
            return Err(Error::Invalid { what: "backends", value: 0, expected });
        }
        let room = 2 * threaded.threads.len();
        let mut queues = threaded.shared.queues();
        queues.ready.reserve(room);
        queues.finished.reserve(room);
        drop(queues);
        Ok(threaded)
    }
}

impl Executor for Threaded {
    fn has_room(&self) -> bool {
        self.under_way < 2 * self.threads.len()
    }

    fn start(&mut self, _: Time, job: Job) -> Option<Job> {
        self.under_way += 1;
        self.shared.queues().ready.push_back(job);
        self.shared.changed.notify_one();
        None
    }

    fn next_finished(&mut self, _: Time) -> Option<Job> {
        if self.shared.finished.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queues = self.shared.queues();
        let job = queues.finished.pop_front()?;
        self.shared.finished.store(queues.finished.len(), Ordering::Release);
        self.under_way -= 1;
        Some(job)
    }

    fn cancel(&mut self, query: JobQuery) -> bool {
        self.shared.queues().ready.iter_mut().any(|job| job.remove(query))
    }
}

impl Drop for Threaded {
    /// Ends the threads after the batches that have begun; it does not wait for them.
    fn drop(&mut self) {
        self.shared.queues().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for Threaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threaded")
            .field("threads", &self.threads.len())
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}
