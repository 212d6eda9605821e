//! The hostile wrapper over a link that answers as a test demands, in virtual time.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_fabric::lane_table::LaneTable;
use weft_fabric::link::{Introduction, Membership, Posted, Sink, Work};
use weft_fabric::memory::Memory;
use weft_fabric::providers::{Hostile, HostileConfig};
use weft_fabric::{
    Class, Device, Generation, Lane, LaneId, Link, Page, ProviderKind, Rank, RegionKey, Result,
    RouteRule, Time, WaitLimit,
};

const PEERS: [Rank; 2] = [Rank(1), Rank(2)];

/// What the inner link saw, and how it answers.
#[derive(Default)]
struct Script {
    /// Lanes and peers of the parts that were taken, in order.
    taken: Vec<(u32, Rank)>,
    pages: Vec<Page>,
    /// Answers to the next posts; then all are done.
    answers: VecDeque<std::result::Result<Posted, String>>,
    /// Tokens under way or held.
    tokens: Vec<(u64, Rank)>,
    /// After a flush, so many completions follow each part that was done.
    completions: u32,
    /// The tokens under way complete at the next poll.
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

    fn post(&mut self, work: &Work<'_>, _: &mut Sink) -> std::result::Result<Posted, String> {
        let mut script = self.0.lock().unwrap();
        let answer = script.answers.pop_front().unwrap_or(Ok(Posted::Done));
        if matches!(answer, Ok(Posted::Done | Posted::InFlight)) {
            script.taken.push((work.lane.id().get(), work.peer));
            script.pages.extend(work.pages);
        }
        if answer == Ok(Posted::InFlight) {
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

/// A wrapped link, its inner one's script, and a clock that the test moves.
struct Stage {
    link: Box<dyn Link>,
    inner: Inner,
    sink: Sink,
    now: Time,
}

impl Stage {
    fn new(config: HostileConfig) -> Stage {
        let inner = Inner::default();
        let generation = Generation(0);
        let lanes = Arc::new(LaneTable::new(4, generation).unwrap());
        let group = Membership { rank: Rank(0), size: 3, generation, lanes };
        let link = Hostile::over(Arc::new(inner.clone()), config).open(group).unwrap();
        Stage { link, inner, sink: Sink::default(), now: Time(1_000_000) }
    }

    /// Without refusals.
    fn willing(seed: u64) -> Stage {
        Stage::new(HostileConfig { refuse_one_in: 0, ..HostileConfig::new(seed) })
    }

    fn post_with(
        &mut self,
        number: u32,
        peer: Rank,
        credits: Option<Lane>,
    ) -> std::result::Result<Posted, String> {
        let lane = Lane::new(LaneId::new(number).unwrap(), Generation(0));
        let (token, class) = (u64::from(number), Class::Latency);
        let pages = [Page {
            source: RegionKey(1),
            source_offset: number.into(),
            destination: RegionKey(2),
            destination_offset: 0,
            length: 8,
        }];
        let work = Work { token, peer, lane, credits, rider: None, class, pages: &pages };
        self.link.post(&work, &mut self.sink)
    }

    fn post(&mut self, number: u32, peer: Rank) {
        assert_eq!(self.post_with(number, peer, None), Ok(Posted::InFlight));
    }

    /// Polls after a step of time.
    fn poll_after(&mut self, step: Duration) {
        self.now = self.now.after(step);
        self.link.poll(self.now, &mut self.sink);
    }

    /// Polls until nothing is due.
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
    let mut stage = Stage::willing(1);
    (0..100).for_each(|number| stage.post(number, PEERS[0]));
    assert!(stage.taken().is_empty() && stage.sink.is_empty());
    stage.settle();
    let (taken, completed) = (stage.taken(), stage.completed());
    let all: Vec<u32> = (0..100).collect();
    assert_eq!(sorted(taken.clone()), all);
    assert_ne!(taken, all);
    let as_taken: Vec<u64> = taken.iter().map(|number| u64::from(*number)).collect();
    assert_ne!(completed, as_taken);
    assert_eq!(sorted(completed), sorted(as_taken));
    // The pages that were posted are those that arrive.
    let pages = &stage.inner.0.lock().unwrap().pages;
    assert!(
        pages.iter().zip(&taken).all(|(page, number)| page.source_offset == u64::from(*number))
    );
}

#[test]
fn a_seed_replays_and_another_one_differs() {
    let run = |seed| {
        let mut stage = Stage::willing(seed);
        (0..50).for_each(|number| stage.post(number, PEERS[0]));
        stage.settle();
        (stage.taken(), stage.completed())
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn no_delay_is_shorter_or_longer_than_configured() {
    let config = HostileConfig {
        shortest: Duration::from_micros(100),
        longest: Duration::from_micros(300),
        refuse_one_in: 0,
        ..HostileConfig::new(3)
    };
    let mut stage = Stage::new(config);
    (0..100).for_each(|number| stage.post(number, PEERS[0]));
    stage.poll_after(Duration::ZERO);
    stage.poll_after(Duration::from_micros(99));
    assert!(stage.taken().is_empty());
    let due = stage.link.next_deadline().unwrap();
    assert!(due.since(stage.now) <= Duration::from_micros(201));
    stage.poll_after(Duration::from_micros(201));
    assert_eq!(stage.taken().len(), 100);
    stage.poll_after(Duration::from_micros(300));
    assert_eq!(stage.completed().len(), 100);
    assert_eq!(stage.link.next_deadline(), None);
}

#[test]
fn some_posts_find_a_full_queue_and_no_credit_does() {
    let mut stage = Stage::new(HostileConfig { refuse_one_in: 3, ..HostileConfig::new(4) });
    let lane = Lane::new(LaneId::new(0).unwrap(), Generation(0));
    let mut refused = 0;
    for number in 0..90 {
        refused += u32::from(stage.post_with(number, PEERS[0], None) == Ok(Posted::Full));
        // The engine has to come back for what was refused.
        assert!(stage.link.next_deadline().is_some());
        assert_eq!(stage.post_with(1000 + number, PEERS[1], Some(lane)), Ok(Posted::InFlight));
    }
    assert!((15..45).contains(&refused), "{refused} of 90");
    stage.settle();
    assert_eq!(stage.taken().len() as u32, 180 - refused);
}

#[test]
fn a_full_inner_queue_delays_a_part_and_loses_none() {
    let mut stage = Stage::willing(5);
    stage.inner.0.lock().unwrap().answers.extend([Ok(Posted::Full), Ok(Posted::Full)]);
    (0..10).for_each(|number| stage.post(number, PEERS[0]));
    stage.settle();
    assert_eq!(sorted(stage.taken()), (0..10).collect::<Vec<_>>());
    assert_eq!(sorted(stage.completed()), (0..10).collect::<Vec<_>>());
}

#[test]
fn no_more_parts_than_the_depth_are_held_toward_a_peer() {
    let config = HostileConfig { depth: 2, refuse_one_in: 0, ..HostileConfig::new(6) };
    let mut stage = Stage::new(config);
    // Latency-critical parts have twice the depth.
    (0..4).for_each(|number| stage.post(number, PEERS[0]));
    assert_eq!(stage.post_with(4, PEERS[0], None), Ok(Posted::Full));
    stage.post(5, PEERS[1]);
    stage.settle();
    stage.post(4, PEERS[0]);
}

#[test]
fn what_the_inner_link_copied_ends_when_all_of_it_was_sent() {
    let mut stage = Stage::willing(7);
    stage.inner.0.lock().unwrap().completions = 2;
    (0..5).for_each(|number| stage.post(number, PEERS[0]));
    stage.settle();
    assert_eq!((stage.taken().len(), stage.sink.is_empty()), (5, true));
    stage.inner.0.lock().unwrap().completes = true;
    stage.settle();
    assert_eq!(sorted(stage.completed()), [0, 1, 2, 3, 4]);
}

#[test]
fn a_part_that_the_inner_link_refuses_fails_once_under_its_own_token() {
    let mut stage = Stage::willing(8);
    stage.inner.0.lock().unwrap().answers.push_back(Err("unplugged".into()));
    stage.post(42, PEERS[0]);
    stage.settle();
    assert_eq!(stage.sink.failures, [(42, "unplugged".to_owned())]);
    assert!(stage.sink.completed.is_empty());
}

/// Parts held, parts with the inner link, and ends that wait: a fence ends each once, and none of another
/// peer.
#[test]
fn a_fence_ends_every_part_of_its_peer_once() {
    for seed in 0..50 {
        let mut stage = Stage::willing(seed);
        let under_way = std::iter::repeat_n(Ok(Posted::InFlight), 5);
        stage.inner.0.lock().unwrap().answers.extend(under_way);
        (0..20).for_each(|number| stage.post(number, PEERS[number as usize % 2]));
        stage.poll_after(Duration::ZERO);
        stage.poll_after(Duration::from_micros(50 + seed));
        stage.link.fence(PEERS[0], &mut stage.sink);
        let sink = std::mem::take(&mut stage.sink);
        let failed = sink.failures.into_iter().map(|(token, _)| token);
        let ended: Vec<u64> = sink.completed.into_iter().chain(failed).collect();
        let of_peer = |tokens: &[u64]| tokens.iter().filter(|token| *token % 2 == 0).count();
        assert_eq!(of_peer(&ended), 10, "{ended:?}");
        assert!(stage.post_with(99, PEERS[0], None).is_err());
        stage.inner.0.lock().unwrap().completes = true;
        stage.settle();
        let later = stage.completed();
        assert_eq!((of_peer(&later), stage.sink.failures.len()), (0, 0));
        let all = sorted(ended.into_iter().chain(later).collect());
        assert_eq!(all, (0..20).collect::<Vec<_>>());
    }
}

#[test]
fn a_link_that_is_dropped_hands_on_what_it_holds() {
    let mut stage = Stage::willing(9);
    stage.inner.0.lock().unwrap().answers.push_back(Ok(Posted::Full));
    (0..20).for_each(|number| stage.post(number, PEERS[0]));
    let inner = stage.inner.clone();
    drop(stage);
    let taken = inner.0.lock().unwrap().taken.len();
    assert_eq!(taken, 20);
}

#[test]
fn a_wrapped_end_reaches_wrapped_ends_alone() {
    let stage = Stage::willing(10);
    let rule = stage.link.route(&stage.link.address()).unwrap();
    assert_eq!(rule, RouteRule { ordered: false, inline: false, ..RouteRule::STORES });
    assert_eq!(stage.link.route(b"here"), None);
    assert_eq!(Link::route(&stage.inner, &stage.link.address()), None);
}
