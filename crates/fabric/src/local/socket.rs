//! Abstract Unix sockets between one user's processes: listen, dial, accept.

use super::credentials::PeerCredentials;
use crate::error::{Error, Result};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Accept queue length.
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

/// Connects to the socket with this name; `None` if the socket's backlog is full.
pub(super) fn dial(name: &[u8]) -> io::Result<Option<OwnedFd>> {
    match connect(name) {
        Ok(socket) if is_of_this_user(&socket) => Ok(Some(socket)),
        Ok(_) => Err(io::Error::other("its socket belongs to another user")),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNREFUSED) => Err(io::Error::other(
            "its socket is closed: the process is gone, or it runs in another network namespace \
             (another container, for one)",
        )),
        Err(error) => Err(error.into()),
    }
}

/// True if the socket with this name belongs to another user, as far as the kernel can prove it.
pub(super) fn is_of_another_user(name: &[u8]) -> bool {
    connect(name).is_ok_and(|socket| !is_of_this_user(&socket))
}

fn connect(name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let socket = new_socket()?;
    net::connect(&socket, &address)?;
    Ok(socket)
}

/// Accepts the next connection on a listening socket.
pub(super) fn accept(listener: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    net::accept_with(listener, FLAGS)
}

/// True if the other end is a process run by the same user.
pub(super) fn is_of_this_user(socket: impl AsFd) -> bool {
    let user = rustix::process::geteuid().as_raw();
    PeerCredentials::of(socket).is_ok_and(|peer| peer.user == user)
}

/// A non-blocking socket that keeps message boundaries.
fn new_socket() -> rustix::io::Result<OwnedFd> {
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}
