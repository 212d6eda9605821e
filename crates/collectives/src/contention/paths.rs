//! Paths between endpoints: by a router, or by arithmetic on a BiGraph.

use crate::error::Error;
use weft_topology::{BiGraph, EndpointId, LinkId, LinkSpec, Router};

/// Path source between endpoints, for example [`BiGraphPaths`].
pub trait Paths {
    /// Endpoint count.
    fn endpoints(&self) -> u32;

    /// Link count.
    fn links(&self) -> u32;

    /// Link name.
    fn name(&self, link: LinkId) -> String;

    /// Link bandwidth in bytes per second, and latency in seconds.
    fn spec(&self, link: LinkId) -> LinkSpec;

    /// Replaces `links` by the links from one endpoint to another. `flow` distinguishes connections for
    /// hash-based routing.
    fn path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        flow: u64,
        links: &mut Vec<LinkId>,
    ) -> Result<(), Error>;
}

impl Paths for Router {
    fn endpoints(&self) -> u32 {
        self.network().endpoints()
    }

    fn links(&self) -> u32 {
        self.network().links().len() as u32
    }

    fn name(&self, link: LinkId) -> String {
        self.network().link_name(link)
    }

    fn spec(&self, link: LinkId) -> LinkSpec {
        let link = self.network().link(link);
        LinkSpec { bandwidth: link.bandwidth, latency: link.latency }
    }

    fn path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        flow: u64,
        links: &mut Vec<LinkId>,
    ) -> Result<(), Error> {
        Ok(Router::path(self, from, to, flow, links)?)
    }
}

/// Unique paths between the halves in a BiGraph with one trunk, by arithmetic: no network is built, so that the largest
/// can be checked.
///
/// Link numbers are local to this type and differ from the network's: uplinks for all endpoints, downlinks for all
/// endpoints, trunks from the upper to the lower half, trunks back.
#[derive(Clone, Debug)]
pub struct BiGraphPaths {
    graph: BiGraph,
    ports: u32,
}

impl BiGraphPaths {
    /// Paths in a BiGraph.
    ///
    /// # Errors
    /// If it has several trunks between two switches, so that paths are not unique, shares NICs among endpoints,
    /// or has more than 2^32 - 1 links.
    pub fn new(graph: &BiGraph) -> Result<BiGraphPaths, Error> {
        let one = |what, value: u32| match value {
            1 => Ok(()),
            _ => Err(Error::OutOfRange { what, value: value.into(), least: 1, most: 1 }),
        };
        one("the number of trunks", graph.trunks)?;
        one("the number of GPUs on a NIC", graph.attach.gpus_per_nic)?;
        let (half, ports) = (u128::from(graph.half), u128::from(graph.ports()));
        let (needed, limit) = (2 * (half * half + ports), u64::from(u32::MAX));
        if needed > u128::from(limit) {
            let needed = needed.try_into().unwrap_or(u64::MAX);
            return Err(Error::TooLarge { what: "BiGraph links", needed, limit });
        }
        Ok(BiGraphPaths { graph: graph.clone(), ports: ports as u32 })
    }
}

impl Paths for BiGraphPaths {
    fn endpoints(&self) -> u32 {
        self.ports
    }

    fn links(&self) -> u32 {
        2 * (self.ports + self.graph.half * self.graph.half)
    }

    fn name(&self, link: LinkId) -> String {
        let (half, ports) = (self.graph.half, self.ports);
        let end = |endpoint: u32| {
            let port = self.graph.port(EndpointId(endpoint));
            (self.graph.port_name(port), self.graph.switch_name(port.lower, port.switch))
        };
        if link.0 < 2 * ports {
            let (port, switch) = end(link.0 % ports);
            return if link.0 < ports {
                format!("{port}->{switch}")
            } else {
                format!("{switch}->{port}")
            };
        }
        let trunk = link.0 - 2 * ports;
        let (upper, lower) = (trunk % (half * half) / half, trunk % half);
        if trunk < half * half {
            format!("U{upper}->L{lower}")
        } else {
            format!("L{lower}->U{upper}")
        }
    }

    fn spec(&self, link: LinkId) -> LinkSpec {
        match self.graph.trunk {
            Some(trunk) if link.0 >= 2 * self.ports => trunk,
            _ => self.graph.link,
        }
    }

    fn path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        _: u64,
        links: &mut Vec<LinkId>,
    ) -> Result<(), Error> {
        let (half, ports) = (self.graph.half, self.ports);
        let (one, other) = (self.graph.port(from), self.graph.port(to));
        links.clear();
        if from == to {
            return Ok(());
        }
        links.push(LinkId(from.0));
        if one.lower != other.lower {
            let (upper, lower) = if one.lower { (other, one) } else { (one, other) };
            let back = if one.lower { half * half } else { 0 };
            links.push(LinkId(2 * ports + back + upper.switch * half + lower.switch));
        } else if one.switch != other.switch {
            return Err(Error::NoUniquePath {
                from: self.graph.port_name(one),
                to: self.graph.port_name(other),
            });
        }
        links.push(LinkId(ports + to.0));
        Ok(())
    }
}
