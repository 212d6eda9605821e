//! Barriers that time out and are repeated.

use crate::common::{PATIENCE, waiting};
use crate::{KINDS, peer_of, shared, two};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_fabric::{EngineConfig, Error};

/// Rank 0 times out in a barrier before rank 1 enters it, twice. The repeats are the same barrier: each
/// rank leaves it once the other has entered, and later barriers work too.
#[test]
fn a_barrier_that_timed_out_is_continued_by_its_repeat() {
    for kind in KINDS {
        let entered = [const { AtomicU32::new(0) }; 2];
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            let (me, peer) = (engine.rank().0 as usize, peer_of(&engine));
            let counter = shared(&mut engine, gather);
            engine.use_for_barriers(counter);
            let short = Duration::from_millis(20);
            if me == 0 {
                entered[0].store(1, Ordering::SeqCst);
                for _ in 0..2 {
                    let late = waiting(short, Duration::ZERO, |waiter| engine.barrier(waiter));
                    let Err(Error::Timeout { missing, .. }) = late else { panic!("{late:?}") };
                    assert_eq!((missing.len(), missing[0].rank), (1, peer));
                }
                // The repeated barrier has signalled once, not once each time.
                assert_eq!(engine.next_round(counter, peer).unwrap(), 1);
            }
            gather(Vec::new());
            for barrier in 1..=4 {
                entered[me].store(barrier, Ordering::SeqCst);
                waiting(PATIENCE, Duration::ZERO, |waiter| engine.barrier(waiter)).unwrap();
                let theirs = entered[1 - me].load(Ordering::SeqCst);
                assert!(
                    theirs >= barrier,
                    "{kind}: left barrier {barrier}, the peer is at {theirs}"
                );
            }
            assert_eq!(engine.next_round(counter, peer).unwrap(), 4);
            gather(Vec::new());
            assert_eq!(engine.count(counter, peer).unwrap(), 0);
            gather(Vec::new());
        });
    }
}

/// Both ranks time out in turn, each before the other has entered.
#[test]
fn a_barrier_that_timed_out_at_both_ranks_is_continued_by_both() {
    for kind in KINDS {
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            let counter = shared(&mut engine, gather);
            engine.use_for_barriers(counter);
            // Rank 0's first attempt ends before rank 1's begins.
            for turn in 0..2 {
                if engine.rank().0 == turn {
                    let limit = if turn == 0 { Duration::from_millis(20) } else { PATIENCE };
                    let ended = waiting(limit, Duration::ZERO, |waiter| engine.barrier(waiter));
                    // Rank 1 finds that rank 0 has entered, although it timed out.
                    let late = matches!(ended, Err(Error::Timeout { .. }));
                    assert_eq!(late, turn == 0, "{ended:?}");
                }
                gather(Vec::new());
            }
            if engine.rank().0 == 0 {
                waiting(PATIENCE, Duration::ZERO, |waiter| engine.barrier(waiter)).unwrap();
            }
            for _ in 0..3 {
                waiting(PATIENCE, Duration::ZERO, |waiter| engine.barrier(waiter)).unwrap();
            }
            gather(Vec::new());
        });
    }
}
