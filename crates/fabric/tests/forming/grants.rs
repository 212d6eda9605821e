//! Grants from a peer that dies, or whose memory does not arrive.

use crate::{Introduced, PATIENCE, PROMPT, assert_lost, join, two};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};
use weft_control::{Cause, Control, Operation, Poison};
use weft_fabric::{
    Communicator, Engine, Error, Grant, ProviderKind, Rank, RegionGrant, RegionKey, RemoteRegion,
    Result, clock,
};

/// Rank 1 in a group: an engine that a test drives by hand.
struct ManualRank {
    control: Control,
    engine: Engine,
}

impl ManualRank {
    /// Rank 1's side of `Communicator::over`.
    fn join(control: Control, kind: ProviderKind) -> ManualRank {
        let engine = Introduced::new(&control, kind).connect();
        let mut by_hand = ManualRank { control, engine };
        let counter = by_hand.engine.counter().unwrap();
        let grant = by_hand.engine.grant(Rank(0), &[], &[counter]).unwrap();
        let theirs = by_hand.exchange_grants(&grant);
        let deadline = clock::now().after(PATIENCE);
        by_hand.engine.import(Rank(0), &theirs, &[counter], deadline).unwrap();
        by_hand
    }

    /// Rank 1's side of the grant exchange in `Communicator::share`.
    fn exchange_grants(&self, grant: &Grant) -> Grant {
        let grants = [grant.encode(), Vec::new()];
        let traded = self.control.exchange_as(Operation::Share, &grants, PATIENCE).unwrap();
        Grant::decode(&traded[0]).unwrap()
    }

    /// Grants a region over shm without sending a descriptor.
    fn grant_without_memory(&self) {
        let entry = u64::MAX.to_le_bytes().to_vec();
        let region = RegionGrant { key: RegionKey(9), length: 8, entry };
        self.exchange_grants(&Grant { regions: vec![region], counters: Vec::new() });
    }

    /// Ends as a killed process, closing connections in this order.
    fn dies(self, links_first: bool) {
        let ManualRank { control, engine } = self;
        let kept = (!links_first).then_some(engine);
        if links_first {
            std::thread::sleep(Duration::from_millis(300));
        }
        control.abandon();
        std::thread::sleep(Duration::from_millis(300));
        drop(kept);
    }
}

fn share(communicator: &Communicator) -> Result<Vec<Vec<RemoteRegion>>> {
    let region = communicator.engine().alloc(64).unwrap();
    communicator.share(&[(&region, 0..64)], &[], clock::now().after(PATIENCE))
}

#[test]
fn a_peer_that_dies_while_grants_are_exchanged_is_lost() {
    for kind in [ProviderKind::Shm, ProviderKind::Tcp] {
        for (links_first, granted) in [(true, false), (true, true), (false, false), (false, true)] {
            if granted && kind == ProviderKind::Tcp {
                // Over tcp a grant needs no memory descriptor.
                continue;
            }
            let [here, there] = two(1, |_| {});
            let (begun, begin) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let by_hand = ManualRank::join(there, kind);
                    begun.send(()).unwrap();
                    if granted {
                        by_hand.grant_without_memory();
                    }
                    by_hand.dies(links_first);
                });
                let communicator = join(here, kind).unwrap();
                begin.recv().unwrap();
                if !granted {
                    // It finds the links broken.
                    std::thread::sleep(Duration::from_millis(50));
                }
                let since = Instant::now();
                let error = share(&communicator).unwrap_err();
                let what = format!("{kind}, links first: {links_first}, granted: {granted}");
                assert_lost(&error, 1, &what);
                assert!(since.elapsed() < PROMPT, "{what}");
            });
        }
    }
}

/// Error from a wait at rank 0 for memory from rank 1 that does not arrive. `meanwhile` runs beside that
/// wait, `interrupt` within it.
fn waits_for_memory(interrupt: fn(&Communicator), meanwhile: fn(&Communicator)) -> Error {
    let communicator: Arc<OnceLock<Arc<Communicator>>> = Arc::default();
    let [here, there] = two(1, |config| {
        let slot = communicator.clone();
        let is_here = config.rank == Rank(0);
        config.interrupt = Some(Arc::new(move || {
            if let Some(communicator) = slot.get().filter(|_| is_here) {
                interrupt(communicator);
            }
            false
        }));
    });
    let (ended, end) = mpsc::channel();
    let (done, until_done) = mpsc::channel::<()>();
    let there = std::thread::spawn(move || {
        let by_hand = ManualRank::join(there, ProviderKind::Shm);
        by_hand.grant_without_memory();
        let _ = until_done.recv_timeout(PATIENCE);
    });
    let here = Arc::new(join(here, ProviderKind::Shm).unwrap());
    let _ = communicator.set(here.clone());
    let shares = here.clone();
    // Threads are not joined, as they may hang.
    std::thread::spawn(move || ended.send(share(&shares).unwrap_err()).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    let (returned, returns) = mpsc::channel();
    std::thread::spawn(move || {
        meanwhile(&here);
        returned.send(()).unwrap();
    });
    returns.recv_timeout(PROMPT).expect("a call waits for the wait of another thread");
    let error = end.recv_timeout(PROMPT).expect("the wait for memory hangs");
    drop(done);
    there.join().unwrap();
    error
}

fn test_poison() -> Poison {
    Poison { kind: Cause::User, rank: Some(Rank(0)), detail: "enough".into() }
}

/// Calls the communicator as a signal handler does.
#[test]
fn an_interrupt_may_call_the_communicator_while_memory_is_awaited() {
    let error = waits_for_memory(
        |communicator| {
            communicator.engine().statistics();
            communicator.poison(test_poison());
        },
        |_| {},
    );
    assert!(error.to_string().contains("enough"), "{error}");
}

#[test]
fn a_call_of_another_thread_does_not_wait_for_awaited_memory() {
    let error = waits_for_memory(|_| {}, |communicator| communicator.poison(test_poison()));
    assert!(error.to_string().contains("enough"), "{error}");
}
