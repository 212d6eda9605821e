//! Links that a peer does not connect.

use crate::{Introduced, PATIENCE, PROMPT, assert_lost, cases, join, two};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use weft_fabric::{Error, Rank, Result};

/// Error of `joins` and its duration, while a rank of the same group is introduced and does not connect.
/// `meanwhile` runs at that rank, with its engine.
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

/// Its control connections break before or after its links do.
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

/// The time limit of `init` is shared by the control plane and the links.
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
