//! Submissions from threads that never wait for the lock: each outcome is delivered once.

use crate::{KINDS, PATIENCE, soon, two, two_that_leave, waiting};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weft_fabric::{
    Communicator, CounterConfig, CounterId, Error, OutcomeCallback, Page, Progress, ProviderKind,
    Rank, Region, SubmissionDescriptor,
};

const THREADS: u64 = 4;
/// Rounds that may be open at a time; a write beyond them is rejected.
const WINDOW: u64 = 256;
const SLICE: u64 = 8;
const SLICES: u64 = 3;
/// Bytes in a round at the peer: slices at twice the distance.
const STRIDE: u64 = 2 * SLICE;
const ROUND: u64 = SLICES * STRIDE;

/// Outcome and error counts, by tag.
type Seen = Arc<Mutex<BTreeMap<u64, (u32, u32)>>>;

fn recorder() -> (Seen, Arc<OutcomeCallback>) {
    let seen = Seen::default();
    let record = seen.clone();
    let outcomes: Arc<OutcomeCallback> = Arc::new(move |tag, result: Result<(), String>| {
        let mut seen = record.lock().unwrap();
        let entry = seen.entry(tag).or_default();
        entry.0 += 1;
        entry.1 += u32::from(result.is_err());
    });
    (seen, outcomes)
}

fn ring(communicator: &Communicator) -> CounterId {
    let config = CounterConfig { window: WINDOW as u32, ..CounterConfig::default() };
    communicator.engine().counter_with(config).unwrap()
}

/// Pushes until the queue accepts it.
fn push(
    communicator: &weft_fabric::Submitter,
    what: SubmissionDescriptor,
    to: &Arc<OutcomeCallback>,
) {
    while let Err(full) = communicator.push(what, to) {
        assert!(matches!(full, Error::Limit { .. }), "{full}");
        std::thread::yield_now();
    }
}

/// Polls until `count` outcomes are delivered.
fn settle(communicator: &Communicator, seen: &Seen, count: usize) {
    let begin = Instant::now();
    while seen.lock().unwrap().len() < count {
        assert!(begin.elapsed() < PATIENCE, "{} of {count}", seen.lock().unwrap().len());
        communicator.engine().progress();
        std::thread::yield_now();
    }
}

#[test]
fn submissions_of_four_threads_end_once_each() {
    for (kind, progress) in
        KINDS.into_iter().flat_map(|kind| [(kind, Progress::Caller), (kind, Progress::Thread)])
    {
        two(kind, progress, Duration::ZERO, |communicator, peer| {
            let counters: Vec<CounterId> = (0..THREADS).map(|_| ring(communicator)).collect();
            let bytes = THREADS * WINDOW * ROUND;
            let region = communicator.engine().alloc(bytes as usize).unwrap();
            let grants = communicator.share(&[(&region, 0..bytes)], &counters, soon()).unwrap();
            if communicator.rank() == Rank(0) {
                submit(communicator, peer, &counters, &region, grants[peer.index()][0].key);
            } else {
                receive(communicator, peer, &counters, &region);
            }
        });
    }
}

fn submit(
    communicator: &Communicator,
    peer: Rank,
    counters: &[CounterId],
    source: &Region,
    destination: weft_fabric::RegionKey,
) {
    let bytes: Vec<u8> = (0..source.memory().len()).map(|at| (at % 251) as u8).collect();
    source.memory().copy_in(0, &bytes);
    let (seen, outcomes) = recorder();
    let submitter = communicator.submitter();
    std::thread::scope(|scope| {
        for (thread, &counter) in (0..THREADS).zip(counters) {
            let (submitter, outcomes) = (submitter.clone(), outcomes.clone());
            scope.spawn(move || {
                let tag = |number: u64| thread << 32 | number;
                for round in 0..WINDOW {
                    let offset = (thread * WINDOW + round) * ROUND;
                    let page = Page {
                        source: source.key(),
                        source_offset: offset,
                        destination,
                        destination_offset: offset,
                        length: SLICE,
                    };
                    let mut write =
                        SubmissionDescriptor::write(peer, counter, round, page, tag(round));
                    write.count = SLICES as u32;
                    (write.source_stride, write.destination_stride) = (STRIDE, STRIDE);
                    push(&submitter, write, &outcomes);
                    // No round from the peer has arrived.
                    let credit = SubmissionDescriptor::credit(peer, counter, tag(1 << 20 | round));
                    push(&submitter, credit, &outcomes);
                    // Far beyond the window, whatever the peer has credited.
                    let mut beyond = write;
                    (beyond.round, beyond.tag) = (round + (1 << 30), tag(1 << 21 | round));
                    push(&submitter, beyond, &outcomes);
                }
            });
        }
        settle(communicator, &seen, (THREADS * WINDOW * 3) as usize);
    });
    for (tag, &(count, errors)) in seen.lock().unwrap().iter() {
        let refused = tag & (1 << 20 | 1 << 21) != 0;
        assert_eq!((count, errors), (1, u32::from(refused)), "submission {tag:x}");
    }
}

fn receive(communicator: &Communicator, peer: Rank, counters: &[CounterId], inbox: &Region) {
    let lengths = [SLICE; SLICES as usize];
    let parts = communicator.engine().route(peer).unwrap().parts.count(lengths);
    for (thread, &counter) in (0..THREADS).zip(counters) {
        for round in 0..WINDOW {
            let expected = [(peer, parts)];
            waiting(communicator, |waiter| communicator.wait(counter, &expected, waiter)).unwrap();
            for slice in 0..SLICES {
                let at = (thread * WINDOW + round) * ROUND + slice * STRIDE;
                let mut seen = [0; SLICE as usize];
                inbox.memory().copy_out(at as usize, &mut seen);
                let right = |(byte, at): (&u8, u64)| u64::from(*byte) == at % 251;
                assert!(seen.iter().zip(at..).all(right), "round {round} of {thread}");
            }
            communicator.engine().credit(peer, counter).unwrap();
        }
    }
    communicator.engine().flush();
}

/// While the lock is held the queue is not drained: it fills, returns an error, and is drained afterwards.
#[test]
fn a_full_queue_refuses_and_its_submissions_end_once_the_lock_is_free() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let counter = ring(communicator);
            communicator.share(&[], &[counter], soon()).unwrap();
            let (seen, outcomes) = recorder();
            let submitter = communicator.submitter();
            let engine = communicator.engine();
            let pushed = (0u64..)
                .take_while(|&tag| {
                    let submission = SubmissionDescriptor::credit(peer, counter, tag);
                    submitter.push(submission, &outcomes).is_ok()
                })
                .count();
            assert!(pushed >= 1024, "{pushed}");
            assert!(seen.lock().unwrap().is_empty());
            drop(engine);
            let seen = seen.lock().unwrap();
            assert_eq!(seen.len(), pushed);
            assert!(
                seen.values().all(|&outcome| outcome == (1, 1)),
                "a credit without an arrival was accepted"
            );
        });
    }
}

/// Drops a communicator with a write in flight that the peer does not read. The peer stays, without polls,
/// until the outcome is delivered: a peer that leaves would read, and the write might complete.
#[test]
fn a_submission_under_way_ends_with_its_communicator() {
    const LENGTH: u64 = 64 << 20;
    let (seen, outcomes) = recorder();
    two_that_leave(ProviderKind::Tcp, Progress::Caller, Duration::ZERO, |communicator, peer| {
        let counter = ring(&communicator);
        let region = communicator.engine().alloc(LENGTH as usize).unwrap();
        let grants = communicator.share(&[(&region, 0..LENGTH)], &[counter], soon()).unwrap();
        if communicator.rank() == Rank(1) {
            let begin = Instant::now();
            while seen.lock().unwrap().is_empty() && begin.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            return;
        }
        let (source, destination) = (region.key(), grants[peer.index()][0].key);
        let page =
            Page { source, source_offset: 0, destination, destination_offset: 0, length: LENGTH };
        let submitter = communicator.submitter();
        submitter.push(SubmissionDescriptor::write(peer, counter, 0, page, 7), &outcomes).unwrap();
        communicator.close();
        let late = submitter.push(SubmissionDescriptor::credit(peer, counter, 8), &outcomes);
        assert!(matches!(late, Err(Error::Control(weft_control::Error::Closed))), "{late:?}");
        assert!(seen.lock().unwrap().is_empty());
    });
    assert_eq!(*seen.lock().unwrap(), BTreeMap::from([(7, (1, 1))]));
}
