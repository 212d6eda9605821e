//! Pair formation among unknown connections: secrets, versions, garbage, dialers that stall, many dialers.

use crate::common::{LOSS, PATIENCE, accept, by, config, in_time, listen, pair_on};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_control::Secret;
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::{Error, ProviderKind};

fn with_secret(mut config: PairConfig, secret: &str) -> PairConfig {
    config.settings.secret = Some(Secret::new(secret).unwrap());
    config
}

/// Accepts on another thread until a pair has formed.
fn accepting<T>(listener: &Listener, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let turning = scope.spawn(|| {
            let ended = listener.accept(by(PATIENCE), &mut || stop.load(Ordering::Relaxed));
            assert!(matches!(ended.map(drop), Err(Error::Interrupted)));
        });
        let result = work();
        stop.store(true, Ordering::Relaxed);
        turning.join().unwrap();
        result
    })
}

#[test]
fn another_secret_is_refused_and_the_listener_goes_on() {
    let secret = with_secret(config("127.0.0.1:0", ProviderKind::Tcp), "apple");
    let listener = Listener::bind(secret).unwrap();
    let address = listener.address().to_string();
    let other = config(&address, ProviderKind::Tcp);
    for wrong in [other.clone(), with_secret(other.clone(), "pear")] {
        let refused = in_time(|| accepting(&listener, || connect(&wrong, by(2 * LOSS)).map(drop)));
        let error = refused.unwrap_err();
        assert!(
            matches!(error, Error::Control(weft_control::Error::PairWrongSecret { .. })),
            "{error}"
        );
        assert!(!error.to_string().contains("rank"), "{error}");
    }
    let right = with_secret(other, "apple");
    std::thread::scope(|scope| {
        let dialled = scope.spawn(|| connect(&right, by(PATIENCE)).unwrap());
        accept(&listener);
        dialled.join().unwrap();
    });
}

#[test]
fn ends_without_a_common_provider_are_refused_at_once_by_both_names() {
    use ProviderKind::{Shm, Tcp};
    for (here, there) in [(Shm, Tcp), (Tcp, Shm)] {
        let listener = listen(there);
        let config = config(&listener.address().to_string(), here);
        let error = in_time(|| accepting(&listener, || connect(&config, by(2 * LOSS))));
        let error = error.map(drop).unwrap_err();
        let names = matches!(&error, Error::NoRoute { here: ours, there: theirs, .. }
            if *ours == here.name() && *theirs == there.name());
        assert!(names, "{error}");
        pair_on(&listener, there);
    }
    // Both have shm, which does not reach another host.
    let listener = listen(Shm);
    let mut config = config(&listener.address().to_string(), Shm);
    config.settings.host_id = "another host".into();
    let error = in_time(|| accepting(&listener, || connect(&config, by(2 * LOSS))));
    assert!(matches!(error.map(drop), Err(Error::NoRoute { .. })));
}

#[test]
fn an_address_off_loopback_needs_a_secret_at_both_ends() {
    let open = config("0.0.0.0:0", ProviderKind::Tcp);
    for error in [
        Listener::bind(open).map(drop).unwrap_err(),
        connect(&config("192.0.2.1:1", ProviderKind::Tcp), by(PATIENCE)).map(drop).unwrap_err(),
    ] {
        assert!(error.to_string().contains("secret="), "{error}");
    }
    let closed = with_secret(config("0.0.0.0:0", ProviderKind::Tcp), "apple");
    assert!(Listener::bind(closed).is_ok());
}

#[test]
fn a_group_and_a_listener_of_pairs_turn_each_others_diallers_away() {
    let listener = listen(ProviderKind::Shm);
    let mut group = weft_control::Config::new(1, 2);
    group.port = listener.address().port();
    group.connect_timeout = std::time::Duration::from_millis(300);
    let error = accepting(&listener, || weft_control::Control::connect(group).map(drop));
    assert!(matches!(error, Err(weft_control::Error::Rendezvous { .. })), "{error:?}");
}

#[test]
fn garbage_and_silence_cost_the_listener_nothing() {
    let listener = listen(ProviderKind::Shm);
    let address = listener.address();
    let mut connections: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (number, connection) in connections.iter_mut().enumerate() {
        match number % 4 {
            0 => {}
            1 => connection.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap(),
            2 => connection.write_all(&[0xff; 64]).unwrap(),
            _ => connection.write_all(&[25, 0, 0, 0, 0x90]).unwrap(),
        }
    }
    let dialer = std::thread::spawn(move || {
        connect(&config(&address.to_string(), ProviderKind::Shm), by(PATIENCE)).unwrap()
    });
    let pair = accept(&listener);
    assert_eq!(pair.rank(), dialer.join().unwrap().control().members()[0].rank);
    // Connections that violated the protocol are closed, and so are silent ones.
    accepting(&listener, || {
        for connection in &mut connections[..4] {
            connection.set_read_timeout(Some(LOSS)).unwrap();
            let mut refusal = [0; 64];
            let ended = loop {
                match connection.read(&mut refusal) {
                    Ok(1..) => {}
                    ended => break ended.map_err(|error| error.kind()),
                }
            };
            assert!(matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)), "{ended:?}");
        }
    });
}

#[test]
fn a_token_that_was_not_issued_is_refused() {
    let listener = listen(ProviderKind::Tcp);
    let settings = config(&listener.address().to_string(), ProviderKind::Tcp).settings;
    let stream =
        weft_control::pair::dial_stream(&settings, listener.address(), &[7; 16], LOSS).unwrap();
    let stream = stream.unwrap().into_tcp();
    accepting(&listener, || {
        let mut stream = stream;
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LOSS)).unwrap();
        assert!(matches!(stream.read(&mut [0; 8]), Ok(0)));
    });
}

#[test]
fn two_hundred_diallers_at_once_are_all_let_in() {
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
        let listener = listen(provider);
        let address = listener.address().to_string();
        std::thread::scope(|scope| {
            let dialled: Vec<_> = (0..200)
                .map(|_| {
                    let config = config(&address, provider);
                    scope.spawn(move || connect(&config, by(PATIENCE)).unwrap())
                })
                .collect();
            let accepted: Vec<_> = (0..200).map(|_| accept(&listener)).collect();
            let dialled: Vec<_> = dialled.into_iter().map(|end| end.join().unwrap()).collect();
            assert_eq!((accepted.len(), dialled.len()), (200, 200));
            assert!(accepted.iter().all(|pair| pair.engine().check().is_ok()));
        });
    }
}

#[test]
fn a_listener_that_is_closed_refuses_and_its_pairs_stay() {
    let listener = listen(ProviderKind::Shm);
    let (one, other) = crate::common::ends(crate::common::pair_on(&listener, ProviderKind::Shm));
    listener.close();
    let error = listener.try_accept().map(drop).unwrap_err();
    assert!(matches!(error, Error::ListenerClosed { .. }), "{error}");
    let late = config(&listener.address().to_string(), ProviderKind::Shm);
    let error = connect(&late, by(LOSS / 50)).map(drop).unwrap_err();
    assert!(error.to_string().contains("check that its process listens"), "{error}");
    std::thread::scope(|scope| {
        scope.spawn(|| one.echo(5).unwrap());
        other.ask(5).unwrap();
    });
}

#[test]
fn an_accept_ends_at_its_deadline_and_when_it_is_interrupted() {
    let listener = listen(ProviderKind::Shm);
    let error = in_time(|| listener.accept(by(LOSS / 500), &mut || false)).map(drop).unwrap_err();
    assert!(matches!(error, Error::NoDialer { .. }), "{error}");
    assert!(error.to_string().contains(&listener.address().to_string()), "{error}");
    let error = in_time(|| listener.accept(by(PATIENCE), &mut || true));
    assert!(matches!(error.map(drop), Err(Error::Interrupted)));
}

#[test]
fn a_pair_that_its_listener_drops_at_once_is_formed_and_left_in_peace() {
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
        let listener = listen(provider);
        let address = listener.address().to_string();
        std::thread::scope(|scope| {
            let dialling = scope.spawn(|| {
                let connect = |_| connect(&config(&address, provider), by(PATIENCE)).map(drop);
                (0..200).try_for_each(connect).unwrap();
            });
            (0..200).for_each(|_| drop(accept(&listener)));
            dialling.join().unwrap();
        });
    }
}
