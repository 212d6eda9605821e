//! Backends on separate threads: the node polls, cancels and drains while they run; the answers are right.
#![cfg(not(miri))]

#[path = "faults/setup.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod setup;

use setup::{Front, Node, PATIENCE, Sum, is_full, listen, pair_with, until};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use weft_dispatch::{Backend, Batch, Failure, Report, Threaded};
use weft_fabric::ProviderKind;

/// Backend that reports each batch, and runs it once the test permits.
struct Gated {
    begun: Sender<u64>,
    gate: Receiver<()>,
}

impl Backend for Gated {
    fn run(&mut self, batch: &mut Batch<'_>) {
        let token = u64::from_le_bytes(batch.input(0, 0)[..8].try_into().unwrap());
        let _ = self.begun.send(token);
        let _ = self.gate.recv_timeout(PATIENCE);
        assert_ne!(token, 13, "the backend panics on query 13");
        Sum.run(batch);
    }
}

struct World {
    node: Node<Threaded>,
    front: Front,
    begun: Receiver<u64>,
    gate: Sender<()>,
    wakes: Arc<AtomicU64>,
}

fn connect(node: &mut Node<Threaded>) -> Front {
    let provider = ProviderKind::Shm;
    let listener = listen(provider);
    let (pair, front) = pair_with(&listener, provider, |pair| {
        let mut front = Front::new(8);
        front.join(pair);
        front
    });
    node.join(pair);
    front.join().unwrap()
}

/// Node with one gated thread and single-query batches.
fn world() -> World {
    let ((begun, begins), (gate, gated)) = (channel(), channel());
    let wakes = Arc::new(AtomicU64::new(0));
    let count = wakes.clone();
    let waker = move || _ = count.fetch_add(1, Ordering::Relaxed);
    let backend = Gated { begun, gate: gated };
    let threaded = Threaded::new([backend], Box::new(waker)).unwrap();
    let mut node = Node::on(threaded, 1, Duration::ZERO);
    let front = connect(&mut node);
    World { node, front, begun: begins, gate, wakes }
}

impl World {
    fn poll(&mut self) {
        self.front.poll().unwrap();
        self.node.poll().unwrap();
    }
}

#[test]
fn a_cancel_removes_a_query_that_has_not_begun_while_another_runs() {
    let mut world = world();
    let queries: Vec<_> = (0..4).map(|_| world.front.submit(PATIENCE).unwrap()).collect();
    until("the first batch", || {
        world.poll();
        world.begun.try_recv() == Ok(0) && world.node.accelerator.batches() == 2
    });
    // The first one runs, the second one is next, the others wait in the node.
    for query in [0, 1, 3] {
        world.front.front_end.cancel(queries[query]).unwrap();
    }
    let (mut failed, mut returned) = (Vec::new(), Vec::new());
    let mut count = |report: &Report<'_>| match report {
        Report::Failed { token, failure: Failure::Cancelled, .. } => failed.push(*token),
        Report::Returned { token, .. } => returned.push(*token),
        other => panic!("{other:?}"),
    };
    until("the memory of both", || {
        world.poll();
        world.front.take(&mut count);
        world.front.front_end.counts().quarantined == 1
    });
    assert_eq!(world.node.accelerator.cancelled(), 2);
    assert_eq!(world.node.accelerator.batches(), 2);
    // A drain fails none.
    world.node.accelerator.drain();
    world.gate.send(()).unwrap();
    world.gate.send(()).unwrap();
    until("the other one's answer", || {
        world.poll();
        world.front.take(&mut count);
        world.front.front_end.counts().in_flight == 0
    });
    failed.sort_unstable();
    returned.sort_unstable();
    assert_eq!((failed, returned, world.front.answered), (vec![0, 1, 3], vec![0, 1, 3], 1));
    let (id, _) = &world.front.nodes[0];
    assert!(world.front.front_end.is_draining(*id).unwrap());
    // One batch is emptied, and two run.
    until("three wakes", || world.wakes.load(Ordering::Relaxed) == 3);
}

#[test]
fn a_batch_whose_backend_panics_fails_and_the_next_one_runs() {
    let mut world = world();
    (0..16).for_each(|_| world.gate.send(()).unwrap());
    let mut refused = Vec::new();
    until("all ends", || {
        if world.front.next < 16 {
            let result = world.front.submit(PATIENCE);
            assert!(result.is_ok() || is_full(&result), "{result:?}");
        }
        world.poll();
        world.front.take(|report| match report {
            Report::Failed { token, failure: Failure::Refused { code, .. }, .. } => {
                refused.push((*token, *code));
            }
            other => panic!("{other:?}"),
        });
        world.front.answered + refused.len() as u64 == 16
    });
    assert_eq!(refused, [(13, Threaded::PANICKED)]);
}

#[test]
fn a_batch_outlives_its_front_end() {
    let mut world = world();
    for _ in 0..3 {
        world.front.submit(PATIENCE).unwrap();
    }
    until("the first batch", || {
        world.poll();
        world.begun.try_recv() == Ok(0) && world.node.accelerator.batches() == 2
    });
    world.front = Front::new(1);
    until("the departure", || {
        world.node.poll().unwrap();
        world.node.accelerator.front_ends() == 0
    });
    // The next front end has the same index as the one before.
    world.front = connect(&mut world.node);
    world.front.submit(PATIENCE).unwrap();
    (0..3).for_each(|_| world.gate.send(()).unwrap());
    until("an answer", || {
        world.poll();
        world.front.take(|report| panic!("{report:?}"));
        world.front.answered == 1
    });
    assert_eq!(world.front.front_end.counts().in_flight, 0);
}

/// Backend with some work.
struct Busy;

impl Backend for Busy {
    fn run(&mut self, batch: &mut Batch<'_>) {
        std::thread::sleep(Duration::from_micros(batch.len() as u64 * 7));
        Sum.run(batch);
    }
}

#[test]
fn two_threads_answer_each_query_once() {
    let queries = 4_000;
    let threaded = Threaded::new([Busy, Busy], Box::new(|| ())).unwrap();
    let mut node = Node::on(threaded, 3, Duration::from_micros(20));
    let mut front = connect(&mut node);
    until("all answers", || {
        while front.next < queries {
            let result = front.submit(PATIENCE);
            if is_full(&result) {
                break;
            }
            result.unwrap();
        }
        front.poll().unwrap();
        node.poll().unwrap();
        front.take(|report| panic!("{report:?}"));
        front.answered == queries
    });
    assert_eq!(front.front_end.counts().in_flight, 0);
}
