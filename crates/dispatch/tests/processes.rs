//! Accelerator nodes as processes, killed and stopped under load: every query is answered once, with the right bytes.
//!
//! `WEFT_TEST_DISPATCH_LOSSES` says how many nodes are lost in each way and over each provider (default 2).

#[path = "common/pairs.rs"]
mod pairs;

use pairs::{pair_config, provider_named, providers};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use weft_dispatch::{
    Accelerator, AcceleratorConfig, Backend, Batch, Connection, Error, FrontEnd, Hello, Input,
    LedgerConfig, NodeId, Policy, Report, Role, Schema,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Communicator, Event, Memory, ProviderKind, Requests, Time, clock};

const ADDRESS: &str = "WEFT_TEST_DISPATCH_ADDRESS";
const PROVIDER: &str = "WEFT_TEST_DISPATCH_PROVIDER";
/// Time limit for any expected event on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Documented limit until a killed node's queries are sent to another one. The median over several losses has it.
const NOTICED: Duration = Duration::from_secs(2);
/// Limit for each loss, on a busy machine.
const BUSY: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_millis(700);
const SLOTS: u32 = 32;
const BYTES: u64 = 1000;

fn by(patience: Duration) -> Time {
    clock::now().after(patience)
}

fn schema() -> Schema {
    Schema::bytes(BYTES, 16)
}

fn hello(role: Role) -> Hello {
    let schema = (role == Role::Accelerator).then(schema);
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema }
}

/// Answer to a query: the token, and the sum over all bytes.
fn answer(query: &[u8]) -> [u8; 16] {
    let mut answer = [0; 16];
    answer[..8].copy_from_slice(&query[..8]);
    let sum: u64 = query.iter().map(|byte| u64::from(*byte)).sum();
    answer[8..].copy_from_slice(&sum.to_le_bytes());
    answer
}

struct Sum;

impl Backend for Sum {
    fn run(&mut self, batch: &mut Batch<'_>) {
        for query in 0..batch.len() {
            let answer = answer(batch.input(query, 0));
            batch.output(query, 0).copy_from_slice(&answer);
        }
    }
}

/// Accelerator node process, until the front end ends. As a test it returns at once unless the parent sets an address.
#[test]
fn accelerator_process() {
    let (Ok(address), Ok(provider)) = (std::env::var(ADDRESS), std::env::var(PROVIDER)) else {
        return;
    };
    let provider = provider_named(&provider);
    let pair = connect(&pair_config(&address, provider, SILENCE, SLOTS), by(PATIENCE)).unwrap();
    let connection = Connection::over(&pair, &hello(Role::Accelerator), by(PATIENCE)).unwrap();
    let mut accelerator = Accelerator::new(AcceleratorConfig::default(), schema(), Sum).unwrap();
    let index = accelerator.join(connection).unwrap();
    let (mut events, mut requests) = (Vec::new(), Requests::with_capacity(64, 128));
    while accelerator.front_ends() > 0 && !pair.engine().poison_flag().any_has_left() {
        let mut engine = pair.engine();
        events.clear();
        engine.poll(clock::now(), &mut events);
        accelerator.poll(clock::now(), index, &events, &mut requests).unwrap();
        // A poisoned engine refuses; the next poll reports the poison.
        let _ = engine.submit(&mut requests);
        drop(engine);
        if events.is_empty() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

struct Node {
    id: NodeId,
    pair: Communicator,
    child: Child,
}

/// Front end under load.
struct Load {
    provider: ProviderKind,
    listener: Listener,
    front_end: FrontEnd,
    memory: Arc<Memory>,
    nodes: Vec<Node>,
    lost: u32,
    submitted: u64,
    answered: Vec<bool>,
    /// Each query's sample, and the samples that no query borrows.
    samples: Vec<u64>,
    free: Vec<u64>,
    events: Vec<Event>,
    requests: Requests,
}

impl Load {
    fn new(provider: ProviderKind) -> Load {
        let memory = Arc::new(Memory::shared(BYTES as usize * 256).unwrap());
        for sample in 0..256usize {
            memory.fill(sample * BYTES as usize, BYTES as usize, sample as u8);
        }
        let ledger = LedgerConfig {
            queries: 128,
            nodes: 4,
            slots: SLOTS,
            max_sends: 10,
            policy: Policy::LeastInFlight,
            ..LedgerConfig::default()
        };
        let mut load = Load {
            provider,
            listener: Listener::bind(pair_config("127.0.0.1:0", provider, SILENCE, SLOTS)).unwrap(),
            front_end: FrontEnd::new(ledger, schema(), std::slice::from_ref(&memory)).unwrap(),
            memory,
            nodes: Vec::new(),
            lost: 0,
            submitted: 0,
            answered: Vec::new(),
            samples: Vec::new(),
            free: (0..256).collect(),
            events: Vec::new(),
            requests: Requests::with_capacity(128, 256),
        };
        load.add_node();
        load.add_node();
        load
    }

    fn add_node(&mut self) {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "accelerator_process"])
            .env(ADDRESS, self.listener.address().to_string())
            .env(PROVIDER, self.provider.name())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pair = self.listener.accept(by(PATIENCE), &mut || false).unwrap();
        let connection = Connection::over(&pair, &hello(Role::FrontEnd), by(PATIENCE)).unwrap();
        let key = pair.engine().register(self.memory.clone()).unwrap().key();
        let id = self.front_end.join(connection, &[key]).unwrap();
        self.nodes.push(Node { id, pair, child });
    }

    /// Submits and answers queries until `queries` have been submitted, or all have ended.
    fn run(&mut self, queries: u64, is_last: bool) {
        let end = by(PATIENCE);
        while self.submitted < queries || is_last && self.answered.contains(&false) {
            assert!(clock::now() < end, "{:?}", self.front_end.counts());
            while self.submitted < queries {
                let sample = *self.free.last().unwrap();
                self.memory.copy_in((sample * BYTES) as usize, &self.submitted.to_le_bytes());
                let input = Input { memory: 0, offset: sample * BYTES, length: BYTES };
                match self.front_end.submit(self.submitted, &[input], by(PATIENCE)) {
                    Ok(_) => {
                        self.answered.push(false);
                        self.samples.extend(self.free.pop());
                    }
                    Err(Error::Full { .. }) => break,
                    Err(error) => panic!("{error}"),
                }
                self.submitted += 1;
            }
            let mut lost = None;
            for (index, node) in self.nodes.iter().enumerate() {
                let mut engine = node.pair.engine();
                self.events.clear();
                engine.poll(clock::now(), &mut self.events);
                let (events, requests) = (&self.events, &mut self.requests);
                self.front_end.poll(clock::now(), node.id, events, requests).unwrap();
                // A poisoned engine refuses; the next poll reports the poison.
                let _ = engine.submit(requests);
                if events.iter().any(|event| matches!(event, Event::Poisoned(_))) {
                    lost = Some(index);
                }
            }
            if let Some(index) = lost {
                let mut node = self.nodes.remove(index);
                node.child.kill().unwrap();
                node.child.wait().unwrap();
                self.lost += 1;
                self.add_node();
            }
            while let Some(report) = self.front_end.next_report() {
                let Report::Answered { token, answer: seen, .. } = report else {
                    panic!("{report:?}");
                };
                let sample = self.samples[token as usize];
                self.free.push(sample);
                let mut query = vec![sample as u8; BYTES as usize];
                query[..8].copy_from_slice(&token.to_le_bytes());
                assert_eq!(seen.tensors().next(), Some(&answer(&query)[..]), "query {token}");
                let before = std::mem::replace(&mut self.answered[token as usize], true);
                assert!(!before, "query {token} was answered twice");
            }
        }
    }

    /// Submits queries, sends `signal` to the first node under load, and waits for all answers. Returns how long it
    /// took until all that node's queries were answered.
    fn lose(&mut self, signal: Signal) -> Duration {
        self.run(self.submitted + 500, false);
        let lost = self.lost;
        let pid = Pid::from_child(&self.nodes[0].child);
        kill_process(pid, signal).unwrap();
        let since = clock::now();
        while self.lost == lost {
            self.run(self.submitted + 50, false);
        }
        self.run(self.submitted, true);
        let took = clock::now().since(since);
        self.run(self.submitted + 500, true);
        assert_eq!(self.front_end.counts().in_flight, 0);
        took
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for Node { pair, mut child, .. } in self.nodes.drain(..) {
            drop(pair);
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn losses() -> u32 {
    let wanted = std::env::var("WEFT_TEST_DISPATCH_LOSSES").ok();
    wanted.and_then(|wanted| wanted.parse().ok()).unwrap_or(2)
}

fn lose(provider: ProviderKind, signal: Signal) {
    let mut load = Load::new(provider);
    let mut took: Vec<Duration> = (0..losses()).map(|_| load.lose(signal)).collect();
    took.sort();
    let silence = if signal == Signal::STOP { SILENCE } else { Duration::ZERO };
    assert!(took[(took.len() - 1) / 2] < silence + NOTICED, "{took:?}");
    assert!(took.iter().all(|took| *took < silence + BUSY), "{took:?}");
    println!(
        // The harness may have begun the line.
        "\noutcome {{\"test\": \"dispatch_loss\", \"path\": \"{}\", \"signal\": {}, \"times\": {}, \
         \"queries\": {}, \"sent_again\": {}, \"failed\": 0}}",
        provider.name(),
        signal.as_raw(),
        load.lost,
        load.submitted,
        load.front_end.counts().resent
    );
}

#[test]
fn a_node_that_is_killed_under_load_costs_no_query_over_shm() {
    lose(ProviderKind::Shm, Signal::KILL);
}

#[test]
fn a_node_that_is_killed_under_load_costs_no_query_over_tcp() {
    lose(ProviderKind::Tcp, Signal::KILL);
}

#[test]
fn a_node_that_is_stopped_under_load_costs_no_query_over_shm() {
    lose(ProviderKind::Shm, Signal::STOP);
}

#[test]
fn a_node_that_is_stopped_under_load_costs_no_query_over_tcp() {
    lose(ProviderKind::Tcp, Signal::STOP);
}

#[test]
fn a_node_that_is_killed_or_stopped_under_load_costs_no_query_over_ofi() {
    if providers().contains(&ProviderKind::Ofi) {
        lose(ProviderKind::Ofi, Signal::KILL);
        lose(ProviderKind::Ofi, Signal::STOP);
    }
}
