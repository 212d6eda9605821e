//! Control connections with TLS: certificates, refusals, and what an observer of the connection reads.

use super::tests::{TIMEOUT, settings, settle};
use super::*;
use crate::Secret;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Authority, and files of a certificate that it issued for a name.
struct Files(PathBuf);

impl Files {
    fn new(test: &str, name: &str) -> Files {
        let folder = std::env::temp_dir().join(format!("weft-tls-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let files = Files(folder);
        std::fs::write(files.path("ca"), issuer.pem()).unwrap();
        std::fs::write(files.path("cert"), certificate.pem()).unwrap();
        std::fs::write(files.path("key"), key.serialize_pem()).unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn listener(&self) -> Tls {
        Tls::default().with_certificate(&self.path("cert"), &self.path("key")).unwrap()
    }

    fn dialer(&self) -> Tls {
        Tls::default().with_authorities(&self.path("ca")).unwrap()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes that pass a relay, in both directions.
type Observed = Arc<Mutex<Vec<u8>>>;

/// Relay to an address for one connection; returns its own address.
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

/// Both ends of a pair with this TLS, dialed at `address` in place of the listener's, if given.
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

/// Sends a text of this length from one end to the other, and back.
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
        [(Tls::default(), Tls::default(), true), (files.listener(), files.dialer(), false)]
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
    let (one, other) = ends(&files.listener(), &files.dialer(), "apple", |address| address);
    let (one, other) = (one.unwrap(), other.unwrap());
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
    let (here, there) = refused(&files.listener(), &plain, "apple");
    assert!(here.contains("does not use TLS") && matches!(there, Error::TlsDemanded { .. }));
    let (here, there) = refused(&plain, &files.dialer(), "apple");
    assert!(here.contains("no certificate") && matches!(there, Error::Tls { .. }), "{there}");
    let (here, there) = refused(&files.listener(), &others.dialer(), "apple");
    assert!(here.contains("TLS handshake"), "{here}");
    assert!(there.to_string().contains("invalid peer certificate"), "{there}");
    let (_, there) = refused(&elsewhere.listener(), &elsewhere.dialer(), "apple");
    assert!(there.to_string().contains("not valid for name"), "{there}");
    let (here, there) = refused(&files.listener(), &files.dialer(), "pear");
    assert!(here.contains("another secret") && matches!(there, Error::WrongSecret { .. }));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn a_data_connection_is_recognised_beside_tls() {
    let files = Files::new("data", "127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _stream = dial_stream(address, &[7; 16], TIMEOUT, None).unwrap().unwrap();
    let settings = PairSettings { tls: files.listener(), ..settings(&address.to_string()) };
    let mut incoming = IncomingConnection::new(listener.accept().unwrap().0, &settings).unwrap();
    assert_eq!(settle(&mut incoming), Ok(IncomingStep::Stream([7; 16])));
}

#[test]
#[cfg_attr(miri, ignore = "miri has no sockets")]
fn garbage_after_the_first_byte_of_tls_ends_the_connection() {
    let files = Files::new("garbage", "127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = PairSettings { tls: files.listener(), ..settings(&address.to_string()) };
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
