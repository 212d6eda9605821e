//! Null device: links that accept every post and move no bytes.

use std::ops::Range;
use std::sync::Arc;
use weft_fabric::link::{
    Introduction, Membership, PostStatus, Scatter, ScatterStatus, Sink, WorkRequest,
};
use weft_fabric::{
    Device, Link, Memory, ProviderKind, Rank, RegionKey, RouteRule, Time, WaitLimit,
};

/// Device that accepts every post and moves no bytes.
pub struct Null {
    /// True: posts complete at the next poll.
    pub later: bool,
}

struct NullLink {
    later: bool,
    /// Tokens for posts that complete at the next poll.
    posted: Vec<u64>,
}

const QUEUE: usize = 1024;

impl Device for Null {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, _group: Membership) -> weft_fabric::Result<Box<dyn Link>> {
        Ok(Box::new(NullLink { later: self.later, posted: Vec::with_capacity(QUEUE) }))
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
