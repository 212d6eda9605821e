//! Peer made by hand, from docs/wire-format.md.

use crate::common::until;
use crate::ends::{GENERATION, engine, soon, waiting};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_fabric::bytes::Reader;
use weft_fabric::providers::tcp::TcpCounters;
use weft_fabric::providers::{TcpConfig, TcpDevice};
use weft_fabric::{CounterId, Engine, Error, ProviderKind, Rank, Region, RemoteRegion};

/// Token that the handmade rank issues.
pub const TOKEN: [u8; 16] = [7; 16];

/// Socket that an engine listens on, and the token that it expects from the peer with this introduction.
pub fn listening(engine: &Engine, introduction: &[u8]) -> (SocketAddr, [u8; 16]) {
    let address = engine.address();
    let mut reader = Reader::new(address.of(ProviderKind::Tcp).unwrap());
    assert_eq!(reader.u16(), Some(3));
    reader.block().unwrap();
    reader.bytes(8 + 4 + 4).unwrap();
    let ip: [u8; 4] = reader.block().unwrap().try_into().unwrap();
    assert!(reader.is_at_end());
    let mut reader = Reader::new(introduction);
    let token = reader.bytes(16).unwrap().try_into().unwrap();
    let socket = SocketAddr::from((ip, reader.u16().unwrap()));
    assert!(reader.is_at_end());
    (socket, token)
}

/// Introduction from the rank that the test plays, which dials.
pub fn introduction() -> Vec<u8> {
    [&TOKEN[..], &[0, 0]].concat()
}

pub fn hello(
    generation: u8,
    role: u8,
    from: u32,
    to: u32,
    stream: u32,
    token: [u8; 16],
) -> Vec<u8> {
    let mut bytes = b"WEFT\x03\0".to_vec();
    bytes.extend([generation, role]);
    for number in [from, to, stream] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(token);
    bytes
}

pub fn frame(lane: u32, pages: &[(u32, u64, u32)], payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![1, 0];
    bytes.extend((pages.len() as u16).to_le_bytes());
    bytes.extend(lane.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    for (key, offset, length) in pages {
        bytes.extend(key.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
    }
    bytes.extend(payload);
    bytes
}

/// Real rank 0; rank 1, and others of a larger group, are a test that holds the sockets.
pub struct Handmade {
    pub engine: Engine,
    pub counter: CounterId,
    pub destination: Region,
    pub remote: RemoteRegion,
    pub counters: Arc<TcpCounters>,
    /// Immediate for the lane that rank 1 may raise.
    pub lane: u32,
    pub streams: Vec<TcpStream>,
    /// Streams of the ranks above 1.
    _others: Vec<TcpStream>,
}

impl Handmade {
    /// Grants bytes 100..200 out of 300.
    pub fn new() -> Handmade {
        Handmade::with(TcpConfig::default())
    }

    /// [`Handmade::new`] with another configuration for rank 0.
    pub fn with(config: TcpConfig) -> Handmade {
        Handmade::among(2, config)
    }

    /// [`Handmade::with`] in a group of so many ranks.
    pub fn among(size: u32, config: TcpConfig) -> Handmade {
        let streams = config.streams;
        let device = TcpDevice::new(config).unwrap();
        let counters = device.counters().clone();
        let others = (1..size).map(|rank| engine(rank, size, device.clone()).address());
        let others: Vec<_> = others.collect();
        let mut engine = engine(0, size, device);
        let addresses = [vec![engine.address()], others].concat();
        let introduced = engine.introduce(&addresses).unwrap();
        let peers = (1..size).map(|rank| (rank, listening(&engine, &introduced[rank as usize])));
        let peers: Vec<_> = peers.collect();
        let mut sockets: Vec<TcpStream> = std::thread::scope(|scope| {
            let dialling = scope.spawn(move || {
                let dial = |(stream, (rank, (socket, issued)))| {
                    let mut socket = TcpStream::connect(socket).unwrap();
                    let said = hello(GENERATION.0, 1, rank, 0, stream, issued);
                    socket.write_all(&said).unwrap();
                    let mut answer = [0; 36];
                    socket.read_exact(&mut answer).unwrap();
                    assert_eq!(answer[..], hello(GENERATION.0, 2, 0, rank, stream, TOKEN));
                    socket
                };
                let each = |peer| (0..streams).map(move |stream| (stream, peer));
                peers.into_iter().flat_map(each).map(dial).collect()
            });
            let introductions = (1..size).map(|_| introduction());
            let messages: Vec<_> = std::iter::once(Vec::new()).chain(introductions).collect();
            until(soon(20), |limit| engine.connect(&addresses, &messages, limit)).unwrap();
            dialling.join().unwrap()
        });
        let _others = sockets.split_off(streams as usize);
        let counter = engine.counter().unwrap();
        let destination = engine.alloc(300).unwrap();
        let grant = engine.grant(Rank(1), &[(&destination, 100..200)], &[counter]).unwrap();
        let lane = grant.counters[0].data.immediate();
        // Rank 1 grants the mirror image, 64 MiB.
        let mut mirror = grant.clone();
        let length = 64u64 << 20;
        mirror.regions[0].length = length;
        mirror.regions[0].entry = [0u64.to_le_bytes(), length.to_le_bytes()].concat();
        let remote = engine.import(Rank(1), &mirror, &[counter], soon(1)).unwrap()[0];
        Handmade { engine, counter, destination, remote, counters, lane, streams: sockets, _others }
    }

    pub fn key(&self) -> u32 {
        self.destination.key().0
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 300];
        self.destination.memory().copy_out(0, &mut bytes);
        bytes
    }

    /// Waits for one more raise than arrives; returns the poison, with cause, and when it came.
    pub fn poisoned(&mut self) -> (weft_fabric::Poison, Duration) {
        let begin = Instant::now();
        let error = waiting(|w| self.engine.wait(self.counter, &[(Rank(1), u64::MAX)], w));
        match error {
            Err(Error::Poisoned(cause)) => (cause, begin.elapsed()),
            other => panic!("{other:?}"),
        }
    }
}
