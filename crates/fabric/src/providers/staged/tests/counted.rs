//! Tcp that counts the calls of the wrapper around it.

use crate::device::Device;
use crate::error::Result;
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use weft_control::Rank;

/// Calls at one link.
#[derive(Debug, Default)]
pub struct Calls {
    /// Parts and raises: messages to the peer.
    pub posts: AtomicU64,
    /// Registered regions, slots included.
    pub regions: AtomicU64,
}

/// Tcp device whose links count.
pub struct Counted {
    pub inner: Arc<dyn Device>,
    pub calls: Arc<Calls>,
}

impl Device for Counted {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(CountedLink { inner: self.inner.open(group)?, calls: self.calls.clone() }))
    }
}

struct CountedLink {
    inner: Box<dyn Link>,
    calls: Arc<Calls>,
}

impl Link for CountedLink {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn address(&self) -> Vec<u8> {
        self.inner.address()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        self.inner.route(theirs)
    }

    fn introduce(&mut self, peer: Rank, address: &[u8]) -> Result<Vec<u8>> {
        self.inner.introduce(peer, address)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.inner.connect(peers, limit)
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        self.calls.regions.fetch_add(1, SeqCst);
        self.inner.register(key, memory)
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        self.inner.grant(key, peer, range)
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        self.inner.import(peer, key, length, entry, limit)
    }

    fn deregister(&mut self, key: RegionKey) {
        self.inner.deregister(key);
    }

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.calls.posts.fetch_add(1, SeqCst);
        self.inner.post(work, sink)
    }

    fn flush(&mut self, sink: &mut Sink) {
        self.inner.flush(sink);
    }

    fn hold(&mut self, peer: Rank, token: u64) -> u32 {
        self.inner.hold(peer, token)
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        self.inner.poll(now, sink);
    }

    fn has_unread(&self) -> bool {
        self.inner.has_unread()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.inner.prepare_sleep()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.inner.descriptors()
    }

    fn next_deadline(&self) -> Option<Time> {
        self.inner.next_deadline()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        self.inner.fence(peer, sink);
    }
}
