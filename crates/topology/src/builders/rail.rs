//! Rail-optimised networks: NIC `r` in each host is cabled to a switch in rail `r`.

use super::fat_tree::{join, switches};
use crate::builder::NetworkBuilder;
use crate::error::{Error, Result};
use crate::network::{LinkSpec, MAX_LINKS, MAX_NODES, Network, counted, limit};

/// `hosts` hosts with `gpus` GPUs and one NIC per GPU. GPU `r` in each host is on rail `r`; a switch inside the host,
/// such as NVLink, joins its GPUs.
///
/// A rail is one leaf switch, or several if `hosts_per_leaf` is less than `hosts`; spines, if any, join all leaves in
/// all rails. Without spines, rails are joined only inside hosts, so endpoints forward messages for other rails (PXN in
/// NCCL).
///
/// Names are `host0`, `rail0` (or `rail0.leaf0`), `spine0`, and `host0.gpu0` for endpoints, numbered host
/// by host.
#[derive(Clone, Debug, PartialEq)]
pub struct Rail {
    /// Hosts.
    pub hosts: u32,
    /// GPUs per host; equals the NICs per host and the rail count.
    pub gpus: u32,
    /// Hosts on each leaf; 0: all.
    pub hosts_per_leaf: u32,
    /// Spine switches that join the leaves.
    pub spines: u32,
    /// Cables between each leaf and each spine.
    pub trunks: u32,
    /// Bandwidth and latency for a cable between boxes.
    pub link: LinkSpec,
    /// Bandwidth and latency for cables between switches; `None`: as `link`.
    pub trunk: Option<LinkSpec>,
    /// Link from a GPU to the switch inside its host.
    pub nvlink: LinkSpec,
}

impl Rail {
    /// One switch per rail, 100 Gb/s cables, and 450 GB/s NVLink in each direction.
    pub fn new(hosts: u32, gpus: u32) -> Rail {
        Rail {
            hosts,
            gpus,
            hosts_per_leaf: 0,
            spines: 0,
            trunks: 1,
            link: LinkSpec::default(),
            trunk: None,
            nvlink: LinkSpec::new(3600.0, 0.5),
        }
    }

    /// The network.
    pub fn network(&self) -> Result<Network> {
        counted("hosts", self.hosts)?;
        counted("gpus", self.gpus)?;
        counted("trunks", self.trunks)?;
        let per_leaf = match self.hosts_per_leaf {
            0 => self.hosts,
            count => count.min(self.hosts),
        };
        let leaves = self.hosts.div_ceil(per_leaf);
        if leaves > 1 && self.spines == 0 {
            let (value, must) = (0, "at least 1 where a rail has several leaves");
            return Err(Error::Count { what: "spines".to_owned(), value, must });
        }
        limit("spines", self.spines.into(), MAX_NODES)?;
        let gpus = u128::from(self.gpus);
        let switches_in_all = gpus * u128::from(leaves);
        let endpoints = gpus * u128::from(self.hosts);
        let spines = u128::from(self.spines);
        limit("nodes", endpoints + u128::from(self.hosts) + switches_in_all + spines, MAX_NODES)?;
        let cables = 2 * endpoints + switches_in_all * spines * u128::from(self.trunks);
        limit("directed links", 2 * cables, MAX_LINKS)?;
        let mut network = NetworkBuilder::new(format!(
            "rail-optimised: {} hosts of {} GPUs, {leaves} leaves a rail, {} spines",
            self.hosts, self.gpus, self.spines
        ));
        let mut rails = Vec::new();
        for rail in 0..self.gpus {
            rails.push(switches(&mut network, leaves, |leaf| {
                if leaves == 1 { format!("rail{rail}") } else { format!("rail{rail}.leaf{leaf}") }
            })?);
        }
        let spines = switches(&mut network, self.spines, |spine| format!("spine{spine}"))?;
        for host in 0..self.hosts {
            let name = format!("host{host}");
            let inside = if self.gpus > 1 { Some(network.host(name.as_str())?) } else { None };
            for (gpu, rail) in rails.iter().enumerate() {
                let endpoint = format!("{name}.gpu{gpu}");
                let endpoint = if spines.is_empty() && self.gpus > 1 {
                    network.forwarding_endpoint(endpoint, Some(&name))?
                } else {
                    network.endpoint(endpoint, Some(&name))?
                };
                if let Some(inside) = inside {
                    network.cable(endpoint, inside, self.nvlink)?;
                }
                network.cable(endpoint, rail[(host / per_leaf) as usize], self.link)?;
            }
        }
        let trunk = self.trunk.unwrap_or(self.link);
        for leaf in rails.iter().flatten() {
            join(&mut network, *leaf, &spines, self.trunks, trunk)?;
        }
        network.finish()
    }
}
