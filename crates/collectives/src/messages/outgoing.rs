//! Messages toward one peer: a send queue, written into the peer's ring slot by slot.

use super::header::Header;
use super::memory::{Rings, Slot};
use super::operations::{Completed, OperationId, Operations};
use std::collections::VecDeque;
use weft_fabric::{CounterId, Page, Rank, RegionKey, Requests};

/// State for messages toward a peer.
#[derive(Debug)]
pub(super) struct Outgoing {
    peer: Rank,
    me: Rank,
    /// The peer's ring region, and the offset to this rank's ring there.
    region: RegionKey,
    offset: u64,
    /// Slot bytes that the route uses.
    room: u64,
    stride: u64,
    slots: u32,
    /// Sends that have bytes left to write, in order.
    queue: VecDeque<OperationId>,
    /// True once the first slot in the first send has been written.
    begun: bool,
    /// Messages begun so far.
    sequence: u64,
    /// Rounds started.
    started: u64,
    /// Rounds that the peer has read.
    credits: u64,
    /// Sends whose writes are in flight, by slot.
    in_flight: Box<[Option<OperationId>]>,
    writes: u32,
}

/// Objects that an advance uses.
pub(super) struct SendContext<'a> {
    pub rings: &'a Rings,
    pub operations: &'a mut Operations,
    pub counter: CounterId,
    pub batch_bytes: u64,
    /// Tag for the write from slot 0 toward this peer; tags for other slots follow.
    pub first_tag: u64,
    pub requests: &'a mut Requests,
}

/// This rank's ring at a peer.
pub(super) struct PeerRing {
    pub region: RegionKey,
    pub offset: u64,
    pub room: u64,
    pub stride: u64,
    pub slots: u32,
}

impl Outgoing {
    /// State before the first message.
    pub fn new(peer: Rank, me: Rank, ring: PeerRing) -> Outgoing {
        let PeerRing { region, offset, room, stride, slots } = ring;
        Outgoing {
            peer,
            me,
            region,
            offset,
            room,
            stride,
            slots,
            queue: VecDeque::with_capacity(slots as usize),
            begun: false,
            sequence: 0,
            started: 0,
            credits: 0,
            in_flight: vec![None; slots as usize].into(),
            writes: 0,
        }
    }

    /// The peer's ring region.
    pub fn region(&self) -> RegionKey {
        self.region
    }

    /// Adds a send.
    pub fn push(&mut self, operation: OperationId) {
        self.queue.push_back(operation);
    }

    /// Records the peer's credits. Returns how many rounds have started if the peer gave more.
    pub fn credited(&mut self, credits: u64) -> Result<(), u64> {
        if credits > self.started {
            return Err(self.started);
        }
        self.credits = self.credits.max(credits);
        Ok(())
    }

    /// Records that a write has completed: the staging ring slot is free.
    pub fn completed(&mut self, slot: u32, operations: &mut Operations) {
        let Some(id) = self.in_flight.get_mut(slot as usize).and_then(Option::take) else { return };
        self.writes -= 1;
        if let Some(operation) = operations.get_mut(id) {
            operation.in_flight -= 1;
            if operation.all_staged && operation.in_flight == 0 {
                operation.end(Ok(Completed { from: self.me, bytes: operation.bytes }));
            }
        }
    }

    /// True if no write is in flight.
    pub fn is_drained(&self) -> bool {
        self.writes == 0
    }

    /// True if all rounds were credited, and no send waits.
    pub fn is_idle(&self) -> bool {
        self.is_drained() && self.queue.is_empty() && self.credits == self.started
    }

    /// Slots that a message with this length occupies.
    pub fn slots_of(&self, length: u64) -> u64 {
        length.saturating_add(Header::BYTES).div_ceil(self.room)
    }

    /// Writes as many slots as the peer's credits and the batch allow. True if the batch ended it.
    pub fn advance(&mut self, context: &mut SendContext<'_>) -> bool {
        let mut written = 0;
        while let Some(&id) = self.queue.front() {
            let number = (self.started % u64::from(self.slots)) as u32;
            let is_open = self.started < self.credits + u64::from(self.slots);
            if !is_open || self.in_flight[number as usize].is_some() {
                return false;
            }
            if written >= context.batch_bytes {
                return true;
            }
            let (bytes, is_last) = self.write_slot(id, number, context);
            written += bytes;
            if is_last {
                self.queue.pop_front();
                self.begun = false;
            }
        }
        false
    }

    /// Writes the next slot in a send. Returns the bytes, and true if it was the last slot.
    fn write_slot(
        &mut self,
        id: OperationId,
        number: u32,
        context: &mut SendContext<'_>,
    ) -> (u64, bool) {
        let Some(operation) = context.operations.get_mut(id) else { return (0, true) };
        let Some(memory) = &operation.memory else { return (0, true) };
        let slot = Slot { peer: self.peer, number };
        let mut used = 0;
        if !self.begun {
            self.write_header(slot, operation.tag, operation.bytes, context.rings);
            used = Header::BYTES;
        }
        let length = (self.room - used).min(operation.bytes - operation.moved);
        let (source, source_offset) = match &operation.region {
            Some(region) if used == 0 => (region.key(), operation.moved),
            _ => {
                context.rings.stage(slot, used, memory, operation.moved, length);
                (context.rings.staging_key(), context.rings.offset(slot))
            }
        };
        operation.moved += length;
        operation.in_flight += 1;
        operation.all_staged = operation.moved == operation.bytes;
        let is_last = operation.all_staged;
        let page = Page {
            source,
            source_offset,
            destination: self.region,
            destination_offset: self.offset + u64::from(number) * self.stride,
            length: used + length,
        };
        let tag = context.first_tag + u64::from(number);
        context.requests.write(self.peer, context.counter, self.started, [page], tag);
        self.in_flight[number as usize] = Some(id);
        self.writes += 1;
        self.started += 1;
        (used + length, is_last)
    }

    /// Writes the next message's header into the first slot.
    fn write_header(&mut self, slot: Slot, tag: u64, length: u64, rings: &Rings) {
        let header = Header { sequence: self.sequence, tag, length };
        rings.stage_header(slot, &header);
        self.begun = true;
        self.sequence += 1;
    }
}
