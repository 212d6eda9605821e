//! Regions for Python.

use crate::errors::Error;
use crate::memory::View;
use crate::shared::Shared;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_fabric::{Region as FabricRegion, WeakRegion};

/// This rank's region: memory that peers may be granted, or that can be sent from. The engine and each view keep
/// it alive.
#[pyclass(frozen, module = "weft._native")]
pub struct Region {
    region: WeakRegion,
    key: u32,
    length: usize,
    writable: bool,
    released: AtomicBool,
    shared: Shared,
}

impl Region {
    pub fn new(region: &FabricRegion, writable: bool, shared: &Shared) -> Region {
        Region {
            region: region.downgrade(),
            key: region.key().0,
            length: region.memory().len(),
            writable,
            released: AtomicBool::new(false),
            shared: shared.clone(),
        }
    }

    /// The region, unless it was released.
    pub fn get(&self) -> Result<FabricRegion, Error> {
        let unknown = weft_fabric::Error::Unknown { what: "region", number: self.key.into() };
        let released = self.released.load(Ordering::Relaxed);
        let known = if released { None } else { self.region.upgrade() };
        Ok(known.ok_or(unknown)?)
    }
}

#[pymethods]
impl Region {
    /// Region number in this communicator.
    fn key(&self) -> PyResult<u32> {
        Ok(self.get()?.key().0)
    }

    /// True if the memory may be written to.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// True once it was released.
    #[getter]
    fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }

    fn __len__(&self) -> usize {
        self.length
    }

    /// First byte's address, on the CPU or on the device.
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        let region = self.shared.with(py, |_| self.get())?;
        Ok(region.memory().address())
    }

    /// Region bytes, as a buffer; as CUDA's array interface if it is device memory.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        let region = self.shared.with(py, |_| self.get())?;
        Ok(View::new(region.memory().clone(), 0..self.length, self.writable))
    }

    /// Releases the region; requests in flight keep it until they complete.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.with(py, |fabric| {
            if let Ok(region) = self.get() {
                fabric.engine().release(&region);
            }
            self.released.store(true, Ordering::Relaxed);
            Ok(())
        })
    }
}
