//! Two pair ends over loopback.

use super::socket::FrameSocket;
use super::*;
use crate::connect::tests::{raised_soon, silent_listener};
use crate::deadline::Deadline;
use crate::handshake::Identity;
use crate::tls::MaybeTlsStream;
use crate::wire::FrameParser;
use crate::{Cause, Error, Operation, PeerStatus, Poison, Secret, Tls, dial};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::time::Duration;

pub const TIMEOUT: Duration = Duration::from_secs(30);

pub fn settings(address: &str) -> PairSettings {
    PairSettings {
        address: address.into(),
        source: None,
        secret: None,
        host_id: "host".into(),
        silence_timeout: Duration::from_secs(15),
        interrupt: None,
        tls: Default::default(),
    }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, one)
}

/// Advances a connection until it is no longer pending.
pub fn settle(
    incoming: &mut IncomingConnection,
) -> std::result::Result<IncomingStep, &'static str> {
    loop {
        match incoming.step() {
            Ok(IncomingStep::Pending) => std::thread::yield_now(),
            step => return step,
        }
    }
}

/// Listener and connector ends.
fn pair() -> (PairControl, PairControl) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let settings = settings(&listener.local_addr().unwrap().to_string());
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| dial(&settings, b"details", TIMEOUT).unwrap());
        let mut incoming =
            IncomingConnection::new(listener.accept().unwrap().0, &settings).unwrap();
        assert_eq!(settle(&mut incoming), Ok(IncomingStep::Authenticated(b"details".to_vec())));
        let accepted = incoming.admit(&settings).unwrap();
        accepted.set_formed();
        let dialed = dialed.join().unwrap();
        dialed.wait_until_formed(TIMEOUT).unwrap();
        dialed.set_formed();
        (accepted, dialed)
    })
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn ends_exchange_bytes_and_a_call_that_ended_early_continues() {
    let (one, other) = pair();
    let error = one.exchange(Operation::Share, b"a", Duration::ZERO).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [CONNECTOR]), "{error}");
    let error = one.begin(Operation::Settle, b"").unwrap_err();
    assert!(matches!(error, Error::CallMismatch { .. }), "{error}");
    other.begin(Operation::Share, b"b").unwrap();
    assert_eq!(one.exchange(Operation::Share, b"a", TIMEOUT).unwrap(), b"b");
    assert_eq!(other.exchange(Operation::Share, b"b", TIMEOUT).unwrap(), b"a");
    let long = vec![7; 3 << 20];
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(one.exchange(Operation::Exchange, &long, TIMEOUT).unwrap(), b""));
        assert_eq!(other.exchange(Operation::Exchange, b"", TIMEOUT).unwrap(), long);
    });
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn different_calls_are_an_error_at_both_ends() {
    let (one, other) = pair();
    one.begin(Operation::Share, b"").unwrap();
    other.begin(Operation::Settle, b"").unwrap();
    for end in [&one, &other] {
        let operation = if end.rank() == LISTENER { Operation::Share } else { Operation::Settle };
        let error = end.exchange(operation, b"", TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::CallMismatch { .. }), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn a_leave_a_poison_and_an_end_without_either_are_distinguished() {
    let waits = |end: &PairControl| end.exchange(Operation::Share, b"", TIMEOUT).unwrap_err();
    let (one, other) = pair();
    drop(other);
    assert!(matches!(waits(&one), Error::Left { rank: CONNECTOR, .. }));
    assert_eq!((one.peer_status(), one.poisoned()), (PeerStatus::Left, None));
    let (one, other) = pair();
    let cause = Poison { kind: Cause::User, rank: Some(CONNECTOR), detail: "stop".into() };
    other.poison(&cause);
    assert!(matches!(waits(&one), Error::Poisoned(poison) if poison == cause));
    let (one, other) = pair();
    one.abandon();
    assert!(matches!(waits(&other), Error::Poisoned(Poison { kind: Cause::Lost, .. })));
    assert!(matches!(waits(&one), Error::Closed));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn bytes_that_violate_the_protocol_poison_the_pair() {
    let gather = |sequence: u64| {
        let kind = [2, 0, 0, 0, 0];
        let body = [&kind[..], &sequence.to_le_bytes(), &[7]].concat();
        [&(body.len() as u32).to_le_bytes(), &body[..]].concat()
    };
    let ahead = [gather(0), gather(1)].concat();
    for bytes in [&[1, 0, 0, 0, 0xee][..], &[0xff; 8], &gather(1), &ahead, &[1, 0, 0, 0, 6]] {
        let (stream, mut peer) = sockets();
        let parser = FrameParser::new(crate::wire::MAX_FRAME);
        let socket = FrameSocket::new(MaybeTlsStream::plain(stream), parser, TIMEOUT).unwrap();
        let control = PairControl::new(socket, LISTENER, &settings("127.0.0.1:0"));
        peer.write_all(bytes).unwrap();
        while control.poisoned().is_none() {
            control.poll();
        }
        assert_eq!(control.poisoned().unwrap().kind, Cause::Protocol, "{bytes:?}");
    }
}

/// Formed end on virtual time, the current time, and the other end's socket.
fn formed() -> (PairControl, std::time::Instant, TcpStream) {
    let (stream, peer) = sockets();
    peer.set_nonblocking(true).unwrap();
    let settings = settings("127.0.0.1:0");
    let parser = FrameParser::new(crate::wire::MAX_FRAME);
    let socket =
        FrameSocket::new(MaybeTlsStream::plain(stream), parser, settings.silence_timeout).unwrap();
    let control = PairControl::new(socket, CONNECTOR, &settings);
    control.set_formed();
    (control, std::time::Instant::now(), peer)
}

const HEARTBEAT: [u8; 5] = [1, 0, 0, 0, 1];
const SECOND: Duration = Duration::from_secs(1);

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn silence_excludes_buffered_bytes_and_the_time_of_a_stop() {
    let (control, now, mut peer) = formed();
    control.keep_time(now + 14 * SECOND, Duration::ZERO);
    assert_eq!(control.poisoned(), None);
    // Stopped for 10 s in this time.
    control.keep_time(now + 24 * SECOND, 10 * SECOND);
    assert_eq!(control.poisoned(), None);
    peer.write_all(&HEARTBEAT).unwrap();
    control.keep_time(now + 40 * SECOND, Duration::ZERO);
    assert_eq!((control.poisoned(), control.is_confirmed()), (None, true));
    control.keep_time(now + 60 * SECOND, Duration::ZERO);
    let poison = control.poisoned().unwrap();
    assert_eq!((poison.kind, poison.rank), (Cause::Silent, Some(LISTENER)));
    assert_eq!(control.peer_status(), PeerStatus::Lost);
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn heartbeats_are_sent_by_the_silence_timeout_of_the_other_end() {
    let (control, mut now, mut peer) = formed();
    let mut beats = |control: &PairControl, seconds: u32| {
        for _ in 0..4 * seconds {
            now += SECOND / 4;
            control.keep_time(now, Duration::ZERO);
        }
        let mut bytes = [0; 256];
        let count = peer.read(&mut bytes).unwrap_or(0);
        assert_eq!(count % HEARTBEAT.len(), 0);
        assert!(bytes[..count].chunks(HEARTBEAT.len()).all(|frame| frame == HEARTBEAT));
        count / HEARTBEAT.len()
    };
    assert_eq!(beats(&control, 1), 0);
    control.set_peer_silence(SECOND);
    assert_eq!(beats(&control, 2), 8);
    // The peer's zero timeout does not make this end spin.
    control.set_peer_silence(Duration::ZERO);
    assert!(control.tick() > Duration::ZERO);
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn all_connections_come_from_the_source() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let source: IpAddr = "127.0.0.2".parse().unwrap();
    let settings = PairSettings { source: Some(source), ..settings(&address.to_string()) };
    assert_eq!(settings.local_address(TIMEOUT).unwrap(), source);
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| dial(&settings, b"", TIMEOUT).unwrap());
        let (accepted, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), source);
        let mut incoming = IncomingConnection::new(accepted, &settings).unwrap();
        settle(&mut incoming).unwrap();
        let _accepted = incoming.admit(&settings).unwrap();
        dialed.join().unwrap();
    });
    let stream = dial_stream(&settings, address, &[1; 16], TIMEOUT).unwrap();
    assert_eq!(listener.accept().unwrap().1.ip(), source);
    drop(stream);
    let absent =
        |source: &str| PairSettings { source: Some(source.parse().unwrap()), ..settings.clone() };
    for (source, expected) in [
        ("203.0.113.9", "this host does not have it"),
        ("::1", "of another family"),
        ("0.0.0.0", "not one address"),
        ("fe80::1", "link-local"),
    ] {
        let settings = absent(source);
        let local = settings.local_address(TIMEOUT).map(drop);
        for refused in [dial(&settings, b"", TIMEOUT).map(drop), local] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
    let elsewhere =
        PairSettings { secret: Some(Secret::new(b"apple".to_vec()).unwrap()), ..settings };
    let elsewhere = PairSettings { address: "192.0.2.1:1".into(), ..elsewhere };
    let error = dial(&elsewhere, b"", TIMEOUT).map(drop).unwrap_err().to_string();
    assert!(error.contains("cannot be reached from loopback"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn the_route_to_a_listener_gives_the_local_address_and_is_awaited() {
    let local = |address: &str, timeout| settings(address).local_address(timeout);
    assert_eq!(local("127.0.0.7:1", TIMEOUT).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    if TcpListener::bind("[::1]:0").is_ok() {
        assert_eq!(local("[::1]:1", TIMEOUT).unwrap(), IpAddr::V6(Ipv6Addr::LOCALHOST));
    }
    let settings = PairSettings {
        address: "no-such-host.invalid:1".into(),
        secret: Some(Secret::new(b"apple".to_vec()).unwrap()),
        ..settings("127.0.0.1:1")
    };
    let (since, awaited) = (std::time::Instant::now(), Duration::from_millis(200));
    let error = settings.local_address(awaited).unwrap_err();
    assert!(matches!(error, Error::PairResolve { .. }), "{error}");
    assert!(since.elapsed() >= awaited, "{:?}", since.elapsed());
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn another_version_is_refused_by_name() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = settings(&address.to_string());
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| {
            let target = dial::DialTarget {
                rank: LISTENER,
                host: "127.0.0.1".into(),
                port: address.port(),
                source: None,
                is_listener: true,
                tls: Tls::default(),
            };
            let identity = Identity { versions: (8, 9), ..settings.identity(CONNECTOR) };
            let deadline = Deadline::after(TIMEOUT, None);
            dial::dial(&target, &identity, None, &mut |_| Ok(Vec::new()), &deadline).map(drop)
        });
        let mut incoming =
            IncomingConnection::new(listener.accept().unwrap().0, &settings).unwrap();
        assert!(settle(&mut incoming).is_err());
        let error = dialed.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::PairWrongVersion { ours: 9, theirs: 4, .. }), "{error}");
        assert!(!error.to_string().contains("rank"), "{error}");
    });
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn a_stream_leaves_the_bytes_after_its_token_in_the_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = settings(&address.to_string());
    let mut stream = dial_stream(&settings, address, &[7; 16], TIMEOUT).unwrap().unwrap();
    stream.write_all(b"payload").unwrap();
    let mut incoming = IncomingConnection::new(listener.accept().unwrap().0, &settings).unwrap();
    assert_eq!(settle(&mut incoming), Ok(IncomingStep::Stream([7; 16])));
    let mut accepted = incoming.into_stream();
    accepted.tcp().set_nonblocking(false).unwrap();
    let mut bytes = [0; 7];
    accepted.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"payload");
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn an_interrupt_ends_a_dial_at_once_whether_the_address_is_silent_or_refuses() {
    let (silent, _queued) = silent_listener();
    let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [silent.local_addr().unwrap(), refusing] {
        // The limit is 0.1 s, which a single one may exceed on a busy machine.
        let mut took = [(); 3].map(|()| {
            let (interrupt, raised) = raised_soon();
            let settings =
                PairSettings { interrupt: Some(interrupt), ..settings(&address.to_string()) };
            let error = dial(&settings, b"", TIMEOUT).map(drop).unwrap_err();
            assert!(matches!(error, Error::Interrupted { .. }), "{error}");
            raised.elapsed()
        });
        took.sort();
        assert!(took[1] < Duration::from_millis(100), "{took:?}");
    }
}

#[test]
fn an_address_needs_a_secret_unless_it_is_loopback() {
    let open = |address| settings(address).endpoint();
    assert_eq!(open("127.0.0.1:7").unwrap(), ("127.0.0.1".into(), 7));
    assert!(open("localhost:7").is_ok() && open("[::1]:7").is_ok());
    for address in ["0.0.0.0:7", "10.0.0.1:7", "node1:7"] {
        assert!(matches!(open(address), Err(Error::PairSecretMissing { .. })));
        let secret = crate::Secret::new("apple").ok();
        assert!(PairSettings { secret, ..settings(address) }.endpoint().is_ok());
    }
    assert!(matches!(open("127.0.0.1:port"), Err(Error::Variable { .. })));
}
