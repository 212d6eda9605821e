//! Checks of a write, and its entry into a round.

use super::counters::{Counter, End, Remote};
use super::queue::PeerQueue;
use super::regions::{Lengths, Local, is_inside};
use super::{Path, Peer, Route};
use crate::lane_table::LaneTable;
use crate::types::{Class, Lane, Page, bytes_of};
use weft_control::Rank;

/// The two ends of a write that was checked: the peer, and its end of a counter.
pub(super) struct Target<'a> {
    pub path: &'a Path,
    pub queue: &'a PeerQueue,
    pub class: Class,
    route: &'a Option<Route>,
    remote: &'a mut Remote,
    window: u32,
    /// Of the write.
    bytes: u64,
}

/// A write that has entered its round and is yet to be posted.
pub(super) struct Entry {
    /// The peer's lane that it raises.
    pub lane: Lane,
    /// It is one part as it is. One with many empty pages may have to be cut to be one.
    pub is_single: bool,
    /// Raises of the peer's data lanes in all, those of this write included.
    pub value: u64,
}

impl<'a> Target<'a> {
    /// Checks a write, which changes nothing yet.
    #[inline(always)]
    pub fn admit(
        peers: &'a mut [Peer],
        counter: Option<&'a mut Counter>,
        regions: &[Option<Local>],
        lanes: &LaneTable,
        peer: Rank,
        pages: &[Page],
        round: u64,
    ) -> Option<Self> {
        let Counter { ends, class, .. } = counter?;
        let Peer { path, route, queue, regions: known, .. } = peers.get_mut(peer.index())?;
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
        Some(Target { path, queue, class: *class, route, remote, window, bytes })
    }

    /// The target of a write that was checked before.
    #[inline(always)]
    pub fn of(
        peers: &'a mut [Peer],
        counter: Option<&'a mut Counter>,
        peer: Rank,
        pages: &[Page],
    ) -> Option<Self> {
        let Counter { ends, class, .. } = counter?;
        let Peer { path, route, queue, .. } = peers.get_mut(peer.index())?;
        let End { remote, window, .. } = ends.get_mut(peer.index())?.as_mut()?;
        let (path, remote, window) = (path.as_ref()?, remote.as_mut()?, *window);
        let (class, bytes) = (*class, bytes_of(pages));
        Some(Target { path, queue, class, route, remote, window, bytes })
    }

    /// Whether a credit may travel with the write.
    #[inline(always)]
    pub fn takes_rider(&self) -> bool {
        self.path.max_ride > 0 && self.bytes <= self.path.max_ride
    }

    /// Enters the round that was checked.
    #[inline(always)]
    pub fn enter(self, pages: &[Page], round: u64) -> Entry {
        let Target { path, route, remote, window, bytes, .. } = self;
        let is_single = pages.len() <= path.single_pages && bytes <= path.single_bytes;
        let raises = if is_single { 1 } else { count_parts(route, pages) };
        let lane = remote.enter(window, round, raises, bytes);
        Entry { lane, is_single, value: remote.raised }
    }
}

/// Checks one page; returns its length.
#[inline(always)]
fn admit_page(
    path: &Path,
    known: &mut Lengths,
    regions: &[Option<Local>],
    page: &Page,
) -> Option<u64> {
    let local = regions.get(page.source.0 as usize)?.as_ref()?;
    let length = known.length_of(page.destination)?;
    let inside = is_inside(page.destination_offset, page.length, length);
    (inside && local.may_read(path.link, page.source_offset, page.length)).then_some(page.length)
}

/// Parts of a write, by the rule of its route.
#[cold]
#[inline(never)]
pub(super) fn count_parts(route: &Option<Route>, pages: &[Page]) -> u64 {
    route.map_or(1, |route| route.parts.count(pages.iter().map(|page| page.length)))
}
