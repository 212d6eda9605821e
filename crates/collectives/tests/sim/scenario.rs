//! A seed's world: messages, calls on each rank, faults, and how it must end.

use crate::program::Program;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use weft_collectives::messages::MessagesConfig;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{PartRule, Rank, Time};
use weft_scenarios::{InjectedFault, pick, settle, shuffled_ranks, world_config};

/// A message in the run.
#[derive(Clone, Debug)]
pub struct Message {
    pub from: Rank,
    pub to: Rank,
    pub tag: u64,
    pub bytes: Vec<u8>,
}

/// A rank's call.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// Sends the message with this index.
    Send(usize),
    /// Receives the message with this index, with this much memory.
    Receive(usize, usize),
    /// Receives the next message with this tag from any rank.
    ReceiveAny(u64),
}

/// Call order on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any order that keeps messages with equal ranks and tag in sequence; calls do not wait for earlier ones.
    Free,
    /// Message order; each call waits until the previous one ends.
    Blocking,
    /// All sends, each waiting for the previous one, then all receives.
    SendsFirst,
}

/// Run sizes.
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

/// Tags for messages that are received from any rank.
const ANY_TAGS: [u64; 2] = [100, 101];
/// Under miri a larger run takes minutes, not milliseconds.
const MOST_RANKS: u64 = if cfg!(miri) { 2 } else { 5 };
const MOST_MESSAGES: u64 = if cfg!(miri) { 6 } else { 40 };

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

    /// A single rank cannot block in a send to itself.
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

    /// A rank's calls for these messages.
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
        let ends = shuffled_ranks(&mut random, shape.ranks);
        let mut scenario = Scenario::of(seed, shape, &mut random);
        if random.chance(0.1) {
            scenario.faults = Faults::default();
        }
        let at = Time(random.below(300_000));
        let fault = InjectedFault::draw(&mut random, 10, &ends, 0.005);
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

    /// A seed where every rank must finish, with the sizes that `change` leaves.
    pub fn shaped(seed: u64, change: impl FnOnce(&mut Shape)) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let mut shape = Shape::random(&mut random);
        change(&mut shape);
        shape.settle();
        Scenario::of(seed, shape, &mut random)
    }
}

/// Runs a scenario and returns each event's time, or the failure.
pub fn run(scenario: Scenario) -> Result<Vec<Time>, String> {
    let Scenario { seed, fault, parts, .. } = scenario;
    let ranks = scenario.shape.ranks;
    let world = World::new(world_config(ranks, seed, 2000, parts, &scenario.faults));
    let scenario = Rc::new(scenario);
    let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
    let mut programs = Program::connect(&mut cluster, &scenario).map_err(|e| e.to_string())?;
    let moments = weft_scenarios::run(&mut cluster, &mut programs, fault)?;
    if !fault.is_loss() {
        return_all_credits(&mut cluster, &mut programs)?;
    }
    settle(&mut cluster).map(|()| moments)
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
