//! Fat trees with two and three tiers.

use super::Attachment;
use crate::builder::NetworkBuilder;
use crate::error::{Error, Result};
use crate::network::{LinkSpec, MAX_LINKS, MAX_NODES, Network, NodeId, counted, limit};

/// Two tiers: each leaf is joined to each spine.
///
/// Leaves are named `leaf0`, ..., spines `spine0`, ..., endpoints `leaf0.0`, ...
#[derive(Clone, Debug, PartialEq)]
pub struct FatTree {
    /// Leaf switches.
    pub leaves: u32,
    /// Spine switches.
    pub spines: u32,
    /// Endpoints on each leaf.
    pub hosts: u32,
    /// Cables between each leaf and each spine.
    pub trunks: u32,
    /// Cable bandwidth and latency.
    pub link: LinkSpec,
    /// Bandwidth and latency for cables between switches; `None`: as `link`.
    pub trunk: Option<LinkSpec>,
    /// Endpoints on a port.
    pub attach: Attachment,
}

impl FatTree {
    /// A tree with one trunk for each pair, 100 Gb/s.
    pub fn new(leaves: u32, spines: u32, hosts: u32) -> FatTree {
        FatTree {
            leaves,
            spines,
            hosts,
            trunks: 1,
            link: LinkSpec::default(),
            trunk: None,
            attach: Attachment::default(),
        }
    }

    /// The network.
    pub fn network(&self) -> Result<Network> {
        counted("leaves", self.leaves)?;
        counted("hosts", self.hosts)?;
        counted("trunks", self.trunks)?;
        self.attach.check()?;
        if self.spines == 0 && self.leaves > 1 {
            let (value, must) = (0, "at least 1 where there are several leaves");
            return Err(Error::Count { what: "spines".to_owned(), value, must });
        }
        limit("spines", self.spines.into(), MAX_NODES)?;
        let (leaves, spines) = (u128::from(self.leaves), u128::from(self.spines));
        let trunks = leaves * spines * u128::from(self.trunks);
        let name = format!(
            "fat tree of {} leaves with {} endpoints on each, {} spines",
            self.leaves, self.hosts, self.spines
        );
        let mut network = empty(name, leaves, self.hosts, &self.attach, leaves + spines, trunks)?;
        let leaves = switches(&mut network, self.leaves, |leaf| format!("leaf{leaf}"))?;
        let spines = switches(&mut network, self.spines, |spine| format!("spine{spine}"))?;
        for (number, &leaf) in leaves.iter().enumerate() {
            for host in 0..self.hosts {
                let name = format!("leaf{number}.{host}");
                self.attach.add(&mut network, leaf, &name, None, self.link)?;
            }
        }
        let trunk = self.trunk.unwrap_or(self.link);
        for &leaf in &leaves {
            join(&mut network, leaf, &spines, self.trunks, trunk)?;
        }
        network.finish()
    }
}

/// Three tiers: within a pod each leaf is joined to each aggregation switch; aggregation switch `a` in each pod is
/// joined to the `cores / aggs` core switches in plane `a`.
///
/// Names are `pod0.leaf0`, `pod0.agg0`, `core0`, and endpoints `pod0.leaf0.0`.
#[derive(Clone, Debug, PartialEq)]
pub struct FatTree3 {
    /// Pods.
    pub pods: u32,
    /// Leaf switches in each pod.
    pub leaves: u32,
    /// Aggregation switches in each pod.
    pub aggs: u32,
    /// Core switches, divisible by `aggs`.
    pub cores: u32,
    /// Endpoints on each leaf.
    pub hosts: u32,
    /// Cables between each two joined switches.
    pub trunks: u32,
    /// Cable bandwidth and latency.
    pub link: LinkSpec,
    /// Bandwidth and latency for cables between switches; `None`: as `link`.
    pub trunk: Option<LinkSpec>,
    /// Endpoints on a port.
    pub attach: Attachment,
}

impl FatTree3 {
    /// A tree with one trunk for each pair, 100 Gb/s.
    pub fn new(pods: u32, leaves: u32, aggs: u32, cores: u32, hosts: u32) -> FatTree3 {
        FatTree3 {
            pods,
            leaves,
            aggs,
            cores,
            hosts,
            trunks: 1,
            link: LinkSpec::default(),
            trunk: None,
            attach: Attachment::default(),
        }
    }

    /// k-ary fat tree from switches with `k` ports (`k` even): k pods with k/2 leaves and k/2 aggregation switches,
    /// (k/2)^2 core switches, k^3/4 endpoints.
    pub fn of_ports(k: u32) -> Result<FatTree3> {
        if k < 2 || k % 2 == 1 {
            let (value, must) = (u64::from(k), "an even number of ports, at least 2");
            return Err(Error::Count { what: "k".to_owned(), value, must });
        }
        let half = k / 2;
        Ok(FatTree3::new(k, half, half, half.saturating_mul(half), half))
    }

    /// The network.
    pub fn network(&self) -> Result<Network> {
        for (what, value) in [
            ("pods", self.pods),
            ("leaves", self.leaves),
            ("aggs", self.aggs),
            ("cores", self.cores),
            ("hosts", self.hosts),
            ("trunks", self.trunks),
        ] {
            counted(what, value)?;
        }
        self.attach.check()?;
        if !self.cores.is_multiple_of(self.aggs) {
            let (value, must) = (u64::from(self.cores), "a multiple of aggs");
            return Err(Error::Count { what: "cores".to_owned(), value, must });
        }
        let [pods, leaves, aggs, cores] =
            [self.pods, self.leaves, self.aggs, self.cores].map(u128::from);
        let cables = pods * (leaves * aggs + cores) * u128::from(self.trunks);
        let all = pods * (leaves + aggs) + cores;
        let name = format!(
            "fat tree of {} pods of {} leaves with {} endpoints on each, {} aggregation switches a \
             pod, {} cores",
            self.pods, self.leaves, self.hosts, self.aggs, self.cores
        );
        let mut network = empty(name, pods * leaves, self.hosts, &self.attach, all, cables)?;
        let trunk = self.trunk.unwrap_or(self.link);
        let cores = switches(&mut network, self.cores, |core| format!("core{core}"))?;
        let plane = (self.cores / self.aggs) as usize;
        for pod in 0..self.pods {
            let leaves =
                switches(&mut network, self.leaves, |leaf| format!("pod{pod}.leaf{leaf}"))?;
            let aggs = switches(&mut network, self.aggs, |agg| format!("pod{pod}.agg{agg}"))?;
            for (number, &leaf) in leaves.iter().enumerate() {
                for host in 0..self.hosts {
                    let name = format!("pod{pod}.leaf{number}.{host}");
                    self.attach.add(&mut network, leaf, &name, None, self.link)?;
                }
            }
            for &leaf in &leaves {
                join(&mut network, leaf, &aggs, self.trunks, trunk)?;
            }
            for (&agg, cores) in aggs.iter().zip(cores.chunks_exact(plane)) {
                join(&mut network, agg, cores, self.trunks, trunk)?;
            }
        }
        network.finish()
    }
}

/// Empty builder with capacity for a tree. Sizes are checked before the allocation.
fn empty(
    name: String,
    leaves: u128,
    hosts: u32,
    attach: &Attachment,
    switches: u128,
    cables: u128,
) -> Result<NetworkBuilder> {
    let gpus = u128::from(attach.gpus_per_nic);
    let below = leaves.saturating_mul(u128::from(hosts)) * if gpus > 1 { gpus + 1 } else { 1 };
    let (nodes, links) = (switches + below, 2 * (cables + below));
    limit("nodes", nodes, MAX_NODES)?;
    limit("directed links", links, MAX_LINKS)?;
    Ok(NetworkBuilder::with_room(name, nodes as usize, links as usize))
}

pub(super) fn switches(
    network: &mut NetworkBuilder,
    count: u32,
    name: impl Fn(u32) -> String,
) -> Result<Vec<NodeId>> {
    (0..count).map(|number| network.switch(name(number))).collect()
}

/// Joins a switch to each switch in the tier above.
pub(super) fn join(
    network: &mut NetworkBuilder,
    below: NodeId,
    above: &[NodeId],
    trunks: u32,
    spec: LinkSpec,
) -> Result<()> {
    for &above in above {
        for _ in 0..trunks {
            network.cable(below, above, spec)?;
        }
    }
    Ok(())
}
