//! Collectives between GPUs for `weft.cuda.Collectives`: addresses and streams in, launches out.

use crate::communicator::Communicator;
use crate::device::defines::Source;
use crate::device::domain::SymmetricMemory;
use crate::device::held::{Held, Operator};
use crate::device::options::{memory_kind, memory_location};
use crate::errors::{Error, raise};
use crate::fork;
use crate::logging;
use crate::numbers::WorldSize;
use crate::shared::{Shared, deadline, duration};
use pyo3::prelude::*;
use weft_collectives::device::{
    CallOptions, DeviceAlgorithm, DeviceCall, DeviceCollectives as Native, DeviceConfig,
    DeviceError, DeviceOperation, Transfer,
};
use weft_collectives::{Element, Reduction};
use weft_cuda::Stream;
use weft_fabric::{Communicator as Fabric, Time};

/// Collectives on a device: see `weft.cuda.Collectives`.
#[pyclass(frozen, module = "weft._native")]
pub struct DeviceCollectives {
    /// `None` in a group that lives in this process.
    shared: Option<Shared>,
    native: Held<Native>,
    /// True if calls wait on the calling thread.
    waits: bool,
    blocks: u32,
    nbytes: u64,
    /// Default for calls that do not choose.
    copy_engine: bool,
}

impl Operator for Native {
    const NAME: &'static str = "the device collectives object";

    fn settle(&self) {
        let _ = Native::settle(self);
    }

    fn close(self, fabric: &Fabric, deadline: Time) -> Result<(), Error> {
        Ok(Native::close(self, fabric, deadline)?)
    }
}

impl DeviceCollectives {
    fn new(shared: Option<Shared>, native: Native, copy_engine: bool) -> DeviceCollectives {
        DeviceCollectives {
            shared,
            copy_engine,
            waits: native.is_twin(),
            blocks: native.layout().blocks,
            nbytes: native.layout().bytes,
            native: Held::new(native),
        }
    }
}

#[pymethods]
impl DeviceCollectives {
    #[new]
    #[pyo3(signature = (communicator, *, device, memory, num_sms, skew_timeout, timeout, concurrent,
        copy_engine))]
    #[allow(clippy::too_many_arguments)]
    fn make(
        py: Python<'_>,
        communicator: &Communicator,
        device: &str,
        memory: &str,
        num_sms: Option<i64>,
        skew_timeout: f64,
        timeout: f64,
        concurrent: bool,
        copy_engine: bool,
    ) -> PyResult<DeviceCollectives> {
        let location = memory_location(py, device, memory_kind(py, memory)?)?;
        let num_sms = sms_of(py, num_sms)?;
        let skew_timeout = duration(skew_timeout);
        let config = DeviceConfig { location, num_sms, skew_timeout, concurrent, copy_engine };
        let deadline = deadline(timeout);
        let shared = communicator.shared.clone();
        let domains = shared.domains.clone();
        let native = shared.with(py, |fabric| {
            let made: Result<_, DeviceError> = domains.with(fabric, location, deadline, |domain| {
                Native::over(fabric, &config, deadline, domain)
            });
            Ok(made?)
        })?;
        Ok(DeviceCollectives::new(Some(shared), native, copy_engine))
    }

    /// All ranks in this process, in rank order.
    #[staticmethod]
    #[pyo3(signature = (world_size, devices, *, memory, num_sms, skew_timeout, concurrent,
        copy_engine))]
    #[allow(clippy::too_many_arguments)]
    fn local_group(
        py: Python<'_>,
        world_size: WorldSize,
        devices: Vec<String>,
        memory: &str,
        num_sms: Option<i64>,
        skew_timeout: f64,
        concurrent: bool,
        copy_engine: bool,
    ) -> PyResult<Vec<DeviceCollectives>> {
        fork::check(py)?;
        fork::watch();
        logging::install();
        let WorldSize(world_size) = world_size;
        if devices.len() != world_size as usize {
            let given = devices.len();
            let message =
                format!("{given} devices are given for {world_size} ranks: give each one");
            return Err(raise(py, "ConfigurationError", &message));
        }
        let num_sms = sms_of(py, num_sms)?;
        let (memory, skew_timeout) = (memory_kind(py, memory)?, duration(skew_timeout));
        let config = |device: &String| {
            let location = memory_location(py, device, memory)?;
            Ok(DeviceConfig { location, num_sms, skew_timeout, concurrent, copy_engine })
        };
        let configs = devices.iter().map(config).collect::<PyResult<Vec<_>>>()?;
        let ranks = py.detach(|| Native::local_group(&configs)).map_err(Error::from)?;
        let rank = |native| DeviceCollectives::new(None, native, copy_engine);
        Ok(ranks.into_iter().map(rank).collect())
    }

    /// Symmetric memory for all ranks in an in-process group, in rank order.
    #[staticmethod]
    fn allocate_local(
        py: Python<'_>,
        group: Vec<Py<DeviceCollectives>>,
        bytes: u64,
    ) -> PyResult<Vec<SymmetricMemory>> {
        fork::check(py)?;
        let domain = |rank: &Py<DeviceCollectives>| rank.get().native.run(Native::domain);
        let made = || -> Result<Vec<SymmetricMemory>, Error> {
            let domains = group.iter().map(domain).collect::<Result<_, _>>()?;
            Ok(SymmetricMemory::local(domains, bytes).map_err(DeviceError::from)?)
        };
        Ok(py.detach(made)?)
    }

    /// Blocks in the largest launch.
    #[getter]
    fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Symmetric memory bytes on each rank.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Compiles and loads the kernels for a reduction.
    fn prepare(&self, py: Python<'_>, reduction: &str, element: &str) -> PyResult<()> {
        fork::check(py)?;
        let (reduction, element) = (reduction_of(py, reduction)?, element_of(py, element)?);
        Ok(py.detach(|| self.native.run(|native| native.prepare(reduction, element)))?)
    }

    /// Starts a call on a stream.
    #[pyo3(signature = (stream, operation, *, input, output, element, count, root=0, reduction=None,
        average=false, algorithm=None, num_sms=None, sent=None, received=None, copy_engine=None))]
    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        py: Python<'_>,
        stream: u64,
        operation: &str,
        input: u64,
        output: u64,
        element: &str,
        count: u64,
        root: u32,
        reduction: Option<&str>,
        average: bool,
        algorithm: Option<&str>,
        num_sms: Option<i64>,
        sent: Option<Vec<u64>>,
        received: Option<Vec<u64>>,
        copy_engine: Option<bool>,
    ) -> PyResult<()> {
        fork::check(py)?;
        let num_sms = sms_of(py, num_sms)?;
        let algorithm = match (algorithm, copy_engine) {
            (None, Some(true)) => Some(DeviceAlgorithm::CopyEngine),
            (Some(name), Some(true)) => {
                let message = format!(
                    "copy_engine with algorithm {name:?}: omit one; they exclude each other"
                );
                return Err(raise(py, "ConfigurationError", &message));
            }
            (name, _) => name.map(|name| algorithm_of(py, name)).transpose()?,
        };
        let copy_engine = copy_engine.unwrap_or(self.copy_engine);
        let call = DeviceCall {
            stream: Stream(stream),
            operation: operation_of(py, operation, count, root, sent.zip(received))?,
            input,
            output,
            element: element_of(py, element)?,
            reduction: reduction.map_or(Ok(Reduction::Sum), |name| reduction_of(py, name))?,
            average,
            options: CallOptions { algorithm, num_sms, chunk_bytes: None, copy_engine },
        };
        // SAFETY: the Python layer has checked the tensors' shapes, and torch keeps the memory for the work on the
        // stream.
        let run = || self.native.run(|native| unsafe { native.run(&call) });
        Ok(if self.waits { py.detach(run) } else { run() }?)
    }

    /// Starts sends and receives on a stream, all at the same time. Each is a peer, true for a receive, an address and bytes.
    fn run_transfers(
        &self,
        py: Python<'_>,
        stream: u64,
        batch: Vec<(u32, bool, u64, u64)>,
    ) -> PyResult<()> {
        fork::check(py)?;
        let transfer =
            |(peer, receives, address, bytes)| Transfer { peer, receives, address, bytes };
        let batch: Vec<Transfer> = batch.into_iter().map(transfer).collect();
        // SAFETY: same as `run`; the Python layer has checked that no receive overlaps another tensor.
        let run =
            || self.native.run(|native| unsafe { native.run_transfers(Stream(stream), &batch) });
        Ok(if self.waits { py.detach(run) } else { run() }?)
    }

    /// Raises the error that the device recorded.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        fork::check(py)?;
        Ok(self.native.run(Native::check)?)
    }

    /// Frees all memory; every rank calls this. No effect in a forked child.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.native.close(py, self.shared.as_ref(), timeout)
    }

    /// Ends it on this rank only. No effect in a forked child.
    fn abandon(&self, py: Python<'_>) {
        self.native.abandon(py);
    }
}

fn unknown(py: Python<'_>, what: &str, given: &str, expected: &str) -> PyErr {
    raise(py, "ConfigurationError", &format!("{what} is {given:?}: expected {expected}"))
}

fn sms_of(py: Python<'_>, given: Option<i64>) -> PyResult<Option<u32>> {
    let number = |given: i64| {
        u32::try_from(given).map_err(|_| {
            let message = format!("num_sms is {given}: expected an SM count, from 1 on");
            raise(py, "ConfigurationError", &message)
        })
    };
    given.map(number).transpose()
}

fn element_of(py: Python<'_>, name: &str) -> PyResult<Element> {
    let names = || Element::ALL.map(Element::name).join(", ");
    Element::from_name(name).ok_or_else(|| unknown(py, "dtype", name, &names()))
}

fn reduction_of(py: Python<'_>, name: &str) -> PyResult<Reduction> {
    let names = || Reduction::ALL.map(Reduction::name).join(", ");
    Reduction::from_name(name).ok_or_else(|| unknown(py, "op", name, &names()))
}

fn algorithm_of(py: Python<'_>, name: &str) -> PyResult<DeviceAlgorithm> {
    DeviceAlgorithm::from_name(name)
        .ok_or_else(|| unknown(py, "algorithm", name, "one_shot, two_shot or direct"))
}

fn operation_of(
    py: Python<'_>,
    name: &str,
    count: u64,
    root: u32,
    uneven: Option<(Vec<u64>, Vec<u64>)>,
) -> PyResult<DeviceOperation> {
    Ok(match name {
        "all_reduce" => DeviceOperation::AllReduce { count },
        "reduce_scatter" => DeviceOperation::ReduceScatter { count },
        "reduce" => DeviceOperation::Reduce { count, root },
        "all_gather" => DeviceOperation::AllGather { count },
        "all_to_all" => match uneven {
            Some((sent, received)) => DeviceOperation::AllToAllUneven { sent, received },
            None => DeviceOperation::AllToAll { count },
        },
        "broadcast" => DeviceOperation::Broadcast { count, root },
        "gather" => DeviceOperation::Gather { count, root },
        "scatter" => DeviceOperation::Scatter { count, root },
        "barrier" => DeviceOperation::Barrier,
        _ => return Err(unknown(py, "operation", name, "a collective")),
    })
}

/// The program with a reduction's kernels, or the kernels without arithmetic, or (`transfers`) the send and receive
/// kernels, and the compiler's options. For tests that compile kernels without a GPU.
#[pyfunction]
#[pyo3(signature = (ranks, blocks, arch, reduction=None, element=None, *, transfers=false))]
pub fn device_collectives_source(
    py: Python<'_>,
    ranks: u32,
    blocks: u32,
    arch: &str,
    reduction: Option<&str>,
    element: Option<&str>,
    transfers: bool,
) -> PyResult<Source> {
    let arithmetic = match (reduction, element) {
        (Some(reduction), Some(element)) => {
            Some((reduction_of(py, reduction)?, element_of(py, element)?))
        }
        _ => None,
    };
    let request = match transfers {
        true => weft_collectives::device::transfers_request(ranks, blocks, arch),
        false => weft_collectives::device::compile_request(ranks, blocks, arithmetic, arch),
    };
    Ok((request.name, request.sources().collect(), request.arguments()))
}

/// Compiles the collective kernels among `ranks` into the cache, without a GPU: the kernels without arithmetic, for
/// sends and receives, and for each reduction and element type. Returns how many were compiled, and how many were
/// there.
#[pyfunction]
#[pyo3(signature = (ranks, blocks, arch, pairs))]
pub fn compile_collectives(
    py: Python<'_>,
    ranks: u32,
    blocks: Option<i64>,
    arch: &str,
    pairs: Vec<(String, String)>,
) -> PyResult<(usize, usize)> {
    use weft_collectives::device::{compile_request, transfers_request};
    let blocks = sms_of(py, blocks)?.unwrap_or(DeviceConfig::usual_sms(ranks));
    let pair = |(reduction, element): &(String, String)| {
        Ok(Some((reduction_of(py, reduction)?, element_of(py, element)?)))
    };
    let programs = pairs.iter().map(pair).collect::<PyResult<Vec<_>>>()?;
    let programs = std::iter::once(None).chain(programs);
    let requests = programs.map(|arithmetic| compile_request(ranks, blocks, arithmetic, arch));
    let requests = std::iter::once(transfers_request(ranks, blocks, arch)).chain(requests);
    let requests: Vec<_> = requests.collect();
    let made = py.detach(|| weft_gpu::jit::prepare(&requests, &weft_gpu::jit::Cache::from_env()));
    let made = made.map_err(DeviceError::from).map_err(Error::from)?;
    let cached = made.iter().filter(|program| program.cached).count();
    Ok((made.len() - cached, cached))
}
