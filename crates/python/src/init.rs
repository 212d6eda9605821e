//! `weft.init()`.

use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork;
use crate::logging;
use crate::numbers::{Rank, TraceLimit, WorldSize};
use crate::shared::{HandlerException, duration, take};
use pyo3::prelude::*;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::Arc;
use weft_control::{Config, HostIdentity, Overrides, Secret};
use weft_fabric::providers::{CopyBackend, OfiChoice};
use weft_fabric::{Communicator as Fabric, CommunicatorConfig, Progress, ProviderKind, registry};

/// Joins the group of the launcher or of the arguments; see `weft.init`. `listener`: descriptor of a socket on which
/// rank 0 listens in place of its address; closed here. `interrupt`: called several times a second in waits of the
/// control plane; an exception of it ends the wait.
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
    // SAFETY: the Python layer detached it from a listening socket; it is closed here alone.
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
    config.hostile = hostile(py)?;
    config.spin = seconds(spin);
    config.engine.trace_limit = trace_limit.0;
    let made = py.detach(|| match listener {
        Some(listener) => Fabric::init_with_listener(config, listener),
        None => Fabric::init(config),
    });
    match made {
        Ok(fabric) => Ok(Communicator::wrap(fabric, raised)),
        Err(error) => Err(take(&raised).unwrap_or_else(|| Error::from(error).into())),
    }
}

/// Identity of this host: ranks of equal identity can share memory.
#[pyfunction]
pub fn host_id() -> String {
    let named = std::env::var("WEFT_HOST_ID").unwrap_or_default();
    if named.trim().is_empty() { HostIdentity::here().host_id() } else { named.trim().to_string() }
}

/// Seed of the hostile wrapper around every device, from `WEFT_HOSTILE`; for tests.
fn hostile(py: Python<'_>) -> PyResult<Option<u64>> {
    let seed = std::env::var_os("WEFT_HOSTILE").unwrap_or_default();
    let seed = seed.to_string_lossy();
    if seed.trim().is_empty() {
        return Ok(None);
    }
    seed.trim().parse().map(Some).map_err(|_| {
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

/// Raises unless all of these providers exist and can be used on this machine. Opens no device.
#[pyfunction]
pub fn check_providers(py: Python<'_>, names: Vec<String>) -> PyResult<()> {
    let ofi = OfiChoice::from_env();
    for name in &names {
        let (kind, _) = provider(py, name)?;
        py.detach(|| registry::check(kind, &ofi, &None)).map_err(Error::from)?;
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
