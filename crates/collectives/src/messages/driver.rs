//! All messages on a rank as one polled driver.

use super::config::MessagesConfig;
use super::incoming::{Incoming, ReceiveContext, end_receive};
use super::matching::{Content, Matching, PostedReceive, UnexpectedMessage};
use super::memory::{Rings, Slot, UserMemory};
use super::operations::{
    Completed, Direction, Operation, OperationId, Operations, RESERVED, TooLong,
};
use super::outgoing::{Outgoing, PeerRing, SendContext};
use crate::run_error::RunError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_fabric::{
    CounterConfig, CounterId, Engine, Event, Grant, MissingPeer, Rank, Region, RemoteRegion,
    Requests, Time,
};

/// State machine for tagged messages: no clock and no I/O. After construction it allocates only for buffered messages
/// and for more operations at a time than before.
pub struct Driver {
    config: MessagesConfig,
    me: Rank,
    counters: [CounterId; 1],
    namespace: u16,
    rings: Rings,
    operations: Operations,
    matching: Matching,
    /// By rank; `None` for this rank.
    outgoing: Vec<Option<Outgoing>>,
    incoming: Vec<Option<Incoming>>,
    /// A batch ended before the bytes that can be copied.
    more: bool,
    /// Regions from sends that have ended.
    regions: Vec<Region>,
    /// No message advances any more; completions are still recorded.
    stopped: Arc<AtomicBool>,
}

impl Driver {
    /// Allocates the rings and the counter. Every rank in the group does this in the same order relative to its other
    /// objects, with the same configuration; then grants are exchanged and linked.
    ///
    /// # Errors
    /// [`RunError::Invalid`] and [`RunError::TooLarge`] for the configuration; fabric errors. Memory allocated before
    /// the error is released.
    pub fn allocate(engine: &mut Engine, config: &MessagesConfig) -> Result<Driver, RunError> {
        let (me, ranks) = (engine.rank(), engine.size());
        config.check(ranks)?;
        let rings = Rings::allocate(engine, ranks, config)?;
        let shape = CounterConfig { window: config.slots, ..CounterConfig::default() };
        let counter = match engine.counter_with(shape) {
            Ok(counter) => counter,
            Err(error) => {
                rings.release(engine);
                return Err(error.into());
            }
        };
        Ok(Driver {
            config: *config,
            me,
            counters: [counter],
            namespace: engine.namespace(),
            rings,
            operations: Operations::new(),
            matching: Matching::new(config.max_unexpected_bytes, RESERVED),
            outgoing: (0..ranks).map(|_| None).collect(),
            incoming: (0..ranks).map(|_| None).collect(),
            more: false,
            regions: Vec::new(),
            stopped: Arc::default(),
        })
    }

    /// Grant for `peer`.
    ///
    /// # Errors
    /// Errors from [`Engine::grant`].
    pub fn grant(&self, engine: &mut Engine, peer: Rank) -> Result<Grant, RunError> {
        let region = (self.rings.arrivals(), self.rings.granted(peer));
        Ok(engine.grant(peer, &[region], &self.counters)?)
    }

    /// Imports the grant from `peer`.
    ///
    /// # Errors
    /// Errors from [`Engine::import`]; [`RunError::Disagreement`] if the peer's rings have another size.
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

    /// Takes the rings at `peer`, whose grant the engine has imported.
    pub(super) fn linked(
        &mut self,
        engine: &Engine,
        peer: Rank,
        remotes: &[RemoteRegion],
    ) -> Result<(), RunError> {
        let unknown = weft_fabric::Error::Unknown { what: "rank", number: peer.0.into() };
        let parts = engine.route(peer).ok_or(unknown)?.parts;
        let (theirs, ours) = match remotes {
            [remote] => (remote.length, self.rings.length()),
            _ => (remotes.len() as u64, 1),
        };
        let (true, Some(remote)) = (theirs == ours, remotes.first()) else {
            let what = "ring bytes on a rank";
            return Err(RunError::Disagreement { peer, what, ours, theirs });
        };
        let (slots, stride) = (self.config.slots, self.config.stride());
        let (room, region) = (self.config.room(parts)?, remote.key);
        let offset = self.rings.offset(Slot { peer: self.me, number: 0 });
        let ring = PeerRing { region, offset, room, stride, slots };
        self.outgoing[peer.index()] = Some(Outgoing::new(peer, self.me, ring));
        self.incoming[peer.index()] = Some(Incoming::new(peer, room, slots));
        Ok(())
    }

    /// Starts a send.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for a rank outside the group; [`RunError::TooLarge`].
    ///
    /// # Safety
    /// `bytes` bytes at `source` stay valid for reads until the operation has ended or this value is dropped.
    pub unsafe fn send(
        &mut self,
        to: Rank,
        tag: u64,
        source: *const u8,
        bytes: u64,
        requests: &mut Requests,
    ) -> Result<OperationId, RunError> {
        // SAFETY: by this function's contract.
        unsafe { self.send_from(to, tag, (source, bytes), None, requests) }
    }

    /// Same as [`Driver::send`] for memory that may be registered; [`Driver::take_regions`] returns the region after
    /// the end.
    ///
    /// # Safety
    /// As for [`Driver::send`].
    pub(super) unsafe fn send_from(
        &mut self,
        to: Rank,
        tag: u64,
        (source, bytes): (*const u8, u64),
        region: Option<Region>,
        requests: &mut Requests,
    ) -> Result<OperationId, RunError> {
        if let Err(error) = self.check(Some(to), bytes) {
            self.regions.extend(region);
            return Err(error);
        }
        // SAFETY: by this function's contract.
        let memory = unsafe { UserMemory::source(source, bytes) };
        let operation =
            Operation { region, ..Operation::new(Direction::Send, Some(to), tag, memory) };
        let id = self.operations.open(operation)?;
        if to == self.me {
            self.send_to_self(id, tag, bytes);
        } else if let Some(outgoing) = &mut self.outgoing[to.index()] {
            outgoing.push(id);
            self.advance_sends(to, requests);
        }
        Ok(id)
    }

    /// Starts to receive a message from `from`, or from any rank.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for a rank outside the group; [`RunError::TooLarge`].
    ///
    /// # Safety
    /// `bytes` bytes at `target` stay valid for writes until the operation has ended or this value is dropped.
    pub unsafe fn receive(
        &mut self,
        from: Option<Rank>,
        tag: u64,
        target: *mut u8,
        bytes: u64,
        requests: &mut Requests,
    ) -> Result<OperationId, RunError> {
        self.check(from, bytes)?;
        // SAFETY: by this function's contract.
        let memory = unsafe { UserMemory::target(target, bytes) };
        let id = self.operations.open(Operation::new(Direction::Receive, from, tag, memory))?;
        match self.matching.take_message(from, tag) {
            Some(message) => {
                self.take_unexpected(id, message);
                // There may be room now for a message that did not fit into the buffers.
                self.advance_receives(None, requests)?;
            }
            None => {
                self.matching.post(PostedReceive { operation: id, from, tag });
                self.advance_receives(from, requests)?;
            }
        }
        Ok(id)
    }

    fn check(&self, peer: Option<Rank>, bytes: u64) -> Result<(), RunError> {
        if self.is_stopped() {
            return Err(RunError::Closed);
        }
        let ranks = self.outgoing.len();
        if let Some(peer) = peer.filter(|peer| peer.index() >= ranks) {
            let detail = format!("{}: expected 0 to {}", peer.0, ranks - 1);
            return Err(RunError::Invalid { what: "rank of a message", detail });
        }
        let limit = super::header::Header::MAX_LENGTH;
        if bytes > limit {
            let what = "message bytes";
            return Err(RunError::TooLarge { what, wanted: bytes, limit });
        }
        Ok(())
    }

    /// Delivers a message from this rank to itself, or buffers it within the limit.
    fn send_to_self(&mut self, id: OperationId, tag: u64, bytes: u64) {
        let me = self.me;
        if let Some(receive) = self.matching.take_receive(me, tag) {
            return self.copy_locally(id, receive, bytes);
        }
        let Some(operation) = self.operations.get_mut(id) else { return };
        match (&operation.memory, self.matching.begin_buffer(me, tag, bytes)) {
            (Some(memory), Some(serial)) => {
                if let Some(buffer) = self.matching.buffer(serial) {
                    buffer.resize(bytes as usize, 0);
                    memory.read(0, buffer);
                }
                operation.moved = bytes;
                operation.end(Ok(Completed { from: me, bytes }));
            }
            _ => self.matching.add_send(me, tag, bytes, id),
        }
    }

    /// Copies a message from this rank to itself from the send to the receive; both end.
    fn copy_locally(&mut self, send: OperationId, receive: OperationId, bytes: u64) {
        let from = self.me;
        let source = self.operations.get_mut(send).and_then(|operation| {
            let memory = operation.memory.take();
            operation.end(Ok(Completed { from, bytes }));
            memory
        });
        let Some(operation) = self.operations.get_mut(receive) else { return };
        if let (Some(target), Some(source)) = (&mut operation.memory, source) {
            target.copy_from(&source, bytes);
        }
        end_receive(&mut self.operations, receive, from, bytes);
    }

    /// Delivers a message without a receive to the receive that takes it.
    fn take_unexpected(&mut self, id: OperationId, message: UnexpectedMessage) {
        let UnexpectedMessage { serial, from, length, content, .. } = message;
        let bytes = match content {
            Content::Send(send) => return self.copy_locally(send, id, length),
            Content::Buffer(bytes) => bytes,
        };
        let has_arrived = bytes.len() as u64 == length;
        if !has_arrived && let Some(incoming) = &mut self.incoming[from.index()] {
            incoming.redirect(serial, id, &mut self.operations);
        }
        if let Some(operation) = self.operations.get_mut(id)
            && length <= operation.bytes
            && let Some(memory) = &mut operation.memory
        {
            memory.write(0, &bytes);
            operation.moved = bytes.len() as u64;
        }
        if has_arrived {
            end_receive(&mut self.operations, id, from, length);
        }
    }

    fn advance_sends(&mut self, to: Rank, requests: &mut Requests) {
        if self.is_stopped() {
            return;
        }
        let (first_tag, batch_bytes) = (self.first_tag(to), self.config.batch_bytes());
        let Driver { outgoing, rings, operations, counters, .. } = self;
        if let Some(outgoing) = &mut outgoing[to.index()] {
            let counter = counters[0];
            let mut context =
                SendContext { rings, operations, counter, batch_bytes, first_tag, requests };
            self.more |= outgoing.advance(&mut context);
        }
    }

    /// Advances the messages from one rank, or from all.
    fn advance_receives(
        &mut self,
        from: Option<Rank>,
        requests: &mut Requests,
    ) -> Result<(), RunError> {
        if self.is_stopped() {
            return Ok(());
        }
        let batch_bytes = self.config.batch_bytes();
        let Driver { incoming, rings, operations, matching, counters, more, .. } = self;
        let range = match from {
            Some(rank) => rank.index()..rank.index() + 1,
            None => 0..incoming.len(),
        };
        let counter = counters[0];
        let mut context =
            ReceiveContext { rings, operations, matching, counter, batch_bytes, requests };
        for incoming in incoming[range].iter_mut().flatten() {
            *more |= incoming.advance(&mut context)?;
        }
        Ok(())
    }

    /// Tag for the write from slot 0 toward a peer.
    fn first_tag(&self, peer: Rank) -> u64 {
        let number = u64::from(peer.0) * u64::from(self.config.slots);
        (u64::from(self.namespace) << Event::NAMESPACE_SHIFT) + number
    }

    /// Takes an operation's result and removes the operation; `None` while it is under way.
    ///
    /// # Errors
    /// [`RunError::MessageTooLong`]; [`RunError::Invalid`] for an operation that was removed.
    pub fn take(&mut self, id: OperationId) -> Result<Option<Completed>, RunError> {
        if !self.is_done(id)? {
            return Ok(None);
        }
        let Some(mut operation) = self.operations.remove(id) else { return Ok(None) };
        self.regions.extend(operation.region.take());
        match operation.outcome {
            Some(Err(TooLong { from, sent })) => {
                let (tag, room) = (operation.tag, operation.bytes);
                Err(RunError::MessageTooLong { peer: from, tag, sent, room })
            }
            Some(Ok(completed)) => Ok(Some(completed)),
            None => Ok(None),
        }
    }

    /// True if an operation has ended.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for an operation that was removed.
    pub fn is_done(&self, id: OperationId) -> Result<bool, RunError> {
        match self.operations.get(id) {
            Some(operation) => Ok(operation.outcome.is_some()),
            None => {
                let detail = "expected one whose wait has not returned".to_owned();
                Err(RunError::Invalid { what: "operation", detail })
            }
        }
    }

    /// Operation description, for errors.
    pub fn describe(&self, id: OperationId) -> String {
        self.operations.get(id).map_or_else(|| "an operation".to_owned(), Operation::describe)
    }

    /// The peer that blocks an operation, with the message slots and the slots written or read so far. Empty for a
    /// receive from any rank, and between a rank and itself.
    pub fn missing(&self, id: OperationId) -> Vec<MissingPeer> {
        let Some(operation) = self.operations.get(id).filter(|one| one.outcome.is_none()) else {
            return Vec::new();
        };
        let missing = operation.peer.and_then(|rank| {
            let outgoing = self.outgoing[rank.index()].as_ref()?;
            let expected = outgoing.slots_of(operation.bytes);
            let seen = match operation.moved {
                0 => 0,
                moved => outgoing.slots_of(moved).min(expected - 1),
            };
            Some(MissingPeer { rank, expected, seen })
        });
        missing.into_iter().collect()
    }

    /// True if no message is under way here: all operations were taken, all writes have completed and were
    /// credited, and all arrived slots were read.
    pub fn is_idle(&self) -> bool {
        self.operations.len() == 0
            && self.matching.lengths() == (0, 0)
            && self.matching.buffered() == 0
            && self.outgoing.iter().flatten().all(Outgoing::is_idle)
            && self.incoming.iter().flatten().all(Incoming::is_idle)
    }

    /// Credited rounds from a peer.
    pub fn credited(&self, peer: Rank) -> u64 {
        self.incoming[peer.index()].as_ref().map_or(0, Incoming::credited)
    }

    /// True if no write from this rank is in flight.
    pub(super) fn is_drained(&self) -> bool {
        self.outgoing.iter().flatten().all(Outgoing::is_drained)
    }

    /// Shortest message that is written from user memory.
    pub(super) fn direct_bytes(&self) -> u64 {
        self.config.direct_bytes()
    }

    /// Flag that stops all messages.
    pub(super) fn stop_flag(&self) -> &Arc<AtomicBool> {
        &self.stopped
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Stops all messages; operation memory is not accessed any more.
    pub(super) fn stop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        self.operations.drop_memory();
    }

    /// Takes the regions from sends that have ended, which the engine may release.
    pub(super) fn take_regions(&mut self) -> Vec<Region> {
        std::mem::take(&mut self.regions)
    }

    /// Releases the memory here, and the peer memory mappings. No rank writes to either any more.
    pub(super) fn give_back(mut self, engine: &mut Engine) {
        for region in self.regions.drain(..).chain(self.operations.take_regions()) {
            engine.release(&region);
        }
        for counter in self.counters {
            // The last call may have released it; a second release is rejected without effect.
            let _ = engine.release_counter(counter);
        }
        self.rings.release(engine);
        for (rank, outgoing) in (0..).map(Rank).zip(&self.outgoing) {
            if let Some(outgoing) = outgoing {
                engine.remove_remote(rank, outgoing.region());
            }
        }
    }

    /// Requests with room for one poll.
    pub fn requests(&self) -> Requests {
        let all = self.outgoing.len() * self.config.slots as usize;
        Requests::with_capacity(2 * all, all)
    }

    fn note(&mut self, event: &Event) -> Result<(), RunError> {
        match event {
            Event::Raised { counter, peer, round, count } if *counter == self.counters[0] => {
                let incoming = self.incoming.get_mut(peer.index()).and_then(Option::as_mut);
                incoming.map_or(Ok(()), |incoming| incoming.raised(*round, *count))
            }
            Event::Credited { counter, peer, credits } if *counter == self.counters[0] => {
                let outgoing = self.outgoing.get_mut(peer.index()).and_then(Option::as_mut);
                let credited = outgoing.map_or(Ok(()), |outgoing| outgoing.credited(*credits));
                credited.map_err(|expected| {
                    let (peer, what) = (*peer, "the number of credits");
                    RunError::Violation { peer, what, expected, seen: *credits }
                })
            }
            Event::Completed { tag } => {
                self.note_completed(*tag);
                Ok(())
            }
            Event::Poisoned(cause) => Err(weft_fabric::Error::Poisoned(cause.clone()).into()),
            Event::Raised { .. } | Event::Credited { .. } => Ok(()),
        }
    }

    fn note_completed(&mut self, tag: u64) {
        if tag >> Event::NAMESPACE_SHIFT != u64::from(self.namespace) {
            return;
        }
        // Tags are consecutive by peer, with one for each slot.
        let number = tag & ((1 << Event::NAMESPACE_SHIFT) - 1);
        let slots = u64::from(self.config.slots);
        let (peer, slot) = ((number / slots) as usize, (number % slots) as u32);
        if let Some(Some(outgoing)) = self.outgoing.get_mut(peer) {
            outgoing.completed(slot, &mut self.operations);
        }
    }
}

impl weft_fabric::Driver for Driver {
    type Error = RunError;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        &self.counters
    }

    fn poll(&mut self, _: Time, events: &[Event], requests: &mut Requests) -> Result<(), RunError> {
        for event in events {
            self.note(event)?;
        }
        if !std::mem::take(&mut self.more) && events.is_empty() {
            return Ok(());
        }
        self.advance_receives(None, requests)?;
        let (ranks, me) = (self.outgoing.len() as u32, self.me.0);
        for step in 1..ranks {
            self.advance_sends(Rank((me + step) % ranks), requests);
        }
        Ok(())
    }

    fn has_more(&self) -> bool {
        self.more
    }
}
