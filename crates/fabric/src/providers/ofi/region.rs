//! Region: this engine's memory, registered with each NIC.

use super::super::gpu_memory::{GpuTarget, Gpus};
use super::super::granted_regions::RemoteMemory;
use super::objects::{Domain, MemoryRegistration};
use super::sys;
use crate::error::{Error, Result};
use crate::memory::{Memory, MemoryKind};
use crate::random::SplitMix64;
use crate::registration::{Registration, RegistrationCache};
use std::ffi::c_void;
use std::sync::Arc;

/// Source registrations by NIC, one for each allocation and shared by groups: no peer has a key.
/// Destinations are registered for each group, whose keys end with the region.
pub type SourceCache = RegistrationCache<Vec<MemoryRegistration>>;

/// Source memory in a region, as registered with one NIC.
#[derive(Clone, Copy)]
pub struct Source {
    address: u64,
    length: u64,
    pub descriptor: *mut c_void,
    /// True if the provider can copy the bytes inside a call.
    pub is_host_memory: bool,
}

impl Source {
    /// Source without bytes.
    pub const EMPTY: Source =
        Source { address: 0, length: 0, descriptor: std::ptr::null_mut(), is_host_memory: true };

    /// Range for a slice; `None` outside the region.
    #[inline(always)]
    pub fn range(&self, offset: u64, length: u64) -> Option<libc::iovec> {
        let end = offset.checked_add(length)?;
        let iov_base = self.address.wrapping_add(offset) as *mut c_void;
        (end <= self.length).then_some(libc::iovec { iov_base, iov_len: length as usize })
    }
}

pub struct RegisteredRegion {
    // Drop order: registrations before the memory.
    /// Empty where sources are not registered.
    sources: Registration<Vec<MemoryRegistration>>,
    /// Destination registrations by NIC, made with the first grant.
    destinations: Vec<MemoryRegistration>,
    /// `memory` address.
    address: u64,
    length: u64,
    /// Ordinal with which libfabric registers CUDA memory.
    cuda: Option<u32>,
    memory: Arc<Memory>,
}

/// Random key generator: unpredictable to other processes, and to holders of earlier keys.
pub struct KeyGenerator {
    random: SplitMix64,
}

impl KeyGenerator {
    pub fn new() -> std::result::Result<KeyGenerator, String> {
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

/// Registration attempts: a random key may be in use.
const TRIES: u32 = 3;

impl RegisteredRegion {
    /// Region whose memory can be a source.
    pub fn new(
        memory: &Arc<Memory>,
        domains: &[Arc<Domain>],
        (cache, keys): (&SourceCache, &mut KeyGenerator),
        gpus: &dyn Gpus,
        refuse: impl FnOnce(String) -> Error,
    ) -> Result<RegisteredRegion> {
        let cuda = GpuTarget::of(memory).filter(|_| !gpus.are_simulated()).map(|gpu| gpu.device);
        let registered = domains.iter().filter(|domain| match cuda {
            Some(_) => domain.info().registers_device_sources(),
            None => domain.info().registers_sources(),
        });
        let sources = sources(memory, registered, cuda, (cache, keys), refuse)?;
        let (address, length) = (memory.address(), memory.len() as u64);
        Ok(RegisteredRegion {
            sources,
            destinations: Vec::new(),
            address,
            length,
            cuda,
            memory: memory.clone(),
        })
    }

    /// Registers it as a destination, with a key for each NIC. Writes into a GPU are visible with the flush
    /// in `gpu_memory.rs`.
    pub fn targets(
        &mut self,
        domains: &[Arc<Domain>],
        keys: &mut KeyGenerator,
    ) -> std::result::Result<Vec<RemoteMemory>, String> {
        if self.destinations.is_empty() {
            let access = sys::FI_REMOTE_WRITE;
            let register =
                |domain: &Arc<Domain>| register(&self.memory, domain, self.cuda, access, keys);
            self.destinations = domains.iter().map(register).collect::<Result<_, _>>()?;
        }
        let base = |domain: &Domain| {
            if domain.info().uses_addresses() { self.memory.address() } else { 0 }
        };
        let targets = domains.iter().zip(&self.destinations);
        Ok(targets.map(|(domain, mr)| RemoteMemory { base: base(domain), key: mr.key() }).collect())
    }

    /// The region as a source for one NIC.
    #[inline(always)]
    pub fn source(&self, rail: usize) -> Source {
        let descriptor =
            self.sources.get(rail).map_or(std::ptr::null_mut(), MemoryRegistration::descriptor);
        let (address, length, is_host_memory) = (self.address, self.length, self.is_host_memory());
        Source { address, length, descriptor, is_host_memory }
    }
}

impl RegisteredRegion {
    /// The region as a destination, for GPU memory.
    pub fn gpu(&self) -> Option<GpuTarget> {
        GpuTarget::of(&self.memory)
    }

    /// Present if peers may write into GPU memory by this region.
    pub fn granted_gpu(&self) -> Option<GpuTarget> {
        self.gpu().filter(|_| !self.destinations.is_empty())
    }

    /// See [`Source::is_host_memory`].
    #[inline(always)]
    fn is_host_memory(&self) -> bool {
        self.memory.kind() == MemoryKind::Host
    }
}

/// True if NICs can register this kind of memory.
pub fn can_register(place: MemoryKind, domains: &[Arc<Domain>], gpus: &dyn Gpus) -> bool {
    let reach_devices = || domains.iter().all(|domain| domain.info().reaches_devices());
    place == MemoryKind::Host || gpus.are_simulated() || reach_devices()
}

/// Source registrations, with these NICs where the cache has none.
fn sources<'a>(
    memory: &Arc<Memory>,
    domains: impl Iterator<Item = &'a Arc<Domain>>,
    cuda: Option<u32>,
    (cache, keys): (&SourceCache, &mut KeyGenerator),
    refuse: impl FnOnce(String) -> Error,
) -> Result<Registration<Vec<MemoryRegistration>>> {
    cache.get(memory, |memory| {
        let registered = domains.map(|domain| register(memory, domain, cuda, sys::FI_WRITE, keys));
        registered.collect::<std::result::Result<_, _>>().map_err(refuse)
    })
}

fn register(
    memory: &Memory,
    domain: &Arc<Domain>,
    cuda: Option<u32>,
    access: u64,
    keys: &mut KeyGenerator,
) -> std::result::Result<MemoryRegistration, String> {
    // Some providers reject an empty registration.
    let length = memory.len().max(1);
    let mut tries = 0;
    loop {
        let key = keys.next(domain);
        // SAFETY: the region keeps the memory until the registrations are dropped.
        match unsafe { domain.register(memory.address(), length, cuda, access, key) } {
            Err(_) if tries < TRIES => tries += 1,
            registered => return registered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OfiConfig, OfiProvider, info, library};
    use super::*;
    use crate::registration::IdleLimits;
    use std::collections::BTreeSet;

    /// Groups, such as a process's pairs.
    const GROUPS: u64 = 64;

    /// Without a descriptor, a provider takes a GPU's address for one in host memory.
    #[test]
    #[cfg_attr(miri, ignore = "miri loads no library")]
    fn an_offer_with_device_memory_registers_it_as_a_source() {
        if let Err(why) = library() {
            return println!("skipped: {why}");
        }
        let mut reached = 0;
        for name in ["shm", "tcp;ofi_rxm"] {
            let provider = OfiProvider::new(name);
            let offers = info::offers(&provider, OfiConfig::default().bind, sys::FI_HMEM).unwrap();
            for offer in offers.iter().filter(|offer| offer.reaches_devices()) {
                assert!(offer.registers_device_sources(), "{name}");
                reached += u32::from(!offer.registers_sources());
            }
        }
        assert!(reached > 0, "shm reaches devices, and needs no registration for host memory");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri loads no library")]
    fn groups_share_source_registrations_and_no_keys() {
        if let Err(why) = library() {
            return println!("skipped: {why}");
        }
        let config = OfiConfig::default();
        let offer = info::offers(&config.provider, config.bind, 0).unwrap().remove(0);
        let domains = [Arc::new(Domain::open(offer).unwrap())];
        let gpus = crate::providers::twin_gpus::TwinGpus::new(&Arc::default());
        let memory = Arc::new(Memory::shared(100).unwrap());
        let cache = SourceCache::new(IdleLimits::NONE);
        let refuse = |why: String| -> Error { panic!("{why}") };
        // The provider needs no source registrations, and makes them.
        let group = || {
            let keys = &mut KeyGenerator::new().unwrap();
            let shared = sources(&memory, domains.iter(), None, (&cache, keys), refuse).unwrap();
            let region = RegisteredRegion::new(&memory, &domains, (&cache, keys), &gpus, refuse);
            let mut region = region.unwrap();
            assert!(std::ptr::eq(&*shared, &*region.sources));
            let targets = region.targets(&domains, keys).unwrap();
            (shared, region, targets[0].key)
        };
        let groups: Vec<_> = (0..GROUPS).map(|_| group()).collect();
        assert!(groups.iter().all(|group| std::ptr::eq(&*group.0, &*groups[0].0)));
        let totals = cache.statistics();
        assert_eq!((groups[0].0.len(), totals.misses, totals.hits), (1, 1, 2 * GROUPS - 1));
        let destinations: BTreeSet<u64> = groups.iter().map(|group| group.2).collect();
        assert_eq!(destinations.len() as u64, GROUPS);
        drop(groups);
        assert_eq!(cache.statistics().live, 0);
    }
}
