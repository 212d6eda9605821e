//! A rank's proxy, which puts for kernels.

use super::domain::SymmetricMemory;
use crate::choices::choose;
use crate::communicator::Communicator;
use crate::errors::Error;
use crate::fork::{self, ProcessOwned};
use crate::region::Region;
use crate::shared::deadline;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;
use weft_fabric::{Communicator as Fabric, CounterId, Rank, RegionKey, RemoteRegion};
use weft_gpu::proxy::{
    CoreClaim, Idle, Proxy, ProxyConfig, ProxyCore, ProxyGroup, ProxyOptions, Template,
    TemplateMember, Window, WordConfig, WordHome,
};

/// A running proxy, until it is stopped.
#[pyclass(frozen, module = "weft._native")]
pub struct DeviceProxy {
    /// `None` only while it is dropped.
    proxy: Option<ProcessOwned<Proxy>>,
}

impl DeviceProxy {
    fn proxy(&self) -> Result<&Proxy, Error> {
        self.proxy.as_deref().ok_or_else(|| weft_control::Error::Closed.into())
    }
}

impl Drop for DeviceProxy {
    fn drop(&mut self) {
        let proxy = self.proxy.take();
        // Without the GIL: other Python threads may have to launch the kernels that it waits for.
        Python::try_attach(|py| py.detach(|| drop(proxy)));
    }
}

/// A window: this rank's region, and the peers' regions (key, length) by rank.
type PyWindow = (Option<Py<Region>>, Vec<Option<(u32, u64)>>);

/// A template's members: peer, source offset, destination offset.
type PyTemplate = Vec<(u32, u64, u64)>;

/// The proxy's group, which the thread keeps.
struct Group(Arc<ProcessOwned<Fabric>>);

impl ProxyGroup for Group {
    fn communicator(&self) -> &Fabric {
        &self.0
    }
}

/// Homes of the words, by name.
const HOMES: [(&str, WordHome); 4] = [
    ("auto", WordHome::Auto),
    ("gdrcopy", WordHome::Gdrcopy),
    ("pinned", WordHome::Pinned),
    ("gpu", WordHome::Gpu),
];

fn of_gpu(error: weft_gpu::Error) -> Error {
    weft_moe::Error::from(error).into()
}

fn window((source, destinations): &PyWindow) -> Result<Window, Error> {
    let source = source.as_ref().map(|region| region.get().get()).transpose()?;
    let remote = |(peer, place): (u32, &Option<(u32, u64)>)| {
        place.map(|(key, length)| RemoteRegion { peer: Rank(peer), key: RegionKey(key), length })
    };
    Ok(Window {
        source: source.map(|region| (region.key(), region.memory().len() as u64)),
        destinations: (0..).zip(destinations).map(remote).collect(),
    })
}

fn template(members: PyTemplate) -> Template {
    let member = |(peer, source_offset, destination_offset)| TemplateMember {
        peer: Rank(peer),
        source_offset,
        destination_offset,
    };
    Template { members: members.into_iter().map(member).collect() }
}

#[pymethods]
impl DeviceProxy {
    /// Starts this rank's proxy in a separate group, for kernels on the domain that has `memory`. Poison in `outer` ends
    /// kernel waits as well. `core`: the thread's core; otherwise what `core_claims` leave for `place`.
    #[new]
    #[pyo3(signature = (group, memory, outer, *, counters, hold, rounds, windows, templates, list_lengths, max_put_bytes, max_outstanding, slots, idle, core, core_claims, place, words_home))]
    #[allow(clippy::too_many_arguments)]
    fn start(
        py: Python<'_>,
        group: &Communicator,
        memory: &SymmetricMemory,
        outer: &Communicator,
        counters: Vec<u32>,
        hold: Vec<bool>,
        rounds: u32,
        windows: Vec<PyWindow>,
        templates: Vec<PyTemplate>,
        list_lengths: u32,
        max_put_bytes: u64,
        max_outstanding: u32,
        slots: u32,
        idle: &str,
        core: Option<u32>,
        core_claims: Vec<Vec<u8>>,
        place: usize,
        words_home: &str,
    ) -> PyResult<DeviceProxy> {
        fork::check(py)?;
        let idle = choose(py, "idle", idle, &[("nap", Idle::Nap), ("spin", Idle::Spin)])?;
        let home = choose(py, "words_home", words_home, &HOMES)?;
        let words = counters.into_iter().zip(hold);
        let config = ProxyConfig {
            words: words
                .map(|(counter, hold)| WordConfig {
                    counter: CounterId::from_number(counter),
                    hold,
                })
                .collect(),
            rounds,
            windows: windows.iter().map(window).collect::<Result<_, Error>>()?,
            templates: templates.into_iter().map(template).collect(),
            list_lengths,
            max_put_bytes,
            max_outstanding,
        };
        let fabric = group.shared.get().ok_or(Error::from(weft_control::Error::Closed))?;
        outer.shared.with(py, |fabric| {
            memory.domain().failures().end_waits_with(fabric);
            Ok(())
        })?;
        let (group, domain) = (Arc::new(Group(fabric)), memory.domain().clone());
        let claimed = || {
            let claims = core_claims.iter().map(|bytes| CoreClaim::decode(bytes)).collect();
            ProxyCore::Claimed { claims, place }
        };
        let core = core.map_or_else(claimed, ProxyCore::Number);
        let options = ProxyOptions { slots, idle, core, words: home };
        let proxy = py.detach(|| Proxy::start(domain, group, config, options)).map_err(of_gpu)?;
        Ok(DeviceProxy { proxy: Some(ProcessOwned::new(proxy)) })
    }

    /// This rank's claim on a core, for the host's ranks: a core by number, one near the GPU that has `memory`, or none.
    #[staticmethod]
    fn core_claim<'py>(
        py: Python<'py>,
        memory: &SymmetricMemory,
        core: Option<u32>,
        near: bool,
    ) -> Bound<'py, PyBytes> {
        let claim = match core {
            Some(core) => CoreClaim::number(core),
            None if near => CoreClaim::near(memory.domain()),
            None => CoreClaim::none(),
        };
        PyBytes::new(py, claim.encode())
    }

    /// Home of the words: "gdrcopy", "pinned" or "gpu".
    fn word_home(&self) -> PyResult<&'static str> {
        let home = self.proxy()?.word_home();
        let named = HOMES.iter().find(|(_, each)| *each == home);
        Ok(named.map_or("auto", |(name, _)| name))
    }

    /// Raises the error that ended the proxy, or that a kernel recorded.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        fork::check(py)?;
        let proxy = self.proxy()?;
        Ok(py.detach(|| proxy.check()).map_err(of_gpu)?)
    }

    /// Waits until all commands are complete; kernels have ended.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        fork::check(py)?;
        let (proxy, mut raised) = (self.proxy()?, None);
        let drained = py.detach(|| {
            let mut interrupted = || {
                raised = Python::attach(|py| py.check_signals().err());
                raised.is_some()
            };
            proxy.drain(deadline(timeout), &mut interrupted)
        });
        Ok(drained.map_err(|error| raised.map_or_else(|| of_gpu(error), Error::Python))?)
    }

    /// Ends the thread, and takes the addresses back from kernels. No effect in a forked child.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        let proxy = self.proxy()?;
        Ok(py.detach(|| proxy.stop()).map_err(of_gpu)?)
    }
}
