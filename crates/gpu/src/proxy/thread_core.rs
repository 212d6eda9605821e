//! Core for a proxy's thread: on the GPU's NUMA node, another one for each rank on the host.
//!
//! Each rank makes a [`CoreClaim`], all ranks on the host exchange these, and each computes the same assignment.

use crate::domain::Domain;
use crate::error::{Error, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::path::Path;
use weft_fabric::CoreSet;

/// Core for a proxy's thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyCore {
    /// Any core, as the system decides.
    #[default]
    Any,
    /// This core.
    Number(u32),
    /// The core that this host's claims leave for one of them, if any.
    Claimed {
        /// All ranks on this host, in one order.
        claims: Vec<CoreClaim>,
        /// This rank's position.
        place: usize,
    },
}

/// A rank's claim on a core for the proxy's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreClaim {
    /// Cores that will do. With one core or more the claim has one of them, if others leave it one.
    cores: CoreSet,
}

impl CoreClaim {
    /// No claim: the system runs the thread anywhere.
    pub fn none() -> CoreClaim {
        CoreClaim { cores: CoreSet::default() }
    }

    /// One core, for which a rank has decided.
    pub fn number(core: u32) -> CoreClaim {
        let core = Some(core as usize).filter(|core| *core < CpuSet::MAX_CPU);
        CoreClaim { cores: CoreSet::new(core) }
    }

    /// A core on the NUMA node of a domain's GPU, among the cores on which the calling thread may run. None on the CPU,
    /// if the node is not known, or if the thread has only one core.
    pub fn near(domain: &Domain) -> CoreClaim {
        let gpu = domain.context().map(|context| context.device().bus_id());
        let node = gpu.and_then(|gpu| node_cores(Path::new("/sys"), gpu));
        CoreClaim::on(&CoreSet::of_thread(), &node.unwrap_or_default())
    }

    /// A core of `node`, among the cores on which a rank may run.
    pub fn on(allowed: &CoreSet, node: &CoreSet) -> CoreClaim {
        let has_choice = allowed.cores().nth(1).is_some();
        CoreClaim {
            cores: if has_choice { allowed.intersection(node) } else { CoreSet::default() },
        }
    }

    /// Encoded bytes.
    pub fn encode(&self) -> &[u8] {
        self.cores.encode()
    }

    /// Decodes a rank's bytes.
    pub fn decode(bytes: &[u8]) -> CoreClaim {
        CoreClaim { cores: CoreSet::decode(bytes) }
    }
}

impl ProxyCore {
    /// Core to which the thread is pinned. `shares_cores`: this host has fewer cores than ranks, which the system shares
    /// out better.
    ///
    /// # Errors
    /// [`Error::ProxyCore`] for a number that this process may not use.
    pub(super) fn resolve(&self, shares_cores: bool) -> Result<Option<u32>> {
        match self {
            ProxyCore::Any => Ok(None),
            ProxyCore::Number(core) => check(*core).map(|()| Some(*core)),
            ProxyCore::Claimed { claims, place } => {
                let sets: Vec<&CoreSet> = claims.iter().map(|claim| &claim.cores).collect();
                let core = CoreSet::assign(&sets).get(*place).copied().flatten();
                let core = core.map(|core| core as u32).filter(|_| !shares_cores);
                // The thread that made the claim may have had other cores than this one.
                Ok(core.filter(|core| check(*core).is_ok()))
            }
        }
    }
}

/// Cores on the NUMA node of the PCI device at this address; `None` where the kernel names no node.
fn node_cores(sysfs: &Path, address: &str) -> Option<CoreSet> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let device = sysfs.join("bus/pci/devices").join(address.to_ascii_lowercase());
    // -1: not known.
    let node: u32 = read(&device.join("numa_node"))?.trim().parse().ok()?;
    CoreSet::parse(&read(&sysfs.join(format!("devices/system/node/node{node}/cpulist")))?)
}

/// Checks that this process may run on a core.
fn check(core: u32) -> Result<()> {
    let allowed = sched_getaffinity(None).unwrap_or_default();
    let is_allowed = (core as usize) < CpuSet::MAX_CPU && allowed.is_set(core as usize);
    if is_allowed { Ok(()) } else { Err(Error::ProxyCore { core }) }
}

/// Moves this thread to a core.
pub(super) fn pin(core: u32) {
    let mut set = CpuSet::new();
    set.set(core as usize);
    if let Err(error) = sched_setaffinity(None, &set) {
        log::warn!("the proxy's thread is not on core {core}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cores: std::ops::Range<usize>) -> CoreSet {
        CoreSet::new(cores)
    }

    /// Cores that this process may use.
    fn own() -> Vec<usize> {
        CoreSet::of_thread().cores().collect()
    }

    fn resolved(claims: &[CoreClaim], place: usize, shares_cores: bool) -> Option<u32> {
        let claims = claims.to_vec();
        ProxyCore::Claimed { claims, place }.resolve(shares_cores).unwrap()
    }

    #[test]
    fn a_claim_stays_inside_the_affinity_mask_and_the_node() {
        let near = |allowed, node| CoreClaim::on(&allowed, &node).cores.cores().collect::<Vec<_>>();
        assert_eq!(near(set(0..8), set(4..16)), [4, 5, 6, 7]);
        assert_eq!(near(set(0..4), set(4..16)), [0; 0], "a rank that is bound to the other node");
        assert_eq!(
            near(set(4..5), set(4..16)),
            [0; 0],
            "one core, which the rank's own thread has"
        );
        assert_eq!(near(set(0..8), CoreSet::default()), [0; 0], "an unknown node");
        assert_eq!(near(CoreSet::default(), set(0..8)), [0; 0], "an unknown mask");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no affinity masks")]
    fn each_claim_has_another_core_and_fixed_numbers_are_left_out() {
        let [.., last] = own()[..] else { panic!("this test runs on a core") };
        let all = CoreClaim { cores: CoreSet::of_thread() };
        assert_eq!(resolved(std::slice::from_ref(&all), 0, false), Some(last as u32));
        let fixed = CoreClaim::number(last as u32);
        let claims = [all, fixed, CoreClaim::none()];
        assert_ne!(resolved(&claims, 0, false), Some(last as u32));
        assert_eq!(resolved(&claims, 2, false), None);
        assert_eq!(resolved(&claims, 3, false), None, "a place beyond the claims");
        assert_eq!(resolved(&claims, 0, true), None, "ranks that share cores");
        let decoded = CoreClaim::decode(claims[0].encode());
        assert_eq!(decoded, claims[0]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no affinity masks")]
    fn a_core_that_the_process_may_not_use_is_refused_or_left() {
        let beyond = 8000;
        assert!(!own().contains(&beyond));
        let refused = ProxyCore::Number(beyond as u32).resolve(false).unwrap_err();
        assert!(refused.to_string().starts_with("core 8000 for the proxy's thread"), "{refused}");
        let claim = CoreClaim { cores: CoreSet::new([beyond]) };
        assert_eq!(resolved(&[claim], 0, false), None);
        assert_eq!(ProxyCore::Any.resolve(false).unwrap(), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri reads no files")]
    fn the_node_of_a_gpu_is_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("bus/pci/devices/0000:1b:00.0/numa_node", "1\n");
        write("bus/pci/devices/0000:2b:00.0/numa_node", "-1\n");
        write("devices/system/node/node1/cpulist", "48-50,144\n");
        let cores = node_cores(root.path(), "0000:1B:00.0").unwrap();
        assert_eq!(cores.cores().collect::<Vec<_>>(), [48, 49, 50, 144]);
        assert_eq!(node_cores(root.path(), "0000:2b:00.0"), None, "no node");
        assert_eq!(node_cores(root.path(), "0000:3b:00.0"), None, "no such device");
    }
}
