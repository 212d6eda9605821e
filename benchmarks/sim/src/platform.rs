//! Exports a case for other simulators: links, routes and messages.

use crate::{Case, Failure};
use std::fmt::Write;
use std::path::Path;
use weft_collectives::{Algorithm, AnySchedule, Collective, Op, Options, Rank, Schedule, build};
use weft_topology::{EndpointId, LinkId, Network, Router, Routing};

/// Parsed case: network, rank placement and schedule.
pub struct Platform {
    /// Network.
    pub network: Network,
    router: Router,
    /// Endpoint by rank.
    pub endpoints: Vec<EndpointId>,
    /// Schedule.
    pub schedule: AnySchedule,
}

impl Platform {
    /// Parses a case.
    pub fn new(case: &Case) -> Result<Platform, Failure> {
        let network = Network::parse(&case.topology)?;
        let routing = match case.routing.as_str() {
            "static" => Routing::Static,
            "unique" => Routing::Unique,
            "ecmp" => Routing::Ecmp { seed: case.seed },
            other => return Err(format!("routing {other}: expected static, unique or ecmp").into()),
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

    /// Links from one rank to another.
    pub fn path(&mut self, from: u32, to: u32, links: &mut Vec<LinkId>) -> Result<(), Failure> {
        links.clear();
        let ranks = u64::from(self.schedule.ranks());
        // The executor's connection number, for equal hashes.
        let flow = u64::from(from) * ranks + u64::from(to);
        let ends = [from, to].map(|rank| self.endpoints[rank as usize]);
        Ok(self.router.path(ends[0], ends[1], flow, links)?)
    }
}

/// Writes a case as numbers separated by white space:
///
/// ```text
/// ranks links
/// for each link: bandwidth in bytes/s, latency in s
/// for each rank:
///   number of peers written to; for each the peer, number of links, links
///   number of writes; for each the step, peer and bytes
///   number of awaited arrivals; for each the step and peer
/// ```
///
/// In each step a rank posts all its writes, then waits.
pub fn export(case: &Case, file: &Path) -> Result<(), Failure> {
    let mut platform = Platform::new(case)?;
    let ranks = platform.schedule.ranks();
    let links = platform.network.links();
    let mut text = format!("{ranks} {}\n", links.len());
    for link in links {
        // Rust prints the shortest digits that parse to the same number.
        writeln!(text, "{} {}", link.bandwidth, link.latency)?;
    }
    for rank in 0..ranks {
        let Messages { writes, waits } = platform.messages(rank, case.bytes);
        let mut peers: Vec<u32> = writes.iter().map(|write| write.1).collect();
        peers.sort_unstable();
        peers.dedup();
        let mut path = Vec::new();
        writeln!(text, "{}", peers.len())?;
        for to in peers {
            platform.path(rank, to, &mut path)?;
            write!(text, "{to} {}", path.len())?;
            for link in &path {
                write!(text, " {}", link.0)?;
            }
            text.push('\n');
        }
        writeln!(text, "{}", writes.len())?;
        for (step, to, bytes) in writes {
            writeln!(text, "{step} {to} {bytes}")?;
        }
        writeln!(text, "{}", waits.len())?;
        for (step, from) in waits {
            writeln!(text, "{step} {from}")?;
        }
    }
    Ok(std::fs::write(file, text)?)
}

/// A rank's writes and waits.
struct Messages {
    /// Step, peer and bytes.
    writes: Vec<(u32, u32, u64)>,
    /// Step and peer.
    waits: Vec<(u32, u32)>,
}

impl Platform {
    fn messages(&self, rank: u32, bytes: u64) -> Messages {
        let (mut writes, mut waits) = (Vec::new(), Vec::new());
        let mut now = 0;
        for index in 0..self.schedule.len(Rank(rank)) {
            match self.schedule.op(Rank(rank), index) {
                Op::Write { to, source, step, .. } => {
                    now = step;
                    let bytes = self.schedule.span_bytes(Rank(rank), source, bytes);
                    writes.push((step, to.0, bytes));
                }
                Op::Wait { from, .. } => waits.push((now, from.0)),
                _ => {}
            }
        }
        Messages { writes, waits }
    }
}
