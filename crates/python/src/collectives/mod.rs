//! A communicator's collectives and messages as a C function table, for libraries that bind to
//! interfaces other than Python's, such as the torch.distributed backend (`python/weft/torch/shim`).
//!
//! - `table`: the functions; `operations`: operations by number, waits, composition from messages
//! - `status`: error codes and texts; `timer`: collective times for `weft tune`

mod operations;
mod status;
mod table;
mod timer;

use crate::communicator::Communicator;
use crate::shared::deadline;
use operations::Operations;
use pyo3::prelude::*;
use weft_collectives::{CollectivesConfig, NetworkSource, SelectionSources};

pub use timer::CollectiveTimer;

/// Network name and description.
type NamedNetwork = (String, String);

/// Connects collectives over a communicator. Every rank calls this.
///
/// `sums`: whether they are added in rank order; threads that reduce a long vector, 0 for as many as there are cores for
/// each rank on this host. `tuning`: name and text in a measurement file, and
/// this machine's name. `network`: network name and description. Rank 0's decide. `host`: this rank's
/// host name in the network, by default the host identity.
///
/// Returns the table address, the context address for its functions, and rank 0's network. The table belongs to
/// the context, which the function `release` frees.
#[pyfunction]
#[pyo3(signature = (communicator, timeout, sums=(false, 1), tuning=None, network=None, host=None))]
pub fn collectives_table(
    py: Python<'_>,
    communicator: &Communicator,
    timeout: f64,
    sums: (bool, u32),
    tuning: Option<timer::Source>,
    network: Option<NamedNetwork>,
    host: Option<String>,
) -> PyResult<(usize, usize, Option<NamedNetwork>)> {
    let shared = &communicator.shared;
    let (reproducible, reduction_threads) = sums;
    let config = CollectivesConfig { reproducible, reduction_threads, ..Default::default() };
    let operations = shared.with(py, |fabric| {
        let sources = SelectionSources {
            tuning: timer::source(&tuning),
            network: network.as_ref().map(|(name, text)| NetworkSource { name, text }),
            host: host.as_deref(),
        };
        Ok(Operations::connect(fabric, shared.clone(), config, sources, deadline(timeout))?)
    })?;
    let network = operations.network();
    let (table, context) = table::lend(operations);
    Ok((table, context, network))
}
