//! Record for a part in flight.

use crate::types::{Lane, Page};
use weft_control::Rank;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadAt {
    Post,
    Departure,
    Arrival,
}

pub(super) struct Part {
    pub from: Rank,
    pub to: Rank,
    pub token: u64,
    pub lane: Lane,
    pub pages: Vec<Page>,
    pub read_at: ReadAt,
    /// Bytes read from the source, page after page.
    pub data: Option<Vec<u8>>,
    /// Source digest at post.
    pub digest: u64,
    /// The part fails instead of raising the lane.
    pub will_fail: bool,
    pub completes_early: bool,
    /// The part has landed, failed or been discarded.
    pub ended: bool,
    /// Result that the scheduled completion will report.
    pub outcome: Option<Result<(), &'static str>>,
    pub completed: bool,
}

impl Part {
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|page| page.length).sum()
    }
}
