//! Region: memory of this engine and its registrations with each NIC.

use super::object::{Domain, Mr};
use super::sys;
use super::wire::Target;
use crate::memory::{Memory, Place};
use crate::random::SplitMix64;
use std::ffi::c_void;
use std::sync::Arc;

pub struct Region {
    // Registrations go before the memory.
    /// As a source, for each NIC; empty where sources are not registered.
    sources: Vec<Mr>,
    /// As a destination, for each NIC; made with the first grant.
    destinations: Vec<Mr>,
    /// Address and length of `memory`.
    address: u64,
    length: u64,
    memory: Arc<Memory>,
}

/// Keys that strangers and earlier owners of an address cannot guess.
pub struct Keys {
    random: SplitMix64,
}

impl Keys {
    pub fn new() -> Result<Keys, String> {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(|e| format!("the system gives no random bytes: {e}"))?;
        Ok(Keys { random: SplitMix64::new(u64::from_le_bytes(seed)) })
    }

    /// The next key that fits the domain.
    pub fn next(&mut self, domain: &Domain) -> u64 {
        let bits = 8 * domain.info().key_size().clamp(1, 8) as u32;
        // Even: the one above it is taken with it.
        self.random.bits() >> (64 - bits) & !1
    }
}

/// Tries before a registration fails: a random key may be in use.
const TRIES: u32 = 3;

impl Region {
    /// Memory that can be written from.
    pub fn new(
        memory: &Arc<Memory>,
        domains: &[Arc<Domain>],
        keys: &mut Keys,
    ) -> Result<Region, String> {
        let register = |domain: &Arc<Domain>| register(memory, domain, sys::FI_WRITE, keys);
        let registered = domains.iter().filter(|domain| domain.info().registers_sources());
        let sources = registered.map(register).collect::<Result<_, _>>()?;
        let (address, length) = (memory.address(), memory.len() as u64);
        Ok(Region { sources, destinations: Vec::new(), address, length, memory: memory.clone() })
    }

    /// Lets peers write to it, each NIC under a key of its own.
    pub fn targets(
        &mut self,
        domains: &[Arc<Domain>],
        keys: &mut Keys,
    ) -> Result<Vec<Target>, String> {
        if self.destinations.is_empty() {
            let register =
                |domain: &Arc<Domain>| register(&self.memory, domain, sys::FI_REMOTE_WRITE, keys);
            self.destinations = domains.iter().map(register).collect::<Result<_, _>>()?;
        }
        let base = |domain: &Domain| {
            if domain.info().uses_addresses() { self.memory.address() } else { 0 }
        };
        let targets = domains.iter().zip(&self.destinations);
        Ok(targets.map(|(domain, mr)| Target { base: base(domain), key: mr.key() }).collect())
    }

    /// The first byte and the descriptor of a slice for one NIC; `None` if it is not inside.
    #[inline(always)]
    pub fn source(&self, rail: usize, offset: u64, length: u64) -> Option<(u64, *mut c_void)> {
        let end = offset.checked_add(length)?;
        let descriptor = self.sources.get(rail).map_or(std::ptr::null_mut(), Mr::descriptor);
        (end <= self.length).then(|| (self.address + offset, descriptor))
    }
}

impl Region {
    /// Whether the provider can copy its bytes inside of a call.
    #[inline(always)]
    pub fn is_of_host(&self) -> bool {
        self.memory.place() == Place::Host
    }
}

/// Whether NICs can reach memory that lies there.
pub fn is_reached(place: Place, domains: &[Arc<Domain>]) -> bool {
    match place {
        Place::Host => true,
        Place::Device(_) => domains.iter().all(|domain| domain.info().reaches_devices()),
    }
}

fn register(
    memory: &Arc<Memory>,
    domain: &Arc<Domain>,
    access: u64,
    keys: &mut Keys,
) -> Result<Mr, String> {
    let device = match memory.place() {
        Place::Host => None,
        Place::Device(ordinal) => Some(ordinal),
    };
    // A registration of no bytes is refused by some.
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
