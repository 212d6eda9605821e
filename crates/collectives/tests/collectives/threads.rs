//! Several threads on a rank.

use crate::{KINDS, on_threads, sum_of, sum_of_all, vector};
use std::sync::Mutex;
use weft_collectives::CollectivesConfig;

/// Threads start their calls under a lock, in the same order on all ranks, and wait without it.
#[test]
fn threads_may_wait_for_calls_of_their_own() {
    const CALLS: usize = 60;
    for kind in KINDS {
        on_threads(2, kind, CollectivesConfig::default(), |member| {
            let next = Mutex::new(0);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        loop {
                            let mut number = next.lock().unwrap();
                            let call = *number;
                            if call == CALLS {
                                return;
                            }
                            *number += 1;
                            let length = 1 + call * call * 10;
                            let mut mine = vector(length, call as u64, member.rank());
                            let id = member.start(&sum_of(&mut mine)).unwrap();
                            drop(number);
                            member.wait_for(id, crate::PATIENCE).unwrap();
                            assert!(mine == sum_of_all(length, call as u64, 2), "call {call}");
                        }
                    });
                }
            });
        });
    }
}
