//! Link constants, and times estimated from them.

use crate::algorithm::{Algorithm, Options};
use crate::any_schedule::build;
use crate::contention::Paths;
use crate::error::Error;
use crate::op::Collective;
use crate::tune::{Costs, estimate};
use serde::{Deserialize, Serialize};
use weft_topology::{EndpointId, LinkId, LinkSpec};

/// Link constants for a group, measured while all ranks are busy alike. Seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConstants {
    /// Time per step: from posting a write until the peer acts on it.
    pub step_s: f64,
    /// Time to post one more write in a step.
    pub post_s: f64,
    /// Time per byte from a rank to another.
    pub byte_s: f64,
    /// Time to add a byte to another.
    pub add_byte_s: f64,
    /// Time to copy a byte within a rank's memory.
    pub copy_byte_s: f64,
}

impl LinkConstants {
    /// Estimated seconds for a call on a vector of `bytes` bytes: for the schedule on a switch with a link for each
    /// rank, and a copy from the result, or, after reads in place, the answers.
    pub(super) fn seconds(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        options: Options,
        ranks: u32,
        bytes: u64,
    ) -> Result<f64, Error> {
        let costs = self.costs();
        let schedule = build(collective, algorithm, ranks, &options)?;
        let reads = algorithm == Algorithm::DirectRead;
        let mut switch = Switch { ranks, bandwidth: 1.0 / self.byte_s, reads };
        let placement: Vec<_> = (0..ranks).map(EndpointId).collect();
        let found =
            estimate(algorithm, &options, &schedule, &mut switch, &placement, bytes, &costs)?;
        Ok(found.seconds()
            + match algorithm {
                // The answer to the last read is one more step; results are not copied.
                Algorithm::DirectRead => self.step_s,
                _ => self.copy_byte_s * bytes as f64,
            })
    }

    /// Costs besides the links.
    pub(crate) fn costs(&self) -> Costs {
        Costs { step_s: self.step_s, post_s: self.post_s, add_bytes_per_s: 1.0 / self.add_byte_s }
    }

    /// Names and values, for checks.
    pub(super) fn named(&self) -> [(&'static str, f64); 5] {
        [
            ("step_s", self.step_s),
            ("post_s", self.post_s),
            ("byte_s", self.byte_s),
            ("add_byte_s", self.add_byte_s),
            ("copy_byte_s", self.copy_byte_s),
        ]
    }
}

/// One switch: links from all endpoints, then links to all endpoints. Reads in place occupy only the reader.
struct Switch {
    ranks: u32,
    bandwidth: f64,
    reads: bool,
}

impl Paths for Switch {
    fn endpoints(&self) -> u32 {
        self.ranks
    }

    fn links(&self) -> u32 {
        2 * self.ranks
    }

    fn name(&self, link: LinkId) -> String {
        format!("link {}", link.0)
    }

    fn spec(&self, _: LinkId) -> LinkSpec {
        LinkSpec { bandwidth: self.bandwidth, latency: 0.0 }
    }

    fn path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        _: u64,
        links: &mut Vec<LinkId>,
    ) -> Result<(), Error> {
        links.clear();
        if from != to {
            links.extend((!self.reads).then_some(LinkId(from.0)));
            links.push(LinkId(self.ranks + to.0));
        }
        Ok(())
    }
}
