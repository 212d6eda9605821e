//! A seed's world: messages, calls of each rank, faults, and how it must end.

use crate::injected_fault::InjectedFault;
use crate::program::{Program, Wrong};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;
use weft_collectives::RunError;
use weft_collectives::messages::MessagesConfig;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{LatencyBandwidth, PartRule, Rank, Time};

/// A message of the run.
#[derive(Clone, Debug)]
pub struct Message {
    pub from: Rank,
    pub to: Rank,
    pub tag: u64,
    pub bytes: Vec<u8>,
}

/// Call of a rank.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// Send of the message with this index.
    Send(usize),
    /// Receive of the message with this index, with this much memory.
    Receive(usize, usize),
    /// Receive of the next message with this tag from any rank.
    ReceiveAny(u64),
}

/// Order of the calls of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any order that keeps that of messages with equal ranks and tag; calls do not wait for earlier ones.
    Free,
    /// The order of the messages; each call waits for the end of the previous one.
    Blocking,
    /// All sends, each waiting for the previous one, then all receives.
    SendsFirst,
}

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct Shape {
    pub ranks: u32,
    pub messages: u64,
    pub slots: u32,
    pub slot_bytes: u64,
    pub buffers: u64,
    pub order: Order,
}

pub struct Scenario {
    pub seed: u64,
    pub shape: Shape,
    pub messages: Vec<Message>,
    /// By rank.
    pub calls: Vec<Vec<Call>>,
    pub faults: Faults,
    pub parts: PartRule,
    pub fault: InjectedFault,
    /// Probability that a rank which could proceed pauses first.
    pub laziness: f64,
}

/// Tags of messages that are received from any rank.
const ANY_TAGS: [u64; 2] = [100, 101];
/// Under miri a larger run takes minutes, not milliseconds.
const MOST_RANKS: u64 = if cfg!(miri) { 2 } else { 5 };
const MOST_MESSAGES: u64 = if cfg!(miri) { 6 } else { 40 };

fn pick<T: Copy>(random: &mut SplitMix64, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize]
}

impl Shape {
    fn random(random: &mut SplitMix64) -> Shape {
        let mut shape = Shape {
            ranks: 1 + random.below(MOST_RANKS) as u32,
            messages: 1 + random.below(MOST_MESSAGES),
            slots: 1 + random.below(6) as u32,
            slot_bytes: 64 + random.below(300),
            buffers: pick(random, &[0, 300, 2000, 1 << 20]),
            order: pick(random, &[Order::Free, Order::Free, Order::Free, Order::Blocking]),
        };
        shape.settle();
        shape
    }

    /// A rank alone cannot block in a send to itself.
    fn settle(&mut self) {
        if self.ranks == 1 && self.order == Order::Blocking {
            self.order = Order::Free;
        }
    }

    pub fn config(&self) -> MessagesConfig {
        let Shape { slots, slot_bytes, buffers, .. } = *self;
        MessagesConfig { slots, slot_bytes, max_unexpected_bytes: buffers }
    }

    fn message(&self, random: &mut SplitMix64) -> Message {
        let ring = u64::from(self.slots) * self.slot_bytes;
        let longest = pick(random, &[1, 9, self.slot_bytes - 31, 2 * self.slot_bytes, 3 * ring]);
        let mut bytes = vec![0; random.below(longest) as usize];
        random.fill(&mut bytes);
        let [from, mut to] = [(); 2].map(|()| Rank(random.below(self.ranks.into()) as u32));
        if self.order == Order::Blocking && from == to {
            // A send to itself without a buffer waits for a receive that is not called.
            to = Rank((from.0 + 1) % self.ranks);
        }
        let tag = pick(random, &[0, 1, 2, u64::MAX, ANY_TAGS[0], ANY_TAGS[1]]);
        let tag = if self.order == Order::Free { tag } else { tag.min(1) };
        Message { from, to, tag, bytes }
    }

    /// Calls of a rank for these messages.
    fn calls(&self, me: Rank, messages: &[Message], random: &mut SplitMix64) -> Vec<Call> {
        let mut sends: BTreeMap<_, VecDeque<Call>> = BTreeMap::new();
        let mut receives: BTreeMap<_, VecDeque<Call>> = BTreeMap::new();
        let mut in_order = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let Message { from, to, tag, bytes } = message;
            if *from == me {
                sends.entry((*to, *tag)).or_default().push_back(Call::Send(index));
                in_order.push(Call::Send(index));
            }
            if *to == me {
                let room = match random.below(10) {
                    0 => random.below(bytes.len() as u64 + 1) as usize,
                    1 => bytes.len() + random.below(100) as usize,
                    _ => bytes.len(),
                };
                let (call, from) = match ANY_TAGS.contains(tag) {
                    true => (Call::ReceiveAny(*tag), None),
                    false => (Call::Receive(index, room), Some(*from)),
                };
                receives.entry((from, *tag)).or_default().push_back(call);
                in_order.push(call);
            }
        }
        match self.order {
            Order::Blocking => in_order,
            Order::SendsFirst => {
                in_order.sort_by_key(|call| !matches!(call, Call::Send(_)));
                in_order
            }
            Order::Free => {
                let queues = sends.into_values().chain(receives.into_values());
                interleave(queues.collect(), random)
            }
        }
    }
}

/// Draws from random queues until all are empty.
fn interleave(mut queues: Vec<VecDeque<Call>>, random: &mut SplitMix64) -> Vec<Call> {
    let mut calls = Vec::new();
    loop {
        queues.retain(|queue| !queue.is_empty());
        if queues.is_empty() {
            return calls;
        }
        let at = random.below(queues.len() as u64) as usize;
        calls.extend(queues[at].pop_front());
    }
}

fn parts(random: &mut SplitMix64) -> PartRule {
    if random.chance(0.3) {
        return PartRule::WHOLE;
    }
    PartRule {
        max_part_bytes: 64 + random.below(400),
        max_pages_per_part: pick(random, &[1, 2, u32::MAX]),
        stripes: pick(random, &[1, 1, 2, 3]),
        stripe_from: 65 + random.below(300),
    }
}

impl Scenario {
    /// Anything that may happen.
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let shape = Shape::random(&mut random);
        let mut ends: Vec<Rank> = (0..shape.ranks).map(Rank).collect();
        random.shuffle(&mut ends);
        let mut scenario = Scenario::of(seed, shape, &mut random);
        if random.chance(0.1) {
            scenario.faults = Faults::default();
        }
        let at = Time(random.below(300_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends);
        if matches!(fault, InjectedFault::FailedParts) {
            scenario.faults.fail = 0.005;
        }
        scenario.with_fault(fault, at, &mut random)
    }

    fn of(seed: u64, shape: Shape, random: &mut SplitMix64) -> Scenario {
        let messages: Vec<Message> = (0..shape.messages).map(|_| shape.message(random)).collect();
        let ranks = (0..shape.ranks).map(Rank);
        let calls = ranks.map(|me| shape.calls(me, &messages, random)).collect();
        let (parts, laziness) = (parts(random), pick(random, &[0.0, 0.2, 0.6]));
        let (faults, fault) = (Faults::rough(), InjectedFault::None);
        Scenario { seed, shape, messages, calls, faults, parts, fault, laziness }
    }

    /// Adds a fault at a time. Until then the run is the same.
    pub fn with_fault(
        mut self,
        fault: InjectedFault,
        at: Time,
        random: &mut SplitMix64,
    ) -> Scenario {
        self.fault = fault;
        fault.add_to(&mut self.faults, self.shape.ranks, at, random);
        self
    }

    /// A seed where every rank must come to its end, with the sizes that `change` leaves.
    pub fn shaped(seed: u64, change: impl FnOnce(&mut Shape)) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let mut shape = Shape::random(&mut random);
        change(&mut shape);
        shape.settle();
        Scenario::of(seed, shape, &mut random)
    }
}

fn world(scenario: &Scenario) -> World {
    let mut random = SplitMix64::new(scenario.seed ^ 0x0077_6f72_6c64);
    let model = LatencyBandwidth::new(Duration::from_micros(2), 1_000_000_000);
    World::new(WorldConfig {
        queue_parts: 1 + random.below(20) as u32,
        queue_bytes: 1 + random.below(2000),
        parts: scenario.parts,
        model: Box::new(if random.chance(0.5) { model.serialised() } else { model }),
        ..WorldConfig::new(scenario.shape.ranks, scenario.seed).with_faults(scenario.faults.clone())
    })
}

/// Runs a scenario and returns the time of each event, or the failure.
pub fn run(scenario: Scenario) -> Result<Vec<Time>, String> {
    let world = world(&scenario);
    let fault = scenario.fault;
    let scenario = Rc::new(scenario);
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let mut programs = Program::connect(&mut cluster, &scenario).map_err(|e| e.to_string())?;
    let mut moments = Vec::new();
    let outcomes = cluster.run(|engine, now, events, requests| {
        if moments.last() != Some(&now) {
            moments.push(now);
        }
        programs[engine.rank().index()].step(&world, now, events, requests)
    });
    let outcomes = outcomes.map_err(|hang| {
        let waiting: Vec<String> = programs.iter().map(Program::waits_for).collect();
        format!("{hang}\n{}", waiting.join("\n"))
    })?;
    let wrong: Vec<String> = (0..)
        .zip(&outcomes)
        .filter(|(rank, outcome)| !is_right(Rank(*rank), outcome, fault))
        .map(|(rank, outcome)| format!("rank {rank} ended in {outcome:?}"))
        .collect();
    if !wrong.is_empty() {
        return Err(format!("{fault:?}, but {}", wrong.join("; ")));
    }
    if outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done)) && !may_end_later(fault) {
        return_all_credits(&mut cluster, &mut programs)?;
    }
    cluster.settle().map_err(|hang| hang.to_string())?;
    match world.violations().first() {
        Some(violation) => Err(violation.to_string()),
        None => Ok(moments),
    }
}

/// True if the fault may end a rank after all calls have returned.
fn may_end_later(fault: InjectedFault) -> bool {
    !matches!(fault, InjectedFault::None | InjectedFault::Paused)
}

/// Runs until no message, no buffer and no uncredited slot is left on any rank.
fn return_all_credits(cluster: &mut Cluster, programs: &mut [Program]) -> Result<(), String> {
    let outcomes = cluster.run(|engine, now, events, requests| {
        programs[engine.rank().index()].rest(now, events, requests)
    });
    let outcomes = outcomes.map_err(|hang| format!("credits are missing: {hang}"))?;
    match outcomes.iter().find(|outcome| !matches!(outcome, Outcome::Done)) {
        Some(outcome) => Err(format!("a rank ended in {outcome:?} after its last call")),
        None => Ok(()),
    }
}

/// Each unfinished rank was killed, or reports the rank or link at fault.
fn is_right(rank: Rank, outcome: &Outcome<Wrong>, fault: InjectedFault) -> bool {
    match (outcome, fault) {
        (Outcome::Done, _) => true,
        (Outcome::Killed, InjectedFault::Killed(killed)) => killed == rank,
        (
            Outcome::Failed(Wrong::Run(RunError::Fabric(weft_fabric::Error::Poisoned(poison)))),
            fault,
        ) => fault.explains(rank, poison.rank),
        _ => false,
    }
}
