//! Hostile wrapper, for tests: any device, with its parts reordered and delayed as far as
//! [`crate::link`] permits.
//!
//! A part that is posted is kept here, as a copy of its page list, and is under way: the engine keeps its
//! sources. A later poll posts it to the inner link, among others and in random order. The end that the
//! inner link reports is kept for a while, too. So parts overtake each other also over a link whose posts
//! are done when they return. Both delays have a lower bound, so that parts meet, and an upper bound, so
//! that none waits for ever. Some posts find a full queue although there is room.
//!
//! The promises of [`Link`] hold: a part ends exactly once; no source is read after its end; a fence ends
//! all parts of its peer; a link that is dropped hands on what it holds. What the inner link copied and
//! could not send ([`Sink::held`]) ends when the inner link has sent it ([`Link::hold`]).
//!
//! Both ends of a route are wrapped or neither is: a wrapped address reaches no other. Equal seeds draw
//! equal numbers, but the order of parts depends on when the engine polls, too.

use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::timer::Timer;
use crate::types::{Class, Lane, Page, ProviderKind, RegionKey, Time};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;
use weft_control::random::{SplitMix64, mix};

/// How much a [`Hostile`] device disturbs.
#[derive(Clone, Debug)]
pub struct HostileConfig {
    /// Seed of all draws (splitmix64). Each rank and generation has a sequence of its own.
    pub seed: u64,
    /// Shortest delay of a part, and again of its end.
    pub shortest: Duration,
    /// Longest delay of a part, and again of its end.
    pub longest: Duration,
    /// One post of so many finds a full queue; none if zero.
    pub refuse_one_in: u64,
    /// Bulk parts held toward one peer before posts find a full queue, and twice as many of both classes.
    pub depth: usize,
}

impl HostileConfig {
    /// Delays of 20 to 500 us, one refusal in 8 posts, 256 parts to each peer.
    pub fn new(seed: u64) -> HostileConfig {
        HostileConfig {
            seed,
            shortest: Duration::from_micros(20),
            longest: Duration::from_micros(500),
            refuse_one_in: 8,
            depth: 256,
        }
    }
}

/// First bytes of a wrapped link's address.
const MARK: &[u8] = b"hostile ";
/// Delay before a part is posted again to an inner link whose queue was full.
const RETRY: Duration = Duration::from_millis(1);
/// Time for which a link that is dropped offers what it holds to an inner link whose queue is full.
const LINGER: Duration = Duration::from_secs(1);
/// A deadline that has passed.
const AT_ONCE: Time = Time(1);

/// A device whose links disturb those of another one. See the module's page.
pub struct Hostile {
    inner: Arc<dyn Device>,
    config: HostileConfig,
}

impl Hostile {
    /// A wrapper around `inner`.
    pub fn over(inner: Arc<dyn Device>, config: HostileConfig) -> Hostile {
        Hostile { inner, config }
    }
}

impl Device for Hostile {
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
            held: Vec::new(),
            held_toward: vec![0; group.size as usize],
            under_way: HashMap::new(),
            ended: Vec::new(),
            posts: 0,
            refused: false,
            fenced: vec![false; group.size as usize],
            news: Sink::default(),
            timer: timer.map_err(|e| Error::system("cannot create a timer descriptor", e))?,
            inner: self.inner.open(group)?,
        }))
    }

    fn demands_thread(&self) -> bool {
        self.inner.demands_thread()
    }
}

/// A part that the inner link does not have.
struct Held {
    token: u64,
    peer: Rank,
    lane: Lane,
    credits: Option<Lane>,
    class: Class,
    pages: Vec<Page>,
    /// When it is handed on; `None` until the next poll.
    due: Option<Time>,
}

impl Held {
    fn work(&self, token: u64) -> Work<'_> {
        let Held { peer, lane, credits, class, ref pages, .. } = *self;
        Work { token, peer, lane, credits, rider: None, class, pages }
    }
}

/// A part that the inner link has.
struct UnderWay {
    token: u64,
    peer: Rank,
    /// Completions that the inner link owes for it.
    left: u32,
    failure: Option<String>,
}

/// The end of a part, yet to be reported.
struct Ended {
    token: u64,
    peer: Rank,
    failure: Option<String>,
    /// When it is reported; `None` until the next poll.
    due: Option<Time>,
}

impl Ended {
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
    held: Vec<Held>,
    /// Parts held, by peer.
    held_toward: Vec<usize>,
    /// By the token that the inner link has.
    under_way: HashMap<u64, UnderWay>,
    ended: Vec<Ended>,
    /// Parts that the inner link was offered.
    posts: u64,
    /// A post since the last poll found a full queue.
    refused: bool,
    /// By rank.
    fenced: Vec<bool>,
    /// What the inner link reports.
    news: Sink,
    timer: Timer,
    inner: Box<dyn Link>,
}

impl HostileLink {
    /// A moment between the shortest and the longest delay from `now`; most are short.
    fn draw(&mut self, now: Time) -> Time {
        let HostileConfig { shortest, longest, .. } = self.config;
        let range = longest.saturating_sub(shortest).as_nanos() as u64;
        let range = if self.random.below(8) == 0 { range } else { range / 8 };
        now.after(shortest).after(Duration::from_nanos(self.random.below(range + 1)))
    }

    /// Those of `all` that are due, in random order. A part that has no time yet draws one.
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
        for place in (1..taken.len()).rev() {
            taken.swap(place, self.random.below(place as u64 + 1) as usize);
        }
        *all(self) = waiting;
        taken
    }

    /// Posts the parts that are due to the inner link.
    fn hand_on(&mut self, now: Time) {
        let due = self.take_due(|link| &mut link.held, |part| &mut part.due, now);
        if due.is_empty() {
            return;
        }
        let mut copied = Vec::new();
        for mut part in due {
            let (token, peer) = (part.token, part.peer);
            // The peer in the low bits, as in a token of the engine.
            let inner = self.posts << 24 | u64::from(peer.0);
            self.posts += 1;
            self.held_toward[peer.index()] -= 1;
            match self.inner.post(&part.work(inner), &mut self.news) {
                Ok(Posted::Done) => copied.push((inner, token, peer)),
                Ok(Posted::InFlight) => {
                    let part = UnderWay { token, peer, left: 1, failure: None };
                    self.under_way.insert(inner, part);
                }
                Ok(Posted::Full) => {
                    part.due = Some(now.after(RETRY));
                    self.held_toward[peer.index()] += 1;
                    self.held.push(part);
                }
                Err(why) => self.end(token, peer, Some(why)),
            }
        }
        self.inner.flush(&mut self.news);
        let is_held = std::mem::take(&mut self.news.held);
        for (inner, token, peer) in copied {
            match if is_held { self.inner.hold(peer, inner) } else { 0 } {
                0 => self.end(token, peer, None),
                left => {
                    let part = UnderWay { token, peer, left, failure: None };
                    self.under_way.insert(inner, part);
                }
            }
        }
    }

    fn end(&mut self, token: u64, peer: Rank, failure: Option<String>) {
        self.ended.push(Ended { token, peer, failure, due: None });
    }

    /// Takes what the inner link has reported; passes on which peers are lost and which lanes rose.
    fn take_news(&mut self, sink: &mut Sink) {
        let completed = std::mem::take(&mut self.news.completed);
        let failures = std::mem::take(&mut self.news.failures);
        for inner in completed {
            self.part_ended(inner, None);
        }
        for (inner, why) in failures {
            self.part_ended(inner, Some(why));
        }
        sink.lost.append(&mut self.news.lost);
        sink.raised.append(&mut self.news.raised);
    }

    fn part_ended(&mut self, inner: u64, failure: Option<String>) {
        let Some(part) = self.under_way.get_mut(&inner) else {
            log::error!("{} ended a part that it did not have", self.inner.kind());
            debug_assert!(false, "a part ended twice");
            return;
        };
        part.left -= 1;
        part.failure = part.failure.take().or(failure);
        if part.left == 0
            && let Some(UnderWay { token, peer, failure, .. }) = self.under_way.remove(&inner)
        {
            self.end(token, peer, failure);
        }
    }

    /// When the next part or end is due.
    fn next_due(&self) -> Option<Time> {
        let held = self.held.iter().map(|part| part.due);
        let dues = held.chain(self.ended.iter().map(|part| part.due));
        let next = dues.map(|due| due.unwrap_or(AT_ONCE)).min();
        if self.refused { Some(AT_ONCE) } else { next }
    }
}

/// The inner link's address within a wrapped one.
fn unwrapped(address: &[u8]) -> &[u8] {
    address.strip_prefix(MARK).unwrap_or_default()
}

impl Link for HostileLink {
    fn kind(&self) -> ProviderKind {
        self.inner.kind()
    }

    fn address(&self) -> Vec<u8> {
        [MARK, &self.inner.address()].concat()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let rule = self.inner.route(theirs.strip_prefix(MARK)?)?;
        Some(RouteRule { ordered: false, inline: false, ..rule })
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

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        self.inner.forget(peer, key);
    }

    /// A credit that is offered for the first time is taken in any case: `credits` is there only then.
    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        let Work { token, peer, lane, credits, class, pages, .. } = *work;
        let fenced = self.fenced.get(peer.index()).ok_or("it is no rank of the group")?;
        if *fenced {
            return Err("it was cut off".into());
        }
        let depth = if class == Class::Bulk { self.config.depth } else { 2 * self.config.depth };
        let is_refused = match self.config.refuse_one_in {
            0 => false,
            one_in => self.random.below(one_in) == 0,
        };
        if credits.is_none() && (is_refused || self.held_toward[peer.index()] >= depth.max(1)) {
            self.refused = true;
            return Ok(Posted::Full);
        }
        let pages = pages.to_vec();
        self.held.push(Held { token, peer, lane, credits, class, pages, due: None });
        self.held_toward[peer.index()] += 1;
        Ok(Posted::InFlight)
    }

    /// Has a sleeping engine poll for what was posted.
    fn flush(&mut self, _sink: &mut Sink) {
        self.timer.set(self.next_due());
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        self.refused = false;
        self.inner.poll(now, &mut self.news);
        self.hand_on(now);
        self.take_news(sink);
        let ended = self.take_due(|link| &mut link.ended, |part| &mut part.due, now);
        ended.into_iter().for_each(|part| part.report(sink));
        self.timer.set(self.next_due());
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
            self.held_toward[peer.index()] = 0;
        }
        self.inner.fence(peer, &mut self.news);
        self.take_news(sink);
        for part in self.held.extract_if(.., |part| part.peer == peer) {
            sink.failed(part.token, format!("{peer} was cut off"));
        }
        let ended = self.ended.extract_if(.., |part| part.peer == peer);
        ended.for_each(|part| part.report(sink));
    }
}

impl Drop for HostileLink {
    /// What was posted shall arrive although its sender leaves.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        while !self.held.is_empty() {
            self.held.iter_mut().for_each(|part| part.due = Some(AT_ONCE));
            let now = clock::now();
            self.hand_on(now);
            if self.held.is_empty() || now >= deadline {
                return;
            }
            self.inner.poll(now, &mut self.news);
            self.take_news(&mut sink);
            std::thread::sleep(RETRY);
        }
    }
}
