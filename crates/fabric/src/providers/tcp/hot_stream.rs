//! Stream of a spinning caller.

use crate::types::Time;
use std::time::Duration;

/// Polls between two calls of epoll while a caller spins: the others read the hot stream alone. A caller
/// spins if it polls more often than this interval.
const HOT_READS: u32 = 8;
const SPIN_INTERVAL: Duration = Duration::from_micros(20);

/// Stream that is read without epoll while a caller spins.
#[derive(Default)]
pub(super) struct HotStream {
    /// Rank and stream of the only event at the last call of epoll.
    stream: Option<(usize, usize)>,
    /// Reads of it since.
    reads: u32,
    polled: Time,
}

impl HotStream {
    /// Returns the stream to read instead of calling epoll.
    pub fn take(&mut self, now: Time) -> Option<(usize, usize)> {
        let spinning = now.since(self.polled) < SPIN_INTERVAL;
        self.polled = now;
        self.reads += 1;
        self.stream.filter(|_| spinning && self.reads < HOT_READS)
    }

    /// Records the result of a call of epoll.
    pub fn record(&mut self, stream: Option<(usize, usize)>) {
        // An empty result keeps the previous stream.
        self.stream = stream.or(self.stream);
        self.reads = 0;
    }
}
