//! A case for other simulators: what there is, and who writes what to whom.

use crate::{Case, Failure};
use std::fmt::Write;
use std::path::Path;
use weft_collectives::{Algorithm, AnySchedule, Collective, Op, Options, Rank, Schedule, build};
use weft_topology::{EndpointId, LinkId, Network, Router, Routing};

/// A case, read: the network and where each rank is.
pub struct Platform {
    /// The network.
    pub network: Network,
    router: Router,
    /// The endpoint of each rank.
    pub endpoints: Vec<EndpointId>,
    /// What runs.
    pub schedule: AnySchedule,
}

impl Platform {
    /// Reads a case.
    pub fn new(case: &Case) -> Result<Platform, Failure> {
        let network = Network::parse(&case.topology)?;
        let routing = match case.routing.as_str() {
            "static" => Routing::Static,
            "unique" => Routing::Unique,
            "ecmp" => Routing::Ecmp { seed: case.seed },
            other => return Err(format!("no routing is called {other}").into()),
        };
        let algorithm: Algorithm = case.algorithm.parse()?;
        let endpoints = match case.shuffled(network.endpoints()) {
            Some(order) => order.into_iter().map(EndpointId).collect(),
            None if algorithm == Algorithm::Hdrm => network.rank_map(),
            None => (0..network.endpoints()).map(EndpointId).collect(),
        };
        if endpoints.len() < case.ranks as usize {
            return Err(format!("{} ranks on {} endpoints", case.ranks, endpoints.len()).into());
        }
        let schedule = build(Collective::AllReduce, algorithm, case.ranks, &Options::default())?;
        Ok(Platform { router: Router::new(&network, routing)?, network, endpoints, schedule })
    }

    /// The links from one rank to another.
    pub fn path(&mut self, from: u32, to: u32, links: &mut Vec<LinkId>) -> Result<(), Failure> {
        links.clear();
        let ranks = u64::from(self.schedule.ranks());
        // As the executor numbers its connections, so that hashes agree.
        let flow = u64::from(from) * ranks + u64::from(to);
        let ends = [from, to].map(|rank| self.endpoints[rank as usize]);
        Ok(self.router.path(ends[0], ends[1], flow, links)?)
    }
}

/// Writes a case down, word by word separated by white space:
///
/// ```text
/// ranks N  links L  steps S
/// (bandwidth in bytes/s, latency in s)                  L times
/// (writes W, then W times: step, to, bytes, links K, then K times: link;
///  waits V, then V times: step, from)                   N times
/// ```
///
/// The rank does its writes and waits in this order: for each step all its writes, then all its waits.
pub fn export(case: &Case, file: &Path) -> Result<(), Failure> {
    let mut platform = Platform::new(case)?;
    let (ranks, steps) = (platform.schedule.ranks(), platform.schedule.steps());
    let links = platform.network.links();
    let mut text = format!("{ranks} {} {steps}\n", links.len());
    for link in links {
        // Rust prints as many digits as tell a number from all others.
        writeln!(text, "{} {}", link.bandwidth, link.latency)?;
    }
    let mut path = Vec::new();
    for rank in (0..ranks).map(Rank) {
        let (mut writes, mut waits) = (Vec::new(), Vec::new());
        let mut step = 0;
        for index in 0..platform.schedule.len(rank) {
            match platform.schedule.op(rank, index) {
                Op::Write { to, source, step: of_step, .. } => {
                    step = of_step;
                    let bytes = platform.schedule.span_bytes(rank, source, case.bytes);
                    writes.push((step, to.0, bytes));
                }
                Op::Wait { from, .. } => waits.push((step, from.0)),
                _ => {}
            }
        }
        writeln!(text, "{}", writes.len())?;
        for (step, to, bytes) in writes {
            platform.path(rank.0, to, &mut path)?;
            write!(text, "{step} {to} {bytes} {}", path.len())?;
            for link in &path {
                write!(text, " {}", link.0)?;
            }
            text.push('\n');
        }
        writeln!(text, "{}", waits.len())?;
        for (step, from) in waits {
            writeln!(text, "{step} {from}")?;
        }
    }
    Ok(std::fs::write(file, text)?)
}
