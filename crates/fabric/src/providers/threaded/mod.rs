//! Progress on a thread of its own, for any provider.
//!
//! Posts cross to the thread in a ring and their completions come back in another, so the caller's hot
//! path takes no lock. Calls that are rare take the lock under which the thread works, one step at a
//! time. The thread spins briefly when idle, then sleeps until the provider has something to do or a
//! post comes. It wakes the engine through the lane table's bell, as arrivals do.

mod worker;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::provider::{Capabilities, Group, Posted, Provider, Sink, Work};
use crate::ring::{Consumer, Producer, ring};
use crate::types::{Page, ProviderKind, RegionKey, Time};
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use weft_control::Rank;
use worker::{Ending, OwnedWork, Shared, Worker};

/// Parts that may be under way; then posts find the queue full.
const DEPTH: usize = 1024;

/// A provider whose progress is made by a thread.
pub struct Threaded {
    kind: ProviderKind,
    capabilities: Capabilities,
    shared: Arc<Shared>,
    posts: Producer<OwnedWork>,
    endings: Consumer<Ending>,
    /// Page lists that the thread is done with.
    spare: Consumer<Vec<Page>>,
    /// Parts posted whose completions have not come back.
    under_way: usize,
    /// Posts that the thread was not told of.
    held_back: bool,
    peers: Vec<Rank>,
    thread: Option<JoinHandle<()>>,
}

impl Threaded {
    /// Takes over `inner`, which must not be connected yet. The thread starts when it is.
    pub fn new(inner: Box<dyn Provider>) -> Result<Threaded> {
        let (posts, posted) = ring(DEPTH);
        // Twice as many, so that reports of lost peers fit beside all completions.
        let (ended, endings) = ring(2 * DEPTH);
        let (spared, spare) = ring(DEPTH);
        let (kind, inner_capabilities) = (inner.kind(), inner.capabilities());
        let worker = Worker {
            inner,
            posts: posted,
            endings: ended,
            spare: spared,
            waiting: VecDeque::with_capacity(DEPTH),
            full: Vec::new(),
            sink: Sink::default(),
            lanes: None,
        };
        Ok(Threaded {
            kind,
            capabilities: Capabilities { inline: false, ..inner_capabilities },
            shared: Arc::new(Shared::new(worker)?),
            posts,
            endings,
            spare,
            under_way: 0,
            held_back: false,
            peers: Vec::new(),
            thread: None,
        })
    }

    fn take_endings(&mut self, sink: &mut Sink) {
        while let Some(ending) = self.endings.take() {
            match ending {
                Ending::Completion(completion) => {
                    self.under_way = self.under_way.saturating_sub(1);
                    sink.completions.push(completion);
                }
                Ending::Lost(rank, why) => sink.lost.push((rank, why)),
            }
        }
    }

    fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.stop();
            // A panic of the thread was reported by it.
            let _ = thread.join();
        }
    }
}

impl Provider for Threaded {
    fn kind(&self) -> ProviderKind {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn address(&self) -> Vec<u8> {
        self.shared.call(|worker| worker.inner.address())
    }

    fn reaches(&self, address: &[u8]) -> bool {
        self.shared.call(|worker| worker.inner.reaches(address))
    }

    fn connect(&mut self, group: &Group<'_>) -> Result<()> {
        let descriptor = self.shared.call(|worker| {
            worker.lanes = Some(group.lanes.clone());
            worker.inner.connect(group).map(|()| worker.inner.descriptor())
        })?;
        self.peers = group.peers.iter().map(|&(rank, _)| rank).collect();
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(format!("weft-{}", self.kind));
        let thread = thread.spawn(move || shared.run(descriptor));
        self.thread = Some(thread.map_err(|e| Error::system("cannot start a progress thread", e))?);
        Ok(())
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        self.shared.call(|worker| worker.inner.allocate(device, length))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        self.shared.call(|worker| worker.inner.register(key, memory))
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        self.shared.call(|worker| worker.inner.grant(key, peer, range))
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        deadline: Time,
    ) -> Result<()> {
        self.shared.call(|worker| worker.inner.import(peer, key, length, entry, deadline))
    }

    fn deregister(&mut self, key: RegionKey) {
        self.shared.call(|worker| worker.inner.deregister(key));
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        self.shared.call(|worker| worker.inner.forget(peer, key));
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        if self.under_way == DEPTH {
            return Ok(Posted::Full);
        }
        let mut pages = self.spare.take().unwrap_or_default();
        pages.clear();
        pages.extend_from_slice(work.pages);
        let Work { token, peer, lane, credits, .. } = *work;
        if self.posts.put(OwnedWork { token, peer, lane, credits, pages }).is_err() {
            return Ok(Posted::Full);
        }
        self.under_way += 1;
        self.held_back = true;
        Ok(Posted::InFlight)
    }

    fn flush(&mut self, _sink: &mut Sink) {
        if std::mem::take(&mut self.held_back) {
            self.shared.ring();
        }
    }

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        self.take_endings(sink);
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.stop();
            let why = "the thread that makes progress has panicked";
            sink.lost.extend(self.peers.iter().map(|&rank| (rank, why.to_owned())));
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let ended = self.shared.call(|worker| worker.fence(peer));
        self.take_endings(sink);
        self.under_way = self.under_way.saturating_sub(ended.completions.len());
        sink.completions.extend(ended.completions);
        sink.lost.extend(ended.lost);
    }

    /// None: the thread polls the provider, and wakes the engine through the bell.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for Threaded {
    fn drop(&mut self) {
        self.stop();
    }
}
