//! Receives without a message, and messages without a receive.

use super::config::MessagesConfig;
use super::operations::OperationId;
use std::collections::VecDeque;
use weft_fabric::Rank;

/// Receive without a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostedReceive {
    pub operation: OperationId,
    /// Required sender; `None`: any.
    pub from: Option<Rank>,
    pub tag: u64,
}

impl PostedReceive {
    fn admits(&self, from: Rank) -> bool {
        self.from.is_none_or(|required| required == from)
    }
}

/// Message without a receive that was taken off the ring, or that this rank sends to itself.
#[derive(Debug)]
pub(super) struct UnexpectedMessage {
    /// Identifies the message while it arrives.
    pub serial: u64,
    pub from: Rank,
    pub tag: u64,
    /// Message size in bytes.
    pub length: u64,
    pub content: Content,
}

/// Place for an unexpected message's bytes.
#[derive(Debug)]
pub(super) enum Content {
    /// Bytes that have arrived so far.
    Buffer(Vec<u8>),
    /// Memory for a send from this rank to itself.
    Send(OperationId),
}

/// Receives in call order, and messages in the order in which they were taken off.
#[derive(Debug)]
pub(super) struct Matching {
    posted: VecDeque<PostedReceive>,
    unexpected: VecDeque<UnexpectedMessage>,
    /// Buffer bytes, with overhead.
    buffered: u64,
    limit: u64,
    next_serial: u64,
}

impl Matching {
    /// Empty lists, with a limit on the bytes in buffers.
    pub fn new(limit: u64, reserved: usize) -> Matching {
        let posted = VecDeque::with_capacity(reserved);
        Matching { posted, unexpected: VecDeque::new(), buffered: 0, limit, next_serial: 0 }
    }

    /// Adds a receive, for which [`Matching::take_message`] found no message.
    pub fn post(&mut self, receive: PostedReceive) {
        self.posted.push_back(receive);
    }

    /// Removes the oldest receive that takes a message.
    pub fn take_receive(&mut self, from: Rank, tag: u64) -> Option<OperationId> {
        let takes = |receive: &PostedReceive| receive.tag == tag && receive.admits(from);
        let at = self.posted.iter().position(takes)?;
        self.posted.remove(at).map(|receive| receive.operation)
    }

    /// True if a receive waits for some message from a rank.
    pub fn expects_from(&self, from: Rank) -> bool {
        self.posted.iter().any(|receive| receive.admits(from))
    }

    /// Removes the oldest message that a receive takes.
    pub fn take_message(&mut self, from: Option<Rank>, tag: u64) -> Option<UnexpectedMessage> {
        let takes = |message: &UnexpectedMessage| {
            message.tag == tag && from.is_none_or(|from| from == message.from)
        };
        let at = self.unexpected.iter().position(takes)?;
        let message = self.unexpected.remove(at)?;
        if let Content::Buffer(_) = message.content {
            self.buffered -= charge(message.length).unwrap_or(0);
        }
        Some(message)
    }

    /// Adds a message whose bytes will arrive; returns the serial number, or `None` beyond the limit.
    pub fn begin_buffer(&mut self, from: Rank, tag: u64, length: u64) -> Option<u64> {
        let buffered = self.buffered.checked_add(charge(length)?)?;
        if buffered > self.limit {
            return None;
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(length).ok()?).ok()?;
        self.buffered = buffered;
        Some(self.add(from, tag, length, Content::Buffer(bytes)))
    }

    /// Adds a send from this rank to itself.
    pub fn add_send(&mut self, from: Rank, tag: u64, length: u64, operation: OperationId) {
        self.add(from, tag, length, Content::Send(operation));
    }

    fn add(&mut self, from: Rank, tag: u64, length: u64, content: Content) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.unexpected.push_back(UnexpectedMessage { serial, from, tag, length, content });
        serial
    }

    /// Buffer for a message that arrives.
    pub fn buffer(&mut self, serial: u64) -> Option<&mut Vec<u8>> {
        let at = self.unexpected.binary_search_by_key(&serial, |message| message.serial).ok()?;
        match &mut self.unexpected[at].content {
            Content::Buffer(bytes) => Some(bytes),
            Content::Send(_) => None,
        }
    }

    /// Buffer bytes, with overhead.
    pub fn buffered(&self) -> u64 {
        self.buffered
    }

    /// Receive count and message count.
    pub fn lengths(&self) -> (usize, usize) {
        (self.posted.len(), self.unexpected.len())
    }
}

/// Bytes that a buffered message counts.
fn charge(length: u64) -> Option<u64> {
    length.checked_add(MessagesConfig::BUFFER_OVERHEAD)
}

#[cfg(test)]
mod tests {
    use super::super::memory::UserMemory;
    use super::super::operations::{Direction, Operation, Operations};
    use super::*;

    fn ids<const N: usize>() -> [OperationId; N] {
        let mut operations = Operations::new();
        std::array::from_fn(|_| {
            // SAFETY: no bytes.
            let memory = unsafe { UserMemory::source(std::ptr::null(), 0) };
            operations.open(Operation::new(Direction::Receive, None, 0, memory)).unwrap()
        })
    }

    #[test]
    fn receives_are_taken_in_the_order_of_their_calls() {
        let [a, b, c] = ids();
        let mut matching = Matching::new(1000, 4);
        for (operation, from, tag) in [(a, Some(Rank(1)), 7), (b, None, 7), (c, Some(Rank(1)), 3)] {
            matching.post(PostedReceive { operation, from, tag });
        }
        assert_eq!(matching.take_receive(Rank(2), 7), Some(b));
        assert_eq!(matching.take_receive(Rank(2), 7), None);
        assert_eq!(matching.take_receive(Rank(1), 3), Some(c));
        assert_eq!(matching.take_receive(Rank(1), 7), Some(a));
        assert!(!matching.expects_from(Rank(1)));
    }

    #[test]
    fn messages_are_taken_in_order_and_their_bytes_count() {
        let overhead = MessagesConfig::BUFFER_OVERHEAD;
        let mut matching = Matching::new(2 * overhead + 10, 4);
        let first = matching.begin_buffer(Rank(1), 7, 4).unwrap();
        let second = matching.begin_buffer(Rank(1), 7, 6).unwrap();
        assert_eq!(matching.begin_buffer(Rank(1), 7, 0), None);
        assert_eq!(matching.begin_buffer(Rank(1), 7, u64::MAX), None);
        matching.buffer(second).unwrap().push(9);
        assert!(matching.take_message(Some(Rank(2)), 7).is_none());
        assert_eq!(matching.take_message(None, 7).unwrap().serial, first);
        assert_eq!(matching.buffered(), overhead + 6);
        assert_eq!(matching.take_message(Some(Rank(1)), 7).unwrap().serial, second);
        assert_eq!((matching.buffered(), matching.buffer(second)), (0, None));
    }
}
