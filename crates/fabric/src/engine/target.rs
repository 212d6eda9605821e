//! Write target: validation, and entry into a round.

use super::counters::{Counter, CounterEnd, RemoteCounter};
use super::peer_queue::PeerQueue;
use super::region::{LocalRegion, RemoteLengths, is_inside};
use super::route::{EnginePeer, PostPath, Route};
use crate::lane_table::LaneTable;
use crate::types::{Lane, Page, TrafficClass, bytes_of};
use weft_control::Rank;

/// Peer and counter end for a validated write.
pub(super) struct WriteTarget<'a> {
    pub path: &'a PostPath,
    pub queue: &'a PeerQueue,
    pub class: TrafficClass,
    route: &'a Option<Route>,
    remote: &'a mut RemoteCounter,
    window: u32,
    /// Bytes in the write.
    bytes: u64,
}

/// Write that has entered a round, before it is posted.
pub(super) struct RoundEntry {
    /// The peer's lane that it raises.
    pub lane: Lane,
    /// True for one part without division. A write with many empty pages may need a division pass.
    pub is_single: bool,
    /// Total raises on the peer's data lanes, including this write's.
    pub value: u64,
}

impl<'a> WriteTarget<'a> {
    /// Validates a write, without changes.
    #[inline(always)]
    pub fn admit(
        peers: &'a mut [EnginePeer],
        counter: Option<&'a mut Counter>,
        regions: &[Option<LocalRegion>],
        lanes: &LaneTable,
        peer: Rank,
        pages: &[Page],
        round: u64,
    ) -> Option<Self> {
        let Counter { ends, class, .. } = counter?;
        let EnginePeer { path, route, queue, regions: known, .. } = peers.get_mut(peer.index())?;
        let path = path.as_ref()?;
        let bytes = match pages {
            [page] => admit_page(path, known, regions, page)?,
            _ => pages.iter().try_fold(0_u64, |bytes, page| {
                Some(bytes.saturating_add(admit_page(path, known, regions, page)?))
            })?,
        };
        let end = ends.get_mut(peer.index())?.as_mut()?;
        let started = end.remote.as_ref()?.started;
        if !end.is_open(lanes, round, started) {
            return None;
        }
        let (remote, window) = (end.remote.as_mut()?, end.window);
        Some(WriteTarget { path, queue, class: *class, route, remote, window, bytes })
    }

    /// Target for a validated write.
    #[inline(always)]
    pub fn of(
        peers: &'a mut [EnginePeer],
        counter: Option<&'a mut Counter>,
        peer: Rank,
        pages: &[Page],
    ) -> Option<Self> {
        let Counter { ends, class, .. } = counter?;
        let EnginePeer { path, route, queue, .. } = peers.get_mut(peer.index())?;
        let CounterEnd { remote, window, .. } = ends.get_mut(peer.index())?.as_mut()?;
        let (path, remote, window) = (path.as_ref()?, remote.as_mut()?, *window);
        let (class, bytes) = (*class, bytes_of(pages));
        Some(WriteTarget { path, queue, class, route, remote, window, bytes })
    }

    /// True if the write may carry a credit.
    #[inline(always)]
    pub fn takes_rider(&self) -> bool {
        self.path.max_piggyback > 0 && self.bytes <= self.path.max_piggyback
    }

    /// Enters the validated round.
    #[inline(always)]
    pub fn enter(self, pages: &[Page], round: u64) -> RoundEntry {
        let WriteTarget { path, route, remote, window, bytes, .. } = self;
        let is_single = pages.len() <= path.single_pages && bytes <= path.single_bytes;
        let raises = if is_single { 1 } else { count_parts(route, pages) };
        let lane = remote.enter(window, round, raises, bytes);
        RoundEntry { lane, is_single, value: remote.raised }
    }
}

/// Validates one page; returns the page length.
#[inline(always)]
fn admit_page(
    path: &PostPath,
    known: &mut RemoteLengths,
    regions: &[Option<LocalRegion>],
    page: &Page,
) -> Option<u64> {
    let local = regions.get(page.source.0 as usize)?.as_ref()?;
    let length = known.length_of(page.destination)?;
    let inside = is_inside(page.destination_offset, page.length, length);
    (inside && local.may_read(path.link, page.source_offset, page.length)).then_some(page.length)
}

/// Part count of a write, by the route's rule.
#[cold]
#[inline(never)]
pub(super) fn count_parts(route: &Option<Route>, pages: &[Page]) -> u64 {
    route.map_or(1, |route| route.parts.count(pages.iter().map(|page| page.length)))
}
