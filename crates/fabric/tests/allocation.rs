//! Loops over counts and credits that never ask what rose take no memory, however long they run.

mod common;

use common::{PATIENCE, connect, on_threads, soon};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;
use weft_fabric::descriptor::Grant;
use weft_fabric::providers::{ShmConfig, ShmDevice, TcpConfig, TcpDevice};
use weft_fabric::{CounterId, Device, Engine, EngineConfig, Generation, ProviderKind, Rank};

/// The system's allocator; counts the allocations of this thread while counting is on.
struct Counting;

thread_local! {
    static COUNTED: Cell<Option<usize>> = const { Cell::new(None) };
}

fn note() {
    COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
}

// SAFETY: everything is the system allocator's; counting touches a plain thread-local cell, which
// needs no allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Rounds before allocations are counted: buffers have grown to what they need by then.
const WARM: u64 = 100;
/// A list with an entry for each raise would grow several times in as many.
const ROUNDS: u64 = 2_000;

/// A round each way, found by looking at count and credits alone.
fn trade(engine: &mut Engine, counter: CounterId, round: u64) {
    let peer = Rank(1 - engine.rank().0);
    let begin = Instant::now();
    engine.signal(peer, counter, round).unwrap();
    while engine.count(counter, peer).unwrap() == 0 {
        engine.progress();
        assert!(begin.elapsed() < PATIENCE, "the signal of round {round} does not come");
    }
    engine.credit(peer, counter).unwrap();
    engine.flush();
    while engine.credits(counter, peer).unwrap() == round {
        engine.progress();
        assert!(begin.elapsed() < PATIENCE, "the credit of round {round} does not come");
    }
}

#[test]
fn rounds_whose_raises_are_not_asked_for_allocate_nothing() {
    for kind in [ProviderKind::Shm, ProviderKind::Tcp] {
        on_threads(2, |me, gather| {
            let device: Arc<dyn Device> = match kind {
                ProviderKind::Shm => Arc::new(ShmDevice::new(ShmConfig { host_id: "this".into() })),
                _ => Arc::new(TcpDevice::new(TcpConfig::default()).unwrap()),
            };
            let config = EngineConfig::default();
            let mut engine = Engine::new(config, me, 2, Generation(3), &[device]).unwrap();
            connect(&mut engine, gather, soon(20)).unwrap();
            let (counter, peer) = (engine.counter().unwrap(), Rank(1 - me.0));
            let grants = gather(engine.grant(peer, &[], &[counter]).unwrap().encode());
            let grant = Grant::decode(&grants[peer.0 as usize]).unwrap();
            engine.import(peer, &grant, &[counter], soon(20)).unwrap();
            (0..WARM).for_each(|round| trade(&mut engine, counter, round));
            COUNTED.set(Some(0));
            (WARM..WARM + ROUNDS).for_each(|round| trade(&mut engine, counter, round));
            let allocations = COUNTED.take().unwrap();
            assert_eq!(allocations, 0, "{kind}: allocations in {ROUNDS} rounds");
            // `raised` still returns the lane, once.
            assert!(engine.raised().len() <= 1);
            gather(Vec::new());
        });
    }
}
