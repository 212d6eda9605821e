//! Progress on demand: a thread that polls a shared engine while an event loop awaits something.
//!
//! It parks as a waiting thread does, and sleeps while nothing is awaited, so that peers need not wake it then.

use crate::error::{Error, Result};
use crate::shared_engine::SharedEngine;
use crate::types::Time;
use crate::wait::{self, WaitOptions};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// While it lives, a thread makes progress: see [`crate::Communicator::demand_progress`].
pub struct ProgressDemand(Option<Arc<Demands>>);

impl ProgressDemand {
    /// A demand that another thread meets.
    pub(crate) const MET: ProgressDemand = ProgressDemand(None);
}

impl Drop for ProgressDemand {
    fn drop(&mut self) {
        if let Some(demands) = &self.0 {
            demands.lock().count -= 1;
        }
    }
}

#[derive(Default)]
struct Demands {
    state: Mutex<DemandState>,
    changed: Condvar,
}

#[derive(Default)]
struct DemandState {
    count: usize,
    stopped: bool,
}

impl Demands {
    fn lock(&self) -> MutexGuard<'_, DemandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until something is awaited; false once stopped.
    fn sleep(&self) -> bool {
        let is_idle = |state: &mut DemandState| state.count == 0 && !state.stopped;
        let state = self.changed.wait_while(self.lock(), is_idle);
        !state.unwrap_or_else(PoisonError::into_inner).stopped
    }

    fn is_over(&self) -> bool {
        let state = self.lock();
        state.count == 0 || state.stopped
    }
}

/// Thread that makes progress on demand, until it is dropped.
pub(crate) struct DemandThread {
    shared: Arc<SharedEngine>,
    demands: Arc<Demands>,
    thread: Option<JoinHandle<()>>,
}

impl DemandThread {
    pub fn start(shared: &Arc<SharedEngine>) -> Result<DemandThread> {
        let demands = Arc::<Demands>::default();
        let (engine, ours) = (shared.clone(), demands.clone());
        let work = move || {
            while ours.sleep() && make_progress(&engine, &ours).is_ok() {}
            // The group is poisoned, perhaps since the last poll, or closed.
            engine.lock().end_watches();
        };
        let thread = thread::Builder::new().name("weft-awaits".into()).spawn(work);
        let thread = thread
            .map_err(|e| Error::from(weft_control::Error::thread("a thread for awaits")(e)))?;
        Ok(DemandThread { shared: shared.clone(), demands, thread: Some(thread) })
    }

    pub fn demand(&self) -> ProgressDemand {
        self.demands.lock().count += 1;
        self.demands.changed.notify_one();
        ProgressDemand(Some(self.demands.clone()))
    }

    /// Ends the thread without waiting for it.
    pub fn stop(&self) {
        self.demands.lock().stopped = true;
        self.demands.changed.notify_one();
        self.shared.notify();
    }
}

/// Polls until nothing is awaited.
fn make_progress(shared: &SharedEngine, demands: &Demands) -> Result<()> {
    let mut options =
        WaitOptions { deadline: Time::MAX, spin: Duration::ZERO, interrupted: &mut || false };
    shared.set_has_thread(true);
    let result = wait::run(
        &mut shared.progress_access(),
        "progress",
        0,
        &mut options,
        |_, _| Ok(demands.is_over().then_some(())),
        |_| Vec::new(),
    );
    shared.set_has_thread(false);
    result
}

impl Drop for DemandThread {
    fn drop(&mut self) {
        self.stop();
        // A callback on this thread may drop the communicator.
        let thread =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id());
        if let Some(thread) = thread {
            // The thread has reported the panic.
            let _ = thread.join();
        }
    }
}
