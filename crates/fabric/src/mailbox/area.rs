//! Mailbox area: the words through which one peer sends messages to a rank, and the state of both ends.
//!
//! A message lies in a slot of one or more cache lines. Its sender stores the payload, then the head: the number of
//! the message, in the first word of the slot. A message of up to 56 bytes is thus one cache line, with no other word
//! to read or to raise. The owner polls the head of the next slot alone.
//!
//! The owner of an area takes the messages in their order. A slot is free once the owner has taken its message; the
//! sender takes it from the heads of the owner's own messages, which carry the number of the last message taken, or,
//! if the owner sends none, from a word in the sender's memory.

use crate::atomics::{CacheLine, Word64};

/// Messages from one rank to another that are not yet taken. A power of two.
pub const SLOTS: u64 = 8;
/// Messages taken after which the owner reports them by the word, unless a message has carried the number.
const REPORT_INTERVAL: u64 = SLOTS / 2;
/// Words of a cache line.
pub(super) const LINE_WORDS: usize = 8;

/// Memory of one rank, for one peer. Only that peer stores there.
#[derive(Debug)]
pub struct MailboxArea<'a, W> {
    /// Number of the owner's messages that the peer has taken.
    pub taken: &'a CacheLine<W>,
    /// The slots, one after another.
    pub lines: &'a [CacheLine<[W; LINE_WORDS]>],
}

impl<W: Word64> MailboxArea<'_, W> {
    #[inline]
    fn word(&self, message: u64, index: usize) -> &W {
        let lines = self.lines.len() / SLOTS as usize;
        let line = (message % SLOTS) as usize * lines + index / LINE_WORDS;
        &self.lines[line].0[index % LINE_WORDS]
    }
}

/// State of one rank toward one peer. Messages are counted from 1.
#[derive(Debug, Default)]
pub struct MailboxEnd {
    /// Messages sent.
    sent: u64,
    /// Those of them that the peer has taken, as far as it has reported.
    taken: u64,
    /// Messages of the peer that were taken.
    received: u64,
    /// Those of them that were reported to the peer.
    reported: u64,
}

impl MailboxEnd {
    /// True if a slot of the peer is free.
    #[inline]
    pub fn has_room<W: Word64>(&self, own: &MailboxArea<'_, W>) -> bool {
        let has_room = |taken| self.sent - taken < SLOTS;
        has_room(self.taken) || has_room(self.taken_of(own.taken.0.load() as u32))
    }

    /// Stores a message in a free slot of the peer. `words` fit into a slot behind its head.
    #[inline]
    pub fn send<W: Word64>(
        &mut self,
        peer: &MailboxArea<'_, W>,
        words: impl IntoIterator<Item = u64>,
    ) {
        self.sent += 1;
        for (index, word) in (1..).zip(words) {
            peer.word(self.sent, index).store(word);
        }
        peer.word(self.sent, 0).store(head(self.sent, self.received));
        self.reported = self.received;
    }

    /// True if the next message of the peer has arrived.
    #[inline]
    pub fn is_ready<W: Word64>(&self, own: &MailboxArea<'_, W>) -> bool {
        own.word(self.received + 1, 0).load() as u32 == (self.received + 1) as u32
    }

    /// Word `index`, from 1, of the next message, which has arrived.
    #[inline]
    pub fn word<W: Word64>(&self, own: &MailboxArea<'_, W>, index: usize) -> u64 {
        own.word(self.received + 1, index).load()
    }

    /// Frees the slot of the next message, whose words were read. Returns true if this stored the number of messages
    /// taken in the memory of the peer, which may wait for it.
    #[inline]
    pub fn free<W: Word64>(&mut self, own: &MailboxArea<'_, W>, peer: &MailboxArea<'_, W>) -> bool {
        self.received += 1;
        self.taken = self.taken_of((own.word(self.received, 0).load() >> 32) as u32);
        if self.received - self.reported < REPORT_INTERVAL {
            return false;
        }
        self.reported = self.received;
        peer.taken.0.store(self.received);
        true
    }

    /// Messages of the peer that were taken.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Messages that the peer has taken, from the low bits of a number that it has reported.
    #[inline]
    fn taken_of(&self, reported: u32) -> u64 {
        let outstanding = (self.sent as u32).wrapping_sub(reported);
        // The word and the heads are not ordered; an older number is ignored.
        self.taken.max(self.sent.saturating_sub(outstanding.into()))
    }
}

/// Head of message `number`: its low bits, and above them those of the number of messages taken.
fn head(number: u64, taken: u64) -> u64 {
    taken << 32 | number & u64::from(u32::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// Area of slots of two lines.
    struct Area {
        taken: CacheLine<AtomicU64>,
        lines: Vec<CacheLine<[AtomicU64; LINE_WORDS]>>,
    }

    impl Area {
        fn new() -> Area {
            let lines = (0..2 * SLOTS).map(|_| CacheLine::default()).collect();
            Area { taken: CacheLine::default(), lines }
        }

        fn area(&self) -> MailboxArea<'_, AtomicU64> {
            MailboxArea { taken: &self.taken, lines: &self.lines }
        }
    }

    fn taken(end: &mut MailboxEnd, own: &Area, peer: &Area, count: usize) -> Vec<u64> {
        let words = (1..=count).map(|index| end.word(&own.area(), index)).collect();
        end.free(&own.area(), &peer.area());
        words
    }

    #[test]
    fn a_ring_is_full_until_the_owner_reports_what_it_has_taken() {
        let (here, there) = (Area::new(), Area::new());
        let (mut sender, mut owner) = (MailboxEnd::default(), MailboxEnd::default());
        for number in 1..=SLOTS {
            assert!(sender.has_room(&here.area()));
            sender.send(&there.area(), [number; 15]);
        }
        assert!(!sender.has_room(&here.area()));
        for number in 1..=REPORT_INTERVAL {
            assert!(!sender.has_room(&here.area()), "not reported yet");
            assert!(owner.is_ready(&there.area()));
            assert_eq!(taken(&mut owner, &there, &here, 15), [number; 15]);
        }
        assert!(sender.has_room(&here.area()));
        assert_eq!(taken(&mut owner, &there, &here, 1), [REPORT_INTERVAL + 1]);
        // The head of a message reports the rest.
        owner.send(&here.area(), []);
        assert!(sender.is_ready(&here.area()));
        taken(&mut sender, &here, &there, 0);
        assert_eq!(sender.taken, REPORT_INTERVAL + 1);
    }

    #[test]
    fn numbers_beyond_32_bits_are_told_apart() {
        let (here, there) = (Area::new(), Area::new());
        // Before the low bits of a number are 0, as those of fresh memory, all slots have been used.
        let near = (1 << 32) - 2 * SLOTS;
        let end = || MailboxEnd { sent: near, taken: near, received: near, reported: near };
        let (mut sender, mut owner) = (end(), end());
        for number in 0..3 * SLOTS {
            assert!(sender.has_room(&here.area()));
            assert!(!owner.is_ready(&there.area()));
            sender.send(&there.area(), [number]);
            assert!(owner.is_ready(&there.area()));
            assert_eq!(taken(&mut owner, &there, &here, 1), [number]);
            assert!(!owner.is_ready(&there.area()));
        }
        assert_eq!(owner.received(), near + 3 * SLOTS);
    }

    /// Both directions between two threads at the same addresses, so that miri and ThreadSanitizer can track the
    /// order of the words.
    #[test]
    fn messages_arrive_whole_and_in_order() {
        let messages = if cfg!(miri) { 40 } else { 20_000 };
        let (here, there) = (Area::new(), Area::new());
        let run = |own: &Area, peer: &Area, burst: u64| {
            let mut end = MailboxEnd::default();
            let (mut sent, mut received) = (0, 0);
            while received < messages {
                while sent < (received + burst).min(messages) && end.has_room(&own.area()) {
                    sent += 1;
                    end.send(&peer.area(), [sent; 15]);
                }
                if end.is_ready(&own.area()) {
                    received += 1;
                    assert_eq!(taken(&mut end, own, peer, 15), [received; 15]);
                } else {
                    std::thread::yield_now();
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(&here, &there, 1));
            run(&there, &here, 2 * SLOTS);
        });
    }
}
