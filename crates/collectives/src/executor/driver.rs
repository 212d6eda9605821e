//! Driver: all channels in an executor as one polled state machine over an engine.
//!
//! Calls are divided into chunks, and chunk `i` among all chunks so far runs on channel `i mod channels`, on every
//! rank: chunk numbers do not travel.

mod call_queue;
mod connection;

use super::call::{Call, CallId};
use super::channel::{Advance, Channel};
use super::planner::{Division, Planner};
use super::reducer::Reducer;
use super::short::ShortCalls;
use crate::placement::Placement;
use crate::run_error::RunError;
use crate::tuning::Tuning;
use call_queue::CallQueue;
use std::sync::Arc;
use weft_fabric::{
    CounterId, Engine, Event, MailboxWaits, MemoryReader, MissingPeer, Region, Requests, Time,
};

/// Wait state for a call, and for short calls.
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

/// State machine for a group's collectives: no clock, no I/O.
pub struct Executor {
    ranks: u32,
    namespace: u16,
    planner: Planner,
    region: Region,
    channels: Vec<Channel>,
    /// Counters for all channels, sorted, with channel and lane.
    lanes: Vec<(CounterId, u16, u16)>,
    /// The same in creation order.
    counters: Vec<CounterId>,
    calls: CallQueue,
    /// Calls by messages, if the routes permit them.
    short: Option<ShortCalls>,
    reducer: Reducer,
    /// Readers for peer memory, by rank.
    readers: Vec<Option<Arc<dyn MemoryReader>>>,
    /// True while a step waits until the requests from the last poll leave.
    paused: bool,
}

impl Executor {
    /// Starts a call; the chunks begin with the next poll.
    ///
    /// # Safety
    /// As for [`Collectives::start`](super::Collectives::start).
    ///
    /// # Errors
    /// As for [`Collectives::start`](super::Collectives::start).
    pub unsafe fn start(&mut self, engine: &mut Engine, call: &Call) -> Result<CallId, RunError> {
        let division = self.divide(call)?;
        let input = match division.reads_input() {
            // SAFETY: the caller keeps this function's contract.
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

    /// Checks a call's arguments.
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

    /// From now on, runs HDRM in this placement's order, equal on all ranks, and selects all-reduces by estimates on
    /// the placement's network.
    pub fn set_placement(&mut self, placement: Option<Placement>) {
        self.planner.set_placement(placement);
    }

    /// Reduces long vectors by this many threads with the calling one, from now on. By default one: polls then use only
    /// the calling thread.
    pub fn set_reduction_threads(&mut self, threads: u32) {
        self.reducer = Reducer::new(&self.readers, threads as usize);
    }

    /// Wait announcements for short calls.
    pub(super) fn waits(&self) -> Option<Arc<MailboxWaits>> {
        self.short.as_ref().map(|short| short.waits().clone())
    }

    /// Starts a checked call if it is short, and sends the messages.
    pub(super) fn begin_short(&mut self, call: &Call) -> Result<Option<CallId>, RunError> {
        let Some(short) = &mut self.short else { return Ok(None) };
        if !self.planner.is_short(call)? {
            return Ok(None);
        }
        short.check()?;
        let id = self.calls.add_short(call);
        short.add(id.0, call);
        self.advance_short();
        Ok(Some(id))
    }

    /// Advances short calls as far as messages permit.
    #[inline]
    fn advance_short(&mut self) {
        while let Some(number) = self.short.as_mut().and_then(ShortCalls::advance) {
            self.calls.chunk_done(number);
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

    /// Adds a call, and begins as many chunks as there are idle channels.
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

    /// Adds a call. The chunks begin with the next poll.
    pub(super) fn add(&mut self, call: &Call, division: Division, input: Option<Region>) -> CallId {
        self.calls.add(call, division, input)
    }

    /// True if all chunks in a call are complete.
    pub fn is_done(&self, id: CallId) -> bool {
        self.calls.is_done(id)
    }

    /// Input region that is no longer needed; the caller releases it.
    pub fn take_finished(&mut self) -> Option<Region> {
        self.calls.take_finished()
    }

    /// True if all calls are complete.
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Peers that block a call: the peers that block its oldest chunk under way.
    pub fn missing(&self, id: CallId) -> Vec<MissingPeer> {
        let count = self.channels.len() as u64;
        let oldest =
            (0..count).map(|i| &self.channels[((self.calls.begun() + i) % count) as usize]);
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
        loop {
            let count = self.channels.len() as u64;
            let channel = &mut self.channels[(self.calls.begun() % count) as usize];
            if channel.chunk.is_some() {
                return any;
            }
            let Some(chunk) = self.calls.begin_chunk(self.ranks) else { return any };
            channel.chunk = Some(chunk);
            any = true;
        }
    }

    /// Advances all channels, the oldest chunk first. Returns true if one is complete.
    fn advance(&mut self, requests: &mut Requests) -> Result<bool, RunError> {
        let count = self.channels.len() as u64;
        let mut any = false;
        for i in 0..count {
            let index = ((self.calls.begun() + i) % count) as usize;
            let Some(number) = self.channels[index].chunk.as_ref().map(|chunk| chunk.call) else {
                continue;
            };
            match self.channels[index].advance(&mut self.reducer, requests)? {
                Advance::Done => {
                    any = true;
                    self.calls.chunk_done(number);
                }
                Advance::Paused => self.paused = true,
                Advance::Blocked => {}
            }
        }
        Ok(any)
    }

    /// Begins and advances chunks until all have to wait.
    fn advance_all(&mut self, requests: &mut Requests) -> Result<(), RunError> {
        self.paused = false;
        loop {
            let began = self.begin();
            if !self.advance(requests)? && !began {
                return Ok(());
            }
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
