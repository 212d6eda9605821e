//! Slots of the connection to one front end, as the accelerator node uses them.

use super::job::LinkMemory;
use super::reply::Reply;
use crate::connection::Connection;
use crate::error::Result;
use crate::wire::{Checksum, Header};
use std::collections::VecDeque;
use std::sync::Arc;
use weft_fabric::Requests;

/// Slot of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// Number of its uses.
    pub(super) turn: u32,
    /// Cancels seen, and those before its present query.
    cancels: u32,
    cancels_before: u32,
    /// Holds a query without an answer.
    pub(super) open: bool,
    pub(super) stream: Stream,
}

/// Answer in parts. A part is written once the front end has confirmed the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stream {
    /// Bytes of tokens written, and those that the backend has appended.
    pub(super) sent: u64,
    pub(super) appended: u64,
    /// Parts written and confirmed, over all uses of the slot.
    pub(super) parts: u64,
    pub(super) confirmed: u64,
    /// Listed in `parts` of the link.
    pub(super) listed: bool,
}

/// Connection to one front end.
#[derive(Debug)]
pub(super) struct Link {
    pub connection: Connection,
    /// Memory of its slots, for batches.
    pub memory: Arc<LinkMemory>,
    pub(super) slots: Box<[Slot]>,
    /// Bytes of each tensor of the query in each slot.
    lengths: Box<[u64]>,
    /// Answers to write.
    pub(super) answers: VecDeque<(u32, Header)>,
    /// The announcement of the departure is to be sent.
    leaves: bool,
    announced: bool,
    /// Slots with a part to write.
    pub(super) parts: Vec<u32>,
    /// Answers that wait for the confirmation of a part, by slot; empty without an output of tokens.
    pub(super) held: Box<[Option<Header>]>,
}

impl Link {
    /// Connection with number `id` in its node, at `index`.
    pub fn new(connection: Connection, id: u64, index: usize) -> Link {
        let slots = connection.agreement().slots as usize;
        let inputs = connection.agreement().schema.inputs.len();
        let held = if connection.agreement().has_stream() { slots } else { 0 };
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
            answers: VecDeque::with_capacity(slots),
            leaves: false,
            announced: false,
            parts: Vec::with_capacity(held),
            held: vec![None; held].into(),
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Enters the total of cancels of a slot.
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
    /// Those of the header.
    #[inline]
    pub fn take_query(&mut self, slot: u32) -> Result<bool> {
        let entry = &mut self.slots[slot as usize];
        let turn = entry.turn.wrapping_add(1);
        let Some(header) = self.connection.take_arrival(slot, turn, false, 0)? else {
            return Ok(false);
        };
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

    /// Bytes of each tensor of the query in a slot.
    #[inline]
    pub fn lengths(&self, slot: u32) -> &[u64] {
        let inputs = self.connection.agreement().schema.inputs.len();
        &self.lengths[slot as usize * inputs..][..inputs]
    }

    /// Enters an answer to be written.
    pub fn answer(&mut self, slot: u32, reply: &Reply) {
        if reply.code != 0 {
            return self.answer_error(slot, reply.code);
        }
        let mut header = Header::new(0, 0, reply.lengths().iter().copied());
        let connection = &self.connection;
        if connection.agreement().checksum {
            let mut sum = Checksum::default();
            for (tensor, length) in header.lengths().iter().enumerate() {
                let offset = connection.outgoing_layout.offset(tensor);
                sum.add(connection.outgoing.read(slot, offset, *length));
            }
            header.checksum = sum.value();
        }
        self.enter(slot, header);
    }

    /// Enters an answer with an error.
    pub fn answer_error(&mut self, slot: u32, code: u32) {
        let mut header = Header::new(0, code, []);
        if self.connection.agreement().checksum {
            header.checksum = Checksum::default().value();
        }
        self.enter(slot, header);
    }

    fn enter(&mut self, slot: u32, mut header: Header) {
        let entry = &mut self.slots[slot as usize];
        entry.open = false;
        header.turn = entry.turn;
        match entry.stream.parts == entry.stream.confirmed {
            true => self.answers.push_back((slot, header)),
            false => self.held[slot as usize] = Some(header),
        }
    }

    /// Announces the departure of this node, once.
    pub fn announce_departure(&mut self) {
        self.leaves = true;
    }

    /// Writes the answers, and parts of them.
    pub fn emit(&mut self, requests: &mut Requests) {
        while let Some((slot, header)) = self.answers.pop_front() {
            let streamed = self.slots[slot as usize].stream.sent;
            self.connection.send(slot, &header, None, streamed, requests);
        }
        while let Some(slot) = self.parts.pop() {
            self.emit_part(slot, requests);
        }
        if self.leaves && !std::mem::replace(&mut self.announced, true) {
            self.connection.announce_departure(requests);
        }
    }
}
