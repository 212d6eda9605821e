//! Long computations that Ctrl-C and SIGTERM can end.
//!
//! Python runs a signal's handler between two instructions, so a native computation does not react to signals for as
//! long as it takes. Here it runs on a separate thread, while the calling thread sleeps without the GIL and wakes to
//! run handlers. If one raises, the call ends with that exception, and the computation ends at the next progress
//! report, or else with the process.

use pyo3::prelude::*;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time until a signal handler runs.
const HANDLERS_EVERY: Duration = Duration::from_millis(50);
/// Time between two queries by a computation, each of which costs two thread switches.
const ASKED_EVERY: Duration = Duration::from_millis(10);
/// Stack for the computation, as large as the main thread's default.
const STACK_BYTES: usize = 8 << 20;

/// The question whether a computation goes on: the share that is done, and the stage.
type Question = (f64, String);

/// Result from `work`, or a signal handler's exception.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    interruptible_with_progress(py, |_, _| Ok(true), move |_| work())
}

/// Result from `work`, or the exception from a signal handler or from `answer`. `work` is called with the progress
/// callback, which calls `answer` on the calling thread; false ends the computation.
pub(crate) fn interruptible_with_progress<T: Send + 'static>(
    py: Python<'_>,
    mut answer: impl FnMut(f64, &str) -> PyResult<bool>,
    work: impl FnOnce(&mut weft_predict::Progress<'_>) -> T + Send + 'static,
) -> PyResult<T> {
    // Where no thread can be started, the computation runs here.
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (ask, questions) = sync_channel::<Question>(0);
    let (reply, answers) = sync_channel::<bool>(1);
    let (finish, finished) = sync_channel::<T>(1);
    let theirs = Arc::clone(&work);
    let started = std::thread::Builder::new()
        .name("weft-computation".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let mut progress = questioner(ask, answers);
            if let Some(work) = take(&theirs) {
                // A computation that was given up has no receiver for its result.
                let _ = finish.send(work(&mut progress));
            }
        });
    let Ok(thread) = started else {
        let mut raised = None;
        let outcome = take(&work).map(|work| {
            work(&mut |share, stage| {
                let going_on = py.check_signals().and_then(|()| answer(share, stage));
                going_on.unwrap_or_else(|error| {
                    raised = Some(error);
                    false
                })
            })
        });
        return match (raised, outcome) {
            (None, Some(outcome)) => Ok(outcome),
            (Some(error), _) => Err(error),
            (None, None) => unreachable!("the thread was not started, so it took no work"),
        };
    };
    let mut questions = questions;
    loop {
        let (question, kept) =
            py.detach(move || (questions.recv_timeout(HANDLERS_EVERY), questions));
        questions = kept;
        match question {
            Ok((share, stage)) => {
                py.check_signals()?;
                let _ = reply.send(answer(share, &stage)?);
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    match finished.recv() {
        Ok(outcome) => Ok(outcome),
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a computation that did not panic has a result"),
        },
    }
}

/// Progress callback for a computation on a thread other than the caller's; false once that has given up.
fn questioner(ask: SyncSender<Question>, answers: Receiver<bool>) -> impl FnMut(f64, &str) -> bool {
    let mut next: Option<Instant> = None;
    move |share, stage| {
        if next.is_some_and(|next| Instant::now() < next) {
            return true;
        }
        let goes_on =
            ask.send((share, stage.to_owned())).is_ok() && answers.recv().unwrap_or(false);
        next = Some(Instant::now() + ASKED_EVERY);
        goes_on
    }
}
