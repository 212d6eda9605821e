//! Rendezvous: addresses exchanged through rank 0, then one connection for each rank pair.
//!
//! Every rank dials rank 0 and sends the address at which peers reach it: the local end's address on that
//! connection. If that is loopback, the rank shares rank 0's host and sends no address: peers use rank
//! 0's address as they see it. Once all ranks have joined, rank 0 sends the roster; each rank then dials
//! the ranks between rank 0 and itself and accepts those above it. Afterwards all listeners close, and
//! rank 0 has no further role.

use crate::config::{MIN_SILENCE_TIMEOUT, is_loopback};
use crate::deadline::Deadline;
use crate::dial::{self, AuthenticatedConnection, DialTarget, FrameRead};
use crate::handshake::{Identity, JobId};
use crate::member::number_members;
use crate::message::{Message, RankDetails};
use crate::rank_listener::RankListener;
use crate::resolve::{loopback, resolve};
use crate::secret::random_bytes;
use crate::tls::{MaybeTlsStream, Tls};
use crate::wire::{FrameParser, FrameReader, FrameWriter};
use crate::{Config, Error, Member, Rank, Result};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Interval at which rank 0 checks joined ranks' connections and sends them the missing ranks.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
const JOIN_HINT: &str = "check that every rank was started and reaches the address of rank 0";

/// Placeholder for rank 0's host address in a rank's details.
const RANK_0_HOST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Authenticated connection to a peer.
pub(crate) struct PeerConnection {
    pub rank: Rank,
    pub stream: TcpStream,
    pub parser: FrameParser,
}

/// Rendezvous outcome: all members, and a connection to each.
pub(crate) struct JoinedGroup {
    pub members: Vec<Member>,
    pub connections: Vec<PeerConnection>,
    pub job: JobId,
    /// Shortest silence timeout over all ranks.
    pub shortest_silence: Duration,
}

/// Joins the other ranks. Rank 0 may pass a bound listener.
pub(crate) fn join(
    config: &Config,
    identity: &Identity,
    listener: Option<TcpListener>,
    deadline: &Deadline,
) -> Result<JoinedGroup> {
    if config.rank == Rank(0) {
        join_as_rank_0(config, identity, listener, deadline)
    } else {
        join_through_rank_0(config, identity, deadline)
    }
}

/// Rank 0: accepts all other ranks and sends them the roster.
fn join_as_rank_0(
    config: &Config,
    identity: &Identity,
    listener: Option<TcpListener>,
    deadline: &Deadline,
) -> Result<JoinedGroup> {
    let job = random_bytes()?;
    let mut present: BTreeMap<Rank, (PeerConnection, RankDetails)> = BTreeMap::new();
    if config.world_size > 1 {
        let listener = match listener {
            Some(listener) => listener,
            None => listen(rank_0_address(config, deadline)?)?,
        };
        let expected = (1..config.world_size).map(Rank).collect();
        let mut listener = RankListener::new(listener, identity.clone(), job, false, expected)?;
        let (mut reported, mut reported_at) = (Vec::new(), Instant::now());
        while !listener.missing().is_empty() {
            deadline.check("the other ranks to join")?;
            if deadline.expired() {
                let missing = listener.missing();
                let (waited, last) = (deadline.waited(), None);
                send_to_all(&mut present, &Message::Missing(missing.clone()));
                return Err(Error::Rendezvous { missing, waited, last, hint: JOIN_HINT });
            }
            for peer in listener.serve(REPORT_INTERVAL.min(deadline.left()))? {
                let details = RankDetails::read(&mut FrameReader::new(&peer.details));
                let blocking = peer.stream.set_nonblocking(false);
                let timeout = peer.stream.set_write_timeout(Some(WRITE_TIMEOUT));
                let (Ok(details), Ok(())) = (details, blocking.and(timeout)) else {
                    listener.expect_again(peer.rank);
                    continue;
                };
                let (rank, stream, parser) = (peer.rank, peer.stream, peer.parser);
                present.insert(rank, (PeerConnection { rank, stream, parser }, details));
            }
            present.retain(|rank, (connection, _)| {
                let closed = is_closed(&connection.stream);
                if closed {
                    listener.expect_again(*rank);
                }
                !closed
            });
            let missing = listener.missing();
            if missing != reported && reported_at.elapsed() >= REPORT_INTERVAL {
                send_to_all(&mut present, &Message::Missing(missing.clone()));
                (reported, reported_at) = (missing, Instant::now());
            }
        }
    }
    let advertised = config.advertise.unwrap_or(RANK_0_HOST);
    let mut roster = vec![own_details(config, advertised, 0)];
    roster.extend(present.values().map(|(_, details)| details.clone()));
    let own = address_for_other_hosts(&present);
    send_rosters(&mut present, &roster, own);
    let members = members(&roster, own);
    for (rank, (connection, _)) in &present {
        if !is_within_host(&connection.stream)
            && let Some(member) = members.get(rank.index())
        {
            check_reachable(member, &config.host_id)?;
        }
    }
    let connections: Vec<PeerConnection> =
        present.into_values().map(|(connection, _)| connection).collect();
    Ok(JoinedGroup { members, connections, job, shortest_silence: shortest_silence(&roster) })
}

/// Rank 0's host address: the one that ranks on other hosts dialed, if there are such ranks.
fn address_for_other_hosts(present: &BTreeMap<Rank, (PeerConnection, RankDetails)>) -> IpAddr {
    let addresses =
        present.values().filter_map(|(connection, _)| connection.stream.local_addr().ok());
    let addresses: Vec<IpAddr> = addresses.map(|address| address.ip().to_canonical()).collect();
    let outside = addresses.iter().find(|address| !address.is_loopback());
    *outside.or(addresses.first()).unwrap_or(&IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Sends the roster. Ranks on rank 0's host reach it over loopback, so the roster they get carries `own`, its
/// address for other hosts.
fn send_rosters(
    present: &mut BTreeMap<Rank, (PeerConnection, RankDetails)>,
    roster: &[RankDetails],
    own: IpAddr,
) {
    let filled = roster.iter().map(|details| RankDetails {
        address: if details.address == RANK_0_HOST { own } else { details.address },
        ..details.clone()
    });
    let within_host = Message::Roster(filled.collect()).frame();
    let other_hosts = Message::Roster(roster.to_vec()).frame();
    for (connection, _) in present.values_mut() {
        let frame = if is_within_host(&connection.stream) { &within_host } else { &other_hosts };
        let _ = connection.stream.write_all(frame);
    }
}

/// True for a connection over loopback.
fn is_within_host(stream: &TcpStream) -> bool {
    stream.peer_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

/// Rejects a rank on another host at a loopback address, which only its own host reaches.
fn check_reachable(member: &Member, host_id: &str) -> Result<()> {
    if member.address.is_loopback() && member.host_id != host_id {
        let (rank, address) = (member.rank, member.address);
        return Err(Error::LoopbackAddress { rank, address });
    }
    Ok(())
}

/// Any other rank: dials rank 0, receives the roster, connects to the rest.
fn join_through_rank_0(
    config: &Config,
    identity: &Identity,
    deadline: &Deadline,
) -> Result<JoinedGroup> {
    let mut own_listener = None;
    let mut make_details = |stream: &TcpStream| {
        let local = stream.local_addr().map_err(Error::system("querying the local address"))?;
        let local = local.ip().to_canonical();
        // Rank 0's host name may resolve to loopback there (Debian's 127.0.1.1); ranks on other
        // hosts still dial a public address.
        let default = match local {
            _ if !local.is_loopback() || is_loopback(&config.host) => local,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let bind = config.bind.unwrap_or(default);
        let mut port = 0;
        // No rank dials the last one.
        if config.rank.0 + 1 < config.world_size {
            let listener = listen(SocketAddr::new(bind, 0))?;
            let bound = listener.local_addr().map_err(Error::system("querying the local port"))?;
            port = bound.port();
            own_listener = Some(listener);
        }
        let reachable = match bind {
            bound if !bound.is_unspecified() => bound,
            _ if local.is_loopback() => RANK_0_HOST,
            _ => local,
        };
        let details = own_details(config, config.advertise.unwrap_or(reachable), port);
        // Body without the frame header.
        Ok(details.write(FrameWriter::new(0)).finish().split_off(5))
    };
    let target = DialTarget {
        rank: Rank(0),
        host: config.host.clone(),
        port: config.port,
        source: None,
        is_listener: false,
        tls: Tls::default(),
    };
    let connection = dial::dial(&target, identity, None, &mut make_details, deadline)?;
    let AuthenticatedConnection { mut stream, mut parser, job } = connection;
    let rank_0 = stream.tcp().peer_addr().map_err(Error::system("querying rank 0's address"))?;
    let rank_0 = rank_0.ip().to_canonical();
    let roster = await_roster(&mut stream, &mut parser, deadline)?;
    if roster.len() != config.world_size as usize {
        let problem = format!("its roster has {} ranks", roster.len());
        return Err(Error::Protocol { peer: Rank(0), problem });
    }
    let members = members(&roster, rank_0);
    if !rank_0.is_loopback() {
        members.iter().try_for_each(|member| check_reachable(member, &config.host_id))?;
    }
    let above = (config.rank.0 + 1..config.world_size).map(Rank).collect();
    let listener = own_listener
        .map(|listener| RankListener::new(listener, identity.clone(), job, true, above))
        .transpose()?;
    let mut connections = vec![PeerConnection { rank: Rank(0), stream: stream.into_tcp(), parser }];
    let (above, below) = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("weft-accept".into());
        let above = thread
            .spawn_scoped(scope, || accept_all(listener, deadline))
            .map_err(Error::thread("the thread that accepts connections"))?;
        let below = dial_all(config.rank, &members, &roster, identity, job, deadline);
        Ok::<_, Error>((above.join(), below))
    })?;
    connections.extend(below?);
    connections.extend(above.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    Ok(JoinedGroup { members, connections, job, shortest_silence: shortest_silence(&roster) })
}

fn await_roster(
    stream: &mut MaybeTlsStream,
    parser: &mut FrameParser,
    deadline: &Deadline,
) -> Result<Vec<RankDetails>> {
    let mut missing = Vec::new();
    let fail = |missing: Vec<Rank>, last| {
        let missing = if missing.is_empty() { vec![Rank(0)] } else { missing };
        Err(Error::Rendezvous { missing, waited: deadline.waited(), last, hint: JOIN_HINT })
    };
    loop {
        let frame = match dial::read_frame(stream, parser, deadline)? {
            FrameRead::Frame(frame) => frame,
            FrameRead::TimedOut => return fail(missing, None),
            FrameRead::Closed(problem) => return fail(missing, Some(format!("rank 0: {problem}"))),
        };
        match Message::parse(&frame) {
            Ok(Message::Missing(ranks)) => missing = ranks,
            Ok(Message::Roster(roster)) => return Ok(roster),
            Ok(_) => {
                let problem = "it sent another message than the roster".to_string();
                return Err(Error::Protocol { peer: Rank(0), problem });
            }
            Err(malformed) => {
                return Err(Error::Protocol { peer: Rank(0), problem: malformed.0.into() });
            }
        }
    }
}

fn dial_all(
    me: Rank,
    members: &[Member],
    roster: &[RankDetails],
    identity: &Identity,
    job: JobId,
    deadline: &Deadline,
) -> Result<Vec<PeerConnection>> {
    let between = members.iter().zip(roster).filter(|(m, _)| m.rank > Rank(0) && m.rank < me);
    between
        .map(|(member, details)| {
            let rank = member.rank;
            let target = DialTarget {
                rank,
                host: member.address.to_string(),
                port: details.port,
                source: None,
                is_listener: false,
                tls: Tls::default(),
            };
            let no_details = &mut |_: &TcpStream| Ok(Vec::new());
            let connection = dial::dial(&target, identity, Some(job), no_details, deadline)?;
            Ok(PeerConnection {
                rank,
                stream: connection.stream.into_tcp(),
                parser: connection.parser,
            })
        })
        .collect()
}

/// Accepts the ranks above this one; the last one has no listener.
fn accept_all(listener: Option<RankListener>, deadline: &Deadline) -> Result<Vec<PeerConnection>> {
    let mut connections = Vec::new();
    let Some(mut listener) = listener else { return Ok(connections) };
    while !listener.missing().is_empty() {
        deadline.check("the other ranks to join")?;
        if deadline.expired() {
            let (missing, waited) = (listener.missing(), deadline.waited());
            return Err(Error::Rendezvous { missing, waited, last: None, hint: JOIN_HINT });
        }
        let proved = listener.serve(deadline.slice())?;
        connections.extend(proved.into_iter().map(|peer| PeerConnection {
            rank: peer.rank,
            stream: peer.stream,
            parser: peer.parser,
        }));
    }
    Ok(connections)
}

/// Rank 0's listening address: the configured IP address, or the unspecified address for a host name.
fn rank_0_address(config: &Config, deadline: &Deadline) -> Result<SocketAddr> {
    if let Some(bind) = config.bind {
        return Ok(SocketAddr::new(bind, config.port));
    }
    if let Ok(address) = config.host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, config.port));
    }
    if is_loopback(&config.host) {
        return Ok(SocketAddr::new(loopback(), config.port));
    }
    let addresses = resolve(&config.host, config.port, deadline, "the name of rank 0's host")?;
    let addresses = addresses.map_err(|error| Error::Resolve {
        host: config.host.clone(),
        problem: error.to_string(),
    })?;
    let unspecified: IpAddr = match addresses.first() {
        Some(SocketAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    Ok(SocketAddr::new(unspecified, config.port))
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|source| {
        let is_any = address.port() == 0;
        let address = address.to_string();
        if source.kind() == std::io::ErrorKind::AddrInUse && is_any {
            Error::Ports { doing: "listening for the other ranks" }
        } else if source.kind() == std::io::ErrorKind::AddrInUse {
            Error::PortInUse { address }
        } else {
            Error::Listen { address, source }
        }
    })
}

fn own_details(config: &Config, address: IpAddr, port: u16) -> RankDetails {
    let silence = u64::try_from(config.silence_timeout.as_millis()).unwrap_or(u64::MAX);
    RankDetails { host_id: config.host_id.clone(), pid: std::process::id(), address, port, silence }
}

/// Shortest silence timeout in the roster.
fn shortest_silence(roster: &[RankDetails]) -> Duration {
    let shortest = roster.iter().map(|details| details.silence).min();
    shortest.map_or(Duration::MAX, Duration::from_millis).max(MIN_SILENCE_TIMEOUT)
}

/// Generation 0 members.
fn members(roster: &[RankDetails], rank_0: IpAddr) -> Vec<Member> {
    number_members((0..).zip(roster).map(|(rank, details)| Member {
        rank: Rank(rank),
        original_rank: Rank(rank),
        host_id: details.host_id.clone(),
        pid: details.pid,
        local_index: 0,
        address: if details.address == RANK_0_HOST { rank_0 } else { details.address },
    }))
}

/// Sends a message to all joined ranks, best effort: `is_closed` detects broken connections.
fn send_to_all(present: &mut BTreeMap<Rank, (PeerConnection, RankDetails)>, message: &Message) {
    let frame = message.frame();
    for (connection, _) in present.values_mut() {
        let _ = connection.stream.write_all(&frame);
    }
}

/// True if the other side has closed. Peers are silent before the roster.
fn is_closed(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let peeked = stream.peek(&mut [0]);
    let waiting = matches!(&peeked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).is_err() || !(waiting || matches!(peeked, Ok(1)))
}
