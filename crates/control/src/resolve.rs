//! Host name resolution within a deadline.

use crate::deadline::Deadline;
use crate::{Error, Result};
use std::io::{Error as IoError, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

/// Loopback name.
pub(crate) const LOCALHOST: &str = "localhost";

type Addresses = std::io::Result<Vec<SocketAddr>>;

/// `host:port`, with an IPv6 address in brackets: for example, `[::1]:29501`.
pub(crate) fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Addresses for `localhost`, which is loopback without a lookup (RFC 6761): a host may have only one.
pub(crate) fn loopback_addresses(port: u16) -> Vec<SocketAddr> {
    vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]
}

/// This host's loopback address: 127.0.0.1, or ::1 on a host with IPv6 only.
pub(crate) fn loopback() -> IpAddr {
    if cfg!(miri) {
        return Ipv4Addr::LOCALHOST.into();
    }
    let missing = |error: &IoError| error.kind() == ErrorKind::AddrNotAvailable;
    let [v4, v6] = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    let has = |address: IpAddr| UdpSocket::bind((address, 0));
    if has(v4).is_err_and(|error| missing(&error)) && has(v6).is_ok() { v6 } else { v4 }
}

/// A host's addresses, in the system's order. The inner error is the system's, or `TimedOut` if the
/// deadline passed first.
pub(crate) fn resolve(
    host: &str,
    port: u16,
    deadline: &Deadline,
    operation: &'static str,
) -> Result<Addresses> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(Ok(vec![SocketAddr::new(address, port)]));
    }
    if host == LOCALHOST {
        return Ok(Ok(loopback_addresses(port)));
    }
    let host = host.to_string();
    within(deadline, operation, move || {
        (host.as_str(), port).to_socket_addrs().map(Iterator::collect)
    })
}

/// Looks up on a separate thread: a silent name server blocks the call for 30 s or more, and the system
/// call cannot be cancelled. The thread ends with the call.
fn within(
    deadline: &Deadline,
    operation: &'static str,
    look_up: impl FnOnce() -> Addresses + Send + 'static,
) -> Result<Addresses> {
    let (sender, result) = sync_channel(1);
    std::thread::Builder::new()
        .name("weft-resolve".into())
        .spawn(move || drop(sender.send(look_up())))
        .map_err(Error::thread("a thread that resolves a name"))?;
    loop {
        match result.recv_timeout(deadline.slice()) {
            Ok(addresses) => return Ok(addresses),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(IoError::other("the lookup ended without a result")));
            }
            Err(RecvTimeoutError::Timeout) => deadline.check(operation)?,
        }
        if deadline.expired() {
            return Ok(Err(IoError::new(ErrorKind::TimedOut, "no name server responded in time")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn a_name_server_that_is_silent_delays_neither_the_deadline_nor_an_interrupt() {
        let never = || {
            let (keep, silent) = channel();
            (keep, move || silent.recv().unwrap_or_else(|_| Ok(Vec::new())))
        };
        let (keep, look_up) = never();
        let soon = Deadline::after(Duration::from_millis(20), None);
        let late = within(&soon, "a test", look_up).unwrap().unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        drop(keep);
        let (keep, look_up) = never();
        let stopped = Deadline::after(Duration::MAX, Some(Arc::new(|| true)));
        let error = within(&stopped, "a test", look_up).unwrap_err();
        assert!(matches!(error, Error::Interrupted { operation: "a test" }));
        drop(keep);
    }

    #[test]
    fn addresses_and_local_names_are_resolved() {
        let deadline = Deadline::after(Duration::from_secs(20), None);
        let find = |host| resolve(host, 7, &deadline, "a test").unwrap().unwrap();
        assert_eq!(find("10.0.0.1"), [SocketAddr::from(([10, 0, 0, 1], 7))]);
        assert!(find("localhost").iter().all(|address| address.ip().is_loopback()));
    }
}
