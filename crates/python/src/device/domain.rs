//! Domains of a communicator, one for each GPU and kind of memory, and blocks of their symmetric heaps.

use crate::communicator::Communicator;
use crate::device::options::{memory_kind, memory_location};
use crate::errors::Error;
use crate::fork::ProcessOwned;
use crate::shared::{deadline, duration};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::{Communicator as Fabric, Time};
use weft_gpu::domain::{ALIGNMENT, Block, Domain, Registrations};
use weft_gpu::table::Table;
use weft_gpu::{Error as GpuError, MemoryLocation, user_kernels};

/// The domains of a communicator, and the memory of the user that it has registered.
#[derive(Clone, Default)]
pub struct Domains {
    made: Arc<Mutex<Vec<ProcessOwned<Arc<Domain>>>>>,
    registrations: Registrations,
}

impl Domains {
    /// The domain of a place, made if there is none; every rank calls this.
    fn of(
        &self,
        fabric: &Fabric,
        place: MemoryLocation,
        deadline: Time,
    ) -> weft_gpu::Result<Arc<Domain>> {
        let mut domains = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        domains.retain(|domain| !domain.has_ended());
        if let Some(known) = domains.iter().find(|domain| same(&domain.location(), &place)) {
            return Ok(Arc::clone(known));
        }
        let made = Domain::create(fabric, place, self.registrations.clone(), deadline)?;
        domains.push(ProcessOwned::new(made.clone()));
        Ok(made)
    }

    /// Makes something on the domain of a place, as `make` does with it; every rank calls this. If that fails, which
    /// it then does on all ranks, a domain without other operators is dropped too.
    pub fn with<T, E: From<weft_gpu::Error>>(
        &self,
        fabric: &Fabric,
        place: MemoryLocation,
        deadline: Time,
        make: impl FnOnce(&dyn Fn() -> weft_gpu::Result<Arc<Domain>>) -> Result<T, E>,
    ) -> Result<T, E> {
        let made = make(&|| self.of(fabric, place, deadline));
        if made.is_err() {
            let mut domains = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            domains.retain(|domain| !(same(&domain.location(), &place) && domain.is_idle()));
        }
        made
    }

    /// Registered memory.
    pub fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    /// Drops all domains: each ends with the last operator on it.
    pub fn clear(&self) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn same(one: &MemoryLocation, other: &MemoryLocation) -> bool {
    match (one, other) {
        (MemoryLocation::Twin, MemoryLocation::Twin) => true,
        (
            MemoryLocation::Cuda { device, memory },
            MemoryLocation::Cuda { device: other_device, memory: other_memory },
        ) => device == other_device && memory == other_memory,
        _ => false,
    }
}

/// Memory of the symmetric heap; freed when this is gone.
#[pyclass(frozen, module = "weft._native")]
pub struct SymmetricMemory {
    block: ProcessOwned<Block>,
    /// The table lives as long.
    domain: ProcessOwned<Arc<Domain>>,
}

impl SymmetricMemory {
    /// Memory of a local group's ranks, by rank.
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
    /// Allocates on all ranks of a communicator.
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

    /// The address of the domain's table.
    #[getter]
    fn table(&self) -> u64 {
        self.domain.table()
    }

    /// Prepares the domain for waits of the user's kernels, which last at most `limit` seconds.
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

    /// Bytes in blocks of the domain, and bytes of its heap.
    fn usage(&self, py: Python<'_>) -> (u64, u64) {
        py.detach(|| self.domain.usage())
    }
}

/// Fields of a domain's table: name, offset, bytes of an element, elements.
#[pyfunction]
pub fn table_fields() -> Vec<(&'static str, u64, u64, u64)> {
    let fields = Table::FIELDS.iter();
    fields.map(|field| (field.name, field.offset, field.width, field.count())).collect()
}
