//! Rust errors as Python exceptions: a `weft.errors` class for each variant.

use pyo3::panic::PanicException;
use pyo3::prelude::*;
use pyo3::types::PyType;
use weft_collectives::RunError;
use weft_collectives::device::DeviceError;
use weft_control::{Cause, Error as ControlError, Poison, Rank, limits};
use weft_cuda::Error as CudaError;
use weft_dispatch::Error as DispatchError;
use weft_fabric::{Error as FabricError, MissingPeer};
use weft_gpu::Error as GpuError;
use weft_loadgen::Error as LoadGenError;
use weft_moe::Error as MoeError;
use weft_predict::Error as PredictError;
use weft_qdl::Error as QdlError;
use weft_topology::Error as TopologyError;

/// Classes that this module raises; `weft.errors` defines them, and a test compares.
pub const CLASSES: &[&str] = &[
    "AddressError",
    "AllocationError",
    "AlreadySharedError",
    "ChannelInUseError",
    "CapacityError",
    "ClosedError",
    "ConfigurationError",
    "ConfigurationMismatchError",
    "ConnectError",
    "CreditError",
    "DeviceError",
    "ExcludedError",
    "ExpertError",
    "ForkError",
    "GroupPoisonedError",
    "InternalError",
    "LimitError",
    "ListenError",
    "MalformedError",
    "NoRouteError",
    "NotSharedError",
    "OutOfRangeError",
    "PeerLeftError",
    "PeerLostError",
    "ProtocolError",
    "ProviderError",
    "RankTakenError",
    "RegionError",
    "RendezvousError",
    "SecretError",
    "ShapeError",
    "SimulationError",
    "SizeError",
    "StageError",
    "SupersededError",
    "SystemCallError",
    "UnknownError",
    "WaitTimeoutError",
    "WireVersionError",
    "WorldSizeError",
    "WriteFailedError",
    "WrongGroupError",
];

/// Python exception parts.
struct ExceptionParts {
    class: &'static str,
    rank: Option<u32>,
    missing: Vec<(u32, u64, u64)>,
}

impl ExceptionParts {
    fn new(class: &'static str) -> ExceptionParts {
        ExceptionParts { class, rank: None, missing: Vec::new() }
    }

    fn at(self, rank: u32) -> ExceptionParts {
        ExceptionParts { rank: Some(rank), ..self }
    }

    fn about(self, rank: Option<Rank>) -> ExceptionParts {
        ExceptionParts { rank: rank.map(|rank| rank.0), ..self }
    }

    fn lacking(self, missing: &[MissingPeer]) -> ExceptionParts {
        let missing = missing.iter().map(|m| (m.rank.0, m.expected, m.seen)).collect();
        ExceptionParts { missing, ..self }
    }
}

/// An instance of a `weft.errors` class.
pub fn raise(py: Python<'_>, class: &'static str, message: &str) -> PyErr {
    build(py, &ExceptionParts::new(class), message).unwrap_or_else(|error| error)
}

fn build(py: Python<'_>, raised: &ExceptionParts, message: &str) -> PyResult<PyErr> {
    let class = py.import("weft.errors")?.getattr(raised.class)?.cast_into::<PyType>()?;
    let value = class.call1((message,))?;
    if let Some(rank) = raised.rank {
        value.setattr("rank", rank)?;
    }
    if !raised.missing.is_empty() {
        value.setattr("missing", raised.missing.clone())?;
    }
    Ok(PyErr::from_value(value))
}

/// An error from any crate below.
pub enum Error {
    /// Of an all-to-all.
    Moe(MoeError),
    /// Of collectives and messages.
    Run(RunError),
    /// Of collectives between GPUs.
    Device(DeviceError),
    /// Of a simulation.
    Predict(PredictError),
    /// Of a network or a server.
    Topology(TopologyError),
    /// From a LoadGen test or an accelerator node.
    Qdl(QdlError),
    /// Name of an object that was used after it ended.
    Closed(&'static str),
    /// ExceptionParts by Python code that a wait called, such as a signal handler.
    Python(PyErr),
}

impl From<MoeError> for Error {
    fn from(error: MoeError) -> Error {
        Error::Moe(error)
    }
}

impl From<FabricError> for Error {
    fn from(error: FabricError) -> Error {
        Error::Moe(MoeError::Fabric(error))
    }
}

impl From<ControlError> for Error {
    fn from(error: ControlError) -> Error {
        FabricError::Control(error).into()
    }
}

impl From<RunError> for Error {
    fn from(error: RunError) -> Error {
        Error::Run(error)
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Error {
        Error::Device(error)
    }
}

impl From<PredictError> for Error {
    fn from(error: PredictError) -> Error {
        Error::Predict(error)
    }
}

impl From<TopologyError> for Error {
    fn from(error: TopologyError) -> Error {
        Error::Topology(error)
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Error {
        Error::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        match error {
            Error::Python(error) => error,
            Error::Closed(what) => {
                Python::attach(|py| raise(py, "ClosedError", &format!("{what} was closed")))
            }
            Error::Moe(error) => Python::attach(|py| {
                build(py, &of_moe(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Run(error) => Python::attach(|py| {
                build(py, &of_run(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Device(error) => Python::attach(|py| {
                build(py, &of_device(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Predict(error) => Python::attach(|py| {
                build(py, &of_predict(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Qdl(error) => Python::attach(|py| {
                build(py, &of_qdl(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Topology(error) => Python::attach(|py| {
                build(py, &of_topology(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
        }
    }
}

fn of_run(error: &RunError) -> ExceptionParts {
    match error {
        RunError::Fabric(error) => of_fabric(error),
        RunError::Closed => ExceptionParts::new("ClosedError"),
        RunError::TooLarge { .. } => ExceptionParts::new("SizeError"),
        RunError::Disagreement { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(peer.0)
        }
        RunError::PeerFailed { peer, .. } => ExceptionParts::new("AllocationError").at(peer.0),
        RunError::PeerMemory { peer, .. } | RunError::Violation { peer, .. } => {
            ExceptionParts::new("ProtocolError").at(peer.0)
        }
        RunError::Timeout { missing, .. } => {
            ExceptionParts::new("WaitTimeoutError").lacking(missing)
        }
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_device(error: &DeviceError) -> ExceptionParts {
    match error {
        DeviceError::Gpu(error) => of_gpu(error),
        DeviceError::Failed { source, .. } => of_gpu(source),
        DeviceError::Fabric(error) => of_fabric(error),
        DeviceError::Parts { .. } => ExceptionParts::new("ShapeError"),
        DeviceError::Disagreement { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(peer.0)
        }
        DeviceError::Malformed { peer, .. } => ExceptionParts::new("MalformedError").at(peer.0),
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_qdl(error: &QdlError) -> ExceptionParts {
    match error {
        QdlError::Fabric(error) => of_fabric(error),
        QdlError::Dispatch(error) | QdlError::Node { source: error, .. } => of_dispatch(error),
        QdlError::LoadGen(LoadGenError::Busy) => ExceptionParts::new("StageError"),
        QdlError::Name { .. } => ExceptionParts::new("ProtocolError"),
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_dispatch(error: &DispatchError) -> ExceptionParts {
    match error {
        DispatchError::Fabric(error) => of_fabric(error),
        DispatchError::Full { .. } => ExceptionParts::new("CapacityError"),
        DispatchError::Malformed { .. }
        | DispatchError::Checksum { .. }
        | DispatchError::UnexpectedAnswer { .. } => ExceptionParts::new("ProtocolError"),
        DispatchError::Version { .. } => ExceptionParts::new("WireVersionError"),
        DispatchError::System { .. } => ExceptionParts::new("SystemCallError"),
        DispatchError::Timeout { .. } => ExceptionParts::new("WaitTimeoutError"),
        DispatchError::Disagreement { .. } => ExceptionParts::new("ConfigurationMismatchError"),
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_predict(error: &PredictError) -> ExceptionParts {
    match error {
        PredictError::Moe(error) => of_moe(error),
        PredictError::Deadlock { rank, .. } => ExceptionParts::new("SimulationError").at(*rank),
        PredictError::Stalled { .. }
        | PredictError::NoWorkload
        | PredictError::Cancelled { .. }
        | PredictError::Network(_) => ExceptionParts::new("SimulationError"),
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_topology(error: &TopologyError) -> ExceptionParts {
    match error {
        TopologyError::TooLarge { .. } => ExceptionParts::new("SizeError"),
        _ => ExceptionParts::new("ConfigurationError"),
    }
}

fn of_moe(error: &MoeError) -> ExceptionParts {
    match error {
        MoeError::Zero { .. } | MoeError::RankOutOfRange { .. } => {
            ExceptionParts::new("ConfigurationError")
        }
        MoeError::Closed => ExceptionParts::new("ClosedError"),
        MoeError::WrongGroup { .. } => ExceptionParts::new("WrongGroupError"),
        MoeError::TooLarge { .. } => ExceptionParts::new("SizeError"),
        MoeError::TooManyTokens { .. }
        | MoeError::WrongLength { .. }
        | MoeError::TooFewRows { .. }
        | MoeError::RowLength { .. } => ExceptionParts::new("ShapeError"),
        MoeError::NotOnHost { .. } => ExceptionParts::new("RegionError"),
        MoeError::ExpertOutOfRange { .. } | MoeError::ExpertTwice { .. } => {
            ExceptionParts::new("ExpertError")
        }
        MoeError::Capacity { rank, .. } => ExceptionParts::new("CapacityError").at(*rank),
        MoeError::Header { peer, .. }
        | MoeError::Metadata { peer, .. }
        | MoeError::Overrun { peer, .. } => ExceptionParts::new("ProtocolError").at(*peer),
        MoeError::Disagreement { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(*peer)
        }
        MoeError::RoundInFlight { .. } => ExceptionParts::new("StageError"),
        MoeError::MapRefused { peer, .. } => ExceptionParts::new("StageError").at(*peer),
        MoeError::Captured { .. } | MoeError::NoCounts { .. } => ExceptionParts::new("StageError"),
        MoeError::CountsLate { .. } => ExceptionParts::new("WaitTimeoutError"),
        MoeError::InUse { .. } => ExceptionParts::new("ChannelInUseError"),
        MoeError::WrongStage { .. } => ExceptionParts::new("StageError"),
        MoeError::Timeout { missing, .. } => {
            ExceptionParts::new("WaitTimeoutError").lacking(missing)
        }
        MoeError::DeviceLimit { .. }
        | MoeError::Unsuitable { .. }
        | MoeError::Cast { .. }
        | MoeError::CastBlock { .. }
        | MoeError::MapExpert { .. }
        | MoeError::MapReplicas { .. }
        | MoeError::MapShape { .. }
        | MoeError::NoLayer { .. }
        | MoeError::RowPieces { .. } => ExceptionParts::new("ConfigurationError"),
        MoeError::HeapTooLarge { .. } => ExceptionParts::new("SizeError"),
        MoeError::PeerRefused { peer, .. } => ExceptionParts::new("AllocationError").at(*peer),
        MoeError::PeerFailed { peer, .. } => ExceptionParts::new("DeviceError").at(*peer),
        MoeError::NoChannel { .. } => ExceptionParts::new("UnknownError"),
        MoeError::NoAddress { .. } | MoeError::Misaligned { .. } => {
            ExceptionParts::new("ShapeError")
        }
        MoeError::Gpu(error) => of_gpu(error),
        MoeError::Cuda(error) => of_cuda(error),
        MoeError::Fabric(error) => of_fabric(error),
        _ => ExceptionParts::new("UnknownError"),
    }
}

/// CUDA's number for memory that there is not.
const CUDA_OUT_OF_MEMORY: u32 = 2;

fn of_cuda(error: &CudaError) -> ExceptionParts {
    match error {
        CudaError::Absent { .. }
        | CudaError::TooOld { .. }
        | CudaError::NoDevice { .. }
        | CudaError::NoGdrDriver { .. }
        | CudaError::Unsupported { .. } => ExceptionParts::new("ProviderError"),
        CudaError::NotOfDevice { .. } => ExceptionParts::new("RegionError"),
        CudaError::Size { .. } => ExceptionParts::new("AllocationError"),
        _ if error.code() == Some(CUDA_OUT_OF_MEMORY) => ExceptionParts::new("AllocationError"),
        _ => ExceptionParts::new("DeviceError"),
    }
}

fn of_gpu(error: &GpuError) -> ExceptionParts {
    match error {
        // What a kernel recorded.
        GpuError::Timeout { peer, expected, seen, .. } => {
            let missing = peer.map(|rank| MissingPeer { rank, expected: *expected, seen: *seen });
            ExceptionParts::new("WaitTimeoutError").about(*peer).lacking(missing.as_slice())
        }
        GpuError::Aborted { .. } => ExceptionParts::new("GroupPoisonedError"),
        GpuError::Overlap { .. } | GpuError::OutOfOrder { .. } => ExceptionParts::new("StageError"),
        GpuError::Reported(report) => ExceptionParts::new(report.class).about(report.rank),
        GpuError::ProxyTimeout { peer, expected, seen, .. } => {
            let missing = peer.map(|rank| MissingPeer { rank, expected: *expected, seen: *seen });
            ExceptionParts::new("WaitTimeoutError").about(*peer).lacking(missing.as_slice())
        }
        GpuError::UnknownRecord { peer, .. } => ExceptionParts::new("ProtocolError").about(*peer),
        // What a kernel or a peer's proxy did.
        GpuError::Command(_) => ExceptionParts::new("OutOfRangeError"),
        GpuError::Ring(_) => ExceptionParts::new("ProtocolError"),
        GpuError::ProxyPanicked { .. } => ExceptionParts::new("InternalError"),
        GpuError::ProxyBusy { .. } => ExceptionParts::new("WaitTimeoutError"),
        GpuError::ProxyRound { peer, .. } => {
            ExceptionParts::new("ProtocolError").about(Some(*peer))
        }
        // Inputs to a heap or a kernel.
        GpuError::Variable(_)
        | GpuError::Source { .. }
        | GpuError::Empty { .. }
        | GpuError::TwinOnDevice { .. }
        | GpuError::NotShareable { .. }
        | GpuError::Define { .. }
        | GpuError::NotResident { .. }
        | GpuError::ProxyLimit { .. }
        | GpuError::ProxyCore { .. }
        | GpuError::ProxyPresent
        | GpuError::WordHome
        | GpuError::TooManyRanks { .. } => ExceptionParts::new("ConfigurationError"),
        GpuError::Disagreement { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(peer.0)
        }
        GpuError::Malformed { peer, .. } => ExceptionParts::new("MalformedError").at(peer.0),
        GpuError::OtherHost { peer, .. }
        | GpuError::Namespace { peer, .. }
        | GpuError::NoPeerAccess { peer, .. } => ExceptionParts::new("NoRouteError").at(peer.0),
        GpuError::Map { peer, .. } | GpuError::Peer { peer, .. } => {
            ExceptionParts::new("DeviceError").at(peer.0)
        }
        GpuError::Exchange { source, .. } | GpuError::Fabric(source) => of_fabric(source),
        GpuError::Cache { .. } => ExceptionParts::new("SystemCallError"),
        GpuError::Cuda(error) => of_cuda(error),
        _ => ExceptionParts::new("DeviceError"),
    }
}

fn of_fabric(error: &FabricError) -> ExceptionParts {
    match error {
        FabricError::Allocate { .. }
        | FabricError::NumaBind { .. }
        | FabricError::HugePages { .. } => ExceptionParts::new("AllocationError"),
        FabricError::DmaBuf { source, .. } => of_cuda(source),
        FabricError::NoNumaNode { .. } => ExceptionParts::new("ConfigurationError"),
        FabricError::NoRoute { peer, .. } => ExceptionParts::new("NoRouteError").at(peer.0),
        FabricError::Malformed { peer, .. } => ExceptionParts::new("MalformedError").at(peer.0),
        FabricError::Connect { peer, .. } => ExceptionParts::new("ConnectError").at(peer.0),
        FabricError::Provider { .. } | FabricError::NoDevices { .. } => {
            ExceptionParts::new("ProviderError")
        }
        FabricError::Timeout { missing, .. } => {
            ExceptionParts::new("WaitTimeoutError").lacking(missing)
        }
        FabricError::NoDialer { .. } => ExceptionParts::new("WaitTimeoutError"),
        FabricError::ListenerClosed { .. } => ExceptionParts::new("ClosedError"),
        FabricError::Poisoned(poison) => of_poison(poison),
        FabricError::NoCredit { peer, .. }
        | FabricError::OldRound { peer, .. }
        | FabricError::NothingToCredit { peer, .. } => {
            ExceptionParts::new("CreditError").at(peer.0)
        }
        FabricError::NotLinked { .. } => ExceptionParts::new("NotSharedError"),
        FabricError::AlreadyLinked { .. } => ExceptionParts::new("AlreadySharedError"),
        FabricError::OutOfRange { .. } => ExceptionParts::new("OutOfRangeError"),
        FabricError::Unknown { .. } => ExceptionParts::new("UnknownError"),
        FabricError::Limit { .. } => ExceptionParts::new("LimitError"),
        FabricError::PeerRefused { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(peer.0)
        }
        FabricError::Unusable { .. } => ExceptionParts::new("RegionError"),
        FabricError::InProgress { .. } => ExceptionParts::new("StageError"),
        FabricError::ReformOfPair { .. } => ExceptionParts::new("ConfigurationError"),
        FabricError::Control(error) => of_control(error),
        FabricError::System { source, .. } if limits::is_exhausted(source) => {
            ExceptionParts::new("LimitError")
        }
        FabricError::System { .. } | FabricError::Interrupted => {
            ExceptionParts::new("SystemCallError")
        }
        _ => ExceptionParts::new("UnknownError"),
    }
}

fn of_poison(poison: &Poison) -> ExceptionParts {
    let raised = ExceptionParts::new(match poison.kind {
        Cause::Lost | Cause::Silent => "PeerLostError",
        Cause::Left => "PeerLeftError",
        Cause::Failed => "WriteFailedError",
        Cause::Protocol => "ProtocolError",
        Cause::User => "GroupPoisonedError",
    });
    poison.rank.map_or_else(
        || ExceptionParts::new(raised.class),
        |rank| ExceptionParts::new(raised.class).at(rank.0),
    )
}

fn of_control(error: &ControlError) -> ExceptionParts {
    match error {
        ControlError::Variable { .. } | ControlError::MissingVariable { .. } => {
            ExceptionParts::new("ConfigurationError")
        }
        ControlError::MissingAddress { .. }
        | ControlError::Resolve { .. }
        | ControlError::PairResolve { .. } => ExceptionParts::new("AddressError"),
        ControlError::LoopbackAddress { rank, .. } => {
            ExceptionParts::new("AddressError").at(rank.0)
        }
        ControlError::SecretMissing { .. }
        | ControlError::SecretFile { .. }
        | ControlError::PairSecretMissing { .. }
        | ControlError::TlsFile { .. }
        | ControlError::Tls { .. }
        | ControlError::TlsDemanded { .. }
        | ControlError::TlsPayloads { .. }
        | ControlError::OtherUser { .. }
        | ControlError::WrongSecret { .. }
        | ControlError::PairWrongSecret { .. } => ExceptionParts::new("SecretError"),
        ControlError::PortInUse { .. } | ControlError::Listen { .. } => {
            ExceptionParts::new("ListenError")
        }
        ControlError::PairListen { .. } => ExceptionParts::new("ListenError"),
        ControlError::Descriptors { .. }
        | ControlError::Ports { .. }
        | ControlError::Thread { .. } => ExceptionParts::new("LimitError"),
        ControlError::System { source, .. } if limits::is_exhausted(source) => {
            ExceptionParts::new("LimitError")
        }
        ControlError::WrongVersion { .. } | ControlError::PairWrongVersion { .. } => {
            ExceptionParts::new("WireVersionError")
        }
        ControlError::WrongWorldSize { .. } => ExceptionParts::new("WorldSizeError"),
        ControlError::DuplicateRank { .. } => ExceptionParts::new("RankTakenError"),
        ControlError::Rendezvous { .. } | ControlError::NoListener { .. } => {
            ExceptionParts::new("RendezvousError")
        }
        ControlError::Timeout { .. } => ExceptionParts::new("WaitTimeoutError"),
        ControlError::Poisoned(poison) => of_poison(poison),
        ControlError::Left { rank, .. } => ExceptionParts::new("PeerLeftError").at(rank.0),
        ControlError::TooLarge { .. } => ExceptionParts::new("LimitError"),
        ControlError::Backlog { peer, .. } => ExceptionParts::new("LimitError").at(peer.0),
        ControlError::CallMismatch { peer, .. } => {
            ExceptionParts::new("ConfigurationMismatchError").at(peer.0)
        }
        ControlError::PayloadMismatch { .. } => ExceptionParts::new("StageError"),
        ControlError::WrongCount { .. } => ExceptionParts::new("ConfigurationError"),
        ControlError::NoSuchRank { .. } => ExceptionParts::new("UnknownError"),
        ControlError::Excluded { .. } => ExceptionParts::new("ExcludedError"),
        ControlError::Superseded => ExceptionParts::new("SupersededError"),
        ControlError::Forked => ExceptionParts::new("ForkError"),
        ControlError::Closed => ExceptionParts::new("ClosedError"),
        ControlError::Protocol { .. } => ExceptionParts::new("ProtocolError"),
        _ => ExceptionParts::new("SystemCallError"),
    }
}

/// Makes panics in the module `weft.errors.InternalError` subclasses, so that `except Exception` handles them: PyO3's
/// `PanicException`, which is this module's own, derives from `BaseException` only.
pub fn adopt_panics(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let panic = py.get_type::<PanicException>();
    let base = py.import("weft.errors")?.getattr("InternalError")?;
    panic.setattr("__bases__", (base,))?;
    module.add("PanicException", panic)
}

/// Names for all classes that can be raised.
#[pyfunction]
pub fn error_classes() -> Vec<&'static str> {
    CLASSES.to_vec()
}
