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

/// Writes a case down, in numbers separated by white space:
///
/// ```text
/// ranks links
/// for each link: its bandwidth in bytes/s and its latency in s
/// for each rank:
///   how many peers it writes to; for each the peer, the number of links to it, and the links
///   how many writes it makes; for each the step, the peer and the bytes
///   how many arrivals it waits for; for each the step and the peer
/// ```
///
/// In each step a rank does all its writes, then all its waits.
pub fn export(case: &Case, file: &Path) -> Result<(), Failure> {
    let mut platform = Platform::new(case)?;
    let ranks = platform.schedule.ranks();
    let links = platform.network.links();
    let mut text = format!("{ranks} {}\n", links.len());
    for link in links {
        // Rust prints as many digits as tell a number from all others.
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

/// What a rank sends and waits for.
struct Messages {
    /// The step, the peer and the bytes.
    writes: Vec<(u32, u32, u64)>,
    /// The step and the peer.
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
