//! Symmetric heap blocks in a communicator's domains.

use super::options::{memory_kind, memory_location};
use crate::communicator::Communicator;
use crate::errors::Error;
use crate::fork::ProcessOwned;
use crate::region::Region;
use crate::shared::{deadline, duration};
use pyo3::prelude::*;
use std::sync::Arc;
use weft_gpu::domain::{ALIGNMENT, Block, Domain};
use weft_gpu::table::Table;
use weft_gpu::{Error as GpuError, user_kernels};

/// Symmetric heap memory; freed when this is gone.
#[pyclass(frozen, module = "weft._native")]
pub struct SymmetricMemory {
    block: ProcessOwned<Block>,
    /// The table lives as long.
    domain: ProcessOwned<Arc<Domain>>,
}

impl SymmetricMemory {
    /// The block's domain.
    pub(super) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// A local group's memory, for example of two twins, by rank.
    pub fn local(domains: Vec<Arc<Domain>>, bytes: u64) -> weft_gpu::Result<Vec<SymmetricMemory>> {
        let blocks = Domain::allocate_local(&domains, bytes, ALIGNMENT)?;
        let memory = |(block, domain)| SymmetricMemory {
            block: ProcessOwned::new(block),
            domain: ProcessOwned::new(domain),
        };
        Ok(blocks.into_iter().zip(domains).map(memory).collect())
    }
}

#[pymethods]
impl SymmetricMemory {
    /// Allocates on all ranks in a communicator.
    #[new]
    #[pyo3(signature = (communicator, *, device, memory, bytes, timeout))]
    fn make(
        py: Python<'_>,
        communicator: &Communicator,
        device: &str,
        memory: &str,
        bytes: u64,
        timeout: f64,
    ) -> PyResult<SymmetricMemory> {
        let place = memory_location(py, device, memory_kind(py, memory)?)?;
        let deadline = deadline(timeout);
        let shared = &communicator.shared;
        let domains = shared.domains.clone();
        let (block, domain) = shared.with(py, |fabric| {
            let made: Result<_, GpuError> = domains.with(fabric, place, deadline, |domain| {
                let domain = domain()?;
                Ok((domain.allocate(fabric, bytes, ALIGNMENT, deadline)?, domain))
            });
            made.map_err(|error| weft_moe::Error::from(error).into())
        })?;
        Ok(SymmetricMemory { block: ProcessOwned::new(block), domain: ProcessOwned::new(domain) })
    }

    /// Address at which each rank's part is mapped here.
    #[getter]
    fn addresses(&self) -> Vec<u64> {
        self.block.addresses()
    }

    /// Bytes, rounded up.
    #[getter]
    fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Segment and offset, the same on every rank.
    #[getter]
    fn place(&self) -> (u32, u64) {
        (self.block.segment(), self.block.offset())
    }

    /// Region of the block's segment on a communicator, whose memory is the same for all blocks in the segment.
    fn region(&self, py: Python<'_>, communicator: &Communicator) -> PyResult<Region> {
        let shared = &communicator.shared;
        let region = shared.with(py, |fabric| {
            let memory = self.block.memory().map_err(weft_moe::Error::from)?;
            Ok(fabric.engine().register(memory)?)
        })?;
        Ok(Region::new(&region, true, shared))
    }

    /// The domain table's address.
    #[getter]
    fn table(&self) -> u64 {
        self.domain.table()
    }

    /// Prepares the domain for waits in the user's kernels, which last at most `limit` seconds.
    fn prepare_waits(&self, py: Python<'_>, limit: f64) -> PyResult<()> {
        let prepare = || {
            self.domain.register(&user_kernels::FAMILY)?;
            self.domain.raise_wait_limit(duration(limit))
        };
        py.detach(prepare).map_err(|error: GpuError| Error::from(weft_moe::Error::from(error)))?;
        Ok(())
    }

    /// Raises the error that the device recorded.
    fn check(&self) -> PyResult<()> {
        self.domain.check().map_err(|error| Error::from(weft_moe::Error::from(error)))?;
        Ok(())
    }

    /// Bytes in the domain's blocks, and heap bytes.
    fn usage(&self, py: Python<'_>) -> (u64, u64) {
        py.detach(|| self.domain.usage())
    }
}

/// Keeps a fused operator's arguments as text, for the error if ranks differ in them.
#[pyfunction]
pub fn describe_arguments(digest: u32, text: &str) {
    user_kernels::describe_arguments(digest, text);
}

/// Fields of a domain's table: name, offset, element bytes, elements.
#[pyfunction]
pub fn table_fields() -> Vec<(&'static str, u64, u64, u64)> {
    let fields = Table::FIELDS.iter();
    fields.map(|field| (field.name, field.offset, field.width, field.count())).collect()
}
