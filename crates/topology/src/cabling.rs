//! Cabling lists: both ends of each cable, by device and port.

use crate::builders::BiGraph;
use crate::error::{Error, Result};
use crate::network::{EndpointId, Network, NodeKind};
use std::fmt::Write as _;

/// One cable end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CableEnd {
    /// Switch or endpoint in the network.
    pub node: String,
    /// Physical device, which may hold several network switches; else the node.
    pub device: String,
    /// Port on that device, from 1; 0 for a host.
    pub port: u32,
}

/// A cable.
#[derive(Clone, Debug, PartialEq)]
pub struct Cable {
    /// One end.
    pub from: CableEnd,
    /// The other.
    pub to: CableEnd,
    /// Gb/s in each direction.
    pub gbps: f64,
}

impl BiGraph {
    /// Physical switch for a network switch, from 0, and the index there. Upper and lower switches are in different
    /// physical switches if their number is even.
    fn physical_switch(&self, number: u32) -> (u32, u32) {
        match self.physical {
            None => (number, 0),
            Some(physical) => {
                let each = 2 * self.half / physical;
                (number / each, number % each)
            }
        }
    }

    /// Checks that the switches divide evenly into the physical ones.
    pub(crate) fn check_physical(&self) -> Result<()> {
        match self.physical {
            Some(physical) if physical == 0 || !(2 * self.half).is_multiple_of(physical) => {
                let must = "a divisor of the switch count in both halves";
                Err(Error::Count { what: "physical".to_owned(), value: physical.into(), must })
            }
            _ => Ok(()),
        }
    }

    /// BiGraph cables: first the endpoint cables, in endpoint order, then the cables between the halves.
    pub fn cables(&self) -> Result<Vec<Cable>> {
        self.check()?;
        let hosts = self.host_names()?;
        let mut cables = Vec::new();
        let mut next_nic = std::collections::HashMap::new();
        for number in 0..self.ports() as u32 {
            let port = self.port(EndpointId(number));
            let name = self.port_name(port);
            let from = match &hosts {
                None => CableEnd { node: name.clone(), device: name, port: 0 },
                Some(hosts) => {
                    let host = hosts[number as usize].clone();
                    let nic = next_nic.entry(host.clone()).or_insert(0);
                    *nic += 1;
                    CableEnd { node: name, device: host, port: *nic }
                }
            };
            let to = self.switch_end(u32::from(port.lower) * self.half + port.switch, port.port);
            cables.push(Cable { from, to, gbps: gbps(self.link.bandwidth) });
        }
        let trunk = gbps(self.trunk.unwrap_or(self.link).bandwidth);
        for upper in 0..self.half {
            for lower in 0..self.half {
                for cable in 0..self.trunks {
                    let port = |other: u32| self.endpoints + other * self.trunks + cable;
                    cables.push(Cable {
                        from: self.switch_end(upper, port(lower)),
                        to: self.switch_end(self.half + lower, port(upper)),
                        gbps: trunk,
                    });
                }
            }
        }
        Ok(cables)
    }

    fn switch_end(&self, number: u32, port: u32) -> CableEnd {
        let node = self.switch_name(number >= self.half, number % self.half);
        let (device, place) = self.physical_switch(number);
        let ports = self.endpoints + self.half * self.trunks;
        match self.physical {
            None => CableEnd { device: node.clone(), node, port: port + 1 },
            Some(_) => {
                CableEnd { node, device: format!("switch{device}"), port: place * ports + port + 1 }
            }
        }
    }
}

/// Cables in any network; ports are numbered in link order.
pub fn cables_of(network: &Network) -> Vec<Cable> {
    let mut ports = vec![0; network.nodes() as usize];
    let mut cables = Vec::new();
    for (number, link) in network.links().iter().enumerate() {
        if link.reverse.is_some_and(|reverse| (reverse.0 as usize) < number) {
            continue;
        }
        let mut end = |node: crate::NodeId| {
            let name = network.node_name(node).to_owned();
            let port = match network.kind(node) {
                NodeKind::Endpoint => 0,
                _ => {
                    ports[node.0 as usize] += 1;
                    ports[node.0 as usize]
                }
            };
            CableEnd { node: name.clone(), device: name, port }
        };
        let (from, to) = (end(link.from), end(link.to));
        cables.push(Cable { from, to, gbps: gbps(link.bandwidth) });
    }
    cables
}

/// Cabling list as CSV with a header.
pub fn cables_csv(cables: &[Cable]) -> String {
    let mut text =
        String::from("cable,from_device,from_port,from_node,to_device,to_port,to_node,gbps\n");
    for (number, Cable { from, to, gbps }) in cables.iter().enumerate() {
        let port =
            |end: &CableEnd| if end.port == 0 { String::new() } else { end.port.to_string() };
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{gbps}",
            number + 1,
            from.device,
            port(from),
            from.node,
            to.device,
            port(to),
            to.node,
        );
    }
    text
}

fn gbps(bandwidth: f64) -> f64 {
    bandwidth / crate::network::BYTES_PER_GIGABIT
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn no_port_is_used_twice(cables: &[Cable]) {
        let mut used = HashSet::new();
        for end in cables.iter().flat_map(|cable| [&cable.from, &cable.to]) {
            let again = format!("{} has two cables in port {}", end.device, end.port);
            assert!(end.port == 0 || used.insert((end.device.clone(), end.port)), "{again}");
        }
    }

    #[test]
    fn a_cabling_list_has_every_cable_once_and_names_boxes_and_switches() {
        let shape = BiGraph { physical: Some(4), trunks: 2, ..BiGraph::new(4, 3) };
        let cables = shape.cables().unwrap();
        let network = shape.network().unwrap();
        assert_eq!(2 * cables.len(), network.links().len());
        no_port_is_used_twice(&cables);
        // U1 is the second switch in the first box, whose first has 3 + 4 * 2 ports.
        let end = &cables[3].to;
        assert_eq!((end.node.as_str(), end.device.as_str(), end.port), ("U1", "switch0", 12));
        for (cable, info) in cables.iter().zip(network.links().iter().step_by(2)) {
            assert_eq!(cable.from.node, network.node_name(info.from));
            assert_eq!(cable.to.node, network.node_name(info.to));
        }
        let csv = cables_csv(&cables);
        assert_eq!(csv.lines().count(), cables.len() + 1);
        assert!(csv.contains("\n4,U1.0,,U1.0,switch0,12,U1,100\n"), "{csv}");
    }

    #[test]
    fn any_network_has_a_cabling_list() {
        let network = Network::parse("rail:hosts=3,gpus=2,spines=2").unwrap();
        let cables = cables_of(&network);
        assert_eq!(2 * cables.len(), network.links().len());
        no_port_is_used_twice(&cables);
    }
}
