//! Registered memory: user memory that all ranks in a communicator map.

use super::options::memory_location;
use crate::communicator::Communicator;
use crate::errors::Error;
use crate::fork::{self, ProcessOwned};
use crate::shared::{Shared, deadline};
use pyo3::prelude::*;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use weft_control::Operation;
use weft_fabric::clock;
use weft_gpu::domain::Registration;
use weft_gpu::{Error as GpuError, Heap, MemoryKind, MemoryLocation, UserMemory};
use weft_moe::Error as MoeError;

/// User memory, mapped by all ranks until it is closed.
#[pyclass(frozen, module = "weft._native")]
pub struct RegisteredMemory {
    shared: Shared,
    /// For direct collectives; `None` once withdrawn. Dropped before the mappings.
    registration: Mutex<ProcessOwned<Option<Registration>>>,
    /// `None` once the mappings have ended.
    heap: Mutex<ProcessOwned<Option<Heap>>>,
    addresses: Vec<u64>,
    is_twin: bool,
}

impl RegisteredMemory {
    fn take(&self) -> Option<Heap> {
        self.end_registration();
        self.heap.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn end_registration(&self) {
        drop(self.registration.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn of_gpu(error: GpuError) -> Error {
    MoeError::from(error).into()
}

#[pymethods]
impl RegisteredMemory {
    /// Registers on all ranks in a communicator. `file`: on the CPU, an open descriptor, which stays the caller's,
    /// and where the memory begins in it.
    #[new]
    #[pyo3(signature = (communicator, *, device, address, bytes, file, timeout))]
    fn make(
        py: Python<'_>,
        communicator: &Communicator,
        device: &str,
        address: u64,
        bytes: u64,
        file: Option<(i32, u64)>,
        timeout: f64,
    ) -> PyResult<RegisteredMemory> {
        let place = memory_location(py, device, MemoryKind::Ipc)?;
        let copy = |(number, offset): (i32, u64)| {
            // SAFETY: the caller keeps it open during this call.
            let file = unsafe { BorrowedFd::borrow_raw(number) };
            Ok::<_, std::io::Error>((file.try_clone_to_owned()?, offset))
        };
        let lent = UserMemory { address, bytes, file: file.map(copy).transpose()? };
        let shared = communicator.shared.clone();
        let deadline = deadline(timeout);
        let heap = shared
            .with(py, |fabric| Heap::register(fabric, place, lent, deadline).map_err(of_gpu))?;
        let (addresses, is_twin) =
            (heap.addresses().to_vec(), matches!(place, MemoryLocation::Twin));
        let registration = py.detach(|| shared.domains.registrations().add(&heap));
        Ok(RegisteredMemory {
            shared,
            registration: Mutex::new(ProcessOwned::new(Some(registration))),
            heap: Mutex::new(ProcessOwned::new(Some(heap))),
            addresses,
            is_twin,
        })
    }

    /// Address at which each rank's memory is mapped here.
    #[getter]
    fn addresses(&self) -> Vec<u64> {
        self.addresses.clone()
    }

    /// Hides it from later collectives; returns once calls that use it have been launched. No effect in a forked child.
    fn withdraw(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| self.end_registration());
        }
    }

    /// Waits for all ranks to make this call; then no peer has a GPU's memory mapped. A twin's mappings end with this
    /// object, for tensors that show them.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        let heap = if self.is_twin { None } else { self.take() };
        self.shared.wait(py, timeout, |fabric, waiter| match heap {
            Some(heap) => heap.close(fabric, waiter.deadline).map_err(of_gpu),
            None => {
                let left = waiter.deadline.since(clock::now());
                let met = fabric.control().all_gather_as(Operation::Close, &[], left);
                Ok(met.map(drop)?)
            }
        })
    }

    /// Ends this rank's GPU memory mappings. No effect in a forked child.
    fn abandon(&self, py: Python<'_>) {
        if !fork::is_child() && !self.is_twin {
            py.detach(|| drop(self.take()));
        }
    }
}
