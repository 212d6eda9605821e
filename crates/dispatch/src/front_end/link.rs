//! Slots in the connection to one node, as the front end uses them.

use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::ledger::{NodeId, QueryId};
use std::time::Duration;
use weft_fabric::{RegionKey, Requests, Time};

/// Time that answers in transit have to arrive after the node departs.
const DEPARTURE_GRACE: Duration = Duration::from_millis(20);

/// Connection slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Number of uses.
    turn: u32,
    /// Cancels sent for it.
    cancels: u32,
    /// Token bytes that have arrived in parts.
    streamed: u64,
    /// The query was written, and not answered.
    open: bool,
    /// The query has ended without the node.
    withdrawn: bool,
    /// Listed in the link's `withdrawn`.
    listed: bool,
}

/// Orderly node departure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Departure {
    Never,
    /// Answers in transit may arrive until then.
    Grace(Time),
    Over,
}

/// Connection to one node.
#[derive(Debug)]
pub(super) struct Link {
    pub connection: Connection,
    /// Keys for the front end's memories.
    pub keys: Box<[RegionKey]>,
    slots: Box<[Slot]>,
    /// Answer tensor bytes in each slot.
    lengths: Box<[u64]>,
    /// Queries to write.
    pub assigned: Vec<(u32, QueryId)>,
    /// Slots whose node is to be notified.
    withdrawn: Vec<u32>,
    departure: Departure,
    /// Slots with a part to confirm.
    parts: Vec<u32>,
}

/// Arrival in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Answer part: tokens so far.
    Part { tokens: u32 },
    /// Answer with all tokens, or 0.
    Answer { tokens: u32 },
    /// Error in place of an answer.
    Error { code: u32 },
}

/// Answer in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    connection: &'a Connection,
    lengths: &'a [u64],
    slot: u32,
}

impl<'a> Source<'a> {
    /// Tensor count.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Tensor bytes.
    pub fn tensor(&self, tensor: usize) -> &'a [u8] {
        let offset = self.connection.incoming_layout.offset(tensor);
        self.connection.incoming.read(self.slot, offset, self.lengths[tensor])
    }
}

impl Link {
    pub fn new(connection: Connection, keys: &[RegionKey]) -> Link {
        let slots = connection.agreement().slots as usize;
        let outputs = connection.agreement().schema.outputs.len();
        let parts = if connection.agreement().has_stream() { slots } else { 0 };
        Link {
            connection,
            keys: keys.into(),
            slots: vec![Slot::default(); slots].into(),
            lengths: vec![0; slots * outputs].into(),
            assigned: Vec::with_capacity(slots),
            withdrawn: Vec::with_capacity(slots),
            departure: Departure::Never,
            parts: Vec::with_capacity(parts),
        }
    }

    /// True at the first call after the node's departure.
    pub fn has_just_left(&mut self, now: Time) -> bool {
        let has_left = self.departure == Departure::Never && self.connection.peer_has_left();
        if has_left {
            self.departure = Departure::Grace(now.after(DEPARTURE_GRACE));
        }
        has_left
    }

    /// End of the grace period for answers from a node that has left.
    pub fn grace(&self) -> Option<Time> {
        match self.departure {
            Departure::Grace(end) => Some(end),
            Departure::Never | Departure::Over => None,
        }
    }

    /// Ends the time for answers.
    pub fn end_grace(&mut self) {
        self.departure = Departure::Over;
    }

    /// Enters a query to be written.
    pub fn assign(&mut self, slot: u32, query: QueryId) {
        self.slots[slot as usize].withdrawn = false;
        self.assigned.push((slot, query));
    }

    /// True with queries, cancels or confirmations to write.
    pub fn has_output(&self) -> bool {
        !self.assigned.is_empty() || !self.withdrawn.is_empty() || !self.parts.is_empty()
    }

    /// Begins a slot use; returns the number and the cancels before it.
    pub fn begin(&mut self, slot: u32) -> (u32, u32) {
        let slot = &mut self.slots[slot as usize];
        slot.turn = slot.turn.wrapping_add(1);
        (slot.open, slot.streamed) = (true, 0);
        (slot.turn, slot.cancels)
    }

    /// Records that the query in a slot has ended without the node.
    pub fn withdraw(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.withdrawn = true;
        if !std::mem::replace(&mut entry.listed, true) {
            self.withdrawn.push(slot);
        }
    }

    /// Cancels the withdrawn queries that the node has not answered meanwhile.
    pub fn cancel_withdrawn(&mut self, requests: &mut Requests) {
        while let Some(slot) = self.withdrawn.pop() {
            let entry = &mut self.slots[slot as usize];
            entry.listed = false;
            if std::mem::replace(&mut entry.withdrawn, false) {
                entry.cancels = entry.cancels.wrapping_add(1);
                self.connection.cancel(slot, requests);
            }
        }
    }

    /// Confirms the parts that were taken.
    pub fn confirm_parts(&mut self, requests: &mut Requests) {
        while let Some(slot) = self.parts.pop() {
            self.connection.confirm_part(slot, requests);
        }
    }

    /// Takes the answer in a slot, or a part, if it has arrived entirely.
    ///
    /// # Errors
    /// [`Error::UnexpectedAnswer`] without a query in the slot; header errors.
    #[inline]
    pub fn take_answer(&mut self, node: NodeId, slot: u32) -> Result<Option<Arrival>> {
        let entry = &mut self.slots[slot as usize];
        if !self.connection.take_arrival(slot, entry.turn, true, entry.streamed)? {
            return Ok(None);
        }
        let header = &self.connection.header;
        if !entry.open {
            return Err(Error::UnexpectedAnswer { node, slot });
        }
        let layout = &self.connection.incoming_layout;
        let tokens = |bytes: u64| (bytes / layout.token_bytes().max(1)) as u32;
        if header.is_part {
            entry.streamed = header.lengths()[0];
            self.parts.push(slot);
            return Ok(Some(Arrival::Part { tokens: tokens(entry.streamed) }));
        }
        (entry.open, entry.withdrawn) = (false, false);
        if header.word != 0 {
            return Ok(Some(Arrival::Error { code: header.word }));
        }
        let outputs = header.lengths().len();
        self.lengths[slot as usize * outputs..][..outputs].copy_from_slice(header.lengths());
        let tokens = layout.stream().map_or(0, |stream| tokens(header.lengths()[stream]));
        Ok(Some(Arrival::Answer { tokens }))
    }

    /// Bytes for these tokens in a slot's answer.
    pub fn tokens(&self, slot: u32, from: u32, to: u32) -> &[u8] {
        let layout = &self.connection.incoming_layout;
        let Some(stream) = layout.stream() else { return &[] };
        let (offset, token) = (layout.offset(stream), layout.token_bytes());
        let (from, to) = (u64::from(from) * token, u64::from(to) * token);
        self.connection.incoming.read(slot, offset + from, to - from)
    }

    /// The answer in a slot.
    pub fn source(&self, slot: u32) -> Source<'_> {
        let outputs = self.connection.agreement().schema.outputs.len();
        let lengths = &self.lengths[slot as usize * outputs..][..outputs];
        Source { connection: &self.connection, lengths, slot }
    }
}
