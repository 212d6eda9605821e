//! User behind the process at the other end, on a loopback connection without a secret.
//!
//! The kernel reports the owner of each TCP socket in this network namespace, without privileges: to a query over
//! netlink (`sock_diag(7)`), or in `/proc/net/tcp` and `tcp6` where it has no such protocol.

use crate::deadline::timespec;
use crate::limits;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Time for the kernel's answer, which it gives at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// User id that the kernel shows for users outside this user namespace, by default.
const OVERFLOW_USER: u32 = 65_534;
/// `SOCK_DIAG_BY_FAMILY`, and the request flag.
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
/// Answer type for an error.
const ERROR: u16 = 2;
/// `struct nlmsghdr` and `struct inet_diag_msg` lengths.
const HEADER: usize = 16;
const ANSWER: usize = 72;
/// TCP states for a socket without a connection: TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV.
const UNCONNECTED: [u8; 4] = [6, 7, 10, 12];

/// Reason why a listener rejects a process.
pub(crate) const OTHER_USER: &str =
    "there is no secret (WEFT_SECRET), and its process is not known to be this user's";

/// Reason to end a connection: no descriptor or memory is left to find out the peer's user.
pub(crate) const SHORTAGE: &str = "this process lacks descriptors or memory to find out its user";

/// Reason for which a process at the other end is not trusted without a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stranger {
    /// It belongs to this user.
    User(u32),
    /// The connection has ended, or it has not accepted it.
    Gone(String),
    /// This process or its host lacks a resource for the query, which may be repeated.
    Exhausted(Errno),
    /// The user could not be determined, for this reason.
    Unknown(String),
}

/// Checks that the process at the other end is this user's or root's.
pub(crate) fn check(stream: &TcpStream) -> Result<(), Stranger> {
    match user(stream) {
        // Root may read every process's memory anyway.
        Ok(user) if user == 0 || user == rustix::process::geteuid().as_raw() => Ok(()),
        Ok(user) => Err(Stranger::User(user)),
        Err(error) => Err(reason(&error)),
    }
}

fn reason(error: &io::Error) -> Stranger {
    match Errno::from_io_error(error) {
        Some(shortage) if limits::is_exhausted(error) => Stranger::Exhausted(shortage),
        _ if error.kind() == ErrorKind::NotFound => Stranger::Gone(error.to_string()),
        _ => Stranger::Unknown(error.to_string()),
    }
}

/// This process's effective user.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn user(stream: &TcpStream) -> io::Result<u32> {
    let canonical =
        |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    // Seen from the other end.
    let (local, remote) = (canonical(stream.peer_addr()?), canonical(stream.local_addr()?));
    if !local.ip().is_loopback() {
        let problem = format!("{local} is not on the loopback of this host");
        return Err(io::Error::other(problem));
    }
    let user = match ask(local, remote) {
        Ok(owner) => owner.user(),
        Err(error) if limits::is_exhausted(&error) => Err(error),
        Err(error) => {
            list(local, remote).and_then(Owner::user).map_err(|listed| either(&error, listed))
        }
    }?;
    if user == OVERFLOW_USER && !sees_all_users()? {
        return Err(io::Error::other("it is not a user of this user namespace"));
    }
    Ok(user)
}

/// Error from both queries.
fn either(asked: &io::Error, listed: io::Error) -> io::Error {
    if limits::is_exhausted(&listed) {
        return listed;
    }
    // Where the kernel answers no query, a list without the connection proves no end of it.
    let is_gone = asked.kind() == ErrorKind::NotFound && listed.kind() == ErrorKind::NotFound;
    let kind = if is_gone { ErrorKind::NotFound } else { ErrorKind::Other };
    io::Error::new(kind, format!("{asked}; {listed}"))
}

/// Socket owner, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    state: u8,
    user: u32,
    inode: u64,
}

impl Owner {
    fn user(self) -> io::Result<u32> {
        // The kernel reports root and no inode for a socket that the owning process has closed, or not accepted yet.
        if UNCONNECTED.contains(&self.state) || self.inode == 0 {
            return Err(io::Error::new(
                ErrorKind::NotFound,
                "its process has closed the connection",
            ));
        }
        Ok(self.user)
    }
}

/// Asks the kernel who owns the socket with these ends.
fn ask(local: SocketAddr, remote: SocketAddr) -> io::Result<Owner> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, protocol) = (AddressFamily::NETLINK, Some(netlink::SOCK_DIAG));
    let socket = net::socket_with(family, SocketType::RAW, flags, protocol)?;
    net::send(&socket, &request(local, remote), SendFlags::empty())?;
    let mut polled = [PollFd::new(&socket, PollFlags::IN)];
    poll(&mut polled, Some(&timespec(ANSWER_TIMEOUT)))?;
    let mut bytes = [0; 512];
    let (length, _) = net::recv(&socket, &mut bytes[..], RecvFlags::empty())?;
    parse(bytes.get(..length).unwrap_or_default(), local.port(), remote.port())
}

fn request(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family: u8 = if local.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 };
    // struct inet_diag_req_v2: no extensions, all states.
    let mut body = vec![family, libc::IPPROTO_TCP as u8, 0, 0];
    body.extend(u32::MAX.to_ne_bytes());
    // struct inet_diag_sockid: any interface, no cookie.
    body.extend(local.port().to_be_bytes());
    body.extend(remote.port().to_be_bytes());
    for address in [local.ip(), remote.ip()] {
        match address {
            IpAddr::V4(address) => body.extend(address.octets().into_iter().chain([0; 12])),
            IpAddr::V6(address) => body.extend(address.octets()),
        }
    }
    body.extend([0; 4]);
    body.extend([0xff; 8]);
    let length = (HEADER + body.len()) as u32;
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn parse(message: &[u8], local: u16, remote: u16) -> io::Result<Owner> {
    let malformed = || io::Error::new(ErrorKind::InvalidData, "the kernel's answer is incomplete");
    let at = |at: usize| -> io::Result<u32> {
        let bytes = message.get(at..at + 4).ok_or_else(malformed)?;
        Ok(u32::from_ne_bytes(bytes.try_into().map_err(|_| malformed())?))
    };
    let kind = (at(4)? & 0xffff) as u16;
    let kind = if cfg!(target_endian = "big") { (at(4)? >> 16) as u16 } else { kind };
    if kind == ERROR {
        return Err(io::Error::from_raw_os_error((at(HEADER)? as i32).saturating_neg()));
    }
    let body = message.get(HEADER..HEADER + ANSWER).ok_or_else(malformed)?;
    // The kernel may answer with a listener in place of a connection that is gone; then the ports differ.
    if kind != BY_FAMILY || body[4..8] != [local.to_be_bytes(), remote.to_be_bytes()].concat() {
        return Err(io::Error::new(ErrorKind::NotFound, "its connection is gone"));
    }
    Ok(Owner { state: body[1], user: at(HEADER + 64)?, inode: at(HEADER + 68)?.into() })
}

/// Finds who owns the socket with these ends in the kernel's lists.
fn list(local: SocketAddr, remote: SocketAddr) -> io::Result<Owner> {
    let mut is_listed = false;
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let file = match File::open(file) {
            Ok(file) => file,
            Err(error) if limits::is_exhausted(&error) => return Err(error),
            Err(_) => continue,
        };
        is_listed = true;
        for line in BufReader::new(file).lines() {
            match parse_line(&line?) {
                Some((of, to, owner)) if of == local && to == remote => return Ok(owner),
                _ => {}
            }
        }
    }
    let kind = if is_listed { ErrorKind::NotFound } else { ErrorKind::Unsupported };
    Err(io::Error::new(kind, "/proc/net does not list its connection"))
}

/// Ends and owner from a `/proc/net/tcp` line; `None` for the heading.
fn parse_line(line: &str) -> Option<(SocketAddr, SocketAddr, Owner)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (parse_end(fields.next()?)?, parse_end(fields.next()?)?);
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let user = fields.nth(3)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some((local, remote, Owner { state, user, inode }))
}

/// Address and port: address words in host byte order, in hexadecimal.
fn parse_end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = (0..address.len() / 8).map(|word| {
        let digits = address.get(8 * word..8 * word + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<[u8; 4]>>>()?.concat();
    let address = match *bytes.as_slice() {
        [a, b, c, d] => Ipv4Addr::new(a, b, c, d).into(),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)).to_canonical(),
    };
    Some(SocketAddr::new(address, port))
}

/// True if every user on the system has a separate id in this user namespace.
fn sees_all_users() -> io::Result<bool> {
    let map = match std::fs::read_to_string("/proc/self/uid_map") {
        Err(error) if limits::is_exhausted(&error) => return Err(error),
        map => map.unwrap_or_default(),
    };
    Ok(map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn connected(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (dialed, listener.accept().unwrap().0)
    }

    fn ends(stream: &TcpStream) -> (SocketAddr, SocketAddr) {
        (stream.peer_addr().unwrap(), stream.local_addr().unwrap())
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn both_ends_of_a_connection_within_a_process_are_of_its_user() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (dialed, accepted) = connected(address);
            for stream in [&dialed, &accepted] {
                let (local, remote) = ends(stream);
                for owner in [ask(local, remote), list(local, remote)] {
                    assert_eq!(owner.and_then(Owner::user).unwrap(), own_user());
                }
                assert_eq!(check(stream), Ok(()));
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn a_connection_that_its_process_has_closed_or_not_accepted_is_of_nobody() {
        let (dialed, accepted) = connected("127.0.0.1:0");
        drop(dialed);
        assert!(matches!(check(&accepted), Err(Stranger::Gone(_))), "{:?}", check(&accepted));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let waiting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(matches!(check(&waiting), Err(Stranger::Gone(_))), "{:?}", check(&waiting));
    }

    #[test]
    fn a_shortage_is_no_other_user() {
        for shortage in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert_eq!(reason(&shortage.into()), Stranger::Exhausted(shortage));
            let listed = either(&Errno::PROTONOSUPPORT.into(), shortage.into());
            assert_eq!(reason(&listed), Stranger::Exhausted(shortage));
        }
        let denied = either(&Errno::PROTONOSUPPORT.into(), Errno::ACCESS.into());
        assert!(matches!(reason(&denied), Stranger::Unknown(_)), "{denied}");
    }

    #[test]
    fn lines_of_the_kernels_lists_are_parsed() {
        let line = "   3: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000  1000        0 \
                    77 1 0000000000000000 20 4 30 10 -1";
        let (local, remote, owner) = parse_line(line).unwrap();
        assert_eq!((local.port(), remote.port()), (8080, 0xC001));
        assert_eq!(owner, Owner { state: 1, user: 1000, inode: 77 });
        if cfg!(target_endian = "little") {
            assert_eq!(local.ip(), Ipv4Addr::LOCALHOST);
            let mapped = parse_end("0000000000000000FFFF00000100007F:0001").unwrap();
            assert_eq!(mapped, SocketAddr::from(([127, 0, 0, 1], 1)));
            let six = parse_end("00000000000000000000000001000000:0001").unwrap();
            assert_eq!(six, SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 1));
        }
        for line in ["", "  sl  local_address rem_address   st", "1: x y 01 a b c 0 0 1"] {
            assert_eq!(parse_line(line), None);
        }
    }

    #[test]
    fn a_short_answer_and_another_connection_are_errors() {
        for length in 0..HEADER + ANSWER {
            assert!(parse(&vec![0; length], 1, 2).is_err(), "{length}");
        }
        let mut answer = vec![0; HEADER + ANSWER];
        answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        answer[HEADER + 4..HEADER + 8].copy_from_slice(&[0, 1, 0, 2]);
        assert_eq!(parse(&answer, 1, 2).unwrap(), Owner { state: 0, user: 0, inode: 0 });
        assert_eq!(parse(&answer, 2, 1).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
