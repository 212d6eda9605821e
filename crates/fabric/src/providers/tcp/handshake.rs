//! Sockets for a connection attempt, and hellos over them.

use super::wire::HELLO;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::{IpAddr, SocketAddr};

/// Sends a hello on a new connection, whose buffer has room for it; true if all of it was sent.
pub(super) fn send_hello(socket: &OwnedFd, hello: &[u8; HELLO]) -> bool {
    // A refusal delays small frames only.
    let _ = net::sockopt::set_tcp_nodelay(socket, true);
    net::send(socket, hello, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) == Ok(HELLO)
}

/// Starts a nonblocking connect.
pub(super) fn dial(to: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let socket = new_socket(to)?;
    match net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(e) => Err(e),
    }
}

/// Checks that sockets can be bound to an address, without a port for connections.
pub(super) fn check(ip: IpAddr) -> rustix::io::Result<()> {
    let at = SocketAddr::new(ip, 0);
    let flags = SocketFlags::CLOEXEC;
    net::bind(&net::socket_with(family(at), SocketType::DGRAM, flags, None)?, &at)
}

/// Listening socket on a port that the kernel chooses.
pub(super) fn listen(at: SocketAddr) -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let socket = new_socket(at)?;
    net::bind(&socket, &at)?;
    // Largest backlog: all peers may dial all streams before this engine accepts.
    net::listen(&socket, i32::from(u16::MAX))?;
    let bound = SocketAddr::try_from(net::getsockname(&socket)?)?;
    Ok((socket, bound))
}

fn new_socket(to: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(family(to), SocketType::STREAM, flags, None)
}

fn family(of: SocketAddr) -> AddressFamily {
    if of.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Reads a hello that arrives in segments.
#[derive(Default)]
pub(super) struct HelloReader {
    bytes: Vec<u8>,
}

impl HelloReader {
    /// Reads available bytes; `Some` once the hello is complete. An error ends the connection.
    pub fn read(&mut self, socket: &OwnedFd) -> Result<Option<[u8; HELLO]>, &'static str> {
        let mut buffer = [0; HELLO];
        let room = &mut buffer[self.bytes.len()..];
        match net::recv(socket, room, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err("connection closed before its hello"),
            Ok((got, _)) => self.bytes.extend_from_slice(&buffer[self.bytes.len()..][..got]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return Err("connection failed before its hello"),
        }
        Ok(self.bytes.first_chunk().copied())
    }
}
