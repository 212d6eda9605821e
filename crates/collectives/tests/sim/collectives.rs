//! A seed's world: calls, rank memory, faults, and expected results.

use crate::program::Wrong;
use std::rc::Rc;
use std::time::Duration;
use weft_collectives::{
    Algorithm, Call, CallId, Collective, CollectivesConfig, Element, Executor, GroupRoutes,
    Options, Reduction, RunError, Scale,
};
use weft_fabric::providers::sim::{Cluster, Faults, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Driver, Engine, EngineConfig, Event, PartRule, Requests, Time};
use weft_scenarios::{InjectedFault, pick, settle, shuffled_ranks, sleeps, world_config};

/// Call in a scenario, with the inputs on all ranks.
#[derive(Clone)]
struct Planned {
    collective: Collective,
    algorithm: Option<(Algorithm, Options)>,
    elements: usize,
    in_place: bool,
    /// Input elements by rank.
    inputs: Vec<Vec<i32>>,
}

pub struct Scenario {
    seed: u64,
    ranks: u32,
    config: CollectivesConfig,
    calls: Vec<Planned>,
    faults: Faults,
    fault: InjectedFault,
    parts: PartRule,
    laziness: f64,
    /// Peers' memory may be read in place.
    reads: bool,
}

fn planned(ranks: u32, reads: bool, random: &mut SplitMix64) -> Planned {
    let root = weft_collectives::Rank(random.below(ranks.into()) as u32);
    let collective = pick(
        random,
        &[
            Collective::AllReduce,
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::AllToAll,
            Collective::Broadcast { root },
        ],
    );
    let options = Options {
        chunks: 1 + random.below(4) as u32,
        local: if ranks.is_multiple_of(2) { pick(random, &[1, 2]) } else { 1 },
    };
    let possible: Vec<Algorithm> = Algorithm::of(collective).to_vec();
    let is_possible = |algorithm: &Algorithm| reads || *algorithm != Algorithm::DirectRead;
    let possible: Vec<Algorithm> = possible.into_iter().filter(is_possible).collect();
    let read = reads && random.chance(0.5);
    let algorithm = if read { Algorithm::DirectRead } else { pick(random, &possible) };
    let algorithm = random.chance(0.8).then_some((algorithm, options));
    let lengths: &[u64] = if cfg!(miri) { &[0, 1, 3, 40] } else { &[0, 1, 3, 40, 300, 2000] };
    let most = pick(random, lengths);
    let share = random.below(most + 1) as usize;
    let elements = if collective.shares() { share * ranks as usize } else { share };
    let inputs = (0..ranks)
        .map(|rank| {
            let length = match collective {
                Collective::AllGather => share,
                Collective::Broadcast { root } if root.0 != rank => 0,
                _ => elements,
            };
            (0..length).map(|_| random.bits() as i32).collect()
        })
        .collect();
    Planned { collective, algorithm, elements, in_place: random.chance(0.3), inputs }
}

impl Planned {
    fn expected(&self, rank: usize) -> Vec<i32> {
        let ranks = self.inputs.len();
        let sum = || {
            let mut sum = vec![0i32; self.elements];
            for input in &self.inputs {
                sum.iter_mut().zip(input).for_each(|(sum, one)| *sum = sum.wrapping_add(*one));
            }
            sum
        };
        let share = self.elements / ranks;
        match self.collective {
            Collective::AllReduce => sum(),
            Collective::ReduceScatter => sum()[rank * share..(rank + 1) * share].to_vec(),
            Collective::AllGather => self.inputs.concat(),
            Collective::Broadcast { root } => self.inputs[root.0 as usize].clone(),
            Collective::AllToAll => {
                let part = |input: &Vec<i32>| input[rank * share..(rank + 1) * share].to_vec();
                self.inputs.iter().flat_map(part).collect()
            }
        }
    }
}

impl Scenario {
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let ranks = 1 + random.below(if cfg!(miri) { 2 } else { 7 }) as u32;
        let calls = 1 + random.below(if cfg!(miri) { 2 } else { 8 });
        // miri cannot read another process's memory.
        let reads = !cfg!(miri) && random.chance(0.7);
        let calls = (0..calls).map(|_| planned(ranks, reads, &mut random)).collect();
        let config = CollectivesConfig {
            channels: 1 + random.below(3) as u32,
            channel_bytes: 1024 * (1 + random.below(8)),
            in_place_bytes: pick(&mut random, &[None, Some(0), Some(1000), Some(1 << 20)]),
            reproducible: false,
            reduction_threads: 1,
        };
        let mut faults = if random.chance(0.1) { Faults::default() } else { Faults::rough() };
        let ends = shuffled_ranks(&mut random, ranks);
        let at = Time(random.below(200_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends, 0.005);
        fault.add_to(&mut faults, ranks, at, &mut random);
        let parts = if random.chance(0.4) {
            PartRule::WHOLE
        } else {
            PartRule {
                max_part_bytes: 1 + random.below(900),
                max_pages_per_part: pick(&mut random, &[1, 2, 5, u32::MAX]),
                stripes: pick(&mut random, &[1, 2, 3]),
                stripe_from: random.below(300),
            }
        };
        let laziness = pick(&mut random, &[0.0, 0.2, 0.6]);
        Scenario { seed, ranks, config, calls, faults, fault, parts, laziness, reads }
    }

    /// The same seed, in which every rank completes all calls.
    pub fn well(seed: u64) -> Scenario {
        let scenario = Scenario::random(seed);
        Scenario { faults: Faults::rough(), fault: InjectedFault::None, ..scenario }
    }
}

/// Call memory at one rank.
struct Memory {
    id: CallId,
    number: usize,
    input: Vec<i32>,
    output: Vec<i32>,
}

/// One rank's program: starts the calls in order, several at a time, and checks each result.
struct Program {
    scenario: Rc<Scenario>,
    rank: usize,
    executor: Executor,
    random: SplitMix64,
    started: usize,
    live: Vec<Memory>,
    asleep_until: Time,
}

/// Output filler.
const FILLER: i32 = -0x5555_5555;

impl weft_scenarios::Program for Program {
    type Failure = Wrong;

    fn step(
        &mut self,
        world: &World,
        engine: &mut Engine,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        let scenario = self.scenario.clone();
        self.poll(world, now, events, requests)?;
        if sleeps(&mut self.asleep_until, scenario.laziness, &mut self.random, world, now) {
            return Ok(false);
        }
        let most = 1 + self.random.below(4) as usize;
        loop {
            let mut progress = false;
            if let Some(planned) = scenario.calls.get(self.started)
                && self.live.len() < most
            {
                self.start(planned, engine)?;
                self.poll(world, now, &[], requests)?;
                progress = true;
            }
            if !self.check(&scenario)? && !progress {
                break;
            }
        }
        while let Some(region) = self.executor.take_finished() {
            engine.release(&region);
        }
        let is_done = self.started == scenario.calls.len() && self.live.is_empty();
        if is_done && !self.executor.is_idle() {
            return Err(Wrong::Outcome("calls that are complete were kept".to_owned()));
        }
        Ok(is_done)
    }

    fn waits_for(&self) -> String {
        let calls = self.live.iter().map(|memory| {
            format!("call {} for {:?}", memory.number, self.executor.missing(memory.id))
        });
        format!("rank {}: {}", self.rank, calls.collect::<Vec<_>>().join("; "))
    }
}

impl Program {
    /// Polls the executor, and again soon if it has more.
    fn poll(
        &mut self,
        world: &World,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<(), Wrong> {
        self.executor.poll(now, events, requests)?;
        if self.executor.has_more() {
            world.wake_at(now.after(Duration::from_nanos(1)));
        }
        Ok(())
    }

    fn start(&mut self, planned: &Planned, engine: &mut Engine) -> Result<(), Wrong> {
        let ranks = planned.inputs.len();
        let outputs = match planned.collective {
            Collective::ReduceScatter => planned.elements / ranks,
            _ => planned.elements,
        };
        let mut memory = Memory {
            id: CallId::default(),
            number: self.started,
            input: planned.inputs[self.rank].clone(),
            output: vec![FILLER; outputs],
        };
        let share = planned.elements / ranks;
        let (mut input, mut output) = (memory.input.as_ptr(), memory.output.as_mut_ptr());
        if planned.in_place {
            match planned.collective {
                Collective::AllReduce | Collective::Broadcast { .. } => {
                    memory.output[..memory.input.len()].copy_from_slice(&memory.input);
                    input = output;
                }
                Collective::AllGather => {
                    memory.output[self.rank * share..][..share].copy_from_slice(&memory.input);
                    input = output.wrapping_add(self.rank * share);
                }
                Collective::ReduceScatter => {
                    output = memory.input.as_mut_ptr().wrapping_add(self.rank * share);
                    input = memory.input.as_ptr();
                }
                Collective::AllToAll => {}
            }
        }
        let call = Call {
            collective: planned.collective,
            element: Element::I32,
            reduction: Reduction::Sum,
            scale: Scale::None,
            elements: planned.elements as u64,
            input: input.cast(),
            output: output.cast(),
            algorithm: planned.algorithm,
        };
        // SAFETY: the memory stays in `live` until the call is complete, and a failed rank's memory is leaked.
        memory.id = unsafe { self.executor.start(engine, &call) }?;
        self.live.push(memory);
        self.started += 1;
        Ok(())
    }

    fn check(&mut self, scenario: &Scenario) -> Result<bool, Wrong> {
        let done = |memory: &Memory| self.executor.is_done(memory.id);
        let Some(index) = self.live.iter().position(done) else { return Ok(false) };
        let memory = self.live.swap_remove(index);
        let planned = &scenario.calls[memory.number];
        let expected = planned.expected(self.rank);
        let share = planned.elements / planned.inputs.len();
        let result = match planned.collective {
            Collective::ReduceScatter if planned.in_place => {
                &memory.input[self.rank * share..][..share]
            }
            _ => &memory.output[..],
        };
        if result != expected {
            let differs = result.iter().zip(&expected).position(|(a, b)| a != b);
            return Err(Wrong::Outcome(format!(
                "call {} ({} by {:?}, {} elements, in place {}): element {differs:?} of rank {}",
                memory.number,
                planned.collective,
                planned.algorithm,
                planned.elements,
                planned.in_place,
                self.rank
            )));
        }
        let mut memory = memory;
        if !planned.in_place && memory.input != planned.inputs[self.rank] {
            return Err(Wrong::Outcome(format!("call {} changed its input", memory.number)));
        }
        // No peer may read a complete call's memory.
        memory.input.fill(FILLER);
        memory.output.fill(FILLER);
        std::hint::black_box(&mut memory);
        Ok(true)
    }
}

fn connect(cluster: &mut Cluster, scenario: &Rc<Scenario>) -> Result<Vec<Program>, RunError> {
    let mut programs = Vec::new();
    for rank in cluster.ranks() {
        programs.push(Program {
            scenario: scenario.clone(),
            rank: rank.0 as usize,
            executor: Executor::allocate(
                cluster.engine(rank),
                scenario.config,
                GroupRoutes { reads: scenario.reads, ..GroupRoutes::default() },
            )?,
            random: SplitMix64::new(scenario.seed.wrapping_mul(31) ^ u64::from(rank.0)),
            started: 0,
            live: Vec::new(),
            asleep_until: Time(0),
        });
    }
    for owner in cluster.ranks() {
        for peer in cluster.ranks().filter(|peer| *peer != owner) {
            let grant = programs[owner.0 as usize].executor.grant(cluster.engine(owner), peer)?;
            let executor = &mut programs[peer.0 as usize].executor;
            executor.link(cluster.engine(peer), owner, &grant, Time::MAX)?;
        }
    }
    Ok(programs)
}

/// Runs a scenario; returns the failure.
pub fn run(scenario: Scenario) -> Result<(), String> {
    let Scenario { seed, ranks, fault, parts, .. } = scenario;
    let config = world_config(ranks, seed, 5000, parts, &scenario.faults);
    let world = World::new(WorldConfig { reuse: true, ..config });
    let config = EngineConfig {
        lanes: 4096,
        loss_grace: Duration::from_micros(200),
        ..EngineConfig::default()
    };
    let scenario = Rc::new(scenario);
    let mut cluster = Cluster::with_config(&world, config).map_err(|error| error.to_string())?;
    let mut programs = connect(&mut cluster, &scenario).map_err(|error| error.to_string())?;
    let checked =
        weft_scenarios::run(&mut cluster, &mut programs, fault).and_then(|_| settle(&mut cluster));
    // Writes by failed ranks may still read the inputs: the world ends first.
    drop(cluster);
    drop(world);
    checked
}
