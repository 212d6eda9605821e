//! Services: submissions by several threads, joins and departures under load, stop, back-pressure, panics.

#[path = "service/limits.rs"]
mod limits;
#[path = "common/pairs.rs"]
mod pairs;
#[path = "service/submissions.rs"]
mod submissions;

use pairs::{pair_config, providers};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_dispatch::accelerator::{Executor, Job, JobQuery, Threaded};
use weft_dispatch::service::Unsubmitted;
use weft_dispatch::{
    AcceleratorConfig, AcceleratorService, Backend, Batch, Departure, Error, Failure,
    FrontEndService, Handler, Hello, Input, LedgerConfig, NodeId, Query, Report, Reports, Role,
    Schema, ServiceConfig,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Memory, ProviderKind, Time, clock};

const PATIENCE: Duration = Duration::from_secs(60);
const SLOTS: u32 = 16;
const BYTES: u64 = 200;
const SAMPLES: u64 = 64;

fn by() -> Time {
    clock::now().after(PATIENCE)
}

fn schema() -> Schema {
    Schema::bytes(BYTES, 16)
}

fn hello(role: Role) -> Hello {
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema: Some(schema()) }
}

/// First bytes of a query, and the sum of all.
fn answer(query: &[u8]) -> [u8; 16] {
    let mut answer = [0; 16];
    answer[..8].copy_from_slice(&query[..8]);
    let sum: u64 = query.iter().map(|byte| u64::from(*byte)).sum();
    answer[8..].copy_from_slice(&sum.to_le_bytes());
    answer
}

/// Backend that answers while the gate is open.
struct Sum(Arc<AtomicBool>);

impl Backend for Sum {
    fn run(&mut self, batch: &mut Batch<'_>) {
        while !self.0.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        for query in 0..batch.len() {
            let answer = answer(batch.input(query, 0));
            batch.output(query, 0).copy_from_slice(&answer);
        }
    }
}

/// The backend on the thread of the node, or on one of its own.
enum Runs {
    Inside(Sum),
    Beside(Threaded),
}

impl Executor for Runs {
    fn has_room(&self) -> bool {
        match self {
            Runs::Inside(sum) => sum.has_room(),
            Runs::Beside(threaded) => threaded.has_room(),
        }
    }

    fn start(&mut self, now: Time, job: Job) -> Option<Job> {
        match self {
            Runs::Inside(sum) => sum.start(now, job),
            Runs::Beside(threaded) => threaded.start(now, job),
        }
    }

    fn next_finished(&mut self, now: Time) -> Option<Job> {
        match self {
            Runs::Inside(sum) => sum.next_finished(now),
            Runs::Beside(threaded) => threaded.next_finished(now),
        }
    }

    fn cancel(&mut self, query: JobQuery) -> bool {
        match self {
            Runs::Inside(sum) => sum.cancel(query),
            Runs::Beside(threaded) => threaded.cancel(query),
        }
    }
}

/// Ends by token.
#[derive(Default)]
struct Ends {
    /// Times that each query was answered, that it failed, that its memory returned.
    counts: Mutex<Vec<[u32; 3]>>,
    failures: Mutex<Vec<Failure>>,
    ended: AtomicU64,
    gone: AtomicU64,
    panics: AtomicBool,
    losses: Mutex<Vec<String>>,
}

struct Recorder {
    ends: Arc<Ends>,
    memory: Arc<Memory>,
}

impl Handler for Recorder {
    fn reports(&mut self, reports: &Reports<'_>) {
        assert!(!self.ends.panics.load(Ordering::Relaxed), "asked to");
        assert_eq!(reports.iter().count(), reports.len());
        for report in reports.iter() {
            let mut counts = self.ends.counts.lock().unwrap();
            let count = &mut counts[report.token() as usize];
            match report {
                Report::Answered { token, answer: seen, .. } => {
                    let mut query = [0; BYTES as usize];
                    self.memory.copy_out((token % SAMPLES * BYTES) as usize, &mut query);
                    assert_eq!(seen.tensors().next(), Some(&answer(&query)[..]), "query {token}");
                    count[0] += 1;
                }
                Report::Failed { failure, .. } => {
                    self.ends.failures.lock().unwrap().push(failure);
                    count[1] += 1;
                }
                Report::Returned { .. } => {}
                Report::FirstToken { .. } | Report::Tokens { .. } => panic!("{report:?}"),
            }
            count[2] += u32::from(report.is_last());
            let ended = !matches!(report, Report::Returned { .. });
            self.ends.ended.fetch_add(ended.into(), Ordering::Release);
        }
    }

    fn node_gone(&mut self, departure: &Departure<'_>) {
        assert_eq!(departure.name, "Accelerator");
        assert!(!departure.cause.is_empty());
        if departure.is_lost {
            self.ends.losses.lock().unwrap().push(departure.cause.into());
        }
        self.ends.gone.fetch_add(1, Ordering::Release);
    }
}

struct World {
    listener: Listener,
    provider: ProviderKind,
    front_end: FrontEndService<Recorder>,
    ends: Arc<Ends>,
    gate: Arc<AtomicBool>,
}

impl World {
    fn new(provider: ProviderKind, queries: u64) -> World {
        let memory = Arc::new(Memory::shared((BYTES * SAMPLES) as usize).unwrap());
        for sample in 0..SAMPLES as usize {
            memory.fill(sample * BYTES as usize, BYTES as usize, sample as u8 + 1);
        }
        let ends = Arc::new(Ends::default());
        ends.counts.lock().unwrap().resize(queries as usize, [0; 3]);
        let ledger = LedgerConfig {
            queries: 24,
            nodes: 4,
            slots: SLOTS,
            max_sends: 10,
            ..LedgerConfig::default()
        };
        let config = ServiceConfig { submissions: 8, yields: 2, ..ServiceConfig::default() };
        let handler = Recorder { ends: ends.clone(), memory: memory.clone() };
        let front_end =
            FrontEndService::start(config, ledger, schema(), &[memory], handler).unwrap();
        let listener =
            Listener::bind(pair_config("127.0.0.1:0", provider, PATIENCE, SLOTS)).unwrap();
        let gate = Arc::new(AtomicBool::new(true));
        World { listener, provider, front_end, ends, gate }
    }

    fn add_node(&self) -> (NodeId, AcceleratorService<Runs>) {
        let address = self.listener.address().to_string();
        let (provider, gate) = (self.provider, self.gate.clone());
        std::thread::scope(|scope| {
            let node = scope.spawn(move || {
                let pair =
                    connect(&pair_config(&address, provider, PATIENCE, SLOTS), by()).unwrap();
                let config = (ServiceConfig::default(), AcceleratorConfig::default());
                let runs = |waker| match provider {
                    ProviderKind::Shm => Ok(Runs::Inside(Sum(gate))),
                    _ => Ok(Runs::Beside(Threaded::new([Sum(gate)], waker).unwrap())),
                };
                let node = AcceleratorService::start_with(config.0, config.1, schema(), runs);
                let node = node.unwrap();
                node.join(pair, &hello(Role::Accelerator), by()).unwrap();
                node
            });
            let pair = self.listener.accept(by(), &mut || false).unwrap();
            let id = self.front_end.join(pair, &hello(Role::FrontEnd), by()).unwrap();
            (id, node.join().unwrap())
        })
    }

    fn query(token: u64) -> Query {
        let input = Input { memory: 0, offset: token % SAMPLES * BYTES, length: BYTES };
        Query::new(token, &[input], by())
    }

    /// Submits the queries of these tokens from several threads.
    fn submit(&self, tokens: std::ops::Range<u64>, threads: u64) {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (handle, tokens) = (self.front_end.handle(), tokens.clone());
                scope.spawn(move || {
                    let mine = tokens.filter(|token| token % threads == thread);
                    handle.submit_all(mine.map(World::query), by()).unwrap()
                });
            }
        });
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Ends) -> bool) {
        let until = by();
        while !done(&self.ends) {
            assert!(clock::now() < until, "{what}: {:?}", self.front_end.counts());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Queries of four threads, two nodes of which one leaves under load, and another that stops.
fn every_query_is_answered_once(provider: ProviderKind) {
    const QUERIES: u64 = 2000;
    let world = World::new(provider, QUERIES);
    let (first, first_service) = world.add_node();
    let (_, second_service) = world.add_node();
    world.submit(0..QUERIES / 4, 4);
    std::thread::scope(|scope| {
        scope.spawn(|| world.submit(QUERIES / 4..QUERIES / 2, 3));
        world.front_end.leave(first, by()).unwrap();
    });
    assert!(matches!(world.front_end.leave(first, by()), Err(Error::UnknownNode(_))));
    let first_node = first_service.stop(by()).unwrap();
    assert!(first_node.batches() > 0);
    let (_, third_service) = world.add_node();
    std::thread::scope(|scope| {
        scope.spawn(|| world.submit(QUERIES / 2..QUERIES, 3));
        second_service.stop(by()).unwrap();
    });
    assert_eq!(world.front_end.nodes().unwrap().len(), 1);
    let World { front_end, ends, .. } = world;
    let handle = front_end.handle();
    let (_, counts) = front_end.stop(by()).unwrap();
    assert_eq!((counts.submitted, counts.answered, counts.failed), (QUERIES, QUERIES, 0));
    assert!(ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    assert_eq!(ends.gone.load(Ordering::Acquire), 2);
    assert!(ends.losses.lock().unwrap().is_empty());
    assert!(matches!(handle.submit(World::query(0)), Err(Error::Stopped { .. })));
    third_service.stop(by()).unwrap();
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_shm() {
    every_query_is_answered_once(ProviderKind::Shm);
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_tcp() {
    every_query_is_answered_once(ProviderKind::Tcp);
}

#[test]
fn every_query_of_four_threads_is_answered_once_over_ofi() {
    if providers().contains(&ProviderKind::Ofi) {
        every_query_is_answered_once(ProviderKind::Ofi);
    }
}

#[test]
fn a_full_queue_is_an_error_at_once_or_at_the_deadline() {
    let world = World::new(ProviderKind::Shm, 100);
    let handle = world.front_end.handle();
    // Without a node: 24 in the ledger, 8 in the queue.
    handle.submit_all((0..24).map(World::query), by()).unwrap();
    let until = by();
    while world.front_end.counts().unwrap().submitted < 24 {
        assert!(clock::now() < until);
    }
    let soon = clock::now().after(Duration::from_millis(20));
    let Unsubmitted { submitted, error } =
        handle.submit_all((24..100).map(World::query), soon).unwrap_err();
    assert_eq!(submitted, 8);
    assert!(matches!(error, Error::Full { limit: 8, .. }), "{error}");
    assert!(matches!(handle.submit(World::query(32)), Err(Error::Full { .. })));
    let (_, service) = world.add_node();
    world.wait_for("answers", |ends| ends.ended.load(Ordering::Acquire) == 32);
    handle.submit(World::query(32)).unwrap();
    let (_, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (33, 0));
    service.stop(by()).unwrap();
}

#[test]
fn a_query_that_the_schema_excludes_is_refused_by_the_submission() {
    let world = World::new(ProviderKind::Shm, 1);
    let handle = world.front_end.handle();
    let refused = |input| {
        let error = handle.submit(Query::new(0, &[input], by())).unwrap_err();
        assert!(matches!(error, Error::Query { .. }), "{error}");
    };
    let good = Input { memory: 0, offset: 0, length: BYTES };
    refused(Input { length: BYTES + 1, ..good });
    refused(Input { memory: 1, ..good });
    refused(Input { offset: BYTES * SAMPLES - 1, ..good });
    assert!(matches!(handle.submit(Query::new(0, &[good; 4], by())), Err(Error::Query { .. })));
    assert_eq!(world.front_end.counts().unwrap().submitted, 0);
}

#[test]
fn a_cancel_finds_queries_in_flight_in_the_ledger_and_in_the_queue() {
    let world = World::new(ProviderKind::Shm, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..32, 1);
    // 16 in flight, 8 in the ledger, 8 in the queue.
    for token in [0, 20, 31] {
        assert!(world.front_end.cancel(token).unwrap(), "{token}");
        assert!(!world.front_end.cancel(token).unwrap(), "{token}");
    }
    assert!(!world.front_end.cancel(77).unwrap());
    world.gate.store(true, Ordering::Release);
    let (recorder, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (29, 3));
    let counts = recorder.ends.counts.lock().unwrap().clone();
    for (token, count) in counts.into_iter().enumerate() {
        let cancelled = [0, 20, 31].contains(&token);
        assert_eq!(count, if cancelled { [0, 1, 1] } else { [1, 0, 1] }, "{token}");
    }
    assert!(recorder.ends.failures.lock().unwrap().iter().all(|f| *f == Failure::Cancelled));
    service.stop(by()).unwrap();
}

#[test]
fn a_stop_cancels_at_its_deadline_and_returns_all_memory() {
    let world = World::new(ProviderKind::Shm, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..32, 2);
    let soon = clock::now().after(Duration::from_millis(50));
    let (recorder, counts) = world.front_end.stop(soon).unwrap();
    assert_eq!((counts.submitted, counts.answered, counts.failed), (32, 0, 32));
    assert!(recorder.ends.counts.lock().unwrap().iter().all(|count| *count == [0, 1, 1]));
    world.gate.store(true, Ordering::Release);
    service.stop(by()).unwrap();
}

#[test]
fn a_node_that_vanishes_costs_no_query() {
    let world = World::new(ProviderKind::Tcp, 200);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    world.submit(0..16, 1);
    world.gate.store(true, Ordering::Release);
    // Without a drain: its connections close.
    drop(service);
    world.wait_for("departure", |ends| ends.gone.load(Ordering::Acquire) == 1);
    assert_eq!(world.ends.losses.lock().unwrap().len(), 1);
    let (_, service) = world.add_node();
    world.submit(16..200, 1);
    let (recorder, counts) = world.front_end.stop(by()).unwrap();
    assert_eq!((counts.answered, counts.failed), (200, 0));
    assert!(recorder.ends.counts.lock().unwrap().iter().all(|count| *count == [1, 0, 1]));
    service.stop(by()).unwrap();
}

#[test]
fn a_node_returns_why_it_lost_a_front_end() {
    let world = World::new(ProviderKind::Tcp, 32);
    world.gate.store(false, Ordering::Release);
    let (_, service) = world.add_node();
    assert!(service.take_losses().unwrap().is_empty());
    world.submit(0..16, 1);
    let until = by();
    while service.state().unwrap().batches == 0 {
        assert!(clock::now() < until);
        std::thread::yield_now();
    }
    // Its queries are with the node.
    world.front_end.stop(Time(0)).unwrap();
    world.gate.store(true, Ordering::Release);
    let mut losses = Vec::new();
    while losses.is_empty() {
        assert!(clock::now() < until);
        losses = service.take_losses().unwrap();
    }
    assert!(losses[0].contains("stopped before its last answers"), "{losses:?}");
    assert_eq!(service.state().unwrap().front_ends, 0);
    service.stop(by()).unwrap();
}

#[test]
fn a_panic_of_the_handler_is_the_error_of_later_calls() {
    let world = World::new(ProviderKind::Shm, 2);
    world.ends.panics.store(true, Ordering::Relaxed);
    let (_, service) = world.add_node();
    let handle = world.front_end.handle();
    handle.submit(World::query(0)).unwrap();
    let until = by();
    while !matches!(world.front_end.counts(), Err(Error::Stopped { .. })) {
        assert!(clock::now() < until);
        std::thread::yield_now();
    }
    assert!(matches!(handle.submit(World::query(1)), Err(Error::Stopped { .. })));
    match world.front_end.stop(by()) {
        Err(Error::Panicked { message, .. }) => assert_eq!(message, "asked to"),
        other => panic!("{:?}", other.map(|(_, counts)| counts)),
    }
    service.stop(by()).unwrap();
}
