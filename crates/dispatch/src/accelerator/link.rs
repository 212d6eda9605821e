//! Slots in the connection to one front end, as the accelerator node uses them.

use super::job::LinkMemory;
use crate::connection::Connection;
use crate::error::Result;
use crate::wire::{Checksum, Fields};
use std::sync::Arc;
use weft_fabric::Requests;

/// Connection slot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// Number of uses.
    pub(super) turn: u32,
    /// Cancels seen, and cancels before the present query.
    cancels: u32,
    cancels_before: u32,
    /// Holds a query without an answer.
    pub(super) open: bool,
    /// The answer waits until a part is confirmed.
    pub(super) held: bool,
    /// Answer status and checksum.
    status: u32,
    checksum: u64,
    pub(super) stream: Stream,
}

/// Answer in parts. A part is written once the front end has confirmed the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stream {
    /// Token bytes written, and token bytes that the backend has appended.
    pub(super) sent: u64,
    pub(super) appended: u64,
    /// Parts written and confirmed, over all uses of the slot.
    pub(super) parts: u64,
    pub(super) confirmed: u64,
    /// Listed in the link's `parts`.
    pub(super) listed: bool,
}

/// Connection to one front end.
#[derive(Debug)]
pub(super) struct Link {
    pub connection: Connection,
    /// Slot memory, for batches.
    pub memory: Arc<LinkMemory>,
    pub(super) slots: Box<[Slot]>,
    /// Query tensor bytes in each slot.
    lengths: Box<[u64]>,
    /// Answer tensor bytes in each slot.
    outputs: Box<[u64]>,
    /// Slots with an answer to write.
    pub(super) answers: Vec<u32>,
    /// The departure must be announced.
    leaves: bool,
    announced: bool,
    /// Slots with a part to write.
    pub(super) parts: Vec<u32>,
}

impl Link {
    /// Connection with number `id` in the node, at `index`.
    pub fn new(connection: Connection, id: u64, index: usize) -> Link {
        let slots = connection.agreement().slots as usize;
        let inputs = connection.agreement().schema.inputs.len();
        let outputs = connection.agreement().schema.outputs.len();
        let parts = if connection.agreement().has_stream() { slots } else { 0 };
        let memory = LinkMemory {
            id,
            index,
            incoming: connection.incoming.clone(),
            outgoing: connection.outgoing.clone(),
            incoming_layout: connection.incoming_layout.clone(),
            outgoing_layout: connection.outgoing_layout.clone(),
        };
        Link {
            connection,
            memory: memory.into(),
            slots: vec![Slot::default(); slots].into(),
            lengths: vec![0; slots * inputs].into(),
            outputs: vec![0; slots * outputs].into(),
            answers: Vec::with_capacity(slots),
            leaves: false,
            announced: false,
            parts: Vec::with_capacity(parts),
        }
    }

    /// Slot count.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Enters a slot's cancel total.
    pub fn cancels(&mut self, slot: u32, total: u32) {
        let slot = &mut self.slots[slot as usize];
        // A total may be reported twice; they rise, modulo 2^32.
        if (total.wrapping_sub(slot.cancels) as i32) > 0 {
            slot.cancels = total;
        }
    }

    /// True if the query in a slot was cancelled.
    pub fn is_cancelled(&self, slot: u32) -> bool {
        let Slot { cancels, cancels_before, open, .. } = self.slots[slot as usize];
        open && (cancels.wrapping_sub(cancels_before) as i32) > 0
    }

    /// Takes the query in a slot if it has arrived entirely.
    ///
    /// # Errors
    /// Header errors.
    #[inline]
    pub fn take_query(&mut self, slot: u32) -> Result<bool> {
        let entry = &mut self.slots[slot as usize];
        let turn = entry.turn.wrapping_add(1);
        if !self.connection.take_arrival(slot, turn, false, 0)? {
            return Ok(false);
        }
        let header = &self.connection.header;
        if entry.open {
            let detail = format!("a query in slot {slot}, whose query has no answer yet");
            return Err(crate::Error::Malformed { what: "use of a slot", detail });
        }
        (entry.turn, entry.cancels_before, entry.open) = (turn, header.word, true);
        (entry.stream.sent, entry.stream.appended) = (0, 0);
        let inputs = header.lengths().len();
        self.lengths[slot as usize * inputs..][..inputs].copy_from_slice(header.lengths());
        Ok(true)
    }

    /// Query tensor bytes in a slot.
    #[inline]
    pub fn lengths(&self, slot: u32) -> &[u64] {
        let inputs = self.connection.agreement().schema.inputs.len();
        &self.lengths[slot as usize * inputs..][..inputs]
    }

    /// Enters an answer to be written: an error, or 0 with each tensor's bytes.
    #[inline]
    pub fn answer(&mut self, slot: u32, code: u32, outputs: &[u64]) {
        if code != 0 {
            return self.answer_error(slot, code);
        }
        let connection = &self.connection;
        let mut checksum = 0;
        if connection.agreement().checksum {
            let mut sum = Checksum::default();
            for (tensor, length) in outputs.iter().enumerate() {
                let offset = connection.outgoing_layout.offset(tensor);
                sum.add(connection.outgoing.read(slot, offset, *length));
            }
            checksum = sum.value();
        }
        self.outputs[slot as usize * outputs.len()..][..outputs.len()].copy_from_slice(outputs);
        self.enter(slot, 0, checksum);
    }

    /// Enters an answer with an error.
    pub fn answer_error(&mut self, slot: u32, code: u32) {
        let has_checksum = self.connection.agreement().checksum;
        self.enter(slot, code, if has_checksum { Checksum::default().value() } else { 0 });
    }

    #[inline]
    fn enter(&mut self, slot: u32, status: u32, checksum: u64) {
        let entry = &mut self.slots[slot as usize];
        (entry.open, entry.status, entry.checksum) = (false, status, checksum);
        match entry.stream.parts == entry.stream.confirmed {
            true => self.answers.push(slot),
            false => entry.held = true,
        }
    }

    /// Announces this node's departure, once.
    pub fn announce_departure(&mut self) {
        self.leaves = true;
    }

    /// True with something to write.
    pub fn has_output(&self) -> bool {
        let announces = self.leaves && !self.announced;
        !self.answers.is_empty() || !self.parts.is_empty() || announces
    }

    /// Writes answers, and parts.
    pub fn emit(&mut self, requests: &mut Requests) {
        let outputs = self.connection.agreement().schema.outputs.len();
        let mut answers = std::mem::take(&mut self.answers);
        for slot in answers.drain(..) {
            let Slot { turn, status: word, checksum, stream, .. } = self.slots[slot as usize];
            let lengths = &self.outputs[slot as usize * outputs..][..outputs];
            let lengths = if word == 0 { lengths } else { &[] };
            let header = Fields { turn, word, checksum, is_part: false, lengths };
            let source = self.connection.outgoing_source(slot);
            self.connection.send(slot, &header, source, stream.sent, requests);
        }
        self.answers = answers;
        while let Some(slot) = self.parts.pop() {
            self.emit_part(slot, requests);
        }
        if self.leaves && !std::mem::replace(&mut self.announced, true) {
            self.connection.announce_departure(requests);
        }
    }
}
