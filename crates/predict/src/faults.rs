//! Links that are slow or broken from some time on.

use weft_netsim::{Engine, LinkId};
use weft_topology::Network;

use crate::error::Error;
use crate::spec::Fault;

/// What happens to links, and when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    changes: Vec<Change>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    at_s: f64,
    link: LinkId,
    bandwidth: f64,
}

impl Faults {
    /// Finds the links that the faults name.
    pub fn new(network: &Network, faults: &[Fault], efficiency: f64) -> Result<Faults, Error> {
        let mut changes = Vec::new();
        for fault in faults {
            let node = |field: &str, name: &str| {
                let must = "the name of a node of the network";
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
                changes.push(Change { at_s: fault.at_s, link, bandwidth: whole * fault.bandwidth });
                if let Some(at_s) = fault.until_s {
                    changes.push(Change { at_s, link, bandwidth: whole });
                }
            }
        }
        Ok(Faults { changes })
    }

    /// When something changes, with the tags to call [`Faults::apply`] with.
    pub fn times(&self) -> impl Iterator<Item = (f64, u64)> {
        self.changes.iter().enumerate().map(|(number, change)| (change.at_s, number as u64))
    }

    /// Changes what `tag` names.
    pub fn apply(&self, tag: u64, engine: &mut Engine) -> Result<(), Error> {
        let change = self.changes[tag as usize];
        Ok(engine.set_bandwidth(change.link, change.bandwidth)?)
    }
}
