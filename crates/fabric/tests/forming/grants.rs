//! Grants of a peer that dies, or whose memory does not come.

use crate::{Introduced, PATIENCE, PROMPT, assert_lost, join, two};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};
use weft_control::{Cause, Control, Operation, Poison};
use weft_fabric::descriptor::{Grant, RegionGrant};
use weft_fabric::{
    Communicator, Engine, Error, ProviderKind, Rank, RegionKey, RemoteRegion, Result, clock,
};

/// Rank 1 of a group: an engine that a test drives by hand.
struct ByHand {
    control: Control,
    engine: Engine,
}

impl ByHand {
    /// Its part in `Communicator::over`.
    fn join(control: Control, kind: ProviderKind) -> ByHand {
        let engine = Introduced::new(&control, kind).connect();
        let mut by_hand = ByHand { control, engine };
        let counter = by_hand.engine.counter().unwrap();
        let grant = by_hand.engine.grant(Rank(0), &[], &[counter]).unwrap();
        let theirs = by_hand.trade(&grant);
        let deadline = clock::now().after(PATIENCE);
        by_hand.engine.import(Rank(0), &theirs, &[counter], deadline).unwrap();
        by_hand
    }

    /// Its part in the exchange of grants of `Communicator::share`.
    fn trade(&self, grant: &Grant) -> Grant {
        let grants = [grant.encode(), Vec::new()];
        let traded = self.control.exchange_as(Operation::Share, &grants, PATIENCE).unwrap();
        Grant::decode(&traded[0]).unwrap()
    }

    /// Grants a region over shm whose descriptor it never sends.
    fn grant_without_memory(&self) {
        let entry = u64::MAX.to_le_bytes().to_vec();
        let region = RegionGrant { key: RegionKey(9), length: 8, entry };
        self.trade(&Grant { regions: vec![region], counters: Vec::new() });
    }

    /// Ends as a process that is killed, with its connections in this order.
    fn dies(self, links_first: bool) {
        let ByHand { control, engine } = self;
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
                // Over tcp memory is not sent apart from the grant.
                continue;
            }
            let [here, there] = two(1, |_| {});
            let (begun, begin) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let by_hand = ByHand::join(there, kind);
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

/// Rank 0 waits for memory of rank 1 that does not come. `meanwhile` runs beside that wait, `interrupt`
/// within it; the error of the wait.
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
        let by_hand = ByHand::join(there, ProviderKind::Shm);
        by_hand.grant_without_memory();
        let _ = until_done.recv_timeout(PATIENCE);
    });
    let here = Arc::new(join(here, ProviderKind::Shm).unwrap());
    let _ = communicator.set(here.clone());
    let shares = here.clone();
    // Neither is joined: it may hang.
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

fn enough() -> Poison {
    Poison { kind: Cause::User, rank: Some(Rank(0)), detail: "enough".into() }
}

/// As the handler of a signal does.
#[test]
fn an_interrupt_may_call_the_communicator_while_memory_is_awaited() {
    let error = waits_for_memory(
        |communicator| {
            communicator.engine().statistics();
            communicator.poison(enough());
        },
        |_| {},
    );
    assert!(error.to_string().contains("enough"), "{error}");
}

#[test]
fn a_call_of_another_thread_does_not_wait_for_awaited_memory() {
    let error = waits_for_memory(|_| {}, |communicator| communicator.poison(enough()));
    assert!(error.to_string().contains("enough"), "{error}");
}
