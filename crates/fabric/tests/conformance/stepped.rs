//! Simulator for ranks that are threads: each link poll advances the world's clock to the next event.
//!
//! A case has one [`World`], with rough faults and a seed, in which each group opens links. A rank that
//! is about to sleep advances the clock until the calendar is empty, so that no sleeper waits for time to
//! pass. A link that closes does the same, as other links wait for delivery, and fails the case on any
//! recorded violation ([`World::violations`]).

use crate::provider::{CASE, Opened, Shape};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::link::{Introduction, Link, Membership, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::sim::{Faults, World, WorldConfig};
use weft_fabric::{
    Device, Lane, Memory, PartRule, ProviderKind, Rank, RegionKey, Result, RouteRule, Time,
    WaitLimit,
};

/// World size: as large as the largest group in a case.
const RANKS: u32 = 8;
const SEED: u64 = 23;

/// World for the case that this thread runs, in this shape.
fn world(shape: Shape) -> World {
    static WORLDS: Mutex<Option<HashMap<(&str, Shape), World>>> = Mutex::new(None);
    let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
    let worlds = worlds.get_or_insert_default();
    worlds.entry((CASE.get(), shape)).or_insert_with(|| World::new(config(shape))).clone()
}

fn config(shape: Shape) -> WorldConfig {
    let config = WorldConfig::new(RANKS, SEED).with_faults(Faults::rough());
    match shape {
        Shape::Queue(depth) => WorldConfig {
            queue_parts: depth as u32,
            queue_bytes: (depth as u64) << 10,
            parts: PartRule { max_part_bytes: 1 << 12, ..PartRule::WHOLE },
            ..config
        },
        _ => config,
    }
}

/// A rank's device in the case's world.
pub fn sim(rank: Rank, shape: Shape) -> Opened {
    if shape == Shape::Uneven {
        return Err("the world sets the limits, the same at all ranks");
    }
    let world = world(shape);
    Ok(Arc::new(Stepped { inner: world.device(rank), world }))
}

/// World in which a case kills and stops ranks: the world of the default-shape groups.
pub fn sim_world() -> World {
    world(Shape::Default)
}

struct Stepped {
    world: World,
    inner: Arc<dyn Device>,
}

impl Device for Stepped {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let (inner, world) = (self.inner.open(group)?, self.world.clone());
        Ok(Box::new(SteppedLink { inner, world, news: Sink::default() }))
    }
}

struct SteppedLink {
    world: World,
    inner: Box<dyn Link>,
    /// Events before a sleep, for the next poll.
    news: Sink,
}

impl Link for SteppedLink {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn address(&self) -> Vec<u8> {
        self.inner.address()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        self.inner.route(theirs)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.inner.connect(peers, limit)
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
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
        self.inner.post(work, sink)
    }

    fn released(&mut self, peer: Rank, lane: Lane) {
        self.inner.released(peer, lane);
    }

    fn flush(&mut self, sink: &mut Sink) {
        self.inner.flush(sink);
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        let Sink { completed, failures, lost, .. } = &mut self.news;
        sink.completed.append(completed);
        sink.failures.append(failures);
        sink.lost.append(lost);
        self.world.step();
        self.inner.poll(now, sink);
    }

    /// Another rank may have advanced the clock since the last poll.
    fn prepare_sleep(&mut self) -> bool {
        if self.world.step() {
            return false;
        }
        self.inner.poll(Time(0), &mut self.news);
        self.news.is_empty()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        self.inner.fence(peer, sink);
    }
}

impl Drop for SteppedLink {
    fn drop(&mut self) {
        while self.world.step() {}
        if !std::thread::panicking() {
            let violations = self.world.violations();
            assert!(violations.is_empty(), "{}", violations[0]);
        }
    }
}
