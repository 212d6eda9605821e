//! Engines over a world with a driver on each, and a control plane that broadcasts poison.

use super::world::World;
use crate::descriptor::EngineAddress;
use crate::driver::{Driver, Event, Requests};
use crate::engine::{CounterConfig, Engine, EngineConfig, Region, RemoteRegion};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::random::SplitMix64;
use crate::types::{CounterId, Generation, Time};
use std::fmt;
use std::ops::Range;
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// Rank outcome.
#[derive(Debug)]
pub enum Outcome<E> {
    /// The step returned `true`.
    Done,
    /// Driver error, or the group's poison.
    Failed(E),
    /// Killed before either.
    Killed,
}

/// Run that cannot finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// Empty calendar with waiting ranks.
    Deadlock {
        /// Virtual time.
        at: Time,
        /// Ranks that wait.
        waiting: Vec<Rank>,
    },
    /// Exceeded bound on steps.
    TooManySteps {
        /// Bound on steps.
        steps: u64,
        /// Ranks that were not done.
        waiting: Vec<Rank>,
    },
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Deadlock { at, waiting } => {
                write!(f, "deadlock at {} ns: empty calendar and {waiting:?} still wait", at.0)
            }
            RunError::TooManySteps { steps, waiting } => {
                write!(f, "{waiting:?} are not done after {steps} steps")
            }
        }
    }
}

impl std::error::Error for RunError {}

/// Poison on its way to another rank.
struct PoisonMessage {
    at: Time,
    to: Rank,
    cause: Poison,
}

/// Group of connected engines on a world's ranks. A world can carry several.
pub struct Cluster {
    world: World,
    /// World rank and link, by group rank.
    hosts: Vec<Rank>,
    links: Vec<Rank>,
    engines: Vec<Engine>,
    /// Events for each rank's next step, and the rank's requests.
    events: Vec<Vec<Event>>,
    requests: Vec<Requests>,
    random: SplitMix64,
    order: Vec<usize>,
    poison: Vec<PoisonMessage>,
    max_steps: u64,
}

/// Consecutive passes without an event before a run counts as deadlocked.
const MAX_IDLE_PASSES: u32 = 3;
/// Maximum delay for poison between two ranks.
const MAX_POISON_DELAY: Duration = Duration::from_micros(50);
/// Exceeds the maximum poison delay, so that all ranks report the first cause.
const LOSS_GRACE: Duration = Duration::from_micros(200);

impl Cluster {
    /// Group with all ranks and small tables; see [`Cluster::with_config`].
    pub fn new(world: &World) -> Result<Cluster> {
        Cluster::with_config(
            world,
            EngineConfig { lanes: 256, loss_grace: LOSS_GRACE, ..EngineConfig::default() },
        )
    }

    /// Group with all ranks. Choose a short [`EngineConfig::loss_grace`]: it passes in virtual time.
    pub fn with_config(world: &World, config: EngineConfig) -> Result<Cluster> {
        let hosts: Vec<Rank> = (0..world.ranks()).map(Rank).collect();
        Cluster::among(world, &hosts, config)
    }

    /// Group with these world ranks, numbered 0, 1, ... in it. A group can be created at any time.
    pub fn among(world: &World, hosts: &[Rank], config: EngineConfig) -> Result<Cluster> {
        let size = hosts.len() as u32;
        let mut engines = Vec::with_capacity(hosts.len());
        let mut links = Vec::with_capacity(hosts.len());
        for (rank, host) in (0..size).map(Rank).zip(hosts) {
            let devices = [world.device(*host)];
            engines.push(Engine::new(config.clone(), rank, size, Generation(1), &devices)?);
            links.push(world.state().links_of(*host).into_iter().max().unwrap_or(*host));
        }
        let first = links_seed(&links);
        let seed = world.seed() ^ 0x5eed_c105 ^ first;
        world.state().loss_grace = config.loss_grace;
        let addresses: Vec<EngineAddress> = engines.iter().map(Engine::address).collect();
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
            links,
            events: engines.iter().map(|_| Vec::new()).collect(),
            requests: engines.iter().map(|_| Requests::default()).collect(),
            engines,
            random: SplitMix64::new(seed),
            order: (0..size as usize).collect(),
            poison: Vec::new(),
            max_steps: 10_000_000,
        })
    }

    /// Sets the bound on a run's steps; default 10,000,000.
    pub fn set_max_steps(&mut self, steps: u64) {
        self.max_steps = steps;
    }

    /// World that the group runs in.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// A rank's engine.
    ///
    /// # Panics
    /// If the group has no such rank.
    pub fn engine(&mut self, rank: Rank) -> &mut Engine {
        &mut self.engines[rank.0 as usize]
    }

    /// Ranks in the group.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.engines.len() as u32).map(Rank)
    }

    /// Creates a counter on each rank, with the same number on all.
    pub fn counter(&mut self) -> Result<CounterId> {
        self.counter_with(CounterConfig::default())
    }

    /// Creates a counter with this configuration on each rank; see [`Cluster::counter`].
    pub fn counter_with(&mut self, config: CounterConfig<'_>) -> Result<CounterId> {
        let mut made = CounterId::from_number(0);
        for engine in &mut self.engines {
            made = engine.counter_with(config)?;
        }
        Ok(made)
    }

    /// Grants `regions(owner, peer)` with these counters from each owner to each peer, which imports
    /// them. Returns `remote[rank][owner]`: the regions that `owner` lets `rank` write, in order.
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

    /// Runs `step` on each rank until it returns `true`, fails or is killed. `step` takes the engine, the
    /// time, a poll's events (possibly none) and the requests to fill.
    ///
    /// A finished rank is still polled, as peers may need it to make progress; further events are kept
    /// for the first step of the next run. Ranks are polled in random order. A poisoned engine ends the
    /// rank; a failed rank poisons the peers, as an exiting process would.
    pub fn run<E: From<Error>>(
        &mut self,
        mut step: impl FnMut(&mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
    ) -> Result<Vec<Outcome<E>>, RunError> {
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
    ) -> Result<Vec<Outcome<D::Error>>, RunError>
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

    /// Polls all ranks until the calendar is empty: all parts in flight land and complete.
    pub fn settle(&mut self) -> Result<(), RunError> {
        let mut ended: Vec<_> = self.engines.iter().map(|_| Some(Outcome::Done)).collect();
        let mut idle = |_: &mut Engine, _, _: &[Event], _: &mut Requests| Ok::<_, Error>(true);
        for _ in 0..self.max_steps {
            if !self.pass(&mut ended, &mut idle) && !self.world.step() {
                return Ok(());
            }
        }
        Err(RunError::TooManySteps { steps: self.max_steps, waiting: self.ranks().collect() })
    }

    /// Polls each rank once; true if one made progress.
    fn pass<E: From<Error>>(
        &mut self,
        outcomes: &mut [Option<Outcome<E>>],
        step: &mut impl FnMut(&mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
    ) -> bool {
        self.deliver_poison();
        let mut order = std::mem::take(&mut self.order);
        self.random.shuffle(&mut order);
        let mut busy = false;
        for &index in &order {
            busy |= self.poll_rank(index, &mut outcomes[index], step);
        }
        self.order = order;
        busy
    }

    /// Polls and steps one rank; true on progress.
    fn poll_rank<E: From<Error>>(
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
            self.world.state().check_fenced(self.links[index]);
            self.broadcast_poison(rank, cause);
        }
        busy
    }

    /// Sends a rank's poison to all others.
    fn broadcast_poison(&mut self, from: Rank, cause: Poison) {
        for to in self.ranks().filter(|rank| *rank != from) {
            let at = self.world.now().after(self.random.duration(MAX_POISON_DELAY));
            self.world.wake_at(at);
            self.poison.push(PoisonMessage { at, to, cause: cause.clone() });
        }
    }

    fn deliver_poison(&mut self) {
        let (world, engines, hosts) = (&self.world, &self.engines, &self.hosts);
        let now = world.now();
        self.poison.retain(|message| {
            let due = message.at <= now && world.is_running(hosts[message.to.index()]);
            if due {
                engines[message.to.0 as usize].poison(message.cause.clone());
            }
            !due
        });
    }
}

/// Runs several groups in one world together, as [`Cluster::run`] runs one; the first `step` argument is
/// the group index. Returns each group's outcomes. Groups are independent apart from the world ranks that
/// they share.
pub fn run_groups<E: From<Error>>(
    groups: &mut [Cluster],
    mut step: impl FnMut(usize, &mut Engine, Time, &[Event], &mut Requests) -> Result<bool, E>,
) -> Result<Vec<Vec<Outcome<E>>>, RunError> {
    let Some(world) = groups.first().map(|group| group.world.clone()) else {
        return Ok(Vec::new());
    };
    let max_steps = groups.iter().map(|group| group.max_steps).max().unwrap_or(0);
    let mut outcomes: Vec<Vec<Option<Outcome<E>>>> =
        groups.iter().map(|group| group.engines.iter().map(|_| None).collect()).collect();
    let mut idle = 0;
    for _ in 0..max_steps {
        let mut busy = false;
        for (index, (group, outcomes)) in groups.iter_mut().zip(&mut outcomes).enumerate() {
            busy |= group.pass(
                outcomes,
                &mut |engine: &mut Engine, now, events: &[Event], requests: &mut Requests| {
                    step(index, engine, now, events, requests)
                },
            );
        }
        if outcomes.iter().flatten().all(Option::is_some) {
            return Ok(outcomes.into_iter().map(|of| of.into_iter().flatten().collect()).collect());
        }
        idle = if busy || world.step() { 0 } else { idle + 1 };
        if idle > MAX_IDLE_PASSES {
            let waiting = outcomes.iter().flat_map(|outcomes| waiting(outcomes)).collect();
            return Err(RunError::Deadlock { at: world.now(), waiting });
        }
    }
    let waiting = outcomes.iter().flat_map(|outcomes| waiting(outcomes)).collect();
    Err(RunError::TooManySteps { steps: max_steps, waiting })
}

/// Seed that distinguishes a world's groups; zero if each link has the rank's number.
fn links_seed(links: &[Rank]) -> u64 {
    let apart = (0..).map(Rank).zip(links).any(|(rank, link)| rank != *link);
    if apart {
        links.iter().fold(0x9e37, |seed, link| seed.wrapping_mul(31).wrapping_add(link.0.into()))
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
