//! Hostile wrapper for tests: a device whose parts are reordered and delayed as far as [`crate::link`]
//! permits.
//!
//! A posted part is queued here with a copy of the page list and is in flight; the engine keeps the
//! sources. A later poll posts it to the inner link, among others and in random order. When the inner
//! link completes it, that report is delayed too. Parts thus overtake each other even over a link whose
//! posts complete on return. Both delays have a lower bound, so that parts overlap, and an upper bound,
//! so that each part makes progress. Some posts report a full queue although it has room.
//!
//! The [`Link`] contract holds: a part ends exactly once; no source is read after that; a fence ends all
//! parts to the peer; a dropped link forwards all queued parts. Parts that the inner link copied but
//! could not send ([`Sink::held`]) end when the inner link has sent them ([`Link::hold`]).
//!
//! Both ends of a route are wrapped, or neither: a wrapped address does not reach an unwrapped one. Equal
//! seeds give equal draws; the part order also depends on poll times.

use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::timer::Timer;
use crate::types::{Lane, Page, ProviderKind, RegionKey, Time, TrafficClass};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;
use weft_control::random::{SplitMix64, mix};

/// [`HostileDevice`] configuration.
#[derive(Clone, Debug)]
pub struct HostileConfig {
    /// Seed for all draws (SplitMix64). Each rank and generation has a separate sequence.
    pub seed: u64,
    /// Minimum delay before a part is posted, and before a completion is reported.
    pub min_delay: Duration,
    /// Maximum delay before a part is posted, and before a completion is reported.
    pub max_delay: Duration,
    /// One post in this many reports a full queue; zero: none.
    pub full_one_in: u64,
    /// Bulk parts queued toward one peer before posts report a full queue; twice as many parts in both
    /// classes.
    pub depth: usize,
}

impl HostileConfig {
    /// Configuration with delays from 20 to 500 us, one refusal in 8 posts and 256 parts to each peer.
    pub fn new(seed: u64) -> HostileConfig {
        HostileConfig {
            seed,
            min_delay: Duration::from_micros(20),
            max_delay: Duration::from_micros(500),
            full_one_in: 8,
            depth: 256,
        }
    }
}

/// First bytes in a wrapped link's address.
const ADDRESS_PREFIX: &[u8] = b"hostile ";
/// Delay before a part is posted again to an inner link whose queue was full.
const RETRY_DELAY: Duration = Duration::from_millis(1);
/// Time for which a dropped link retries queued parts at a full inner link.
const LINGER: Duration = Duration::from_secs(1);
/// Past deadline.
const PAST: Time = Time(1);

/// Device whose links delay and reorder another device's parts; see the module documentation.
pub struct HostileDevice {
    inner: Arc<dyn Device>,
    config: HostileConfig,
}

impl HostileDevice {
    /// Wraps `inner`.
    pub fn over(inner: Arc<dyn Device>, config: HostileConfig) -> HostileDevice {
        HostileDevice { inner, config }
    }
}

impl Device for HostileDevice {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let (rank, generation) = (u64::from(group.rank.0), u64::from(group.generation.0));
        let seed = mix(mix(self.config.seed) ^ rank << 8 ^ generation);
        let timer = Timer::new();
        Ok(Box::new(HostileLink {
            random: SplitMix64::new(seed),
            config: self.config.clone(),
            queued: Vec::new(),
            queued_toward: vec![0; group.size as usize],
            in_flight: HashMap::new(),
            finished: Vec::new(),
            posts: 0,
            was_full: false,
            fenced: vec![false; group.size as usize],
            inner_events: Sink::default(),
            timer: timer.map_err(|e| Error::system("cannot create a timer descriptor", e))?,
            inner: self.inner.open(group)?,
        }))
    }

    fn demands_thread(&self) -> bool {
        self.inner.demands_thread()
    }
}

/// Part not yet posted to the inner link.
struct QueuedPart {
    token: u64,
    peer: Rank,
    lane: Lane,
    credits: Option<Lane>,
    piggyback: Option<Lane>,
    class: TrafficClass,
    pages: Vec<Page>,
    /// Time to post it to the inner link; `None` until the next poll.
    due: Option<Time>,
}

impl QueuedPart {
    fn work(&self, token: u64) -> WorkRequest<'_> {
        let QueuedPart { peer, lane, credits, piggyback, class, ref pages, .. } = *self;
        WorkRequest { token, peer, lane, credits, piggyback, class, pages }
    }
}

/// Part in flight on the inner link.
struct InFlightPart {
    token: u64,
    peer: Rank,
    /// Outstanding completions from the inner link.
    pending: u32,
    failure: Option<String>,
}

/// Part completion, not yet reported.
struct FinishedPart {
    token: u64,
    peer: Rank,
    failure: Option<String>,
    /// Time to report it; `None` until the next poll.
    due: Option<Time>,
}

impl FinishedPart {
    fn report(self, sink: &mut Sink) {
        match self.failure {
            None => sink.done(self.token),
            Some(why) => sink.failed(self.token, why),
        }
    }
}

struct HostileLink {
    random: SplitMix64,
    config: HostileConfig,
    queued: Vec<QueuedPart>,
    /// Queued parts, by peer.
    queued_toward: Vec<usize>,
    /// By the inner link's token.
    in_flight: HashMap<u64, InFlightPart>,
    finished: Vec<FinishedPart>,
    /// Posts to the inner link.
    posts: u64,
    /// A post since the last poll reported a full queue.
    was_full: bool,
    /// Fenced peers, by rank.
    fenced: Vec<bool>,
    /// Events from the inner link.
    inner_events: Sink,
    timer: Timer,
    inner: Box<dyn Link>,
}

impl HostileLink {
    /// Draws a time between the minimum and the maximum delay from `now`; most are short.
    fn draw(&mut self, now: Time) -> Time {
        let HostileConfig { min_delay, max_delay, .. } = self.config;
        let range = max_delay.saturating_sub(min_delay).as_nanos() as u64;
        let range = if self.random.below(8) == 0 { range } else { range / 8 };
        now.after(min_delay).after(Duration::from_nanos(self.random.below(range + 1)))
    }

    /// Removes the due parts from `all`, in random order. Draws a time for parts that have none.
    fn take_due<T>(
        &mut self,
        all: fn(&mut Self) -> &mut Vec<T>,
        due: fn(&mut T) -> &mut Option<Time>,
        now: Time,
    ) -> Vec<T> {
        let mut waiting = std::mem::take(all(self));
        for part in &mut waiting {
            if due(part).is_none() {
                *due(part) = Some(self.draw(now));
            }
        }
        let is_due = |part: &mut T| due(part).is_some_and(|due| due <= now);
        let mut taken: Vec<T> = waiting.extract_if(.., is_due).collect();
        for index in (1..taken.len()).rev() {
            taken.swap(index, self.random.below(index as u64 + 1) as usize);
        }
        *all(self) = waiting;
        taken
    }

    /// Posts due parts to the inner link.
    fn forward(&mut self, now: Time) {
        let due = self.take_due(|link| &mut link.queued, |part| &mut part.due, now);
        if due.is_empty() {
            return;
        }
        let mut copied = Vec::new();
        for mut part in due {
            let (token, peer) = (part.token, part.peer);
            // The peer in the low bits, as in an engine token.
            let inner = self.posts << 24 | u64::from(peer.0);
            self.posts += 1;
            self.queued_toward[peer.index()] -= 1;
            match self.inner.post(&part.work(inner), &mut self.inner_events) {
                Ok(PostStatus::Done) => copied.push((inner, token, peer)),
                Ok(PostStatus::InFlight) => {
                    let part = InFlightPart { token, peer, pending: 1, failure: None };
                    self.in_flight.insert(inner, part);
                }
                Ok(PostStatus::Full) => {
                    part.due = Some(now.after(RETRY_DELAY));
                    self.queued_toward[peer.index()] += 1;
                    self.queued.push(part);
                }
                Err(why) => self.finish(token, peer, Some(why)),
            }
        }
        self.inner.flush(&mut self.inner_events);
        let is_held = std::mem::take(&mut self.inner_events.held);
        for (inner, token, peer) in copied {
            match if is_held { self.inner.hold(peer, inner) } else { 0 } {
                0 => self.finish(token, peer, None),
                pending => {
                    let part = InFlightPart { token, peer, pending, failure: None };
                    self.in_flight.insert(inner, part);
                }
            }
        }
    }

    fn finish(&mut self, token: u64, peer: Rank, failure: Option<String>) {
        self.finished.push(FinishedPart { token, peer, failure, due: None });
    }

    /// Processes the inner link's completions; passes losses and raised lanes on.
    fn take_inner_events(&mut self, sink: &mut Sink) {
        let completed = std::mem::take(&mut self.inner_events.completed);
        let failures = std::mem::take(&mut self.inner_events.failures);
        for inner in completed {
            self.inner_finished(inner, None);
        }
        for (inner, why) in failures {
            self.inner_finished(inner, Some(why));
        }
        sink.lost.append(&mut self.inner_events.lost);
        sink.raised.append(&mut self.inner_events.raised);
    }

    fn inner_finished(&mut self, inner: u64, failure: Option<String>) {
        let Some(part) = self.in_flight.get_mut(&inner) else {
            log::error!("{} completed an unknown part", self.inner.kind());
            debug_assert!(false, "part completed twice");
            return;
        };
        part.pending -= 1;
        part.failure = part.failure.take().or(failure);
        if part.pending == 0
            && let Some(InFlightPart { token, peer, failure, .. }) = self.in_flight.remove(&inner)
        {
            self.finish(token, peer, failure);
        }
    }

    /// Time at which the next part or completion is due.
    fn next_due(&self) -> Option<Time> {
        let held = self.queued.iter().map(|part| part.due);
        let dues = held.chain(self.finished.iter().map(|part| part.due));
        let next = dues.map(|due| due.unwrap_or(PAST)).min();
        if self.was_full { Some(PAST) } else { next }
    }
}

/// The inner link's address within a wrapped one.
fn unwrapped(address: &[u8]) -> &[u8] {
    address.strip_prefix(ADDRESS_PREFIX).unwrap_or_default()
}

impl Link for HostileLink {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn address(&self) -> Vec<u8> {
        [ADDRESS_PREFIX, &self.inner.address()].concat()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let rule = self.inner.route(theirs.strip_prefix(ADDRESS_PREFIX)?)?;
        Some(RouteRule { ordered: false, inline: false, mapped: false, ..rule })
    }

    fn introduce(&mut self, peer: Rank, address: &[u8]) -> Result<Vec<u8>> {
        self.inner.introduce(peer, unwrapped(address))
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        let unwrap = peers.iter().map(|peer| {
            let address = unwrapped(peer.address);
            Introduction { address, ..*peer }
        });
        let peers: Vec<Introduction<'_>> = unwrap.collect();
        self.inner.connect(&peers, limit)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        self.inner.allocate(device, length)
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

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        self.inner.remove_remote(peer, key);
    }

    /// A credit is accepted when it is first offered: `credits` is set only then.
    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        let WorkRequest { token, peer, lane, credits, piggyback, class, pages } = *work;
        let fenced = self.fenced.get(peer.index()).ok_or("not a rank of the group")?;
        if *fenced {
            return Err("the peer is fenced".into());
        }
        let depth =
            if class == TrafficClass::Bulk { self.config.depth } else { 2 * self.config.depth };
        let reports_full = match self.config.full_one_in {
            0 => false,
            one_in => self.random.below(one_in) == 0,
        };
        if credits.is_none() && (reports_full || self.queued_toward[peer.index()] >= depth.max(1)) {
            self.was_full = true;
            return Ok(PostStatus::Full);
        }
        let pages = pages.to_vec();
        let part = QueuedPart { token, peer, lane, credits, piggyback, class, pages, due: None };
        self.queued.push(part);
        self.queued_toward[peer.index()] += 1;
        Ok(PostStatus::InFlight)
    }

    /// Wakes a sleeping engine for the posted parts.
    fn flush(&mut self, _sink: &mut Sink) {
        self.timer.set(self.next_due());
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        self.was_full = false;
        self.inner.poll(now, &mut self.inner_events);
        self.forward(now);
        self.take_inner_events(sink);
        let finished = self.take_due(|link| &mut link.finished, |part| &mut part.due, now);
        finished.into_iter().for_each(|part| part.report(sink));
        self.timer.set(self.next_due());
    }

    fn peers_raise(&self) -> bool {
        self.inner.peers_raise()
    }

    fn use_copy_engines_only(&mut self) {
        self.inner.use_copy_engines_only();
    }

    fn share_wake(&mut self) -> bool {
        self.inner.share_wake()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.timer.set(self.next_due());
        self.inner.prepare_sleep()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.inner.descriptors();
        descriptors.push(self.timer.descriptor().as_raw_fd());
        descriptors
    }

    fn next_deadline(&self) -> Option<Time> {
        self.next_due().into_iter().chain(self.inner.next_deadline()).min()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        if let Some(fenced) = self.fenced.get_mut(peer.index()) {
            *fenced = true;
            self.queued_toward[peer.index()] = 0;
        }
        self.inner.fence(peer, &mut self.inner_events);
        self.take_inner_events(sink);
        for part in self.queued.extract_if(.., |part| part.peer == peer) {
            sink.failed(part.token, format!("{peer} was fenced"));
        }
        let finished = self.finished.extract_if(.., |part| part.peer == peer);
        finished.for_each(|part| part.report(sink));
    }
}

impl Drop for HostileLink {
    /// Forwards queued parts before the link closes.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        while !self.queued.is_empty() {
            self.queued.iter_mut().for_each(|part| part.due = Some(PAST));
            let now = clock::now();
            self.forward(now);
            if self.queued.is_empty() || now >= deadline {
                return;
            }
            self.inner.poll(now, &mut self.inner_events);
            self.take_inner_events(&mut sink);
            std::thread::sleep(RETRY_DELAY);
        }
    }
}
