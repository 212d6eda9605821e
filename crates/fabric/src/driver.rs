//! Driver: a polled state machine over an engine. Events in, requests out; no I/O and no clock.
//!
//! A driver is `poll(now, &[Event], &mut Requests)`. It allocates nothing after construction if
//! [`Requests::with_capacity`] covers the largest poll.

use crate::link::ScatterPart;
use crate::types::{CounterId, Page, RegionKey, Time};
use std::ops::Range;
use weft_control::{Poison, Rank};

/// Event for a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer raised a lane of one of our counters.
    Raised {
        /// Our counter.
        counter: CounterId,
        /// The peer that raised it.
        peer: Rank,
        /// The round that the lane counts, open and without a credit.
        round: u64,
        /// Raises in that round, all visible now.
        count: u64,
    },
    /// A peer gave credit: one more round may be written to it.
    Credited {
        /// Our counter in the same position as the peer's.
        counter: CounterId,
        /// The peer.
        peer: Rank,
        /// Credits so far. Round r may start when this is at least r.
        credits: u64,
    },
    /// A request's source may be reused.
    Completed {
        /// Request tag.
        tag: u64,
    },
    /// The group is poisoned: the last event.
    Poisoned(Poison),
}

impl Event {
    /// Bit position of the namespace within a tag, see [`Driver::namespace`].
    pub const NAMESPACE_SHIFT: u32 = 48;
}

/// Driver request to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DriverRequest {
    Write { peer: Rank, counter: CounterId, round: u64, pages: Range<usize>, tag: u64 },
    Scatter { counter: CounterId, source: RegionKey, parts: Range<usize>, tag: u64 },
    Credit { peer: Rank, counter: CounterId },
}

/// Requests from one driver poll; the engine drains them.
#[derive(Debug, Default)]
pub struct Requests {
    pub(crate) entries: Vec<DriverRequest>,
    pub(crate) pages: Vec<Page>,
    /// Writes in scatters, and the round for each.
    pub(crate) parts: Vec<ScatterPart>,
    pub(crate) rounds: Vec<u64>,
}

impl Requests {
    /// Tag for a write whose completion is no event.
    pub const NO_EVENT: u64 = u64::MAX;

    /// Capacity for this many requests and pages.
    pub fn with_capacity(requests: usize, pages: usize) -> Requests {
        Requests {
            entries: Vec::with_capacity(requests),
            pages: Vec::with_capacity(pages),
            ..Requests::default()
        }
    }

    /// The same with capacity for this many writes in scatters, too.
    pub fn with_scatter_capacity(mut self, writes: usize) -> Requests {
        self.parts.reserve(writes);
        self.rounds.reserve(writes);
        self
    }

    /// Writes `pages` to `peer` and raises `counter` there by the write's part count. Without pages it is
    /// a signal. [`Event::Completed`] with `tag` follows when the sources may be reused and the bytes
    /// have left this process, unless `tag` is [`Requests::NO_EVENT`].
    pub fn write(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: impl IntoIterator<Item = Page>,
        tag: u64,
    ) {
        let begin = self.pages.len();
        self.pages.extend(pages);
        let pages = begin..self.pages.len();
        self.entries.push(DriverRequest::Write { peer, counter, round, pages, tag });
    }

    /// Same as [`Requests::write`], with pages that `add` appends one by one.
    #[inline]
    pub fn write_with(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        tag: u64,
        add: impl FnOnce(&mut PageList<'_>),
    ) {
        let begin = self.pages.len();
        add(&mut PageList { pages: &mut self.pages, begin });
        let pages = begin..self.pages.len();
        self.entries.push(DriverRequest::Write { peer, counter, round, pages, tag });
    }

    /// Begins a scatter: writes from one region to several peers, under one request with one completion. For
    /// example, 63 writes to as many peers cost a link with work request templates one call
    /// ([`crate::Link::post_scatter`]). Nothing is written without [`ScatterList::finish`].
    #[inline]
    pub fn scatter(&mut self, counter: CounterId, source: RegionKey) -> ScatterList<'_> {
        ScatterList { begin: self.parts.len(), requests: self, counter, source }
    }

    /// Sends `peer` a credit for our `counter`: the round has been read, and the peer may start one more.
    pub fn credit(&mut self, peer: Rank, counter: CounterId) {
        self.entries.push(DriverRequest::Credit { peer, counter });
    }

    /// True without requests.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Removes all requests.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.pages.clear();
        self.parts.clear();
        self.rounds.clear();
    }
}

/// Pages for one driver write. See [`Requests::write_with`].
#[derive(Debug)]
pub struct PageList<'a> {
    pages: &'a mut Vec<Page>,
    /// Pages in earlier writes.
    begin: usize,
}

impl PageList<'_> {
    /// Appends a page; one that continues this write's last page, at the source and at the destination,
    /// extends it. A write over a [`crate::PartRule::WHOLE`] route has one part with either, others may
    /// have fewer.
    #[inline]
    pub fn push_merged(&mut self, page: Page) {
        match self.pages[self.begin..].last_mut() {
            Some(last) if last.is_continued_by(&page) => last.length += page.length,
            _ => self.pages.push(page),
        }
    }
}

/// One write in a driver's scatter. See [`Requests::scatter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatterWrite {
    /// The peer written to.
    pub peer: Rank,
    /// Round toward this peer.
    pub round: u64,
    /// First byte read in the scatter's source.
    pub source_offset: u64,
    /// The peer's region.
    pub destination: RegionKey,
    /// First byte written there.
    pub destination_offset: u64,
    /// Bytes; 0 only raises the counter.
    pub length: u64,
}

/// Writes in a scatter that a driver adds one by one.
#[derive(Debug)]
pub struct ScatterList<'a> {
    requests: &'a mut Requests,
    counter: CounterId,
    source: RegionKey,
    /// Parts in earlier scatters.
    begin: usize,
}

impl ScatterList<'_> {
    /// Adds a write. A peer may have several, in one round or in several.
    #[inline]
    pub fn push(&mut self, write: ScatterWrite) {
        let ScatterWrite { peer, round, source_offset, destination, destination_offset, length } =
            write;
        let source = self.source;
        let page = Page { source, source_offset, destination, destination_offset, length };
        self.requests.parts.push(ScatterPart { peer, page, ..ScatterPart::EMPTY });
        self.requests.rounds.push(round);
    }

    /// Writes so far.
    pub fn len(&self) -> usize {
        self.requests.parts.len() - self.begin
    }

    /// True without writes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests the scatter, unless it is empty. [`Event::Completed`] with `tag` follows once all sources may be
    /// reused and all bytes have left this process, unless `tag` is [`Requests::NO_EVENT`].
    #[inline]
    pub fn finish(self, tag: u64) {
        let ScatterList { requests, counter, source, begin } = self;
        let parts = begin..requests.parts.len();
        if !parts.is_empty() {
            requests.entries.push(DriverRequest::Scatter { counter, source, parts, tag });
        }
    }
}

/// State machine that polls an engine, such as an MoE dispatch.
pub trait Driver {
    /// Driver error type.
    type Error;

    /// Number from [`crate::Engine::namespace`]: the high bits in this driver's tags.
    fn namespace(&self) -> u16;

    /// The counters whose events it receives.
    fn counters(&self) -> &[CounterId];

    /// Consumes events, advances, and emits requests. `now` is for deadlines and traces.
    fn poll(
        &mut self,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<(), Self::Error>;

    /// True if a poll without events would emit more requests. A driver that copies many bytes may thus
    /// submit them in batches, so that peers work on the first ones meanwhile.
    fn has_more(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::RegionKey;

    #[test]
    fn pages_merge_within_a_write_if_both_of_their_ends_meet() {
        let page = |source_offset, destination_offset, length| Page {
            source: RegionKey(1),
            source_offset,
            destination: RegionKey(2),
            destination_offset,
            length,
        };
        let mut requests = Requests::default();
        let write = |requests: &mut Requests, pages: &[Page]| {
            requests.write_with(Rank(1), CounterId::from_number(0), 0, 0, |list| {
                pages.iter().for_each(|page| list.push_merged(*page));
            });
        };
        write(&mut requests, &[page(0, 64, 8), page(8, 72, 4), page(12, 80, 4), page(20, 84, 1)]);
        let other = Page { source: RegionKey(3), ..page(21, 85, 1) };
        write(&mut requests, &[page(21, 85, 1)]);
        write(&mut requests, &[page(20, 84, 1), other]);
        let lengths: Vec<u64> = requests.pages.iter().map(|page| page.length).collect();
        assert_eq!(lengths, [12, 4, 1, 1, 1, 1]);
        let ranges = requests.entries.iter().map(|entry| match entry {
            DriverRequest::Write { pages, .. } => pages.clone(),
            DriverRequest::Scatter { .. } | DriverRequest::Credit { .. } => 0..0,
        });
        assert_eq!(ranges.collect::<Vec<_>>(), [0..3, 3..4, 4..6]);
    }
}
