//! Mailbox area: the memory through which one peer sends messages to a rank, and the state at both ends.
//!
//! A message lies in a slot with one or more cache lines. The sender copies the payload, then stores the
//! head: the message number, in the slot's first word. A message up to 56 bytes long is thus one cache
//! line, with no other word to read or to raise. The owner polls only the next slot's head.
//!
//! An area's owner takes the messages in order. A slot is free once the owner has taken the message in
//! it; the sender learns this from the heads in the owner's own messages, which carry the number of the
//! last message taken, or, if the owner sends none, from a word in the sender's memory.
//!
//! Payloads are no atomics. The sender writes one only in a free slot, and the owner reads it only after
//! the head arrives and before the report that frees the slot. Heads and reports are stored by release
//! and loaded by acquire, so that payload writes and reads are ordered.

use crate::atomics::{CacheLine, Word64};

/// Messages from one rank to another that are not yet taken. A power of two.
pub const SLOTS: u64 = 8;
/// Messages taken after which the owner reports them by the word, unless a message has carried the number.
const REPORT_INTERVAL: u64 = SLOTS / 2;

/// One rank's memory, for one peer. Only that peer stores there.
pub trait MailboxArea {
    /// Word type.
    type Word: Word64;
    /// Number of the owner's messages that the peer has taken.
    fn taken(&self) -> &CacheLine<Self::Word>;
    /// Head in a slot, below [`SLOTS`].
    fn head(&self, slot: usize) -> &Self::Word;
}

/// One rank's state toward one peer. Messages are counted from 1.
#[derive(Debug, Default)]
pub struct MailboxEnd {
    /// Messages sent.
    sent: u64,
    /// Sent messages that the peer has taken, as far as it has reported.
    taken: u64,
    /// Messages taken from the peer.
    received: u64,
    /// Taken messages that were reported to the peer.
    reported: u64,
}

impl MailboxEnd {
    /// True if the peer has a free slot.
    #[inline]
    pub fn has_room(&self, own: &impl MailboxArea) -> bool {
        let has_room = |taken| self.sent - taken < SLOTS;
        has_room(self.taken)
            || has_room(own.taken().0.load().max(self.taken).min(self.sent))
            || has_room(self.taken_by_arrived(own))
    }

    /// Messages that the peer has taken, according to messages from it that have arrived and are not yet
    /// taken. The peer may have reported only by these, and this rank may need room before it can take
    /// them.
    #[cold]
    fn taken_by_arrived(&self, own: &impl MailboxArea) -> u64 {
        (self.received + 1..=self.received + SLOTS)
            .map(|number| (number, own.head(slot_of(number)).load()))
            .take_while(|&(number, head)| head as u32 == number as u32)
            .map(|(_, head)| self.taken_of((head >> 32) as u32))
            .last()
            .unwrap_or(self.taken)
    }

    /// Sends a message in one of the peer's free slots. `write` writes the payload there.
    #[inline]
    pub fn send(&mut self, peer: &impl MailboxArea, write: impl FnOnce(usize)) {
        let slot = slot_of(self.sent + 1);
        write(slot);
        self.sent += 1;
        peer.head(slot).store(head(self.sent, self.received));
        self.reported = self.received;
    }

    /// Slot with the next message from the peer, if it has arrived. The payload may be read until
    /// [`MailboxEnd::free`].
    #[inline]
    pub fn ready(&self, own: &impl MailboxArea) -> Option<usize> {
        let next = self.received + 1;
        let slot = slot_of(next);
        (own.head(slot).load() as u32 == next as u32).then_some(slot)
    }

    /// Frees the next message's slot, after the payload was read. Returns true if this stored the count
    /// of messages taken in the peer's memory, which the peer may wait for.
    #[inline]
    pub fn free<A: MailboxArea>(&mut self, own: &A, peer: &A) -> bool {
        self.received += 1;
        self.taken = self.taken_of((own.head(slot_of(self.received)).load() >> 32) as u32);
        if self.received - self.reported < REPORT_INTERVAL {
            return false;
        }
        self.reported = self.received;
        peer.taken().0.store(self.received);
        true
    }

    /// Messages taken from the peer.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Messages that the peer has taken, from the low bits in a message head from the peer. A head lacks
    /// the high bits: this rank sends fewer than 2^32 messages before it takes a message that was sent to
    /// it.
    #[inline]
    fn taken_of(&self, reported: u32) -> u64 {
        let outstanding = (self.sent as u32).wrapping_sub(reported);
        // The word and the heads are not ordered; an older number is ignored.
        self.taken.max(self.sent.saturating_sub(outstanding.into()))
    }
}

/// Slot for message `number`.
fn slot_of(number: u64) -> usize {
    (number % SLOTS) as usize
}

/// Head for message `number`: the low bits of the number, and above them the low bits of the taken count.
fn head(number: u64, taken: u64) -> u64 {
    taken << 32 | number & u64::from(u32::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;
    use std::sync::atomic::AtomicU64;

    type Payload = [u64; 15];

    #[derive(Default)]
    struct Area {
        taken: CacheLine<AtomicU64>,
        slots: [(AtomicU64, UnsafeCell<Payload>); SLOTS as usize],
    }

    // SAFETY: payloads are accessed under the `MailboxEnd` protocol, which miri and ThreadSanitizer check
    // here.
    unsafe impl Sync for Area {}

    impl MailboxArea for Area {
        type Word = AtomicU64;

        fn taken(&self) -> &CacheLine<AtomicU64> {
            &self.taken
        }

        fn head(&self, slot: usize) -> &AtomicU64 {
            &self.slots[slot].0
        }
    }

    fn send(end: &mut MailboxEnd, peer: &Area, value: u64) {
        // SAFETY: the slot is free: only the sender accesses the payload until the head is stored.
        end.send(peer, |slot| unsafe { *peer.slots[slot].1.get() = [value; 15] });
    }

    fn take(end: &mut MailboxEnd, own: &Area, peer: &Area) -> Payload {
        let slot = end.ready(own).expect("a message");
        // SAFETY: the message has arrived, and the slot is not free yet.
        let payload = unsafe { *own.slots[slot].1.get() };
        end.free(own, peer);
        payload
    }

    fn is_ready(end: &MailboxEnd, own: &Area) -> bool {
        end.ready(own).is_some()
    }

    #[test]
    fn a_ring_is_full_until_the_owner_reports_what_it_has_taken() {
        let (here, there) = (Area::default(), Area::default());
        let (mut sender, mut owner) = (MailboxEnd::default(), MailboxEnd::default());
        for number in 1..=SLOTS {
            assert!(sender.has_room(&here));
            send(&mut sender, &there, number);
        }
        assert!(!sender.has_room(&here));
        for number in 1..=REPORT_INTERVAL {
            assert!(!sender.has_room(&here), "not reported yet");
            assert_eq!(take(&mut owner, &there, &here), [number; 15]);
        }
        assert!(sender.has_room(&here));
        assert_eq!(take(&mut owner, &there, &here), [REPORT_INTERVAL + 1; 15]);
        // The message head reports the rest.
        send(&mut owner, &here, 0);
        take(&mut sender, &here, &there);
        assert_eq!(sender.taken, REPORT_INTERVAL + 1);
    }

    /// Reports by messages that the sender cannot take before it has sent its own next one, as ranks that
    /// start calls ahead do.
    #[test]
    fn messages_that_have_arrived_report_before_they_are_taken() {
        let (here, there) = (Area::default(), Area::default());
        let (mut sender, mut owner) = (MailboxEnd::default(), MailboxEnd::default());
        for _ in 1..=SLOTS {
            send(&mut owner, &here, 0);
        }
        for number in 1..=3 {
            send(&mut sender, &there, number);
            take(&mut sender, &here, &there);
        }
        // Each further message from the owner reports three, and no word does.
        for number in [3, 6] {
            for _ in 0..3 {
                take(&mut owner, &there, &here);
            }
            assert!(owner.has_room(&there));
            send(&mut owner, &here, 0);
            for next in number + 1..=(number + 3).min(SLOTS) {
                send(&mut sender, &there, next);
            }
        }
        for _ in 7..=SLOTS {
            take(&mut owner, &there, &here);
        }
        for _ in 4..=SLOTS {
            take(&mut sender, &here, &there);
        }
        assert_eq!((sender.sent, sender.taken, Word64::load(&here.taken.0)), (SLOTS, 0, 0));
        assert!(sender.has_room(&here));
    }

    #[test]
    fn numbers_beyond_32_bits_are_told_apart() {
        let (here, there) = (Area::default(), Area::default());
        // Before a number's low bits are 0, as in fresh memory, all slots have been used.
        let near = (1 << 32) - 2 * SLOTS;
        let end = || MailboxEnd { sent: near, taken: near, received: near, reported: near };
        let (mut sender, mut owner) = (end(), end());
        for number in 0..3 * SLOTS {
            assert!(sender.has_room(&here));
            assert!(!is_ready(&owner, &there));
            send(&mut sender, &there, number);
            assert_eq!(take(&mut owner, &there, &here), [number; 15]);
            assert!(!is_ready(&owner, &there));
        }
        assert_eq!(owner.received(), near + 3 * SLOTS);
    }

    /// Only messages report as long as both ranks exchange them, and the word keeps an old number.
    #[test]
    fn a_word_that_is_2_to_the_32_messages_old_reports_no_room() {
        let (here, there) = (Area::default(), Area::default());
        let near = (1 << 32) - SLOTS / 2;
        let mut sender = MailboxEnd { sent: near, taken: near, received: near, reported: near };
        for number in 0..SLOTS {
            assert!(sender.has_room(&here));
            send(&mut sender, &there, number);
        }
        assert!(!sender.has_room(&here));
    }

    /// Both directions between two threads at the same addresses, so that miri and ThreadSanitizer can
    /// track the payload order.
    #[test]
    fn messages_arrive_whole_and_in_order() {
        let messages = if cfg!(miri) { 40 } else { 20_000 };
        let (here, there) = (Area::default(), Area::default());
        let run = |own: &Area, peer: &Area, burst: u64| {
            let mut end = MailboxEnd::default();
            let (mut sent, mut received) = (0, 0);
            while received < messages || sent < messages {
                while sent < (received + burst).min(messages) && end.has_room(own) {
                    sent += 1;
                    send(&mut end, peer, sent);
                }
                if is_ready(&end, own) {
                    received += 1;
                    assert_eq!(take(&mut end, own, peer), [received; 15]);
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
