//! Signals and credits that a rank posts just before it drops the communicator.

use crate::{KINDS, counters, two_that_leave, wait, waiting};
use std::time::Duration;
use weft_fabric::{Communicator, CounterId, Progress, Rank};

const MANY: usize = 300;

/// Way to leave, with a description.
type Leaves = (&'static str, fn(Communicator));

const WAYS: [Leaves; 3] = [
    ("drops it", drop),
    ("closes it first", |communicator| {
        communicator.close();
        drop(communicator);
    }),
    ("sends its leave message first", |communicator| {
        communicator.close();
        communicator.leave();
        drop(communicator);
    }),
];

#[test]
fn signals_and_credits_given_just_before_a_communicator_goes_arrive() {
    for (kind, progress) in KINDS.into_iter().flat_map(|kind| {
        [Progress::Caller, Progress::Thread, Progress::Epoll].map(|progress| (kind, progress))
    }) {
        for (how, leave) in WAYS {
            two_that_leave(kind, progress, Duration::ZERO, |communicator, peer| {
                let counters: [CounterId; MANY] = counters(&communicator);
                if communicator.rank() == Rank(0) {
                    for &counter in &counters {
                        communicator.engine().signal(peer, counter, 0).unwrap();
                    }
                    communicator.engine().flush();
                    for &counter in counters.iter().rev() {
                        waiting(&communicator, |waiter| {
                            communicator.wait_for_credit(counter, peer, 1, waiter)
                        })
                        .unwrap_or_else(|error| panic!("{kind}, {progress:?}, {how}: {error}"));
                        wait(&communicator, counter, peer);
                    }
                    return;
                }
                for &counter in &counters {
                    wait(&communicator, counter, peer);
                }
                let mut engine = communicator.engine();
                for &counter in &counters {
                    engine.signal(peer, counter, 0).unwrap();
                    // It waits for the next flush.
                    engine.credit(peer, counter).unwrap();
                }
                drop(engine);
                leave(communicator);
            });
        }
    }
}
