//! Queries in the submission queue: deadlines, cancels, stop.

use super::{PATIENCE, World, by};
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_dispatch::Error;
use weft_dispatch::service::Unsubmitted;
use weft_fabric::{ProviderKind, clock};

/// The nodes take queries and never answer, so that quarantined queries fill the ledger.
#[test]
fn queries_behind_a_ledger_full_of_quarantined_ones_expire_and_are_cancelled() {
    let world = World::new(ProviderKind::Shm, 40);
    world.gate.store(false, Ordering::Release);
    let services = [world.add_node().1, world.add_node().1];
    let handle = world.front_end.handle();
    let within = |token, time| {
        let deadline = clock::now().after(Duration::from_millis(time));
        let mut query = World::query(token);
        query.deadline = deadline;
        query
    };
    handle.submit_all((0..24).map(|token| within(token, 500)), by()).unwrap();
    world.wait_for("24 ends", |ends| ends.ended.load(Ordering::Acquire) == 24);
    assert_eq!(world.front_end.counts().unwrap().quarantined, 24);
    // Half expire in the queue with 8 places, while the others wait on, also behind them.
    let queued = (24..32).map(|token| within(token, if token % 2 == 0 { 30 } else { 60_000 }));
    handle.submit_all(queued, by()).unwrap();
    world.wait_for("28 ends", |ends| ends.ended.load(Ordering::Acquire) == 28);
    assert!(world.front_end.cancel(29).unwrap() && !world.front_end.cancel(29).unwrap());
    assert!(!world.front_end.cancel(24).unwrap(), "it has expired");
    world.wait_for("the cancel", |ends| ends.ended.load(Ordering::Acquire) == 29);
    // A queue place is free again.
    handle.submit(within(32, 30)).unwrap();
    world.wait_for("30 ends", |ends| ends.ended.load(Ordering::Acquire) == 30);
    assert_eq!(world.front_end.counts().unwrap().failed, 30);
    world.gate.store(true, Ordering::Release);
    let (recorder, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.submitted, counts.answered, counts.failed), (33, 3, 30));
    let ends = recorder.ends.counts.lock().unwrap().clone();
    for (token, count) in ends.iter().take(33).enumerate() {
        let answered = [25, 27, 31].contains(&token);
        assert_eq!(*count, if answered { [1, 0, 1] } else { [0, 1, 1] }, "{token}");
    }
    for service in services {
        service.stop(by()).unwrap();
    }
}

#[test]
fn a_cancel_finds_every_accepted_query_after_cancels_that_found_none() {
    let world = World::new(ProviderKind::Shm, 100);
    let handle = world.front_end.handle();
    let mut accepted = Vec::new();
    for token in 0..100 {
        // Without a node, the ledger and the queue fill.
        let soon = clock::now().after(Duration::from_millis(5));
        match handle.submit_all([World::query(token)], soon) {
            Ok(_) => accepted.push(token),
            Err(Unsubmitted { error, .. }) => assert!(matches!(error, Error::Full { .. })),
        }
        assert!(!world.front_end.cancel(1000).unwrap());
    }
    for token in accepted.iter().rev() {
        assert!(world.front_end.cancel(*token).unwrap(), "{token} of {}", accepted.len());
    }
    let (_, counts) = world.front_end.stop(by()).unwrap();
    let accepted = accepted.len() as u64;
    assert_eq!((counts.submitted, counts.failed), (accepted, accepted));
}

#[test]
fn a_stop_does_not_wait_for_an_iterator_of_queries() {
    let world = World::new(ProviderKind::Shm, 2);
    let (_, service) = world.add_node();
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let handle = world.front_end.handle();
    let submitter = std::thread::spawn(move || {
        let second = std::iter::once_with(|| {
            let _ = gate.recv_timeout(PATIENCE);
            World::query(1)
        });
        handle.submit_all(std::iter::once(World::query(0)).chain(second), by())
    });
    world.wait_for("the answer", |ends| ends.ended.load(Ordering::Acquire) == 1);
    let since = clock::now();
    world.front_end.stop(by()).unwrap();
    assert!(clock::now().since(since) < PATIENCE / 2);
    release.send(()).unwrap();
    let Unsubmitted { submitted, error } = submitter.join().unwrap().unwrap_err();
    assert_eq!((submitted, matches!(error, Error::Stopped { .. })), (1, true), "{error}");
    service.stop(by()).unwrap();
}
