//! Records of Rust's `log` for Python's `logging`, through a queue and a thread of its own.
//!
//! A record is queued under a lock that is held for a push alone, so a thread may log whatever locks it holds, with
//! or without the GIL. A thread that starts with the first record takes the GIL and passes records to
//! `weft._logging.deliver`.

use crate::fork;
use env_filter::Filter;
use log::{Log, Metadata, Record};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

/// Records kept at most; later ones are counted and dropped until the thread has caught up.
const CAPACITY: usize = 4096;
/// Target of records about logging itself.
const TARGET: &str = "weft_python::logging";
/// Levels logged without `WEFT_LOG`.
const DEFAULT: &str = "warn";

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// A record for Python: target, level in Python's numbers, message, file, line.
type PyRecord = (String, u8, String, &'static str, u32);

struct Logger {
    filter: Filter,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    records: VecDeque<PyRecord>,
    dropped: u64,
    thread: Option<JoinHandle<()>>,
    ended: bool,
}

impl Queue {
    /// All records, and one more about those dropped.
    fn take(&mut self) -> Vec<PyRecord> {
        let mut records: Vec<PyRecord> = self.records.drain(..).collect();
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let message = format!("{dropped} log records dropped: more than {CAPACITY} in a burst");
            records.push((
                TARGET.into(),
                python_level(log::Level::Warn),
                message,
                file!(),
                line!(),
            ));
        }
        records
    }
}

impl Logger {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes records to Python until the end of the interpreter.
    fn run(&self) {
        loop {
            let mut queue = self.lock();
            while queue.records.is_empty() && !queue.ended {
                queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.ended {
                return;
            }
            let records = queue.take();
            drop(queue);
            if Python::try_attach(|py| deliver(py, records)).is_none() {
                return;
            }
        }
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        // The thread and the lock of a forked child are its parent's.
        if fork::is_child() || !self.filter.matches(record) {
            return;
        }
        let mut queue = self.lock();
        if queue.ended || queue.records.len() >= CAPACITY {
            queue.dropped += 1;
            return;
        }
        queue.records.push_back((
            record.target().to_owned(),
            python_level(record.level()),
            record.args().to_string(),
            record.file_static().unwrap_or_default(),
            record.line().unwrap_or_default(),
        ));
        if queue.thread.is_none() {
            let named = thread::Builder::new().name("weft-log".into());
            let started = named.spawn(|| LOGGER.get().into_iter().for_each(Logger::run));
            queue.thread = started.ok();
        }
        self.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// Sets the logger up, once in a process, with the filter of `WEFT_LOG`. A logger that exists already stays.
pub fn install() {
    if LOGGER.get().is_some() {
        return;
    }
    let named = std::env::var("WEFT_LOG").unwrap_or_default();
    let named = if named.trim().is_empty() { DEFAULT } else { named.trim() };
    let mut builder = env_filter::Builder::new();
    let refused = builder.try_parse(named).err();
    if refused.is_some() {
        let _ = builder.try_parse(DEFAULT);
    }
    let filter = builder.build();
    let level = filter.filter();
    let logger = Logger { filter, queue: Mutex::default(), arrived: Condvar::new() };
    if LOGGER.set(logger).is_ok()
        && let Some(logger) = LOGGER.get()
        && log::set_logger(logger).is_ok()
    {
        log::set_max_level(level);
    }
    if let Some(error) = refused {
        log::warn!(target: TARGET, "WEFT_LOG {named:?}: {error}; using {DEFAULT}");
    }
}

/// Ends the thread and passes on the records that are left; at the end of the interpreter.
#[pyfunction]
pub fn end_logging(py: Python<'_>) {
    let Some(logger) = LOGGER.get().filter(|_| !fork::is_child()) else { return };
    let thread = py.detach(|| {
        let mut queue = logger.lock();
        queue.ended = true;
        logger.arrived.notify_one();
        queue.thread.take()
    });
    if let Some(thread) = thread {
        // A panic of the thread has been printed.
        let _ = py.detach(|| thread.join());
    }
    let records = py.detach(|| logger.lock().take());
    deliver(py, records);
}

fn deliver(py: Python<'_>, records: Vec<PyRecord>) {
    if records.is_empty() {
        return;
    }
    let delivered =
        py.import("weft._logging").and_then(|module| module.getattr("deliver")?.call1((records,)));
    if let Err(error) = delivered {
        error.write_unraisable(py, None);
    }
}

/// A level in the numbers of Python's `logging`, which has none for `trace`.
fn python_level(level: log::Level) -> u8 {
    match level {
        log::Level::Error => 40,
        log::Level::Warn => 30,
        log::Level::Info => 20,
        log::Level::Debug => 10,
        log::Level::Trace => 5,
    }
}
