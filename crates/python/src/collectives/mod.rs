//! Collectives and messages of a communicator as a table of C functions, for libraries that are bound to other
//! interfaces than Python's: the backend of torch.distributed (`python/weft/torch/shim`).
//!
//! - `table`: the functions; `operations`: their operations by number, waits, composition from messages
//! - `status`: codes and texts of errors; `timer`: times of collectives for `weft tune`

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

/// Name and description of a network.
type NamedNetwork = (String, String);

/// Connects collectives over a communicator. Every rank calls this.
///
/// `sums`: whether they are added in rank order; threads that reduce a long vector, 0 for as many as there are cores for
/// each rank of this host. `tuning`: name and text of a file of measurements, and the name of
/// this machine. `network`: name and description of the network. Those of rank 0 decide. `host`: name of this rank's
/// host in the network, by default its host identity.
///
/// Returns the addresses of the table and of the context for its functions, and rank 0's network. The table belongs to
/// the context, which its function `release` frees.
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
