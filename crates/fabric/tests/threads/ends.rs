//! Wait ends: each for a separate cause, without effect on another thread's.

use crate::{KINDS, SPINS, counters, promptly, signal, soon, two, wait, waiting};
use std::sync::mpsc;
use std::time::Duration;
use weft_fabric::{
    Cause, Communicator, CounterId, Error, Grant, Poison, Progress, ProviderKind, Rank,
    RegionGrant, RegionKey, Result, clock,
};

/// The first thread's wait ends only after the second thread's calls.
#[test]
fn no_call_waits_for_the_wait_of_another_thread() {
    for (kind, spin) in KINDS.into_iter().flat_map(|kind| SPINS.map(|spin| (kind, spin))) {
        two(kind, Progress::Caller, spin, |communicator, peer| {
            let [last, calls, through] = counters(communicator);
            const CALLS: u64 = 200;
            if communicator.rank() == Rank(1) {
                for _ in 0..CALLS {
                    wait(communicator, calls, peer);
                    communicator.engine().credit(peer, calls).unwrap();
                    communicator.engine().flush();
                }
                wait(communicator, through, peer);
                signal(communicator, peer, last);
                return;
            }
            let (sender, receiver) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(|| wait(communicator, last, peer));
                scope.spawn(move || {
                    for round in 0..CALLS {
                        communicator.engine().signal(peer, calls, round).unwrap();
                        while communicator.engine().credits(calls, peer).unwrap() == round {
                            communicator.engine().progress();
                        }
                    }
                    sender.send(()).unwrap();
                });
                promptly(&receiver, "the end of the second thread's calls");
                signal(communicator, peer, through);
            });
        });
    }
}

#[test]
fn a_wait_whose_deadline_passes_leaves_the_others_waiting() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [never, late, tell] = counters(communicator);
            if communicator.rank() == Rank(1) {
                wait(communicator, tell, peer);
                return signal(communicator, peer, late);
            }
            std::thread::scope(|scope| {
                scope.spawn(|| wait(communicator, late, peer));
                let short = [10, 30, 60].map(|ms| {
                    scope.spawn(move || {
                        let mut no = || false;
                        let deadline = clock::now().after(Duration::from_millis(ms));
                        let mut waiter = communicator.wait_options(deadline, &mut no);
                        let error = communicator.wait(never, &[(peer, 1)], &mut waiter);
                        assert!(matches!(error, Err(Error::Timeout { .. })), "{error:?}");
                    })
                });
                short.into_iter().for_each(|thread| thread.join().unwrap());
                signal(communicator, peer, tell);
            });
        });
    }
}

/// Four threads wait for raises that do not arrive; `end` must end all waits.
fn all_end(
    progress: Progress,
    end: impl Fn(&Communicator) + Sync,
    of: impl Fn(&Error) -> bool + Sync,
) {
    for (kind, spin) in KINDS.into_iter().flat_map(|kind| SPINS.map(|spin| (kind, spin))) {
        two(kind, progress, spin, |communicator, peer| {
            let counters: [CounterId; 4] = counters(communicator);
            if communicator.rank() == Rank(1) {
                return;
            }
            let (sender, receiver) = mpsc::channel();
            std::thread::scope(|scope| {
                for &counter in &counters {
                    let sender = sender.clone();
                    scope.spawn(move || {
                        sender.send(Ok(())).unwrap();
                        sender.send(lacks(communicator, counter, peer)).unwrap();
                    });
                }
                for _ in &counters {
                    promptly(&receiver, "the begin of a wait").unwrap();
                }
                end(communicator);
                for _ in &counters {
                    let error = promptly(&receiver, "the end of a wait").unwrap_err();
                    assert!(of(&error), "{error}");
                }
            });
            let again = lacks(communicator, counters[0], peer).unwrap_err();
            assert!(of(&again), "{again}");
        });
    }
}

fn lacks(communicator: &Communicator, counter: CounterId, peer: Rank) -> Result<()> {
    waiting(communicator, |waiter| communicator.wait(counter, &[(peer, 1)], waiter))
}

#[test]
fn a_close_by_another_thread_ends_all_waits() {
    let closed = |error: &Error| matches!(error, Error::Control(weft_control::Error::Closed));
    all_end(Progress::Caller, Communicator::close, closed);
    all_end(Progress::Thread, Communicator::close, closed);
}

#[test]
fn a_close_by_a_thread_that_holds_the_engine_returns() {
    for kind in KINDS {
        two(kind, Progress::Thread, Duration::ZERO, |communicator, _| {
            let engine = communicator.engine();
            communicator.close();
            drop(engine);
        });
    }
}

#[test]
fn poison_ends_all_waits() {
    let cause = || Poison { kind: Cause::User, rank: None, detail: "enough".into() };
    let poison = |communicator: &Communicator| communicator.poison(cause());
    let poisoned = |error: &Error| matches!(error, Error::Poisoned(_));
    all_end(Progress::Caller, poison, poisoned);
    all_end(Progress::Thread, poison, poisoned);
}

/// A panic under the engine's lock, and one in a waiting thread between two sleeps.
#[test]
fn threads_that_panic_leave_the_others_waiting() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [never, late, tell] = counters(communicator);
            if communicator.rank() == Rank(1) {
                wait(communicator, tell, peer);
                return signal(communicator, peer, late);
            }
            std::thread::scope(|scope| {
                let waits = [(); 2].map(|()| scope.spawn(|| wait(communicator, late, peer)));
                let holds = scope.spawn(|| {
                    let _engine = communicator.engine();
                    std::panic::resume_unwind(Box::new("a holder of the lock"));
                });
                let asked = scope.spawn(|| {
                    let mut asked = 0;
                    let mut interrupted = || {
                        asked += 1;
                        if asked == 3 {
                            std::panic::resume_unwind(Box::new("between two sleeps"));
                        }
                        false
                    };
                    let mut waiter = communicator.wait_options(soon(), &mut interrupted);
                    communicator.wait(never, &[(peer, 1)], &mut waiter)
                });
                assert!(holds.join().is_err() && asked.join().is_err());
                signal(communicator, peer, tell);
                waits.into_iter().for_each(|wait| wait.join().unwrap());
            });
        });
    }
}

/// A counter with a window: a credit from another thread opens a round that has already arrived.
#[test]
fn a_credit_of_another_thread_ends_the_wait_for_the_round_after() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let config = weft_fabric::CounterConfig { window: 2, ..Default::default() };
            let ring = communicator.engine().counter_with(config).unwrap();
            communicator.share(&[], &[ring], soon()).unwrap();
            if communicator.rank() == Rank(1) {
                let mut engine = communicator.engine();
                engine.signal(peer, ring, 0).unwrap();
                for _ in 0..2 {
                    engine.signal(peer, ring, 1).unwrap();
                }
                return;
            }
            std::thread::scope(|scope| {
                let two = [(peer, 2)];
                let second = scope.spawn(move || {
                    waiting(communicator, |waiter| communicator.wait(ring, &two, waiter))
                });
                while communicator.engine().count_in(ring, peer, 1).unwrap() < 2 {
                    communicator.engine().progress();
                    std::thread::yield_now();
                }
                communicator.engine().credit(peer, ring).unwrap();
                second.join().unwrap().unwrap();
            });
        });
    }
}

/// If two threads enter a barrier at once, the second is rejected, and later barriers work.
#[test]
fn a_barrier_of_a_second_thread_is_refused_and_disturbs_no_other() {
    for kind in KINDS {
        two(kind, Progress::Caller, Duration::ZERO, |communicator, peer| {
            let [entered] = counters(communicator);
            let barrier = || waiting(communicator, |waiter| communicator.barrier(waiter));
            if communicator.rank() == Rank(1) {
                wait(communicator, entered, peer);
                barrier().unwrap();
            } else {
                std::thread::scope(|scope| {
                    let first = scope.spawn(barrier);
                    // It is inside once the signal has left.
                    while communicator.engine().statistics().peers[0].totals.parts == 0 {
                        std::thread::yield_now();
                    }
                    let mut no = || false;
                    let short = clock::now().after(Duration::from_millis(500));
                    let second =
                        communicator.barrier(&mut communicator.wait_options(short, &mut no));
                    assert!(matches!(second, Err(Error::InProgress { .. })), "{second:?}");
                    signal(communicator, peer, entered);
                    first.join().unwrap().unwrap();
                });
            }
            for _ in 0..3 {
                barrier().unwrap();
            }
        });
    }
}

/// Grant over shm for a region whose descriptor is never sent.
fn grant_without_memory() -> Grant {
    let entry = 7u64.to_le_bytes().to_vec();
    let regions = vec![RegionGrant { key: RegionKey(9), length: 8, entry }];
    Grant { regions, counters: Vec::new() }
}

/// Rank 1 never sends the descriptor that rank 0 waits for; rank 0 waits with the lock on the peers'
/// links, not with the engine's lock.
#[test]
fn an_import_that_waits_for_its_peer_holds_up_no_other_call() {
    two(ProviderKind::Shm, Progress::Caller, Duration::ZERO, |communicator, peer| {
        if communicator.rank() == Rank(1) {
            return;
        }
        let grant = grant_without_memory();
        let (sender, receiver) = mpsc::channel();
        let (done, called) = mpsc::channel();
        std::thread::scope(|scope| {
            let import = scope.spawn(move || {
                communicator.retry_until(soon(), |engine, limit| {
                    let _ = sender.send(());
                    engine.import_within(peer, &grant, &[], limit)
                })
            });
            promptly(&receiver, "the begin of the import");
            scope.spawn(move || {
                for _ in 0..100 {
                    communicator.engine().progress();
                }
                communicator.close();
                done.send(()).unwrap();
            });
            promptly(&called, "calls beside an import");
            let ended = import.join().unwrap();
            assert!(matches!(ended, Err(Error::Control(weft_control::Error::Closed))), "{ended:?}");
        });
    });
}

#[test]
fn an_import_without_its_region_names_its_peer_at_the_deadline() {
    two(ProviderKind::Shm, Progress::Caller, Duration::ZERO, |communicator, peer| {
        if communicator.rank() == Rank(1) {
            return;
        }
        let grant = grant_without_memory();
        let deadline = clock::now().after(Duration::from_millis(50));
        let ended = communicator
            .retry_until(deadline, |engine, limit| engine.import_within(peer, &grant, &[], limit));
        let named = |error: &Error| matches!(error, Error::Connect { peer: Rank(1), .. });
        assert!(ended.as_ref().is_err_and(named), "{ended:?}");
    });
}
