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
        net::bind(&socket, &SocketAddr::new(source, 0))?;
    }
    match net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(errno) => Err(errno),
    }
}

/// Checks that a socket can be bound to an address.
///
/// # Errors
/// Those of the system.
pub(crate) fn check_source(source: IpAddr) -> std::io::Result<()> {
    net::bind(&socket(&source)?, &SocketAddr::new(source, 0))?;
    Ok(())
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
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Listener that accepts no connection: its queue is full. Keep both.
    pub(crate) fn silent_listener() -> (TcpListener, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let queued = (0..4).map(|_| begin(&address, None).unwrap()).collect();
        (listener, queued)
    }

    /// An interrupt that is raised after a quarter of a second, and when that was.
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
}
