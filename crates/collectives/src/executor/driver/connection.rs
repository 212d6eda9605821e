//! Executor memory and counters: allocation, grants and imports, release.

use super::super::channel::Channel;
use super::super::config::{CollectivesConfig, GroupRoutes};
use super::super::planner::Planner;
use super::super::reducer::Reducer;
use super::super::short::{MAX_RANKS, ShortCalls};
use super::Executor;
use super::call_queue::CallQueue;
use crate::run_error::RunError;
use std::ops::Range;
use weft_fabric::{CounterId, Engine, Event, Grant, Rank, Region, RemoteRegion, Time};

impl Executor {
    /// Allocates channels and counters. Every rank does this in the same order relative to its other objects, with
    /// equal arguments.
    ///
    /// # Errors
    /// [`RunError::Invalid`] and [`RunError::TooLarge`] for the configuration; fabric errors.
    pub fn allocate(
        engine: &mut Engine,
        config: CollectivesConfig,
        routes: GroupRoutes,
    ) -> Result<Executor, RunError> {
        let (rank, ranks) = (engine.rank().0, engine.size());
        config.check(ranks)?;
        let lanes = CollectivesConfig::lanes(ranks, routes.ordered);
        let bytes = u64::from(config.channels) * config.channel_bytes;
        let region = engine.alloc(bytes as usize)?;
        let namespace = engine.namespace();
        let (mut channels, mut counters, mut numbered) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..config.channels {
            let leader = engine.counter()?;
            let mut of_channel = vec![leader];
            for _ in 1..lanes {
                of_channel.push(engine.counter_credited_with(leader)?);
            }
            let lane = |(lane, counter): (u16, &CounterId)| (*counter, number as u16, lane);
            numbered.extend((0..).zip(&of_channel).map(lane));
            counters.extend(&of_channel);
            let number = u64::from(number);
            let base = number * config.channel_bytes;
            let tag = (u64::from(namespace) << Event::NAMESPACE_SHIFT) + number * u64::from(ranks);
            channels.push(Channel::new(region.clone(), base, of_channel, tag, (rank, ranks)));
        }
        numbered.sort_unstable();
        let short = match routes.mapped && ranks <= MAX_RANKS {
            true => Some(ShortCalls::allocate(engine)?),
            false => None,
        };
        let reader = |peer| engine.memory_reader(Rank(peer)).filter(|_| routes.reads);
        let readers: Vec<_> = (0..ranks).map(reader).collect();
        Ok(Executor {
            ranks,
            namespace,
            planner: Planner::new(engine, config, lanes, routes),
            region,
            channels,
            lanes: numbered,
            counters,
            calls: CallQueue::default(),
            short,
            reducer: Reducer::new(&readers, 1),
            readers,
            paused: false,
        })
    }

    /// Grant for `peer`.
    ///
    /// # Errors
    /// Errors from [`Engine::grant`].
    pub fn grant(&self, engine: &mut Engine, peer: Rank) -> Result<Grant, RunError> {
        Ok(engine.grant(peer, &self.granted(), &self.counters)?)
    }

    /// Regions that every peer is granted.
    pub(in crate::executor) fn granted(&self) -> Vec<(&Region, Range<u64>)> {
        let regions =
            std::iter::once(&self.region).chain(self.short.as_ref().map(ShortCalls::region));
        regions.map(|region| (region, 0..region.memory().len() as u64)).collect()
    }

    /// Imports the grant from `peer`.
    ///
    /// # Errors
    /// Errors from [`Engine::import`].
    pub fn link(
        &mut self,
        engine: &mut Engine,
        peer: Rank,
        grant: &Grant,
        deadline: Time,
    ) -> Result<(), RunError> {
        let remotes = engine.import(peer, grant, &self.counters, deadline)?;
        self.linked(engine, peer, &remotes)
    }

    /// Takes the staging memory and the mailbox at `peer`.
    pub(in crate::executor) fn linked(
        &mut self,
        engine: &Engine,
        peer: Rank,
        remotes: &[RemoteRegion],
    ) -> Result<(), RunError> {
        let bytes = self.region.memory().len() as u64;
        let ours = self.granted().len();
        let (Some(remote), true) = (remotes.first(), remotes.len() == ours) else {
            let (what, ours, theirs) = ("regions in a grant", ours as u64, remotes.len() as u64);
            return Err(RunError::Disagreement { peer, what, ours, theirs });
        };
        if remote.length != bytes {
            let (what, theirs) = ("bytes of all channels", remote.length);
            return Err(RunError::Disagreement { peer, what, ours: bytes, theirs });
        }
        for channel in &mut self.channels {
            channel.link(peer, remote.key);
        }
        if let (Some(short), Some(mailbox)) = (&mut self.short, remotes.get(1)) {
            short.link(engine, *mailbox)?;
        }
        Ok(())
    }

    /// Releases staging memory and counters, which no peer was granted yet.
    pub(in crate::executor) fn give_back(self, engine: &mut Engine) {
        for region in self.regions() {
            engine.release(&region);
        }
        for counter in self.counters {
            // A counter is released once.
            let _ = engine.release_counter(counter);
        }
    }

    /// Regions that peers were granted.
    pub(in crate::executor) fn regions(&self) -> Vec<Region> {
        self.granted().into_iter().map(|(region, _)| region.clone()).collect()
    }

    /// Regions for all inputs.
    pub(in crate::executor) fn into_inputs(self) -> impl Iterator<Item = Region> {
        self.calls.into_inputs()
    }
}
