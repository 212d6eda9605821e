//! Counters with a window: several rounds open at once, arriving in any order.

use std::sync::atomic::{AtomicU64, Ordering};
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterConfig, CounterId, Error, Event, Page, PartRule, RaisedCounter, Rank, Region,
    RemoteRegion, Time,
};
use weft_scenarios::seeds;

const SLOT: u64 = 64;
const ROUNDS: u64 = 14;

#[derive(Debug)]
#[allow(dead_code, reason = "shown in a failed test's message")]
struct TrafficError(String);

fn wrong(what: impl Into<String>) -> TrafficError {
    TrafficError(what.into())
}

impl From<Error> for TrafficError {
    fn from(error: Error) -> TrafficError {
        TrafficError(error.to_string())
    }
}

/// Rank 0 writes rounds into a ring with `window` slots at rank 1.
struct Ring {
    cluster: Cluster,
    counter: CounterId,
    window: u64,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
}

fn ring(window: u64, config: WorldConfig) -> Result<Ring, Error> {
    let world = World::new(config);
    let mut cluster = Cluster::new(&world)?;
    let shape = CounterConfig { window: window as u32, ..CounterConfig::default() };
    let counter = cluster.counter_with(shape)?;
    let source = cluster.engine(Rank(0)).alloc((ROUNDS * SLOT) as usize)?;
    let inbox = cluster.engine(Rank(1)).alloc((window * SLOT) as usize)?;
    let granted = |owner: Rank, _| {
        if owner.0 == 1 { vec![(inbox.clone(), 0..window * SLOT)] } else { Vec::new() }
    };
    let remote = cluster.share(granted, &[counter])?[0][1][0];
    Ok(Ring { cluster, counter, window, source, inbox, remote })
}

fn byte(round: u64, offset: u64) -> u8 {
    (round * 37 + offset * 3 + 1) as u8
}

/// Round length in bytes. It differs from round to round, as do the lane raises.
fn length(round: u64) -> u64 {
    1 + (round * 23) % SLOT
}

impl Ring {
    fn page(&self, round: u64) -> Page {
        let bytes: Vec<u8> = (0..length(round)).map(|offset| byte(round, offset)).collect();
        self.source.memory().copy_in((round * SLOT) as usize, &bytes);
        Page {
            source: self.source.key(),
            source_offset: round * SLOT,
            destination: self.remote.key,
            destination_offset: round % self.window * SLOT,
            length: length(round),
        }
    }

    /// Writes all rounds as early as the window permits. Returns the maximum number of open rounds, and
    /// true if a round was complete before an older one.
    fn run(&mut self) -> Result<(u64, bool), String> {
        let (writer, owner) = (Rank(0), Rank(1));
        let (counter, window) = (self.counter, self.window);
        let rule = self.cluster.engine(writer).route(owner).unwrap().parts;
        let pages: Vec<Page> = (0..ROUNDS).map(|round| self.page(round)).collect();
        let whole = |round: u64| rule.count_contiguous(length(round));
        let mut counts = [0; ROUNDS as usize];
        let (mut sent, mut credits, mut credited) = (0, 0, 0);
        let (mut most_open, mut overtaken) = (0, false);
        let inbox = self.inbox.clone();
        let is_right = move |round: u64| {
            let mut bytes = vec![0; length(round) as usize];
            inbox.memory().copy_out((round % window * SLOT) as usize, &mut bytes);
            bytes.into_iter().zip(0..).all(|(seen, offset)| seen == byte(round, offset))
        };
        let outcomes = self.cluster.run(|engine, _, events, requests| {
            if engine.rank() == writer {
                for event in events {
                    if let Event::Credited { credits: now, .. } = event {
                        if *now < credits {
                            return Err(wrong("credits fell"));
                        }
                        credits = *now;
                    }
                }
                while sent < ROUNDS && sent < credits + window {
                    requests.write(owner, counter, sent, [pages[sent as usize]], 0);
                    sent += 1;
                }
                // One round beyond the window is rejected without effect.
                engine.submit(requests)?;
                if engine.credits(counter, owner)? == credits && sent < ROUNDS {
                    let beyond = engine.signal(owner, counter, sent);
                    if !matches!(beyond, Err(Error::NoCredit { round, .. }) if round == sent) {
                        return Err(wrong(format!(
                            "round {sent} with {credits} credits: {beyond:?}"
                        )));
                    }
                }
                return Ok::<bool, TrafficError>(sent == ROUNDS && credits == ROUNDS);
            }
            for event in events {
                let Event::Raised { round, count, .. } = event else { continue };
                counts[*round as usize] = *count;
            }
            for (round, count) in (0..).zip(counts) {
                if count > whole(round) {
                    return Err(wrong(format!("round {round} rose {count} times")));
                }
            }
            let complete = |round: u64| counts[round as usize] == whole(round);
            let open = (credited..ROUNDS).filter(|round| counts[*round as usize] > 0).count();
            most_open = most_open.max(open as u64);
            overtaken |=
                (credited + 1..ROUNDS).any(|round| complete(round) && !complete(round - 1));
            while credited < ROUNDS && complete(credited) {
                for later in credited..(credited + window).min(ROUNDS) {
                    if complete(later) && !is_right(later) {
                        return Err(wrong(format!("wrong bytes in round {later}")));
                    }
                    let seen = engine.count_in(counter, writer, later).unwrap();
                    if seen < counts[later as usize] {
                        return Err(wrong(format!(
                            "round {later} rose {seen} times, and more before"
                        )));
                    }
                }
                requests.credit(writer, counter);
                engine.submit(requests)?;
                let over = engine.count_in(counter, writer, credited);
                if !matches!(over, Err(Error::OldRound { .. })) {
                    return Err(wrong(format!("round {credited} was credited: {over:?}")));
                }
                credited += 1;
            }
            Ok(credited == ROUNDS)
        });
        for outcome in outcomes.map_err(|hang| hang.to_string())? {
            match outcome {
                Outcome::Done => {}
                other => return Err(format!("{other:?}")),
            }
        }
        self.cluster.settle().map_err(|hang| hang.to_string())?;
        match self.cluster.world().violations().first() {
            Some(violation) => Err(violation.to_string()),
            None => Ok((most_open, overtaken)),
        }
    }
}

fn rough(window: u64, seed: u64) -> WorldConfig {
    let mut random = SplitMix64::new(seed);
    let parts =
        PartRule { max_part_bytes: 8 + random.below(60), max_pages_per_part: 1, ..PartRule::WHOLE };
    let config = WorldConfig::new(2, seed ^ (window << 32)).with_faults(Faults::rough());
    WorldConfig { parts, queue_parts: 1 + random.below(12) as u32, ..config }
}

#[test]
fn a_window_of_rounds_is_open_at_once_and_each_has_its_own_bytes_and_count() {
    let most = [const { AtomicU64::new(0) }; 5];
    let overtaken = AtomicU64::new(0);
    let seeds = AtomicU64::new(0);
    seeds::each("a_window_of_rounds", 300, |seed| {
        for window in 1..=5u64 {
            let mut ring = ring(window, rough(window, seed)).map_err(|e| e.to_string())?;
            let (open, early) = ring.run().map_err(|why| format!("window {window}: {why}"))?;
            if open > window {
                return Err(format!("{open} rounds are open in a window of {window}"));
            }
            most[window as usize - 1].fetch_max(open, Ordering::Relaxed);
            overtaken.fetch_add(u64::from(early), Ordering::Relaxed);
        }
        seeds.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    if seeds.into_inner() >= 100 {
        assert_eq!(most.map(AtomicU64::into_inner), [1, 2, 3, 4, 5]);
        assert!(overtaken.into_inner() > 100, "rounds hardly overtook each other");
    }
}

/// Counts in each round of a window, and how credits move the window, step by step.
#[test]
fn credits_release_rounds_in_order_and_rounds_beyond_the_window_are_refused() {
    let mut ring = ring(3, WorldConfig::new(2, 1)).unwrap();
    let (cluster, counter) = (&mut ring.cluster, ring.counter);
    let no_credit = |cluster: &mut Cluster, round: u64, credits: u64| {
        let error = cluster.engine(Rank(0)).signal(Rank(1), counter, round).unwrap_err();
        assert!(
            matches!(error, Error::NoCredit { round: r, credits: c, .. } if (r, c) == (round, credits)),
            "{error}"
        );
    };
    no_credit(cluster, 3, 0);
    // The newest first: the owner counts each round separately.
    for (round, raises) in [(2, 3), (0, 1)] {
        for _ in 0..raises {
            cluster.engine(Rank(0)).signal(Rank(1), counter, round).unwrap();
        }
    }
    cluster.settle().unwrap();
    let owner = cluster.engine(Rank(1));
    let counts = [0, 1, 2].map(|round| owner.count_in(counter, Rank(0), round).unwrap());
    assert_eq!(counts, [1, 0, 3]);
    assert_eq!(owner.count(counter, Rank(0)).unwrap(), 1);
    let beyond = owner.count_in(counter, Rank(0), 3);
    assert!(matches!(beyond, Err(Error::NoCredit { round: 3, .. })), "{beyond:?}");
    owner.credit(Rank(0), counter).unwrap();
    // Round 1 is next and has no arrivals, although round 2 has.
    let early = owner.credit(Rank(0), counter);
    assert!(matches!(early, Err(Error::NothingToCredit { round: 1, .. })), "{early:?}");
    cluster.settle().unwrap();
    let old = cluster.engine(Rank(0)).signal(Rank(1), counter, 0);
    assert!(matches!(old, Err(Error::OldRound { round: 0, current: 1, .. })), "{old:?}");
    // Round 3 takes the lane from round 0, and counts from zero.
    for round in [3, 3, 1] {
        cluster.engine(Rank(0)).signal(Rank(1), counter, round).unwrap();
    }
    no_credit(cluster, 4, 1);
    cluster.settle().unwrap();
    let owner = cluster.engine(Rank(1));
    let counts = [1, 2, 3].map(|round| owner.count_in(counter, Rank(0), round).unwrap());
    assert_eq!(counts, [1, 3, 2]);
    for round in 1..=3 {
        assert_eq!(owner.open_round(counter, Rank(0)).unwrap(), round);
        owner.credit(Rank(0), counter).unwrap();
    }
    cluster.settle().unwrap();
    assert_eq!(cluster.engine(Rank(0)).credits(counter, Rank(1)).unwrap(), 4);
    no_credit(cluster, 7, 4);
    cluster.engine(Rank(0)).signal(Rank(1), counter, 6).unwrap();
}

/// An event loop that only calls [`Engine::raised`]: a round that was complete before it became the
/// oldest is reported when the round before it is credited.
#[test]
fn a_round_that_overtook_is_reported_once_it_is_the_oldest() {
    let mut ring = ring(2, WorldConfig::new(2, 1)).unwrap();
    let (cluster, counter) = (&mut ring.cluster, ring.counter);
    for round in [1, 1, 0] {
        cluster.engine(Rank(0)).signal(Rank(1), counter, round).unwrap();
        cluster.settle().unwrap();
    }
    let owner = cluster.engine(Rank(1));
    let raised = |count| vec![RaisedCounter { counter, peer: Rank(0), count }];
    assert_eq!(owner.raised(), raised(1));
    owner.credit(Rank(0), counter).unwrap();
    assert_eq!(owner.raised(), raised(2));
    assert_eq!(owner.raised(), []);
}

#[test]
fn windows_that_differ_are_refused() {
    let world = World::new(WorldConfig::new(2, 1));
    let mut cluster = Cluster::new(&world).unwrap();
    let made = |cluster: &mut Cluster, rank, window| {
        let shape = CounterConfig { window, ..CounterConfig::default() };
        cluster.engine(Rank(rank)).counter_with(shape).unwrap()
    };
    let (zeros, ones) = (made(&mut cluster, 0, 2), made(&mut cluster, 1, 3));
    let grant = cluster.engine(Rank(0)).grant(Rank(1), &[], &[zeros]).unwrap();
    let error = cluster.engine(Rank(1)).import(Rank(0), &grant, &[ones], Time::MAX).unwrap_err();
    assert!(error.to_string().contains("create both alike"), "{error}");
    let window = CounterConfig::MAX_WINDOW + 1;
    let shape = CounterConfig { window, ..CounterConfig::default() };
    let error = cluster.engine(Rank(0)).counter_with(shape).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
}
