//! A front end's node connections, and the round trip by which LoadGen gets node names.
//!
//! Before the dispatch handshake, a node answers name queries until the front end begins. A query is two exchanges over
//! the pair's control connection: the front end sends a number, and the node returns it with a hello.

use crate::error::{Error, Result};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weft_control::pair::PairSettings;
use weft_dispatch::{Connection, Hello, Role, Schema, ServiceConfig};
use weft_fabric::pair::{PairConfig, connect as connect_pair};
use weft_fabric::{Communicator, ProviderKind, clock, registry};

/// First byte in a front end's message: name query.
const NAME: u8 = 1;
/// First byte in a front end's message: dispatch queries follow.
const BEGIN: u8 = 2;

/// Connection end: what both a front end and a node choose.
#[derive(Debug, Clone)]
pub struct End {
    /// Providers offered, a subset of shm, verbs, ofi and tcp.
    pub providers: Vec<ProviderKind>,
    /// Most queries in flight to a node.
    pub slots: u32,
    /// Payload checksums, verified on arrival.
    pub checksum: bool,
    /// Time for each handshake step.
    pub patience: Duration,
    /// Idle time in which a service polls without a pause; for dedicated cores.
    pub spin: Duration,
    /// Maximum bytes that a front end reserves for one connection's slots.
    pub max_slot_bytes: u64,
    /// NUMA node for slot memory; `None`: first touch decides.
    pub numa_node: Option<u32>,
    /// Set by the program to end connecting, handshakes and [`crate::ask::ask`] within 0.1 s.
    pub interrupt: Option<Arc<AtomicBool>>,
}

impl Default for End {
    fn default() -> End {
        End {
            providers: registry::pair_defaults(),
            slots: 1024,
            checksum: false,
            patience: Duration::from_secs(30),
            spin: Duration::ZERO,
            max_slot_bytes: ServiceConfig::default().max_slot_bytes,
            numa_node: None,
            interrupt: None,
        }
    }
}

impl End {
    /// The one provider with a name, for example `tcp`.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn providers_named(name: &str) -> Result<Vec<ProviderKind>> {
        registry::of_pairs()
            .into_iter()
            .find(|kind| *kind != ProviderKind::Copy && kind.name() == name)
            .map(|kind| vec![kind])
            .ok_or_else(|| Error::Invalid {
                what: "provider",
                value: format!("{name:?}"),
                expected: "shm, verbs, ofi or tcp".into(),
            })
    }

    /// Hello from this end.
    pub(crate) fn hello(&self, role: Role, name: String, schema: Option<Schema>) -> Hello {
        Hello { role, slots: self.slots, checksum: self.checksum, name, schema }
    }

    /// Service configuration for this end.
    pub(crate) fn service(&self) -> ServiceConfig {
        let (spin, max_slot_bytes, numa_node) = (self.spin, self.max_slot_bytes, self.numa_node);
        let default = ServiceConfig::default();
        ServiceConfig { submissions: 8192, spin, max_slot_bytes, numa_node, ..default }
    }

    /// Pair configuration for an address, with the environment's secret.
    pub(crate) fn pairs(&self, address: &str) -> Result<PairConfig> {
        if self.slots == 0 || self.slots > Hello::MAX_SLOTS {
            return Err(Error::Invalid {
                what: "slots",
                value: self.slots.to_string(),
                expected: format!("1 to {}", Hello::MAX_SLOTS),
            });
        }
        let mut settings = PairSettings::from_env(address)?;
        if let Some(raised) = self.interrupt.clone() {
            settings.interrupt = Some(Arc::new(move || raised.load(Ordering::Relaxed)));
        }
        let mut config = PairConfig::new(settings);
        config.providers.clone_from(&self.providers);
        // A front end receives the schema, which may have tokens, over the pair.
        config.engine = Connection::streaming_engine_config(self.slots);
        Ok(config)
    }
}

/// A connected node, before queries.
pub struct NodeLink {
    /// Address.
    pub address: String,
    /// Node number; a node may have several addresses.
    pub(crate) node: usize,
    pub(crate) pair: Communicator,
}

impl std::fmt::Debug for NodeLink {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "NodeLink({})", self.address)
    }
}

/// Connects to all nodes at once. Each has one address, or several with commas between them, and gets a connection to
/// each address. The source is this host's address behind an @, for example `10.0.0.2:7000@10.0.0.1`; otherwise the
/// system chooses it.
///
/// # Errors
/// [`Error::Invalid`] without addresses, and for a node's empty or repeated address; [`Error::Node`].
pub fn connect(nodes: &[String], end: &End) -> Result<Vec<NodeLink>> {
    if nodes.is_empty() {
        let (value, expected) = ("0".into(), "at least one address".into());
        return Err(Error::Invalid { what: "nodes", value, expected });
    }
    let connect_one = |(node, address): (usize, NodeAddress<'_>)| {
        let deadline = clock::now().after(end.patience);
        let mut config = end.pairs(address.listener)?;
        config.settings.source = address.source;
        let address = address.text.to_owned();
        match connect_pair(&config, deadline) {
            Ok(pair) => Ok(NodeLink { address, node, pair }),
            Err(error) => Err(Error::Node { address, source: error.into() }),
        }
    };
    let mut addresses = Vec::with_capacity(nodes.len());
    for (node, text) in nodes.iter().enumerate() {
        addresses.extend(addresses_of(text)?.into_iter().map(|address| (node, address)));
    }
    in_parallel(addresses, connect_one)
}

/// A node address.
struct NodeAddress<'a> {
    text: &'a str,
    listener: &'a str,
    /// This host's address to connect from.
    source: Option<IpAddr>,
}

/// A node's addresses, separated by commas.
fn addresses_of(node: &str) -> Result<Vec<NodeAddress<'_>>> {
    let addresses = node.split(',').map(|each| parsed(each.trim())).collect::<Result<Vec<_>>>()?;
    let is_wrong = |(at, address): (usize, &NodeAddress<'_>)| {
        let same = |other: &NodeAddress<'_>| {
            (other.listener, other.source) == (address.listener, address.source)
        };
        address.listener.is_empty() || addresses[..at].iter().any(same)
    };
    if addresses.iter().enumerate().any(is_wrong) {
        let expected = "host:port, or several distinct ones with commas between them".into();
        return Err(Error::Invalid { what: "node", value: format!("{node:?}"), expected });
    }
    Ok(addresses)
}

/// A listener address, with this host's source address behind an @.
fn parsed(text: &str) -> Result<NodeAddress<'_>> {
    let Some((listener, source)) = text.rsplit_once('@') else {
        return Ok(NodeAddress { text, listener: text, source: None });
    };
    let bare = source.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let source = match bare {
        Some(bare) => bare.parse().map(IpAddr::V6).ok(),
        None => source.parse().ok(),
    };
    if source.is_none() {
        let expected = "host:port, or host:port@source with an IP address of this host".into();
        return Err(Error::Invalid { what: "address", value: format!("{text:?}"), expected });
    }
    Ok(NodeAddress { text, listener, source })
}

/// Results of one call per item, each in a separate thread; the first error in item order.
pub(crate) fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    call: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let call = &call;
        let start = |item| {
            let thread = std::thread::Builder::new().name("weft-node-call".into());
            thread.spawn_scoped(scope, move || call(item))
        };
        let threads: Vec<_> = items.into_iter().map(start).collect();
        // A panic in a call becomes the caller's.
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<R>>>| {
            let what = "cannot start a node thread";
            let thread = thread.map_err(|error| weft_fabric::Error::system(what, error))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect::<Vec<Result<R>>>().into_iter().collect()
    })
}

/// Queries every node for the name and tensors: a round trip over each connection. Returns one hello per node.
///
/// # Errors
/// [`Error::Node`] for a lost connection; [`Error::Name`] for another reply; [`Error::SameName`]; [`Error::Invalid`] if
/// a node's addresses lead to several nodes.
pub fn ask_names(links: &[NodeLink], patience: Duration) -> Result<Vec<Hello>> {
    let mut known: Vec<(usize, Hello)> = Vec::with_capacity(links.len());
    let asked = in_parallel(links.iter().collect(), |link: &NodeLink| link.ask_name(patience))?;
    for (link, hello) in links.iter().zip(asked) {
        let (address, name) = (link.address.clone(), hello.name.clone());
        if let Some((_, first)) = known.iter().find(|(node, _)| *node == link.node) {
            if first.name != name {
                let expected = format!("an address of node {:?}, as the first one", first.name);
                let value = format!("{address}, of node {name:?}");
                return Err(Error::Invalid { what: "address", value, expected });
            }
            continue;
        }
        if known.iter().any(|(_, other)| other.name == name) {
            return Err(Error::SameName { address, name });
        }
        known.push((link.node, hello));
    }
    Ok(known.into_iter().map(|(_, hello)| hello).collect())
}

/// Same as [`ask_names`]; returns the nodes' common schema, checked.
///
/// # Errors
/// Errors from [`ask_names`] and [`Schema::check`]; [`Error::Invalid`] without a schema.
pub(crate) fn ask_schema(links: &[NodeLink], patience: Duration) -> Result<Schema> {
    let schema = ask_names(links, patience)?.into_iter().find_map(|hello| hello.schema);
    let schema = schema.ok_or_else(|| Error::Invalid {
        what: "schemas of nodes",
        value: "0".into(),
        expected: "at least one".into(),
    })?;
    schema.check()?;
    Ok(schema)
}

impl NodeLink {
    /// Queries the node for the name: a round trip within `patience`.
    fn ask_name(&self, patience: Duration) -> Result<Hello> {
        let now = clock::now();
        let number = now.0.to_le_bytes();
        self.exchange(&[&[NAME], &number[..]].concat(), patience)?;
        let reply = self.exchange(&[], now.after(patience).since(clock::now()))?;
        let failed = |problem: String| Error::Name { address: self.address.clone(), problem };
        let hello = reply.strip_prefix(&number);
        let hello = hello.ok_or_else(|| failed("one to another query".into()))?;
        let hello = Hello::decode(hello).map_err(|error| failed(error.to_string()))?;
        match hello.role {
            Role::Accelerator => Ok(hello),
            Role::FrontEnd => Err(failed("a front end's".into())),
        }
    }

    /// Ends the name queries; the dispatch handshake follows.
    ///
    /// # Errors
    /// [`Error::Node`] for a lost connection.
    pub fn begin(&self, patience: Duration) -> Result<()> {
        self.exchange(&[BEGIN], patience).map(drop)
    }

    fn exchange(&self, message: &[u8], patience: Duration) -> Result<Vec<u8>> {
        exchange(&self.pair, message, patience)
            .map_err(|error| Error::Node { address: self.address.clone(), source: error.into() })
    }
}

/// Handshake steps that may each take an end's patience: a limit on the whole.
const STEPS: u32 = 4;

/// Answers queries for the name until the front end begins, for at most four times `patience`.
///
/// # Errors
/// Fabric errors, for a lost or silent front end; [`weft_dispatch::Error::Malformed`];
/// [`weft_dispatch::Error::Timeout`].
pub(crate) fn answer_names(
    pair: &Communicator,
    hello: &Hello,
    patience: Duration,
) -> Result<(), weft_dispatch::Error> {
    let until = clock::now().after(patience * STEPS);
    loop {
        let left = until.since(clock::now());
        let query = exchange(pair, &[], patience.min(left)).map_err(|error| {
            if clock::now() < until {
                return error.into();
            }
            let detail = format!("the front end has not begun within {:?}", patience * STEPS);
            weft_dispatch::Error::Timeout { what: "handshake", detail }
        })?;
        match query.split_first() {
            Some((&BEGIN, [])) => return Ok(()),
            Some((&NAME, number)) if number.len() == 8 => {
                exchange(pair, &[number, &hello.encode()].concat(), patience)?;
            }
            _ => {
                let detail = format!("{} bytes: expected a query for the name", query.len());
                return Err(weft_dispatch::Error::Malformed { what: "control message", detail });
            }
        }
    }
}

/// Sends a message and receives the peer's.
fn exchange(
    pair: &Communicator,
    message: &[u8],
    patience: Duration,
) -> weft_fabric::Result<Vec<u8>> {
    let peer = 1 - pair.rank().index();
    let mut messages = vec![Vec::new(), Vec::new()];
    messages[peer] = message.to_vec();
    let mut replies = pair.exchange(&messages, clock::now().after(patience))?;
    Ok(replies.swap_remove(peer))
}
