//! Ends for waits that never sleep: waits that spin for long, and waits with a steady stream of events.

use super::{KINDS, counters, promptly, signal, soon, two, two_that_leave, wait};
use std::sync::mpsc;
use std::time::Duration;
use weft_fabric::{Error, Progress, Rank, WaitOptions, clock};

/// Limit for a wait that ends sooner, and longer than a departure's grace.
const LIMIT: Duration = Duration::from_secs(10);
/// Longer than [`LIMIT`]: the wait does not park.
const SPIN: Duration = Duration::from_secs(20);

#[test]
fn an_interrupt_ends_a_wait_that_has_events_all_the_time() {
    for kind in KINDS {
        two(kind, Progress::Caller, SPIN, |communicator, peer| {
            let [never, stream, end] = counters(communicator);
            if communicator.rank() == Rank(1) {
                while communicator.engine().count(end, peer).unwrap() == 0 {
                    signal(communicator, peer, stream);
                    communicator.engine().progress();
                }
                return;
            }
            wait(communicator, stream, peer);
            let mut pressed = || true;
            let deadline = clock::now().after(LIMIT);
            let mut waiter = WaitOptions { deadline, spin: SPIN, interrupted: &mut pressed };
            let ended = communicator.wait(never, &[(peer, 1)], &mut waiter);
            signal(communicator, peer, end);
            communicator.engine().flush();
            assert!(matches!(ended, Err(Error::Interrupted)), "{kind}: {ended:?}");
        });
    }
}

#[test]
fn the_departure_of_a_peer_ends_a_wait_that_spins() {
    for kind in KINDS {
        let (left, seen) = mpsc::channel();
        let seen = std::sync::Mutex::new(seen);
        two_that_leave(kind, Progress::Caller, SPIN, |communicator, peer| {
            let [never] = counters(&communicator);
            if communicator.rank() == Rank(1) {
                communicator.leave();
                left.send(()).unwrap();
                return;
            }
            promptly(&seen.lock().unwrap(), "the departure");
            let mut no = || false;
            let mut waiter = communicator.wait_options(soon(), &mut no);
            waiter.deadline = clock::now().after(LIMIT);
            let ended = communicator.wait(never, &[(peer, 1)], &mut waiter);
            let text = format!("{ended:?}");
            assert!(matches!(ended, Err(Error::Poisoned(_))), "{kind}: {text}");
        });
    }
}
