//! Any host over sockets.
//!
//! Peers are connected by several streams each; a part of a write is one frame and goes on one of
//! them, the least loaded. The receiver checks every frame against what it granted before any of it
//! touches memory. `docs/wire-format.md` describes the bytes.
//!
//! - `wire.rs`: addresses, hellos and frames as bytes
//! - `adopted.rs`: a link over a connection that was made elsewhere
//! - `connect.rs`, `handshake.rs`: connecting to all peers, refusing strangers
//! - `peer.rs`, `granted.rs`: a peer's streams, its loss, what it was granted
//! - `stream.rs`, `output.rs`: one connection, and what waits to be sent on it
//! - `pieces.rs`, `socket.rs`: memory on its way, and the system calls that move it

mod adopted;
mod connect;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod granted;
mod handshake;
mod output;
mod peer;
mod pieces;
mod socket;
mod stream;
mod wire;

pub use adopted::{AdoptedTcp, Adoption, random_token};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{stream as fuzz_stream, wire as fuzz_wire};

use crate::bytes::Reader;
use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{ProviderKind, RegionKey, Time};
use connect::Expected;
use peer::{Peer, Shared};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use weft_control::{HostIdentity, Rank};
use wire::{Address, Pair, Token};

/// How a [`TcpDevice`] listens, cuts and queues. A pair of ranks takes the smaller of their `streams` and
/// of their `max_part_bytes`.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// The address to listen on. Loopback unless told otherwise.
    pub bind: IpAddr,
    /// The address that peers dial, if it is not `bind`.
    pub advertise: Option<IpAddr>,
    /// Connections to each peer, at least 1. Two let a route use two paths of a network and two
    /// receive queues of a NIC, and let one go on while the other recovers from a loss.
    pub streams: u32,
    /// The longest part of a write, at most 1 GiB. Shorter parts spread better over the streams,
    /// longer ones cost fewer system calls.
    pub max_part_bytes: u64,
    /// Bulk bytes that may wait to be sent to one peer, and twice as many bytes of both classes. One part
    /// is always taken.
    pub queue_bytes: u64,
    /// Bulk parts that may wait to be sent to one peer, and twice as many parts of both classes, signals
    /// and credits included; at least 1.
    pub queue_parts: u32,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            advertise: None,
            streams: 2,
            max_part_bytes: 1 << 20,
            queue_bytes: 64 << 20,
            queue_parts: 4096,
        }
    }
}

/// What a provider has refused.
#[derive(Debug, Default)]
pub struct TcpCounters {
    /// Connections closed because they did not prove that they belong to the group.
    pub refused_connections: AtomicU64,
    /// Frames that broke the rules or named bytes that were not granted. Each cost its peer the
    /// connection.
    pub refused_frames: AtomicU64,
}

/// How long a provider that is dropped waits for what it has sent to be acknowledged.
const LINGER: Duration = Duration::from_secs(1);
/// Streams with news that one poll attends to; the rest have the next poll.
const EVENTS: usize = 64;
/// Far enough behind zero, at which streams begin, that nothing counts as just copied.
const FIRST_FLUSH: u64 = 2;
/// While a caller spins, the stream that alone had news last is read without asking epoll first, but for
/// every so many polls. Whoever polls less often than this does not spin.
const HOT_READS: u32 = 8;
const SPINNING: Duration = Duration::from_micros(20);

/// Sockets of this host. See the module's page.
#[derive(Clone, Debug)]
pub struct TcpDevice {
    config: TcpConfig,
    counters: Arc<TcpCounters>,
}

/// One group's sockets.
struct TcpLink {
    config: TcpConfig,
    group: Membership,
    address: Address,
    /// The token issued to each peer, until the group is connected.
    issued: HashMap<Rank, Token>,
    /// Until the group is connected.
    listener: Option<OwnedFd>,
    /// In place of a listener: the connection to the one peer.
    adoption: Option<Adoption>,
    counters: Arc<TcpCounters>,
    epoll: OwnedFd,
    regions: Vec<Option<Arc<Memory>>>,
    /// By rank; `None` where another provider has the route.
    peers: Vec<Option<Peer>>,
    /// Streams with unsent output that no flush has attended to: rank and stream.
    dirty: Vec<(u32, u32)>,
    /// Flushes so far, from [`FIRST_FLUSH`] on.
    flushes: u64,
    /// Ranks whose connections have begun to end.
    ending: Vec<u32>,
    hot: HotStream,
}

/// The stream that is read first while a caller spins.
#[derive(Default)]
struct HotStream {
    /// Rank and stream that alone had news when epoll was last asked.
    stream: Option<(usize, usize)>,
    /// How often it was followed since.
    followed: u32,
    polled: Time,
}

impl HotStream {
    /// The stream to read at this poll instead of asking epoll.
    fn take(&mut self, now: Time) -> Option<(usize, usize)> {
        let spinning = now.since(self.polled) < SPINNING;
        self.polled = now;
        self.followed += 1;
        self.stream.filter(|_| spinning && self.followed < HOT_READS)
    }

    /// What epoll said.
    fn learn(&mut self, stream: Option<(usize, usize)>) {
        // With nothing new the old guess is as good as before.
        self.stream = stream.or(self.stream);
        self.followed = 0;
    }
}

impl TcpDevice {
    /// Sockets with this configuration.
    ///
    /// # Errors
    /// [`Error::Provider`] if a value is out of range or the address cannot be listened on.
    pub fn new(config: TcpConfig) -> Result<TcpDevice> {
        let limits = [
            ("streams", u64::from(config.streams), u64::from(wire::MAX_STREAMS)),
            ("max_part_bytes", config.max_part_bytes, 1 << 30),
            ("queue_parts", config.queue_parts.into(), u64::from(u32::MAX)),
        ];
        for (name, value, limit) in limits {
            if !(1..=limit).contains(&value) {
                return Err(unusable(format!("{name} {value}: choose 1 to {limit}")));
            }
        }
        if config.advertise.unwrap_or(config.bind).is_unspecified() {
            let bind = config.bind;
            let detail = format!("bind address {bind}: name the address that peers dial, too");
            return Err(unusable(detail));
        }
        let device = TcpDevice { config, counters: Arc::default() };
        device.listen()?;
        Ok(device)
    }

    fn listen(&self) -> Result<(OwnedFd, SocketAddr)> {
        let bind = self.config.bind;
        handshake::listen(SocketAddr::new(bind, 0))
            .map_err(|e| unusable(format!("cannot listen on {bind}: {e}")))
    }

    /// What was refused, to be watched from elsewhere.
    pub fn counters(&self) -> &Arc<TcpCounters> {
        &self.counters
    }
}

impl Device for TcpDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let (listener, bound) = self.listen()?;
        let ip = self.config.advertise.unwrap_or(self.config.bind);
        Ok(Box::new(self.link(group, SocketAddr::new(ip, bound.port()), Some(listener))?))
    }
}

fn unusable(detail: String) -> Error {
    Error::Provider { provider: ProviderKind::Tcp, detail }
}

impl Link for TcpLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// A loopback address reaches from its own host only. Both sides compare the same two addresses.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let other = Address::decode(theirs)?;
        let connected = self.adoption.is_some();
        let loopback = |address: &Address| address.socket.ip().is_loopback();
        let public = !loopback(&self.address) && !loopback(&other);
        let Pair { parts, streams } = self.address.pair(&other);
        let rule = RouteRule { parts, ordered: streams == 1, ..RouteRule::LATER };
        (connected || public || self.address.is_on_host_of(&other)).then_some(rule)
    }

    /// A token for the peer alone, which it shows on every connection.
    fn introduce(&mut self, peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        let token = new_token()?;
        self.issued.insert(peer, token);
        Ok(token.to_vec())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        if self.adoption.is_some() {
            return peers.iter().try_for_each(|peer| self.adopt(peer));
        }
        // Closed when this returns: every peer of the group is connected by then.
        let listener = self.listener.take();
        let listener = listener.ok_or_else(|| unusable("its link is connected already".into()))?;
        let issued = std::mem::take(&mut self.issued);
        let expected = |peer: &Introduction<'_>| {
            let malformed = |what| {
                let detail = "it is of another wire version or damaged".into();
                Error::Malformed { peer: peer.peer, what, detail }
            };
            let address = Address::decode(peer.address);
            let address = address.ok_or_else(|| malformed("a tcp address"))?;
            let shown = peer.message.try_into().map_err(|_| malformed("a tcp token"))?;
            let issued = issued.get(&peer.peer);
            let issued = *issued.ok_or_else(|| unusable(format!("{} has no token", peer.peer)))?;
            let streams = self.address.pair(&address).streams;
            Ok(Expected { rank: peer.peer, address, issued, shown, streams })
        };
        let expected: Vec<Expected> = peers.iter().map(expected).collect::<Result<_>>()?;
        let rules: Vec<PartRule> =
            expected.iter().map(|peer| self.address.pair(&peer.address).parts).collect();
        let (group, address, counters) = (&self.group, &self.address, &self.counters);
        let here = connect::Here { group, address, listener: &listener, counters };
        self.peers.resize_with(self.group.size as usize, || None);
        let connected = connect::connect(&here, expected, limit)?;
        for ((rank, sockets), rule) in connected.into_iter().zip(rules) {
            let peer = Peer::new(rank, rule, sockets, &self.epoll)
                .map_err(|e| Error::system("cannot watch a connection", e))?;
            self.peers[rank.0 as usize] = Some(peer);
        }
        Ok(())
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = format!(
                "its memory is {:?}; sockets read and write memory of the host only",
                memory.place()
            );
            return Err(Error::Unusable { provider: ProviderKind::Tcp, key, detail });
        }
        let slot = key.0 as usize;
        if slot >= self.regions.len() {
            self.regions.resize(slot + 1, None);
        }
        self.regions[slot] = Some(memory.clone());
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let entry = [range.start.to_le_bytes(), range.end.to_le_bytes()].concat();
        self.peer(peer)?.granted.add(key.0, range);
        Ok(entry)
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut reader = Reader::new(entry);
        let range = reader.u64().zip(reader.u64()).map(|(start, end)| start..end);
        let range = range.filter(|r| reader.is_at_end() && r.start <= r.end && r.end <= length);
        let range = range.ok_or_else(|| Error::Malformed {
            peer,
            what: "a tcp grant",
            detail: format!("it is not a range within {length} bytes"),
        })?;
        self.peer(peer)?.imported.add(key.0, range);
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        if let Some(region) = self.regions.get_mut(key.0 as usize) {
            *region = None;
        }
        for peer in self.peers.iter_mut().flatten() {
            peer.granted.remove(key.0);
        }
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        if let Ok(peer) = self.peer(peer) {
            peer.imported.remove(key.0);
        }
    }

    fn post(&mut self, work: &Work<'_>, sink: &mut Sink) -> Result<Posted, String> {
        let _ = sink;
        let peer = self.peers.get_mut(work.peer.0 as usize).and_then(Option::as_mut);
        let peer = peer.ok_or("tcp has no connection to it")?;
        let source = |key: RegionKey| self.regions.get(key.0 as usize).and_then(Option::as_ref);
        let mut payload = 0;
        for page in work.pages {
            peer.imported.check(page.destination.0, page.destination_offset, page.length)?;
            let length = source(page.source).map_or(0, |memory| memory.len() as u64);
            if page.source_offset.checked_add(page.length).is_none_or(|end| end > length) {
                return Err(format!("the source is outside of region {}", page.source.0));
            }
            payload += page.length;
        }
        let rule = peer.rule();
        if payload > rule.max_part_bytes || work.pages.len() > rule.max_pages_per_part as usize {
            return Err(format!("a part of {} pages and {payload} bytes", work.pages.len()));
        }
        let sources = work.pages.iter().filter_map(|page| source(page.source));
        let (posted, stream) = peer.post(work, payload, sources, &self.config, self.flushes)?;
        if let Some(stream) = stream {
            self.dirty.push((work.peer.0, stream));
        }
        Ok(posted)
    }

    fn flush(&mut self, sink: &mut Sink) {
        self.flushes += 1;
        while let Some((rank, stream)) = self.dirty.pop() {
            if let Some(peer) = &mut self.peers[rank as usize] {
                peer.send(stream as usize, &self.epoll, sink);
                note_ending(&mut self.ending, peer);
            }
        }
    }

    fn hold(&mut self, peer: Rank, token: u64) -> u32 {
        let flushes = self.flushes;
        self.peer(peer).map_or(0, |peer| peer.hold(token, flushes))
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        // Credits may have been posted with nobody flushing after them.
        self.flush(sink);
        let TcpLink { epoll, regions, counters, group, peers, ending, hot, .. } = self;
        let shared = Shared { epoll, regions, lanes: &group.lanes, counters };
        let mut ready = |rank: usize, stream, flags| {
            if let Some(peer) = peers.get_mut(rank).and_then(Option::as_mut) {
                peer.ready(stream, flags, &shared, sink);
                note_ending(ending, peer);
            }
        };
        if let Some((rank, stream)) = hot.take(now) {
            ready(rank, stream, epoll::EventFlags::IN);
        } else {
            let mut room = [const { MaybeUninit::uninit() }; EVENTS];
            // Without a timeout nothing can interrupt it, and the descriptor is ours.
            let events = epoll::wait(&*epoll, &mut room, Some(&Timespec::default()));
            let events = events.map_or(&[][..], |(events, _)| &*events);
            for event in events {
                let (rank, stream) = peer::of_event(event);
                ready(rank, stream, event.flags);
            }
            match events {
                [] => hot.learn(None),
                [event] => hot.learn(Some(peer::of_event(event))),
                _ => *hot = HotStream::default(),
            }
        }
        ending.retain(|&rank| {
            peers[rank as usize].as_mut().is_some_and(|peer| !peer.has_ended(now, sink))
        });
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        if let Some(peer) = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut) {
            peer.fence(sink);
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        // Epoll is level-triggered: what it has to report keeps its descriptor readable.
        self.dirty.is_empty()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.epoll.as_raw_fd()]
    }

    fn next_deadline(&self) -> Option<Time> {
        let ending = self.ending.iter().filter_map(|&rank| self.peers[rank as usize].as_ref());
        ending.filter_map(Peer::deadline).min()
    }
}

impl TcpLink {
    /// Takes over the connection to a peer that was made elsewhere.
    fn adopt(&mut self, peer: &Introduction<'_>) -> Result<()> {
        let refused = |detail: &str| Error::Connect {
            peer: peer.peer,
            provider: ProviderKind::Tcp,
            detail: detail.into(),
        };
        let address = Address::decode(peer.address);
        let address = address.ok_or_else(|| refused("its address is of another wire version"))?;
        let socket = self.adoption.as_ref().and_then(Adoption::take);
        let socket = socket.ok_or_else(|| refused("its connection was not handed over"))?;
        if self.address.is_on_host_of(&address) {
            connect::limit_buffer(&socket);
        }
        let rule = self.address.pair(&address).parts;
        let made = Peer::new(peer.peer, rule, vec![socket], &self.epoll)
            .map_err(|e| Error::system("cannot watch a connection", e))?;
        self.peers.resize_with(self.group.size as usize, || None);
        self.peers[peer.peer.index()] = Some(made);
        Ok(())
    }

    fn peer(&mut self, rank: Rank) -> Result<&mut Peer> {
        let peer = self.peers.get_mut(rank.0 as usize).and_then(Option::as_mut);
        peer.ok_or_else(|| Error::Unknown { what: "rank", number: rank.0.into() })
    }
}

fn note_ending(ending: &mut Vec<u32>, peer: &Peer) {
    if peer.is_ending() && !ending.contains(&peer.rank().0) {
        ending.push(peer.rank().0);
    }
}

impl Drop for TcpLink {
    /// What was posted shall arrive although its sender leaves: closing a socket that holds unread
    /// credits resets the connection, and what the peer has not acknowledged by then is thrown away.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        loop {
            let mut waiting = false;
            for peer in self.peers.iter_mut().flatten() {
                peer.send_all(&self.epoll, &mut sink);
                waiting |= peer.has_undelivered();
            }
            if !waiting || clock::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Sixteen bytes that nobody can guess.
fn new_token() -> Result<Token> {
    let mut token = Token::default();
    getrandom::fill(&mut token).map_err(|e| Error::Provider {
        provider: ProviderKind::Tcp,
        detail: format!("the system gives no random bytes: {e}"),
    })?;
    Ok(token)
}

/// Equal for two processes if they share a loopback: the boot and the network namespace. Empty if the
/// system does not report both.
fn this_host() -> Vec<u8> {
    let HostIdentity { boot, network, .. } = HostIdentity::here();
    let is_known = !boot.is_empty() && !network.is_empty();
    if is_known { format!("{boot} {network}").into_bytes() } else { Vec::new() }
}
