//! Drivers' scatters: writes from one region to several peers, under one request.
//!
//! Validation is the same as for single writes and precedes all posts. The source is looked up once, and the writes are
//! posted as a link takes a batch. The request stays open until the submit's flush, as each link then knows what it holds.

use super::counters::{self, Counter};
use super::region::is_inside;
use super::route::EnginePeer;
use super::state::{Engine, ScatterInSubmit};
use crate::error::{Error, Result};
use crate::link::ScatterPart;
use crate::request::{Request, RequestTag};
use crate::types::{CounterId, RegionKey, RequestId};
use std::ops::Range;

impl Engine {
    /// Posts one scatter from a driver, with a round for each part.
    ///
    /// # Errors
    /// Same as [`Engine::write`], for the first part that is rejected. No byte was written then.
    #[inline(never)]
    pub(super) fn scatter_parts(
        &mut self,
        counter: CounterId,
        source: RegionKey,
        (range, parts): (Range<usize>, &mut [ScatterPart]),
        rounds: &[u64],
        tag: RequestTag,
    ) -> Result<()> {
        self.check_room()?;
        if !self.admit_parts(counter, source, parts, rounds) {
            return Err(self.refused_part(counter, source, parts, rounds));
        }
        let (id, _) = self.requests.open(tag, Request::SEVERAL);
        self.post_scatter(id, counter, |part| rounds[part], parts, &[]);
        self.open_scatters.push(ScatterInSubmit { id, parts: range });
        Ok(())
    }

    /// Error for a rejected scatter: the first part's that is rejected.
    #[cold]
    #[inline(never)]
    fn refused_part(
        &mut self,
        counter: CounterId,
        source: RegionKey,
        parts: &mut [ScatterPart],
        rounds: &[u64],
    ) -> Error {
        for (part, round) in parts.iter_mut().zip(rounds) {
            let (part, round) = (std::slice::from_mut(part), std::slice::from_ref(round));
            if !self.admit_parts(counter, source, part, round) {
                return self.refused(part[0].peer, counter, round[0], &[part[0].page]);
            }
        }
        Error::NotLinked { counter }
    }

    /// Validates every part, and names the link where a write is certainly one part.
    #[inline(always)]
    fn admit_parts(
        &mut self,
        counter: CounterId,
        source: RegionKey,
        parts: &mut [ScatterPart],
        rounds: &[u64],
    ) -> bool {
        let Engine { peers, regions, counters, lanes, .. } = self;
        let Some(Counter { ends, .. }) = counters::get(counters, counter) else { return false };
        let Some(Some(local)) = regions.get(source.0 as usize) else { return false };
        let (ends, lanes) = (ends.as_mut_slice(), &**lanes);
        for (part, &round) in parts.iter_mut().zip(rounds) {
            let (peer, page) = (part.peer.index(), &part.page);
            let Some(EnginePeer { path: Some(path), regions: known, .. }) = peers.get_mut(peer)
            else {
                return false;
            };
            let Some(Some(end)) = ends.get_mut(peer) else { return false };
            let Some(remote) = &end.remote else { return false };
            let (started, length) = (remote.started, known.length_of(page.destination));
            if !length.is_some_and(|it| is_inside(page.destination_offset, page.length, it))
                || !local.may_read(path.link, page.source_offset, page.length)
                || !end.is_open(lanes, round, started)
            {
                return false;
            }
            let is_single = page.length <= path.single_bytes;
            part.link = if is_single { path.link } else { ScatterPart::NO_LINK };
        }
        true
    }

    /// Ends the submit for drivers' scatters. Those that have completed are events for the next poll.
    #[inline(never)]
    pub(super) fn end_scatters(&mut self) {
        let mut scatters = std::mem::take(&mut self.open_scatters);
        for ScatterInSubmit { id, .. } in scatters.drain(..) {
            let tag = self.requests.get(id).map(|request| request.tag);
            if self.end_submit(id) == RequestId::DONE
                && let Some(tag) = tag.filter(|tag| tag.is_of_driver())
            {
                self.completed_tags.push(tag.0);
            }
        }
        self.open_scatters = scatters;
    }
}
