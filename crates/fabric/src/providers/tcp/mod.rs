//! Any host, over TCP sockets.
//!
//! Each pair of ranks has several streams. A part of a write is one frame on one of them, the least loaded.
//! The receiver checks a frame against its own grants before any byte of it touches memory.
//! `docs/wire-format.md` describes the bytes.
//!
//! - `wire.rs`: addresses, hellos and frames as bytes
//! - `connect.rs`, `handshake.rs`: connections to all peers, with a bound on unknown ones
//! - `adopted.rs`: link over a connection that the pair protocol made
//! - `peer.rs`, `granted.rs`: a peer's streams, its loss, the ranges granted to it
//! - `channel.rs`: socket of a stream, with or without TLS
//! - `stream.rs`, `send_queue.rs`: one connection, and its unsent frames; `hot_stream.rs`: reads without epoll
//! - `segments.rs`, `socket.rs`: pages of a frame, and the system calls that move them

mod adopted;
#[cfg(all(test, not(miri)))]
#[path = "../../../../control/tests/common/certificates.rs"]
mod certificates;
mod channel;
mod connect;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod granted;
mod handshake;
mod hot_stream;
mod peer;
mod segments;
mod send_queue;
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
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{ProviderKind, RegionKey, Time};
use channel::Channel;
use connect::ExpectedPeer;
use hot_stream::{HotRead, HotStream};
use peer::{LinkContext, Peer};
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
use wire::{PairRule, TcpAddress, Token};

/// Configuration of a [`TcpDevice`]. A pair of ranks uses the smaller of their `streams` and of their
/// `max_part_bytes`.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Address to listen on (default: loopback).
    pub bind: IpAddr,
    /// Address that peers dial, if it differs from `bind`.
    pub advertise: Option<IpAddr>,
    /// Connections to each peer, at least 1. Two let a route use two paths of a network and two receive
    /// queues of a NIC, and let one continue while the other recovers from a loss.
    pub streams: u32,
    /// Longest part of a write, at most 1 GiB. Shorter parts spread better over the streams, longer ones
    /// cost fewer system calls.
    pub max_part_bytes: u64,
    /// Bulk bytes queued toward one peer; bytes of both classes may reach twice this. An empty queue
    /// accepts any part.
    pub queue_bytes: u64,
    /// Bulk parts queued toward one peer, at least 1; parts of both classes, signals and credits included,
    /// may reach twice this.
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

/// Counts of rejected connections and frames.
#[derive(Debug, Default)]
pub struct TcpCounters {
    /// Connections closed because they did not prove membership in the group.
    pub refused_connections: AtomicU64,
    /// Frames that violated the protocol or addressed bytes outside of a grant; each closed its connection.
    pub refused_frames: AtomicU64,
}

/// Time for which a dropped link waits until its bytes are acknowledged.
const LINGER: Duration = Duration::from_secs(1);
/// Streams served by one poll; the others wait for the next.
const MAX_EVENTS: usize = 64;
/// First value of [`TcpLink::flushes`]: above that of new streams by more than one, so that none counts as
/// recently copied.
const FIRST_FLUSH: u64 = 2;
/// TCP sockets of this host; see the module's page.
#[derive(Clone, Debug)]
pub struct TcpDevice {
    config: TcpConfig,
    counters: Arc<TcpCounters>,
}

/// Sockets of one group.
struct TcpLink {
    config: TcpConfig,
    group: Membership,
    address: TcpAddress,
    /// Tokens issued to the peers, until the group is connected.
    issued: HashMap<Rank, Token>,
    /// Listening socket, until the group is connected.
    listener: Option<OwnedFd>,
    /// In place of a listener: source of the connection to the one peer.
    adoption: Option<Adoption>,
    counters: Arc<TcpCounters>,
    epoll: OwnedFd,
    regions: RegionMap<Arc<Memory>>,
    /// Peers of which this provider has the route.
    peers: PeerMap<Peer>,
    /// Streams with frames queued since the last flush: rank and stream.
    dirty: Vec<(u32, u32)>,
    /// Number of flushes, from [`FIRST_FLUSH`] on.
    flushes: u64,
    /// Streams with received bytes that epoll does not report: rank and stream.
    unread: Vec<(u32, u32)>,
    /// Ranks with an ending connection.
    ending: Vec<u32>,
    hot: HotStream,
}

impl TcpDevice {
    /// TCP sockets with this configuration.
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
                return Err(provider_error(format!("{name} {value}: expected 1 to {limit}")));
            }
        }
        if config.advertise.unwrap_or(config.bind).is_unspecified() {
            let bind = config.bind;
            let detail = format!(
                "bind address {bind}: expected an address that peers can dial; set `advertise`"
            );
            return Err(provider_error(detail));
        }
        let device = TcpDevice { config, counters: Arc::default() };
        device.listen()?;
        Ok(device)
    }

    fn listen(&self) -> Result<(OwnedFd, SocketAddr)> {
        let bind = self.config.bind;
        handshake::listen(SocketAddr::new(bind, 0))
            .map_err(|e| provider_error(format!("cannot listen on {bind}: {e}")))
    }

    /// Counts of rejected connections and frames.
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

fn provider_error(detail: String) -> Error {
    Error::Provider { provider: ProviderKind::Tcp, detail }
}

impl Link for TcpLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// A loopback address reaches its own host only. Both sides compare the same two addresses.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let other = TcpAddress::decode(theirs)?;
        let connected = self.adoption.is_some();
        let loopback = |address: &TcpAddress| address.socket.ip().is_loopback();
        let public = !loopback(&self.address) && !loopback(&other);
        let PairRule { parts, streams } = self.address.pair(&other);
        let rule = RouteRule { parts, ordered: streams == 1, ..RouteRule::DEFERRED };
        (connected || public || self.address.is_on_host_of(&other)).then_some(rule)
    }

    /// Token for this peer alone, which it presents on every connection.
    fn introduce(&mut self, peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        let token = new_token()?;
        self.issued.insert(peer, token);
        Ok(token.to_vec())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        if self.adoption.is_some() {
            return peers.iter().try_for_each(|peer| self.adopt(peer));
        }
        // Closed on return: all peers are connected by then.
        let listener = self.listener.take();
        let listener =
            listener.ok_or_else(|| provider_error("its link is already connected".into()))?;
        let issued = std::mem::take(&mut self.issued);
        let expected = |peer: &Introduction<'_>| {
            let malformed = |what| {
                let detail = "another wire version, or damaged".into();
                Error::Malformed { peer: peer.peer, what, detail }
            };
            let address = TcpAddress::decode(peer.address);
            let address = address.ok_or_else(|| malformed("a tcp address"))?;
            let shown = peer.message.try_into().map_err(|_| malformed("a tcp token"))?;
            let issued = issued.get(&peer.peer);
            let issued =
                *issued.ok_or_else(|| provider_error(format!("{} has no token", peer.peer)))?;
            let streams = self.address.pair(&address).streams;
            Ok(ExpectedPeer { rank: peer.peer, address, issued, shown, streams })
        };
        let expected: Vec<ExpectedPeer> = peers.iter().map(expected).collect::<Result<_>>()?;
        let rules: Vec<PartRule> =
            expected.iter().map(|peer| self.address.pair(&peer.address).parts).collect();
        let (group, address, counters) = (&self.group, &self.address, &self.counters);
        let context = connect::ConnectContext { group, address, listener: &listener, counters };
        let connected = connect::connect(&context, expected, limit)?;
        for ((rank, sockets), rule) in connected.into_iter().zip(rules) {
            let channels = sockets.into_iter().map(Channel::from).collect();
            let peer = Peer::new(rank, rule, channels, &self.epoll)
                .map_err(|e| Error::system("cannot watch a connection", e))?;
            self.peers.insert(rank, peer);
        }
        Ok(())
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = format!(
                "memory of {:?}: sockets transfer host memory only; copy it to host memory first",
                memory.kind()
            );
            return Err(Error::Unusable { provider: ProviderKind::Tcp, key, detail });
        }
        self.regions.insert(key, memory.clone());
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
            detail: format!("expected a range within {length} bytes"),
        })?;
        self.peer(peer)?.imported.add(key.0, range);
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        self.regions.remove(key);
        for peer in self.peers.values_mut() {
            peer.granted.remove(key.0);
        }
    }

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        if let Ok(peer) = self.peer(peer) {
            peer.imported.remove(key.0);
        }
    }

    fn post(&mut self, work: &WorkRequest<'_>, sink: &mut Sink) -> Result<PostStatus, String> {
        let _ = sink;
        let peer = self.peers.get_mut(work.peer);
        let peer = peer.ok_or("tcp has no connection to it")?;
        let source = |key: RegionKey| self.regions.get(key);
        let mut payload = 0;
        for page in work.pages {
            peer.imported.check(page.destination.0, page.destination_offset, page.length)?;
            let length = source(page.source).map_or(0, |memory| memory.len() as u64);
            if page.source_offset.checked_add(page.length).is_none_or(|end| end > length) {
                return Err(format!("source outside of region {}", page.source.0));
            }
            payload += page.length;
        }
        let rule = peer.rule();
        if payload > rule.max_part_bytes || work.pages.len() > rule.max_pages_per_part as usize {
            return Err(format!(
                "part of {} pages and {payload} bytes: above the limits of the pair",
                work.pages.len()
            ));
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
            if let Some(peer) = self.peers.get_mut(Rank(rank)) {
                peer.send(stream as usize, &self.epoll, sink);
                track_ending(&mut self.ending, peer);
            }
        }
    }

    fn hold(&mut self, peer: Rank, token: u64) -> u32 {
        let flushes = self.flushes;
        self.peer(peer).map_or(0, |peer| peer.hold(token, flushes))
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        // Credits are posted without a flush after them.
        self.flush(sink);
        let TcpLink { epoll, regions, counters, group, peers, unread, ending, hot, .. } = self;
        if peers.is_empty() {
            // Other providers have all routes: this saves a system call.
            return;
        }
        let link = LinkContext { epoll, regions, lanes: &group.lanes, counters };
        let earlier = std::mem::take(unread);
        let mut ready = |rank: usize, stream, flags, sink: &mut Sink| {
            if let Some(peer) = peers.get_mut(Rank(rank as u32)) {
                peer.ready(stream, flags, &link, sink);
                track_ending(ending, peer);
                let entry = (rank as u32, stream as u32);
                if peer.has_unread(stream) && !unread.contains(&entry) {
                    unread.push(entry);
                }
            }
        };
        for (rank, stream) in earlier {
            ready(rank as usize, stream as usize, epoll::EventFlags::IN, sink);
        }
        let mut needs_epoll = true;
        if let Some(HotRead { stream: (rank, stream), or_epoll }) = hot.take(now) {
            let before = sink.raised.len();
            ready(rank, stream, epoll::EventFlags::IN, sink);
            needs_epoll = or_epoll && sink.raised.len() == before;
        }
        if needs_epoll {
            let mut room = [const { MaybeUninit::uninit() }; MAX_EVENTS];
            // A zero timeout cannot be interrupted, and the descriptor is ours.
            let events = epoll::wait(&*epoll, &mut room, Some(&Timespec::default()));
            let events = events.map_or(&[][..], |(events, _)| &*events);
            for event in events {
                let (rank, stream) = peer::stream_of(event);
                ready(rank, stream, event.flags, sink);
            }
            match events {
                [] => hot.record(None),
                [event] => hot.record(Some(peer::stream_of(event))),
                _ => *hot = HotStream::default(),
            }
        }
        ending.retain(|&rank| {
            peers.get_mut(Rank(rank)).is_some_and(|peer| !peer.has_ended(now, sink))
        });
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.fence(sink);
        }
    }

    fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    fn expect_messages(&mut self) {
        self.hot.expect();
    }

    fn prepare_sleep(&mut self) -> bool {
        // Epoll is level-triggered: pending events keep its descriptor readable.
        self.dirty.is_empty() && self.unread.is_empty()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.epoll.as_raw_fd()]
    }

    fn next_deadline(&self) -> Option<Time> {
        let ending = self.ending.iter().filter_map(|&rank| self.peers.get(Rank(rank)));
        ending.filter_map(Peer::deadline).min()
    }
}

impl TcpLink {
    /// Takes over the connection of the pair protocol.
    fn adopt(&mut self, peer: &Introduction<'_>) -> Result<()> {
        let refused = |detail: &str| Error::Connect {
            peer: peer.peer,
            provider: ProviderKind::Tcp,
            detail: detail.into(),
        };
        let address = TcpAddress::decode(peer.address);
        let address = address.ok_or_else(|| refused("address of another wire version"))?;
        let stream = self.adoption.as_ref().and_then(Adoption::take);
        let stream = stream.ok_or_else(|| refused("no connection was handed over"))?;
        if self.address.is_on_host_of(&address) {
            connect::limit_buffer(&stream);
        }
        let rule = self.address.pair(&address).parts;
        let made = Peer::new(peer.peer, rule, vec![Channel::new(stream)], &self.epoll)
            .map_err(|e| Error::system("cannot watch a connection", e))?;
        self.peers.insert(peer.peer, made);
        // Bytes behind its token may have been read with that.
        self.unread.push((peer.peer.0, 0));
        Ok(())
    }

    fn peer(&mut self, rank: Rank) -> Result<&mut Peer> {
        let peer = self.peers.get_mut(rank);
        peer.ok_or_else(|| Error::Unknown { what: "rank", number: rank.0.into() })
    }
}

fn track_ending(ending: &mut Vec<u32>, peer: &Peer) {
    if peer.is_ending() && !ending.contains(&peer.rank().0) {
        ending.push(peer.rank().0);
    }
}

impl Drop for TcpLink {
    /// Delivers posted parts before the sockets close: closing a socket with unread credits resets the
    /// connection, and the kernel then drops unacknowledged bytes.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        loop {
            let mut waiting = false;
            for peer in self.peers.values_mut() {
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

/// Sixteen random bytes from the system.
fn new_token() -> Result<Token> {
    let mut token = Token::default();
    getrandom::fill(&mut token).map_err(|e| Error::Provider {
        provider: ProviderKind::Tcp,
        detail: format!("no random bytes from the system: {e}"),
    })?;
    Ok(token)
}

/// Identity of the loopback network: boot and network namespace. Empty if the system does not report both.
fn host_identity() -> Vec<u8> {
    let HostIdentity { boot, network, .. } = HostIdentity::here();
    let is_known = !boot.is_empty() && !network.is_empty();
    if is_known { format!("{boot} {network}").into_bytes() } else { Vec::new() }
}
