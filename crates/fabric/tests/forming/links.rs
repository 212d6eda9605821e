//! Links that a peer does not connect.

use crate::{Introduced, PATIENCE, PROMPT, assert_lost, cases, device_config, join, two};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use weft_control::{Cause, PeerStatus, Poison, local_world};
use weft_fabric::providers::{CopyBackend, Staging, TcpConfig, TcpDevice};
use weft_fabric::registry::{self, DeviceConfig};
use weft_fabric::{
    Communicator, Device, Engine, EngineConfig, Error, Generation, ProviderKind, Rank, Result,
};

/// Error from `joins` and how long it took, while a rank in the same group is introduced and does not
/// connect. `meanwhile` runs at that rank, with the engine there.
fn failed_join<T>(
    joins: impl FnOnce() -> Result<T> + Send,
    absent: impl FnOnce() -> Introduced + Send,
    meanwhile: impl FnOnce(Introduced) -> Option<Introduced> + Send,
) -> (Error, Duration) {
    let (introduced, since) = mpsc::channel();
    let (ended, end) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let absent = absent();
            introduced.send(Instant::now()).unwrap();
            let kept = meanwhile(absent);
            // Until the other rank has returned.
            let _ = end.recv_timeout(PATIENCE);
            drop(kept);
        });
        let error = joins().err().expect("the group formed");
        let took = since.recv().unwrap().elapsed();
        drop(ended);
        (error, took)
    })
}

/// Names at both ends, and the remedy, where the links have one kind and only one of them is wrapped.
#[test]
fn a_link_in_the_staging_wrapper_and_one_outside_are_told_apart() {
    let staged = |kind| {
        let staged = Staging::Always(CopyBackend::Twin { seed: 0 });
        registry::open(kind, &DeviceConfig { staged, ..device_config() }).unwrap()
    };
    let shm = registry::open(ProviderKind::Shm, &device_config()).unwrap();
    let tcp: Arc<dyn Device> = Arc::new(TcpDevice::new(TcpConfig::default()).unwrap());
    let cases = [
        (staged(ProviderKind::Shm), shm, ["shm with WEFT_STAGED=1", "shm"]),
        (staged(ProviderKind::Tcp), tcp.clone(), ["tcp", "tcp outside the staging wrapper"]),
        (tcp, staged(ProviderKind::Tcp), ["tcp", "tcp in the staging wrapper"]),
    ];
    for (ours, theirs, expected) in cases {
        let engine = |rank, device| {
            let config = EngineConfig::default();
            Engine::new(config, Rank(rank), 2, Generation(0), &[device]).unwrap()
        };
        let (mut one, two) = (engine(0, ours), engine(1, theirs));
        let error = one.introduce(&[one.address(), two.address()]).unwrap_err();
        assert!(error.to_string().contains("WEFT_STAGED=1 on all ranks or none"), "{error}");
        let Error::NoRoute { here, there, .. } = error else { panic!("{error}") };
        assert_eq!([&here[..], &there[..]], expected);
    }
}

#[test]
fn an_interrupt_ends_the_wait_for_links() {
    for (kind, absent) in cases() {
        let pressed = Arc::new(AtomicBool::new(false));
        let [here, there] = two(absent, |config| {
            let (is_here, pressed) = (config.rank.index() != absent, pressed.clone());
            config.interrupt = Some(Arc::new(move || is_here && pressed.load(Ordering::Relaxed)));
        });
        let (error, took) = failed_join(
            || join(here, kind),
            || Introduced::new(&there, kind),
            |engine| {
                pressed.store(true, Ordering::Relaxed);
                Some(engine)
            },
        );
        let interrupted = matches!(error, Error::Control(weft_control::Error::Interrupted { .. }));
        assert!(interrupted, "{kind}: {error}");
        assert!(took < PROMPT, "{kind}: {took:?}");
    }
}

/// The peer's control connections break before or after the links do.
#[test]
fn a_peer_that_dies_while_links_connect_is_named_at_once() {
    for ((kind, absent), links_first) in
        cases().flat_map(|case| [false, true].map(|first| (case, first)))
    {
        let [here, there] = two(absent, |_| {});
        let abandoned = there.clone();
        let dies = move |engine| {
            let kept = (!links_first).then_some(engine);
            if links_first {
                std::thread::sleep(Duration::from_millis(300));
            }
            abandoned.abandon();
            kept
        };
        let introduce = || Introduced::new(&there, kind);
        let (error, took) = failed_join(|| join(here, kind), introduce, dies);
        assert_lost(&error, absent, &format!("{kind}, links first: {links_first}"));
        assert!(took < PROMPT, "{kind}: {took:?}");
    }
}

/// The control plane and the links share the `init` time limit.
#[test]
fn links_connect_within_what_is_left_of_the_time_to_join() {
    const TIME: Duration = Duration::from_secs(2);
    for (kind, absent) in cases() {
        let [here, there] = two(absent, |config| config.connect_timeout = TIME);
        let introduce = || Introduced::new(&there, kind);
        let (error, took) = failed_join(|| join(here, kind), introduce, Some);
        let peer = Rank(absent as u32);
        assert!(matches!(&error, Error::Connect { peer: p, .. } if *p == peer), "{kind}: {error}");
        assert!(took < PROMPT, "{kind}: {took:?}");
    }
}

#[test]
fn links_of_a_new_group_connect_within_the_timeout_of_reform() {
    const TIME: Duration = Duration::from_secs(1);
    for (kind, absent) in cases() {
        let [here, there] = two(absent, |_| {});
        let [here, there] = std::thread::scope(|scope| {
            let joins = [here, there].map(|control| scope.spawn(move || join(control, kind)));
            joins.map(|join| join.join().unwrap().unwrap())
        });
        let mut newer = None;
        let absent_again = || {
            let control = there.control().mesh().unwrap().reform(PATIENCE).unwrap();
            Introduced::new(newer.insert(control), kind)
        };
        let (error, took) = failed_join(|| here.reform(TIME), absent_again, Some);
        let peer = Rank(absent as u32);
        assert!(matches!(&error, Error::Connect { peer: p, .. } if *p == peer), "{kind}: {error}");
        assert!(took < PROMPT, "{kind}: {took:?}");
    }
}

/// The survivors poll no engine between the loss and `reform`. The lost rank keeps the links, as a stopped
/// process does, and finds that they are closed.
#[test]
fn links_of_the_old_group_are_closed_by_a_reform_that_follows_no_poll() {
    let cause = cause_at_the_lost_rank(|survivors| {
        let since = Instant::now();
        let noticed = |old: &Communicator| {
            old.control().mesh().unwrap().peer_status(Rank(2)) == PeerStatus::Lost
        };
        while !survivors.iter().all(noticed) {
            assert!(since.elapsed() < PROMPT, "the control connections are open");
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_eq!(cause.kind, Cause::Lost, "{}", cause.detail);
}

#[test]
fn links_of_the_old_group_are_closed_by_a_reform_that_is_the_first_to_learn_of_the_loss() {
    let cause = cause_at_the_lost_rank(|_| ());
    // A thread closes the control connections: before that, it may be told of the new group.
    assert!(matches!(cause.kind, Cause::Lost | Cause::User), "{}", cause.detail);
}

/// Poison at a rank that the others lose: they re-form after `meanwhile`.
fn cause_at_the_lost_rank(meanwhile: impl FnOnce(&[Communicator])) -> Poison {
    let three: Vec<Communicator> = std::thread::scope(|scope| {
        let world = local_world(3, |_| {}).unwrap().into_iter();
        let joins = world.map(|control| scope.spawn(|| join(control, ProviderKind::Tcp).unwrap()));
        let joins: Vec<_> = joins.collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    });
    let (lost, survivors) = three.split_last().unwrap();
    lost.control().mesh().unwrap().abandon();
    meanwhile(survivors);
    let newer: Vec<Communicator> = std::thread::scope(|scope| {
        let reforms: Vec<_> =
            survivors.iter().map(|old| scope.spawn(|| old.reform(PATIENCE).unwrap())).collect();
        reforms.into_iter().map(|reform| reform.join().unwrap()).collect()
    });
    assert!(newer.iter().all(|communicator| communicator.world_size() == 2));
    let since = Instant::now();
    loop {
        lost.engine().progress();
        if let Err(Error::Poisoned(cause)) = lost.engine().check() {
            return cause;
        }
        assert!(since.elapsed() < PROMPT, "the links of the old group are open");
        std::thread::sleep(Duration::from_millis(10));
    }
}
