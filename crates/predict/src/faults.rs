//! Degraded and failed links: timed bandwidth changes.

use weft_netsim::{Engine, LinkId};
use weft_topology::Network;

use crate::cluster::Fault;
use crate::error::Error;

/// Bandwidth changes in a scenario.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    changes: Vec<BandwidthChange>,
}

#[derive(Clone, Copy, Debug)]
struct BandwidthChange {
    at_s: f64,
    link: LinkId,
    bandwidth: f64,
}

impl Faults {
    /// Resolves the links that `faults` name.
    pub fn new(network: &Network, faults: &[Fault], efficiency: f64) -> Result<Faults, Error> {
        let mut changes = Vec::new();
        for fault in faults {
            let node = |field: &str, name: &str| {
                let must = "a node name in the network";
                network
                    .find(name)
                    .ok_or_else(|| Error::field(format!("faults.{field}"), name, must))
            };
            let (from, to) = (node("from", &fault.from)?, node("to", &fault.to)?);
            let mut links: Vec<_> = network.links_between(from, to).collect();
            if !fault.one_way {
                links.extend(network.links_between(to, from));
            }
            if links.is_empty() {
                let pair = format!("{} and {}", fault.from, fault.to);
                return Err(Error::field("faults", pair, "two nodes with a link between them"));
            }
            for link in links {
                let whole = network.link(link).bandwidth * efficiency;
                let link = LinkId(link.0);
                changes.push(BandwidthChange {
                    at_s: fault.at_s,
                    link,
                    bandwidth: whole * fault.bandwidth,
                });
                if let Some(at_s) = fault.until_s {
                    changes.push(BandwidthChange { at_s, link, bandwidth: whole });
                }
            }
        }
        Ok(Faults { changes })
    }

    /// Change times, with the tags for [`Faults::apply`].
    pub fn times(&self) -> impl Iterator<Item = (f64, u64)> {
        self.changes.iter().enumerate().map(|(number, change)| (change.at_s, number as u64))
    }

    /// Applies the change `tag`.
    pub fn apply(&self, tag: u64, engine: &mut Engine) -> Result<(), Error> {
        let change = self.changes[tag as usize];
        Ok(engine.set_bandwidth(change.link, change.bandwidth)?)
    }
}
