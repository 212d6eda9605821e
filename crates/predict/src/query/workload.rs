//! Query workload: state machine, and results.

use std::collections::VecDeque;

use serde_json::{Value, json};
use weft_topology::EndpointId;

use super::job::{Arrivals, Policy, QueryJob};
use crate::error::Error;
use crate::statistics::Summary;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::{Path, World};
use weft_control::random::SplitMix64;

/// Random stream for the arrivals.
const ARRIVALS: u64 = 0x0071_7565_7279;

/// All queries between front ends and accelerators.
pub struct QueryWorkload {
    job: QueryJob,
    queries: Vec<Query>,
    /// Indexed by front end and accelerator.
    connections: Vec<QueryConnection>,
    /// Next accelerator for each front end, modulo the accelerator count.
    last: Vec<u32>,
    free_at: Vec<f64>,
    random: SplitMix64,
    responses: u64,
    finished: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Query {
    front_end: u32,
    accelerator: u32,
    arrived_at: f64,
    sent_at: f64,
    reached_at: f64,
    responded_at: f64,
}

/// Connection from a front end to an accelerator.
#[derive(Clone, Debug)]
struct QueryConnection {
    out: Path,
    back: Path,
    in_flight: u32,
    waiting: VecDeque<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryEvent {
    Arrived,
    Reached,
    Served,
    Responded,
}

const EVENTS: [QueryEvent; 4] =
    [QueryEvent::Arrived, QueryEvent::Reached, QueryEvent::Served, QueryEvent::Responded];
const QUERY_BITS: u32 = 32;

impl QueryWorkload {
    /// Draws the arrivals and routes all paths.
    pub fn new(world: &mut World, job: &QueryJob) -> Result<QueryWorkload, Error> {
        job.check()?;
        let endpoints = world.network().endpoints();
        let last = job.first_endpoint.saturating_add(job.front_ends + job.accelerators);
        if last > endpoints {
            let must = format!("at least {last}, one for each front end and accelerator");
            return Err(Error::field("the network's endpoints", endpoints, must));
        }
        for endpoint in job.first_endpoint..last {
            world.attach(EndpointId(endpoint));
        }
        let mut random = world.random(ARRIVALS);
        let mut at = 0.0;
        let queries = (0..job.queries).map(|number| {
            let gap = match job.arrivals {
                Arrivals::Poisson => random.exponential(),
                Arrivals::Uniform => f64::from(u8::from(number > 0)),
                Arrivals::Offline => 0.0,
            };
            at += gap / job.rate_per_s.unwrap_or(1.0);
            Query {
                front_end: (number % u64::from(job.front_ends)) as u32,
                accelerator: 0,
                arrived_at: at,
                sent_at: 0.0,
                reached_at: 0.0,
                responded_at: 0.0,
            }
        });
        let queries = queries.collect();
        let mut connections = Vec::new();
        for front_end in 0..job.front_ends {
            for accelerator in 0..job.accelerators {
                let from = EndpointId(job.first_endpoint + front_end);
                let to = EndpointId(job.first_endpoint + job.front_ends + accelerator);
                let flow = u64::from(from.0) << 32 | u64::from(to.0);
                let (out, back) = (world.path(from, to, flow)?, world.path(to, from, flow)?);
                let waiting = VecDeque::new();
                connections.push(QueryConnection { out, back, in_flight: 0, waiting });
            }
        }
        Ok(QueryWorkload {
            queries,
            connections,
            last: (0..job.front_ends).collect(),
            free_at: vec![0.0; job.accelerators as usize],
            random,
            responses: 0,
            finished: None,
            job: job.clone(),
        })
    }

    fn tag(kind: QueryEvent, query: u32) -> u64 {
        u64::from(kind as u8) << QUERY_BITS | u64::from(query)
    }

    fn connection(&mut self, front_end: u32, accelerator: u32) -> &mut QueryConnection {
        &mut self.connections[(front_end * self.job.accelerators + accelerator) as usize]
    }

    fn choose(&mut self, front_end: u32) -> u32 {
        let accelerators = self.job.accelerators;
        let next = self.last[front_end as usize] % accelerators;
        let chosen = match self.job.policy {
            Policy::RoundRobin => next,
            Policy::Random => (self.random.bits() % u64::from(accelerators)) as u32,
            Policy::LeastLoaded => {
                let outstanding = |accelerator: &u32| {
                    let at = front_end * accelerators + accelerator;
                    let connection = &self.connections[at as usize];
                    connection.in_flight as usize + connection.waiting.len()
                };
                let turn = (0..accelerators).map(|step| (next + step) % accelerators);
                turn.min_by_key(outstanding).unwrap_or(next)
            }
        };
        self.last[front_end as usize] = (chosen + 1) % accelerators;
        chosen
    }

    fn arrived(&mut self, world: &mut World, query: u32) -> Result<(), Error> {
        if u64::from(query) + 1 < self.job.queries {
            let next = &self.queries[query as usize + 1];
            let after = (next.arrived_at - world.now()).max(0.0);
            world.timer(after, QueryWorkload::tag(QueryEvent::Arrived, query + 1))?;
        }
        let front_end = self.queries[query as usize].front_end;
        let accelerator = self.choose(front_end);
        self.queries[query as usize].accelerator = accelerator;
        let slots = self.job.slots;
        let connection = self.connection(front_end, accelerator);
        if connection.in_flight == slots {
            connection.waiting.push_back(query);
            return Ok(());
        }
        self.send(world, query)
    }

    fn send(&mut self, world: &mut World, query: u32) -> Result<(), Error> {
        let now = world.now();
        let Query { front_end, accelerator, .. } = self.queries[query as usize];
        self.queries[query as usize].sent_at = now;
        let connection = self.connection(front_end, accelerator);
        connection.in_flight += 1;
        let path = connection.out;
        let nic = EndpointId(self.job.first_endpoint + front_end);
        let posted = world.post(nic, now, world.constants().post_s);
        let delay = posted - now + path.latency_s;
        world.start_flow(
            path,
            self.job.query_bytes,
            delay,
            QueryWorkload::tag(QueryEvent::Reached, query),
        )
    }

    fn reached(&mut self, world: &mut World, query: u32) -> Result<(), Error> {
        let now = world.now();
        self.queries[query as usize].reached_at = now;
        let accelerator = self.queries[query as usize].accelerator;
        let free_at = &mut self.free_at[accelerator as usize];
        *free_at = free_at.max(now + world.constants().wait_s) + self.job.service_s;
        world.timer(*free_at - now, QueryWorkload::tag(QueryEvent::Served, query))
    }

    fn served(&mut self, world: &mut World, query: u32) -> Result<(), Error> {
        let now = world.now();
        let Query { front_end, accelerator, reached_at, .. } = self.queries[query as usize];
        if world.traced() {
            let name = format!("query {query}");
            let rank = self.job.front_ends + accelerator;
            let begin_s = (now - self.job.service_s).max(reached_at);
            let span = Span { job: 0, rank, row: "service", name, begin_s, end_s: now, bytes: 0 };
            world.span(span);
        }
        let path = self.connection(front_end, accelerator).back;
        let nic = EndpointId(self.job.first_endpoint + self.job.front_ends + accelerator);
        let posted = world.post(nic, now, world.constants().post_s);
        let delay = posted - now + path.latency_s;
        let tag = QueryWorkload::tag(QueryEvent::Responded, query);
        world.start_flow(path, self.job.answer_bytes, delay, tag)
    }

    fn responded(&mut self, world: &mut World, query: u32) -> Result<(), Error> {
        let Query { front_end, accelerator, .. } = self.queries[query as usize];
        self.queries[query as usize].responded_at = world.now();
        self.responses += 1;
        if self.responses == self.job.queries {
            self.finished = Some(world.now());
        }
        let connection = self.connection(front_end, accelerator);
        connection.in_flight -= 1;
        match connection.waiting.pop_front() {
            Some(waiting) => self.send(world, waiting),
            None => Ok(()),
        }
    }

    /// End and latencies for the queries with a network that has zero latency and infinite
    /// bandwidth.
    fn without_network(&self) -> (f64, Vec<f64>) {
        let mut free_at = vec![0.0f64; self.free_at.len()];
        let mut last = 0.0f64;
        let latencies = self.queries.iter().map(|query| {
            let free = &mut free_at[query.accelerator as usize];
            *free = free.max(query.arrived_at) + self.job.service_s;
            last = last.max(*free);
            *free - query.arrived_at
        });
        let latencies = latencies.collect();
        (last, latencies)
    }

    /// Latencies and throughput, with and without the network.
    pub fn report(&self) -> Value {
        let time = |part: fn(&Query) -> f64| {
            Summary::of(&self.queries.iter().map(part).collect::<Vec<f64>>())
        };
        let end_s = self.finished.unwrap_or(0.0);
        let (local_s, local) = self.without_network();
        let count = self.job.queries as f64;
        let per_s = |seconds: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let (throughput, local_throughput) = (per_s(end_s), per_s(local_s));
        let loss = if local_throughput > 0.0 { 1.0 - throughput / local_throughput } else { 0.0 };
        json!({
            "latency": time(|query| query.responded_at - query.arrived_at),
            "latency_without_network": Summary::of(&local),
            "waiting_for_a_slot": time(|query| query.sent_at - query.arrived_at),
            "on_the_way": time(|query| query.reached_at - query.sent_at),
            "queries": self.job.queries,
            "throughput_per_s": throughput,
            "throughput_without_network_per_s": local_throughput,
            "throughput_loss": loss,
            "offered_per_s": self.job.rate_per_s,
            "service_bound_per_s": if self.job.service_s > 0.0 {
                Some(f64::from(self.job.accelerators) / self.job.service_s)
            } else {
                None
            },
        })
    }
}

impl Workload for QueryWorkload {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        world.timer(self.queries[0].arrived_at, QueryWorkload::tag(QueryEvent::Arrived, 0))
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        let query = tag as u32;
        match EVENTS[(tag >> QUERY_BITS) as usize] {
            QueryEvent::Arrived => self.arrived(world, query),
            QueryEvent::Reached => self.reached(world, query),
            QueryEvent::Served => self.served(world, query),
            QueryEvent::Responded => self.responded(world, query),
        }
    }

    fn finished(&self) -> Option<f64> {
        self.finished
    }

    fn deadlock(&self) -> Error {
        let outstanding = self.queries.iter().position(|query| query.responded_at == 0.0);
        let front_end = outstanding.map_or(0, |at| self.queries[at].front_end);
        Error::Blocked { what: "response to a query", rank: front_end, round: 0 }
    }

    fn flow_name(&self, tag: u64) -> String {
        let query = tag as u32 as usize;
        let Query { front_end, accelerator, .. } = self.queries[query];
        format!("query {query} of front end {front_end} at accelerator {accelerator}")
    }

    fn progress(&self) -> f64 {
        self.responses as f64 / self.job.queries as f64
    }
}
