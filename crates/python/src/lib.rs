//! Native module in the Python package `weft`: only bindings. `python/weft/_native.pyi` declares them; behaviour
//! belongs in the crates below this one, convenience in `python/weft`.

mod all_to_all;
mod awaits;
mod build;
mod callbacks;
mod choices;
mod collectives;
mod communicator;
mod cuda;
mod device;
mod errors;
mod float8;
mod fork;
mod init;
mod interruptible;
mod job;
mod logging;
mod memory;
mod nics;
mod numbers;
mod ofi;
mod pair;
mod peer_group;
mod qdl;
mod qdl_lane;
mod region;
mod request;
mod shared;
mod sharing;
mod sim;
mod slices;
mod tensors;
mod topology;
mod traces;
mod verbs;
mod word;

/// The module `weft._native`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::all_to_all::{AllToAll, Received};
    #[pymodule_export]
    use crate::awaits::{Await, Awaits};
    #[pymodule_export]
    use crate::build::{BuildInfo, build_info};
    #[pymodule_export]
    use crate::collectives::{CollectiveTimer, collectives_table};
    #[pymodule_export]
    use crate::communicator::Communicator;
    #[pymodule_export]
    use crate::cuda::{cuda_device_of, cuda_report};
    #[pymodule_export]
    use crate::device::{
        DeviceAllToAll, DeviceCalls, DeviceCollectives, DeviceProxy, RegisteredMemory,
        SymmetricMemory, add_nvrtc_directory, compile_collectives, describe_arguments,
        device_collectives_source, device_defines, device_options, device_source, table_fields,
    };
    #[pymodule_export]
    use crate::errors::error_classes;
    #[pymodule_export]
    use crate::float8::{dequantise, quantise};
    #[pymodule_export]
    use crate::init::{check_providers, environment_key, host_id, init, providers};
    #[pymodule_export]
    use crate::logging::end_logging;
    #[pymodule_export]
    use crate::memory::{View, dlpack_tensor};
    #[pymodule_export]
    use crate::nics::nic_report;
    #[pymodule_export]
    use crate::ofi::ofi_report;
    #[pymodule_export]
    use crate::pair::{Dial, Listener, Step, connect, dial, listen};
    #[pymodule_export]
    use crate::peer_group::PeerGroup;
    #[pymodule_export]
    use crate::qdl::{QdlCounts, QdlNode, qdl_ask, qdl_test};
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::request::Request;
    #[pymodule_export]
    use crate::sim::{schedule, simulate};
    #[pymodule_export]
    use crate::topology::{
        hdrm_hosts, hdrm_positions, topology_bigraph, topology_host, topology_network,
        topology_path,
    };
    #[pymodule_export]
    use crate::verbs::verbs_report;
    #[pymodule_export]
    use crate::word::{Word, WordWatch, end_words};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn prepare(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::errors::adopt_panics(module)
    }
}
