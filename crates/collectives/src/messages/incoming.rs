//! Messages from one peer: ring slots, copied out in order to receives or buffers.

use super::header::Header;
use super::matching::Matching;
use super::memory::{Rings, Slot};
use super::operations::{Completed, OperationId, Operations, TooLong};
use crate::run_error::RunError;
use weft_fabric::{CounterId, Rank, Requests};

/// State for messages from a peer.
#[derive(Debug)]
pub(super) struct Incoming {
    peer: Rank,
    /// Slot bytes that the route uses.
    room: u64,
    slots: u32,
    /// Oldest round without a credit.
    next: u64,
    /// Slots that have arrived and were not credited, from `next` on.
    arrived: Box<[bool]>,
    /// Arrived slot count.
    count: u32,
    /// Messages begun so far.
    sequence: u64,
    /// Header in the oldest slot, if the message waits for a receive.
    head: Option<Header>,
    stream: Option<Stream>,
}

/// Message that arrives.
#[derive(Clone, Copy, Debug)]
struct Stream {
    length: u64,
    received: u64,
    sink: Sink,
}

/// Destination for a message's bytes.
#[derive(Clone, Copy, Debug)]
enum Sink {
    Receive(OperationId),
    /// Unexpected message with this serial number.
    Buffer(u64),
    /// The message is longer than this receive, which ends with it.
    Dropped(OperationId),
}

/// Objects that an advance uses.
pub(super) struct ReceiveContext<'a> {
    pub rings: &'a Rings,
    pub operations: &'a mut Operations,
    pub matching: &'a mut Matching,
    pub counter: CounterId,
    pub batch_bytes: u64,
    pub requests: &'a mut Requests,
}

impl Incoming {
    /// State before the first message.
    pub fn new(peer: Rank, room: u64, slots: u32) -> Incoming {
        Incoming {
            peer,
            room,
            slots,
            next: 0,
            arrived: vec![false; slots as usize].into(),
            count: 0,
            sequence: 0,
            head: None,
            stream: None,
        }
    }

    /// Records that a slot has arrived.
    ///
    /// # Errors
    /// [`RunError::Violation`] if it was written more than once.
    pub fn raised(&mut self, round: u64, count: u64) -> Result<(), RunError> {
        // An event may be repeated after the round's credit.
        let Some(ahead) = round.checked_sub(self.next).filter(|ahead| *ahead < self.slots.into())
        else {
            return Ok(());
        };
        if count > 1 {
            let (peer, what) = (self.peer, "the number of writes into a slot");
            return Err(RunError::Violation { peer, what, expected: 1, seen: count });
        }
        let slot = ((self.next + ahead) % u64::from(self.slots)) as usize;
        self.count += u32::from(!std::mem::replace(&mut self.arrived[slot], true));
        Ok(())
    }

    /// True if no slot and no message part waits here.
    pub fn is_idle(&self) -> bool {
        self.count == 0 && self.stream.is_none()
    }

    /// Rounds credited.
    pub fn credited(&self) -> u64 {
        self.next
    }

    /// Copies out arrived slots in order, until a message waits for a receive or the batch is full. True if the
    /// batch ended it.
    pub fn advance(&mut self, context: &mut ReceiveContext<'_>) -> Result<bool, RunError> {
        let mut read = 0;
        loop {
            let number = (self.next % u64::from(self.slots)) as u32;
            if !self.arrived[number as usize] {
                return Ok(false);
            }
            if read >= context.batch_bytes {
                return Ok(true);
            }
            let slot = Slot { peer: self.peer, number };
            let mut used = 0;
            if self.stream.is_none() {
                let Some(stream) = self.begin(slot, context)? else { return Ok(false) };
                self.stream = Some(stream);
                used = Header::BYTES;
            }
            read += used + self.take(slot, used, context);
        }
    }

    /// Begins the message in the oldest slot; `None` if it stays there without a receive.
    fn begin(
        &mut self,
        slot: Slot,
        context: &mut ReceiveContext<'_>,
    ) -> Result<Option<Stream>, RunError> {
        let header = match self.head {
            Some(header) => header,
            None => Header::decode(&context.rings.header(slot), self.peer, self.sequence)?,
        };
        let Header { tag, length, .. } = header;
        let sink = match context.matching.take_receive(self.peer, tag) {
            Some(id) => Some(receive_sink(context.operations, id, self.peer, length)),
            None if self.blocks(context.matching) => {
                context.matching.begin_buffer(self.peer, tag, length).map(Sink::Buffer)
            }
            None => None,
        };
        let Some(sink) = sink else {
            self.head = Some(header);
            return Ok(None);
        };
        self.head = None;
        self.sequence += 1;
        Ok(Some(Stream { length, received: 0, sink }))
    }

    /// True if the oldest message, which has no receive, delays later ones: the ring is full, or a receive
    /// waits for a message behind it.
    fn blocks(&self, matching: &Matching) -> bool {
        self.count == self.slots || matching.expects_from(self.peer)
    }

    /// Copies out the oldest slot from byte `used` on, and credits it. Returns the bytes copied.
    fn take(&mut self, slot: Slot, used: u64, context: &mut ReceiveContext<'_>) -> u64 {
        let Some(stream) = &mut self.stream else { return 0 };
        let length = (self.room - used).min(stream.length - stream.received);
        let bytes = context.rings.arrived(slot, used, length);
        match stream.sink {
            Sink::Receive(id) => {
                if let Some(operation) = context.operations.get_mut(id)
                    && let Some(memory) = &mut operation.memory
                {
                    memory.write(stream.received, bytes);
                    operation.moved += length;
                }
            }
            Sink::Buffer(serial) => {
                if let Some(buffer) = context.matching.buffer(serial) {
                    buffer.extend_from_slice(bytes);
                }
            }
            Sink::Dropped(_) => {}
        }
        stream.received += length;
        if stream.received == stream.length {
            if let Sink::Receive(id) | Sink::Dropped(id) = stream.sink {
                end_receive(context.operations, id, self.peer, stream.length);
            }
            self.stream = None;
        }
        self.arrived[slot.number as usize] = false;
        self.count -= 1;
        self.next += 1;
        context.requests.credit(self.peer, context.counter);
        length
    }

    /// Directs the rest of a message that arrives in a buffer to a receive, which has the bytes so far.
    pub fn redirect(&mut self, serial: u64, id: OperationId, operations: &mut Operations) {
        if let Some(stream) = &mut self.stream
            && let Sink::Buffer(buffer) = stream.sink
            && buffer == serial
        {
            stream.sink = receive_sink(operations, id, self.peer, stream.length);
        }
    }
}

/// Directs a message of `length` bytes to a receive.
fn receive_sink(operations: &mut Operations, id: OperationId, from: Rank, length: u64) -> Sink {
    let Some(operation) = operations.get_mut(id) else { return Sink::Dropped(id) };
    operation.peer = Some(from);
    if length > operation.bytes { Sink::Dropped(id) } else { Sink::Receive(id) }
}

/// Ends a receive whose message has arrived: with an error if it is longer than the memory.
pub(super) fn end_receive(operations: &mut Operations, id: OperationId, from: Rank, bytes: u64) {
    if let Some(operation) = operations.get_mut(id) {
        let fits = bytes <= operation.bytes;
        operation.end(if fits {
            Ok(Completed { from, bytes })
        } else {
            Err(TooLong { from, sent: bytes })
        });
    }
}
