//! A rank's program: starts the calls, and checks how they end.

use crate::scenario::{Call, Order, Scenario};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use weft_collectives::RunError;
use weft_collectives::messages::{Completed, Driver, OperationId};
use weft_fabric::providers::sim::{Cluster, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Driver as _, Engine, Error, Event, Poison, Rank, Requests, Time};
use weft_scenarios::{Failure, sleeps};

/// Failure in a rank's program.
#[derive(Debug)]
pub enum Wrong {
    Run(RunError),
    #[expect(dead_code, reason = "shown by Debug")]
    Outcome(String),
}

impl From<RunError> for Wrong {
    fn from(error: RunError) -> Wrong {
        Wrong::Run(error)
    }
}

impl From<weft_fabric::Error> for Wrong {
    fn from(error: weft_fabric::Error) -> Wrong {
        Wrong::Run(error.into())
    }
}

impl Failure for Wrong {
    fn poison(&self) -> Option<&Poison> {
        match self {
            Wrong::Run(RunError::Fabric(Error::Poisoned(poison))) => Some(poison),
            _ => None,
        }
    }
}

/// A call under way.
struct Live {
    id: OperationId,
    call: Call,
    number: usize,
    memory: Vec<u8>,
}

pub struct Program {
    scenario: Rc<Scenario>,
    me: Rank,
    random: SplitMix64,
    driver: Driver,
    live: Vec<Live>,
    /// Calls started so far.
    started: usize,
    /// Messages received from any rank, by call number.
    from_any: BTreeMap<usize, (u64, Rank, Vec<u8>)>,
    asleep_until: Time,
}

/// Memory byte that no message has written.
const UNTOUCHED: u8 = 0xEE;

impl weft_scenarios::Program for Program {
    type Failure = Wrong;

    fn step(
        &mut self,
        world: &World,
        _: &mut Engine,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        self.driver.poll(now, events, requests)?;
        if sleeps(&mut self.asleep_until, self.scenario.laziness, &mut self.random, world, now) {
            return Ok(false);
        }
        loop {
            let ended = self.take_ended()?;
            if !self.start(requests)? && !ended {
                break;
            }
            if self.random.chance(self.scenario.laziness) {
                // Other ranks run between two calls.
                world.wake_at(now.after(Duration::from_nanos(1)));
                return Ok(false);
            }
        }
        let calls = &self.scenario.calls[self.me.index()];
        let is_done = self.started == calls.len() && self.live.is_empty();
        if is_done {
            self.check_from_any()?;
        }
        Ok(is_done)
    }

    fn waits_for(&self) -> String {
        let live = self.live.iter().map(|live| {
            let missing = self.driver.missing(live.id);
            format!("{} for {missing:?}", self.driver.describe(live.id))
        });
        let live: Vec<String> = live.collect();
        format!("{} after {} calls waits in {}", self.me, self.started, live.join("; "))
    }
}

impl Program {
    /// A linked program for every rank.
    pub fn connect(
        cluster: &mut Cluster,
        scenario: &Rc<Scenario>,
    ) -> Result<Vec<Program>, RunError> {
        let mut programs = Vec::new();
        for me in cluster.ranks() {
            programs.push(Program {
                driver: Driver::allocate(cluster.engine(me), &scenario.shape.config())?,
                random: SplitMix64::new(scenario.seed.wrapping_mul(31) ^ u64::from(me.0)),
                scenario: scenario.clone(),
                me,
                live: Vec::new(),
                started: 0,
                from_any: BTreeMap::new(),
                asleep_until: Time(0),
            });
        }
        for owner in cluster.ranks() {
            for peer in cluster.ranks().filter(|peer| *peer != owner) {
                let grant = programs[owner.index()].driver.grant(cluster.engine(owner), peer)?;
                let driver = &mut programs[peer.index()].driver;
                driver.link(cluster.engine(peer), owner, &grant, Time::MAX)?;
            }
        }
        Ok(programs)
    }

    /// Polls after the last call; true once the driver is idle.
    pub fn rest(
        &mut self,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        self.driver.poll(now, events, requests)?;
        Ok(self.driver.is_idle())
    }

    /// Starts the next call, if the order allows.
    fn start(&mut self, requests: &mut Requests) -> Result<bool, Wrong> {
        let scenario = self.scenario.clone();
        let (number, order) = (self.started, scenario.shape.order);
        if order != Order::Free && !self.live.is_empty() {
            return Ok(false);
        }
        let Some(&call) = scenario.calls[self.me.index()].get(number) else { return Ok(false) };
        let longest = scenario.messages.iter().map(|message| message.bytes.len()).max();
        let mut memory = match call {
            Call::Send(index) => scenario.messages[index].bytes.clone(),
            Call::Receive(_, room) => vec![UNTOUCHED; room],
            Call::ReceiveAny(_) => vec![UNTOUCHED; longest.unwrap_or(0)],
        };
        let (address, bytes) = (memory.as_mut_ptr(), memory.len() as u64);
        let driver = &mut self.driver;
        let mut receive = |from, tag| {
            // SAFETY: `live` keeps the memory until the operation has ended.
            unsafe { driver.receive(from, tag, address, bytes, requests) }
        };
        let id = match call {
            Call::Receive(index, _) => {
                let message = &scenario.messages[index];
                receive(Some(message.from), message.tag)?
            }
            Call::ReceiveAny(tag) => receive(None, tag)?,
            Call::Send(index) => {
                let message = &scenario.messages[index];
                // SAFETY: as above.
                unsafe { driver.send(message.to, message.tag, address, bytes, requests)? }
            }
        };
        self.started += 1;
        self.live.push(Live { id, call, number, memory });
        Ok(true)
    }

    /// Takes the calls that ended; true if there was one.
    fn take_ended(&mut self) -> Result<bool, Wrong> {
        let mut at = 0;
        let before = self.live.len();
        while at < self.live.len() {
            if !self.driver.is_done(self.live[at].id)? {
                at += 1;
                continue;
            }
            let live = self.live.swap_remove(at);
            let outcome = self.driver.take(live.id);
            self.check(live, outcome)?;
        }
        Ok(self.live.len() < before)
    }

    fn check(
        &mut self,
        live: Live,
        outcome: Result<Option<Completed>, RunError>,
    ) -> Result<(), Wrong> {
        let Live { call, mut memory, number, .. } = live;
        let wrong = |detail: &str| Err(Wrong::Outcome(format!("{call:?}: {detail}")));
        match (call, outcome) {
            (Call::Send(index), Ok(Some(completed))) => {
                let message = &self.scenario.messages[index];
                // It may not be read any more.
                memory.fill(UNTOUCHED);
                let bytes = message.bytes.len() as u64;
                if completed != (Completed { from: self.me, bytes }) {
                    return wrong("end of a send");
                }
            }
            (Call::Receive(index, room), outcome) => {
                let message = &self.scenario.messages[index];
                let sent = message.bytes.len();
                match outcome {
                    Ok(Some(Completed { from, bytes })) => {
                        let (got, rest) = memory.split_at(sent.min(room));
                        let is_right = from == message.from && bytes == sent as u64;
                        if !is_right || got != message.bytes || rest.iter().any(|b| *b != UNTOUCHED)
                        {
                            return wrong("bytes");
                        }
                    }
                    Err(RunError::MessageTooLong { peer, tag, sent: length, room: memory })
                        if room < sent =>
                    {
                        let expected = (message.from, message.tag, sent as u64, room as u64);
                        if (peer, tag, length, memory) != expected {
                            return wrong("error");
                        }
                    }
                    other => return wrong(&format!("ended in {other:?}")),
                }
            }
            (Call::ReceiveAny(tag), Ok(Some(Completed { from, bytes }))) => {
                memory.truncate(bytes as usize);
                self.from_any.insert(number, (tag, from, memory));
            }
            (_, other) => return wrong(&format!("ended in {other:?}")),
        }
        Ok(())
    }

    /// Compares messages received from any rank with those sent: the order by sender and tag is kept.
    fn check_from_any(&self) -> Result<(), Wrong> {
        let mut received: BTreeMap<_, Vec<&Vec<u8>>> = BTreeMap::new();
        for (tag, from, bytes) in self.from_any.values() {
            received.entry((*tag, *from)).or_default().push(bytes);
        }
        for ((tag, from), received) in received {
            let sent =
                self.scenario.messages.iter().filter(|message| {
                    (message.tag, message.from, message.to) == (tag, from, self.me)
                });
            let sent: Vec<&Vec<u8>> = sent.map(|message| &message.bytes).collect();
            if sent != received {
                return Err(Wrong::Outcome(format!("messages with tag {tag} from {from}")));
            }
        }
        Ok(())
    }
}
