//! Abstract Unix sockets between processes of one user: listen, dial, accept.

use crate::error::{Error, Result};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Length of the accept queue.
const BACKLOG: i32 = 4096;

/// A listening socket with this name.
pub(super) fn listen(name: &[u8]) -> Result<OwnedFd> {
    let unusable = |e: Errno| Error::system("cannot listen on an abstract Unix socket", e);
    let socket = new_socket().map_err(unusable)?;
    let address = SocketAddrUnix::new_abstract_name(name).map_err(unusable)?;
    net::bind(&socket, &address).map_err(unusable)?;
    net::listen(&socket, BACKLOG).map_err(unusable)?;
    Ok(socket)
}

/// A connection to the socket with this name; `None` if its backlog is full.
pub(super) fn dial(name: &[u8]) -> io::Result<Option<OwnedFd>> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let socket = new_socket()?;
    match net::connect(&socket, &address) {
        Ok(()) if is_of_this_user(&socket) => Ok(Some(socket)),
        Ok(()) => Err(io::Error::other("its socket belongs to another user")),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNREFUSED) => Err(io::Error::other(
            "its socket is closed: the process is gone, or it runs in another network namespace \
             (another container, for one)",
        )),
        Err(error) => Err(error.into()),
    }
}

/// The next connection of a listening socket.
pub(super) fn accept(listener: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    net::accept_with(listener, FLAGS)
}

/// True if the other end is a process of the same user.
pub(super) fn is_of_this_user(socket: impl AsFd) -> bool {
    sockopt::socket_peercred(socket).is_ok_and(|cred| cred.uid == rustix::process::geteuid())
}

/// A non-blocking socket that keeps message boundaries.
fn new_socket() -> rustix::io::Result<OwnedFd> {
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}
