//! Null device: links that accept every post and move no bytes.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use weft_fabric::link::{
    Introduction, Membership, PostStatus, Scatter, ScatterStatus, Sink, WorkRequest,
};
use weft_fabric::{
    Device, LaneTable, Link, Memory, ProviderKind, Rank, RegionKey, RouteRule, Time, WaitLimit,
};

/// Device that accepts every post and moves no bytes.
#[derive(Clone, Default)]
pub struct Null {
    /// True: posts complete at the next poll.
    pub later: bool,
    /// Rank 0's lanes, which the other ranks' posts raise, so that their credits arrive; shared by all ranks. Without
    /// it no post raises a lane.
    pub raised: Option<Arc<OnceLock<Arc<LaneTable>>>>,
}

struct NullLink {
    later: bool,
    /// Lanes that posts raise.
    raised: Option<Arc<LaneTable>>,
    /// Tokens for posts that complete at the next poll.
    posted: Vec<u64>,
}

const QUEUE: usize = 1024;

impl Device for Null {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    /// Opens rank 0 first.
    fn open(&self, group: Membership) -> weft_fabric::Result<Box<dyn Link>> {
        let table = self.raised.as_ref().map(|table| table.get_or_init(|| group.lanes.clone()));
        let raised = table.filter(|_| group.rank != Rank(0)).cloned();
        Ok(Box::new(NullLink { later: self.later, raised, posted: Vec::with_capacity(QUEUE) }))
    }
}

impl Link for NullLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn route(&self, _theirs: &[u8]) -> Option<RouteRule> {
        Some(RouteRule { inline: !self.later, ..RouteRule::STORES })
    }

    fn connect(
        &mut self,
        _: &[Introduction<'_>],
        _: &mut WaitLimit<'_>,
    ) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn register(&mut self, _key: RegionKey, _memory: &Arc<Memory>) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn grant(&mut self, _: RegionKey, _: Rank, _: Range<u64>) -> weft_fabric::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn import(
        &mut self,
        _peer: Rank,
        _key: RegionKey,
        _length: u64,
        _entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn deregister(&mut self, _key: RegionKey) {}

    fn post(&mut self, work: &WorkRequest<'_>, _sink: &mut Sink) -> Result<PostStatus, String> {
        if let Some(table) = &self.raised {
            return raise(table, work);
        }
        if !self.later {
            return Ok(PostStatus::Done);
        }
        if self.posted.len() == self.posted.capacity() {
            return Ok(PostStatus::Full);
        }
        self.posted.push(work.token);
        Ok(PostStatus::InFlight)
    }

    fn post_scatter(&mut self, scatter: &Scatter<'_>, _sink: &mut Sink) -> ScatterStatus {
        let taken = scatter.parts.len();
        if !self.later {
            return ScatterStatus { taken, ..ScatterStatus::default() };
        }
        self.posted.extend(scatter.parts.iter().map(|part| scatter.token(part)));
        ScatterStatus { taken, in_flight: taken as u32, failed: None }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        // The engine has drained the sink.
        sink.completed.reserve(QUEUE);
        std::mem::swap(&mut self.posted, &mut sink.completed);
    }

    fn fence(&mut self, _peer: Rank, _sink: &mut Sink) {}
}

/// Raises a part's lane. Not inlined: only ranks that are not measured do it.
#[cold]
#[inline(never)]
fn raise(table: &LaneTable, work: &WorkRequest<'_>) -> Result<PostStatus, String> {
    table.arrive(work.lane).ok_or("a lane that was not granted")?;
    Ok(PostStatus::Done)
}
