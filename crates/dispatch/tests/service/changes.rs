//! Threads that submit, cancel, and change the nodes at the same time, until the front end stops among them.

use super::{World, by};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use weft_dispatch::service::Unsubmitted;
use weft_dispatch::{Error, Failure, FrontEndHandle, Query};
use weft_fabric::random::SplitMix64;
use weft_fabric::{ProviderKind, clock};

const SUBMITTERS: u64 = 3;
/// Maximum queries per submitter.
const QUERIES: u64 = 50_000;
const CHANGES: u64 = 6;

/// A query, one in eight with a deadline that may pass before the answer.
fn query(token: u64, random: &mut SplitMix64) -> Query {
    let mut query = World::query(token);
    if random.below(8) == 0 {
        query.deadline = clock::now().after(Duration::from_micros(random.below(2000)));
    }
    query
}

/// Submits one by one or in groups until the service stops. `accepted` counts the queries so far; the tokens begin
/// at `first`.
fn submit(handle: &FrontEndHandle, first: u64, accepted: &AtomicU64, random: &mut SplitMix64) {
    let mut token = first;
    while token < first + QUERIES {
        let group = random.below(3) * 10;
        let error = if group == 0 {
            handle.submit(query(token, random)).map(|()| token += 1).err()
        } else {
            let queries =
                (token..(token + group).min(first + QUERIES)).map(|token| query(token, random));
            let soon = clock::now().after(Duration::from_millis(5));
            let (submitted, error) = match handle.submit_all(queries, soon) {
                Ok(submitted) => (submitted, None),
                Err(Unsubmitted { submitted, error }) => (submitted, Some(error)),
            };
            token += submitted;
            error
        };
        accepted.store(token - first, Ordering::Relaxed);
        match error {
            None => {}
            Some(Error::Full { .. }) => std::thread::yield_now(),
            Some(Error::Stopped { .. }) => return,
            Some(error) => panic!("{error}"),
        }
    }
}

/// Cancels queries among each submitter's latest. Returns those that had not ended.
fn cancel(
    world: &World,
    accepted: &[AtomicU64],
    is_over: &AtomicBool,
    random: &mut SplitMix64,
) -> Vec<u64> {
    let (mut cancelled, until) = (Vec::new(), by());
    while !is_over.load(Ordering::Acquire) && clock::now() < until {
        for (submitter, accepted) in accepted.iter().enumerate() {
            let latest = accepted.load(Ordering::Relaxed).saturating_sub(random.below(40));
            let token = submitter as u64 * QUERIES + latest;
            if world.front_end.cancel(token).unwrap() {
                cancelled.push(token);
            }
        }
    }
    cancelled
}

/// Returns how many queries were cancelled before the stop.
fn each_accepted_query_ends_once(provider: ProviderKind, seed: u64) -> usize {
    let world = World::new(provider, SUBMITTERS * QUERIES);
    let random = |stream| SplitMix64::stream(seed, stream);
    let accepted: Vec<AtomicU64> = (0..SUBMITTERS).map(|_| AtomicU64::new(0)).collect();
    let is_over = AtomicBool::new(false);
    let mut nodes = vec![world.add_node(), world.add_node()];
    let (recorder, counts, cancelled) = std::thread::scope(|scope| {
        for (submitter, accepted) in accepted.iter().enumerate() {
            let (handle, submitter) = (world.front_end.handle(), submitter as u64);
            let (first, mut random) = (submitter * QUERIES, random(submitter));
            scope.spawn(move || submit(&handle, first, accepted, &mut random));
        }
        let mut cancels = random(SUBMITTERS);
        let cancelled = std::thread::scope(|scope| {
            let canceller = scope.spawn(|| cancel(&world, &accepted, &is_over, &mut cancels));
            let mut random = random(SUBMITTERS + 1);
            for change in 1..=CHANGES {
                let (id, service) = nodes.remove(random.below(2) as usize);
                match random.below(3) {
                    0 => {
                        world.front_end.leave(id, by()).unwrap();
                        service.stop(by()).unwrap();
                    }
                    1 => _ = service.stop(by()).unwrap(),
                    _ => drop(service),
                }
                world.wait_for("departure", |ends| ends.gone.load(Ordering::Acquire) == change);
                nodes.push(world.add_node());
            }
            is_over.store(true, Ordering::Release);
            canceller.join().unwrap()
        });
        let World { front_end, .. } = world;
        let (_, vanishing) = nodes.remove(0);
        scope.spawn(move || drop(vanishing));
        // The other node answers all queries, or a part before they are cancelled.
        let until = if seed.is_multiple_of(2) {
            by()
        } else {
            clock::now().after(Duration::from_millis(1))
        };
        let (recorder, counts) = front_end.stop(until).unwrap();
        (recorder, counts, cancelled)
    });
    let accepted: Vec<u64> = accepted.into_iter().map(AtomicU64::into_inner).collect();
    let (ended, ends) = (counts.answered + counts.failed, recorder.ends);
    println!("seed {seed} over {}: {counts:?}, {} cancelled", provider.name(), cancelled.len());
    assert_eq!((counts.submitted, ended), (accepted.iter().sum(), counts.submitted));
    let counts = ends.counts.lock().unwrap();
    for (token, count) in (0u64..).zip(counts.iter()) {
        if token % QUERIES < accepted[(token / QUERIES) as usize] {
            assert!([[1, 0, 1], [0, 1, 1]].contains(count), "{token}: {count:?}");
        } else {
            assert_eq!(*count, [0; 3], "{token} was not accepted");
        }
    }
    assert!(cancelled.iter().all(|token| counts[*token as usize] == [0, 1, 1]));
    let failures = ends.failures.lock().unwrap();
    assert!(failures.iter().all(|failure| !matches!(failure, Failure::Refused { .. })));
    for (_, service) in nodes {
        service.stop(by()).unwrap();
    }
    cancelled.len()
}

#[test]
fn submissions_and_cancels_during_changes_of_nodes_and_a_stop_end_once() {
    let mut cancelled = 0;
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
        for seed in 0..2 {
            cancelled += each_accepted_query_ends_once(provider, seed);
        }
    }
    // Few in one run if other processes take the cores.
    assert!(cancelled > 0);
}
