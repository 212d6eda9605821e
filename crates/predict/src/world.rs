//! One network, its routes and its constants in one virtual time.

use weft_netsim::{Engine, Event, Link, LinkId, LinkUsage, PathId, Tag};
use weft_topology::{Description, EndpointId, Network, Router, Routing};

use crate::constants::Constants;
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::faults::Faults;
use crate::outcome::{LinkReport, Outcome};
use crate::random::Random;
use crate::run::Progress;
use crate::spec::Cluster;
use crate::trace::{Span, Trace};
use crate::workload::{TAG_BITS, Workload};

/// The number of the job under which faults happen.
const FAULTS: u64 = (1 << (64 - TAG_BITS)) - 1;
/// How many events pass between two reports of progress.
const REPORT_EVENTS: u64 = 1 << 16;
/// The same in instants: where thousands of flows share links unevenly, one takes milliseconds.
const REPORT_INSTANTS: u32 = 512;

/// A route through the network. The engine's links have no latency of their own, so that whoever
/// queues messages on a connection can let their latencies overlap; it is `latency_s` instead.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The engine's number of it.
    pub id: PathId,
    /// The sum of its links' latencies, and of a message's.
    pub latency_s: f64,
}

/// What runs on a world sees of it.
pub struct World {
    engine: Engine,
    description: Description,
    network: Network,
    router: Router,
    constants: Constants,
    nics: Vec<Nic>,
    seed: u64,
    job: u64,
    flows: u64,
    events: u64,
    trace: Option<Trace>,
    faults: Faults,
    /// How many connections go over each link, where routing is adaptive.
    connections: Vec<u32>,
    route: Vec<weft_topology::LinkId>,
    links: Vec<LinkId>,
}

/// What posts the writes of one endpoint.
#[derive(Clone, Copy, Debug, Default)]
struct Nic {
    free_at: f64,
    users: u32,
}

impl World {
    /// The cluster's network, empty.
    pub fn new(cluster: &Cluster) -> Result<World, Error> {
        World::with_domains(cluster, &[])
    }

    /// The cluster's network and links beside it; see [`World::with_private_links`].
    pub fn with_domains(cluster: &Cluster, private: &[Link]) -> Result<World, Error> {
        let description = cluster.description()?;
        let world = World::with_private_links(description.network()?, cluster, private)?;
        Ok(World { description, ..world })
    }

    /// A network made by hand, with all else as the cluster says.
    pub fn on(network: Network, cluster: &Cluster) -> Result<World, Error> {
        World::with_private_links(network, cluster, &[])
    }

    /// The same with links beside the network's, which only [`World::private_path`] uses: those of NVLink
    /// domains, say.
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

    /// Keeps up to `most` spans of what happens.
    pub fn record(&mut self, most: usize) {
        self.trace = Some(Trace::new(most));
    }

    /// The virtual time, in seconds.
    pub fn now(&self) -> f64 {
        self.engine.now()
    }

    /// What things cost.
    pub fn constants(&self) -> &Constants {
        &self.constants
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// What the network was described as.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Random numbers that depend on the cluster's seed and on `stream` alone.
    pub fn random(&self, stream: u64) -> Random {
        Random::new(self.seed, stream)
    }

    /// The route from one endpoint to another; `flow` stands for the ports of the connection, which ECMP
    /// hashes. Callers keep it as long as the connection lives.
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

    /// A path over private links, by their places in the list that the world was made with; none is a copy
    /// on one host, which takes no time.
    pub fn private_path(&mut self, links: &[u32], latency_s: f64) -> Result<Path, Error> {
        let first = self.network.links().len() as u32;
        let links: Vec<LinkId> = links.iter().map(|link| LinkId(first + link)).collect();
        Ok(Path { id: self.engine.add_path(&links)?, latency_s })
    }

    /// Puts the route into `self.route`. Where routing is adaptive, every switch takes the link over which the
    /// fewest connections go so far.
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

    /// Starts a flow: after `delay` seconds, to which a message's latency belongs, its bytes share the
    /// links of the path.
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

    /// An event in `after` seconds.
    pub fn timer(&mut self, after: f64, tag: u64) -> Result<(), Error> {
        Ok(self.engine.timer(after, Tag(self.job << TAG_BITS | tag))?)
    }

    /// The bandwidth of the slowest link that leaves an endpoint, in payload bytes per second.
    pub fn endpoint_bandwidth(&self, endpoint: EndpointId) -> f64 {
        let links = self.network.links_from(self.network.endpoint(endpoint)).iter();
        let slowest = links.map(|link| self.network.link(*link).bandwidth);
        slowest.fold(f64::INFINITY, f64::min) * self.constants.wire_efficiency
    }

    /// Says that a workload posts at this endpoint's NIC. Each does so once, before anything runs.
    pub fn attach(&mut self, endpoint: EndpointId) {
        self.nics[endpoint.0 as usize].users += 1;
    }

    /// Whether several workloads post at this NIC, so that they must come to it in the order of time.
    pub fn shared(&self, endpoint: EndpointId) -> bool {
        self.nics[endpoint.0 as usize].users > 1
    }

    /// Posts at an endpoint's NIC a write that is ready at `at`, which takes it `seconds`; gives the time at
    /// which it is posted.
    pub fn post(&mut self, endpoint: EndpointId, at: f64, seconds: f64) -> f64 {
        let nic = &mut self.nics[endpoint.0 as usize];
        nic.free_at = nic.free_at.max(at) + seconds;
        nic.free_at
    }

    /// Whether spans are wanted.
    pub fn traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Records a span of the workload that runs.
    pub fn span(&mut self, span: Span) {
        let job = self.job as u32;
        if let Some(trace) = &mut self.trace {
            trace.add(Span { job, ..span });
        }
    }

    /// Runs workloads until all are finished; gives the virtual time at which the last one was.
    pub fn run(
        &mut self,
        workloads: &mut [&mut dyn Workload],
        progress: &mut Progress<'_>,
    ) -> Result<f64, Error> {
        if !progress(0.0, "simulating") {
            return Err(Error::Cancelled { time_s: 0.0 });
        }
        self.job = FAULTS;
        for (at_s, tag) in self.faults.times() {
            self.engine.timer(at_s, Tag(FAULTS << TAG_BITS | tag))?;
        }
        for (job, workload) in workloads.iter_mut().enumerate() {
            self.job = job as u64;
            workload.start(self)?;
        }
        let mut events: Vec<Event> = Vec::new();
        let (mut reported, mut instants) = (0, 0);
        loop {
            if workloads.iter().all(|workload| workload.finished().is_some()) {
                break;
            }
            events.clear();
            match self.engine.next(&mut events) {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let stuck = workloads.iter().find(|workload| workload.finished().is_none());
                    return Err(stuck.map_or(Error::Nothing, |workload| workload.stuck()));
                }
                Err(weft_netsim::Error::Stalled { tag, link, flows, time }) => {
                    let job = (tag.0 >> TAG_BITS) as usize;
                    let flow = workloads[job].describe(tag.0 & ((1 << TAG_BITS) - 1));
                    let link = self.network.link_name(weft_topology::LinkId(link.0));
                    return Err(Error::Stalled { flow, link, flows, time });
                }
                Err(error) => return Err(error.into()),
            }
            self.events += events.len() as u64;
            for event in &events {
                self.job = event.tag.0 >> TAG_BITS;
                let tag = event.tag.0 & ((1 << TAG_BITS) - 1);
                if self.job == FAULTS {
                    self.faults.apply(tag, &mut self.engine)?;
                } else {
                    workloads[self.job as usize].event(self, tag)?;
                }
            }
            instants += 1;
            if self.events - reported >= REPORT_EVENTS || instants == REPORT_INSTANTS {
                (reported, instants) = (self.events, 0);
                let done: f64 = workloads.iter().map(|workload| workload.progress()).sum();
                if !progress(done / workloads.len() as f64, "simulating") {
                    return Err(Error::Cancelled { time_s: self.now() });
                }
            }
        }
        Ok(workloads.iter().filter_map(|workload| workload.finished()).fold(0.0, f64::max))
    }

    /// Messages sent so far.
    pub fn flows(&self) -> u64 {
        self.flows
    }

    /// The most flows that one link carried at one time.
    pub fn max_link_load(&self) -> u32 {
        let links = 0..self.network.links().len() as u32;
        links.map(|link| self.engine.link_usage(LinkId(link)).most_flows).max().unwrap_or(0)
    }

    /// What the run came to, with the `most` busiest links.
    pub fn outcome(&self, time_s: f64, cpu: CpuTime, most: usize) -> Outcome {
        let network = &self.network;
        let usage = |number: u32| self.engine.link_usage(LinkId(number));
        let mut used: Vec<(u32, LinkUsage)> = (0..network.links().len() as u32)
            .map(|number| (number, usage(number)))
            .filter(|(_, usage)| usage.most_flows > 0)
            .collect();
        let max_link_load = used.iter().map(|(_, usage)| usage.most_flows).max().unwrap_or(0);
        // A stable sort: links that are equally busy stay in the order of the network.
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
            trace: self.trace.as_ref().map(Trace::to_json),
        }
    }
}
