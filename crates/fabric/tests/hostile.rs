//! Hostile wrapper over a scripted link, in virtual time.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_fabric::link::{Introduction, Membership, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::{HostileConfig, HostileDevice};
use weft_fabric::{
    Device, Generation, Lane, LaneId, LaneTable, Link, Memory, Page, ProviderKind, Rank, RegionKey,
    Result, RouteRule, Time, TrafficClass, WaitLimit,
};

const PEERS: [Rank; 2] = [Rank(1), Rank(2)];

/// Inner link calls, and scripted results.
#[derive(Default)]
struct Script {
    /// Lanes and peers for accepted parts, in order.
    taken: Vec<(u32, Rank)>,
    pages: Vec<Page>,
    /// Results for the next posts; later ones are done.
    answers: VecDeque<std::result::Result<PostStatus, String>>,
    /// Tokens in flight or held.
    tokens: Vec<(u64, Rank)>,
    /// Completions that follow each done part after a flush.
    completions: u32,
    /// True: tokens in flight complete at the next poll.
    completes: bool,
}

#[derive(Clone, Default)]
struct Inner(Arc<Mutex<Script>>);

impl Device for Inner {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, _: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(self.clone()))
    }
}

impl Link for Inner {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        b"here".to_vec()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        (theirs == b"here").then_some(RouteRule::STORES)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], _: &mut WaitLimit<'_>) -> Result<()> {
        assert!(peers.iter().all(|peer| peer.address == b"here"));
        Ok(())
    }

    fn register(&mut self, _: RegionKey, _: &Arc<Memory>) -> Result<()> {
        Ok(())
    }

    fn grant(&mut self, _: RegionKey, _: Rank, _: Range<u64>) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn import(
        &mut self,
        _: Rank,
        _: RegionKey,
        _: u64,
        _: &[u8],
        _: &mut WaitLimit<'_>,
    ) -> Result<()> {
        Ok(())
    }

    fn deregister(&mut self, _: RegionKey) {}

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        let mut script = self.0.lock().unwrap();
        let answer = script.answers.pop_front().unwrap_or(Ok(PostStatus::Done));
        if matches!(answer, Ok(PostStatus::Done | PostStatus::InFlight)) {
            script.taken.push((work.lane.id().get(), work.peer));
            script.pages.extend(work.pages);
        }
        if answer == Ok(PostStatus::InFlight) {
            script.tokens.push((work.token, work.peer));
        }
        answer
    }

    fn flush(&mut self, sink: &mut Sink) {
        sink.held |= self.0.lock().unwrap().completions > 0;
    }

    fn hold(&mut self, peer: Rank, token: u64) -> u32 {
        let mut script = self.0.lock().unwrap();
        let completions = script.completions;
        script.tokens.extend((0..completions).map(|_| (token, peer)));
        completions
    }

    fn poll(&mut self, _: Time, sink: &mut Sink) {
        let mut script = self.0.lock().unwrap();
        if script.completes {
            sink.completed.extend(script.tokens.drain(..).map(|(token, _)| token));
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let mut script = self.0.lock().unwrap();
        for (token, _) in script.tokens.extract_if(.., |(_, of)| *of == peer) {
            sink.failed(token, "fenced");
        }
    }
}

/// Wrapped link, a script for the inner link, and a test clock.
struct TestLink {
    link: Box<dyn Link>,
    inner: Inner,
    sink: Sink,
    now: Time,
}

impl TestLink {
    fn new(config: HostileConfig) -> TestLink {
        let inner = Inner::default();
        let generation = Generation(0);
        let lanes = Arc::new(LaneTable::new(4, generation).unwrap());
        let group = Membership { rank: Rank(0), size: 3, generation, lanes };
        let link = HostileDevice::over(Arc::new(inner.clone()), config).open(group).unwrap();
        TestLink { link, inner, sink: Sink::default(), now: Time(1_000_000) }
    }

    /// Configuration without full queues.
    fn never_full(seed: u64) -> TestLink {
        TestLink::new(HostileConfig { full_one_in: 0, ..HostileConfig::new(seed) })
    }

    fn post_with(
        &mut self,
        number: u32,
        peer: Rank,
        credits: Option<Lane>,
    ) -> std::result::Result<PostStatus, String> {
        let lane = Lane::new(LaneId::new(number).unwrap(), Generation(0));
        let (token, class) = (u64::from(number), TrafficClass::Latency);
        let pages = [Page {
            source: RegionKey(1),
            source_offset: number.into(),
            destination: RegionKey(2),
            destination_offset: 0,
            length: 8,
        }];
        let work =
            WorkRequest { token, peer, lane, credits, piggyback: None, class, pages: &pages };
        self.link.post(&work, &mut self.sink)
    }

    fn post(&mut self, number: u32, peer: Rank) {
        assert_eq!(self.post_with(number, peer, None), Ok(PostStatus::InFlight));
    }

    /// Polls after a time step.
    fn poll_after(&mut self, step: Duration) {
        self.now = self.now.after(step);
        self.link.poll(self.now, &mut self.sink);
    }

    /// Polls until the wrapper is idle.
    fn settle(&mut self) {
        for _ in 0..1000 {
            self.poll_after(Duration::from_micros(10));
        }
    }

    fn taken(&self) -> Vec<u32> {
        self.inner.0.lock().unwrap().taken.iter().map(|(number, _)| *number).collect()
    }

    fn completed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.sink.completed)
    }
}

fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort_unstable();
    list
}

#[test]
fn parts_and_their_ends_overtake_each_other_over_a_link_that_is_done_at_once() {
    let mut test = TestLink::never_full(1);
    (0..100).for_each(|number| test.post(number, PEERS[0]));
    assert!(test.taken().is_empty() && test.sink.is_empty());
    test.settle();
    let (taken, completed) = (test.taken(), test.completed());
    let all: Vec<u32> = (0..100).collect();
    assert_eq!(sorted(taken.clone()), all);
    assert_ne!(taken, all);
    let as_taken: Vec<u64> = taken.iter().map(|number| u64::from(*number)).collect();
    assert_ne!(completed, as_taken);
    assert_eq!(sorted(completed), sorted(as_taken));
    // The posted pages arrive unchanged.
    let pages = &test.inner.0.lock().unwrap().pages;
    assert!(
        pages.iter().zip(&taken).all(|(page, number)| page.source_offset == u64::from(*number))
    );
}

#[test]
fn a_seed_replays_and_another_one_differs() {
    let run = |seed| {
        let mut test = TestLink::never_full(seed);
        (0..50).for_each(|number| test.post(number, PEERS[0]));
        test.settle();
        (test.taken(), test.completed())
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn no_delay_is_shorter_or_longer_than_configured() {
    let config = HostileConfig {
        min_delay: Duration::from_micros(100),
        max_delay: Duration::from_micros(300),
        full_one_in: 0,
        ..HostileConfig::new(3)
    };
    let mut test = TestLink::new(config);
    (0..100).for_each(|number| test.post(number, PEERS[0]));
    test.poll_after(Duration::ZERO);
    test.poll_after(Duration::from_micros(99));
    assert!(test.taken().is_empty());
    let due = test.link.next_deadline().unwrap();
    assert!(due.since(test.now) <= Duration::from_micros(201));
    test.poll_after(Duration::from_micros(201));
    assert_eq!(test.taken().len(), 100);
    test.poll_after(Duration::from_micros(300));
    assert_eq!(test.completed().len(), 100);
    assert_eq!(test.link.next_deadline(), None);
}

#[test]
fn some_posts_find_a_full_queue_and_no_credit_does() {
    let mut test = TestLink::new(HostileConfig { full_one_in: 3, ..HostileConfig::new(4) });
    let lane = Lane::new(LaneId::new(0).unwrap(), Generation(0));
    let mut refused = 0;
    for number in 0..90 {
        refused += u32::from(test.post_with(number, PEERS[0], None) == Ok(PostStatus::Full));
        // The engine has to repeat a refused post.
        assert!(test.link.next_deadline().is_some());
        assert_eq!(test.post_with(1000 + number, PEERS[1], Some(lane)), Ok(PostStatus::InFlight));
    }
    assert!((15..45).contains(&refused), "{refused} of 90");
    test.settle();
    assert_eq!(test.taken().len() as u32, 180 - refused);
}

#[test]
fn a_full_inner_queue_delays_a_part_and_loses_none() {
    let mut test = TestLink::never_full(5);
    test.inner.0.lock().unwrap().answers.extend([Ok(PostStatus::Full), Ok(PostStatus::Full)]);
    (0..10).for_each(|number| test.post(number, PEERS[0]));
    test.settle();
    assert_eq!(sorted(test.taken()), (0..10).collect::<Vec<_>>());
    assert_eq!(sorted(test.completed()), (0..10).collect::<Vec<_>>());
}

#[test]
fn queued_parts_toward_a_peer_stay_within_the_depth() {
    let config = HostileConfig { depth: 2, full_one_in: 0, ..HostileConfig::new(6) };
    let mut test = TestLink::new(config);
    // Latency-critical parts have twice the depth.
    (0..4).for_each(|number| test.post(number, PEERS[0]));
    assert_eq!(test.post_with(4, PEERS[0], None), Ok(PostStatus::Full));
    test.post(5, PEERS[1]);
    test.settle();
    test.post(4, PEERS[0]);
}

#[test]
fn parts_that_the_inner_link_copied_end_when_all_are_sent() {
    let mut test = TestLink::never_full(7);
    test.inner.0.lock().unwrap().completions = 2;
    (0..5).for_each(|number| test.post(number, PEERS[0]));
    test.settle();
    assert_eq!((test.taken().len(), test.sink.is_empty()), (5, true));
    test.inner.0.lock().unwrap().completes = true;
    test.settle();
    assert_eq!(sorted(test.completed()), [0, 1, 2, 3, 4]);
}

#[test]
fn a_part_that_the_inner_link_refuses_fails_once_under_its_own_token() {
    let mut test = TestLink::never_full(8);
    test.inner.0.lock().unwrap().answers.push_back(Err("unplugged".into()));
    test.post(42, PEERS[0]);
    test.settle();
    assert_eq!(test.sink.failures, [(42, "unplugged".to_owned())]);
    assert!(test.sink.completed.is_empty());
}

/// Parts queued, parts with the inner link, and delayed completions: a fence ends each once, and no other
/// peer's.
#[test]
fn a_fence_ends_every_part_of_its_peer_once() {
    for seed in 0..50 {
        let mut test = TestLink::never_full(seed);
        let under_way = std::iter::repeat_n(Ok(PostStatus::InFlight), 5);
        test.inner.0.lock().unwrap().answers.extend(under_way);
        (0..20).for_each(|number| test.post(number, PEERS[number as usize % 2]));
        test.poll_after(Duration::ZERO);
        test.poll_after(Duration::from_micros(50 + seed));
        test.link.fence(PEERS[0], &mut test.sink);
        let sink = std::mem::take(&mut test.sink);
        let failed = sink.failures.into_iter().map(|(token, _)| token);
        let ended: Vec<u64> = sink.completed.into_iter().chain(failed).collect();
        let of_peer = |tokens: &[u64]| tokens.iter().filter(|token| *token % 2 == 0).count();
        assert_eq!(of_peer(&ended), 10, "{ended:?}");
        assert!(test.post_with(99, PEERS[0], None).is_err());
        test.inner.0.lock().unwrap().completes = true;
        test.settle();
        let later = test.completed();
        assert_eq!((of_peer(&later), test.sink.failures.len()), (0, 0));
        let all = sorted(ended.into_iter().chain(later).collect());
        assert_eq!(all, (0..20).collect::<Vec<_>>());
    }
}

#[test]
fn a_dropped_link_forwards_its_queued_parts() {
    let mut test = TestLink::never_full(9);
    test.inner.0.lock().unwrap().answers.push_back(Ok(PostStatus::Full));
    (0..20).for_each(|number| test.post(number, PEERS[0]));
    let inner = test.inner.clone();
    drop(test);
    let taken = inner.0.lock().unwrap().taken.len();
    assert_eq!(taken, 20);
}

#[test]
fn a_wrapped_end_reaches_wrapped_ends_alone() {
    let test = TestLink::never_full(10);
    let rule = test.link.route(&test.link.address()).unwrap();
    assert_eq!(rule, RouteRule { ordered: false, inline: false, ..RouteRule::STORES });
    assert_eq!(test.link.route(b"here"), None);
    assert_eq!(Link::route(&test.inner, &test.link.address()), None);
}
