//! Rust's `log` records for Python's `logging`, through a queue and a separate thread.
//!
//! A record is queued under a lock that is held only for a push, so a thread may log whatever locks it holds, with
//! or without the GIL. A thread that starts with the first record takes the GIL and passes records to
//! `weft.base.logging.deliver`.

use crate::fork;
use env_filter::Filter;
use log::{Log, Metadata, Record};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// Records kept at most; later ones are counted and dropped until the thread has caught up.
const CAPACITY: usize = 4096;
/// Target for records about logging itself.
const TARGET: &str = "weft_python::logging";
/// Longest wait for a handler when the interpreter exits.
const HANDLER_TIME: Duration = Duration::from_secs(10);
/// Levels logged without `WEFT_LOG`.
const DEFAULT: &str = "warn";

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// A record for Python: target, level in Python's numbers, message, file, line.
type PyRecord = (String, u8, String, &'static str, u32);

struct Logger {
    filter: Filter,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// The thread has ended.
    left: Condvar,
}

#[derive(Default)]
struct Queue {
    records: VecDeque<PyRecord>,
    dropped: u64,
    /// A thread was started, and has not ended.
    runs: bool,
    ended: bool,
}

impl Queue {
    /// All records, and one more about the dropped records.
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

    /// Passes records to Python until the interpreter exits.
    fn run(&self) {
        self.pass_records();
        let mut queue = self.lock();
        (queue.ended, queue.runs) = (true, false);
        self.left.notify_all();
    }

    fn pass_records(&self) {
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
        // A forked child's thread and lock belong to the parent.
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
        if !queue.runs {
            let named = thread::Builder::new().name("weft-log".into());
            let started = named.spawn(|| LOGGER.get().into_iter().for_each(Logger::run));
            queue.runs = started.is_ok();
        }
        self.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// Sets the logger up, once in a process, with the `WEFT_LOG` filter. A logger that exists already stays.
pub fn install() {
    if LOGGER.get().is_some() {
        return;
    }
    let named = weft_environment::text("WEFT_LOG");
    let mut builder = env_filter::Builder::new();
    let refused = match &named {
        Ok(named) => {
            let named = named.as_deref().unwrap_or(DEFAULT);
            let refused = builder.try_parse(named).err();
            refused.map(|error| format!("WEFT_LOG {named:?}: {error}"))
        }
        Err(error) => Some(error.to_string()),
    };
    if refused.is_some() {
        let _ = builder.try_parse(DEFAULT);
    }
    let filter = builder.build();
    let level = filter.filter();
    let logger =
        Logger { filter, queue: Mutex::default(), arrived: Condvar::new(), left: Condvar::new() };
    if LOGGER.set(logger).is_ok()
        && let Some(logger) = LOGGER.get()
        && log::set_logger(logger).is_ok()
    {
        log::set_max_level(level);
    }
    if let Some(error) = refused {
        log::warn!(target: TARGET, "{error}; using {DEFAULT}");
    }
}

/// Ends the thread and passes on the remaining records when the interpreter exits. A handler that blocks for
/// long keeps the thread.
#[pyfunction]
pub fn end_logging(py: Python<'_>) {
    let Some(logger) = LOGGER.get().filter(|_| !fork::is_child()) else { return };
    let records = py.detach(|| {
        let mut queue = logger.lock();
        queue.ended = true;
        logger.arrived.notify_one();
        let runs = |queue: &mut Queue| queue.runs;
        let left = logger.left.wait_timeout_while(queue, HANDLER_TIME, runs);
        let (mut queue, waited) = left.unwrap_or_else(PoisonError::into_inner);
        // The handler may hold a lock that these need.
        if waited.timed_out() { Vec::new() } else { queue.take() }
    });
    deliver(py, records);
}

fn deliver(py: Python<'_>, records: Vec<PyRecord>) {
    if records.is_empty() {
        return;
    }
    let delivered = py
        .import("weft.base.logging")
        .and_then(|module| module.getattr("deliver")?.call1((records,)));
    if let Err(error) = delivered {
        error.write_unraisable(py, None);
    }
}

/// A level number in Python's `logging`, which has none for `trace`.
fn python_level(level: log::Level) -> u8 {
    match level {
        log::Level::Error => 40,
        log::Level::Warn => 30,
        log::Level::Info => 20,
        log::Level::Debug => 10,
        log::Level::Trace => 5,
    }
}
