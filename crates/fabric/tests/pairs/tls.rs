//! Pairs whose payloads are encrypted.

#[path = "../../../control/tests/common/certificates.rs"]
mod certificates;

use super::common::{PATIENCE, by, config, ends};
use certificates::Files;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_control::Error as Control;
use weft_control::Tls;
use weft_fabric::pair::{Listener, PairConfig, connect};
use weft_fabric::{
    Communicator, CounterId, Error, Page, ProviderKind, Rank, Region, RemoteRegion, RequestId,
};

/// TLS for a listener and a connector.
fn both(files: &Files) -> [Tls; 2] {
    [
        Tls::default().with_certificate(&files.path("cert"), &files.path("key")).unwrap(),
        Tls::default().with_authorities(&files.path("ca")).unwrap(),
    ]
}

fn tcp(address: &str, tls: Tls) -> PairConfig {
    let mut config = config(address, ProviderKind::Tcp);
    config.settings.tls = tls;
    config
}

/// Forms a pair over tcp with the listener's and the connector's TLS.
fn form([here, there]: [Tls; 2]) -> weft_fabric::Result<(Communicator, Communicator)> {
    let listener = Listener::bind(tcp("127.0.0.1:0", here)).unwrap();
    let (address, failed) = (listener.address().to_string(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let dialer = scope.spawn(|| {
            let dialed = connect(&tcp(&address, there), by(PATIENCE));
            failed.store(dialed.is_err(), Ordering::Release);
            dialed
        });
        let accepted = listener.accept(by(PATIENCE), &mut || failed.load(Ordering::Acquire));
        dialer.join().unwrap().map(|dialed| (accepted.unwrap(), dialed))
    })
}

fn encrypted(files: &Files) -> (Communicator, Communicator) {
    form(both(files).map(Tls::with_payloads)).unwrap()
}

/// Longest message: many parts, and more than one poll moves.
const LONGEST: usize = 6 << 20;

/// One end's memory and counter for messages in any length.
struct Side {
    communicator: Communicator,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
    counter: CounterId,
}

impl Side {
    fn new(communicator: Communicator) -> Side {
        let mut engine = communicator.engine();
        let [source, inbox] = [(); 2].map(|()| engine.alloc(LONGEST).unwrap());
        let counter = engine.counter().unwrap();
        drop(engine);
        let shared = [(&inbox, 0..LONGEST as u64)];
        let remotes = communicator.share(&shared, &[counter], by(PATIENCE)).unwrap();
        let remote = remotes[1 - communicator.rank().index()][0];
        Side { communicator, source, inbox, remote, counter }
    }

    fn peer(&self) -> Rank {
        Rank(1 - self.communicator.rank().0)
    }

    /// Writes these bytes in the next round, and returns before they have left.
    fn send(&self, bytes: &[u8]) -> RequestId {
        let (peer, mut never) = (self.peer(), || false);
        let mut waiter = self.communicator.wait_options(by(PATIENCE), &mut never);
        let round = self.communicator.engine().next_round(self.counter, peer).unwrap();
        self.communicator.wait_for_credit(self.counter, peer, round, &mut waiter).unwrap();
        self.source.memory().copy_in(0, bytes);
        let page = Page {
            source: self.source.key(),
            source_offset: 0,
            destination: self.remote.key,
            destination_offset: 0,
            length: bytes.len() as u64,
        };
        self.communicator.engine().write(peer, self.counter, round, &[page]).unwrap()
    }

    /// Waits for a message with this length.
    fn receive(&self, length: usize) -> Vec<u8> {
        let (peer, mut never) = (self.peer(), || false);
        let parts = self.communicator.engine().route(peer).unwrap().parts.count([length as u64]);
        let mut waiter = self.communicator.wait_options(by(PATIENCE), &mut never);
        self.communicator.wait(self.counter, &[(peer, parts)], &mut waiter).unwrap();
        let mut bytes = vec![0; length];
        self.inbox.memory().copy_out(0, &mut bytes);
        self.communicator.engine().credit(peer, self.counter).unwrap();
        bytes
    }

    /// Sends and receives messages with random lengths, which both ends derive from the seed.
    fn exchange(&self, seed: u64) {
        let mut random = Random(seed);
        for round in 0..60 {
            let lengths = [(); 2].map(|()| random.length());
            let of = |rank: usize| message(seed + 2 * round + rank as u64, lengths[rank]);
            let (here, there) = (self.communicator.rank().index(), self.peer().index());
            let request = self.send(&of(here));
            assert!(self.receive(lengths[there]) == of(there), "round {round}: {lengths:?}");
            let mut never = || false;
            let mut waiter = self.communicator.wait_options(by(PATIENCE), &mut never);
            self.communicator.wait_for_request(request, &mut waiter).unwrap();
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// As many short lengths as long ones.
    fn length(&mut self) -> usize {
        let bits = self.next() % 23;
        1 + (self.next() as usize & ((1 << bits) - 1)).min(LONGEST - 1)
    }
}

fn message(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.next() as u8).collect()
}

#[test]
fn messages_of_any_length_pass_both_ways_at_once() {
    let files = Files::new("messages", "127.0.0.1");
    let (one, other) = encrypted(&files);
    std::thread::scope(|scope| {
        scope.spawn(|| Side::new(other).exchange(7));
        Side::new(one).exchange(7);
    });
}

#[test]
fn the_last_writes_before_a_close_arrive() {
    let files = Files::new("last", "127.0.0.1");
    let (one, other) = encrypted(&files);
    let other = std::thread::spawn(move || Side::new(other));
    let (one, other) = (Side::new(one), other.join().unwrap());
    let expected = message(3, LONGEST);
    let leaving = std::thread::spawn(move || {
        other.send(&message(3, LONGEST));
    });
    assert!(one.receive(LONGEST) == expected);
    leaving.join().unwrap();
}

#[test]
fn ends_are_alike_or_the_connector_names_the_variable() {
    let files = Files::new("alike", "127.0.0.1");
    let [here, there] = both(&files);
    for (tls, alone) in [
        ([here.clone().with_payloads(), there.clone()], "the listener has it alone"),
        ([here.clone(), there.clone().with_payloads()], "this end has it alone"),
    ] {
        let error = form(tls).map(drop).unwrap_err();
        assert!(matches!(error, Error::Control(Control::TlsPayloads { .. })), "{error}");
        let text = error.to_string();
        assert!(text.contains(alone) && text.contains("WEFT_TLS_PAYLOADS=1"), "{text}");
    }
    // Only the control connection with TLS, as before.
    let (one, other) = ends(form([here, there]).unwrap());
    let asked = std::thread::spawn(move || other.echo(3));
    one.ask(3).unwrap();
    asked.join().unwrap().unwrap();
}

#[test]
fn providers_without_tls_alone_are_refused_by_name() {
    let files = Files::new("clear", "127.0.0.1");
    for kind in [ProviderKind::Verbs, ProviderKind::Ofi] {
        let [here, there] = both(&files).map(Tls::with_payloads);
        let [mut listening, mut dialing] =
            [("127.0.0.1:0", here), ("127.0.0.1:9", there)].map(|(address, tls)| tcp(address, tls));
        (listening.providers, dialing.providers) = (vec![kind], vec![kind]);
        let refused = [
            Listener::bind(listening).map(drop).unwrap_err(),
            connect(&dialing, by(PATIENCE)).map(drop).unwrap_err(),
        ];
        for error in refused.map(|error| error.to_string()) {
            let is_named = error.contains(kind.name());
            assert!(is_named && error.contains("its messages have no TLS"), "{error}");
        }
    }
}
