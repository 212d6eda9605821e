//! A communicator's domains, one for each GPU and memory kind.

use crate::fork::ProcessOwned;
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::{Communicator as Fabric, Time};
use weft_gpu::MemoryLocation;
use weft_gpu::domain::{Domain, Registrations};

/// A communicator's domains, and the user memory that it has registered.
#[derive(Clone, Default)]
pub struct Domains {
    made: Arc<Mutex<Vec<ProcessOwned<Arc<Domain>>>>>,
    registrations: Registrations,
}

impl Domains {
    /// A place's domain, made if there is none; every rank calls this.
    pub(super) fn of(
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

    /// Makes something on a place's domain, as `make` does with it; every rank calls this. If that fails, which
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
