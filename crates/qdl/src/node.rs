//! Accelerator node: accepts front ends at an address and serves their queries.
//!
//! The caller's thread accepts, a thread for each front end completes its handshake, and a service of
//! `weft_dispatch` drives all connections.

use crate::counts::Counts;
use crate::error::Result;
use crate::network::{End, answer_names};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weft_dispatch::accelerator::Waker;
use weft_dispatch::{AcceleratorConfig, AcceleratorService, Executor, Hello, Role, Schema};
use weft_fabric::clock;
use weft_fabric::pair::Listener;

/// Time for the last answers of a node that stops.
const DRAIN: Duration = Duration::from_secs(2);

/// An accelerator node.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Address to listen at; port 0 is any free port.
    pub address: String,
    /// Name, unique among the nodes of a front end; empty: the address.
    pub name: String,
    /// Tensors of queries and answers.
    pub schema: Schema,
    /// Front ends, batches.
    pub batches: AcceleratorConfig,
    /// Slots and providers.
    pub end: End,
}

/// A listening node; [`Node::serve`] serves.
pub struct Node<E: Executor> {
    listener: Listener,
    hello: Hello,
    patience: Duration,
    service: AcceleratorService<E>,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
}

impl<E: Executor + Send + 'static> Node<E> {
    /// Listens. A backend is an executor that runs each batch between two polls.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::Dispatch`] for the configuration; those of the listener.
    pub fn bind(config: NodeConfig, executor: E, counts: Arc<Counts>) -> Result<Node<E>> {
        Node::bind_with(config, |_| Ok(executor), counts)
    }

    /// As [`Node::bind`], for an executor that wakes the node when a batch has ended.
    ///
    /// # Errors
    /// As [`Node::bind`]; those of `executor`.
    pub fn bind_with(
        config: NodeConfig,
        executor: impl FnOnce(Waker) -> weft_dispatch::Result<E>,
        counts: Arc<Counts>,
    ) -> Result<Node<E>> {
        let NodeConfig { address, name, schema, batches, end } = config;
        let (mut pairs, stop) = (end.pairs(&address)?, Arc::<AtomicBool>::default());
        let stopped = stop.clone();
        pairs.settings.interrupt = Some(Arc::new(move || stopped.load(Ordering::Relaxed)));
        let listener = Listener::bind(pairs)?;
        let name = if name.is_empty() { listener.address().to_string() } else { name };
        let hello = end.hello(Role::Accelerator, name, Some(schema.clone()));
        let service = AcceleratorService::start_with(end.service(), batches, schema, executor)?;
        Ok(Node { listener, hello, patience: end.patience, service, counts, stop })
    }

    /// Address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Name that front ends get.
    pub fn name(&self) -> &str {
        &self.hello.name
    }

    /// Flag that ends [`Node::serve`].
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Serves until its flag is set; then it answers the queries that have arrived, for at most 2 s. A front end that
    /// violates the protocol or is lost ends its own connection.
    ///
    /// # Errors
    /// Those of the listener; [`weft_dispatch::Error::Panicked`] if the backend did.
    pub fn serve(self) -> Result<()> {
        std::thread::scope(|scope| self.accept(scope))?;
        match self.service.stop(clock::now().after(DRAIN)) {
            // Front ends that stayed connected send their queries to other nodes.
            Ok(_) | Err(weft_dispatch::Error::Timeout { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Accepts pairs, and starts a thread for the handshake of each.
    fn accept<'scope>(&'scope self, scope: &'scope std::thread::Scope<'scope, '_>) -> Result<()> {
        let mut is_over = || {
            let state = self.service.state();
            if let Ok(state) = &state {
                self.counts.set_peers(state.front_ends as u64);
            }
            // A service that is busy with a long batch reports its state too late: it goes on.
            let has_ended = matches!(state, Err(weft_dispatch::Error::Stopped { .. }));
            self.stop.load(Ordering::Relaxed) || has_ended
        };
        loop {
            let deadline = clock::now().after(Duration::from_secs(3600));
            let pair = match self.listener.accept(deadline, &mut is_over) {
                Ok(pair) => pair,
                Err(weft_fabric::Error::Interrupted) => return Ok(()),
                Err(weft_fabric::Error::Timeout { .. }) => continue,
                Err(error) => return Err(error.into()),
            };
            let handshake = move || {
                // A pair that is dropped here is a departure for its front end, which reports it.
                if answer_names(&pair, &self.hello, self.patience).is_ok() {
                    let deadline = clock::now().after(self.patience);
                    let _ = self.service.join(pair, &self.hello, deadline);
                }
            };
            // Without a thread the pair is dropped as well.
            let thread = std::thread::Builder::new().name("weft-handshake".into());
            let _ = thread.spawn_scoped(scope, handshake);
        }
    }
}
