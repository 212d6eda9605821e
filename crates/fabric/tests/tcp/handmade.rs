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

/// Socket that an engine listens on.
pub fn socket_of(engine: &Engine) -> SocketAddr {
    let address = engine.address();
    let mut reader = Reader::new(address.of(ProviderKind::Tcp).unwrap());
    assert_eq!(reader.u16(), Some(2));
    reader.block().unwrap();
    reader.bytes(8 + 4 + 4).unwrap();
    let ip: [u8; 4] = reader.block().unwrap().try_into().unwrap();
    let socket = SocketAddr::from((ip, reader.u16().unwrap()));
    assert!(reader.is_at_end());
    socket
}

pub fn hello(
    generation: u8,
    role: u8,
    from: u32,
    to: u32,
    stream: u32,
    token: [u8; 16],
) -> Vec<u8> {
    let mut bytes = b"WEFT\x02\0".to_vec();
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

/// Real rank 0; rank 1 is a test that holds the sockets.
pub struct Handmade {
    pub engine: Engine,
    pub counter: CounterId,
    pub destination: Region,
    pub remote: RemoteRegion,
    pub counters: Arc<TcpCounters>,
    /// Immediate of the lane that rank 1 may raise.
    pub lane: u32,
    pub streams: Vec<TcpStream>,
}

impl Handmade {
    /// Grants bytes 100..200 of 300.
    pub fn new() -> Handmade {
        Handmade::with(TcpConfig::default())
    }

    /// [`Handmade::new`] with another configuration of rank 0.
    pub fn with(config: TcpConfig) -> Handmade {
        let streams = config.streams;
        let device = TcpDevice::new(config).unwrap();
        let counters = device.counters().clone();
        let other = engine(1, 2, device.clone());
        let mut engine = engine(0, 2, device);
        let socket = socket_of(&engine);
        let addresses = [engine.address(), other.address()];
        let issued: [u8; 16] = engine.introduce(&addresses).unwrap()[1][..].try_into().unwrap();
        let streams = std::thread::scope(|scope| {
            let dialling = scope.spawn(move || {
                let dial = |stream: u32| {
                    let mut socket = TcpStream::connect(socket).unwrap();
                    let said = hello(GENERATION.0, 1, 1, 0, stream, issued);
                    socket.write_all(&said).unwrap();
                    let mut answer = [0; 36];
                    socket.read_exact(&mut answer).unwrap();
                    assert_eq!(answer[..], hello(GENERATION.0, 2, 0, 1, stream, TOKEN));
                    socket
                };
                (0..streams).map(dial).collect()
            });
            let messages = [Vec::new(), TOKEN.to_vec()];
            until(soon(20), |limit| engine.connect(&addresses, &messages, limit)).unwrap();
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

    /// Waits for one more raise than arrives; returns the cause and time of the group's poison.
    pub fn poisoned(&mut self) -> (weft_fabric::Poison, Duration) {
        let begin = Instant::now();
        let error = waiting(|w| self.engine.wait(self.counter, &[(Rank(1), u64::MAX)], w));
        match error {
            Err(Error::Poisoned(cause)) => (cause, begin.elapsed()),
            other => panic!("{other:?}"),
        }
    }
}
