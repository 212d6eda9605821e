//! The BiGraph of EFLOPS (HPCA 2020): two halves of switches, each joined to all of the other half.

use super::Attach;
use crate::builder::NetworkBuilder;
use crate::error::Result;
use crate::network::{EndpointId, LinkSpec, MAX_LINKS, MAX_NODES, Network, counted, limit};

/// Two halves of `half` switches; every upper switch is joined to every lower one by `trunks` cables,
/// and `endpoints` endpoints stand on each. Between endpoints of different halves there is one shortest
/// path (with one trunk); between two of one half there are as many as the other half has switches.
///
/// Switches are called `U0`, `U1`, ... and `L0`, `L1`, ...; endpoints `U0.0`, `U0.1`, ..., and are
/// numbered in that order, the upper half first.
#[derive(Clone, Debug, PartialEq)]
pub struct BiGraph {
    /// Switches of each half: H.
    pub half: u32,
    /// Endpoints on each switch: M.
    pub endpoints: u32,
    /// Cables for each pair of an upper and a lower switch.
    pub trunks: u32,
    /// Every cable, unless `trunk` says otherwise.
    pub link: LinkSpec,
    /// The cables between switches, if they differ.
    pub trunk: Option<LinkSpec>,
    /// Physical switches that the 2H switches are cut from; `None` if each is a box of its own.
    pub physical: Option<u32>,
    /// NICs of each host. With more than one, hosts are cabled so that a host's endpoints have
    /// consecutive ranks under HDRM, which is what torchrun can start.
    pub nics: u32,
    /// What stands on a port.
    pub attach: Attach,
}

/// A port of a BiGraph's switch where an endpoint stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Port {
    /// The half: false is the upper, true the lower.
    pub lower: bool,
    /// The switch within its half.
    pub switch: u32,
    /// The port, from 0.
    pub port: u32,
}

impl BiGraph {
    /// A BiGraph of `half` switches in each half with `endpoints` on each, one trunk, 100 Gb/s.
    pub fn new(half: u32, endpoints: u32) -> BiGraph {
        BiGraph {
            half,
            endpoints,
            trunks: 1,
            link: LinkSpec::default(),
            trunk: None,
            physical: None,
            nics: 1,
            attach: Attach::default(),
        }
    }

    /// Ports with an endpoint (or with the host of several): 2 H M.
    pub fn ports(&self) -> u64 {
        (2 * u64::from(self.half)).saturating_mul(u64::from(self.endpoints))
    }

    /// The number of a port among [`ports`](BiGraph::ports): that of its endpoint, where NICs are not
    /// shared.
    pub fn number(&self, port: Port) -> EndpointId {
        let switch = u32::from(port.lower) * self.half + port.switch;
        EndpointId(switch * self.endpoints + port.port)
    }

    /// The port of that number.
    pub fn port(&self, number: EndpointId) -> Port {
        let switch = number.0 / self.endpoints;
        Port {
            lower: switch >= self.half,
            switch: switch % self.half,
            port: number.0 % self.endpoints,
        }
    }

    /// A switch's name.
    pub fn switch_name(&self, lower: bool, switch: u32) -> String {
        format!("{}{switch}", if lower { 'L' } else { 'U' })
    }

    /// A port's name.
    pub fn port_name(&self, port: Port) -> String {
        format!("{}.{}", self.switch_name(port.lower, port.switch), port.port)
    }

    /// Refuses counts that make no BiGraph, or one too large.
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
        self.check_cut()
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
