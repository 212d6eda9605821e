//! A front end's service, its nodes, and how its queries end.

use super::answers::answer;
use super::pairs::pair_config;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_control::Tls;
use weft_dispatch::accelerator::{Executor, Job, JobQuery, Threaded};
use weft_dispatch::{
    AcceleratorConfig, AcceleratorService, Backend, Batch, Departure, Failure, FrontEndService,
    Handler, Hello, Input, LedgerConfig, NodeId, Query, Report, Reports, Role, Schema,
    ServiceConfig,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Memory, ProviderKind, Time, clock};

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const SLOTS: u32 = 16;
pub const BYTES: u64 = 200;
pub const SAMPLES: u64 = 64;

pub fn by() -> Time {
    clock::now().after(PATIENCE)
}

pub fn schema() -> Schema {
    Schema::bytes(BYTES, 16)
}

pub fn hello(role: Role) -> Hello {
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema: Some(schema()) }
}

/// Backend that answers while the gate is open.
pub struct Sum(pub Arc<AtomicBool>);

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

/// The backend on the node's thread, or on a separate one.
pub enum Runs {
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
pub struct Ends {
    /// Number of times that each query was answered, failed, and got its memory back.
    pub counts: Mutex<Vec<[u32; 3]>>,
    pub failures: Mutex<Vec<Failure>>,
    pub ended: AtomicU64,
    pub gone: AtomicU64,
    pub panics: AtomicBool,
    pub losses: Mutex<Vec<String>>,
}

pub struct Recorder {
    pub ends: Arc<Ends>,
    pub memory: Arc<Memory>,
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

pub struct World {
    pub listener: Listener,
    pub provider: ProviderKind,
    /// TLS on the nodes.
    pub tls: Tls,
    pub front_end: FrontEndService<Recorder>,
    pub ends: Arc<Ends>,
    pub gate: Arc<AtomicBool>,
}

impl World {
    pub fn new(provider: ProviderKind, queries: u64) -> World {
        World::with_tls(provider, Default::default(), queries)
    }

    /// With TLS for the front end and for the nodes.
    pub fn with_tls(provider: ProviderKind, [own, tls]: [Tls; 2], queries: u64) -> World {
        let memory = Arc::new(Memory::shared((BYTES * SAMPLES) as usize).unwrap());
        for sample in 0..SAMPLES as usize {
            memory.fill(sample * BYTES as usize, BYTES as usize, sample as u8 + 1);
        }
        let ends = Arc::new(Ends::default());
        ends.counts.lock().unwrap().resize(queries as usize, [0; 3]);
        let ledger = LedgerConfig {
            queries: 24,
            nodes: 12,
            slots: SLOTS,
            max_sends: 10,
            ..LedgerConfig::default()
        };
        let config = ServiceConfig { submissions: 8, yields: 2, ..ServiceConfig::default() };
        let handler = Recorder { ends: ends.clone(), memory: memory.clone() };
        let front_end =
            FrontEndService::start(config, ledger, schema(), &[memory], handler).unwrap();
        let mut config = pair_config("127.0.0.1:0", provider, PATIENCE, SLOTS);
        config.settings.tls = own;
        let listener = Listener::bind(config).unwrap();
        let gate = Arc::new(AtomicBool::new(true));
        World { listener, provider, tls, front_end, ends, gate }
    }

    pub fn add_node(&self) -> (NodeId, AcceleratorService<Runs>) {
        let node = self.start_node(AcceleratorConfig::default());
        (self.join(&node), node)
    }

    /// A node without a connection.
    pub fn start_node(&self, config: AcceleratorConfig) -> AcceleratorService<Runs> {
        let gate = self.gate.clone();
        let runs = |waker| match self.provider {
            ProviderKind::Shm => Ok(Runs::Inside(Sum(gate))),
            _ => Ok(Runs::Beside(Threaded::new([Sum(gate)], waker).unwrap())),
        };
        AcceleratorService::start_with(ServiceConfig::default(), config, schema(), runs).unwrap()
    }

    /// Connects a node to the front end.
    pub fn join(&self, node: &AcceleratorService<Runs>) -> NodeId {
        let address = self.listener.address().to_string();
        let mut config = pair_config(&address, self.provider, PATIENCE, SLOTS);
        config.settings.tls = self.tls.clone();
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| {
                let pair = connect(&config, by()).unwrap();
                node.join(pair, &hello(Role::Accelerator), by()).unwrap();
            });
            let pair = self.listener.accept(by(), &mut || false).unwrap();
            let id = self.front_end.join(pair, &hello(Role::FrontEnd), by()).unwrap();
            joined.join().unwrap();
            id
        })
    }

    pub fn query(token: u64) -> Query {
        let input = Input { memory: 0, offset: token % SAMPLES * BYTES, length: BYTES };
        Query::new(token, &[input], by())
    }

    /// Submits the queries with these tokens from several threads.
    pub fn submit(&self, tokens: std::ops::Range<u64>, threads: u64) {
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

    pub fn wait_for(&self, what: &str, done: impl Fn(&Ends) -> bool) {
        let until = by();
        while !done(&self.ends) {
            assert!(clock::now() < until, "{what}: {:?}", self.front_end.counts());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
