//! Connection ends over real pairs, polled by the tests.

#[path = "../common/answers.rs"]
mod answers;
#[path = "../common/pairs.rs"]
pub mod pairs;

pub use answers::answer;
use pairs::pair_config;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Secret;
use weft_dispatch::{
    Accelerator, AcceleratorConfig, Backend, Batch, Connection, Error, Executor, FrontEnd, Hello,
    Input, LedgerConfig, NodeId, QueryId, Report, Result, Role, Schema,
};
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::{
    Cause, Communicator, Event, Memory, Poison, ProviderKind, Requests, Time, clock,
};

/// Time limit for any expected event on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const SLOTS: u32 = 8;
pub const BYTES: u64 = 1000;
pub const SAMPLES: u64 = 64;

pub fn by(patience: Duration) -> Time {
    clock::now().after(patience)
}

pub fn config(address: &str, provider: ProviderKind, secret: Option<&str>) -> PairConfig {
    let mut config = pair_config(address, provider, PATIENCE, SLOTS);
    config.settings.secret = secret.map(|secret| Secret::new(secret).unwrap());
    config
}

pub fn listen(provider: ProviderKind) -> Listener {
    Listener::bind(config("127.0.0.1:0", provider, None)).unwrap()
}

pub fn schema() -> Schema {
    Schema::bytes(BYTES, 16)
}

pub fn hello(role: Role) -> Hello {
    hello_of(role, &schema())
}

pub fn hello_of(role: Role, schema: &Schema) -> Hello {
    let schema = (role == Role::Accelerator).then(|| schema.clone());
    Hello { role, slots: SLOTS, checksum: true, name: format!("{role:?}"), schema }
}

/// A pair; `there` runs on another thread with the dialer's end.
pub fn pair_with<T: Send + 'static>(
    listener: &Listener,
    provider: ProviderKind,
    there: impl FnOnce(Communicator) -> T + Send + 'static,
) -> (Communicator, std::thread::JoinHandle<T>) {
    let address = listener.address().to_string();
    let dialer = std::thread::spawn(move || {
        there(connect(&config(&address, provider, None), by(PATIENCE)).unwrap())
    });
    (listener.accept(by(PATIENCE), &mut || false).unwrap(), dialer)
}

/// Polls an engine, passes the events to a driver, and submits the driver's requests.
pub fn poll<T>(
    pair: &Communicator,
    drive: impl FnOnce(Time, &[Event], &mut Requests) -> Result<T>,
) -> Result<T> {
    let (mut events, mut requests) = (Vec::new(), Requests::default());
    let mut engine = pair.engine();
    let now = clock::now();
    engine.poll(now, &mut events);
    let result = drive(now, &events, &mut requests);
    // A poisoned engine refuses; the next poll reports the poison.
    let _ = engine.submit(&mut requests);
    result
}

pub fn poison(pair: &Communicator) {
    pair.poison(Poison {
        kind: Cause::User,
        rank: None,
        detail: "it violates the protocol".into(),
    });
}

#[derive(Debug)]
pub struct Sum;

impl Backend for Sum {
    fn run(&mut self, batch: &mut Batch<'_>) {
        for query in 0..batch.len() {
            let answer = answer(batch.input(query, 0));
            batch.output(query, 0).copy_from_slice(&answer);
        }
    }
}

/// Accelerator node, and each connection's pair.
pub struct Node<E = Sum> {
    pub accelerator: Accelerator<E>,
    pub pairs: Vec<(usize, Communicator)>,
    schema: Schema,
}

impl Node {
    pub fn new(max_batch: u32, window: Duration) -> Node {
        Node::on(Sum, max_batch, window)
    }
}

impl<E: Executor> Node<E> {
    pub fn on(executor: E, max_batch: u32, window: Duration) -> Node<E> {
        Node::of(executor, max_batch, window, schema())
    }

    pub fn of(executor: E, max_batch: u32, window: Duration, schema: Schema) -> Node<E> {
        let config = AcceleratorConfig { front_ends: 4, max_batch, window, ..Default::default() };
        let accelerator = Accelerator::new(config, schema.clone(), executor).unwrap();
        Node { accelerator, pairs: Vec::new(), schema }
    }

    pub fn join(&mut self, pair: Communicator) -> usize {
        let connection =
            Connection::over(&pair, &hello_of(Role::Accelerator, &self.schema), by(PATIENCE))
                .unwrap();
        let index = self.accelerator.join(connection).unwrap();
        self.pairs.push((index, pair));
        index
    }

    /// Polls every connection once; a violation ends the connection and is returned.
    pub fn poll(&mut self) -> Result<()> {
        let mut result = Ok(());
        for (index, pair) in &self.pairs {
            let accelerator = &mut self.accelerator;
            let polled =
                poll(pair, |now, events, requests| accelerator.poll(now, *index, events, requests));
            if polled.is_err() {
                poison(pair);
                self.accelerator.leave(*index);
                result = polled;
            }
        }
        self.pairs.retain(|(index, _)| self.accelerator.is_connected(*index));
        result
    }
}

/// Front end, and each node's pair. Sample `s` holds query `s` modulo the query count.
pub struct Front {
    pub front_end: FrontEnd,
    pub memory: Arc<Memory>,
    pub nodes: Vec<(NodeId, Communicator)>,
    pub next: u64,
    pub answered: u64,
}

impl Front {
    pub fn new(queries: u32) -> Front {
        Front::of(queries, schema())
    }

    pub fn of(queries: u32, schema: Schema) -> Front {
        let memory = Arc::new(Memory::shared((BYTES * SAMPLES) as usize).unwrap());
        let ledger = LedgerConfig { queries, nodes: 4, slots: SLOTS, ..LedgerConfig::default() };
        let front_end = FrontEnd::new(ledger, schema, std::slice::from_ref(&memory)).unwrap();
        Front { front_end, memory, nodes: Vec::new(), next: 0, answered: 0 }
    }

    pub fn join(&mut self, pair: Communicator) -> NodeId {
        let connection = Connection::over(&pair, &hello(Role::FrontEnd), by(PATIENCE)).unwrap();
        let key = pair.engine().register(self.memory.clone()).unwrap().key();
        let id = self.front_end.join(connection, &[key]).unwrap();
        self.nodes.push((id, pair));
        id
    }

    /// Submits the next query.
    pub fn submit(&mut self, patience: Duration) -> Result<QueryId> {
        let offset = self.next % SAMPLES * BYTES;
        self.memory.copy_in(offset as usize, &self.next.to_le_bytes());
        let input = Input { memory: 0, offset, length: BYTES };
        let query = self.front_end.submit(self.next, &[input], by(patience))?;
        self.next += 1;
        Ok(query)
    }

    /// Polls every node once. A lost node is removed; a violation is returned, and the node is lost.
    pub fn poll(&mut self) -> Result<()> {
        let mut result = Ok(());
        let front_end = &mut self.front_end;
        self.nodes.retain(|(id, pair)| {
            let mut is_lost = false;
            let polled = poll(pair, |now, events, requests| {
                is_lost = events.iter().any(|event| matches!(event, Event::Poisoned(_)));
                front_end.poll(now, *id, events, requests)
            });
            if polled.is_err() {
                poison(pair);
                front_end.lose(*id).unwrap();
                (result, is_lost) = (polled, true);
            }
            !is_lost
        });
        result
    }

    /// Takes reports; answers must have the right bytes.
    pub fn take(&mut self, mut failed: impl FnMut(&Report<'_>)) {
        while let Some(report) = self.front_end.next_report() {
            match report {
                Report::Answered { token, answer: seen, .. } => {
                    let mut query = vec![0; BYTES as usize];
                    query[..8].copy_from_slice(&token.to_le_bytes());
                    assert_eq!(seen.tensors().next(), Some(&answer(&query)[..]), "query {token}");
                    self.answered += 1;
                }
                other => failed(&other),
            }
        }
    }
}

/// Calls `step` until it returns true.
pub fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = by(PATIENCE);
    while !step() {
        assert!(clock::now() < end, "{what}");
        std::thread::yield_now();
    }
}

pub fn is_full(result: &Result<QueryId>) -> bool {
    matches!(result, Err(Error::Full { .. }))
}
