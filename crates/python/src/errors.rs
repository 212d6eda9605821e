//! The one place where Rust errors become Python exceptions: a variant, a class of `weft.errors`.

use pyo3::prelude::*;
use pyo3::types::PyType;
use weft_control::{Cause, Error as ControlError, Poison, Rank};
use weft_cuda::Error as CudaError;
use weft_fabric::{Error as FabricError, Missing};
use weft_gpu::Error as GpuError;
use weft_moe::Error as MoeError;
use weft_predict::Error as PredictError;
use weft_topology::Error as TopologyError;

/// Every class that this module raises; `weft.errors` defines them, and a test compares.
pub const CLASSES: &[&str] = &[
    "AddressError",
    "AllocationError",
    "AlreadySharedError",
    "BootstrapError",
    "BufferInUseError",
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

/// What a Python exception is made of.
struct Raised {
    class: &'static str,
    rank: Option<u32>,
    missing: Vec<(u32, u64, u64)>,
}

impl Raised {
    fn new(class: &'static str) -> Raised {
        Raised { class, rank: None, missing: Vec::new() }
    }

    fn at(self, rank: u32) -> Raised {
        Raised { rank: Some(rank), ..self }
    }

    fn about(self, rank: Option<Rank>) -> Raised {
        Raised { rank: rank.map(|rank| rank.0), ..self }
    }

    fn lacking(self, missing: &[Missing]) -> Raised {
        let missing = missing.iter().map(|m| (m.rank.0, m.expected, m.seen)).collect();
        Raised { missing, ..self }
    }
}

/// An instance of a class of `weft.errors`.
pub fn raise(py: Python<'_>, class: &'static str, message: &str) -> PyErr {
    build(py, &Raised::new(class), message).unwrap_or_else(|error| error)
}

fn build(py: Python<'_>, raised: &Raised, message: &str) -> PyResult<PyErr> {
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

/// An error of any crate below.
pub enum Error {
    /// Of an all-to-all.
    Moe(MoeError),
    /// Of a simulation.
    Predict(PredictError),
    /// Of a network or a server.
    Topology(TopologyError),
    /// Something was used after its end; what was.
    Closed(&'static str),
    /// Raised by Python code that a wait called, such as a signal handler.
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
            Error::Predict(error) => Python::attach(|py| {
                build(py, &of_predict(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
            Error::Topology(error) => Python::attach(|py| {
                build(py, &of_topology(&error), &error.to_string()).unwrap_or_else(|error| error)
            }),
        }
    }
}

fn of_predict(error: &PredictError) -> Raised {
    match error {
        PredictError::Moe(error) => of_moe(error),
        PredictError::Deadlock { rank, .. } => Raised::new("SimulationError").at(*rank),
        PredictError::Stalled { .. }
        | PredictError::Nothing
        | PredictError::Cancelled { .. }
        | PredictError::Network(_) => Raised::new("SimulationError"),
        _ => Raised::new("ConfigurationError"),
    }
}

fn of_topology(error: &TopologyError) -> Raised {
    match error {
        TopologyError::TooLarge { .. } => Raised::new("SizeError"),
        _ => Raised::new("ConfigurationError"),
    }
}

fn of_moe(error: &MoeError) -> Raised {
    match error {
        MoeError::Zero { .. } | MoeError::RankOutOfRange { .. } => {
            Raised::new("ConfigurationError")
        }
        MoeError::Closed => Raised::new("ClosedError"),
        MoeError::WrongGroup { .. } => Raised::new("WrongGroupError"),
        MoeError::TooLarge { .. } => Raised::new("SizeError"),
        MoeError::TooManyTokens { .. }
        | MoeError::WrongLength { .. }
        | MoeError::TooFewRows { .. }
        | MoeError::RowLength { .. } => Raised::new("ShapeError"),
        MoeError::NotOnHost { .. } => Raised::new("RegionError"),
        MoeError::ExpertOutOfRange { .. } | MoeError::ExpertTwice { .. } => {
            Raised::new("ExpertError")
        }
        MoeError::Capacity { rank, .. } => Raised::new("CapacityError").at(*rank),
        MoeError::Header { peer, .. }
        | MoeError::Metadata { peer, .. }
        | MoeError::Overrun { peer, .. } => Raised::new("ProtocolError").at(*peer),
        MoeError::Disagreement { peer, .. } => Raised::new("ConfigurationMismatchError").at(*peer),
        MoeError::InUse { .. } => Raised::new("BufferInUseError"),
        MoeError::WrongStage { .. } => Raised::new("StageError"),
        MoeError::Timeout { missing, .. } => Raised::new("WaitTimeoutError").lacking(missing),
        MoeError::DeviceLimit { .. }
        | MoeError::Unsuitable { .. }
        | MoeError::Cast { .. }
        | MoeError::CastBlock { .. }
        | MoeError::RowPieces { .. } => Raised::new("ConfigurationError"),
        MoeError::HeapTooLarge { .. } => Raised::new("SizeError"),
        MoeError::PeerRefused { peer, .. } => Raised::new("AllocationError").at(*peer),
        MoeError::PeerFailed { peer, .. } => Raised::new("DeviceError").at(*peer),
        MoeError::NoChannel { .. } => Raised::new("UnknownError"),
        MoeError::NoAddress { .. } | MoeError::Misaligned { .. } => Raised::new("ShapeError"),
        MoeError::Gpu(error) => of_gpu(error),
        MoeError::Cuda(error) => of_cuda(error),
        MoeError::Fabric(error) => of_fabric(error),
        _ => Raised::new("UnknownError"),
    }
}

/// CUDA's number for memory that there is not.
const CUDA_OUT_OF_MEMORY: u32 = 2;

fn of_cuda(error: &CudaError) -> Raised {
    match error {
        CudaError::Absent { .. }
        | CudaError::TooOld { .. }
        | CudaError::NoDevice { .. }
        | CudaError::Unsupported { .. } => Raised::new("ProviderError"),
        CudaError::NotOfDevice { .. } => Raised::new("RegionError"),
        CudaError::Size { .. } => Raised::new("AllocationError"),
        _ if error.code() == Some(CUDA_OUT_OF_MEMORY) => Raised::new("AllocationError"),
        _ => Raised::new("DeviceError"),
    }
}

fn of_gpu(error: &GpuError) -> Raised {
    match error {
        // What a kernel recorded.
        GpuError::Timeout { peer, expected, seen, .. } => {
            let missing = peer.map(|rank| Missing { rank, expected: *expected, seen: *seen });
            Raised::new("WaitTimeoutError").about(*peer).lacking(missing.as_slice())
        }
        GpuError::Aborted { .. } => Raised::new("GroupPoisonedError"),
        GpuError::Overlap { .. } | GpuError::OutOfOrder { .. } => Raised::new("StageError"),
        GpuError::Reported(report) => Raised::new(report.class).about(report.rank),
        GpuError::UnknownRecord { peer, .. } => Raised::new("ProtocolError").about(*peer),
        // What a heap or a kernel is made of.
        GpuError::Empty { .. }
        | GpuError::TwinOnDevice { .. }
        | GpuError::Define { .. }
        | GpuError::NotResident { .. }
        | GpuError::TooManyRanks { .. } => Raised::new("ConfigurationError"),
        GpuError::Disagreement { peer, .. } => Raised::new("ConfigurationMismatchError").at(peer.0),
        GpuError::Malformed { peer, .. } => Raised::new("MalformedError").at(peer.0),
        GpuError::OtherHost { peer, .. }
        | GpuError::Namespace { peer, .. }
        | GpuError::NoPeerAccess { peer, .. } => Raised::new("NoRouteError").at(peer.0),
        GpuError::Map { peer, .. } | GpuError::Peer { peer, .. } => {
            Raised::new("DeviceError").at(peer.0)
        }
        GpuError::Exchange { source, .. } | GpuError::Fabric(source) => of_fabric(source),
        GpuError::Cache { .. } => Raised::new("SystemCallError"),
        GpuError::Cuda(error) => of_cuda(error),
        _ => Raised::new("DeviceError"),
    }
}

fn of_fabric(error: &FabricError) -> Raised {
    match error {
        FabricError::Allocate { .. }
        | FabricError::NumaBind { .. }
        | FabricError::HugePages { .. } => Raised::new("AllocationError"),
        FabricError::DmaBuf { source, .. } => of_cuda(source),
        FabricError::NoNumaNode { .. } => Raised::new("ConfigurationError"),
        FabricError::NoRoute { peer, .. } => Raised::new("NoRouteError").at(peer.0),
        FabricError::Malformed { peer, .. } => Raised::new("MalformedError").at(peer.0),
        FabricError::Connect { peer, .. } => Raised::new("ConnectError").at(peer.0),
        FabricError::Provider { .. } | FabricError::NoDevices { .. } => {
            Raised::new("ProviderError")
        }
        FabricError::Timeout { missing, .. } => Raised::new("WaitTimeoutError").lacking(missing),
        FabricError::Poisoned(poison) => of_poison(poison),
        FabricError::NoCredit { peer, .. }
        | FabricError::OldRound { peer, .. }
        | FabricError::NothingToCredit { peer, .. } => Raised::new("CreditError").at(peer.0),
        FabricError::NotLinked { .. } => Raised::new("NotSharedError"),
        FabricError::AlreadyLinked { .. } => Raised::new("AlreadySharedError"),
        FabricError::OutOfRange { .. } => Raised::new("OutOfRangeError"),
        FabricError::Unknown { .. } => Raised::new("UnknownError"),
        FabricError::Limit { .. } => Raised::new("LimitError"),
        FabricError::PeerRefused { peer, .. } => {
            Raised::new("ConfigurationMismatchError").at(peer.0)
        }
        FabricError::Unusable { .. } => Raised::new("RegionError"),
        FabricError::UnderWay { .. } => Raised::new("StageError"),
        FabricError::ReformOfPair { .. } => Raised::new("ConfigurationError"),
        FabricError::Control(error) => of_control(error),
        FabricError::System { .. } | FabricError::Interrupted => Raised::new("SystemCallError"),
        _ => Raised::new("UnknownError"),
    }
}

fn of_poison(poison: &Poison) -> Raised {
    let raised = Raised::new(match poison.kind {
        Cause::Lost | Cause::Silent => "PeerLostError",
        Cause::Left => "PeerLeftError",
        Cause::Failed => "WriteFailedError",
        Cause::Protocol => "ProtocolError",
        Cause::User => "GroupPoisonedError",
    });
    poison
        .rank
        .map_or_else(|| Raised::new(raised.class), |rank| Raised::new(raised.class).at(rank.0))
}

fn of_control(error: &ControlError) -> Raised {
    match error {
        ControlError::Variable { .. } | ControlError::HalfSet { .. } => {
            Raised::new("ConfigurationError")
        }
        ControlError::NoAddress { .. } | ControlError::Resolve { .. } => {
            Raised::new("AddressError")
        }
        ControlError::LoopbackAddress { rank, .. } => Raised::new("AddressError").at(rank.0),
        ControlError::SecretMissing { .. }
        | ControlError::SecretFile { .. }
        | ControlError::PairSecretMissing { .. }
        | ControlError::WrongSecret { .. } => Raised::new("SecretError"),
        ControlError::PortInUse { .. } | ControlError::Listen { .. } => Raised::new("ListenError"),
        ControlError::PairListen { .. } => Raised::new("ListenError"),
        ControlError::Descriptors { .. } => Raised::new("LimitError"),
        ControlError::WrongVersion { .. } => Raised::new("WireVersionError"),
        ControlError::WrongWorldSize { .. } => Raised::new("WorldSizeError"),
        ControlError::DuplicateRank { .. } => Raised::new("RankTakenError"),
        ControlError::Bootstrap { .. } => Raised::new("BootstrapError"),
        ControlError::Timeout { .. } => Raised::new("WaitTimeoutError"),
        ControlError::Poisoned(poison) => of_poison(poison),
        ControlError::Left { rank, .. } => Raised::new("PeerLeftError").at(rank.0),
        ControlError::TooLarge { .. } => Raised::new("LimitError"),
        ControlError::Backlog { peer, .. } => Raised::new("LimitError").at(peer.0),
        ControlError::OtherCall { peer, .. } => {
            Raised::new("ConfigurationMismatchError").at(peer.0)
        }
        ControlError::RepeatDiffers { .. } => Raised::new("StageError"),
        ControlError::WrongCount { .. } => Raised::new("ConfigurationError"),
        ControlError::NoSuchRank { .. } => Raised::new("UnknownError"),
        ControlError::Excluded { .. } => Raised::new("ExcludedError"),
        ControlError::Superseded => Raised::new("SupersededError"),
        ControlError::Forked => Raised::new("ForkError"),
        ControlError::Closed => Raised::new("ClosedError"),
        ControlError::Protocol { .. } => Raised::new("ProtocolError"),
        _ => Raised::new("SystemCallError"),
    }
}

/// The names of all classes that can be raised.
#[pyfunction]
pub fn error_classes() -> Vec<&'static str> {
    CLASSES.to_vec()
}
