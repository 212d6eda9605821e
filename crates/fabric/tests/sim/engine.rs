//! Engine rejections and errors, and the cluster's errors for runs that cannot end.

use crate::traffic::TrafficError;
use std::sync::mpsc;
use std::time::Duration;
use weft_control::Cause;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, Pause, RunError, World, WorldConfig};
use weft_fabric::{
    CounterId, EngineConfig, Error, Event, Grant, LatencyBandwidth, Page, PartRule, PeerWrite,
    Rank, Region, RegionKey, RemoteRegion, Time,
};

/// Miri takes minutes for each thousand steps.
const LENGTH: u64 = if cfg!(miri) { 200 } else { 1000 };

/// A region and a counter on every rank, shared with all.
struct Group {
    cluster: Cluster,
    counter: CounterId,
    regions: Vec<Region>,
    remote: Vec<Vec<Vec<RemoteRegion>>>,
}

fn group(config: WorldConfig) -> Group {
    let mut cluster = Cluster::new(&World::new(config)).unwrap();
    let counter = cluster.counter().unwrap();
    let regions: Vec<Region> =
        cluster.ranks().map(|rank| cluster.engine(rank).alloc(LENGTH as usize).unwrap()).collect();
    let granted = |owner: Rank, _| vec![(regions[owner.0 as usize].clone(), 0..LENGTH)];
    let remote = cluster.share(granted, &[counter]).unwrap();
    Group { cluster, counter, regions, remote }
}

impl Group {
    /// Page from all of `from`'s region to all of `to`'s.
    fn page(&self, from: u32, to: u32) -> Page {
        Page {
            source: self.regions[from as usize].key(),
            source_offset: 0,
            destination: self.remote[from as usize][to as usize][0].key,
            destination_offset: 0,
            length: LENGTH,
        }
    }

    /// Runs until the group at rank `at` is poisoned; returns the cause.
    fn poison(&mut self, at: Rank) -> weft_fabric::Poison {
        let outcomes = self.cluster.run(|_, _, _, _| Ok::<bool, TrafficError>(false)).unwrap();
        match outcomes.into_iter().nth(at.0 as usize) {
            Some(Outcome::Failed(TrafficError::Poisoned(poison))) => poison,
            other => panic!("{at} ended in {other:?}"),
        }
    }
}

#[test]
fn a_write_takes_exactly_what_the_model_says() {
    let model = Box::new(LatencyBandwidth::new(Duration::from_nanos(50), 1_000_000_000));
    let mut group = group(WorldConfig { model, ..WorldConfig::new(2, 0) });
    group.regions[0].memory().fill(0, LENGTH as usize, 3);
    let (page, counter) = (group.page(0, 1), group.counter);
    group.cluster.engine(Rank(0)).write(Rank(1), counter, 0, &[page]).unwrap();
    let mut arrived = None;
    let outcomes = group.cluster.run(|engine, now, events, _| {
        let raised = Event::Raised { counter, peer: Rank(0), round: 0, count: 1 };
        if events.contains(&raised) {
            arrived = Some(now);
        }
        Ok::<bool, Error>(engine.rank() == Rank(0) || arrived.is_some())
    });
    assert!(outcomes.is_ok());
    assert_eq!(arrived, Some(Time(LENGTH + 50)));
    let mut bytes = vec![0; LENGTH as usize];
    group.regions[1].memory().copy_out(0, &mut bytes);
    assert_eq!(bytes, [3; LENGTH as usize]);
}

#[test]
fn wrong_requests_are_rejected_without_effect() {
    let mut group = group(WorldConfig::new(2, 0));
    let (page, counter) = (group.page(0, 1), group.counter);
    let engine = group.cluster.engine(Rank(0));
    let mut write = |round, page| engine.write(Rank(1), counter, round, &[page]).unwrap_err();
    assert!(matches!(write(1, page), Error::NoCredit { round: 1, credits: 0, .. }));
    let beyond = Page { source_offset: 1, ..page };
    assert!(matches!(write(0, beyond), Error::OutOfRange { side: "local", .. }));
    let beyond = Page { destination_offset: u64::MAX, ..page };
    assert!(matches!(write(0, beyond), Error::OutOfRange { side: "remote", .. }));
    let unknown = Page { source: RegionKey(9), ..page };
    assert!(matches!(write(0, unknown), Error::Unknown { what: "region", .. }));
    let unknown = Page { destination: RegionKey(9), ..page };
    assert!(matches!(write(0, unknown), Error::Unknown { what: "remote region", .. }));
    assert!(matches!(
        engine.signal(Rank(1), CounterId::from_number(9), 0),
        Err(Error::Unknown { what: "counter", .. })
    ));
    assert!(matches!(engine.signal(Rank(2), counter, 0), Err(Error::Unknown { what: "rank", .. })));
    assert!(matches!(engine.signal(Rank(0), counter, 0), Err(Error::Unknown { what: "rank", .. })));
    group.cluster.settle().unwrap();
    assert_eq!(group.cluster.engine(Rank(1)).count(counter, Rank(0)).unwrap(), 0);
    assert_eq!(group.cluster.world().violations(), []);
}

#[test]
fn a_credit_opens_one_round_and_closes_the_one_before() {
    let mut group = group(WorldConfig::new(2, 0));
    let counter = group.counter;
    group.cluster.engine(Rank(0)).signal(Rank(1), counter, 0).unwrap();
    group.cluster.settle().unwrap();
    group.cluster.engine(Rank(1)).credit(Rank(0), counter).unwrap();
    group.cluster.settle().unwrap();
    let engine = group.cluster.engine(Rank(0));
    let over = engine.signal(Rank(1), counter, 0).unwrap_err();
    assert!(matches!(over, Error::OldRound { round: 0, current: 1, .. }), "{over}");
    engine.signal(Rank(1), counter, 1).unwrap();
    let old = engine.signal(Rank(1), counter, 0).unwrap_err();
    assert!(matches!(old, Error::OldRound { round: 0, current: 1, .. }));
    let early = engine.signal(Rank(1), counter, 2).unwrap_err();
    assert!(matches!(early, Error::NoCredit { round: 2, credits: 1, .. }));
}

#[test]
fn a_round_is_credited_once_and_not_before_something_of_it_has_arrived() {
    let mut group = group(WorldConfig::new(2, 0));
    let counter = group.counter;
    let refused = |group: &mut Group, expected| {
        let error = group.cluster.engine(Rank(1)).credit(Rank(0), counter).unwrap_err();
        let Error::NothingToCredit { peer: Rank(0), round, .. } = error else { panic!("{error}") };
        assert_eq!(round, expected);
    };
    refused(&mut group, 0);
    group.cluster.engine(Rank(0)).signal(Rank(1), counter, 0).unwrap();
    refused(&mut group, 0);
    group.cluster.settle().unwrap();
    group.cluster.engine(Rank(1)).credit(Rank(0), counter).unwrap();
    refused(&mut group, 1);
    group.cluster.settle().unwrap();
    assert_eq!(group.cluster.engine(Rank(0)).credits(counter, Rank(1)).unwrap(), 1);
}

#[test]
fn a_counter_is_granted_and_imported_once_in_either_order() {
    let world = World::new(WorldConfig::new(2, 0));
    let mut cluster = Cluster::new(&world).unwrap();
    let (one, two) = (cluster.counter().unwrap(), cluster.counter().unwrap());
    let unlinked = cluster.engine(Rank(0)).signal(Rank(1), one, 0);
    assert!(matches!(unlinked, Err(Error::NotLinked { counter }) if counter == one));
    let grant = |cluster: &mut Cluster, from: u32, counter| {
        cluster.engine(Rank(from)).grant(Rank(1 - from), &[], &[counter])
    };
    let import = |cluster: &mut Cluster, at: u32, grant: &Grant, counter| {
        cluster.engine(Rank(at)).import(Rank(1 - at), grant, &[counter], Time::MAX)
    };
    // Both grant first, and rank 0 repeats the grant before anything was imported.
    let granted = grant(&mut cluster, 0, one).unwrap();
    assert_eq!(grant(&mut cluster, 0, one).unwrap(), granted);
    let back = grant(&mut cluster, 1, one).unwrap();
    import(&mut cluster, 1, &granted, one).unwrap();
    import(&mut cluster, 0, &back, one).unwrap();
    // Rank 1 imports before it grants.
    let granted = grant(&mut cluster, 0, two).unwrap();
    import(&mut cluster, 1, &granted, two).unwrap();
    let back = grant(&mut cluster, 1, two).unwrap();
    import(&mut cluster, 0, &back, two).unwrap();
    for counter in [one, two] {
        for rank in 0..2 {
            let again = grant(&mut cluster, rank, counter).unwrap_err();
            assert!(matches!(again, Error::AlreadyLinked { .. }), "{again}");
            let again = import(&mut cluster, rank, &back, counter).unwrap_err();
            assert!(matches!(again, Error::AlreadyLinked { .. }), "{again}");
            let peer = Rank(1 - rank);
            cluster.engine(Rank(rank)).signal(peer, counter, 0).unwrap();
        }
    }
    cluster.settle().unwrap();
    for counter in [one, two] {
        assert_eq!(cluster.engine(Rank(0)).count(counter, Rank(1)).unwrap(), 1);
        assert_eq!(cluster.engine(Rank(1)).count(counter, Rank(0)).unwrap(), 1);
    }
}

#[test]
fn more_requests_than_the_limit_are_refused() {
    let world = World::new(WorldConfig::new(2, 0));
    let config = EngineConfig { max_requests: 2, lanes: 8, ..EngineConfig::default() };
    let mut cluster = Cluster::with_config(&world, config).unwrap();
    let counter = cluster.counter().unwrap();
    cluster.share(|_, _| Vec::new(), &[counter]).unwrap();
    let engine = cluster.engine(Rank(0));
    engine.signal(Rank(1), counter, 0).unwrap();
    engine.signal(Rank(1), counter, 0).unwrap();
    let refused = engine.signal(Rank(1), counter, 0);
    assert!(matches!(refused, Err(Error::Limit { wanted: 3, limit: 2, .. })));
    cluster.settle().unwrap();
    cluster.engine(Rank(0)).signal(Rank(1), counter, 0).unwrap();
}

#[test]
fn parts_wait_for_room_in_the_queue() {
    let parts = PartRule { max_part_bytes: 10, max_pages_per_part: 1, ..PartRule::WHOLE };
    let config = WorldConfig { parts, queue_parts: 3, ..WorldConfig::new(2, 0) };
    let mut group = group(config);
    let (page, counter) = (group.page(0, 1), group.counter);
    let engine = group.cluster.engine(Rank(0));
    let request = engine.write(Rank(1), counter, 0, &[page]).unwrap();
    assert!(!engine.is_drained(request));
    group.cluster.settle().unwrap();
    assert!(group.cluster.engine(Rank(0)).is_drained(request));
    assert_eq!(group.cluster.engine(Rank(1)).count(counter, Rank(0)).unwrap(), LENGTH / 10);
}

/// Rank 1 accepts no parts, so that rank 0's queue toward it fills up. Parts toward rank 2 still arrive.
#[test]
fn a_full_queue_toward_one_peer_delays_no_other() {
    let parts = PartRule { max_part_bytes: 10, max_pages_per_part: 1, ..PartRule::WHOLE };
    let config = WorldConfig { parts, queue_parts: 1, ..WorldConfig::new(3, 0) };
    let mut group = group(config);
    let (world, counter) = (group.cluster.world().clone(), group.counter);
    let (to_stopped, to_running) = (group.page(0, 1), group.page(0, 2));
    world.stop(Rank(1));
    let engine = group.cluster.engine(Rank(0));
    let stuck = engine.write(Rank(1), counter, 0, &[to_stopped]).unwrap();
    let writes = [1, 2].map(|peer| PeerWrite { peer: Rank(peer), pages: &[] });
    let signals = engine.scatter(&writes, counter, 0, None).unwrap();
    let fine = engine.write(Rank(2), counter, 0, &[to_running]).unwrap();
    group.cluster.settle().unwrap();
    let engine = group.cluster.engine(Rank(0));
    assert!(engine.is_drained(fine));
    assert!(!engine.is_drained(stuck) && !engine.is_drained(signals));
    let count = |group: &mut Group, at: u32| {
        group.cluster.engine(Rank(at)).count(counter, Rank(0)).unwrap()
    };
    assert_eq!((count(&mut group, 1), count(&mut group, 2)), (0, LENGTH / 10 + 1));
    world.resume(Rank(1));
    group.cluster.settle().unwrap();
    let engine = group.cluster.engine(Rank(0));
    assert!(engine.is_drained(stuck) && engine.is_drained(signals));
    assert_eq!(count(&mut group, 1), LENGTH / 10 + 1);
}

/// The queue has one slot. Whenever it is free, before the engine is polled, a newer write is submitted:
/// it waits behind the older one, whose parts all arrive first.
#[test]
fn a_stream_of_newer_writes_never_overtakes_an_older_one() {
    let parts = PartRule { max_part_bytes: 10, max_pages_per_part: 1, ..PartRule::WHOLE };
    let config = WorldConfig { parts, queue_parts: 1, ..WorldConfig::new(2, 0) };
    let mut group = group(config);
    let newer = group.cluster.counter().unwrap();
    group.cluster.share(|_, _| Vec::new(), &[newer]).unwrap();
    let (world, older, page) = (group.cluster.world().clone(), group.counter, group.page(0, 1));
    group.cluster.engine(Rank(0)).write(Rank(1), older, 0, &[page]).unwrap();
    let mut signals = 0;
    for _ in 0..4 * LENGTH {
        world.step();
        let engine = group.cluster.engine(Rank(0));
        engine.signal(Rank(1), newer, 0).unwrap();
        signals += 1;
        engine.poll(world.now(), &mut Vec::new());
        let engine = group.cluster.engine(Rank(1));
        let (of_older, of_newer) =
            (engine.count(older, Rank(0)).unwrap(), engine.count(newer, Rank(0)).unwrap());
        assert!(of_newer == 0 || of_older == LENGTH / 10, "{of_older} parts, {of_newer} signals");
    }
    assert_eq!(group.cluster.engine(Rank(1)).count(older, Rank(0)).unwrap(), LENGTH / 10);
    group.cluster.settle().unwrap();
    assert_eq!(group.cluster.engine(Rank(1)).count(newer, Rank(0)).unwrap(), signals);
}

#[test]
fn a_killed_rank_is_named_by_every_survivor() {
    let mut group = group(WorldConfig::new(4, 0));
    group.cluster.world().kill(Rank(2));
    for at in [0, 1, 3] {
        let poison = group.poison(Rank(at));
        assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(2))));
    }
    let refused = group.cluster.engine(Rank(0)).signal(Rank(1), group.counter, 0);
    assert!(matches!(refused, Err(Error::Poisoned(_))));
}

#[test]
fn a_scatter_that_is_refused_has_entered_no_round() {
    let mut group = group(WorldConfig::new(3, 0));
    let beyond = Page { destination_offset: 1, ..group.page(0, 2) };
    let (first, twice, refused) = ([group.page(0, 1)], [group.page(0, 1)], [beyond]);
    let (counter, peers) = (group.counter, [Rank(1), Rank(1), Rank(2)]);
    let writes: Vec<PeerWrite<'_>> = peers
        .into_iter()
        .zip([&first, &twice, &refused])
        .map(|(peer, pages)| PeerWrite { peer, pages })
        .collect();
    let engine = group.cluster.engine(Rank(0));
    let before = engine.statistics();
    let error = engine.scatter(&writes, counter, 0, None).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { side: "remote", .. }), "{error}");
    for peer in [Rank(1), Rank(2)] {
        assert_eq!(engine.next_round(counter, peer).unwrap(), 0);
    }
    assert_eq!(engine.statistics(), before);
    engine.scatter(&writes[..1], counter, 0, None).unwrap();
    assert_eq!(engine.next_round(counter, Rank(1)).unwrap(), 1);
}

#[test]
fn a_scatter_that_fails_names_the_peer_it_failed_toward() {
    let mut group = group(WorldConfig::new(4, 0));
    group.cluster.world().cut(Rank(0), Rank(2));
    let (sender, outcome) = mpsc::channel();
    let callback = Box::new(move |result| sender.send(result).unwrap());
    let writes = [1, 2, 3].map(|peer| PeerWrite { peer: Rank(peer), pages: &[] });
    group.cluster.engine(Rank(0)).scatter(&writes, group.counter, 0, Some(callback)).unwrap();
    let poison = group.poison(Rank(3));
    assert_eq!((poison.kind, poison.rank), (Cause::Failed, Some(Rank(2))));
    assert_eq!(outcome.recv().unwrap(), Err("the link is cut".to_owned()));
}

#[test]
fn a_rank_whose_wait_cannot_end_is_reported_as_deadlocked() {
    let mut group = group(WorldConfig::new(3, 0));
    let counter = group.counter;
    group.cluster.engine(Rank(0)).signal(Rank(1), counter, 0).unwrap();
    let result = group.cluster.run(|engine, _, _, _| {
        let rank = engine.rank();
        Ok::<bool, Error>(rank == Rank(0) || engine.count(counter, Rank(0))? == 1)
    });
    assert!(
        matches!(result, Err(RunError::Deadlock { at, waiting }) if at > Time(0) && waiting == [Rank(2)])
    );
}

#[test]
fn a_run_without_end_stops_at_its_bound() {
    let mut group = group(WorldConfig::new(2, 0));
    group.cluster.set_max_steps(100);
    let world = group.cluster.world().clone();
    let result = group.cluster.run(|_, now, _, _| {
        world.wake_at(now.after(Duration::from_millis(1)));
        Ok::<bool, Error>(false)
    });
    let waiting = vec![Rank(0), Rank(1)];
    assert_eq!(result.unwrap_err(), RunError::TooManySteps { steps: 100, waiting });
}

/// A pause shorter than the silence timeout has no effect; a longer one is a loss.
#[test]
fn a_paused_rank_goes_on_when_it_is_resumed() {
    const LENGTH: Duration = Duration::from_millis(1);
    for (silence, is_lost) in [(LENGTH * 11 / 10, false), (LENGTH * 9 / 10, true)] {
        let pauses = vec![Pause { at: Time(0), rank: Rank(1), length: LENGTH, network: true }];
        let faults = Faults { pauses, silence: Some(silence), ..Faults::default() };
        let mut group = group(WorldConfig::new(2, 0).with_faults(faults));
        let (world, counter, resumed) =
            (group.cluster.world().clone(), group.counter, Time(0).after(LENGTH));
        group.cluster.engine(Rank(0)).signal(Rank(1), counter, 0).unwrap();
        world.wake_at(resumed);
        let outcomes = group.cluster.run(|engine, now, _, _| {
            if engine.rank() == Rank(0) {
                return Ok(!is_lost && now >= resumed);
            }
            assert!(now == Time(0) || now >= resumed, "it was polled in its pause");
            Ok::<bool, TrafficError>(engine.count(counter, Rank(0))? == 1)
        });
        match &outcomes.unwrap()[..] {
            [Outcome::Done, Outcome::Done] => assert!(!is_lost, "{silence:?} was no loss"),
            [Outcome::Failed(TrafficError::Poisoned(poison)), _] => {
                assert!(is_lost, "{}", poison.detail);
                assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(1))));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_rank_whose_driver_fails_is_named_by_the_others() {
    let mut group = group(WorldConfig::new(3, 0));
    let counter = group.counter;
    let outcomes = group.cluster.run(|engine, _, _, _| {
        if engine.rank() == Rank(1) {
            engine.signal(Rank(0), counter, 5)?;
        }
        Ok::<bool, TrafficError>(false)
    });
    for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
        match outcome {
            Outcome::Failed(TrafficError::Fabric(Error::NoCredit { .. })) => assert_eq!(rank, 1),
            Outcome::Failed(TrafficError::Poisoned(poison)) => {
                assert_eq!(poison.rank, Some(Rank(1)))
            }
            other => panic!("rank {rank} ended in {other:?}"),
        }
    }
}

#[test]
fn a_rank_that_is_done_early_misses_nothing_of_the_next_run() {
    let mut group = group(WorldConfig::new(2, 0));
    let counter = group.counter;
    let outcomes = group.cluster.run(|engine, now, _, _| {
        if engine.rank() == Rank(0) && engine.next_round(counter, Rank(1))? == 0 {
            engine.signal(Rank(1), counter, 0)?;
        }
        Ok::<bool, Error>(engine.rank() == Rank(1) || now > Time(0))
    });
    assert!(outcomes.is_ok());
    group.cluster.settle().unwrap();
    let raised = Event::Raised { counter, peer: Rank(0), round: 0, count: 1 };
    let outcomes = group.cluster.run(|engine, _, events, _| {
        Ok::<bool, Error>(engine.rank() == Rank(0) || events.contains(&raised))
    });
    assert!(outcomes.is_ok());
}
