//! What a polled driver takes and gives: events in, requests out, no I/O and no clock.
//!
//! A driver is `poll(now, &[Event], &mut Requests)`. It allocates nothing after construction: give
//! [`Requests::with_capacity`] the most it ever asks for in one poll.

use crate::types::{CounterId, Page, Time};
use std::ops::Range;
use weft_control::{Poison, Rank};

/// Something that happened, as a driver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer raised its lane of one of our counters.
    Raised {
        /// Ours.
        counter: CounterId,
        /// The peer that raised it.
        peer: Rank,
        /// The round that the lane counts, open and without a credit.
        round: u64,
        /// Raises in that round, all of which are visible now.
        count: u64,
    },
    /// A peer gave credit: its bytes may be written in one more round.
    Credited {
        /// Our counter in the same position as the peer's.
        counter: CounterId,
        /// Who gave it.
        peer: Rank,
        /// Credits it has given in all. Round r may start when this is at least r.
        credits: u64,
    },
    /// The source of a request may be reused.
    Completed {
        /// The tag that the request was given.
        tag: u64,
    },
    /// The group is poisoned; nothing more will arrive.
    Poisoned(Poison),
}

impl Event {
    /// Tags above this bit say whose they are, see [`Driver::namespace`].
    pub const NAMESPACE_SHIFT: u32 = 48;
}

/// What a driver asks of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Write { peer: Rank, counter: CounterId, round: u64, pages: Range<usize>, tag: u64 },
    Credit { peer: Rank, counter: CounterId },
}

/// Requests that a driver hands out in one poll; the engine drains them.
#[derive(Debug, Default)]
pub struct Requests {
    pub(crate) asks: Vec<Ask>,
    pub(crate) pages: Vec<Page>,
}

impl Requests {
    /// Room for this many requests and pages.
    pub fn with_capacity(requests: usize, pages: usize) -> Requests {
        Requests { asks: Vec::with_capacity(requests), pages: Vec::with_capacity(pages) }
    }

    /// Writes `pages` to `peer` and raises its `counter` by the parts of that write. A signal if
    /// there are none. [`Event::Completed`] with `tag` follows when the sources may be reused and
    /// the bytes have left this process.
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
        self.asks.push(Ask::Write { peer, counter, round, pages, tag });
    }

    /// Tells `peer` that what it wrote under our `counter` has been read: it may start one more round.
    pub fn credit(&mut self, peer: Rank, counter: CounterId) {
        self.asks.push(Ask::Credit { peer, counter });
    }

    /// Whether nothing is asked.
    pub fn is_empty(&self) -> bool {
        self.asks.is_empty()
    }
}

/// A polled state machine over an engine.
pub trait Driver {
    /// What can go wrong in it.
    type Error;

    /// The number that [`crate::Engine::namespace`] gave it: the high bits of its tags.
    fn namespace(&self) -> u16;

    /// The counters whose events it wants.
    fn counters(&self) -> &[CounterId];

    /// Takes what happened, moves on, and hands out requests. `now` is for deadlines and traces.
    fn poll(
        &mut self,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<(), Self::Error>;
}
