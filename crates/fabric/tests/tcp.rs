//! Engines over real sockets: every byte of random writes, back-pressure, strangers, hostile peers,
//! and every way in which a peer can go.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weft_fabric::bytes::Reader;
use weft_fabric::descriptor::{Address, Grant};
use weft_fabric::providers::tcp::TcpCounters;
use weft_fabric::providers::{TcpConfig, TcpProvider};
use weft_fabric::{
    Cause, CounterId, Engine, EngineConfig, Error, Generation, Page, Provider, Rank, Region,
    RegionKey, RemoteRegion, Time, Waiter, clock,
};

const GENERATION: Generation = Generation(3);

/// One rank with a destination that is cut into a slot for each peer, and a source likewise.
struct End {
    engine: Engine,
    counter: CounterId,
    source: Region,
    destination: Region,
    /// By rank; `None` for itself.
    remotes: Vec<Option<RemoteRegion>>,
}

fn soon(seconds: u64) -> Time {
    clock::now().after(Duration::from_secs(seconds))
}

/// Waits without spinning, so that every wait depends on the descriptors.
fn waiting<T>(wait: impl FnOnce(&mut Waiter<'_>) -> T) -> T {
    let deadline = soon(30);
    wait(&mut Waiter { deadline, spin: Duration::ZERO, interrupted: &mut || false })
}

fn engine(rank: u32, size: u32, provider: TcpProvider) -> Engine {
    let providers: Vec<Box<dyn Provider>> = vec![Box::new(provider)];
    Engine::new(EngineConfig::default(), Rank(rank), size, GENERATION, providers).unwrap()
}

fn connected(size: u32, config: &TcpConfig) -> Vec<Engine> {
    let provider = || TcpProvider::new(config.clone()).unwrap();
    let mut engines: Vec<Engine> = (0..size).map(|rank| engine(rank, size, provider())).collect();
    let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| engine.connect(&addresses, soon(20)).unwrap());
        }
    });
    engines
}

/// Grants every rank its slot of every other's destination.
fn linked(size: u32, config: &TcpConfig, slot: usize) -> Vec<End> {
    let end = |mut engine: Engine| {
        let counter = engine.counter().unwrap();
        let source = engine.alloc(slot * size as usize).unwrap();
        let destination = engine.alloc(slot * size as usize).unwrap();
        End { engine, counter, source, destination, remotes: vec![None; size as usize] }
    };
    let mut ends: Vec<End> = connected(size, config).into_iter().map(end).collect();
    for owner in 0..size as usize {
        for writer in (0..size as usize).filter(|writer| *writer != owner) {
            let begin = (writer * slot) as u64;
            let end = &mut ends[owner];
            let range = begin..begin + slot as u64;
            let regions = [(&end.destination, range)];
            let grant = end.engine.grant(Rank(writer as u32), &regions, &[end.counter]).unwrap();
            let grant = Grant::decode(&grant.encode()).unwrap();
            let (end, owner_rank) = (&mut ends[writer], Rank(owner as u32));
            let imported = end.engine.import(owner_rank, &grant, &[end.counter], soon(1));
            end.remotes[owner] = imported.unwrap().pop();
        }
    }
    ends
}

/// Runs each rank on a thread of its own.
fn on_threads<T: Send>(ends: Vec<End>, body: impl Fn(End) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || body(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What `from` writes to `to` in a round: offsets within the slot and lengths, in an order of its own.
fn plan(seed: u64, from: u32, to: u32, round: u64, slot: u64) -> Vec<(u64, u64)> {
    let mut state = mix(seed ^ (u64::from(from) << 40) ^ (u64::from(to) << 20) ^ round);
    let mut next = |bound: u64| {
        state = mix(state);
        state % bound
    };
    let pages = match next(5) {
        0 => 0,
        1 => 1,
        2 => 300 + next(300),
        _ => 1 + next(40),
    };
    let stride = slot / pages.max(1);
    let mut plan: Vec<(u64, u64)> = (0..pages)
        .map(|page| {
            let length = if next(4) == 0 { 0 } else { next(stride + 1) };
            (page * stride + next(stride - length + 1), length)
        })
        .collect();
    for index in (1..plan.len()).rev() {
        plan.swap(index, next(index as u64 + 1) as usize);
    }
    plan
}

fn byte(from: u32, to: u32, round: u64, offset: u64) -> u8 {
    mix((u64::from(from) << 50) ^ (u64::from(to) << 44) ^ (round << 32) ^ offset) as u8
}

/// Rounds of random writes from everyone to everyone, every byte of every slot compared.
fn exchange(mut end: End, seed: u64, rounds: u64, slot: u64) {
    let me = end.engine.rank().0;
    let peers: Vec<Rank> = end.engine.peers().collect();
    let size = end.engine.size();
    let mut expected = vec![0u8; slot as usize * size as usize];
    for round in 0..rounds {
        let mut requests = Vec::new();
        for &peer in &peers {
            waiting(|w| end.engine.wait_for_credit(end.counter, peer, round, w)).unwrap();
            let base = slot * u64::from(peer.0);
            let remote = end.remotes[peer.0 as usize].unwrap();
            let pages: Vec<Page> = plan(seed, me, peer.0, round, slot)
                .into_iter()
                .map(|(offset, length)| {
                    let bytes: Vec<u8> =
                        (offset..offset + length).map(|o| byte(me, peer.0, round, o)).collect();
                    end.source.memory().copy_in((base + offset) as usize, &bytes);
                    Page {
                        source: end.source.key(),
                        source_offset: base + offset,
                        destination: remote.key,
                        destination_offset: slot * u64::from(me) + offset,
                        length,
                    }
                })
                .collect();
            requests.push(end.engine.write(peer, end.counter, round, &pages).unwrap());
        }
        let mut wanted = Vec::new();
        for &peer in &peers {
            let pages = plan(seed, peer.0, me, round, slot);
            let rule = end.engine.route(peer).unwrap().parts;
            wanted.push((peer, rule.count(pages.iter().map(|(_, length)| *length))));
            for (offset, length) in pages {
                for o in offset..offset + length {
                    expected[(slot * u64::from(peer.0) + o) as usize] = byte(peer.0, me, round, o);
                }
            }
        }
        waiting(|w| end.engine.wait(end.counter, &wanted, w)).unwrap();
        let mut seen = vec![0; expected.len()];
        end.destination.memory().copy_out(0, &mut seen);
        assert!(seen == expected, "rank {me}, round {round}, seed {seed}");
        for &peer in &peers {
            end.engine.credit(peer, end.counter).unwrap();
        }
        end.engine.flush();
        for request in requests {
            waiting(|w| end.engine.wait_for_request(request, w)).unwrap();
        }
    }
}

#[test]
fn random_writes_arrive_byte_for_byte() {
    for (seed, size, rounds, slot) in [(1, 2, 30, 60_000), (2, 4, 12, 20_000), (3, 3, 60, 900)] {
        let ends = linked(size, &TcpConfig::default(), slot);
        on_threads(ends, |end| exchange(end, seed, rounds, slot as u64));
    }
}

#[test]
fn tiny_queues_and_parts_slow_writers_down_and_lose_nothing() {
    let tiny = |streams, max_part_bytes, queue_bytes, queue_parts| TcpConfig {
        streams,
        max_part_bytes,
        queue_bytes,
        queue_parts,
        ..TcpConfig::default()
    };
    for (seed, config) in
        [(4, tiny(1, 700, 1, 1)), (5, tiny(3, 5_000, 4_000, 2)), (6, tiny(2, 1, 1 << 20, 3))]
    {
        let slot = if config.max_part_bytes == 1 { 700 } else { 30_000 };
        let ends = linked(3, &config, slot);
        on_threads(ends, |end| exchange(end, seed, 6, slot as u64));
    }
}

#[test]
fn large_writes_cross_in_both_directions() {
    const BYTES: usize = 64 << 20;
    let ends = linked(2, &TcpConfig::default(), BYTES);
    on_threads(ends, |mut end| {
        let me = end.engine.rank().0;
        let peer = Rank(1 - me);
        let mine = |round: u64, rank: u32| {
            let word = move |at: usize| mix(at as u64 ^ (round << 40) ^ (u64::from(rank) << 50));
            move |at: usize| word(at).to_le_bytes()
        };
        for round in 0..2 {
            let ours = mine(round, me);
            let bytes: Vec<u8> = (0..BYTES / 8).flat_map(ours).collect();
            end.source.memory().copy_in(0, &bytes);
            waiting(|w| end.engine.wait_for_credit(end.counter, peer, round, w)).unwrap();
            let page = Page {
                source: end.source.key(),
                source_offset: 0,
                destination: end.remotes[peer.0 as usize].unwrap().key,
                destination_offset: u64::from(me) * BYTES as u64,
                length: BYTES as u64,
            };
            let request = end.engine.write(peer, end.counter, round, &[page]).unwrap();
            let parts = end.engine.route(peer).unwrap().parts.count_contiguous(BYTES as u64);
            waiting(|w| end.engine.wait(end.counter, &[(peer, parts)], w)).unwrap();
            let mut seen = vec![0; BYTES];
            end.destination.memory().copy_out(peer.0 as usize * BYTES, &mut seen);
            let theirs = mine(round, peer.0);
            assert!(seen.chunks_exact(8).enumerate().all(|(at, word)| word == theirs(at)));
            end.engine.credit(peer, end.counter).unwrap();
            end.engine.flush();
            waiting(|w| end.engine.wait_for_request(request, w)).unwrap();
        }
    });
}

// --- a peer made by hand, from what docs/wire-format.md says -------------------------------------

/// The fields of a tcp address that a client needs.
struct Known {
    token: [u8; 16],
    socket: SocketAddr,
}

fn read_address(address: &[u8]) -> Known {
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

fn hello(generation: u8, role: u8, from: u32, to: u32, stream: u32, token: [u8; 16]) -> Vec<u8> {
    let mut bytes = b"WEFT\x01\0".to_vec();
    bytes.extend([generation, role]);
    for number in [from, to, stream] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(token);
    bytes
}

fn frame(lane: u32, pages: &[(u32, u64, u32)], payload: &[u8]) -> Vec<u8> {
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
struct Handmade {
    engine: Engine,
    counter: CounterId,
    destination: Region,
    remote: RemoteRegion,
    counters: Arc<TcpCounters>,
    /// The lane that rank 1 may raise, as it travels.
    lane: u32,
    streams: Vec<TcpStream>,
}

impl Handmade {
    /// Grants bytes 100..200 of 300.
    fn new() -> Handmade {
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

    fn key(&self) -> u32 {
        self.destination.key().0
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 300];
        self.destination.memory().copy_out(0, &mut bytes);
        bytes
    }

    /// Waits for one more raise than there will be and returns what poisoned the group, and when.
    fn poisoned(&mut self) -> (weft_fabric::Poison, Duration) {
        let begin = Instant::now();
        let error = waiting(|w| self.engine.wait(self.counter, &[(Rank(1), u64::MAX)], w));
        match error {
            Err(Error::Poisoned(cause)) => (cause, begin.elapsed()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_frame_within_its_grant_lands_whole_however_it_is_cut() {
    let mut peer = Handmade::new();
    let (key, lane) = (peer.key(), peer.lane);
    let mut bytes = frame(lane, &[(key, 199, 1), (key, 100, 3)], &[9, 1, 2, 3]);
    bytes.extend(frame(lane, &[], &[]));
    bytes.extend(frame(lane, &[(key, 150, 2)], &[7, 8]));
    let stream = &mut peer.streams[1];
    stream.set_nodelay(true).unwrap();
    let (last, most) = bytes.split_last().unwrap();
    for byte in most {
        stream.write_all(&[*byte]).unwrap();
        let mut events = Vec::new();
        peer.engine.poll(clock::now(), &mut events);
    }
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 2)], w)).unwrap();
    assert_eq!(peer.engine.count(peer.counter, Rank(1)).unwrap(), 2);
    peer.streams[1].write_all(&[*last]).unwrap();
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 3)], w)).unwrap();
    let mut expected = vec![0; 300];
    (expected[199], expected[100], expected[101], expected[102]) = (9, 1, 2, 3);
    (expected[150], expected[151]) = (7, 8);
    assert_eq!(peer.bytes(), expected);
}

#[test]
fn what_was_not_granted_is_refused_before_memory_is_touched() {
    let payload = [0xee; 100];
    type Hostile = fn(u32, u32, &[u8]) -> Vec<u8>;
    let hostile: [(&str, Hostile); 9] = [
        ("one byte before", |key, lane, p| frame(lane, &[(key, 99, 100)], p)),
        ("one byte behind", |key, lane, p| frame(lane, &[(key, 101, 100)], p)),
        ("the second page outside", |key, lane, p| {
            frame(lane, &[(key, 100, 50), (key, 160, 50)], p)
        }),
        ("an end that overflows", |key, lane, p| frame(lane, &[(key, u64::MAX - 5, 100)], p)),
        ("another region", |key, lane, p| frame(lane, &[(key + 1, 100, 100)], p)),
        ("a payload that its pages lack", |key, lane, p| frame(lane, &[(key, 100, 99)], p)),
        ("too many pages", |key, lane, _| frame(lane, &[(key, 100, 0); 257], &[])),
        ("too long", |key, lane, _| {
            let mut bytes = frame(lane, &[(key, 100, u32::MAX)], &[]);
            bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes
        }),
        ("garbage", |_, _, p| p.to_vec()),
    ];
    for (what, hostile) in hostile {
        let mut peer = Handmade::new();
        let bytes = hostile(peer.key(), peer.lane, &payload);
        peer.streams[0].write_all(&bytes).unwrap();
        let (cause, after) = peer.poisoned();
        assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))), "{what}");
        assert!(cause.detail.contains("broke the wire's rules"), "{what}: {}", cause.detail);
        assert!(after < Duration::from_secs(2), "{what}: {after:?}");
        assert_eq!(peer.bytes(), vec![0; 300], "{what}");
        assert_eq!(peer.counters.refused_frames.load(Ordering::Relaxed), 1, "{what}");
        // Both connections are closed.
        for stream in &mut peer.streams {
            assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "{what}");
        }
    }
}

#[test]
fn an_ungranted_lane_is_dropped_and_the_group_goes_on() {
    let mut peer = Handmade::new();
    let mut bytes = frame(peer.lane ^ 0xff, &[], &[]);
    bytes.extend(frame(0x00ff_ff00 | u32::from(GENERATION.0), &[], &[]));
    bytes.extend(frame(peer.lane, &[], &[]));
    peer.streams[0].write_all(&bytes).unwrap();
    waiting(|w| peer.engine.wait(peer.counter, &[(Rank(1), 1)], w)).unwrap();
    let statistics = peer.engine.statistics();
    assert_eq!((statistics.refused_stale, statistics.refused_ungranted), (1, 1));
}

#[test]
fn a_peer_that_dies_within_a_write_is_named() {
    let mut peer = Handmade::new();
    let bytes = frame(peer.lane, &[(peer.key(), 100, 100)], &[5; 100]);
    peer.streams[0].write_all(&bytes[..80]).unwrap();
    peer.streams.clear();
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(cause.detail.contains("in the middle of a write"), "{}", cause.detail);
    assert!(after < Duration::from_secs(2), "{after:?}");
    assert_eq!(peer.engine.count(peer.counter, Rank(1)).unwrap(), 0);
}

#[test]
fn one_broken_stream_of_several_is_a_loss() {
    let mut peer = Handmade::new();
    peer.streams.pop();
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(after < Duration::from_secs(2), "{after:?}");
}

#[test]
fn writes_toward_a_peer_that_dies_drain_with_its_loss() {
    let mut peer = Handmade::new();
    let source = peer.engine.alloc(64 << 20).unwrap();
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length: 64 << 20,
    };
    let request = peer.engine.write(Rank(1), peer.counter, 0, &[page]).unwrap();
    let mut some = [0; 1000];
    peer.streams[0].read_exact(&mut some).unwrap();
    assert!(!peer.engine.is_drained(request));
    peer.streams.clear();
    let (cause, after) = peer.poisoned();
    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(Rank(1))));
    assert!(after < Duration::from_secs(2), "{after:?}");
    assert!(peer.engine.is_drained(request));
    let memory = source.memory().clone();
    peer.engine.release(&source);
    drop(source);
    assert_eq!(Arc::strong_count(&memory), 1, "nothing holds the source any more");
}

#[test]
fn a_fence_under_load_gives_every_source_back() {
    let mut peer = Handmade::new();
    let source = peer.engine.alloc(1 << 20).unwrap();
    let page = |length| Page {
        source: source.key(),
        source_offset: 0,
        destination: peer.remote.key,
        destination_offset: 0,
        length,
    };
    let mut requests = Vec::new();
    for number in 0..200u64 {
        let pages = [page(1 << 20), page(number * 40)];
        requests.push(peer.engine.write(Rank(1), peer.counter, 0, &pages).unwrap());
    }
    peer.engine.poison(weft_fabric::Poison {
        kind: Cause::User,
        rank: None,
        detail: "enough".into(),
    });
    peer.engine.poll(clock::now(), &mut Vec::new());
    assert!(requests.iter().all(|request| peer.engine.is_drained(*request)));
    let memory = source.memory().clone();
    peer.engine.release(&source);
    drop(source);
    assert_eq!(Arc::strong_count(&memory), 1);
    // What arrives after the fence touches nothing.
    let bytes = frame(peer.lane, &[(peer.key(), 100, 100)], &[5; 100]);
    let _ = peer.streams[0].write_all(&bytes);
    peer.engine.poll(clock::now(), &mut Vec::new());
    assert_eq!(peer.bytes(), vec![0; 300]);
}

#[test]
fn the_last_words_of_a_peer_that_leaves_are_heard() {
    const BYTES: usize = 8 << 20;
    let mut ends = linked(2, &TcpConfig::default(), BYTES);
    let (mut leaver, mut stayer) = (ends.pop().unwrap(), ends.pop().unwrap());
    let peer = Rank(1);
    // Unread credits at the leaver: closing its sockets will reset the connections.
    for _ in 0..100 {
        stayer.engine.credit(peer, stayer.counter).unwrap();
    }
    stayer.engine.flush();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            leaver.source.memory().fill(0, BYTES, 0x5a);
            let page = Page {
                source: leaver.source.key(),
                source_offset: 0,
                destination: leaver.remotes[0].unwrap().key,
                destination_offset: BYTES as u64,
                length: BYTES as u64,
            };
            let request = leaver.engine.write(Rank(0), leaver.counter, 0, &[page]).unwrap();
            waiting(|w| leaver.engine.wait_for_request(request, w)).unwrap();
            leaver.engine.flush();
        });
        let parts = stayer.engine.route(peer).unwrap().parts.count_contiguous(BYTES as u64);
        waiting(|w| stayer.engine.wait(stayer.counter, &[(peer, parts)], w)).unwrap();
    });
    let mut seen = vec![0; BYTES];
    stayer.destination.memory().copy_out(BYTES, &mut seen);
    assert!(seen.iter().all(|byte| *byte == 0x5a));
    // It has said goodbye, so neither its closed connection nor what is still meant for it matters.
    stayer.engine.poison_flag().peer_left(peer);
    let until = soon(2);
    while clock::now() < until {
        stayer.engine.poll(clock::now(), &mut Vec::new());
        stayer.engine.credit(peer, stayer.counter).unwrap();
        stayer.engine.flush();
    }
    stayer.engine.check().unwrap();
}

// --- connecting ----------------------------------------------------------------------------------

#[test]
fn strangers_are_refused_and_the_group_forms_among_them() {
    let mut providers: Vec<TcpProvider> =
        (0..2).map(|_| TcpProvider::new(TcpConfig::default()).unwrap()).collect();
    let counters = providers[0].counters().clone();
    let known = read_address(&providers[0].address());
    let mut engines: Vec<Engine> =
        (0..2).map(|rank| engine(rank, 2, providers.remove(0))).collect();
    let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
    let mut wrong = known.token;
    wrong[15] ^= 1;
    let good = GENERATION.0;
    let strangers: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost:80\r\n\r\n".to_vec(),
        vec![0xff; 5000],
        b"WEFT".to_vec(),
        Vec::new(),
        hello(good, 1, 1, 0, 0, wrong),
        hello(good + 1, 1, 1, 0, 0, known.token),
        hello(good, 2, 1, 0, 0, known.token),
        hello(good, 1, 7, 0, 0, known.token),
        hello(good, 1, 1, 3, 0, known.token),
        hello(good, 1, 1, 0, 99, known.token),
    ];
    // They are there before anybody else, and stay; the silent ones must not hold anybody up.
    let held: Vec<TcpStream> = (0..20)
        .flat_map(|_| &strangers)
        .map(|bytes| {
            let mut socket = TcpStream::connect(known.socket).unwrap();
            socket.write_all(bytes).unwrap();
            socket
        })
        .collect();
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| engine.connect(&addresses, soon(20)).unwrap());
        }
    });
    assert!(counters.refused_connections.load(Ordering::Relaxed) >= 20 * 8);
    // The group is complete: there is no port any more to knock at.
    assert!(TcpStream::connect(known.socket).is_err());
    drop(held);
}

#[test]
fn ranks_may_connect_in_any_order() {
    let size = 4;
    let config = TcpConfig { streams: 3, ..TcpConfig::default() };
    for order in [[3, 2, 1, 0], [0, 3, 1, 2]] {
        let provider = || TcpProvider::new(config.clone()).unwrap();
        let mut engines: Vec<Option<Engine>> =
            (0..size).map(|rank| Some(engine(rank, size, provider()))).collect();
        let addresses: Vec<Address> = engines.iter().flatten().map(Engine::address).collect();
        std::thread::scope(|scope| {
            for rank in order {
                let mut engine = engines[rank].take().unwrap();
                let addresses = &addresses;
                scope.spawn(move || engine.connect(addresses, soon(20)).unwrap());
                // Gives the one before a head start; the outcome must not depend on it.
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn a_peer_that_does_not_come_is_named_at_the_deadline() {
    for rank in [0, 1] {
        let provider = || TcpProvider::new(TcpConfig::default()).unwrap();
        let mut engines: Vec<Engine> = (0..2).map(|rank| engine(rank, 2, provider())).collect();
        let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
        let begin = Instant::now();
        let deadline = clock::now().after(Duration::from_millis(200));
        let error = engines[rank].connect(&addresses, deadline).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(2));
        let absent = Rank(1 - rank as u32);
        assert!(matches!(&error, Error::Connect { peer, .. } if *peer == absent), "{error}");
    }
}

#[test]
fn a_peer_that_is_gone_is_named_at_once() {
    let provider = || TcpProvider::new(TcpConfig::default()).unwrap();
    let mut engines: Vec<Engine> = (0..2).map(|rank| engine(rank, 2, provider())).collect();
    let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
    let mut survivor = engines.pop().unwrap();
    drop(engines);
    let begin = Instant::now();
    let error = survivor.connect(&addresses, soon(20)).unwrap_err();
    assert!(matches!(&error, Error::Connect { peer: Rank(0), .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(2));
}

#[test]
fn ranks_configured_differently_are_told_so() {
    let other = TcpConfig { max_part_bytes: 4096, ..TcpConfig::default() };
    let mut here = engine(0, 2, TcpProvider::new(TcpConfig::default()).unwrap());
    let there = engine(1, 2, TcpProvider::new(other).unwrap());
    let error = here.connect(&[here.address(), there.address()], soon(5)).unwrap_err();
    assert!(error.to_string().contains("configure all ranks alike"), "{error}");
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let base = TcpConfig::default;
    let refused = [
        TcpConfig { streams: 0, ..base() },
        TcpConfig { max_part_bytes: 0, ..base() },
        TcpConfig { max_part_bytes: 1 << 31, ..base() },
        TcpConfig { queue_parts: 0, ..base() },
        TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..base() },
        TcpConfig { bind: "192.0.2.1".parse().unwrap(), ..base() },
    ];
    for config in refused {
        let told = TcpProvider::new(config.clone());
        assert!(matches!(told, Err(Error::Provider { .. })), "{config:?}");
    }
    let everywhere = TcpConfig {
        bind: "0.0.0.0".parse().unwrap(),
        advertise: Some("127.0.0.1".parse().unwrap()),
        ..base()
    };
    assert!(TcpProvider::new(everywhere).is_ok());
}

#[test]
fn loopback_reaches_only_its_own_host() {
    let at = |ip: &str| TcpConfig {
        bind: "127.0.0.1".parse().unwrap(),
        advertise: Some(ip.parse().unwrap()),
        ..TcpConfig::default()
    };
    let here = TcpProvider::new(at("127.0.0.1")).unwrap();
    let public = TcpProvider::new(at("192.0.2.1")).unwrap();
    // Its own host's addresses reach; the same addresses told by another host do not.
    assert!(here.reaches(&here.address()) && here.reaches(&public.address()));
    let elsewhere = |provider: &TcpProvider| {
        let mut address = provider.address();
        address[6] ^= 1;
        address
    };
    assert!(!here.reaches(&elsewhere(&here)) && !here.reaches(&elsewhere(&public)));
    assert!(!public.reaches(&elsewhere(&here)) && public.reaches(&elsewhere(&public)));
    assert!(!here.reaches(b"garbage"));
}

#[test]
fn a_write_beyond_the_grant_is_refused_by_the_writer_itself() {
    let mut ends = linked(2, &TcpConfig::default(), 4096);
    let end = &mut ends[0];
    // Within the region, so the engine cannot know; not within what rank 1 granted to rank 0.
    let page = Page {
        source: RegionKey(end.source.key().0),
        source_offset: 0,
        destination: end.remotes[1].unwrap().key,
        destination_offset: 4096,
        length: 8,
    };
    end.engine.write(Rank(1), end.counter, 0, &[page]).unwrap();
    let Err(Error::Poisoned(cause)) = end.engine.check() else { panic!("not refused") };
    assert!(cause.detail.contains("outside of what was granted"), "{}", cause.detail);
}
