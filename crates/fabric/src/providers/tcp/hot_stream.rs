//! Stream from which the last messages came, read without epoll.

use crate::types::Time;
use std::time::Duration;

/// Polls between two epoll calls while a caller spins: the others read only the hot stream. A caller
/// spins if it polls more often than this interval.
const HOT_READS: u32 = 8;
const SPIN_INTERVAL: Duration = Duration::from_micros(20);

/// Stream that is read without epoll while a caller spins, or once an event loop has reported messages.
#[derive(Default)]
pub(super) struct HotStream {
    /// Rank and stream in the only event that the last epoll call returned.
    stream: Option<(usize, usize)>,
    /// Reads from it since.
    reads: u32,
    polled: Time,
    /// The caller has seen that messages have arrived.
    expected: bool,
}

/// One poll's hot stream.
#[derive(Clone, Copy)]
pub(super) struct HotRead {
    /// Rank and stream.
    pub stream: (usize, usize),
    /// Without messages there, epoll shows where they are.
    pub or_epoll: bool,
}

impl HotStream {
    /// The next poll reads the stream first, however long the last one is ago.
    pub fn expect(&mut self) {
        self.expected = true;
    }

    /// Returns the stream to read instead of calling epoll.
    pub fn take(&mut self, now: Time) -> Option<HotRead> {
        let spinning = now.since(self.polled) < SPIN_INTERVAL;
        let or_epoll = std::mem::take(&mut self.expected);
        self.polled = now;
        self.reads += 1;
        let stream = self.stream.filter(|_| (spinning || or_epoll) && self.reads < HOT_READS)?;
        Some(HotRead { stream, or_epoll })
    }

    /// Records what an epoll call returned.
    pub fn record(&mut self, stream: Option<(usize, usize)>) {
        // An empty result keeps the previous stream.
        self.stream = stream.or(self.stream);
        self.reads = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_hot_for_a_spinning_caller_and_once_for_one_that_expects_messages() {
        let mut hot = HotStream::default();
        let at = |us: u64| Time(1_000_000_000 + 1000 * us);
        assert!(hot.take(at(0)).is_none());
        hot.record(Some((1, 0)));
        let read = hot.take(at(1)).map(|read| (read.stream, read.or_epoll));
        assert_eq!(read, Some(((1, 0), false)));
        assert!(hot.take(at(1000)).is_none(), "the last poll is long ago");
        hot.record(None);
        hot.expect();
        let read = hot.take(at(2000)).map(|read| (read.stream, read.or_epoll));
        assert_eq!(read, Some(((1, 0), true)));
        assert!(hot.take(at(3000)).is_none());
        for _ in 0..HOT_READS {
            hot.expect();
            hot.take(at(4000));
        }
        hot.expect();
        assert!(hot.take(at(4000)).is_none(), "epoll is called in between");
    }
}
