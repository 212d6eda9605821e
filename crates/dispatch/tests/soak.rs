//! Soak: a front end and two accelerator nodes under load, with joins and departures. Memory and descriptors stay constant.
//!
//! `make soak-dispatch` sets `SOAK_SECONDS`; without it the test runs for 2 s, which tests the test.
#![cfg(not(miri))]

#[path = "common/pairs.rs"]
mod pairs;

use pairs::pair_config;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weft_dispatch::{
    AcceleratorConfig, AcceleratorService, Backend, Batch, Departure, FrontEndService, Handler,
    Hello, Input, LedgerConfig, NodeId, Query, Report, Reports, Role, Schema, ServiceConfig,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Memory, ProviderKind, Time, clock};

const PATIENCE: Duration = Duration::from_secs(60);
const SLOTS: u32 = 64;
const BYTES: u64 = 4096;
const SAMPLES: u64 = 64;
/// Time between two node changes.
const CHANGE: Duration = Duration::from_millis(100);
/// Resident memory growth that is no leak: stacks and allocator arenas.
const GROWTH: u64 = 4 << 20;

fn by() -> Time {
    clock::now().after(PATIENCE)
}

fn hello(role: Role) -> Hello {
    let schema = Some(Schema::bytes(BYTES, 16));
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema }
}

struct Echo;

impl Backend for Echo {
    fn run(&mut self, batch: &mut Batch<'_>) {
        for query in 0..batch.len() {
            let (first, last) =
                (batch.input(query, 0)[0], batch.input(query, 0)[BYTES as usize - 1]);
            batch.output(query, 0).copy_from_slice(&[first ^ last; 16]);
        }
    }
}

#[derive(Default)]
struct Ends {
    answered: AtomicU64,
    failed: AtomicU64,
    wrong: AtomicU64,
    gone: AtomicU64,
}

struct Recorder(Arc<Ends>);

impl Handler for Recorder {
    fn reports(&mut self, reports: &Reports<'_>) {
        for report in reports.iter() {
            match report {
                Report::Answered { answer, .. } => {
                    let is_right = answer.tensors().next() == Some(&[0; 16]);
                    self.0.wrong.fetch_add(u64::from(!is_right), Ordering::Relaxed);
                    self.0.answered.fetch_add(1, Ordering::Relaxed);
                }
                Report::Failed { .. } => _ = self.0.failed.fetch_add(1, Ordering::Relaxed),
                _ => {}
            }
        }
    }

    fn node_gone(&mut self, _: &Departure<'_>) {
        self.0.gone.fetch_add(1, Ordering::Release);
    }
}

/// Resident memory in bytes, and open descriptors.
fn usage() -> (u64, usize) {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    (pages * 4096, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

fn add_node(
    listener: &Listener,
    front_end: &FrontEndService<Recorder>,
    provider: ProviderKind,
) -> (NodeId, AcceleratorService<Echo>) {
    let address = listener.address().to_string();
    std::thread::scope(|scope| {
        let node = scope.spawn(move || {
            let pair = connect(&pair_config(&address, provider, PATIENCE, SLOTS), by()).unwrap();
            let (config, batches) = (ServiceConfig::default(), AcceleratorConfig::default());
            let schema = Schema::bytes(BYTES, 16);
            let node = AcceleratorService::start(config, batches, schema, Echo).unwrap();
            node.join(pair, &hello(Role::Accelerator), by()).unwrap();
            node
        });
        let pair = listener.accept(by(), &mut || false).unwrap();
        let id = front_end.join(pair, &hello(Role::FrontEnd), by()).unwrap();
        (id, node.join().unwrap())
    })
}

/// Load for this time; nodes are replaced in turn: drained by the front end, by themselves, or dropped.
fn soak(provider: ProviderKind, time: Duration) {
    let memory = Arc::new(Memory::shared((BYTES * SAMPLES) as usize).unwrap());
    let ends = Arc::new(Ends::default());
    let ledger = LedgerConfig { queries: 256, nodes: 4, slots: SLOTS, ..LedgerConfig::default() };
    let (config, handler) = (ServiceConfig::default(), Recorder(ends.clone()));
    let schema = Schema::bytes(BYTES, 16);
    let front_end = FrontEndService::start(config, ledger, schema, &[memory], handler).unwrap();
    let listener = Listener::bind(pair_config("127.0.0.1:0", provider, PATIENCE, SLOTS)).unwrap();
    let mut nodes = vec![add_node(&listener, &front_end, provider)];
    nodes.push(add_node(&listener, &front_end, provider));
    let (stop, handle) = (AtomicBool::new(false), front_end.handle());
    let (mut changes, mut warm, mut most) = (0u64, None, 0);
    let submitted = std::thread::scope(|scope| {
        let submitter = scope.spawn(|| {
            let mut submitted = 0u64;
            while !stop.load(Ordering::Relaxed) {
                // The full queue takes longer than a deadline on a slow machine: some queries expire in it.
                let queries = (submitted..submitted + 64).map(|token| {
                    let offset = token % SAMPLES * BYTES;
                    let deadline = clock::now().after(Duration::from_millis(200));
                    Query::new(token, &[Input { memory: 0, offset, length: BYTES }], deadline)
                });
                submitted += handle.submit_all(queries, by()).unwrap();
            }
            submitted
        });
        let begin = Instant::now();
        while begin.elapsed() < time {
            std::thread::sleep(CHANGE);
            let (id, service) = nodes.remove(0);
            match changes % 3 {
                0 => {
                    front_end.leave(id, by()).unwrap();
                    service.stop(by()).unwrap();
                }
                1 => _ = service.stop(by()).unwrap(),
                _ => drop(service),
            }
            changes += 1;
            while ends.gone.load(Ordering::Acquire) < changes {
                std::thread::sleep(Duration::from_millis(1));
            }
            nodes.push(add_node(&listener, &front_end, provider));
            let now = usage();
            if warm.is_none() && begin.elapsed() > time / 5 {
                warm = Some(now);
            }
            most = most.max(now.0);
        }
        stop.store(true, Ordering::Relaxed);
        submitter.join().unwrap()
    });
    let end = usage();
    let until = Instant::now() + PATIENCE;
    while ends.answered.load(Ordering::Relaxed) + ends.failed.load(Ordering::Relaxed) < submitted {
        assert!(Instant::now() < until, "{:?}", front_end.counts());
        std::thread::sleep(Duration::from_millis(1));
    }
    let is_free = || {
        let counts = front_end.counts().unwrap();
        (counts.queued, counts.in_flight, counts.quarantined) == (0, 0, 0)
    };
    while !is_free() {
        assert!(Instant::now() < until, "slots in use: {:?}", front_end.counts());
        std::thread::sleep(Duration::from_millis(1));
    }
    let (answered, failed) =
        (ends.answered.load(Ordering::Relaxed), ends.failed.load(Ordering::Relaxed));
    assert_eq!((answered + failed, ends.wrong.load(Ordering::Relaxed)), (submitted, 0));
    let warm = warm.unwrap();
    println!(
        "outcome {{\"test\": \"dispatch_soak\", \"path\": \"{}\", \"seconds\": {}, \"queries\": {submitted}, \
         \"failed\": {failed}, \"changes_of_nodes\": {changes}, \"rss_after_warm_up\": {}, \"rss_at_end\": {}, \
         \"rss_peak\": {most}, \"descriptors_after_warm_up\": {}, \"descriptors_at_end\": {}}}",
        provider.name(),
        time.as_secs(),
        warm.0,
        end.0,
        warm.1,
        end.1,
    );
    assert!(end.0 <= warm.0 + GROWTH, "resident memory grew from {} to {} bytes", warm.0, end.0);
    assert!(end.1 <= warm.1 + 4, "descriptors grew from {} to {}", warm.1, end.1);
    front_end.stop(by()).unwrap();
    for (_, service) in nodes {
        service.stop(by()).unwrap();
    }
}

#[test]
fn memory_slots_and_descriptors_stay_constant_under_load() {
    let seconds = std::env::var("SOAK_SECONDS").map_or(2, |text| text.parse().unwrap());
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
        soak(provider, Duration::from_secs(seconds) / 2);
    }
}
