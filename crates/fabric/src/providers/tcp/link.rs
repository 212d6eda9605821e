//! One group's use of the device: sockets, and frames to and from them.

use super::adoption::Adoption;
use super::channel::Channel;
use super::config::{TcpConfig, TcpCounters};
use super::connect::ExpectedPeer;
use super::hot_stream::{HotRead, HotStream};
use super::peer::{LinkContext, Peer};
use super::regions::TcpRegions;
use super::wire::{PairRule, TcpAddress, TcpIntroduction, Token};
use super::{connect, handshake, peer};
use crate::bytes::Reader;
use crate::clock;
use crate::error::{Error, Result};
use crate::id_map::PeerMap;
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{ProviderKind, RegionKey, Time};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{HostIdentity, Rank, limits};

/// Time for which a dropped link waits until sent bytes are acknowledged.
const LINGER: Duration = Duration::from_secs(1);

/// Streams served by one poll; the others wait for the next.
const MAX_EVENTS: usize = 64;

/// First [`TcpLink::flushes`] value: above the value in new streams by more than one, so that none counts
/// as recently copied.
pub(super) const FIRST_FLUSH: u64 = 2;

/// One group's sockets.
pub(super) struct TcpLink {
    pub(super) config: TcpConfig,
    pub(super) group: Membership,
    pub(super) address: TcpAddress,
    /// Tokens issued to the peers, until the group is connected.
    pub(super) issued: HashMap<Rank, Token>,
    /// Listening socket and port, from a higher rank's introduction until the group is connected.
    pub(super) listener: Option<(OwnedFd, u16)>,
    /// In place of a listener: where the connection to the one peer comes from.
    pub(super) adoption: Option<Adoption>,
    pub(super) counters: Arc<TcpCounters>,
    /// Present with peers.
    pub(super) epoll: Option<OwnedFd>,
    pub(super) regions: TcpRegions,
    /// Peers that are routed over this provider.
    pub(super) peers: PeerMap<Peer>,
    /// Streams with frames queued since the last flush: rank and stream.
    pub(super) dirty: Vec<(u32, u32)>,
    /// Flush count, from [`FIRST_FLUSH`] on.
    pub(super) flushes: u64,
    /// Streams with received bytes that epoll does not report: rank and stream.
    pub(super) unread: Vec<(u32, u32)>,
    /// Ranks with an ending connection.
    pub(super) ending: Vec<u32>,
    pub(super) hot: HotStream,
}

/// Error for an address that cannot be listened on.
pub(super) fn unusable(bind: IpAddr, error: std::io::Error) -> Error {
    if limits::is_exhausted(&error) {
        return Error::system("cannot listen over tcp", error);
    }
    // Any port was asked for.
    if error.kind() == std::io::ErrorKind::AddrInUse {
        return weft_control::Error::Ports { doing: "listening over tcp" }.into();
    }
    provider_error(format!(
        "cannot listen on {bind}: {error}; set WEFT_BIND and WEFT_ADVERTISE to addresses of this host"
    ))
}

pub(super) fn provider_error(detail: String) -> Error {
    Error::Provider { provider: ProviderKind::Tcp, detail }
}

impl Link for TcpLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// A loopback address reaches only the same host. Both sides compare the same two addresses.
    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let other = TcpAddress::decode(theirs)?;
        let connected = self.adoption.is_some();
        let loopback = |address: &TcpAddress| address.ip.is_loopback();
        let public = !loopback(&self.address) && !loopback(&other);
        let PairRule { parts, streams } = self.address.pair(&other);
        let rule = RouteRule { parts, ordered: streams == 1, ..RouteRule::DEFERRED };
        (connected || public || self.address.is_on_host_of(&other)).then_some(rule)
    }

    /// Token for this peer only, which it presents on every connection, and the port that it dials.
    fn introduce(&mut self, peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        let token = new_token()?;
        self.issued.insert(peer, token);
        if self.adoption.is_some() {
            return Ok(token.to_vec());
        }
        let port = if self.group.rank < peer { self.listen()? } else { 0 };
        Ok(TcpIntroduction { token, port }.encode())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        if !self.peers.is_empty() {
            return Err(provider_error("its link is already connected".into()));
        }
        if peers.is_empty() {
            return Ok(());
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an epoll descriptor", e))?;
        if self.adoption.is_some() {
            peers.iter().try_for_each(|peer| self.adopt(peer, &epoll))?;
            self.epoll = Some(epoll);
            return Ok(());
        }
        // Closed on return: all peers are connected by then.
        let listener = self.listener.take();
        let issued = std::mem::take(&mut self.issued);
        let expected = |peer: &Introduction<'_>| {
            let malformed = |what| {
                let detail = "another wire version, or damaged".into();
                Error::Malformed { peer: peer.peer, what, detail }
            };
            let address = TcpAddress::decode(peer.address);
            let address = address.ok_or_else(|| malformed("a tcp address"))?;
            let shown = TcpIntroduction::decode(peer.message);
            let TcpIntroduction { token: shown, port } =
                shown.ok_or_else(|| malformed("a tcp introduction"))?;
            let at = SocketAddr::new(address.ip, port);
            let issued = issued.get(&peer.peer);
            let issued =
                *issued.ok_or_else(|| provider_error(format!("{} has no token", peer.peer)))?;
            let streams = self.address.pair(&address).streams;
            Ok(ExpectedPeer { rank: peer.peer, address, at, issued, shown, streams })
        };
        let expected: Vec<ExpectedPeer> = peers.iter().map(expected).collect::<Result<_>>()?;
        let rules: Vec<PartRule> =
            expected.iter().map(|peer| self.address.pair(&peer.address).parts).collect();
        let (group, address, counters) = (&self.group, &self.address, &self.counters);
        let listener = listener.as_ref().map(|(socket, port)| connect::Listener {
            socket,
            address: SocketAddr::new(address.ip, *port),
        });
        let context = connect::ConnectContext { group, address, listener, counters };
        let connected = connect::connect(&context, expected, limit)?;
        for ((rank, sockets), rule) in connected.into_iter().zip(rules) {
            let channels = sockets.into_iter().map(Channel::from).collect();
            let peer = Peer::new(rank, rule, channels, &epoll)
                .map_err(|e| Error::system("cannot watch a connection", e))?;
            self.peers.insert(rank, peer);
        }
        self.epoll = Some(epoll);
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
        let Some(epoll) = &self.epoll else { return };
        while let Some((rank, stream)) = self.dirty.pop() {
            if let Some(peer) = self.peers.get_mut(Rank(rank)) {
                peer.send(stream as usize, epoll, sink);
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
        // Without one, other providers have all routes.
        let Some(epoll) = epoll else { return };
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
            let events = epoll::wait(&epoll, &mut room, Some(&Timespec::default()));
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
        // Epoll is level-triggered: pending events keep the descriptor readable.
        self.dirty.is_empty() && self.unread.is_empty()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.epoll.iter().map(AsRawFd::as_raw_fd).collect()
    }

    fn next_deadline(&self) -> Option<Time> {
        let ending = self.ending.iter().filter_map(|&rank| self.peers.get(Rank(rank)));
        ending.filter_map(Peer::deadline).min()
    }
}

impl TcpLink {
    /// Listening socket port, opened by the first call.
    fn listen(&mut self) -> Result<u16> {
        if let Some((_, port)) = &self.listener {
            return Ok(*port);
        }
        let bind = self.config.bind;
        let listener = handshake::listen(SocketAddr::new(bind, 0));
        let (socket, bound) = listener.map_err(|error| unusable(bind, error.into()))?;
        self.listener = Some((socket, bound.port()));
        Ok(bound.port())
    }

    /// Takes over the pair protocol's connection.
    fn adopt(&mut self, peer: &Introduction<'_>, epoll: &OwnedFd) -> Result<()> {
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
        let made = Peer::new(peer.peer, rule, vec![Channel::new(stream)], epoll)
            .map_err(|e| Error::system("cannot watch a connection", e))?;
        self.peers.insert(peer.peer, made);
        // Bytes behind the token may have been read with it.
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
        let Some(epoll) = &self.epoll else { return };
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        loop {
            let mut waiting = false;
            for peer in self.peers.values_mut() {
                peer.send_all(epoll, &mut sink);
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
pub(super) fn new_token() -> Result<Token> {
    let mut token = Token::default();
    getrandom::fill(&mut token).map_err(|e| Error::Provider {
        provider: ProviderKind::Tcp,
        detail: format!("no random bytes from the system: {e}"),
    })?;
    Ok(token)
}

/// Loopback network identity: boot and network namespace. Empty if the system does not report both.
pub(super) fn host_identity() -> Vec<u8> {
    let HostIdentity { boot, network, .. } = HostIdentity::here();
    let is_known = !boot.is_empty() && !network.is_empty();
    if is_known { format!("{boot} {network}").into_bytes() } else { Vec::new() }
}
