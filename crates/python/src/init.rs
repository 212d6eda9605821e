//! `weft.init()`.

use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork;
use crate::logging;
use crate::numbers::{Rank, TraceLimit, WorldSize};
use crate::shared::{HandlerException, duration, take};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::Arc;
use weft_control::{Config, HostIdentity, Overrides, Secret};
use weft_environment as environment;
use weft_fabric::providers::{CopyBackend, Staging};
use weft_fabric::{
    Communicator as Fabric, CommunicatorConfig, DefaultNics, Progress, ProviderKind, registry,
};

/// Joins the launcher's group or the one in the arguments; see `weft.init`. `listener`: socket descriptor on which
/// rank 0 listens in place of an address; closed here. `interrupt`: called several times a second in waits on the
/// control plane; its exception ends the wait.
#[pyfunction]
#[pyo3(signature = (*, rank=None, world_size=None, address=None, secret=None, host_id=None,
    providers=None, progress="caller", spin=None, timeout=None, silence_timeout=None,
    trace_limit=TraceLimit(0), listener=None, interrupt=None))]
#[allow(clippy::too_many_arguments)]
pub fn init(
    py: Python<'_>,
    rank: Option<Rank>,
    world_size: Option<WorldSize>,
    address: Option<String>,
    secret: Option<Vec<u8>>,
    host_id: Option<String>,
    providers: Option<Vec<String>>,
    progress: &str,
    spin: Option<f64>,
    timeout: Option<f64>,
    silence_timeout: Option<f64>,
    trace_limit: TraceLimit,
    listener: Option<RawFd>,
    interrupt: Option<Py<PyAny>>,
) -> PyResult<Communicator> {
    // SAFETY: the Python layer detached it from a listening socket; it is closed only here.
    let listener = listener.map(|listener| unsafe { TcpListener::from_raw_fd(listener) });
    fork::check(py)?;
    fork::watch();
    logging::install();
    // The Python layer rejects values that are no duration.
    let seconds = |value: Option<f64>| value.map(duration);
    let overrides = Overrides {
        rank: rank.map(|rank| rank.0),
        world_size: world_size.map(|size| size.0),
        address,
        bind: None,
        secret: secret.map(Secret::new).transpose().map_err(Error::from)?,
        host_id,
        connect_timeout: seconds(timeout),
        silence_timeout: seconds(silence_timeout),
    };
    let mut control = Config::from_env(overrides).map_err(Error::from)?;
    let raised = HandlerException::default();
    let caught = raised.clone();
    control.interrupt = Some(Arc::new(move || {
        let checked = Python::attach(|py| {
            py.check_signals()?;
            interrupt.as_ref().map_or(Ok(()), |interrupt| interrupt.call0(py).map(drop))
        });
        let Err(error) = checked else { return false };
        *caught.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
        true
    }));
    let mut config = CommunicatorConfig::new(control);
    if let Some(names) = providers {
        config.providers.clear();
        for name in &names {
            let (kind, devices) = provider(py, name)?;
            config.providers.push(kind);
            if kind == ProviderKind::Copy {
                config.devices = devices;
            }
        }
    }
    config.progress = match progress {
        "caller" => Progress::Caller,
        "thread" => Progress::Thread,
        "epoll" => Progress::Epoll,
        other => {
            let message = format!("progress {other:?}: expected caller, thread or epoll");
            return Err(raise(py, "ConfigurationError", &message));
        }
    };
    config.staged = staged(py)?;
    config.hostile = hostile(py)?;
    config.spin = seconds(spin);
    config.engine.trace_limit = trace_limit.0;
    let made = py.detach(|| {
        let nics = DefaultNics::of_rank(&config.providers, Some(&config.control));
        let config = CommunicatorConfig { verbs: nics.verbs, ofi: nics.ofi, ..config };
        match listener {
            Some(listener) => Fabric::init_with_listener(config, listener),
            None => Fabric::init(config),
        }
    });
    match made {
        Ok(fabric) => Ok(Communicator::wrap(fabric, raised)),
        Err(error) => Err(take(&raised).unwrap_or_else(|| Error::from(error).into())),
    }
}

/// This host's identity: ranks with equal identity can share memory.
#[pyfunction]
pub fn host_id(py: Python<'_>) -> PyResult<String> {
    let named = text(py, "WEFT_HOST_ID")?;
    Ok(named.unwrap_or_else(|| HostIdentity::here().host_id()))
}

/// An environment variable's text.
fn text(py: Python<'_>, name: &str) -> PyResult<Option<String>> {
    let refuse = |error: environment::Error| raise(py, "ConfigurationError", &error.to_string());
    environment::text(name).map_err(refuse)
}

/// Key derived from the secret in the environment (`WEFT_SECRET`, `WEFT_SECRET_FILE`) for one purpose; `None` without
/// one.
#[pyfunction]
pub fn environment_key<'py>(
    py: Python<'py>,
    purpose: &str,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let alone = Overrides { rank: Some(0), world_size: Some(1), ..Overrides::default() };
    let config = Config::from_env(alone).map_err(Error::from)?;
    Ok(config.secret.map(|secret| PyBytes::new(py, &secret.derive_key(purpose))))
}

/// Providers that carry GPU memory through slots, from `WEFT_STAGED`.
pub fn staged(py: Python<'_>) -> PyResult<Staging> {
    match text(py, "WEFT_STAGED")?.as_deref() {
        None => Ok(Staging::Automatic(CopyBackend::Cuda)),
        Some("0") => Ok(Staging::Never),
        Some("1") => Ok(Staging::Always(CopyBackend::Cuda)),
        Some("twin") => Ok(Staging::Always(CopyBackend::Twin { seed: 0 })),
        Some("automatic-twin") => Ok(Staging::Automatic(CopyBackend::Twin { seed: 0 })),
        Some(other) => {
            let message =
                format!("WEFT_STAGED is {other:?}: expected 0, 1, twin or automatic-twin");
            Err(raise(py, "ConfigurationError", &message))
        }
    }
}

/// Seed for the hostile wrapper around every device, from `WEFT_HOSTILE`; for tests.
fn hostile(py: Python<'_>) -> PyResult<Option<u64>> {
    let Some(seed) = text(py, "WEFT_HOSTILE")? else { return Ok(None) };
    seed.parse().map(Some).map_err(|_| {
        let message = format!("WEFT_HOSTILE {seed:?}: expected a seed, a whole number from 0 on");
        raise(py, "ConfigurationError", &message)
    })
}

fn provider(py: Python<'_>, name: &str) -> PyResult<(ProviderKind, CopyBackend)> {
    registry::named(name).ok_or_else(|| {
        let names: Vec<&str> = registry::names().collect();
        let message = format!("provider {name:?}: expected one of {}", names.join(", "));
        raise(py, "ConfigurationError", &message)
    })
}

/// Raises unless all these providers exist and can be used on this machine. Opens no device.
#[pyfunction]
pub fn check_providers(py: Python<'_>, names: Vec<String>) -> PyResult<()> {
    for name in &names {
        let (kind, _) = provider(py, name)?;
        py.detach(|| registry::check(kind, &None, &None)).map_err(Error::from)?;
    }
    Ok(())
}

/// A provider: name, peers that it reaches, transport, true if it is a default, names that `weft.init` accepts.
type PyProvider = (&'static str, &'static str, &'static str, bool, &'static [&'static str]);

/// All providers, in the order in which a route prefers them.
#[pyfunction]
pub fn providers() -> Vec<PyProvider> {
    let row = |p: &registry::Provider| (p.kind.name(), p.reaches, p.how, p.is_default, p.names);
    registry::all().iter().map(row).collect()
}
