//! How the ranks find each other.
//!
//! Every rank dials rank 0 and sends the address it can be reached at: the one that it reached rank 0
//! from. Where that is loopback, it shares rank 0's host and sends no address: it is reached at rank
//! 0's, as the ranks of other hosts see that. When all have come, rank 0 sends every rank the roster;
//! then each rank dials those between rank 0 and itself and is dialed by those above it. The
//! listeners are closed again, and from here on rank 0 is one of many.

use crate::config::{MIN_SILENCE_TIMEOUT, is_loopback};
use crate::deadline::Deadline;
use crate::dial::{self, Connection, HINT, Read, Target};
use crate::handshake::{Identity, Job};
use crate::member::number;
use crate::message::{Details, Message};
use crate::reception::Reception;
use crate::resolve::resolve;
use crate::secret::random;
use crate::wire::{Parser, Reader, Writer};
use crate::{Config, Error, Member, Rank, Result};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How often rank 0 looks whether those who came are still there, and tells them who is missing.
const ROUND: Duration = Duration::from_millis(100);
const WRITE_TIME: Duration = Duration::from_secs(5);
const START_THEM: &str = "check that every rank was started and reaches the address of rank 0";

/// Stands for the address of rank 0's host in what a rank sends of itself.
const RANK_0_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// A connection to a peer, both sides proved.
pub(crate) struct Link {
    pub rank: Rank,
    pub stream: TcpStream,
    pub parser: Parser,
}

/// The outcome: everybody, and a connection to each.
pub(crate) struct Joined {
    pub members: Vec<Member>,
    pub links: Vec<Link>,
    pub job: Job,
    /// The shortest silence timeout of any rank.
    pub shortest_silence: Duration,
}

/// Joins the other ranks. Rank 0 may bring a listener of its own.
pub(crate) fn join(
    config: &Config,
    identity: &Identity,
    listener: Option<TcpListener>,
    deadline: &Deadline,
) -> Result<Joined> {
    if config.rank == Rank(0) {
        gather(config, identity, listener, deadline)
    } else {
        enter(config, identity, deadline)
    }
}

/// Rank 0: wait for everybody.
fn gather(
    config: &Config,
    identity: &Identity,
    listener: Option<TcpListener>,
    deadline: &Deadline,
) -> Result<Joined> {
    let job = random()?;
    let mut present: BTreeMap<Rank, (Link, Details)> = BTreeMap::new();
    if config.world_size > 1 {
        let listener = match listener {
            Some(listener) => listener,
            None => listen(rank_0_address(config, deadline)?)?,
        };
        let expected = (1..config.world_size).map(Rank).collect();
        let mut reception = Reception::new(listener, identity.clone(), job, false, expected)?;
        let (mut told, mut told_at) = (Vec::new(), Instant::now());
        while !reception.missing().is_empty() {
            deadline.check("the other ranks to join")?;
            if deadline.expired() {
                let missing = reception.missing();
                let (waited, last) = (deadline.waited(), None);
                tell(&mut present, &Message::Waiting(missing.clone()));
                return Err(Error::Bootstrap { missing, waited, last, hint: START_THEM });
            }
            for arrival in reception.serve(ROUND.min(deadline.left()))? {
                let details = Details::read(&mut Reader::new(&arrival.details));
                let blocking = arrival.stream.set_nonblocking(false);
                let timeout = arrival.stream.set_write_timeout(Some(WRITE_TIME));
                let (Ok(details), Ok(())) = (details, blocking.and(timeout)) else {
                    reception.forget(arrival.rank);
                    continue;
                };
                let (rank, stream, parser) = (arrival.rank, arrival.stream, arrival.parser);
                present.insert(rank, (Link { rank, stream, parser }, details));
            }
            present.retain(|rank, (link, _)| {
                let gone = is_gone(&link.stream);
                if gone {
                    reception.forget(*rank);
                }
                !gone
            });
            let missing = reception.missing();
            if missing != told && told_at.elapsed() >= ROUND {
                tell(&mut present, &Message::Waiting(missing.clone()));
                (told, told_at) = (missing, Instant::now());
            }
        }
    }
    let advertised = config.advertise.unwrap_or(RANK_0_ADDRESS);
    let mut roster = vec![own_details(config, advertised, 0)];
    roster.extend(present.values().map(|(_, details)| details.clone()));
    let own = address_for_other_hosts(&present);
    send_rosters(&mut present, &roster, own);
    let members = members(&roster, own);
    for (rank, (link, _)) in &present {
        if !is_beside(&link.stream)
            && let Some(member) = members.get(rank.index())
        {
            check_reachable(member, &config.host_id)?;
        }
    }
    let links: Vec<Link> = present.into_values().map(|(link, _)| link).collect();
    Ok(Joined { members, links, job, shortest_silence: shortest_silence(&roster) })
}

/// The address of rank 0's host: as ranks of other hosts reached it, if there are any.
fn address_for_other_hosts(present: &BTreeMap<Rank, (Link, Details)>) -> IpAddr {
    let addresses = present.values().filter_map(|(link, _)| link.stream.local_addr().ok());
    let addresses: Vec<IpAddr> = addresses.map(|address| address.ip().to_canonical()).collect();
    let outside = addresses.iter().find(|address| !address.is_loopback());
    *outside.or(addresses.first()).unwrap_or(&IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Ranks beside rank 0 reach it over loopback, so their roster has its other address filled in.
fn send_rosters(present: &mut BTreeMap<Rank, (Link, Details)>, roster: &[Details], own: IpAddr) {
    let filled = roster.iter().map(|details| Details {
        address: if details.address == RANK_0_ADDRESS { own } else { details.address },
        ..details.clone()
    });
    let beside = Message::Roster(filled.collect()).frame();
    let elsewhere = Message::Roster(roster.to_vec()).frame();
    for (link, _) in present.values_mut() {
        let frame = if is_beside(&link.stream) { &beside } else { &elsewhere };
        let _ = link.stream.write_all(frame);
    }
}

/// Whether a connection is one within this host.
fn is_beside(stream: &TcpStream) -> bool {
    stream.peer_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

/// A rank of another host must not be at an address that only its own host reaches.
fn check_reachable(member: &Member, host_id: &str) -> Result<()> {
    if member.address.is_loopback() && member.host_id != host_id {
        let (rank, address) = (member.rank, member.address);
        return Err(Error::LoopbackAddress { rank, address });
    }
    Ok(())
}

/// Any other rank: dial rank 0, learn who there is, meet them.
fn enter(config: &Config, identity: &Identity, deadline: &Deadline) -> Result<Joined> {
    let mut own_listener = None;
    let mut make_details = |stream: &TcpStream| {
        let local = stream.local_addr().map_err(Error::system("asking for the own address"))?;
        let local = local.ip().to_canonical();
        // The name of rank 0's host may mean loopback on that host (Debian's 127.0.1.1), and ranks of
        // other hosts come in from outside all the same.
        let default = match local {
            _ if !local.is_loopback() || is_loopback(&config.host) => local,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let listener = listen(SocketAddr::new(config.bind.unwrap_or(default), 0))?;
        let bound = listener.local_addr().map_err(Error::system("asking for the own port"))?;
        let reachable = match bound.ip() {
            bound if !bound.is_unspecified() => bound,
            _ if local.is_loopback() => RANK_0_ADDRESS,
            _ => local,
        };
        own_listener = Some(listener);
        let details = own_details(config, config.advertise.unwrap_or(reachable), bound.port());
        // As a body without a frame around it.
        Ok(details.write(Writer::new(0)).finish().split_off(5))
    };
    let target = Target { rank: Rank(0), host: config.host.clone(), port: config.port, hint: HINT };
    let connection = dial::dial(&target, identity, None, &mut make_details, deadline)?;
    let Connection { mut stream, mut parser, job } = connection;
    let rank_0 = stream.peer_addr().map_err(Error::system("asking for rank 0's address"))?;
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
    let Some(listener) = own_listener else {
        let problem = "it let this rank in without a handshake".to_string();
        return Err(Error::Protocol { peer: Rank(0), problem });
    };
    let above = (config.rank.0 + 1..config.world_size).map(Rank).collect();
    let reception = Reception::new(listener, identity.clone(), job, true, above)?;
    let mut links = vec![Link { rank: Rank(0), stream, parser }];
    let (above, below) = std::thread::scope(|scope| {
        let above = scope.spawn(|| accept_all(reception, deadline));
        let below = dial_all(config.rank, &members, &roster, identity, job, deadline);
        (above.join(), below)
    });
    links.extend(below?);
    links.extend(above.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    Ok(Joined { members, links, job, shortest_silence: shortest_silence(&roster) })
}

fn await_roster(
    stream: &mut TcpStream,
    parser: &mut Parser,
    deadline: &Deadline,
) -> Result<Vec<Details>> {
    let mut missing = Vec::new();
    let fail = |missing: Vec<Rank>, last| {
        let missing = if missing.is_empty() { vec![Rank(0)] } else { missing };
        Err(Error::Bootstrap { missing, waited: deadline.waited(), last, hint: START_THEM })
    };
    loop {
        let frame = match dial::read_frame(stream, parser, deadline)? {
            Read::Frame(frame) => frame,
            Read::Late => return fail(missing, None),
            Read::Ended(problem) => return fail(missing, Some(format!("rank 0: {problem}"))),
        };
        match Message::parse(&frame) {
            Ok(Message::Waiting(ranks)) => missing = ranks,
            Ok(Message::Roster(roster)) => return Ok(roster),
            Ok(_) => {
                let problem = "it sent something else than the roster".to_string();
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
    roster: &[Details],
    identity: &Identity,
    job: Job,
    deadline: &Deadline,
) -> Result<Vec<Link>> {
    let between = members.iter().zip(roster).filter(|(m, _)| m.rank > Rank(0) && m.rank < me);
    between
        .map(|(member, details)| {
            let rank = member.rank;
            let target =
                Target { rank, host: member.address.to_string(), port: details.port, hint: HINT };
            let no_details = &mut |_: &TcpStream| Ok(Vec::new());
            let connection = dial::dial(&target, identity, Some(job), no_details, deadline)?;
            Ok(Link { rank, stream: connection.stream, parser: connection.parser })
        })
        .collect()
}

fn accept_all(mut reception: Reception, deadline: &Deadline) -> Result<Vec<Link>> {
    let mut links = Vec::new();
    while !reception.missing().is_empty() {
        deadline.check("the other ranks to join")?;
        if deadline.expired() {
            let (missing, waited) = (reception.missing(), deadline.waited());
            return Err(Error::Bootstrap { missing, waited, last: None, hint: START_THEM });
        }
        let arrivals = reception.serve(deadline.slice())?;
        links.extend(arrivals.into_iter().map(|arrival| Link {
            rank: arrival.rank,
            stream: arrival.stream,
            parser: arrival.parser,
        }));
    }
    Ok(links)
}

/// Where rank 0 listens: at its address if that is one, everywhere if it is a name of a host.
fn rank_0_address(config: &Config, deadline: &Deadline) -> Result<SocketAddr> {
    if let Some(bind) = config.bind {
        return Ok(SocketAddr::new(bind, config.port));
    }
    if let Ok(address) = config.host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, config.port));
    }
    if is_loopback(&config.host) {
        return Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), config.port));
    }
    let addresses = resolve(&config.host, config.port, deadline, "the name of rank 0's host")?;
    let addresses = addresses.map_err(|error| Error::Resolve {
        host: config.host.clone(),
        problem: error.to_string(),
    })?;
    let everywhere: IpAddr = match addresses.first() {
        Some(SocketAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    Ok(SocketAddr::new(everywhere, config.port))
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|source| {
        let address = address.to_string();
        if source.kind() == std::io::ErrorKind::AddrInUse {
            Error::PortInUse { address }
        } else {
            Error::Listen { address, source }
        }
    })
}

fn own_details(config: &Config, address: IpAddr, port: u16) -> Details {
    let silence = u64::try_from(config.silence_timeout.as_millis()).unwrap_or(u64::MAX);
    Details { host_id: config.host_id.clone(), pid: std::process::id(), address, port, silence }
}

/// The silence timeout of the rank that waits the least.
fn shortest_silence(roster: &[Details]) -> Duration {
    let shortest = roster.iter().map(|details| details.silence).min();
    shortest.map_or(Duration::MAX, Duration::from_millis).max(MIN_SILENCE_TIMEOUT)
}

/// The members of generation 0.
fn members(roster: &[Details], rank_0: IpAddr) -> Vec<Member> {
    number((0..).zip(roster).map(|(rank, details)| Member {
        rank: Rank(rank),
        original_rank: Rank(rank),
        host_id: details.host_id.clone(),
        pid: details.pid,
        local_index: 0,
        address: if details.address == RANK_0_ADDRESS { rank_0 } else { details.address },
    }))
}

/// Best effort: a peer that cannot be told will be noticed as gone.
fn tell(present: &mut BTreeMap<Rank, (Link, Details)>, message: &Message) {
    let frame = message.frame();
    for (link, _) in present.values_mut() {
        let _ = link.stream.write_all(&frame);
    }
}

/// Whether the other side has closed. Nobody says anything before the roster.
fn is_gone(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let looked = stream.peek(&mut [0]);
    let waiting = matches!(&looked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).is_err() || !(waiting || matches!(looked, Ok(1)))
}
