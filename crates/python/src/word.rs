//! Words that the host and a GPU share.
//!
//! A counter's watch sets a word on whatever thread polls the engine, without the GIL. Callbacks for words run on the
//! watcher's thread, which takes the GIL for each.

use crate::choices::choose;
use crate::errors::{Error, raise};
use crate::fork::{self, ProcessOwned};
use crate::shared::Shared;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use weft_cuda::Context;
use weft_fabric::{Error as FabricError, ProgressDemand, WatchCondition};
use weft_gpu::proxy::WordHome;
use weft_gpu::word::{Word as Memory, WordCallback, WordWatch as Watch, WordWatcher};

/// A u32 that the host and a GPU share.
#[pyclass(frozen, module = "weft._native")]
pub struct Word {
    shared: Arc<ProcessOwned<SharedWord>>,
}

struct SharedWord {
    memory: Arc<Memory>,
    /// The last error that ended a watch before a count, until it is raised.
    error: Mutex<Option<Error>>,
}

/// The process's watcher, started with the first watch. It lives as long as the process.
static WATCHER: OnceLock<ProcessOwned<WordWatcher>> = OnceLock::new();

fn watcher() -> Result<&'static WordWatcher, Error> {
    if let Some(watcher) = WATCHER.get() {
        return Ok(watcher);
    }
    let started = WordWatcher::start().map_err(of_gpu)?;
    // A thread that came second is ended.
    Ok(WATCHER.get_or_init(|| ProcessOwned::new(started)))
}

/// Longest wait for a callback when the interpreter exits.
const CALLBACK_TIME: Duration = Duration::from_secs(10);

/// Ends all callbacks for words when the interpreter exits: threads that take the GIL later end the process.
#[pyfunction]
pub fn end_words(py: Python<'_>) {
    if let Some(watcher) = WATCHER.get().filter(|_| !fork::is_child()) {
        py.detach(|| watcher.end(CALLBACK_TIME));
    }
}

fn of_gpu(error: weft_gpu::Error) -> Error {
    weft_moe::Error::from(error).into()
}

#[pymethods]
impl Word {
    /// A zeroed word for a GPU, or without a number in ordinary memory.
    #[new]
    #[pyo3(signature = (device, home))]
    fn new(py: Python<'_>, device: Option<u32>, home: &str) -> PyResult<Word> {
        fork::watch();
        fork::check(py)?;
        let homes = [
            ("auto", WordHome::Auto),
            ("gdrcopy", WordHome::Gdrcopy),
            ("pinned", WordHome::Pinned),
        ];
        let home = choose(py, "home", home, &homes)?;
        let made = py.detach(|| {
            let context = device.map(|ordinal| {
                weft_cuda::driver()
                    .and_then(|driver| driver.device(ordinal))
                    .and_then(Context::primary)
            });
            Memory::alloc(context.transpose()?.as_ref(), home)
        });
        let word = SharedWord { memory: Arc::new(made.map_err(of_gpu)?), error: Mutex::default() };
        Ok(Word { shared: Arc::new(ProcessOwned::new(word)) })
    }

    /// Address for kernels and streams.
    #[getter]
    fn address(&self) -> u64 {
        self.shared.memory.address()
    }

    /// Address for the host; `None` in GPU memory.
    #[getter]
    fn host_address(&self) -> Option<u64> {
        self.shared.memory.host_address()
    }

    /// Home: "gdrcopy" or "pinned".
    #[getter]
    fn home(&self) -> &'static str {
        match self.shared.memory.home() {
            WordHome::Gdrcopy => "gdrcopy",
            WordHome::Auto | WordHome::Pinned | WordHome::Gpu => "pinned",
        }
    }

    fn get(&self, py: Python<'_>) -> PyResult<u32> {
        fork::check(py)?;
        Ok(self.shared.memory.get())
    }

    fn set(&self, py: Python<'_>, value: u32) -> PyResult<()> {
        fork::check(py)?;
        self.shared.memory.set(value);
        Ok(())
    }

    /// Raises the last error that ended a watch before a count, once.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        fork::check(py)?;
        let error = self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        match error {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// Calls back with the former value and the present one: at each change, or once it has reached `value`.
    #[pyo3(signature = (value, callback))]
    fn watch(
        &self,
        py: Python<'_>,
        value: Option<u32>,
        callback: Py<PyAny>,
    ) -> PyResult<WordWatch> {
        fork::check(py)?;
        let memory = self.shared.memory.clone();
        if memory.home() == WordHome::Gdrcopy {
            let message = "a word in GPU memory cannot be watched: make it with home=\"pinned\"";
            return Err(raise(py, "ConfigurationError", message));
        }
        let callback = callback_of(callback);
        let watcher = py.detach(watcher)?;
        let watch = match value {
            Some(value) => watcher.on(memory, value, callback),
            None => watcher.on_change(memory, callback),
        };
        Ok(WordWatch { watch: Some(ProcessOwned::new(watch)) })
    }
}

/// Python's callback; exceptions go to `sys.unraisablehook`.
fn callback_of(callable: Py<PyAny>) -> WordCallback {
    let callable = Callable(Some(callable));
    Box::new(move |former, value| {
        // `None` while the interpreter ends.
        Python::try_attach(|py| {
            if let Some(callable) = &callable.0
                && let Err(raised) = callable.call1(py, (former, value))
            {
                raised.write_unraisable(py, Some(callable.bind(py)));
            }
        });
    })
}

/// A callable that is dropped with the GIL, on whatever thread.
struct Callable(Option<Py<PyAny>>);

impl Drop for Callable {
    fn drop(&mut self) {
        let callable = self.0.take();
        Python::try_attach(|_| drop(callable));
    }
}

/// A watched word.
#[pyclass(frozen, module = "weft._native")]
pub struct WordWatch {
    /// `None` only while it is dropped.
    watch: Option<ProcessOwned<Watch>>,
}

#[pymethods]
impl WordWatch {
    /// Ends it; a callback that runs on another thread has returned then.
    fn close(&self, py: Python<'_>) {
        if let (false, Some(watch)) = (fork::is_child(), &self.watch) {
            py.detach(|| watch.close());
        }
    }

    #[getter]
    fn is_open(&self) -> bool {
        !fork::is_child() && self.watch.as_ref().is_some_and(|watch| watch.is_open())
    }
}

impl Drop for WordWatch {
    fn drop(&mut self) {
        let watch = self.watch.take();
        // Without the GIL, which the callback may need to return.
        Python::try_attach(|py| py.detach(|| drop(watch)));
    }
}

/// A word that was not set yet. It is set once the watch was accepted, also if that is dropped with the engine.
struct PendingWord {
    word: Option<Arc<ProcessOwned<SharedWord>>>,
    value: u32,
    failure: Option<u32>,
    accepted: Arc<AtomicBool>,
    /// A thread makes progress until the watch has ended.
    _demand: ProgressDemand,
}

impl PendingWord {
    fn end(&mut self, outcome: Result<(), FabricError>) {
        let Some(word) = self.word.take().filter(|_| self.accepted.load(Ordering::Relaxed)) else {
            return;
        };
        match outcome {
            Ok(()) => word.memory.set(self.value),
            Err(error) => {
                *word.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.into());
                if let Some(failure) = self.failure {
                    word.memory.set(failure);
                }
            }
        }
    }
}

impl Drop for PendingWord {
    fn drop(&mut self) {
        self.end(Err(weft_control::Error::Closed.into()));
    }
}

/// Sets a word to `value` once a condition holds, perhaps at once, and to `failure` if it never will.
pub fn set_at_end(
    shared: &Shared,
    py: Python<'_>,
    condition: WatchCondition,
    word: &Word,
    value: u32,
    failure: Option<u32>,
) -> PyResult<()> {
    let word = word.shared.clone();
    shared.with(py, move |fabric| {
        let _demand = fabric.demand_progress()?;
        let accepted = Arc::<AtomicBool>::default();
        let mut pending = PendingWord {
            word: Some(word.clone()),
            value,
            failure,
            accepted: accepted.clone(),
            _demand,
        };
        let mut engine = fabric.engine();
        // As `true`, it also reports an end inside this call.
        let id = engine.watch(condition, Box::new(move |outcome| pending.end(outcome)))?;
        accepted.store(true, Ordering::Relaxed);
        if id.is_none() {
            word.memory.set(value);
        }
        Ok(())
    })
}
