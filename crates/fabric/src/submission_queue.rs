//! Submission queue: a bounded queue from many threads to one that sleeps on descriptors.
//!
//! The receiving thread polls engines and queues without a lock. Before it sleeps, it announces that on
//! the queue's bell, and checks the queue once more; a sender rings the bell after pushing items and
//! makes a system call only if a sleep was announced. Both access the bell by read-modify-write, so
//! either the sender or the receiver sees the other.

use crate::atomics::{CacheLine, Word32};
use crate::error::{Error, Result};
use crate::inbox::Ring;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Bell value while the owner sleeps, or is about to.
const ASLEEP: u32 = 1;

/// Announces one thread's sleep to others.
pub struct Bell<W>(CacheLine<W>);

impl<W: Word32> Default for Bell<W> {
    fn default() -> Bell<W> {
        Bell(CacheLine(W::new(0)))
    }
}

impl<W: Word32> Bell<W> {
    /// Owner: announces a sleep. Items from senders that find no announcement are visible afterwards.
    pub fn announce(&self) {
        self.0.0.fetch_or(ASLEEP);
    }

    /// Owner: withdraws the announcement.
    pub fn withdraw(&self) {
        self.0.0.fetch_and(!ASLEEP);
    }

    /// Sender, after pushing items: true if it has to wake the owner. If several senders ring, one does.
    #[must_use]
    pub fn ring(&self) -> bool {
        self.0.0.fetch_and(!ASLEEP) & ASLEEP != 0
    }
}

struct Shared<T> {
    ring: Ring<T, AtomicU64>,
    bell: Bell<AtomicU32>,
    /// Readable while the receiver has to wake.
    event: OwnedFd,
}

impl<T> Shared<T> {
    fn wake(&self) {
        if self.bell.ring() {
            // Increments by one cannot overflow an eventfd counter.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// Makes a queue for `capacity` items, rounded up to a power of two, at least two.
///
/// # Errors
/// [`Error::System`] without a free descriptor.
pub fn submission_queue<T: Send>(capacity: usize) -> Result<(QueueSender<T>, QueueReceiver<T>)> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::system("cannot create an event descriptor", e))?;
    let shared = Arc::new(Shared { ring: Ring::new(capacity), bell: Bell::default(), event });
    Ok((QueueSender(shared.clone()), QueueReceiver(shared)))
}

/// Sending end; clones send to the same receiver.
pub struct QueueSender<T>(Arc<Shared<T>>);

impl<T> Clone for QueueSender<T> {
    fn clone(&self) -> QueueSender<T> {
        QueueSender(self.0.clone())
    }
}

impl<T: Send> QueueSender<T> {
    /// Puts an item, or returns it if the queue is full or closed. [`QueueSender::wake`] follows the last one.
    ///
    /// # Errors
    /// The item.
    pub fn put(&self, item: T) -> Result<(), T> {
        self.0.ring.put(item)
    }

    /// Wakes the receiver if it sleeps, also without an item.
    pub fn wake(&self) {
        self.0.wake();
    }
}

/// Receiving end.
pub struct QueueReceiver<T>(Arc<Shared<T>>);

impl<T: Send> QueueReceiver<T> {
    /// Takes the oldest item.
    pub fn take(&mut self) -> Option<T> {
        self.0.ring.take()
    }

    /// Calls `visit` with each item in place, the oldest first. O(items).
    pub fn for_each(&mut self, visit: impl FnMut(&mut T)) {
        self.0.ring.for_each(visit);
    }

    /// Refuses all further items.
    pub fn close(&mut self) {
        self.0.ring.close();
    }

    /// True if the queue is closed, and every item that was accepted was taken.
    pub fn is_drained(&self) -> bool {
        self.0.ring.is_drained()
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        self.0.ring.is_empty()
    }

    /// Announces a sleep on [`QueueReceiver::descriptor`]; true if the queue is empty. [`QueueReceiver::disarm`] follows
    /// in either case.
    pub fn arm(&mut self) -> bool {
        self.0.bell.announce();
        self.0.ring.is_empty()
    }

    /// Withdraws the announcement from [`QueueReceiver::arm`].
    pub fn disarm(&mut self) {
        self.0.bell.withdraw();
        let mut count = [0; 8];
        // Fails if no sender has written since the last read.
        let _ = rustix::io::read(&self.0.event, &mut count);
    }

    /// Readable once a sender wakes the receiver.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

impl<T> Drop for QueueReceiver<T> {
    /// Closes the queue.
    fn drop(&mut self) {
        self.0.ring.close();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(receiver: &QueueReceiver<u32>) -> bool {
        let mut polled = [PollFd::new(&receiver.0.event, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no ppoll")]
    fn an_armed_receiver_is_woken_once() {
        let (sender, mut receiver) = submission_queue(4).unwrap();
        sender.put(1).unwrap();
        sender.wake();
        assert!(!is_readable(&receiver), "an awake receiver costs no system call");
        assert!(!receiver.arm(), "the queue has an item");
        receiver.disarm();
        assert_eq!(receiver.take(), Some(1));
        assert!(receiver.arm());
        let second = sender.clone();
        second.put(2).unwrap();
        second.wake();
        sender.wake();
        assert!(is_readable(&receiver));
        receiver.disarm();
        assert!(!is_readable(&receiver));
        assert_eq!((receiver.take(), receiver.take()), (Some(2), None));
    }
}
