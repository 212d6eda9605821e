//! Jobs: work for event loops, each on a separate thread that never takes the GIL.
//!
//! A descriptor is readable once a job has ended. A job that is cancelled ends by interrupting its waits, within
//! 0.1 s, and the result is dropped.

use std::cell::OnceCell;
use std::io::{Error as IoError, Result as IoResult};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

thread_local! {
    /// Set on job threads: true once the job is cancelled.
    static CANCELLED: OnceCell<Arc<AtomicBool>> = const { OnceCell::new() };
}

/// Work in progress, and then the result.
pub struct Job<T> {
    state: Arc<State<T>>,
    /// The other end closes when the work has ended, also by a panic.
    ended: UnixStream,
    /// The work goes on when this value is dropped.
    is_kept: bool,
}

struct State<T> {
    result: Mutex<Option<T>>,
    cancelled: Arc<AtomicBool>,
}

impl<T> State<T> {
    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Job<T> {
    /// Starts a thread with this name.
    ///
    /// # Errors
    /// The system's errors, without a descriptor or a thread left.
    pub fn start(name: &str, work: impl FnOnce() -> T + Send + 'static) -> IoResult<Job<T>> {
        let (ended, end) = UnixStream::pair()?;
        let cancelled = Arc::<AtomicBool>::default();
        let state = Arc::new(State { result: Mutex::default(), cancelled: cancelled.clone() });
        let shared = state.clone();
        Builder::new().name(name.into()).spawn(move || {
            let _end = end;
            CANCELLED.with(|cell| drop(cell.set(cancelled)));
            let result = Some(work());
            let mut slot = shared.lock();
            // Dropped without the lock.
            let _unwanted = match shared.cancelled.load(Ordering::Relaxed) {
                true => result,
                false => std::mem::replace(&mut *slot, result),
            };
            drop(slot);
        })?;
        Ok(Job { state, ended, is_kept: false })
    }

    /// Has the work go on when this value is dropped.
    pub fn kept(mut self) -> Job<T> {
        self.is_kept = true;
        self
    }

    /// Readable once the work has ended.
    pub fn descriptor(&self) -> RawFd {
        self.ended.as_raw_fd()
    }

    /// The result, once.
    ///
    /// # Errors
    /// For work that goes on, was cancelled or has panicked.
    pub fn take(&self) -> IoResult<T> {
        self.state.lock().take().ok_or_else(|| IoError::other("it has no result"))
    }
}

impl<T> Job<T> {
    /// Has the work end soon and drops the result.
    pub fn cancel(&self) {
        self.state.cancelled.store(true, Ordering::Relaxed);
        let result = self.state.lock().take();
        drop(result);
    }
}

impl<T> Drop for Job<T> {
    /// A forked child does not have the thread, which may have held the lock.
    fn drop(&mut self) {
        if !self.is_kept && !crate::fork::is_child() {
            self.cancel();
        }
    }
}

/// On job threads, true once the job is cancelled; `None` on other threads.
pub fn is_cancelled() -> Option<bool> {
    CANCELLED.with(|cell| Some(cell.get()?.load(Ordering::Relaxed)))
}
