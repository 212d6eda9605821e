//! State reported by a driver: peers that block a round, and rejected calls.

use std::ptr::NonNull;
use std::sync::Arc;
use weft_fabric::providers::sim::{Cluster, RunError, World, WorldConfig};
use weft_fabric::{
    Driver as _, EngineConfig, Event, Memory, MemoryKind, MissingPeer, PartRule, Rank, Requests,
    Time,
};
use weft_moe::{
    Area, BlockScaled, Config, Driver, Error, Float8, RoundHandle, ScaleType, Shape, Stage,
    TokenInput, TokenType,
};

const HIDDEN: u32 = 8;
/// Two tokens, one for each rank's expert.
const IDS: [i64; 2] = [0, 1];

fn world(ranks: u32) -> Cluster {
    Cluster::new(&World::new(WorldConfig::new(ranks, 1))).unwrap()
}

fn config(ranks: u32) -> Config {
    Config::new(ranks, 0, ranks, 1).sized(4, HIDDEN)
}

fn cluster(ranks: u32) -> (Cluster, Vec<Driver>) {
    let (mut cluster, config) = (world(ranks), config(ranks));
    let allocate = |rank: Rank| {
        let shape = Shape::new(Config { rank: rank.0, ..config.clone() }).unwrap();
        Driver::allocate(cluster.engine(rank), &shape).unwrap()
    };
    let mut drivers: Vec<Driver> = (0..ranks).map(Rank).map(allocate).collect();
    for owner in cluster.ranks() {
        for peer in cluster.ranks().filter(|peer| *peer != owner) {
            let grant = drivers[owner.0 as usize].grant(cluster.engine(owner), peer).unwrap();
            let driver = &mut drivers[peer.0 as usize];
            driver.link(cluster.engine(peer), owner, &grant, Time::MAX).unwrap();
        }
    }
    (cluster, drivers)
}

fn begin(cluster: &mut Cluster, driver: &mut Driver, rank: Rank) -> RoundHandle {
    let tokens = Memory::from_bytes(vec![0; IDS.len() * HIDDEN as usize * 4]);
    let region = cluster.engine(rank).register(tokens).unwrap();
    let input = TokenInput { region: region.key(), memory: region.memory().clone() };
    driver.begin(input, &IDS, None, None).unwrap()
}

/// Polls both drivers until they are idle, withholding from rank 0 the events that `kept` names.
fn run_without(cluster: &mut Cluster, drivers: &mut [Driver], kept: impl Fn(&Event) -> bool) {
    let stopped = cluster.run(|engine, now, events, requests| {
        let rank = engine.rank().0 as usize;
        let events: Vec<Event> =
            events.iter().filter(|event| rank > 0 || !kept(event)).cloned().collect();
        drivers[rank].poll(now, &events, requests)?;
        Ok::<bool, Error>(false)
    });
    assert!(matches!(stopped, Err(RunError::Deadlock { .. })), "{stopped:?}");
}

#[test]
fn a_round_says_whom_it_waits_for_and_for_what() {
    let (mut cluster, mut drivers) = cluster(2);
    let handle = begin(&mut cluster, &mut drivers[0], Rank(0));
    let missing = |expected, seen| vec![MissingPeer { rank: Rank(1), expected, seen }];

    run_without(&mut cluster, &mut drivers, |_| false);
    assert_eq!(drivers[0].missing(handle), ("dispatch: headers", missing(1, 0)));

    begin(&mut cluster, &mut drivers[1], Rank(1));
    let rows = drivers[0].counters()[1];
    run_without(
        &mut cluster,
        &mut drivers,
        |event| matches!(event, Event::Raised { counter, .. } if *counter == rows),
    );
    assert_eq!(drivers[0].missing(handle), ("dispatch: rows", missing(1, 0)));
}

#[test]
fn a_round_that_lacks_only_its_own_writes_says_so() {
    let (mut cluster, mut drivers) = cluster(2);
    let handle = begin(&mut cluster, &mut drivers[0], Rank(0));
    begin(&mut cluster, &mut drivers[1], Rank(1));
    let mut tags = Vec::new();
    let kept = std::cell::RefCell::new(&mut tags);
    run_without(&mut cluster, &mut drivers, |event| {
        let Event::Completed { tag } = event else { return false };
        kept.borrow_mut().push(*tag);
        true
    });
    assert_eq!(drivers[0].stage(handle), Stage::Dispatching);
    // A header and one row.
    let missing = vec![MissingPeer { rank: Rank(1), expected: 2, seen: 0 }];
    assert_eq!(drivers[0].missing(handle), ("completion of this rank's own writes", missing));
    let events: Vec<Event> = tags.iter().map(|&tag| Event::Completed { tag }).collect();
    drivers[0].poll(Time(0), &events, &mut Requests::default()).unwrap();
    assert_eq!(drivers[0].stage(handle), Stage::Dispatched);
    assert_eq!(drivers[0].missing(handle), ("idle", Vec::new()));
}

#[test]
fn scales_that_are_too_few_or_not_wanted_are_refused() {
    let (mut cluster, mut drivers) = cluster(1);
    let mut refused = |driver: &mut Driver, scales: Option<&[u8]>, expected: usize| {
        let region = cluster.engine(Rank(0)).register(Memory::from_bytes(vec![0; 64])).unwrap();
        let input = TokenInput { region: region.key(), memory: region.memory().clone() };
        let error = driver.begin(input, &[0i64, 0], None, scales).unwrap_err();
        let given = scales.map_or(0, <[u8]>::len);
        let message = format!("the scales' bytes has {given} elements; {expected} are needed");
        assert_eq!(error.to_string(), message);
    };
    refused(&mut drivers[0], Some(&[0; 8]), 0);
    let (mut cluster, config) = (world(1), config(1));
    let scaled = BlockScaled { format: Float8::E4M3, scale: ScaleType::F32, block: 3 };
    let shape = Shape::new(Config { token_type: TokenType::Scaled(scaled), ..config }).unwrap();
    let mut driver = Driver::allocate(cluster.engine(Rank(0)), &shape).unwrap();
    // Two tokens with eight elements in blocks of three.
    refused(&mut driver, None, 2 * 3 * 4);
    refused(&mut driver, Some(&[0; 23]), 2 * 3 * 4);
}

#[test]
fn tokens_that_the_cpu_cannot_read_are_refused_and_the_next_round_begins() {
    let (mut cluster, mut drivers) = cluster(1);
    // SAFETY: a device's address must not be dereferenced on the host, which this test verifies.
    let memory = unsafe {
        Memory::user_buffer(NonNull::dangling(), 64, MemoryKind::Device(3), Box::new(()))
    };
    let region = cluster.engine(Rank(0)).register(Memory::from_bytes(vec![0; 64])).unwrap();
    let input = TokenInput { region: region.key(), memory: Arc::new(memory) };
    let error = drivers[0].begin(input, &[0i64, 0], None, None).unwrap_err();
    assert!(
        matches!(error, Error::NotOnHost { what: Area::Input, place: MemoryKind::Device(3) }),
        "{error}"
    );
    assert!(error.to_string().contains("copy it to host memory"), "{error}");
    let input = TokenInput { region: region.key(), memory: region.memory().clone() };
    assert_eq!(drivers[0].begin(input, &[0i64, 0], None, None).unwrap().round(), 0);
}

/// Memory in which rows are packed counts toward the limit, over routes that pack.
#[test]
fn an_all_to_all_without_room_to_pack_rows_is_refused() {
    let allocate = |max_pages_per_part, spare| {
        let parts = PartRule { max_pages_per_part, ..PartRule::WHOLE };
        let world = World::new(WorldConfig { parts, ..WorldConfig::new(2, 1) });
        let mut cluster = Cluster::new(&world).unwrap();
        let bytes = Shape::new(config(2)).unwrap().sizes().total_bytes();
        let limited = Config { max_bytes: Some(bytes + spare), ..config(2) };
        Driver::allocate(cluster.engine(Rank(0)), &Shape::new(limited).unwrap()).map(drop)
    };
    // In each of two sets, four 32-byte tokens with 12-byte records, and two writes that begin at multiples of 64.
    let needed = 2 * (4 * 44 + 2 * 64);
    allocate(16, 0).unwrap();
    allocate(1, needed).unwrap();
    let error = allocate(1, needed - 3).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains(" 3 too many"), "{error}");
}

/// Lanes for two channels and a half: three channels take none.
#[test]
fn an_all_to_all_that_finds_no_lanes_keeps_none() {
    let world = World::new(WorldConfig::new(2, 1));
    let engine = EngineConfig { lanes: 2 * 6 + 3, ..EngineConfig::default() };
    let mut cluster = Cluster::with_config(&world, engine).unwrap();
    let engine = cluster.engine(Rank(0));
    let with = |channels| Shape::new(Config { channels, ..config(2) }).unwrap();
    for _ in 0..3 {
        let refused = Driver::allocate(engine, &with(3)).map(drop);
        let limit = matches!(&refused, Err(Error::Fabric(weft_fabric::Error::Limit { .. })));
        assert!(limit, "{refused:?}");
    }
    Driver::allocate(engine, &with(2)).unwrap();
}
