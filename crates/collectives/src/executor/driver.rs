//! Driver: all channels of an executor as one polled state machine over an engine.
//!
//! Calls are divided into chunks, and chunk `i` of all chunks so far runs on channel `i mod channels`, on every
//! rank: numbers of chunks do not travel.

use super::call::{Call, CallId};
use super::channel::{Advance, Channel, Chunk};
use super::config::{CollectivesConfig, GroupRoutes};
use super::planner::{Division, Planner};
use super::reducer::Reducer;
use super::short::{MAX_RANKS, ShortCalls};
use crate::placement::Placement;
use crate::run_error::RunError;
use crate::tuning::Tuning;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::{
    CounterId, Engine, Event, Grant, MailboxWaits, MemoryReader, MissingPeer, Rank, Region,
    Requests, Time,
};

struct CallState {
    arguments: Call,
    /// `None` for a short call, which counts as one chunk that has begun.
    division: Option<Division>,
    chunks: u64,
    input: Option<Region>,
    /// Chunks that were given to a channel.
    begun: u64,
    /// Chunks that are complete.
    done: u64,
}

/// State of a wait for a call, and of short calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShortState {
    /// The awaited call is complete.
    Done,
    /// Only short calls are in flight.
    Alone,
    /// Short calls and calls on channels are in flight.
    Mixed,
    /// No short call is in flight.
    None,
}

/// State machine of the collectives of a group: no clock, no I/O.
pub struct Executor {
    ranks: u32,
    namespace: u16,
    planner: Planner,
    region: Region,
    channels: Vec<Channel>,
    /// Counters of all channels, sorted, with channel and lane.
    lanes: Vec<(CounterId, u16, u16)>,
    /// The same in the order of their creation.
    counters: Vec<CounterId>,
    calls: VecDeque<CallState>,
    /// Number of the first of `calls`.
    first: u64,
    /// Index in `calls` of the first that has chunks to begin.
    beginning: usize,
    /// Chunks begun so far.
    sequence: u64,
    /// Regions of inputs that are no longer needed.
    finished: Vec<Region>,
    /// Calls by messages, if the routes permit them.
    short: Option<ShortCalls>,
    reducer: Reducer,
    /// Readers of peers' memory, by rank.
    readers: Vec<Option<Arc<dyn MemoryReader>>>,
    /// A step waits for the requests of the last poll to leave.
    paused: bool,
}

impl Executor {
    /// Allocates channels and counters. Every rank does this in the same order relative to its other objects, with
    /// equal arguments.
    ///
    /// # Errors
    /// [`RunError::Invalid`] and [`RunError::TooLarge`] for the configuration; those of the fabric.
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
            calls: VecDeque::new(),
            first: 0,
            beginning: 0,
            sequence: 0,
            finished: Vec::new(),
            short,
            reducer: Reducer::new(&readers, 1),
            readers,
            paused: false,
        })
    }

    /// Grant for `peer`.
    ///
    /// # Errors
    /// Those of [`Engine::grant`].
    pub fn grant(&self, engine: &mut Engine, peer: Rank) -> Result<Grant, RunError> {
        Ok(engine.grant(peer, &self.granted(), &self.counters)?)
    }

    /// Regions that every peer is granted.
    pub(super) fn granted(&self) -> Vec<(&Region, Range<u64>)> {
        let regions =
            std::iter::once(&self.region).chain(self.short.as_ref().map(ShortCalls::region));
        regions.map(|region| (region, 0..region.memory().len() as u64)).collect()
    }

    /// Imports the grant of `peer`.
    ///
    /// # Errors
    /// Those of [`Engine::import`].
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

    /// Takes the staging memory and the mailbox of `peer`.
    pub(super) fn linked(
        &mut self,
        engine: &Engine,
        peer: Rank,
        remotes: &[weft_fabric::RemoteRegion],
    ) -> Result<(), RunError> {
        let bytes = self.region.memory().len() as u64;
        let ours = self.granted().len();
        let (Some(remote), true) = (remotes.first(), remotes.len() == ours) else {
            let (what, ours, theirs) = ("regions of a grant", ours as u64, remotes.len() as u64);
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

    /// Starts a call; its chunks begin with the next poll.
    ///
    /// # Safety
    /// As for [`Collectives::start`](super::Collectives::start).
    ///
    /// # Errors
    /// As for [`Collectives::start`](super::Collectives::start).
    pub unsafe fn start(&mut self, engine: &mut Engine, call: &Call) -> Result<CallId, RunError> {
        let division = self.divide(call)?;
        let input = match division.reads_input() {
            // SAFETY: the caller keeps the contract of this function.
            true => Some(unsafe { call.register(engine) }?),
            false => None,
        };
        Ok(self.add(call, division, input))
    }

    /// Checks a call and divides it into chunks.
    pub(super) fn divide(&mut self, call: &Call) -> Result<Division, RunError> {
        self.check(call)?;
        self.divide_checked(call)
    }

    /// Checks the arguments of a call.
    pub(super) fn check(&self, call: &Call) -> Result<(), RunError> {
        call.check(self.ranks, self.planner.rank())
    }

    /// Divides a call that was checked into chunks.
    pub(super) fn divide_checked(&mut self, call: &Call) -> Result<Division, RunError> {
        self.planner.divide(call)
    }

    /// Selects algorithms by these measurements, equal on all ranks, from now on.
    pub fn set_tuning(&mut self, tuning: Option<Tuning>) {
        self.planner.set_tuning(tuning);
    }

    /// Runs HDRM in the order of this placement, equal on all ranks, from now on, and selects all-reduces by estimates
    /// on its network.
    pub fn set_placement(&mut self, placement: Option<Placement>) {
        self.planner.set_placement(placement);
    }

    /// Reduces long vectors by this many threads with the calling one, from now on. By default one: polls then use
    /// the calling thread alone.
    pub fn set_reduction_threads(&mut self, threads: u32) {
        self.reducer = Reducer::new(&self.readers, threads as usize);
    }

    /// Announcements of waits for short calls.
    pub(super) fn waits(&self) -> Option<Arc<MailboxWaits>> {
        self.short.as_ref().map(|short| short.waits().clone())
    }

    /// Starts a call that was checked if it is short, and sends its messages.
    pub(super) fn begin_short(&mut self, call: &Call) -> Result<Option<CallId>, RunError> {
        let Some(short) = &mut self.short else { return Ok(None) };
        if !self.planner.is_short(call)? {
            return Ok(None);
        }
        short.check()?;
        let number = self.first + self.calls.len() as u64;
        short.add(number, call);
        let state = CallState {
            arguments: *call,
            division: None,
            chunks: 1,
            input: None,
            begun: 1,
            done: 0,
        };
        self.calls.push_back(state);
        self.advance_short();
        Ok(Some(CallId(number)))
    }

    /// Advances short calls as far as messages permit.
    #[inline]
    fn advance_short(&mut self) {
        while let Some(number) = self.short.as_mut().and_then(ShortCalls::advance) {
            self.chunk_done(number);
        }
    }

    /// Looks for messages a few times.
    pub(super) fn spin_short(&mut self, id: CallId, checks: u32) -> ShortState {
        for _ in 0..checks {
            self.advance_short();
            let short = self.short.as_ref().map_or(0, ShortCalls::len);
            if self.is_done(id) {
                return ShortState::Done;
            }
            if short == 0 {
                return ShortState::None;
            }
            if short < self.calls.len() {
                return ShortState::Mixed;
            }
            std::hint::spin_loop();
        }
        ShortState::Alone
    }

    /// Adds a call, and begins as many of its chunks as there are idle channels.
    pub(super) fn begin_call(
        &mut self,
        call: &Call,
        division: Division,
        input: Option<Region>,
        requests: &mut Requests,
    ) -> Result<CallId, RunError> {
        let id = self.add(call, division, input);
        self.advance_all(requests)?;
        Ok(id)
    }

    /// Adds a call. Its chunks begin with the next poll.
    pub(super) fn add(&mut self, call: &Call, division: Division, input: Option<Region>) -> CallId {
        let id = CallId(self.first + self.calls.len() as u64);
        let (arguments, chunks, division) = (*call, division.chunks, Some(division));
        self.calls.push_back(CallState { arguments, division, chunks, input, begun: 0, done: 0 });
        // A call without elements has no chunks.
        self.forget_complete();
        id
    }

    /// True if all chunks of a call are complete.
    pub fn is_done(&self, id: CallId) -> bool {
        let Some(index) = id.0.checked_sub(self.first) else { return true };
        self.calls.get(index as usize).is_some_and(|call| call.done == call.chunks)
    }

    /// Region of an input that is no longer needed; the caller releases it.
    pub fn take_finished(&mut self) -> Option<Region> {
        self.finished.pop()
    }

    /// Releases staging memory and counters, which no peer was granted yet.
    pub(super) fn give_back(self, engine: &mut Engine) {
        for region in self.regions() {
            engine.release(&region);
        }
        for counter in self.counters {
            // A counter is released once.
            let _ = engine.release_counter(counter);
        }
    }

    /// Regions that peers were granted.
    pub(super) fn regions(&self) -> Vec<Region> {
        self.granted().into_iter().map(|(region, _)| region.clone()).collect()
    }

    /// Regions of all inputs.
    pub(super) fn into_inputs(self) -> impl Iterator<Item = Region> {
        self.finished.into_iter().chain(self.calls.into_iter().filter_map(|call| call.input))
    }

    /// True if all calls are complete.
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Peers that block a call: those of the oldest chunk under way.
    pub fn missing(&self, id: CallId) -> Vec<MissingPeer> {
        let count = self.channels.len() as u64;
        let oldest = (0..count).map(|i| &self.channels[((self.sequence + i) % count) as usize]);
        let of_call =
            |channel: &&Channel| channel.chunk.as_ref().is_some_and(|chunk| chunk.call <= id.0);
        let missing = oldest.into_iter().find(of_call).map(Channel::missing).unwrap_or_default();
        match &self.short {
            Some(short) if missing.is_empty() => short.missing(id.0),
            _ => missing,
        }
    }

    fn note(&mut self, event: &Event) -> Result<(), RunError> {
        match event {
            Event::Raised { counter, peer, count, .. } => {
                if let Some((channel, lane)) = self.position(*counter) {
                    self.channels[channel].note_raised(lane, *peer, *count);
                }
            }
            Event::Credited { counter, peer, credits } => {
                if let Some((channel, _)) = self.position(*counter) {
                    self.channels[channel].note_credits(*peer, *credits);
                }
            }
            Event::Completed { tag } => {
                let number = tag & ((1 << Event::NAMESPACE_SHIFT) - 1);
                let ranks = u64::from(self.ranks);
                if tag >> Event::NAMESPACE_SHIFT == u64::from(self.namespace)
                    && let Some(channel) = self.channels.get_mut((number / ranks) as usize)
                {
                    channel.note_completed((number % ranks) as u32);
                }
            }
            Event::Poisoned(cause) => {
                return Err(weft_fabric::Error::Poisoned(cause.clone()).into());
            }
        }
        Ok(())
    }

    fn position(&self, counter: CounterId) -> Option<(usize, usize)> {
        let index = self.lanes.binary_search_by_key(&counter, |(counter, ..)| *counter).ok()?;
        let (_, channel, lane) = self.lanes[index];
        Some((usize::from(channel), usize::from(lane)))
    }

    /// Gives the next chunks to idle channels, in order. Returns true if there was one.
    fn begin(&mut self) -> bool {
        let mut any = false;
        while let Some(call) = self.calls.get_mut(self.beginning) {
            let Some(division) = call.division.as_ref().filter(|_| call.begun < call.chunks) else {
                self.beginning += 1;
                continue;
            };
            let count = self.channels.len() as u64;
            let channel = &mut self.channels[(self.sequence % count) as usize];
            if channel.chunk.is_some() {
                break;
            }
            let is_last = call.begun + 1 == call.chunks;
            let plan = if is_last { &division.last } else { &division.full };
            let number = self.first + self.beginning as u64;
            let mut chunk = Chunk::new(number, call.arguments, plan.clone(), self.ranks);
            chunk.offset = call.begun * division.share_bytes;
            chunk.input = call.input.as_ref().map(Region::key);
            channel.chunk = Some(chunk);
            call.begun += 1;
            self.sequence += 1;
            any = true;
        }
        any
    }

    /// Advances all channels, the oldest chunk first. Returns true if one is complete.
    fn advance(&mut self, requests: &mut Requests) -> Result<bool, RunError> {
        let count = self.channels.len() as u64;
        let mut any = false;
        for i in 0..count {
            let index = ((self.sequence + i) % count) as usize;
            let Some(number) = self.channels[index].chunk.as_ref().map(|chunk| chunk.call) else {
                continue;
            };
            match self.channels[index].advance(&mut self.reducer, requests)? {
                Advance::Done => {
                    any = true;
                    self.chunk_done(number);
                }
                Advance::Paused => self.paused = true,
                Advance::Blocked => {}
            }
        }
        Ok(any)
    }

    /// Begins and advances chunks until all of them have to wait.
    fn advance_all(&mut self, requests: &mut Requests) -> Result<(), RunError> {
        self.paused = false;
        loop {
            let began = self.begin();
            if !self.advance(requests)? && !began {
                return Ok(());
            }
        }
    }

    fn chunk_done(&mut self, number: u64) {
        let Some(call) = self.calls.get_mut((number - self.first) as usize) else { return };
        call.done += 1;
        if call.done == call.chunks {
            self.finished.extend(call.input.take());
        }
        self.forget_complete();
    }

    /// Removes the oldest calls up to one that is not complete.
    fn forget_complete(&mut self) {
        while let Some(call) = self.calls.front()
            && call.done == call.chunks
        {
            self.calls.pop_front();
            self.first += 1;
            self.beginning = self.beginning.saturating_sub(1);
        }
    }
}

impl weft_fabric::Driver for Executor {
    type Error = RunError;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        &self.counters
    }

    fn poll(&mut self, _: Time, events: &[Event], requests: &mut Requests) -> Result<(), RunError> {
        events.iter().try_for_each(|event| self.note(event))?;
        self.advance_short();
        self.advance_all(requests)
    }

    fn has_more(&self) -> bool {
        self.paused
    }
}
