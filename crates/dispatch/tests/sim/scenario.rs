//! A seed's world: front ends, nodes, queries, faults, and how it must end.

use crate::echo::{Device, Echo};
use crate::program::{Plan, Program};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weft_dispatch::wire::{DataType, Dimension, Tensor};
use weft_dispatch::{
    Accelerator, AcceleratorConfig, Agreement, Buckets, Connection, LedgerConfig, Policy, Role,
    Schema,
};
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig, run_groups};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Engine, EngineConfig, Event, PartRule, PoisonFlag, Rank, RegionKey, Time};
use weft_scenarios::{InjectedFault, pick, settle, shuffled_ranks, world_config};

#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    /// Ranks in the world: front ends, then nodes.
    pub front_ends: u32,
    pub nodes: u32,
    slots: u32,
    checksum: bool,
    schema: Schema,
    ledger: LedgerConfig,
    accelerator: AcceleratorConfig,
    /// Batches on a node at a time; 0: it runs each within a poll.
    room: usize,
    plan: Plan,
    /// Times at which nodes join, and drain; by node.
    joins: Vec<Time>,
    drains: Vec<Option<Time>>,
    faults: Faults,
    fault: InjectedFault,
    /// Rank that leaves in order, without a drain, and when.
    departs: Option<(Rank, Time)>,
    parts: PartRule,
}

/// Latest time for a fault, a join or a drain.
const SPAN: u64 = 400_000;
/// Deadline for queries that must not expire: when the run ends.
const LASTING: Time = Time(100_000_000);
/// Step interval for a front end with queries, in nanoseconds.
const TICK: u64 = 5_000;
/// Step bound for a run: answers with many tokens, each confirmed, take over 100,000.
const MOST_STEPS: u64 = 1_000_000;
const LOSS_GRACE: Duration = Duration::from_micros(200);
const MOST_QUERIES: u64 = if cfg!(miri) { 6 } else { 60 };

fn tensors(random: &mut SplitMix64, least: u64) -> Vec<Tensor> {
    let tensor = |index: u64, random: &mut SplitMix64| {
        let dtype = pick(random, &[DataType::U8, DataType::F32]);
        let size = random.below(40) + if index == 0 { least } else { 0 };
        match dtype {
            DataType::U8 if random.chance(0.6) => Tensor::bytes("bytes", size),
            dtype => Tensor::new("fixed", dtype, &[Dimension::Fixed(size)]),
        }
    };
    (0..1 + random.below(3)).map(|index| tensor(index, random)).collect()
}

fn parts(random: &mut SplitMix64) -> PartRule {
    if random.chance(0.4) {
        return PartRule::WHOLE;
    }
    PartRule {
        max_part_bytes: 16 + random.below(200),
        max_pages_per_part: pick(random, &[1, 2, u32::MAX]),
        stripes: pick(random, &[1, 1, 2]),
        stripe_from: 65 + random.below(300),
    }
}

/// Buckets by the first input with a variable dimension.
fn buckets(random: &mut SplitMix64, schema: &Schema) -> Option<Buckets> {
    let input = schema.inputs.iter().position(|tensor| tensor.unit().is_some())?;
    let bounds: BTreeSet<u64> = (0..1 + random.below(3)).map(|_| random.below(60)).collect();
    let bounds: Vec<u64> = bounds.into_iter().collect();
    random.chance(0.5).then(|| Buckets::new(input, &bounds).unwrap())
}

impl Scenario {
    fn of(seed: u64, random: &mut SplitMix64, streams: bool) -> Scenario {
        let (front_ends, nodes) = (1 + random.below(2) as u32, 1 + random.below(4) as u32);
        let slots = 1 + random.below(8) as u32;
        let joins = (0..nodes).map(|node| match node > 0 && random.chance(0.4) {
            true => Time(random.below(SPAN)),
            false => Time(0),
        });
        let joins: Vec<Time> = joins.collect();
        let drains = (0..nodes).map(|node| {
            // The first node stays, so that queries have a node.
            (node > 0 && random.chance(0.3)).then(|| Time(random.below(SPAN)))
        });
        let drains = drains.collect();
        let mut schema = Schema { inputs: tensors(random, 8), outputs: tensors(random, 0) };
        if random.chance(if streams { 1.0 } else { 0.4 }) {
            let shape =
                [Dimension::Tokens(1 + random.below(20)), Dimension::Fixed(1 + random.below(3))];
            let place = random.below(schema.outputs.len() as u64 + 1) as usize;
            schema.outputs.insert(place, Tensor::new("tokens", DataType::I32, &shape));
        }
        Scenario {
            seed,
            front_ends,
            nodes,
            slots,
            checksum: random.chance(0.5),
            room: pick(random, &[0, 1, 2, 4]),
            ledger: LedgerConfig {
                queries: 1 + random.below(40) as u32,
                nodes,
                slots,
                max_quarantined: 1 + random.below(8) as u32,
                max_sends: 1 + random.below(3) as u32,
                policy: pick(
                    random,
                    &[Policy::RoundRobin, Policy::LeastInFlight, Policy::LatencyAware],
                ),
            },
            accelerator: AcceleratorConfig {
                front_ends,
                max_batch: 1 + random.below(6) as u32,
                window: Duration::from_nanos(random.below(30_000)),
                buckets: buckets(random, &schema),
                by_slot: random.chance(0.5),
            },
            schema,
            plan: Plan {
                queries: 1 + random.below(MOST_QUERIES),
                short_deadlines: pick(random, &[0.0, 0.1, 0.5]),
                cancels: pick(random, &[0.0, 0.05, 0.3]),
                cancel_at: None,
                lasting: LASTING,
            },
            joins,
            drains,
            faults: if random.chance(0.1) { Faults::default() } else { Faults::rough() },
            fault: InjectedFault::None,
            departs: None,
            parts: parts(random),
        }
    }

    /// Anything that may happen.
    pub fn random(seed: u64) -> Scenario {
        Scenario::any(seed, false)
    }

    /// Anything that may happen, with answers in parts.
    pub fn streaming(seed: u64) -> Scenario {
        let mut scenario = Scenario::any(seed, true);
        scenario.room = scenario.room.max(1);
        scenario
    }

    fn any(seed: u64, streams: bool) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let mut scenario = Scenario::of(seed, &mut random, streams);
        let ends = shuffled_ranks(&mut random, scenario.front_ends + scenario.nodes);
        let fault = InjectedFault::draw(&mut random, 8, &ends, 0.005);
        let at = Time(random.below(SPAN));
        // The first node stays, so that queries have a node.
        if random.chance(0.1) && ends[1] != Rank(scenario.front_ends) {
            scenario.departs = Some((ends[1], Time(random.below(SPAN))));
        }
        scenario.with_fault(fault, at, &mut random)
    }

    /// Joins, drains and delays, without losses.
    pub fn well(seed: u64) -> Scenario {
        Scenario::of(seed, &mut SplitMix64::new(seed), false)
    }

    /// Two nodes and few queries.
    pub fn small(seed: u64) -> Scenario {
        let mut scenario = Scenario::well(seed);
        (scenario.front_ends, scenario.nodes) = (1, 2);
        (scenario.ledger.nodes, scenario.ledger.queries) = (2, 8);
        scenario.plan.queries = 8;
        (scenario.joins, scenario.drains) = (vec![Time(0); 2], vec![None; 2]);
        scenario
    }

    /// One query on one node, cancelled at this time.
    pub fn one_query(seed: u64, cancel_at: Option<Time>) -> Scenario {
        let mut scenario = Scenario::small(seed);
        (scenario.nodes, scenario.slots) = (1, 1);
        (scenario.joins, scenario.drains) = (vec![Time(0)], vec![None]);
        scenario.plan =
            Plan { queries: 3, short_deadlines: 0.0, cancels: 0.0, cancel_at, lasting: LASTING };
        scenario
    }

    /// Adds a fault at a time. Until then the run is the same.
    pub fn with_fault(
        mut self,
        fault: InjectedFault,
        at: Time,
        random: &mut SplitMix64,
    ) -> Scenario {
        self.fault = fault;
        fault.add_to(&mut self.faults, self.front_ends + self.nodes, at, random);
        self
    }

    /// Lets a rank leave at a time.
    pub fn with_departure(mut self, rank: Rank, at: Time) -> Scenario {
        self.departs = Some((rank, at));
        self
    }

    fn departs(&self, rank: Rank, now: Time) -> bool {
        self.departs.is_some_and(|(departing, at)| departing == rank && at <= now)
    }

    fn agreement(&self) -> Agreement {
        Agreement {
            slots: self.slots,
            checksum: self.checksum,
            name: "node".into(),
            schema: self.schema.clone(),
        }
    }
}

/// Connection between a front end and a node: a group of two.
struct Edge {
    front_end: usize,
    node: usize,
    /// Index at the node.
    index: usize,
    /// The front end's connection and key, until the node joins.
    pending: Option<(Connection, RegionKey)>,
    /// The front end has removed the node.
    left: bool,
    /// Both ends' flags, which report departures.
    flags: [Arc<PoisonFlag>; 2],
}

fn connect(
    cluster: &mut Cluster,
    agreement: Agreement,
) -> Result<[Connection; 2], weft_dispatch::Error> {
    let [front, node] = [Rank(0), Rank(1)];
    let mut ends = [
        Connection::allocate(cluster.engine(front), node, Role::FrontEnd, agreement.clone())?,
        Connection::allocate(cluster.engine(node), front, Role::Accelerator, agreement)?,
    ];
    let grants = [ends[0].grant(cluster.engine(front))?, ends[1].grant(cluster.engine(node))?];
    ends[0].link(cluster.engine(front), &grants[1], Time::MAX)?;
    ends[1].link(cluster.engine(node), &grants[0], Time::MAX)?;
    Ok(ends)
}

struct Run<'a> {
    scenario: &'a Scenario,
    programs: Vec<Program>,
    nodes: Vec<Accelerator<Device>>,
    edges: Vec<Edge>,
    moments: Vec<Time>,
    wakes: Wakes,
}

/// Times at which the world wakes its ranks, each scheduled once.
struct Wakes {
    world: World,
    scheduled: BTreeSet<Time>,
}

impl Wakes {
    fn wake_at(&mut self, at: Time) {
        if self.scheduled.insert(at) {
            self.world.wake_at(at);
        }
    }
}

/// Runs a scenario and returns each event's time, or the failure.
pub fn run(scenario: &Scenario) -> Result<Vec<Time>, String> {
    run_counted(scenario).map(|(moments, _)| moments)
}

/// [`run`], with the number of further answer parts, and of streams that began anew.
pub fn run_counted(scenario: &Scenario) -> Result<(Vec<Time>, [u64; 2]), String> {
    let Scenario { seed, front_ends, nodes, parts, .. } = *scenario;
    let config = world_config(front_ends + nodes, seed, 2000, parts, &scenario.faults);
    // The answer orders the uses of a slot, in place of a credit.
    let world = World::new(WorldConfig { reuse: true, ..config });
    let text = |error: weft_dispatch::Error| error.to_string();
    let programs = (0..scenario.front_ends).map(|index| {
        let seed = scenario.seed ^ u64::from(index) << 40;
        let mut program =
            Program::new(index.into(), scenario.ledger, &scenario.schema, scenario.plan, seed);
        program.has_losses = scenario.fault.is_loss();
        program.has_departures = scenario.departs.is_some();
        program
    });
    let nodes = (0..scenario.nodes).map(|_| {
        let schema = scenario.schema.clone();
        let buckets = scenario.accelerator.buckets;
        let (executed, largest, appended) = Default::default();
        let echo = Echo { schema: schema.clone(), buckets, executed, largest, appended };
        let device = Device::new(echo, scenario.room, scenario.seed);
        Accelerator::new(scenario.accelerator, schema, device)
    });
    let mut run = Run {
        scenario,
        programs: programs.collect(),
        nodes: nodes.collect::<Result<_, _>>().map_err(text)?,
        edges: Vec::new(),
        moments: Vec::new(),
        wakes: Wakes { world: world.clone(), scheduled: BTreeSet::new() },
    };
    let mut groups = Vec::new();
    for front_end in 0..scenario.front_ends as usize {
        run.programs[front_end].nodes = vec![None; scenario.nodes as usize];
        for node in 0..scenario.nodes as usize {
            let hosts = [Rank(front_end as u32), Rank(scenario.front_ends + node as u32)];
            let config = EngineConfig {
                loss_grace: LOSS_GRACE,
                ..Connection::streaming_engine_config(scenario.slots)
            };
            let mut group = Cluster::among(&world, &hosts, config).map_err(|e| e.to_string())?;
            group.set_max_steps(MOST_STEPS);
            let [front, accelerator] = connect(&mut group, scenario.agreement()).map_err(text)?;
            let memory = run.programs[front_end].memory().clone();
            let key = group.engine(Rank(0)).register(memory).map_err(|e| e.to_string())?.key();
            let index = run.nodes[node].join(accelerator).map_err(text)?;
            let pending = Some((front, key));
            let flags = [0, 1].map(|rank| group.engine(Rank(rank)).poison_flag().clone());
            run.edges.push(Edge { front_end, node, index, pending, left: false, flags });
            groups.push(group);
        }
    }
    let starts = scenario.joins.iter().chain(scenario.drains.iter().flatten());
    let starts = starts.chain(scenario.departs.iter().map(|(_, at)| at));
    starts.chain(&scenario.plan.cancel_at).for_each(|at| world.wake_at(*at));
    let outcomes = run_groups(&mut groups, |group, engine, now, events, requests| {
        run.step(group, engine, now, events, requests)
    });
    let outcomes = outcomes.map_err(|hang| format!("{hang}\n{}", run.waits_for()))?;
    run.check(&outcomes)?;
    groups.iter_mut().try_for_each(settle)?;
    let sum = |of: fn(&Program) -> u64| run.programs.iter().map(of).sum();
    let counts = [sum(|program| program.streamed), sum(|program| program.restarted)];
    Ok((run.moments, counts))
}

/// Driver or fabric error.
#[derive(Debug)]
pub enum Wrong {
    Fabric(weft_fabric::Error),
    Other(String),
}

impl From<weft_fabric::Error> for Wrong {
    fn from(error: weft_fabric::Error) -> Wrong {
        Wrong::Fabric(error)
    }
}

impl From<String> for Wrong {
    fn from(text: String) -> Wrong {
        Wrong::Other(text)
    }
}

impl From<weft_dispatch::Error> for Wrong {
    fn from(error: weft_dispatch::Error) -> Wrong {
        Wrong::Other(error.to_string())
    }
}

impl Run<'_> {
    fn step(
        &mut self,
        group: usize,
        engine: &Engine,
        now: Time,
        events: &[Event],
        requests: &mut weft_fabric::Requests,
    ) -> Result<bool, Wrong> {
        if self.moments.last() != Some(&now) {
            self.moments.push(now);
        }
        let Edge { node, front_end, flags, .. } = &self.edges[group];
        let host = [Rank(*front_end as u32), Rank(self.scenario.front_ends + *node as u32)];
        let (here, there) = (engine.rank(), Rank(1 - engine.rank().0));
        if self.scenario.departs(host[here.index()], now) {
            flags[there.index()].peer_left(here);
            return Ok(true);
        }
        if engine.rank() == Rank(0) {
            return self.step_front_end(group, now, events, requests);
        }
        let Edge { node, index, front_end, left, .. } = self.edges[group];
        let has_left = self.edges[group].flags[1].has_left(Rank(0));
        if self.scenario.drains[node].is_some_and(|at| at <= now) {
            self.nodes[node].drain();
        }
        self.nodes[node].poll(now, index, events, requests)?;
        if let Some(at) = self.nodes[node].next_deadline() {
            self.wakes.wake_at(at);
        }
        if has_left && self.nodes[node].is_connected(index) {
            return Err(Wrong::Other("a front end that has left is still connected".into()));
        }
        Ok(left || has_left || self.programs[front_end].is_over())
    }

    fn step_front_end(
        &mut self,
        group: usize,
        now: Time,
        events: &[Event],
        requests: &mut weft_fabric::Requests,
    ) -> Result<bool, Wrong> {
        let edge = &mut self.edges[group];
        let program = &mut self.programs[edge.front_end];
        if now >= self.scenario.joins[edge.node]
            && let Some((connection, key)) = edge.pending.take()
        {
            program.nodes[edge.node] = Some(program.front_end.join(connection, &[key])?);
        }
        program.step(now)?;
        let Some(node) = program.nodes[edge.node] else {
            return Ok(edge.left || program.is_over());
        };
        program.front_end.poll(now, node, events, requests)?;
        let mut is_lost = events.iter().any(|event| matches!(event, Event::Poisoned(_)));
        // Polling the engine would report it; here an engine that was poisoned in a step is polled no more.
        if let Some(cause) = edge.flags[0].get().filter(|_| !is_lost) {
            is_lost = true;
            program.front_end.poll(now, node, &[Event::Poisoned(cause.clone())], requests)?;
        }
        program.take_reports()?;
        if is_lost {
            program.nodes[edge.node] = None;
            return Ok(false);
        }
        if let Some(at) = program.front_end.next_deadline().filter(|at| *at < program.lasting) {
            self.wakes.wake_at(at);
        }
        if !program.is_over() {
            // Then it waits until a departure's grace period ends, if for anything.
            let tick = if now.0 < 4 * SPAN { TICK } else { 200 * TICK };
            self.wakes.wake_at(Time((now.0 / tick + 1) * tick));
        }
        if program.front_end.is_draining(node)? && program.front_end.in_flight(node)? == 0 {
            program.front_end.leave(node)?;
            program.nodes[edge.node] = None;
            edge.left = true;
        }
        Ok(edge.left || program.is_over())
    }

    fn waits_for(&self) -> String {
        self.programs.iter().map(Program::waits_for).collect::<Vec<_>>().join("\n")
    }

    /// Checks rank outcomes, query ends and slot leaks.
    fn check(&mut self, outcomes: &[Vec<Outcome<Wrong>>]) -> Result<(), String> {
        let (fault, front_ends) = (self.scenario.fault, self.scenario.front_ends);
        let mut killed: Vec<Rank> = self.scenario.departs.iter().map(|(rank, _)| *rank).collect();
        let may_lose = self.scenario.fault.is_loss() || self.scenario.departs.is_some();
        for (edge, outcomes) in self.edges.iter().zip(outcomes) {
            let hosts = [Rank(edge.front_end as u32), Rank(front_ends + edge.node as u32)];
            for (host, outcome) in hosts.into_iter().zip(outcomes) {
                match outcome {
                    Outcome::Done => {}
                    Outcome::Killed => killed.push(host),
                    Outcome::Failed(Wrong::Fabric(weft_fabric::Error::Poisoned(_))) if may_lose => {
                    }
                    Outcome::Failed(Wrong::Other(wrong)) => {
                        return Err(format!("{fault:?}: {host}: {wrong}"));
                    }
                    Outcome::Failed(wrong) => {
                        return Err(format!("{fault:?}: {host} ended in {wrong:?}"));
                    }
                }
            }
        }
        for (index, program) in (0..).zip(&mut self.programs) {
            if killed.contains(&Rank(index)) {
                continue;
            }
            program.front_end.advance(Time::MAX);
            program.take_reports()?;
            let counts = program.front_end.counts();
            if counts.in_flight + counts.queued > 0
                || counts.submitted != counts.answered + counts.failed
            {
                return Err(format!("a query or a slot is lost: {}", program.waits_for()));
            }
            if !self.scenario.fault.is_loss() && !program.is_over() {
                return Err(format!("queries are left: {}", program.waits_for()));
            }
        }
        let most = if may_lose { self.scenario.ledger.max_sends } else { 1 };
        for (token, times) in self.nodes.iter().flat_map(|node| &node.backend().echo.executed) {
            let known = self.programs[(token >> 32) as usize].has_submitted(*token);
            if !known || *times > most {
                return Err(format!("query {token} was executed {times} times on one node"));
            }
        }
        let largest = self.nodes.iter().map(|node| node.backend().echo.largest).max().unwrap_or(0);
        if largest > self.scenario.accelerator.max_batch as usize {
            return Err(format!("a batch had {largest} queries"));
        }
        Ok(())
    }
}
