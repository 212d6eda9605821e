//! Checks of a write, and its entry into a round.

use super::counters::{End, Remote};
use super::queue::PeerQueue;
use super::regions::{Local, is_inside};
use super::submit::PeerWrite;
use super::{Path, Peer, Route};
use crate::lane_table::LaneTable;
use crate::request::Aim;
use crate::statistics::Totals;
use crate::types::{Class, Page};
use weft_control::Rank;

/// The two ends of a write: the peer, and its end of a counter.
pub(super) struct Target<'a> {
    pub path: &'a Path,
    route: &'a Option<Route>,
    totals: &'a mut Totals,
    queue: &'a PeerQueue,
    remote: &'a mut Remote,
    window: u32,
}

/// A write that has entered its round and is yet to be posted.
pub(super) struct Entry {
    /// Place of the link.
    pub link: u16,
    /// Its post completes at once.
    pub is_inline: bool,
    /// It is one part as it is, and no other write waits for the peer's link.
    pub is_direct: bool,
    /// It is one part as it is. One with many empty pages may have to be cut to be one.
    pub is_single: bool,
    pub class: Class,
    pub aim: Aim,
    pub raises: u64,
    /// Raises of the peer's data lanes in all, those of this write included.
    pub value: u64,
    /// Rounds below this one had been entered before.
    pub started: u64,
}

impl<'a> Target<'a> {
    #[inline(always)]
    pub fn of(peers: &'a mut [Peer], ends: &'a mut [Option<End>], peer: Rank) -> Option<Self> {
        let Peer { path, route, totals, queue, .. } = peers.get_mut(peer.0 as usize)?;
        let End { remote, window, .. } = ends.get_mut(peer.0 as usize)?.as_mut()?;
        let (path, remote, window) = (path.as_ref()?, remote.as_mut()?, *window);
        Some(Target { path, route, totals, queue, remote, window })
    }

    /// Checks a write, which changes nothing yet. Returns its target and bytes.
    #[inline(always)]
    pub fn admit(
        peers: &'a mut [Peer],
        ends: &'a mut [Option<End>],
        regions: &[Option<Local>],
        lanes: &LaneTable,
        write: &PeerWrite<'_>,
        round: u64,
    ) -> Option<(Self, u64)> {
        let Peer { path, route, totals, queue, regions: known } =
            peers.get_mut(write.peer.0 as usize)?;
        let path = path.as_ref()?;
        let mut bytes = 0_u64;
        for page in write.pages {
            let local = regions.get(page.source.0 as usize)?.as_ref()?;
            if !local.may_read(path.link, page.source_offset, page.length) {
                return None;
            }
            let length = known.length_of(page.destination)?;
            if !is_inside(page.destination_offset, page.length, length) {
                return None;
            }
            bytes = bytes.saturating_add(page.length);
        }
        let end = ends.get_mut(write.peer.0 as usize)?.as_mut()?;
        let started = end.remote.as_ref()?.started;
        if !end.is_open(lanes, round, started) {
            return None;
        }
        let (remote, window) = (end.remote.as_mut()?, end.window);
        Some((Target { path, route, totals, queue, remote, window }, bytes))
    }

    /// Enters a round that was checked.
    #[inline(always)]
    pub fn enter(self, write: &PeerWrite<'_>, class: Class, round: u64, bytes: u64) -> Entry {
        let Target { path, route, totals, queue, remote, window } = self;
        let is_single = write.pages.len() <= path.single_pages && bytes <= path.single_bytes;
        let raises = if is_single { 1 } else { count_parts(route, write.pages) };
        totals.bytes += bytes;
        totals.parts += raises;
        let started = remote.started;
        remote.started = started.max(round + 1);
        remote.raised += raises;
        let aim =
            Aim { peer: write.peer, lane: End::remote_data(remote, window, round), credits: None };
        let (link, is_inline, value) = (path.link, path.inline, remote.raised);
        let is_direct = is_single && !queue.is_listed();
        Entry { link, is_inline, is_direct, is_single, class, aim, raises, value, started }
    }

    /// Takes back what [`Target::enter`] did.
    pub fn leave(self, entry: &Entry, bytes: u64) {
        let Target { totals, remote, .. } = self;
        totals.bytes -= bytes;
        totals.parts -= entry.raises;
        remote.started = entry.started;
        remote.raised -= entry.raises;
    }
}

/// Parts of a write, by the rule of its route.
#[inline(never)]
fn count_parts(route: &Option<Route>, pages: &[Page]) -> u64 {
    route.map_or(1, |route| route.parts.count(pages.iter().map(|page| page.length)))
}
