//! Refusals by a proxy's driver, at construction and from kernels and peers.

use std::sync::atomic::AtomicU32;
use weft_fabric::providers::sim::{Cluster, World, WorldConfig};
use weft_fabric::{
    Cause, CounterConfig, CounterId, Driver as _, Event, PartRule, Poison, Rank, Requests, Time,
};
use weft_gpu::proxy::{
    Command, Place, ProxyConfig, ProxyDriver, Target, Template, TemplateMember, Window, WordConfig,
};
use weft_gpu::{Error, Result};

const BYTES: u64 = 64;

/// Rank 0 of two, whose routes have 64-byte parts: a word that is held, one that is not, a window, and a template.
fn driver(change: impl FnOnce(&mut ProxyConfig)) -> Result<(ProxyDriver, [CounterId; 2])> {
    let parts = PartRule { max_part_bytes: BYTES, ..PartRule::WHOLE };
    let world = World::new(WorldConfig { parts, ..WorldConfig::new(2, 1) });
    let mut cluster = Cluster::new(&world)?;
    let shape = CounterConfig { window: 4, ..CounterConfig::default() };
    let counters = [cluster.counter_with(shape)?, cluster.counter_with(shape)?];
    let inbox = cluster.engine(Rank(1)).alloc(BYTES as usize)?;
    let source = cluster.engine(Rank(0)).alloc(BYTES as usize)?;
    let granted = |owner: Rank, _| {
        if owner == Rank(1) { vec![(inbox.clone(), 0..BYTES)] } else { Vec::new() }
    };
    let remote = cluster.share(granted, &counters)?[0][1][0];
    let member = TemplateMember { peer: Rank(1), source_offset: 0, destination_offset: 0 };
    let mut config = ProxyConfig {
        words: vec![
            WordConfig { counter: counters[0], hold: true },
            WordConfig { counter: counters[1], hold: false },
        ],
        rounds: 4,
        windows: vec![Window {
            source: Some((source.key(), BYTES)),
            destinations: vec![None, Some(remote)],
        }],
        templates: vec![Template { members: vec![member, member] }],
        list_lengths: 2,
        max_put_bytes: BYTES,
        max_outstanding: 2,
    };
    change(&mut config);
    Ok((ProxyDriver::new(cluster.engine(Rank(0)), config)?, counters))
}

fn accept(driver: &mut ProxyDriver, command: Command, requests: &mut Requests) -> Result<()> {
    let list = [8, 65].map(AtomicU32::new);
    driver.accept(3, &command.fields(), &list, requests)
}

fn raised(counter: CounterId, round: u64, count: u64) -> Event {
    Event::Raised { counter, peer: Rank(1), round, count }
}

const SIGNAL: Command = Command::Signal { peer: Rank(1), target: Target { word: 1, hold: false } };

#[test]
fn a_configuration_that_cannot_be_met_is_refused() {
    type Change = fn(&mut ProxyConfig);
    let cases: [(Change, &str); 7] = [
        (|c| c.max_put_bytes = 65, "65 bytes in the longest put: expected 1 to 64;"),
        (|c| c.words.clear(), "0 words: expected 1 to 64;"),
        (|c| c.rounds = 65, "65 rounds in a window: expected 1 to 64;"),
        (|c| c.rounds = 0, "0 rounds in a window: expected 1 to 64;"),
        (|c| c.max_outstanding = 1, "2 peers in a template: expected 0 to 1;"),
        (|c| c.max_outstanding = 0, "2 peers in a template: expected 0 to 0;"),
        (|c| c.templates[0].members[1].peer = Rank(0), "0 peer in a template: expected 0 to 1;"),
    ];
    for (change, text) in cases {
        let error = driver(change).expect_err(text);
        assert!(matches!(error, Error::ProxyLimit { .. }));
        assert!(error.to_string().starts_with(text), "{error}");
    }
    assert!(driver(|_| {}).is_ok());
}

#[test]
fn a_release_gives_back_only_rounds_that_have_arrived() {
    let (mut driver, [held, _]) = driver(|_| {}).unwrap();
    let mut requests = driver.requests();
    let release = |count| Command::Release { peer: Rank(1), word: 0, count };
    let refused = accept(&mut driver, release(1), &mut requests).unwrap_err().to_string();
    assert!(refused.contains("count 1: expected none"), "{refused}");
    // The second round leads only once the first is there.
    driver.poll(Time(0), &[raised(held, 1, 1)], &mut requests).unwrap();
    assert!(accept(&mut driver, release(1), &mut requests).is_err());
    driver.poll(Time(0), &[raised(held, 0, 1)], &mut requests).unwrap();
    assert!(requests.is_empty(), "a held word is credited by kernels only");
    let refused = accept(&mut driver, release(3), &mut requests).unwrap_err().to_string();
    assert!(refused.contains("count 3: expected 1 to 2"), "{refused}");
    accept(&mut driver, release(2), &mut requests).unwrap();
    assert!(!requests.is_empty());
    assert!(accept(&mut driver, release(1), &mut requests).is_err());
}

#[test]
fn a_scatter_with_a_wrong_length_writes_nothing() {
    let (mut driver, _) = driver(|_| {}).unwrap();
    let mut requests = driver.requests();
    let place = Place { window: 0, offset: 0 };
    let scatter = |count| Command::Scatter {
        template: 0,
        target: Target { word: 1, hold: false },
        source: place,
        destination: place,
        count,
        list: 0,
    };
    let error = accept(&mut driver, scatter(2), &mut requests).unwrap_err();
    assert!(matches!(&error, Error::Command(refused) if refused.ticket == 3), "{error:?}");
    assert!(error.to_string().contains("length in the list 65: expected 0 to 64"), "{error}");
    assert!(requests.is_empty() && driver.is_idle());
    accept(&mut driver, scatter(1), &mut requests).unwrap();
    assert!(!requests.is_empty() && !driver.is_idle());
}

/// A SCATTER's members with credits are one request, which ends with the last source. The others wait as puts
/// do.
#[test]
fn a_scatter_ends_as_a_whole_and_waits_where_credits_lack() {
    let (mut driver, [_, free]) = driver(|config| config.max_outstanding = 8).unwrap();
    let mut requests = driver.requests();
    let (place, target) = (Place { window: 0, offset: 0 }, Target { word: 1, hold: false });
    let scatter = |count| Command::Scatter {
        template: 0,
        target,
        source: place,
        destination: place,
        count,
        list: 0,
    };
    let list = [8, 8].map(AtomicU32::new);
    let mut push = |driver: &mut ProxyDriver, command: Command| {
        driver.accept(0, &command.fields(), &list, &mut requests).unwrap();
    };
    // Four rounds are open: two scatters, and half the third.
    [2, 1, 2].into_iter().for_each(|count| push(&mut driver, scatter(count)));
    push(&mut driver, Command::Drained { word: 0 });
    let counts = |driver: &ProxyDriver| {
        let backlog = driver.backlog();
        (backlog.without_credit, backlog.in_flight)
    };
    assert_eq!(counts(&driver), (1, 4));
    let completed = |driver: &mut ProxyDriver, part: u64| {
        let tag = u64::from(driver.namespace()) << Event::NAMESPACE_SHIFT | part;
        driver.poll(Time(0), &[Event::Completed { tag }], &mut Requests::default()).unwrap();
        counts(driver)
    };
    assert_eq!(completed(&mut driver, 0), (1, 2), "two parts end together");
    assert_eq!(completed(&mut driver, 0), (1, 2), "and once");
    let credited = Event::Credited { counter: free, peer: Rank(1), credits: 1 };
    let mut waited = driver.requests();
    driver.poll(Time(0), &[credited], &mut waited).unwrap();
    assert!(!waited.is_empty());
    assert_eq!(counts(&driver), (0, 3));
    let mut risen = Vec::new();
    // The second scatter, then the third's halves, in the order in which they came into the pool.
    for (part, left) in [(1, 2), (2, 1), (3, 0)] {
        driver.take_words(|update| risen.push(update));
        assert!(risen.is_empty(), "DRAINED rises behind the last part");
        let before = counts(&driver);
        let after = completed(&mut driver, part);
        assert_eq!(after, (0, left), "part {part} after {before:?}");
    }
    driver.take_words(|update| risen.push(update));
    assert_eq!((risen.len(), driver.is_idle()), (1, true));
}

#[test]
fn a_round_with_two_parts_or_beyond_the_window_is_a_peers_fault() {
    for (round, count) in [(0, 2), (0, 0), (64, 1)] {
        let (mut driver, [_, free]) = driver(|_| {}).unwrap();
        let mut requests = driver.requests();
        let error = driver.poll(Time(0), &[raised(free, round, count)], &mut requests).unwrap_err();
        let text = format!("rank 1 raised proxy word 1 by {count} in round {round}:");
        assert!(error.to_string().starts_with(&text), "{error}");
    }
}

#[test]
fn a_poisoned_group_accepts_no_command() {
    let (mut driver, _) = driver(|_| {}).unwrap();
    let mut requests = driver.requests();
    let detail = "rank 1 is lost".to_owned();
    let poison = Poison { kind: Cause::Lost, rank: Some(Rank(1)), detail };
    accept(&mut driver, SIGNAL, &mut requests).unwrap();
    driver.poll(Time(0), &[Event::Poisoned(poison.clone())], &mut requests).unwrap();
    let error = accept(&mut driver, SIGNAL, &mut requests).unwrap_err();
    let Error::Fabric(weft_fabric::Error::Poisoned(cause)) = error else { panic!("{error}") };
    assert_eq!(cause, poison);
}

#[test]
fn commands_stop_at_the_pool_and_say_what_they_wait_for() {
    let (mut driver, _) = driver(|config| config.templates.clear()).unwrap();
    let mut requests = driver.requests();
    // A window of four rounds, then two parts in the pool.
    for _ in 0..6 {
        assert!(driver.has_room());
        accept(&mut driver, SIGNAL, &mut requests).unwrap();
    }
    assert!(!driver.has_room() && !driver.is_idle());
    assert_eq!(driver.waits_for().collect::<Vec<_>>(), [(Rank(1), 1)]);
    let counter = driver.counters()[1];
    let credited = Event::Credited { counter, peer: Rank(1), credits: 2 };
    driver.poll(Time(0), &[credited], &mut requests).unwrap();
    assert!(driver.has_room() && driver.is_idle() && driver.waits_for().next().is_none());
}
