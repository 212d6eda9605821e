//! The networks that the article compares.

use serde_json::{Value, json};

use super::bench::Bench;
use crate::collective::Placement;
use crate::error::Error;
use crate::spec::{Cluster, ConstantsSpec, Preset};

/// A network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Net {
    /// EFLOPS: every GPU has a NIC, four GPUs of a node on one virtual switch.
    BiGraph,
    /// The same NICs on a two-tier fat tree with a leaf for each node, not oversubscribed.
    FatTree,
    /// A fat tree of as many nodes, of which each has a single NIC that its four GPUs share.
    SingleNic,
}

/// Where ranks are, for algorithms without a map of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// Node after node.
    ByNode,
    /// One rank on each node in turn, as with round-robin hostfiles.
    InTurn,
}

/// The switches of each half of a BiGraph, and the ports of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub half: u32,
    pub ports: u32,
}

/// GPUs of a node.
pub(crate) const LOCAL: u32 = 4;

/// The BiGraph of a number of GPUs: four on a switch up to the 64 of the article, and from there on the
/// most even one that HDRM can use, as many ports as switches in a half at most.
pub(crate) fn layout(ranks: u32) -> Option<Layout> {
    if !ranks.is_power_of_two() || !(8..=4096).contains(&ranks) {
        return None;
    }
    let mut ports = 2;
    while 2 * ports <= LOCAL && ranks / (2 * ports) >= 2 * (2 * ports) {
        ports *= 2;
    }
    // Switches of 64 ports and more: a half of 32 switches needs 32 for the other one.
    while ranks / (2 * ports) > 64 {
        ports *= 2;
    }
    Some(Layout { half: ranks / (2 * ports), ports })
}

impl Net {
    pub fn name(self) -> &'static str {
        match self {
            Net::BiGraph => "bigraph",
            Net::FatTree => "fat-tree",
            Net::SingleNic => "single-nic",
        }
    }

    fn topology(self, ranks: u32, link_latency_s: f64) -> Result<String, Error> {
        let Layout { half, ports } = layout(ranks)
            .ok_or_else(|| Error::field("ranks", ranks, "a power of two from 8 to 4096"))?;
        let link = format!("gbps=100,latency_us={}", link_latency_s * 1e6);
        let leaves = ranks / LOCAL;
        Ok(match self {
            Net::BiGraph => format!("bigraph:switches={},endpoints={ports},{link}", 2 * half),
            Net::FatTree => format!("fat-tree:leaves={leaves},spines={LOCAL},hosts={LOCAL},{link}"),
            Net::SingleNic => {
                let leaves = (leaves / LOCAL).max(2);
                let hosts = ranks / LOCAL / leaves;
                format!(
                    "fat-tree:leaves={leaves},spines={LOCAL},hosts={hosts},gpus_per_nic={LOCAL},{link}"
                )
            }
        })
    }

    /// The cluster with the constants of a column.
    pub fn cluster(self, ranks: u32, bench: &Bench, seed: u64) -> Result<Cluster, Error> {
        let Value::Object(set) = serde_json::to_value(&bench.constants)? else { unreachable!() };
        Ok(Cluster {
            topology: json!(self.topology(ranks, bench.link_latency_s)?),
            routing: "ecmp".into(),
            seed,
            constants: ConstantsSpec { preset: Preset::Ideal, set },
            faults: Vec::new(),
            stragglers: Vec::new(),
        })
    }

    /// Where the ranks of an algorithm are.
    pub fn placement(self, ranks: u32, algorithm: &str, order: Order) -> Placement {
        if self == Net::BiGraph && algorithm == "hdrm" {
            return Placement::Map;
        }
        let nodes = ranks / LOCAL;
        let place = |rank: u32| match order {
            Order::ByNode => rank,
            Order::InTurn => rank % nodes * LOCAL + rank / nodes,
        };
        if self != Net::BiGraph {
            return Placement::Endpoints((0..ranks).map(place).collect());
        }
        // Neighbouring switches are in different halves, so that neighbours in a ring have a way of their own.
        let Some(Layout { half, ports }) = layout(ranks) else { return Placement::Order };
        let endpoint = |rank: u32| {
            let (switch, port) = (rank / ports, rank % ports);
            (switch / 2 + switch % 2 * half) * ports + port
        };
        Placement::Endpoints((0..ranks).map(|rank| endpoint(place(rank))).collect())
    }
}
