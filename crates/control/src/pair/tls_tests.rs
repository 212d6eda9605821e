//! Control connections with TLS: certificates, refusals, and what a connection observer reads.

#[path = "../../tests/common/certificates.rs"]
mod certificates;

use super::tests::{TIMEOUT, settings, settle};
use super::*;
use crate::{Error, Operation, Result, Secret, Tls};
use certificates::Files;
use std::io;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn of_listener(files: &Files) -> Tls {
    Tls::default().with_certificate(&files.path("cert"), &files.path("key")).unwrap()
}

fn of_dialer(files: &Files) -> Tls {
    Tls::default().with_authorities(&files.path("ca")).unwrap()
}

/// Bytes that pass a relay, in both directions.
type Observed = Arc<Mutex<Vec<u8>>>;

/// Relay to an address for one connection; returns the relay's address.
fn relay(to: SocketAddr) -> (SocketAddr, Observed) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, observed) = (listener.local_addr().unwrap(), Observed::default());
    let seen = observed.clone();
    std::thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = TcpStream::connect(to).unwrap();
        let copy = |mut from: TcpStream, mut to: TcpStream, seen: Observed| {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                seen.lock().unwrap().extend_from_slice(&bytes[..count]);
                if to.write_all(&bytes[..count]).is_err() {
                    return;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        };
        let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let one = std::thread::spawn({
            let seen = seen.clone();
            move || copy(from, to, seen)
        });
        copy(far, near, seen);
        one.join().unwrap();
    });
    (address, observed)
}

/// Both pair ends with this TLS, dialed at `address` in place of the listener's, if given.
fn ends(
    here: &Tls,
    there: &Tls,
    secret: &str,
    through: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (std::result::Result<PairControl, &'static str>, Result<PairControl>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let with = |address: SocketAddr, tls: &Tls, secret: &str| PairSettings {
        secret: Secret::new(secret).ok(),
        tls: tls.clone(),
        ..settings(&address.to_string())
    };
    let (own, theirs) = (with(address, here, "apple"), with(through(address), there, secret));
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| dial(&theirs, b"details", TIMEOUT));
        let mut incoming = IncomingConnection::new(listener.accept().unwrap().0, &own).unwrap();
        let accepted = settle(&mut incoming).map(|step| {
            assert_eq!(step, IncomingStep::Authenticated(b"details".to_vec()));
            let accepted = incoming.admit(&own).unwrap();
            accepted.set_formed();
            accepted
        });
        let dialed = dialed.join().unwrap().inspect(|dialed| {
            dialed.wait_until_formed(TIMEOUT).unwrap();
            dialed.set_formed();
        });
        (accepted, dialed)
    })
}

/// Sends a text with this length from one end to the other, and back.
fn exchange(one: &PairControl, other: &PairControl, text: &[u8]) {
    std::thread::scope(|scope| {
        let echoed = scope.spawn(|| {
            let found = other.exchange(Operation::Share, b"", TIMEOUT).unwrap();
            other.exchange(Operation::Share, &found, TIMEOUT).unwrap();
        });
        assert_eq!(one.exchange(Operation::Share, text, TIMEOUT).unwrap(), b"");
        assert_eq!(one.exchange(Operation::Share, b"", TIMEOUT).unwrap(), text);
        echoed.join().unwrap();
    });
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn an_observer_reads_exchanges_without_tls_and_none_with_it() {
    let files = Files::new("observer", "127.0.0.1");
    let text = b"the names of the nodes and their tensors";
    for (here, there, is_read) in
        [(Tls::default(), Tls::default(), true), (of_listener(&files), of_dialer(&files), false)]
    {
        let mut observed = Observed::default();
        let (one, other) = ends(&here, &there, "apple", |address| {
            let (address, seen) = relay(address);
            observed = seen;
            address
        });
        let (one, other) = (one.unwrap(), other.unwrap());
        exchange(&one, &other, text);
        // A leave is a departure, with TLS too.
        other.leave();
        let left = loop {
            match one.check() {
                Ok(()) => std::thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert!(matches!(left, Error::Left { .. }), "{left}");
        drop((one, other));
        let observed = observed.lock().unwrap();
        assert!(observed.len() > text.len());
        assert_eq!(observed.windows(text.len()).any(|window| window == text), is_read);
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn messages_longer_than_any_buffer_pass_tls_and_an_end_without_a_leave_is_a_loss() {
    let files = Files::new("long", "127.0.0.1");
    let (one, other) = ends(&of_listener(&files), &of_dialer(&files), "apple", |address| address);
    let (one, other) = (Arc::new(one.unwrap()), Arc::new(other.unwrap()));
    // An exchange may return before its own part is sent: the pair thread sends the rest.
    one.watch().unwrap();
    other.watch().unwrap();
    let long: Vec<u8> = (0..8_u32 << 20).map(|byte| (byte % 251) as u8).collect();
    exchange(&one, &other, &long);
    exchange(&other, &one, &long);
    other.abandon();
    let lost = loop {
        match one.check() {
            Ok(()) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&lost, Error::Poisoned(poison) if poison.kind == crate::Cause::Lost),
        "{lost}"
    );
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn ends_that_differ_in_tls_or_in_the_secret_are_refused_by_name() {
    let (files, others) = (Files::new("one", "127.0.0.1"), Files::new("other", "127.0.0.1"));
    let elsewhere = Files::new("name", "10.0.0.1");
    let plain = Tls::default();
    let refused = |here: &Tls, there: &Tls, secret: &str| {
        let (accepted, dialed) = ends(here, there, secret, |address| address);
        (accepted.map(drop).unwrap_err(), dialed.map(drop).unwrap_err())
    };
    let (here, there) = refused(&of_listener(&files), &plain, "apple");
    assert!(here.contains("does not use TLS") && matches!(there, Error::TlsDemanded { .. }));
    let (here, there) = refused(&plain, &of_dialer(&files), "apple");
    assert!(here.contains("no certificate") && matches!(there, Error::Tls { .. }), "{there}");
    let (here, there) = refused(&of_listener(&files), &of_dialer(&others), "apple");
    assert!(here.contains("TLS handshake"), "{here}");
    assert!(there.to_string().contains("invalid peer certificate"), "{there}");
    let (_, there) = refused(&of_listener(&elsewhere), &of_dialer(&elsewhere), "apple");
    assert!(there.to_string().contains("not valid for name"), "{there}");
    let (here, there) = refused(&of_listener(&files), &of_dialer(&files), "pear");
    assert!(here.contains("another secret") && matches!(there, Error::PairWrongSecret { .. }));
}

/// Both data connection ends with this TLS, dialed at `through` applied to the listener's address.
fn data_ends(
    here: &Tls,
    there: &Tls,
    through: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (std::result::Result<MaybeTlsStream, &'static str>, io::Result<MaybeTlsStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let with = |tls: &Tls| PairSettings { tls: tls.clone(), ..settings(&address.to_string()) };
    let (own, theirs, address) = (with(here), with(there), through(address));
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| dial_stream(&theirs, address, &[7; 16], TIMEOUT).unwrap());
        let mut incoming = IncomingConnection::new(listener.accept().unwrap().0, &own).unwrap();
        let accepted = settle(&mut incoming).map(|step| {
            assert_eq!(step, IncomingStep::Stream([7; 16]));
            incoming.into_stream()
        });
        (accepted, dialed.join().unwrap())
    })
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn a_data_connection_has_tls_only_if_both_ends_have_it_for_payloads() {
    let files = Files::new("data", "127.0.0.1");
    let (here, there) = (of_listener(&files), of_dialer(&files));
    let direct = |address| address;
    let (accepted, dialed) = data_ends(&here, &there, direct);
    assert!(!accepted.unwrap().has_tls() && !dialed.unwrap().has_tls());
    let (accepted, dialed) = data_ends(&here.clone().with_payloads(), &there, direct);
    assert!(accepted.unwrap_err().contains("without TLS") && dialed.is_ok());
    let (accepted, _) = data_ends(&here, &there.clone().with_payloads(), direct);
    assert!(accepted.unwrap_err().contains("with TLS"));
    let others = Files::new("data-other", "127.0.0.1");
    let (_, dialed) = data_ends(&here.with_payloads(), &of_dialer(&others).with_payloads(), direct);
    assert!(dialed.unwrap_err().to_string().contains("invalid peer certificate"));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn a_write_is_refused_only_by_a_full_socket() {
    let files = Files::new("refused", "127.0.0.1");
    let (here, there) = (of_listener(&files).with_payloads(), of_dialer(&files).with_payloads());
    let (accepted, dialed) = data_ends(&here, &there, |address| address);
    let (mut accepted, mut dialed) = (accepted.unwrap(), dialed.unwrap());
    let (sent, mut bytes) = (vec![1; 1 << 20], vec![0; 100_000]);
    for _ in 0..20 {
        while dialed.write(&sent).is_ok() {}
        assert!(dialed.has_unsent());
        // Room for more than what waits: the other end reads all that has come.
        while accepted.read(&mut bytes).is_ok() {}
        std::thread::sleep(Duration::from_millis(5));
        let written = dialed.write(&sent);
        assert!(written.is_ok() || dialed.has_unsent(), "{written:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn payloads_with_tls_pass_whole_and_unread() {
    let files = Files::new("payloads", "127.0.0.1");
    let mut observed = Observed::default();
    let (here, there) = (of_listener(&files).with_payloads(), of_dialer(&files).with_payloads());
    let (accepted, dialed) = data_ends(&here, &there, |address| {
        let (address, seen) = relay(address);
        observed = seen;
        address
    });
    let (mut accepted, mut dialed) = (accepted.unwrap(), dialed.unwrap());
    assert!(accepted.has_tls() && dialed.has_tls());
    let sent: Vec<u8> = (0..3_u32 << 20).map(|byte| (byte % 251) as u8).collect();
    let (mut written, mut received, mut bytes) = (0, Vec::new(), vec![0; 100_000]);
    // Both are non-blocking: what one holds back waits in it until the next call.
    while received.len() < sent.len() {
        match dialed.write(&sent[written..]) {
            Ok(count) => written += count,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        dialed.flush().unwrap();
        match accepted.read(&mut bytes) {
            Ok(count) => received.extend_from_slice(&bytes[..count]),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                assert!(!accepted.has_unread());
            }
        }
    }
    assert!(written == sent.len() && !dialed.has_unsent());
    // A partial record is unread, while the socket is empty.
    dialed.write_all(b"four").unwrap();
    while accepted.read(&mut bytes[..1]).is_err() {
        std::thread::yield_now();
    }
    assert!(accepted.has_unread());
    assert_eq!(accepted.read(&mut bytes).unwrap(), 3);
    assert!(!accepted.has_unread());
    assert_eq!(received, sent);
    drop(dialed);
    let end = loop {
        match accepted.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
            end => break end,
        }
    };
    assert!(matches!(end, Ok(0)), "{end:?}");
    let observed = observed.lock().unwrap();
    assert!(observed.len() > sent.len());
    assert!(!observed.windows(64).any(|window| window == &sent[..64]));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn what_arrived_before_the_end_is_read_after_a_write_has_failed() {
    let files = Files::new("end", "127.0.0.1");
    let (here, there) = (of_listener(&files).with_payloads(), of_dialer(&files).with_payloads());
    let (accepted, dialed) = data_ends(&here, &there, |address| address);
    let (mut accepted, mut dialed) = (accepted.unwrap(), dialed.unwrap());
    accepted.write_all(b"last").unwrap();
    accepted.tcp().shutdown(std::net::Shutdown::Both).unwrap();
    let since = std::time::Instant::now();
    // The first write makes the other end reset the connection.
    while dialed.write(&[0; 100]).is_ok() {
        assert!(since.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut bytes = [0; 8];
    assert_eq!(dialed.read(&mut bytes).unwrap(), 4);
    assert_eq!(&bytes[..4], b"last");
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn tls_of_payloads_needs_authorities_to_dial_and_a_certificate_to_listen() {
    let files = Files::new("lacking", "127.0.0.1");
    let with = |tls: Tls| PairSettings { tls, ..settings("127.0.0.1:9") };
    let dialing = with(of_listener(&files).with_payloads());
    dialing.check_listener_tls().unwrap();
    let error = dial(&dialing, b"", TIMEOUT).map(drop).unwrap_err().to_string();
    assert!(error.contains("WEFT_TLS_CA"), "{error}");
    let address = "127.0.0.1:9".parse().unwrap();
    let error = dial_stream(&dialing, address, &[7; 16], TIMEOUT).map(drop).unwrap_err();
    assert!(error.to_string().contains("WEFT_TLS_CA"), "{error}");
    let listening = with(of_dialer(&files).with_payloads());
    let error = listening.check_listener_tls().unwrap_err().to_string();
    assert!(error.contains("WEFT_TLS_CERT and WEFT_TLS_KEY"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn garbage_after_the_first_byte_of_tls_ends_the_connection() {
    let files = Files::new("garbage", "127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = PairSettings { tls: of_listener(&files), ..settings(&address.to_string()) };
    let mut dialer = TcpStream::connect(address).unwrap();
    dialer.write_all(&[[crate::tls::FIRST_BYTE; 1].as_slice(), &[0xff; 300]].concat()).unwrap();
    let mut incoming = IncomingConnection::new(listener.accept().unwrap().0, &settings).unwrap();
    assert_eq!(settle(&mut incoming), Err("its TLS handshake failed"));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn unusable_files_are_named() {
    let files = Files::new("files", "127.0.0.1");
    let missing = files.path("none");
    let named = |tls: Result<Tls>, path: &PathBuf| {
        let text = tls.map(drop).unwrap_err().to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
    };
    let tls = Tls::default;
    named(tls().with_authorities(&missing), &missing);
    named(tls().with_authorities(&files.path("key")), &files.path("key"));
    named(tls().with_certificate(&files.path("cert"), &missing), &missing);
    named(tls().with_certificate(&files.path("ca"), &files.path("key")), &files.path("ca"));
}
