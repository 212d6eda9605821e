//! NICs for a rank with a GPU.
//!
//! The choice is by [`Pairing`], over the NICs with a port that can be used: each GPU's first NIC, and additional
//! NICs under the same PCIe switches. Where the path to the first NIC crosses the CPU, for example in a virtual
//! machine that hides PCIe switches, the NICs that are left at the same distance are dealt out to the GPUs there, as
//! many to each.

use super::device::BusId;
use super::model::{Distance, Host};
use super::pairs::{Pair, Pairing, pairing};
use serde::Serialize;
use std::fmt;

/// An RDMA device port, such as `mlx5_0` and 1.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RdmaPort {
    /// Device name in sysfs and libibverbs.
    pub device: String,
    /// Port number, from 1.
    pub port: u32,
}

impl RdmaPort {
    /// Parses `mlx5_0:1`; port 1 without a number.
    pub fn parse(name: &str) -> RdmaPort {
        let numbered = name.rsplit_once(':').and_then(|(device, port)| {
            Some(RdmaPort { device: device.to_owned(), port: port.parse().ok()? })
        });
        numbered.unwrap_or_else(|| RdmaPort { device: name.to_owned(), port: 1 })
    }
}

impl fmt::Display for RdmaPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device, self.port)
    }
}

/// NICs for a rank with a GPU, nearest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NicChoice {
    /// GPU label, such as `GPU0`.
    pub gpu: String,
    /// Ports that can be used, by NIC.
    pub ports: Vec<RdmaPort>,
    /// Distance to the first NIC.
    pub distance: Distance,
    /// GPUs that the first NIC serves, this one included.
    pub gpus_on_nic: u32,
}

/// Reason for which no NICs are chosen for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoNicChoice {
    /// The PCI bus has no such GPU.
    NoGpu(BusId),
    /// No usable port belongs to a NIC on the PCI bus.
    NoNic,
}

impl fmt::Display for NoNicChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoNicChoice::NoGpu(bus_id) => write!(f, "the PCI bus has no GPU at {bus_id}"),
            NoNicChoice::NoNic => f.write_str("no port that can be used is on the PCI bus"),
        }
    }
}

impl fmt::Display for NicChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = match self.distance {
            Distance::Switch => "under the same PCIe switch",
            Distance::Switches => "under the same PCIe switches",
            Distance::RootComplex => "at the same host bridge",
            Distance::NumaNode => "on the same NUMA node",
            Distance::System => "on another NUMA node: no nearer one is left",
        };
        write!(f, "nearest to {}: {path} ({})", self.gpu, self.distance.short())?;
        if self.gpus_on_nic > 1 {
            write!(f, ", shared by {} GPUs", self.gpus_on_nic)?;
        }
        Ok(())
    }
}

/// NICs for a rank with the GPU at this address.
pub(super) fn choose(
    host: &Host,
    gpu: BusId,
    usable: &[RdmaPort],
) -> Result<NicChoice, NoNicChoice> {
    let is_gpu = |&&index: &&usize| host.devices[index].bus_id == gpu;
    let gpu = *host.gpus().iter().find(is_gpu).ok_or(NoNicChoice::NoGpu(gpu))?;
    let ports_of = |nic: usize| {
        let of_nic = host.devices[nic].interfaces.iter().filter(|it| it.rdma);
        let ports = of_nic.map(|it| RdmaPort { device: it.name.clone(), port: it.port });
        ports.filter(|port| usable.contains(port))
    };
    let nics = host.nics().into_iter().filter(|&nic| ports_of(nic).next().is_some());
    let pairing = pairing(host, &nics.collect::<Vec<_>>());
    let first = pairing.pairs.iter().find(|pair| pair.gpu == gpu).ok_or(NoNicChoice::NoNic)?;
    let further = pairing.further.iter().filter(|pair| pair.gpu == gpu).map(|pair| pair.nic);
    let chosen = std::iter::once(first.nic).chain(further).chain(dealt(host, &pairing, gpu));
    Ok(NicChoice {
        gpu: host.label(gpu),
        ports: chosen.flat_map(ports_of).collect(),
        distance: first.distance,
        gpus_on_nic: first.gpus_on_nic,
    })
}

/// A GPU's part of the spare NICs that are as near as the first: as many as each other GPU there has.
fn dealt(host: &Host, pairing: &Pairing, gpu: usize) -> Vec<usize> {
    // GPUs at the same distance from a NIC as from the first one, across the CPU.
    let takers = |nic: usize| -> Vec<usize> {
        let is_as_near = |pair: &&Pair| {
            !pair.distance.is_switched()
                && pair.distance < Distance::System
                && host.distance(pair.gpu, nic) == pair.distance
        };
        pairing.pairs.iter().filter(is_as_near).map(|pair| pair.gpu).collect()
    };
    let all: Vec<(usize, Vec<usize>)> =
        pairing.spare.iter().map(|&nic| (nic, takers(nic))).collect();
    let mine = all.iter().filter(|(_, takers)| takers.contains(&gpu));
    let mut found = Vec::new();
    for (nic, takers) in mine {
        let alike: Vec<usize> =
            all.iter().filter(|(_, others)| others == takers).map(|(nic, _)| *nic).collect();
        let each = alike.len() / takers.len();
        let (place, position) = (
            takers.iter().position(|&taker| taker == gpu).unwrap_or(0),
            alike.iter().position(|other| other == nic).unwrap_or(0),
        );
        // Whole rounds, so that no GPU has more NICs than another.
        if position < each * takers.len() && position % takers.len() == place {
            found.push(*nic);
        }
    }
    found
}
