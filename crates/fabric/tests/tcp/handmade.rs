//! A peer made by hand, from what docs/wire-format.md says.

use crate::ends::{GENERATION, engine, soon, waiting};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weft_fabric::bytes::Reader;
use weft_fabric::descriptor::Address;
use weft_fabric::providers::tcp::TcpCounters;
use weft_fabric::providers::{TcpConfig, TcpProvider};
use weft_fabric::{CounterId, Engine, Error, Provider, Rank, Region, RemoteRegion};

/// The fields of a tcp address that a client needs.
pub struct Known {
    pub token: [u8; 16],
    pub socket: SocketAddr,
}

pub fn read_address(address: &[u8]) -> Known {
    let mut reader = Reader::new(address);
    assert_eq!(reader.u16(), Some(1));
    reader.block().unwrap();
    let token = reader.bytes(16).unwrap().try_into().unwrap();
    reader.bytes(8 + 4 + 4).unwrap();
    let ip: [u8; 4] = reader.block().unwrap().try_into().unwrap();
    let socket = SocketAddr::from((ip, reader.u16().unwrap()));
    assert!(reader.is_at_end());
    Known { token, socket }
}

pub fn hello(
    generation: u8,
    role: u8,
    from: u32,
    to: u32,
    stream: u32,
    token: [u8; 16],
) -> Vec<u8> {
    let mut bytes = b"WEFT\x01\0".to_vec();
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

/// A real rank 0 whose rank 1 is a test holding the sockets.
pub struct Handmade {
    pub engine: Engine,
    pub counter: CounterId,
    pub destination: Region,
    pub remote: RemoteRegion,
    pub counters: Arc<TcpCounters>,
    /// The lane that rank 1 may raise, as it travels.
    pub lane: u32,
    pub streams: Vec<TcpStream>,
}

impl Handmade {
    /// Grants bytes 100..200 of 300.
    pub fn new() -> Handmade {
        let provider = TcpProvider::new(TcpConfig::default()).unwrap();
        let counters = provider.counters().clone();
        let here = read_address(&provider.address());
        let other = TcpProvider::new(TcpConfig::default()).unwrap();
        let there = read_address(&other.address());
        let mut engine = engine(0, 2, provider);
        let kind = other.kind();
        let addresses = [engine.address(), Address { providers: vec![(kind, other.address())] }];
        let streams = std::thread::scope(|scope| {
            let dialling = scope.spawn(move || {
                let dial = |stream: u32| {
                    let mut socket = TcpStream::connect(here.socket).unwrap();
                    let said = hello(GENERATION.0, 1, 1, 0, stream, here.token);
                    socket.write_all(&said).unwrap();
                    let mut answer = [0; 36];
                    socket.read_exact(&mut answer).unwrap();
                    assert_eq!(answer[..], hello(GENERATION.0, 2, 0, 1, stream, there.token));
                    socket
                };
                (0..TcpConfig::default().streams).map(dial).collect()
            });
            engine.connect(&addresses, soon(20)).unwrap();
            dialling.join().unwrap()
        });
        let counter = engine.counter().unwrap();
        let destination = engine.alloc(300).unwrap();
        let grant = engine.grant(Rank(1), &[(&destination, 100..200)], &[counter]).unwrap();
        let lane = grant.counters[0].data.immediate();
        // Rank 1 grants the mirror image, of 64 MiB.
        let mut mirror = grant.clone();
        let length = 64u64 << 20;
        mirror.regions[0].length = length;
        mirror.regions[0].entry = [0u64.to_le_bytes(), length.to_le_bytes()].concat();
        let remote = engine.import(Rank(1), &mirror, &[counter], soon(1)).unwrap()[0];
        Handmade { engine, counter, destination, remote, counters, lane, streams }
    }

    pub fn key(&self) -> u32 {
        self.destination.key().0
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 300];
        self.destination.memory().copy_out(0, &mut bytes);
        bytes
    }

    /// Waits for one more raise than there will be and returns what poisoned the group, and when.
    pub fn poisoned(&mut self) -> (weft_fabric::Poison, Duration) {
        let begin = Instant::now();
        let error = waiting(|w| self.engine.wait(self.counter, &[(Rank(1), u64::MAX)], w));
        match error {
            Err(Error::Poisoned(cause)) => (cause, begin.elapsed()),
            other => panic!("{other:?}"),
        }
    }
}
