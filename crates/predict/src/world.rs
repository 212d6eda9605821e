//! Network in virtual time: links, routes, NICs and constants.

use weft_netsim::{Engine, Link, LinkId, LinkUsage, PathId, Tag};
use weft_topology::{Description, EndpointId, Network, Router, Routing};

use crate::cluster::Cluster;
use crate::constants::Constants;
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::faults::Faults;
use crate::outcome::{LinkReport, Outcome};
use crate::trace::{Span, Trace};
use weft_control::random::SplitMix64;

/// Tag width for workloads; the bits above hold the job number.
pub const TAG_BITS: u32 = 48;

/// Route through the network. The engine's links have latency 0, so that latencies overlap for messages that queue on a
/// connection; `latency_s` has them.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Engine path.
    pub id: PathId,
    /// Latency for the links and a message.
    pub latency_s: f64,
}

/// Network with routes and constants, shared by the workloads in a run.
pub struct World {
    pub(crate) engine: Engine,
    description: Description,
    pub(crate) network: Network,
    router: Router,
    constants: Constants,
    nics: Vec<Nic>,
    seed: u64,
    pub(crate) job: u64,
    flows: u64,
    pub(crate) events: u64,
    trace: Option<Trace>,
    pub(crate) faults: Faults,
    /// Number of connections by link, for adaptive routing.
    connections: Vec<u32>,
    route: Vec<weft_topology::LinkId>,
    links: Vec<LinkId>,
}

/// Post queue for one endpoint.
#[derive(Clone, Copy, Debug, Default)]
struct Nic {
    free_at: f64,
    users: u32,
}

impl World {
    /// Idle network for `cluster`.
    pub fn new(cluster: &Cluster) -> Result<World, Error> {
        World::with_domains(cluster, &[])
    }

    /// Network for `cluster` with private links; see [`World::with_private_links`].
    pub fn with_domains(cluster: &Cluster, private: &[Link]) -> Result<World, Error> {
        let description = cluster.description()?;
        let world = World::with_private_links(description.network()?, cluster, private)?;
        Ok(World { description, ..world })
    }

    /// `network` with the routing, constants and faults from `cluster`.
    pub fn on(network: Network, cluster: &Cluster) -> Result<World, Error> {
        World::with_private_links(network, cluster, &[])
    }

    /// The same with private links, such as NVLink domain links; only [`World::private_path`] uses them.
    pub fn with_private_links(
        network: Network,
        cluster: &Cluster,
        private: &[Link],
    ) -> Result<World, Error> {
        let constants = cluster.constants()?;
        let efficiency = constants.wire_efficiency;
        let links: Vec<Link> = network
            .links()
            .iter()
            .map(|link| Link { bandwidth: link.bandwidth * efficiency, latency: 0.0 })
            .chain(private.iter().copied())
            .collect();
        let faults = Faults::new(&network, &cluster.faults, efficiency)?;
        Ok(World {
            engine: Engine::new(&links)?,
            router: Router::new(&network, cluster.routing()?)?,
            nics: vec![Nic::default(); network.endpoints() as usize],
            description: Description::Explicit(network.clone()),
            network,
            constants,
            seed: cluster.seed,
            job: 0,
            flows: 0,
            events: 0,
            trace: None,
            faults,
            connections: Vec::new(),
            route: Vec::new(),
            links: Vec::new(),
        })
    }

    /// Records a trace with up to `most` spans.
    pub fn record(&mut self, most: usize) {
        self.trace = Some(Trace::new(most));
    }

    /// Virtual time, in seconds.
    pub fn now(&self) -> f64 {
        self.engine.now()
    }

    /// Constants.
    pub fn constants(&self) -> &Constants {
        &self.constants
    }

    /// Network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Endpoints in rank order: the description's rank map, or without one the first `count` endpoints.
    ///
    /// # Errors
    /// [`Error::Field`] for more than the map or the network has.
    pub fn places(&self, count: u32) -> Result<Vec<EndpointId>, Error> {
        let network = &self.network;
        let mut places = network.rank_map();
        if places.len() < count as usize {
            let name = network.name();
            let (field, must) = match network.has_rank_map() {
                true => (
                    "rank_map",
                    format!("at least {count} endpoints of {name}; name more, or pass fewer ranks"),
                ),
                false => ("the network's endpoints", format!("at least {count}; pass fewer ranks")),
            };
            return Err(Error::field(field, format!("of {}", places.len()), must));
        }
        places.truncate(count as usize);
        Ok(places)
    }

    /// Network description.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// SplitMix64 numbers that depend only on the cluster's seed and on `stream`.
    pub fn random(&self, stream: u64) -> SplitMix64 {
        SplitMix64::stream(self.seed, stream)
    }

    /// Route from one endpoint to another, for the lifetime of a connection; ECMP hashes `flow` in place of
    /// the connection's ports.
    pub fn path(&mut self, from: EndpointId, to: EndpointId, flow: u64) -> Result<Path, Error> {
        self.find_route(from, to, flow)?;
        let mut latency_s = self.constants.message_latency_s;
        self.links.clear();
        for link in &self.route {
            latency_s += self.network.link(*link).latency;
            self.links.push(LinkId(link.0));
        }
        Ok(Path { id: self.engine.add_path(&self.links)?, latency_s })
    }

    /// Path over private links, by their indices in the constructor's list; an empty path is a copy on one host in zero
    /// time.
    pub fn private_path(&mut self, links: &[u32], latency_s: f64) -> Result<Path, Error> {
        let first = self.network.links().len() as u32;
        let links: Vec<LinkId> = links.iter().map(|link| LinkId(first + link)).collect();
        Ok(Path { id: self.engine.add_path(&links)?, latency_s })
    }

    /// Writes the route into `self.route`. Adaptive routing takes the link with the fewest connections at each
    /// switch.
    fn find_route(&mut self, from: EndpointId, to: EndpointId, flow: u64) -> Result<(), Error> {
        if self.router.routing() != Routing::Adaptive {
            return Ok(self.router.path(from, to, flow, &mut self.route)?);
        }
        self.connections.resize(self.network.links().len(), 0);
        let load = |link: weft_topology::LinkId| f64::from(self.connections[link.0 as usize]);
        self.router.adaptive_path(from, to, load, &mut self.route)?;
        for link in &self.route {
            self.connections[link.0 as usize] += 1;
        }
        Ok(())
    }

    /// Starts a flow: after `delay` seconds, which include the latency, the bytes share the links on the path.
    pub fn start_flow(
        &mut self,
        path: Path,
        bytes: u64,
        delay: f64,
        tag: u64,
    ) -> Result<(), Error> {
        self.flows += 1;
        self.engine.start_flow(path.id, bytes, delay, Tag(self.job << TAG_BITS | tag))?;
        Ok(())
    }

    /// Starts a timer for `after` seconds.
    pub fn timer(&mut self, after: f64, tag: u64) -> Result<(), Error> {
        Ok(self.engine.timer(after, Tag(self.job << TAG_BITS | tag))?)
    }

    /// Payload bandwidth of the slowest link that leaves an endpoint, in bytes per second.
    pub fn endpoint_bandwidth(&self, endpoint: EndpointId) -> f64 {
        let links = self.network.links_from(self.network.endpoint(endpoint)).iter();
        let slowest = links.map(|link| self.network.link(*link).bandwidth);
        slowest.fold(f64::INFINITY, f64::min) * self.constants.wire_efficiency
    }

    /// Registers a workload at this endpoint's NIC; once for each workload, before the run.
    pub fn attach(&mut self, endpoint: EndpointId) {
        self.nics[endpoint.0 as usize].users += 1;
    }

    /// True if several workloads post at this NIC, and must do so in time order.
    pub fn shared(&self, endpoint: EndpointId) -> bool {
        self.nics[endpoint.0 as usize].users > 1
    }

    /// Posts a write that is ready at `at` at an endpoint's NIC, which takes `seconds`; returns the time when the post
    /// ends.
    pub fn post(&mut self, endpoint: EndpointId, at: f64, seconds: f64) -> f64 {
        let nic = &mut self.nics[endpoint.0 as usize];
        nic.free_at = nic.free_at.max(at) + seconds;
        nic.free_at
    }

    /// True if a trace is recorded.
    pub fn traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Records a span for the current workload.
    pub fn span(&mut self, span: Span) {
        let job = self.job as u32;
        if let Some(trace) = &mut self.trace {
            trace.add(Span { job, ..span });
        }
    }

    /// Number of messages so far.
    pub fn flows(&self) -> u64 {
        self.flows
    }

    /// Maximum number of concurrent flows on a link.
    pub fn max_link_load(&self) -> u32 {
        let links = 0..self.network.links().len() as u32;
        links.map(|link| self.engine.link_usage(LinkId(link)).most_flows).max().unwrap_or(0)
    }

    /// Run outcome, with the `most` busiest links.
    pub fn outcome(&self, time_s: f64, cpu: CpuTime, most: usize) -> Outcome {
        let network = &self.network;
        let usage = |number: u32| self.engine.link_usage(LinkId(number));
        let mut used: Vec<(u32, LinkUsage)> = (0..network.links().len() as u32)
            .map(|number| (number, usage(number)))
            .filter(|(_, usage)| usage.most_flows > 0)
            .collect();
        let max_link_load = used.iter().map(|(_, usage)| usage.most_flows).max().unwrap_or(0);
        // Stable: equally busy links keep network order.
        used.sort_by(|(_, a), (_, b)| b.busy.total_cmp(&a.busy));
        used.truncate(most);
        let report = |(number, usage): (u32, LinkUsage)| {
            let link = network.link(weft_topology::LinkId(number));
            let could = link.bandwidth * self.constants.wire_efficiency * time_s;
            LinkReport {
                from: network.node_name(link.from).to_string(),
                to: network.node_name(link.to).to_string(),
                bytes: usage.bytes,
                busy_s: usage.busy,
                utilisation: if could > 0.0 { usage.bytes / could } else { 0.0 },
                max_load: usage.most_flows,
            }
        };
        let links = used.into_iter().map(report).collect();
        Outcome {
            time_s,
            max_link_load,
            cpu_s: cpu.seconds(),
            constants: self.constants.clone(),
            flows: self.flows,
            links,
            results: serde_json::Value::Null,
            warnings: network.warnings(),
            trace: self.trace.as_ref().map(Trace::to_json),
        }
    }
}
