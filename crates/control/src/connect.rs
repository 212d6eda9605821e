//! Non-blocking connect: an interrupt ends it within 100 ms.

use crate::Result;
use crate::deadline::Deadline;
use crate::deadline::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::io::{Error as IoError, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd as _;

/// Connects, from `source` if it is given, and returns a blocking stream. The inner error is the system's, or `TimedOut`
/// if the deadline passed first.
///
/// # Errors
/// [`crate::Error::Interrupted`].
pub(crate) fn connect(
    address: &SocketAddr,
    source: Option<IpAddr>,
    deadline: &Deadline,
    operation: &'static str,
) -> Result<std::io::Result<TcpStream>> {
    let stream = match begin(address, source) {
        Ok(stream) => stream,
        Err(errno) => return Ok(Err(errno.into())),
    };
    loop {
        let mut polled = [PollFd::new(&stream, PollFlags::OUT)];
        match poll(&mut polled, Some(&timespec(deadline.slice()))) {
            Ok(0) | Err(Errno::INTR) => deadline.check(operation)?,
            Ok(_) => return Ok(end(stream)),
            Err(errno) => return Ok(Err(errno.into())),
        }
        if deadline.expired() {
            return Ok(Err(IoError::new(ErrorKind::TimedOut, "no response in time")));
        }
    }
}

fn begin(address: &SocketAddr, source: Option<IpAddr>) -> rustix::io::Result<TcpStream> {
    let socket = socket(&address.ip())?;
    if let Some(source) = source {
        bind_source(&socket, source)?;
    }
    match net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(errno) => Err(errno),
    }
}

/// Checks that a socket can be bound to an address.
///
/// # Errors
/// System errors.
pub(crate) fn check_source(source: IpAddr) -> std::io::Result<()> {
    Ok(bind_source(&socket(&source)?, source)?)
}

/// Binds a socket to an address, and leaves the port choice to `connect`, which needs one that no other connection
/// to the same listener has. A plain `bind` takes its port from all listeners.
fn bind_source(socket: &OwnedFd, source: IpAddr) -> rustix::io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open, and the option reads one integer. Without the option `bind` chooses a port.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        );
    }
    net::bind(socket, &SocketAddr::new(source, 0))
}

fn socket(of: &IpAddr) -> rustix::io::Result<OwnedFd> {
    let family = if of.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(family, SocketType::STREAM, flags, None)
}

fn end(stream: TcpStream) -> std::io::Result<TcpStream> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Error, Interrupt};
    use std::net::{Ipv4Addr, TcpListener};
    use std::process::Command;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Listener that accepts no connection: the queue is full. Keep both.
    pub(crate) fn silent_listener() -> (TcpListener, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let queued = (0..4).map(|_| begin(&address, None).unwrap()).collect();
        (listener, queued)
    }

    /// An interrupt that is raised after 250 ms, and the time when it was.
    pub(crate) fn raised_soon() -> (Interrupt, Instant) {
        let raised = Instant::now() + Duration::from_millis(250);
        (Arc::new(move || Instant::now() >= raised), raised)
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn an_interrupt_ends_a_connection_to_an_address_that_does_not_answer() {
        let (listener, _queued) = silent_listener();
        let address = listener.local_addr().unwrap();
        let (interrupt, raised) = raised_soon();
        let deadline = Deadline::after(TIMEOUT, Some(interrupt));
        let error = connect(&address, None, &deadline, "test").map(drop).unwrap_err();
        assert!(matches!(error, Error::Interrupted { .. }), "{error}");
        assert!(raised.elapsed() < TIMEOUT / 2, "{:?}", raised.elapsed());
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn a_deadline_a_refusal_and_a_connection_are_distinguished() {
        let (silent, _queued) = silent_listener();
        let short = Deadline::after(Duration::from_millis(50), None);
        let late =
            connect(&silent.local_addr().unwrap(), None, &short, "test").unwrap().unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let deadline = Deadline::after(TIMEOUT, None);
        let stream = connect(&address, None, &deadline, "test").unwrap().unwrap();
        assert_eq!(stream.peer_addr().unwrap(), address);
        drop((listener, stream));
        let refused = connect(&address, None, &deadline, "test").unwrap().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }

    const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn a_bound_source_takes_no_port_before_it_connects() {
        let bound = socket(&SOURCE).unwrap();
        bind_source(&bound, SOURCE).unwrap();
        let address: SocketAddr = net::getsockname(&bound).unwrap().try_into().unwrap();
        assert_eq!(address, SocketAddr::new(SOURCE, 0));
    }

    /// In a network namespace whose hosts have one local port.
    #[test]
    #[cfg_attr(miri, ignore = "miri has no sockets")]
    fn connections_of_one_source_to_two_listeners_share_a_port() {
        let connected = std::thread::spawn(|| {
            // SAFETY: it moves this thread only, which ends with the test.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return println!("skipped: {}", IoError::last_os_error());
            }
            // This thread's child is in its namespace.
            let loopback = Command::new("ip").args(["link", "set", "lo", "up"]).status();
            if !loopback.is_ok_and(|status| status.success()) {
                return println!("skipped: no program `ip` sets loopback up");
            }
            let range = "/proc/sys/net/ipv4/ip_local_port_range";
            if let Err(error) = std::fs::write(range, "40001 40001") {
                return println!("skipped: {range}: {error}");
            }
            let listeners = [50001, 50002].map(|port| {
                TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap()
            });
            let deadline = Deadline::after(TIMEOUT, None);
            let to = |listener: &TcpListener| {
                let address = listener.local_addr().unwrap();
                connect(&address, Some(SOURCE), &deadline, "test").unwrap()
            };
            let streams = listeners.each_ref().map(|listener| to(listener).unwrap());
            let port = SocketAddr::new(SOURCE, 40001);
            assert_eq!(streams.each_ref().map(|it| it.local_addr().unwrap()), [port; 2]);
            assert_eq!(to(&listeners[0]).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
        });
        connected.join().unwrap();
    }
}
