//! BiGraph from EFLOPS (HPCA 2020): a complete bipartite graph between upper and lower switches.

use super::Attachment;
use crate::builder::NetworkBuilder;
use crate::error::Result;
use crate::network::{EndpointId, LinkSpec, MAX_LINKS, MAX_NODES, Network, counted, limit};

/// Two halves with `half` switches each. Each upper switch is joined to each lower one by `trunks` cables, and has
/// `endpoints` endpoints. Endpoints in different halves have one shortest path (with one trunk); endpoints on different
/// switches in one half have `half` shortest paths.
///
/// Switches are named `U0`, `U1`, ... and `L0`, `L1`, ...; endpoints `U0.0`, `U0.1`, ..., numbered in that
/// order, the upper half first.
#[derive(Clone, Debug, PartialEq)]
pub struct BiGraph {
    /// Switches in each half: H.
    pub half: u32,
    /// Endpoints on each switch: M.
    pub endpoints: u32,
    /// Cables between each upper and each lower switch.
    pub trunks: u32,
    /// Cable bandwidth and latency.
    pub link: LinkSpec,
    /// Bandwidth and latency for cables between switches; `None`: as `link`.
    pub trunk: Option<LinkSpec>,
    /// Physical switches into which the 2H switches are grouped; `None`: one each.
    pub physical: Option<u32>,
    /// NICs per host. With more than one, hosts are cabled so that a host's endpoints have consecutive ranks under
    /// HDRM, as torchrun requires.
    pub nics: u32,
    /// Endpoints on a port.
    pub attach: Attachment,
}

/// Switch port in a BiGraph that has an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Port {
    /// Half: false is the upper, true the lower.
    pub lower: bool,
    /// Switch within the half.
    pub switch: u32,
    /// Port, from 0.
    pub port: u32,
}

impl BiGraph {
    /// BiGraph with `half` switches in each half, `endpoints` endpoints on each, one trunk, 100 Gb/s.
    pub fn new(half: u32, endpoints: u32) -> BiGraph {
        BiGraph {
            half,
            endpoints,
            trunks: 1,
            link: LinkSpec::default(),
            trunk: None,
            physical: None,
            nics: 1,
            attach: Attachment::default(),
        }
    }

    /// Number of ports with an endpoint, or with the host of several: 2 H M.
    pub fn ports(&self) -> u64 {
        (2 * u64::from(self.half)).saturating_mul(u64::from(self.endpoints))
    }

    /// Port number among [`ports`](BiGraph::ports); equals the endpoint number where NICs are not shared.
    pub fn number(&self, port: Port) -> EndpointId {
        let switch = u32::from(port.lower) * self.half + port.switch;
        EndpointId(switch * self.endpoints + port.port)
    }

    /// Port with a number.
    pub fn port(&self, number: EndpointId) -> Port {
        let switch = number.0 / self.endpoints;
        Port {
            lower: switch >= self.half,
            switch: switch % self.half,
            port: number.0 % self.endpoints,
        }
    }

    /// Switch name.
    pub fn switch_name(&self, lower: bool, switch: u32) -> String {
        format!("{}{switch}", if lower { 'L' } else { 'U' })
    }

    /// Port name.
    pub fn port_name(&self, port: Port) -> String {
        format!("{}.{}", self.switch_name(port.lower, port.switch), port.port)
    }

    /// Checks all counts against the limits.
    ///
    /// # Errors
    /// [`Error::Count`](crate::Error::Count), [`Error::TooLarge`](crate::Error::TooLarge).
    pub fn check(&self) -> Result<()> {
        counted("switches of each half", self.half)?;
        counted("endpoints", self.endpoints)?;
        counted("trunks", self.trunks)?;
        counted("nics", self.nics)?;
        self.attach.check()?;
        let half = u128::from(self.half);
        let ports = u128::from(self.ports());
        let gpus = u128::from(self.attach.gpus_per_nic);
        let on_port = if gpus > 1 { gpus + 1 } else { 1 };
        limit("nodes", 2 * half + ports * on_port, MAX_NODES)?;
        let trunks = half * half * u128::from(self.trunks);
        limit("directed links", 2 * (trunks + ports * on_port), MAX_LINKS)?;
        self.check_physical()
    }

    /// The network.
    pub fn network(&self) -> Result<Network> {
        self.check()?;
        let mut network = NetworkBuilder::new(format!(
            "bigraph of 2 x {} switches, {} endpoints on each",
            self.half, self.endpoints
        ));
        let hosts = self.host_names()?;
        let mut switches = Vec::new();
        for lower in [false, true] {
            for switch in 0..self.half {
                switches.push(network.switch(self.switch_name(lower, switch))?);
            }
        }
        for number in 0..self.ports() as u32 {
            let port = self.port(EndpointId(number));
            let switch = switches[(number / self.endpoints) as usize];
            let host = hosts.as_ref().map(|hosts| hosts[number as usize].as_str());
            self.attach.add(&mut network, switch, &self.port_name(port), host, self.link)?;
        }
        let (upper, lower) = switches.split_at(self.half as usize);
        for &one in upper {
            for &other in lower {
                for _ in 0..self.trunks {
                    network.cable(one, other, self.trunk.unwrap_or(self.link))?;
                }
            }
        }
        network.finish()
    }
}
