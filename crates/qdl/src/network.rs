//! Connections of a front end to its nodes, and the round trip by which LoadGen gets their names.
//!
//! Before the handshake of dispatch, a node answers queries for its name until the front end begins. A query is two
//! exchanges over the pair's control connection: the front end sends a number, and the node returns it with its hello.

use crate::error::{Error, Result};
use std::net::IpAddr;
use std::time::Duration;
use weft_control::pair::PairSettings;
use weft_dispatch::{Connection, Hello, Role, Schema, ServiceConfig};
use weft_fabric::pair::{PairConfig, connect as connect_pair};
use weft_fabric::{Communicator, ProviderKind, clock, registry};

/// First byte of a front end's message: the query for the name.
const NAME: u8 = 1;
/// First byte of a front end's message: queries follow by dispatch.
const BEGIN: u8 = 2;

/// Ends of connections: what both a front end and a node choose.
#[derive(Debug, Clone)]
pub struct End {
    /// Providers offered, of shm, verbs, ofi and tcp.
    pub providers: Vec<ProviderKind>,
    /// Most queries in flight to a node.
    pub slots: u32,
    /// Checksums of all payloads, verified at their arrival.
    pub checksum: bool,
    /// Time for each step of a handshake.
    pub patience: Duration,
    /// Time without work in which a service polls without a pause; for cores of their own.
    pub spin: Duration,
    /// Most bytes that a front end reserves for the slots of a connection.
    pub max_slot_bytes: u64,
    /// NUMA node of the memory of slots; `None`: that of the thread that uses a page first.
    pub numa_node: Option<u32>,
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
        }
    }
}

impl End {
    /// Provider of a name, alone.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn providers_named(name: &str) -> Result<Vec<ProviderKind>> {
        registry::of_pairs()
            .into_iter()
            .find(|kind| kind.name() == name)
            .map(|kind| vec![kind])
            .ok_or_else(|| Error::Invalid {
                what: "provider",
                value: format!("{name:?}"),
                expected: "shm, verbs, ofi or tcp".into(),
            })
    }

    /// Hello of this end.
    pub(crate) fn hello(&self, role: Role, name: String, schema: Option<Schema>) -> Hello {
        Hello { role, slots: self.slots, checksum: self.checksum, name, schema }
    }

    /// Configuration of the service of this end.
    pub(crate) fn service(&self) -> ServiceConfig {
        let (spin, max_slot_bytes, numa_node) = (self.spin, self.max_slot_bytes, self.numa_node);
        let default = ServiceConfig::default();
        ServiceConfig { submissions: 8192, spin, max_slot_bytes, numa_node, ..default }
    }

    /// Configuration of pairs at an address, with the secret of the environment.
    pub(crate) fn pairs(&self, address: &str) -> Result<PairConfig> {
        if self.slots == 0 || self.slots > Hello::MAX_SLOTS {
            return Err(Error::Invalid {
                what: "slots",
                value: self.slots.to_string(),
                expected: format!("1 to {}", Hello::MAX_SLOTS),
            });
        }
        let mut config = PairConfig::new(PairSettings::from_env(address)?);
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
    /// Number of the node, which may have several addresses.
    pub(crate) node: usize,
    pub(crate) pair: Communicator,
}

impl std::fmt::Debug for NodeLink {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "NodeLink({})", self.address)
    }
}

/// Connects to nodes, to all at once. Each has an address, or several with commas between them: a connection to each,
/// from the address of this host behind an @, or from that which the system chooses.
///
/// # Errors
/// [`Error::Invalid`] without addresses, and for an empty or repeated one of a node; [`Error::Node`].
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

/// An address of a node.
struct NodeAddress<'a> {
    text: &'a str,
    listener: &'a str,
    /// Address of this host to connect from.
    source: Option<IpAddr>,
}

/// Addresses of a node, which has commas between them.
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

/// An address of a listener, with the address of this host to connect from behind an @.
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

/// Results of a call for each item, each in a thread of its own; the first error in the order of the items.
pub(crate) fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    call: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let call = &call;
        let threads: Vec<_> =
            items.into_iter().map(|item| scope.spawn(move || call(item))).collect();
        // A panic of a call is one of its caller.
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect::<Vec<Result<R>>>().into_iter().collect()
    })
}

/// Queries every node for its name and its tensors: a round trip over each connection. Returns one hello of each node.
///
/// # Errors
/// [`Error::Node`] for a lost connection; [`Error::Name`] for another reply; [`Error::SameName`]; [`Error::Invalid`] for
/// a node whose addresses are of several.
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

/// As [`ask_names`]; returns the schema of the nodes, checked.
///
/// # Errors
/// Those of [`ask_names`]; [`Error::Invalid`] without a schema; those of [`Schema::check`].
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
    /// Queries the node for its name: a round trip.
    fn ask_name(&self, patience: Duration) -> Result<Hello> {
        let number = clock::now().0.to_le_bytes();
        self.exchange(&[&[NAME], &number[..]].concat(), patience)?;
        let reply = self.exchange(&[], patience)?;
        let failed = |problem: String| Error::Name { address: self.address.clone(), problem };
        let hello = reply.strip_prefix(&number);
        let hello = hello.ok_or_else(|| failed("one to another query".into()))?;
        let hello = Hello::decode(hello).map_err(|error| failed(error.to_string()))?;
        match hello.role {
            Role::Accelerator => Ok(hello),
            Role::FrontEnd => Err(failed("that of a front end".into())),
        }
    }

    /// Ends the queries for the name; the handshake of dispatch follows.
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

/// Steps of a handshake that may each take the patience of an end: a limit of the whole.
const STEPS: u32 = 4;

/// Answers queries for the name until the front end begins, for at most four times `patience`.
///
/// # Errors
/// Those of the fabric, for a lost or silent front end; [`weft_dispatch::Error::Malformed`];
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
