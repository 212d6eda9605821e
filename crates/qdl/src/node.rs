//! Accelerator node: accepts front ends at an address and serves queries.
//!
//! The caller's thread accepts, one thread per front end completes the handshake, and one `weft_dispatch` service
//! drives all connections.

use crate::counts::{Counts, Departure};
use crate::error::Result;
use crate::network::{End, answer_names};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use weft_dispatch::accelerator::Waker;
use weft_dispatch::{AcceleratorConfig, AcceleratorService, Executor, Hello, Role, Schema};
use weft_fabric::pair::Listener;
use weft_fabric::{Communicator, Error as Fabric, clock};

/// Time for the last answers when a node stops.
const DRAIN: Duration = Duration::from_secs(2);
/// Accept loop pause without a free descriptor, or with all handshakes in progress.
const BACK_OFF: Duration = Duration::from_millis(20);

/// An accelerator node.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Address to listen at; port 0 is any free port.
    pub address: String,
    /// Name, unique among a front end's nodes; empty: the address.
    pub name: String,
    /// Query and answer tensors.
    pub schema: Schema,
    /// Front ends, batches.
    pub batches: AcceleratorConfig,
    /// Handshakes at a time; further front ends wait.
    pub handshakes: usize,
    /// Slots and providers.
    pub end: End,
}

impl NodeConfig {
    /// Default for [`NodeConfig::handshakes`].
    pub const HANDSHAKES: usize = 32;
}

/// A listening node; [`Node::serve`] serves.
pub struct Node<E: Executor> {
    listener: Listener,
    hello: Hello,
    patience: Duration,
    handshakes: usize,
    service: AcceleratorService<E>,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
}

impl<E: Executor + Send + 'static> Node<E> {
    /// Listens. A backend is an executor that runs each batch between two polls.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::Dispatch`] for the configuration; listener errors.
    pub fn bind(config: NodeConfig, executor: E, counts: Arc<Counts>) -> Result<Node<E>> {
        Node::bind_with(config, |_| Ok(executor), counts)
    }

    /// As [`Node::bind`], for an executor that wakes the node when a batch has ended.
    ///
    /// # Errors
    /// Errors from [`Node::bind`] and from `executor`.
    pub fn bind_with(
        config: NodeConfig,
        executor: impl FnOnce(Waker) -> weft_dispatch::Result<E>,
        counts: Arc<Counts>,
    ) -> Result<Node<E>> {
        let NodeConfig { address, name, schema, batches, handshakes, end } = config;
        let (mut pairs, stop) = (end.pairs(&address)?, Arc::<AtomicBool>::default());
        let stopped = stop.clone();
        pairs.settings.interrupt = Some(Arc::new(move || stopped.load(Ordering::Relaxed)));
        let listener = Listener::bind(pairs)?;
        let name = if name.is_empty() { listener.address().to_string() } else { name };
        let hello = end.hello(Role::Accelerator, name, Some(schema.clone()));
        let service = AcceleratorService::start_with(end.service(), batches, schema, executor)?;
        let patience = end.patience;
        Ok(Node { listener, hello, patience, handshakes, service, counts, stop })
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

    /// Serves until the stop flag is set; then it answers the queries that have arrived, for at most 2 s. A front end
    /// that violates the protocol or is lost ends only the connection.
    ///
    /// # Errors
    /// Listener errors; [`weft_dispatch::Error::Panicked`] if the backend did.
    pub fn serve(self) -> Result<()> {
        std::thread::scope(|scope| self.accept(scope))?;
        match self.service.stop(clock::now().after(DRAIN)) {
            // Front ends still connected send queries to other nodes.
            Ok(_) | Err(weft_dispatch::Error::Timeout { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Accepts pairs, and starts a handshake thread for each.
    fn accept<'scope>(&'scope self, scope: &'scope std::thread::Scope<'scope, '_>) -> Result<()> {
        let under_way = Arc::new(AtomicUsize::new(0));
        let (mut is_over, mut was_short) = (|| self.is_over(), false);
        while !is_over() {
            if under_way.load(Ordering::Acquire) >= self.handshakes {
                std::thread::sleep(BACK_OFF);
                continue;
            }
            let deadline = clock::now().after(Duration::from_secs(3600));
            let pair = match self.listener.accept(deadline, &mut is_over) {
                Ok(pair) => pair,
                Err(Fabric::Interrupted) => return Ok(()),
                Err(Fabric::NoDialer { .. }) => continue,
                Err(
                    error @ (Fabric::Control(
                        weft_control::Error::Descriptors { .. }
                        | weft_control::Error::Thread { .. },
                    )
                    | Fabric::System { .. }),
                ) => {
                    if !std::mem::replace(&mut was_short, true) {
                        log::warn!("front ends wait: {error}");
                    }
                    std::thread::sleep(BACK_OFF);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            was_short = false;
            let one = Handshake::begin(&under_way);
            let handshake = move || {
                let _one = one;
                if let Err(error) = self.handshake(pair) {
                    log::warn!("handshake with a front end failed: {error}");
                    self.add_loss(error.to_string());
                }
            };
            // Without a thread the pair is dropped: the front end reports a departure.
            let thread = std::thread::Builder::new().name("weft-handshake".into());
            if let Err(error) = thread.spawn_scoped(scope, handshake) {
                log::warn!("no thread for the handshake with a front end: {error}");
            }
        }
        Ok(())
    }

    /// True if the node is to stop, or the service has ended. Updates the counts.
    fn is_over(&self) -> bool {
        let state = self.service.state();
        if let Ok(state) = &state {
            self.counts.set_peers(state.front_ends as u64);
        }
        for cause in self.service.take_losses().unwrap_or_default() {
            self.add_loss(cause);
        }
        // A service that is busy with a long batch reports late: it goes on.
        let has_ended = matches!(state, Err(weft_dispatch::Error::Stopped { .. }));
        self.stop.load(Ordering::Relaxed) || has_ended
    }

    fn handshake(&self, pair: Communicator) -> weft_dispatch::Result<()> {
        answer_names(&pair, &self.hello, self.patience)?;
        self.service.join(pair, &self.hello, clock::now().after(self.patience))
    }

    fn add_loss(&self, cause: String) {
        self.counts.add_departure(Departure { name: "front end".into(), cause, lost: true });
    }
}

/// Handshake under way.
struct Handshake(Arc<AtomicUsize>);

impl Handshake {
    fn begin(count: &Arc<AtomicUsize>) -> Handshake {
        count.fetch_add(1, Ordering::AcqRel);
        Handshake(count.clone())
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
