//! Calls in flight, in start order, and their chunks.

use super::super::call::{Call, CallId};
use super::super::channel::Chunk;
use super::super::planner::Division;
use std::collections::VecDeque;
use weft_fabric::Region;

/// Calls in flight, and inputs to complete ones.
#[derive(Default)]
pub(super) struct CallQueue {
    calls: VecDeque<CallState>,
    /// Number of the first call in `calls`.
    first: u64,
    /// Index in `calls` for the first call that has chunks to begin.
    beginning: usize,
    /// Chunks begun so far.
    begun: u64,
    /// Input regions that are no longer needed.
    finished: Vec<Region>,
}

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

impl CallQueue {
    /// Adds a call that was divided into chunks. A call without elements has no chunks and is complete.
    pub(super) fn add(&mut self, call: &Call, division: Division, input: Option<Region>) -> CallId {
        let id = self.next_id();
        let (arguments, chunks, division) = (*call, division.chunks, Some(division));
        self.calls.push_back(CallState { arguments, division, chunks, input, begun: 0, done: 0 });
        self.forget_complete();
        id
    }

    /// Adds a short call.
    pub(super) fn add_short(&mut self, call: &Call) -> CallId {
        let id = self.next_id();
        let (arguments, division, input) = (*call, None, None);
        self.calls.push_back(CallState {
            arguments,
            division,
            chunks: 1,
            input,
            begun: 1,
            done: 0,
        });
        id
    }

    fn next_id(&self) -> CallId {
        CallId(self.first + self.calls.len() as u64)
    }

    /// Calls in flight.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// True if all calls are complete.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// True if all chunks in a call are complete.
    pub(super) fn is_done(&self, id: CallId) -> bool {
        let Some(index) = id.0.checked_sub(self.first) else { return true };
        self.calls.get(index as usize).is_some_and(|call| call.done == call.chunks)
    }

    /// Chunks begun so far: the next chunk number.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// The next chunk, if there is one.
    pub(super) fn begin_chunk(&mut self, ranks: u32) -> Option<Chunk> {
        loop {
            let call = self.calls.get_mut(self.beginning)?;
            let Some(division) = call.division.as_ref().filter(|_| call.begun < call.chunks) else {
                self.beginning += 1;
                continue;
            };
            let is_last = call.begun + 1 == call.chunks;
            let plan = if is_last { &division.last } else { &division.full };
            let number = self.first + self.beginning as u64;
            let mut chunk = Chunk::new(number, call.arguments, plan.clone(), ranks);
            chunk.offset = call.begun * division.share_bytes;
            chunk.input = call.input.as_ref().map(Region::key);
            call.begun += 1;
            self.begun += 1;
            return Some(chunk);
        }
    }

    /// Counts a complete chunk for a call.
    pub(super) fn chunk_done(&mut self, number: u64) {
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

    /// Input region that is no longer needed.
    pub(super) fn take_finished(&mut self) -> Option<Region> {
        self.finished.pop()
    }

    /// Regions for all inputs.
    pub(super) fn into_inputs(self) -> impl Iterator<Item = Region> {
        self.finished.into_iter().chain(self.calls.into_iter().filter_map(|call| call.input))
    }
}
