//! `weft.listen()` and `weft.connect()`.

use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork::{self, ProcessOwned};
use crate::logging;
use crate::shared::{HandlerException, deadline, take};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use weft_control::Secret;
use weft_control::pair::PairSettings;
use weft_fabric::pair::{Listener as Fabric, PairConfig, connect as connect_pair};
use weft_fabric::{Communicator as Pair, ProviderKind};

/// A port that pairs connect to.
#[pyclass(frozen, module = "weft._native")]
pub struct Listener {
    fabric: ProcessOwned<Fabric>,
    raised: HandlerException,
}

#[pymethods]
impl Listener {
    /// `host:port` that it listens on.
    #[getter]
    fn address(&self) -> String {
        self.fabric.address().to_string()
    }

    /// The next pair.
    fn accept(&self, py: Python<'_>, timeout: f64) -> PyResult<Communicator> {
        fork::check(py)?;
        let accepted = py.detach(|| {
            let mut raised = None;
            let mut interrupted = || {
                raised = Python::attach(|py| py.check_signals().err());
                raised.is_some()
            };
            let accepted = self.fabric.accept(deadline(timeout), &mut interrupted);
            accepted.map_err(|error| raised.map_or(Error::from(error), Error::Python))
        });
        self.wrap(accepted)
    }

    /// The next pair, if what has come forms one.
    fn try_accept(&self, py: Python<'_>) -> PyResult<Option<Communicator>> {
        fork::check(py)?;
        match py.detach(|| self.fabric.try_accept()) {
            Ok(None) => Ok(None),
            Ok(Some(pair)) => self.wrap(Ok(pair)).map(Some),
            Err(error) => self.wrap(Err(error.into())).map(Some),
        }
    }

    /// Readable when `try_accept` has something to do.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        fork::check(py)?;
        Ok(self.fabric.descriptor().as_raw_fd())
    }

    /// Stops listening.
    fn close(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| self.fabric.close());
        }
    }
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
    Ok(Listener { fabric: ProcessOwned::new(fabric), raised })
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
        let Err(error) = Python::attach(|py| py.check_signals()) else { return false };
        *caught.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
        true
    }));
    let mut config = PairConfig::new(settings);
    if let Some(names) = providers {
        config.providers = names.iter().map(|name| provider(py, name)).collect::<PyResult<_>>()?;
    }
    Ok((config, raised))
}

fn provider(py: Python<'_>, name: &str) -> PyResult<ProviderKind> {
    let known = weft_fabric::registry::of_pairs();
    known.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
        let message = format!(
            "provider {name:?} of a pair: expected shm, verbs, ofi or tcp; choose from these"
        );
        raise(py, "ConfigurationError", &message)
    })
}
