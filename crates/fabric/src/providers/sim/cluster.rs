//! Engines over a world, a driver on each, and a small control plane that spreads poison.

use super::{Random, World};
use crate::descriptor::Address;
use crate::driver::{Driver, Event, Requests};
use crate::engine::{CounterConfig, Engine, EngineConfig, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::types::{CounterId, Generation, Time};
use std::fmt;
use std::ops::Range;
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// How a rank ended.
#[derive(Debug)]
pub enum Outcome<E> {
    /// It did all it wanted.
    Done,
    /// Its driver failed, or its group was poisoned.
    Failed(E),
    /// It was killed before either.
    Killed,
}

/// Why a run has no end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hang {
    /// Nothing is due any more and these ranks are not done.
    Deadlock {
        /// When.
        at: Time,
        /// Who.
        waiting: Vec<Rank>,
    },
    /// The bound on steps was reached.
    TooManySteps {
        /// The bound.
        steps: u64,
        /// Who was not done.
        waiting: Vec<Rank>,
    },
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hang::Deadlock { at, waiting } => {
                write!(f, "deadlock at {} ns: nothing is due and {waiting:?} still wait", at.0)
            }
            Hang::TooManySteps { steps, waiting } => {
                write!(f, "{waiting:?} are not done after {steps} steps")
            }
        }
    }
}

impl std::error::Error for Hang {}

/// News on its way from a poisoned rank to another one.
struct News {
    at: Time,
    to: Rank,
    cause: Poison,
}

/// A group: connected engines on ranks of a world. A world carries many.
pub struct Cluster {
    world: World,
    /// The rank of the world that each rank is, and its end of this group.
    hosts: Vec<Rank>,
    ends: Vec<Rank>,
    engines: Vec<Engine>,
    /// What each rank's next step will see, and what it asks for.
    events: Vec<Vec<Event>>,
    requests: Vec<Requests>,
    random: Random,
    order: Vec<usize>,
    news: Vec<News>,
    max_steps: u64,
}

/// Looks that a driver gets at a world where nothing is due, to move on without an event.
const PATIENCE: u32 = 3;
/// How long poison may take from one rank to another.
const NEWS_WITHIN: Duration = Duration::from_micros(50);
/// Longer than any news takes, so that the first cause is the one that everybody learns.
const LOSS_GRACE: Duration = Duration::from_micros(200);

impl Cluster {
    /// Connected engines with small tables. See [`Cluster::with_config`].
    pub fn new(world: &World) -> Result<Cluster> {
        Cluster::with_config(
            world,
            EngineConfig { lanes: 256, loss_grace: LOSS_GRACE, ..EngineConfig::default() },
        )
    }

    /// Connected engines. Choose a short [`EngineConfig::loss_grace`]: it passes in virtual time.
    pub fn with_config(world: &World, config: EngineConfig) -> Result<Cluster> {
        let hosts: Vec<Rank> = (0..world.ranks()).map(Rank).collect();
        Cluster::among(world, &hosts, config)
    }

    /// A group of these ranks of the world, who are ranks 0, 1, ... of it. Groups can be made at any time.
    pub fn among(world: &World, hosts: &[Rank], config: EngineConfig) -> Result<Cluster> {
        let size = hosts.len() as u32;
        let mut engines = Vec::with_capacity(hosts.len());
        let mut ends = Vec::with_capacity(hosts.len());
        for (rank, host) in (0..size).map(Rank).zip(hosts) {
            let devices = [world.device(*host)];
            engines.push(Engine::new(config.clone(), rank, size, Generation(1), &devices)?);
            ends.push(world.state().ends_of(*host).into_iter().max().unwrap_or(*host));
        }
        let first = ends_seed(&ends);
        let seed = world.seed() ^ 0x5eed_c105 ^ first;
        world.state().loss_grace = config.loss_grace;
        let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
        let mut messages = Vec::new();
        for engine in &mut engines {
            messages.push(engine.introduce(&addresses)?);
        }
        let mut limit = WaitLimit { deadline: Time::MAX, give_up: &mut || Ok(()) };
        for (number, engine) in engines.iter_mut().enumerate() {
            let mine: Vec<Vec<u8>> = messages.iter().map(|of| of[number].clone()).collect();
            engine.connect(&addresses, &mine, &mut limit)?;
        }
        Ok(Cluster {
            world: world.clone(),
            hosts: hosts.to_vec(),
            ends,
            events: engines.iter().map(|_| Vec::new()).collect(),
            requests: engines.iter().map(|_| Requests::default()).collect(),
            engines,
            random: Random::new(seed),
            order: (0..size as usize).collect(),
            news: Vec::new(),
            max_steps: 10_000_000,
        })
    }

    /// The bound on a run's steps, ten million by default.
    pub fn set_max_steps(&mut self, steps: u64) {
        self.max_steps = steps;
    }

    /// The world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// A rank's engine.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn engine(&mut self, rank: Rank) -> &mut Engine {
        &mut self.engines[rank.0 as usize]
    }

    /// Every rank.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.engines.len() as u32).map(Rank)
    }

    /// A counter on every rank; they have the same number everywhere.
    pub fn counter(&mut self) -> Result<CounterId> {
        self.counter_with(CounterConfig::default())
    }

    /// A counter of this shape on every rank; see [`Cluster::counter`].
    pub fn counter_with(&mut self, config: CounterConfig<'_>) -> Result<CounterId> {
        let mut made = CounterId::from_number(0);
        for engine in &mut self.engines {
            made = engine.counter_with(config)?;
        }
        Ok(made)
    }

    /// Every owner grants to every peer what `regions(owner, peer)` says, with these counters, and the
    /// peer imports it. Returns `remote[at][owner]`: what rank `at` may write at `owner`, in order.
    pub fn share(
        &mut self,
        regions: impl Fn(Rank, Rank) -> Vec<(Region, Range<u64>)>,
        counters: &[CounterId],
    ) -> Result<Vec<Vec<Vec<RemoteRegion>>>> {
        let size = self.engines.len();
        let mut remote = vec![vec![Vec::new(); size]; size];
        for owner in self.ranks() {
            for peer in self.ranks().filter(|peer| *peer != owner) {
                let granted = regions(owner, peer);
                let granted: Vec<_> = granted.iter().map(|(r, range)| (r, range.clone())).collect();
                let grant = self.engine(owner).grant(peer, &granted, counters)?;
                remote[peer.0 as usize][owner.0 as usize] =
                    self.engine(peer).import(owner, &grant, counters, Time::MAX)?;
            }
        }
        Ok(remote)
    }

    /// Runs `step` on every rank until each has said that it is done, failed or was killed. It is
    /// given the events of a poll, which may be none, and hands out requests; or calls the engine.
    ///
    /// A rank that is done is still polled, as its peers may need it, but its step is not called; the
    /// events it would have seen are kept for its first step in the next run.
    /// Ranks are polled in a random order. An engine that is poisoned ends its rank, and a rank that
    /// fails poisons its peers, as the end of its process would.
    pub fn run<E: From<Error>>(
        &mut self,
        mut step: impl FnMut(&mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
    ) -> Result<Vec<Outcome<E>>, Hang> {
        let mut outcomes =
            run_groups(std::slice::from_mut(self), |_, engine, now, events, requests| {
                step(engine, now, events, requests)
            })?;
        Ok(outcomes.pop().unwrap_or_default())
    }

    /// [`Cluster::run`] with a [`Driver`] for each rank, in rank order.
    pub fn run_drivers<D: Driver>(
        &mut self,
        drivers: &mut [D],
        mut done: impl FnMut(&D) -> bool,
    ) -> Result<Vec<Outcome<D::Error>>, Hang>
    where
        D::Error: From<Error>,
    {
        self.run(|engine, now, events, requests| {
            let driver = &mut drivers[engine.rank().0 as usize];
            driver.poll(now, events, requests)?;
            engine.submit(requests)?;
            Ok(done(driver))
        })
    }

    /// Polls everybody until nothing is due any more: what is under way lands and is completed.
    pub fn settle(&mut self) -> Result<(), Hang> {
        let mut ended: Vec<_> = self.engines.iter().map(|_| Some(Outcome::Done)).collect();
        let mut nothing = |_: &mut Engine, _, _: &[Event], _: &mut Requests| Ok::<_, Error>(true);
        for _ in 0..self.max_steps {
            if !self.pass(&mut ended, &mut nothing) && !self.world.step() {
                return Ok(());
            }
        }
        Err(Hang::TooManySteps { steps: self.max_steps, waiting: self.ranks().collect() })
    }

    /// Gives every rank a turn; whether anything happened.
    fn pass<E: From<Error>>(
        &mut self,
        outcomes: &mut [Option<Outcome<E>>],
        step: &mut impl FnMut(&mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
    ) -> bool {
        self.deliver_news();
        let mut order = std::mem::take(&mut self.order);
        self.random.shuffle(&mut order);
        let mut busy = false;
        for &index in &order {
            busy |= self.turn(index, &mut outcomes[index], step);
        }
        self.order = order;
        busy
    }

    /// One poll and one step of a rank; whether anything happened.
    fn turn<E: From<Error>>(
        &mut self,
        index: usize,
        outcome: &mut Option<Outcome<E>>,
        step: &mut impl FnMut(&mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
    ) -> bool {
        let (rank, host) = (Rank(index as u32), self.hosts[index]);
        if !self.world.is_running(host) {
            if outcome.is_none() && !self.world.is_alive(host) {
                *outcome = Some(Outcome::Killed);
            }
            return false;
        }
        let now = self.world.now();
        let engine = &mut self.engines[index];
        let events = &mut self.events[index];
        let requests = &mut self.requests[index];
        let kept = events.len();
        engine.poll(now, events);
        let mut busy = events.len() > kept;
        let poisoned = events[kept..].iter().find_map(|event| match event {
            Event::Poisoned(cause) => Some(cause.clone()),
            _ => None,
        });
        if outcome.is_none() {
            let result = step(engine, now, events, requests);
            events.clear();
            busy |= !requests.is_empty();
            let result = result.and_then(|done| Ok((engine.submit(requests)?, done).1));
            *outcome = match result {
                Ok(true) => Some(Outcome::Done),
                Ok(false) => engine.check().err().map(|error| Outcome::Failed(error.into())),
                Err(error) => {
                    let detail = format!("{rank} failed");
                    engine.poison(Poison { kind: Cause::User, rank: Some(rank), detail });
                    Some(Outcome::Failed(error))
                }
            };
            busy |= outcome.is_some();
        }
        if let Some(cause) = poisoned {
            self.world.state().check_fenced(self.ends[index]);
            self.spread(rank, cause);
        }
        busy
    }

    /// A rank that was just found poisoned tells everybody.
    fn spread(&mut self, from: Rank, cause: Poison) {
        for to in self.ranks().filter(|rank| *rank != from) {
            let at = self.world.now().after(self.random.up_to(NEWS_WITHIN));
            self.world.wake_at(at);
            self.news.push(News { at, to, cause: cause.clone() });
        }
    }

    fn deliver_news(&mut self) {
        let (world, engines, hosts) = (&self.world, &self.engines, &self.hosts);
        let now = world.now();
        self.news.retain(|news| {
            let due = news.at <= now && world.is_running(hosts[news.to.index()]);
            if due {
                engines[news.to.0 as usize].poison(news.cause.clone());
            }
            !due
        });
    }
}

/// Runs several groups of one world together, as [`Cluster::run`] runs one; `step` is also given the place
/// of the group. Returns each group's outcomes. What happens to one group leaves the others alone, but for
/// the ranks of the world that they share.
pub fn run_groups<E: From<Error>>(
    groups: &mut [Cluster],
    mut step: impl FnMut(usize, &mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
) -> Result<Vec<Vec<Outcome<E>>>, Hang> {
    let Some(world) = groups.first().map(|group| group.world.clone()) else {
        return Ok(Vec::new());
    };
    let max_steps = groups.iter().map(|group| group.max_steps).max().unwrap_or(0);
    let mut outcomes: Vec<Vec<Option<Outcome<E>>>> =
        groups.iter().map(|group| group.engines.iter().map(|_| None).collect()).collect();
    let mut idle = 0;
    for _ in 0..max_steps {
        let mut busy = false;
        for (place, (group, outcomes)) in groups.iter_mut().zip(&mut outcomes).enumerate() {
            busy |= group.pass(
                outcomes,
                &mut |engine: &mut Engine, now, events: &[Event], requests: &mut Requests| {
                    step(place, engine, now, events, requests)
                },
            );
        }
        if outcomes.iter().flatten().all(Option::is_some) {
            return Ok(outcomes.into_iter().map(|of| of.into_iter().flatten().collect()).collect());
        }
        idle = if busy || world.step() { 0 } else { idle + 1 };
        if idle > PATIENCE {
            let waiting = outcomes.iter().flat_map(|outcomes| waiting(outcomes)).collect();
            return Err(Hang::Deadlock { at: world.now(), waiting });
        }
    }
    let waiting = outcomes.iter().flat_map(|outcomes| waiting(outcomes)).collect();
    Err(Hang::TooManySteps { steps: max_steps, waiting })
}

/// Distinguishes groups of one world; the first, whose ends have their ranks' numbers, is zero.
fn ends_seed(ends: &[Rank]) -> u64 {
    let apart = (0..).map(Rank).zip(ends).any(|(rank, end)| rank != *end);
    if apart {
        ends.iter().fold(0x9e37, |seed, end| seed.wrapping_mul(31).wrapping_add(end.0.into()))
    } else {
        0
    }
}

fn waiting<E>(outcomes: &[Option<Outcome<E>>]) -> Vec<Rank> {
    let waits = |(rank, outcome): (usize, &Option<Outcome<E>>)| {
        outcome.is_none().then_some(Rank(rank as u32))
    };
    outcomes.iter().enumerate().filter_map(waits).collect()
}
