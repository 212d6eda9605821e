//! Region: memory of this engine and its registrations with each NIC.

use super::super::granted_regions::RemoteMemory;
use super::objects::{Domain, MemoryRegistration};
use super::sys;
use crate::memory::{Memory, MemoryKind};
use crate::random::SplitMix64;
use std::ffi::c_void;
use std::sync::Arc;

pub struct RegisteredRegion {
    // Drop order: registrations before the memory.
    /// Source registrations by NIC; empty where sources are not registered.
    sources: Vec<MemoryRegistration>,
    /// Destination registrations by NIC, made with the first grant.
    destinations: Vec<MemoryRegistration>,
    /// Address of `memory`.
    address: u64,
    length: u64,
    memory: Arc<Memory>,
}

/// Generator of random keys: unpredictable to other processes, and to holders of earlier keys.
pub struct KeyGenerator {
    random: SplitMix64,
}

impl KeyGenerator {
    pub fn new() -> Result<KeyGenerator, String> {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(|e| format!("no random bytes from the system: {e}"))?;
        Ok(KeyGenerator { random: SplitMix64::new(u64::from_le_bytes(seed)) })
    }

    /// Next key that fits the domain.
    pub fn next(&mut self, domain: &Domain) -> u64 {
        let bits = 8 * domain.info().key_size().clamp(1, 8) as u32;
        // Even: the odd key above it is reserved with it.
        self.random.bits() >> (64 - bits) & !1
    }
}

/// Attempts of a registration: a random key may be in use.
const TRIES: u32 = 3;

impl RegisteredRegion {
    /// Region whose memory can be a source.
    pub fn new(
        memory: &Arc<Memory>,
        domains: &[Arc<Domain>],
        keys: &mut KeyGenerator,
    ) -> Result<RegisteredRegion, String> {
        let register = |domain: &Arc<Domain>| register(memory, domain, sys::FI_WRITE, keys);
        let registered = domains.iter().filter(|domain| domain.info().registers_sources());
        let sources = registered.map(register).collect::<Result<_, _>>()?;
        let (address, length) = (memory.address(), memory.len() as u64);
        Ok(RegisteredRegion {
            sources,
            destinations: Vec::new(),
            address,
            length,
            memory: memory.clone(),
        })
    }

    /// Registers it as a destination, with a key for each NIC.
    pub fn targets(
        &mut self,
        domains: &[Arc<Domain>],
        keys: &mut KeyGenerator,
    ) -> Result<Vec<RemoteMemory>, String> {
        if self.destinations.is_empty() {
            let register =
                |domain: &Arc<Domain>| register(&self.memory, domain, sys::FI_REMOTE_WRITE, keys);
            self.destinations = domains.iter().map(register).collect::<Result<_, _>>()?;
        }
        let base = |domain: &Domain| {
            if domain.info().uses_addresses() { self.memory.address() } else { 0 }
        };
        let targets = domains.iter().zip(&self.destinations);
        Ok(targets.map(|(domain, mr)| RemoteMemory { base: base(domain), key: mr.key() }).collect())
    }

    /// Address and descriptor of a slice for one NIC; `None` outside of the region.
    #[inline(always)]
    pub fn source(&self, rail: usize, offset: u64, length: u64) -> Option<(u64, *mut c_void)> {
        let end = offset.checked_add(length)?;
        let descriptor =
            self.sources.get(rail).map_or(std::ptr::null_mut(), MemoryRegistration::descriptor);
        (end <= self.length).then(|| (self.address + offset, descriptor))
    }
}

impl RegisteredRegion {
    /// True if the provider can copy its bytes inside of a call.
    #[inline(always)]
    pub fn is_host_memory(&self) -> bool {
        self.memory.kind() == MemoryKind::Host
    }
}

/// True if NICs can register memory of this kind.
pub fn can_register(place: MemoryKind, domains: &[Arc<Domain>]) -> bool {
    match place {
        MemoryKind::Host => true,
        MemoryKind::Device(_) => domains.iter().all(|domain| domain.info().reaches_devices()),
    }
}

fn register(
    memory: &Arc<Memory>,
    domain: &Arc<Domain>,
    access: u64,
    keys: &mut KeyGenerator,
) -> Result<MemoryRegistration, String> {
    let device = match memory.kind() {
        MemoryKind::Host => None,
        MemoryKind::Device(ordinal) => Some(ordinal),
    };
    // Some providers reject an empty registration.
    let length = memory.len().max(1);
    let mut tries = 0;
    loop {
        let key = keys.next(domain);
        // SAFETY: the region keeps the memory until its registrations are dropped.
        match unsafe { domain.register(memory.address(), length, device, access, key) } {
            Err(_) if tries < TRIES => tries += 1,
            registered => return registered,
        }
    }
}
