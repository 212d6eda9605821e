//! `weft.listen()` and `weft.connect()`, and the jobs by which event loops accept and dial.

use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork::{self, ProcessOwned};
use crate::init::staged;
use crate::job::{self, Job};
use crate::logging;
use crate::shared::{HandlerException, deadline, take};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::Secret;
use weft_control::pair::{PairSettings, descriptor_error};
use weft_fabric::pair::{Listener as Fabric, PairConfig, connect as connect_pair};
use weft_fabric::providers::CopyBackend;
use weft_fabric::{Communicator as Pair, DefaultNics, ProviderKind, registry};

/// A port that pairs connect to.
#[pyclass(frozen, module = "weft._native")]
pub struct Listener {
    port: Arc<ProcessOwned<Port>>,
    raised: HandlerException,
}

/// A listener, and pairs that formed in steps which are not awaited any more.
struct Port {
    fabric: Fabric,
    formed: Mutex<VecDeque<Pair>>,
    closed: AtomicBool,
}

impl Port {
    fn formed(&self) -> MutexGuard<'_, VecDeque<Pair>> {
        self.formed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next pair, if what has come forms one.
    fn try_accept(&self) -> weft_fabric::Result<Option<Pair>> {
        let formed = self.formed().pop_front();
        if formed.is_some() { Ok(formed) } else { self.fabric.try_accept() }
    }

    /// As `try_accept`; the pair is one that waits to be taken.
    fn step(&self) -> weft_fabric::Result<()> {
        let pair = self.try_accept()?;
        self.formed().extend(pair);
        if self.closed.load(Ordering::SeqCst) {
            // Meanwhile.
            self.close();
        }
        Ok(())
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.fabric.close();
        let unclaimed = std::mem::take(&mut *self.formed());
        drop(unclaimed);
    }
}

#[pymethods]
impl Listener {
    /// `host:port` that it listens on.
    #[getter]
    fn address(&self) -> String {
        self.port.fabric.address().to_string()
    }

    /// The next pair.
    fn accept(&self, py: Python<'_>, timeout: f64) -> PyResult<Communicator> {
        fork::check(py)?;
        let deadline = deadline(timeout);
        let accepted = py.detach(|| {
            loop {
                if let Some(formed) = self.port.formed().pop_front() {
                    return Ok(formed);
                }
                let mut raised = None;
                let mut interrupted = || {
                    // A step that is not awaited any more may form the pair.
                    raised = Python::attach(|py| py.check_signals().err());
                    raised.is_some() || !self.port.formed().is_empty()
                };
                let accepted = self.port.fabric.accept(deadline, &mut interrupted);
                match (accepted, raised) {
                    (Ok(pair), _) => return Ok(pair),
                    (Err(_), Some(raised)) => return Err(Error::Python(raised)),
                    (Err(weft_fabric::Error::Interrupted), None) => {}
                    (Err(error), None) => return Err(error.into()),
                }
            }
        });
        self.wrap(accepted)
    }

    /// The next pair, if what has come forms one.
    fn try_accept(&self, py: Python<'_>) -> PyResult<Option<Communicator>> {
        fork::check(py)?;
        match py.detach(|| self.port.try_accept()) {
            Ok(None) => Ok(None),
            Ok(Some(pair)) => self.wrap(Ok(pair)).map(Some),
            Err(error) => self.wrap(Err(error.into())).map(Some),
        }
    }

    /// Readable when `try_accept` has something to do.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        fork::check(py)?;
        Ok(self.port.fabric.descriptor().as_raw_fd())
    }

    /// Starts a `try_accept` call on a thread. A pair that is not taken from it is the listener's next one.
    fn step(&self, py: Python<'_>) -> PyResult<Step> {
        fork::check(py)?;
        let port = self.port.clone();
        let job = start(py, "weft-accept", move || port.step())?.kept();
        Ok(Step { job, port: self.port.clone(), raised: self.raised.clone() })
    }

    /// True if a pair waits to be taken, or the listener was closed.
    fn has_formed(&self, py: Python<'_>) -> PyResult<bool> {
        fork::check(py)?;
        Ok(self.port.closed.load(Ordering::SeqCst) || !self.port.formed().is_empty())
    }

    /// Stops listening.
    fn close(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| self.port.close());
        }
    }
}

/// A `try_accept` call on a separate thread.
#[pyclass(frozen, module = "weft._native")]
pub struct Step {
    job: Job<weft_fabric::Result<()>>,
    port: Arc<ProcessOwned<Port>>,
    raised: HandlerException,
}

#[pymethods]
impl Step {
    /// Readable once the call has ended.
    fn fileno(&self) -> i32 {
        self.job.descriptor()
    }

    /// The pair that formed, if one did.
    fn take(&self, py: Python<'_>) -> PyResult<Option<Communicator>> {
        fork::check(py)?;
        let taken = self.job.take().map_err(|error| failed("accepting a pair", error))?;
        taken.map_err(Error::from)?;
        let pair = self.port.formed().pop_front();
        Ok(pair.map(|pair| Communicator::wrap(pair, self.raised.clone())))
    }
}

/// A dial on a separate thread.
#[pyclass(frozen, module = "weft._native")]
pub struct Dial {
    job: Job<weft_fabric::Result<Pair>>,
    raised: HandlerException,
}

#[pymethods]
impl Dial {
    /// Readable once the dial has ended.
    fn fileno(&self) -> i32 {
        self.job.descriptor()
    }

    /// The pair.
    fn take(&self, py: Python<'_>) -> PyResult<Communicator> {
        fork::check(py)?;
        let dialled = self.job.take().map_err(|error| failed("connecting a pair", error))?;
        Ok(Communicator::wrap(dialled.map_err(Error::from)?, self.raised.clone()))
    }

    /// Gives the dial up; a pair that has formed is closed.
    fn cancel(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| self.job.cancel());
        }
    }
}

fn start<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<Job<T>> {
    py.detach(|| Job::start(name, work)).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock => {
            let error = weft_control::Error::thread("a thread for an event loop")(error);
            Error::from(weft_fabric::Error::from(error)).into()
        }
        _ => failed("starting a thread", error),
    })
}

/// System error; if no descriptor is left, it names the limit.
fn failed(doing: &'static str, error: std::io::Error) -> PyErr {
    Error::from(descriptor_error(doing, error)).into()
}

impl Listener {
    fn wrap(&self, pair: Result<Pair, Error>) -> PyResult<Communicator> {
        match pair {
            Ok(pair) => Ok(Communicator::wrap(pair, self.raised.clone())),
            Err(error) => Err(take(&self.raised).unwrap_or_else(|| error.into())),
        }
    }
}

/// Listens for pairs; see `weft.listen`.
#[pyfunction]
#[pyo3(signature = (address, *, secret=None, providers=None))]
pub fn listen(
    py: Python<'_>,
    address: &str,
    secret: Option<Vec<u8>>,
    providers: Option<Vec<String>>,
) -> PyResult<Listener> {
    let (config, raised) = config(py, address, secret, providers)?;
    let fabric = py.detach(|| Fabric::bind(config)).map_err(Error::from)?;
    let port = Arc::new(ProcessOwned::new(Port {
        fabric,
        formed: Mutex::default(),
        closed: AtomicBool::new(false),
    }));
    Ok(Listener { port, raised })
}

/// Connects to a listener; see `weft.connect`.
#[pyfunction]
#[pyo3(signature = (address, *, timeout, source=None, secret=None, providers=None))]
pub fn connect(
    py: Python<'_>,
    address: &str,
    timeout: f64,
    source: Option<IpAddr>,
    secret: Option<Vec<u8>>,
    providers: Option<Vec<String>>,
) -> PyResult<Communicator> {
    let (mut config, raised) = config(py, address, secret, providers)?;
    config.settings.source = source;
    match py.detach(|| connect_pair(&config, deadline(timeout))) {
        Ok(pair) => Ok(Communicator::wrap(pair, raised)),
        Err(error) => Err(take(&raised).unwrap_or_else(|| Error::from(error).into())),
    }
}

/// Starts to connect to a listener, for event loops; see `weft.connect_async`.
#[pyfunction]
#[pyo3(signature = (address, *, timeout, source=None, secret=None, providers=None))]
pub fn dial(
    py: Python<'_>,
    address: &str,
    timeout: f64,
    source: Option<IpAddr>,
    secret: Option<Vec<u8>>,
    providers: Option<Vec<String>>,
) -> PyResult<Dial> {
    let (mut config, raised) = config(py, address, secret, providers)?;
    config.settings.source = source;
    let job = start(py, "weft-dial", move || connect_pair(&config, deadline(timeout)))?;
    Ok(Dial { job, raised })
}

fn config(
    py: Python<'_>,
    address: &str,
    secret: Option<Vec<u8>>,
    providers: Option<Vec<String>>,
) -> PyResult<(PairConfig, HandlerException)> {
    fork::check(py)?;
    fork::watch();
    logging::install();
    let mut settings = PairSettings::from_env(address).map_err(Error::from)?;
    if let Some(secret) = secret {
        settings.secret = Some(Secret::new(secret).map_err(Error::from)?);
    }
    let raised = HandlerException::default();
    let caught = raised.clone();
    settings.interrupt = Some(Arc::new(move || {
        // The main thread handles signals, and a job never takes the GIL.
        if let Some(cancelled) = job::is_cancelled() {
            return cancelled;
        }
        let Err(error) = Python::attach(|py| py.check_signals()) else { return false };
        *caught.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
        true
    }));
    let mut config = PairConfig::new(settings);
    config.staged = staged(py)?;
    if let Some(names) = providers {
        let named = names.iter().map(|name| provider(py, name));
        let named: Vec<(ProviderKind, CopyBackend)> = named.collect::<PyResult<_>>()?;
        let mut of_copy = named.iter().filter(|(kind, _)| *kind == ProviderKind::Copy);
        let (of_copy, second) = (of_copy.next(), of_copy.next());
        if second.is_some() {
            let message = "providers name copy and copy-twin: a pair has one of them";
            return Err(raise(py, "ConfigurationError", message));
        }
        config.devices = of_copy.map_or_else(CopyBackend::default, |(_, devices)| *devices);
        config.providers = named.into_iter().map(|(kind, _)| kind).collect();
    }
    let nics = py.detach(|| DefaultNics::of_rank(&config.providers, None));
    (config.verbs, config.ofi) = (nics.verbs, nics.ofi);
    Ok((config, raised))
}

fn provider(py: Python<'_>, name: &str) -> PyResult<(ProviderKind, CopyBackend)> {
    let is_of_pairs = |kind: &ProviderKind| registry::of_pairs().contains(kind);
    registry::named(name).filter(|(kind, _)| is_of_pairs(kind)).ok_or_else(|| {
        let message = format!(
            "provider {name:?} of a pair: expected copy, shm, verbs, ofi or tcp; choose from these"
        );
        raise(py, "ConfigurationError", &message)
    })
}
