//! Connection end that writes any bytes: it makes the handshake, and then what the test wants.

use crate::setup::{PATIENCE, by, hello_of, schema};
use weft_dispatch::wire::{Header, Layout, checksum};
use weft_dispatch::{Agreement, Hello, Role, Schema};
use weft_fabric::{
    Communicator, CounterConfig, CounterId, Page, Rank, Region, RegionKey, Requests, clock,
};

/// Connection counters: headers, tensors only, cancels.
pub const HEADERS: usize = 0;
pub const CANCELS: usize = 2;

pub struct Rogue {
    pair: Communicator,
    peer: Rank,
    counters: Vec<CounterId>,
    /// Layout for what it writes.
    layout: Layout,
    scratch: Region,
    remote: RegionKey,
}

impl Rogue {
    pub fn over(pair: Communicator, role: Role) -> Rogue {
        Rogue::of(pair, role, &schema())
    }

    pub fn of(pair: Communicator, role: Role, schema: &Schema) -> Rogue {
        let hello = hello_of(role, schema);
        let peer = Rank(1 - pair.rank().0);
        let mut messages = vec![Vec::new(), Vec::new()];
        messages[peer.index()] = hello.encode();
        let replies = pair.exchange(&messages, by(PATIENCE)).unwrap();
        let theirs = Hello::decode(&replies[peer.index()]).unwrap();
        let agreement = Agreement::of(&hello, &theirs).unwrap();
        let (incoming, layout) = match role {
            Role::FrontEnd => (agreement.answers(), agreement.queries()),
            Role::Accelerator => (agreement.queries(), agreement.answers()),
        };
        let window = agreement.slots;
        let (counters, region, scratch) = {
            let mut engine = pair.engine();
            let peers = [peer];
            let shape = CounterConfig { window, peers: Some(&peers), ..Default::default() };
            let streaming = CounterConfig { window: 2 * window, ..shape };
            let shapes = [shape, shape, if agreement.has_stream() { streaming } else { shape }];
            let counters: Vec<_> =
                shapes.into_iter().map(|shape| engine.counter_with(shape).unwrap()).collect();
            let bytes = incoming.stride() * u64::from(window);
            let region = engine.alloc(bytes as usize).unwrap();
            (counters, region, engine.alloc(4096).unwrap())
        };
        let whole = 0..region.memory().len() as u64;
        let remotes = pair.share(&[(&region, whole)], &counters, by(PATIENCE)).unwrap();
        let remote = remotes[peer.index()][0].key;
        Rogue { pair, peer, counters, layout, scratch, remote }
    }

    /// Writes bytes to a slot's start, and raises a counter. Without bytes: a signal.
    pub fn write(&self, slot: u32, bytes: &[u8], counter: usize) {
        self.raise(slot.into(), slot, bytes, counter);
    }

    /// Writes bytes to a slot's start, and raises a counter round.
    pub fn raise(&self, round: u64, slot: u32, bytes: &[u8], counter: usize) {
        self.scratch.memory().copy_in(0, bytes);
        let page = Page {
            source: self.scratch.key(),
            source_offset: 0,
            destination: self.remote,
            destination_offset: u64::from(slot) * self.layout.stride(),
            length: bytes.len() as u64,
        };
        let pages = (!bytes.is_empty()).then_some(page);
        let mut requests = Requests::default();
        requests.write(self.peer, self.counters[counter], round, pages, 0);
        let mut engine = self.pair.engine();
        engine.submit(&mut requests).unwrap();
        // The bytes leave before the scratch memory is used again.
        for _ in 0..100 {
            engine.poll(clock::now(), &mut Vec::new());
        }
    }

    pub fn poll(&self) {
        self.pair.engine().poll(clock::now(), &mut Vec::new());
    }

    /// Slot with a correct header, and one tensor with this many zeros.
    pub fn slot(&self, turn: u32, word: u32, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; (self.layout.offset(0) + length) as usize];
        let mut header = Header::new(turn, word, [length]);
        header.checksum = checksum([&bytes[self.layout.offset(0) as usize..]]);
        header.encode(&mut bytes);
        bytes
    }

    /// Slot with an answer part with this many token bytes so far, of which `new` come with it.
    pub fn part(&self, turn: u32, total: u64, new: u64) -> Vec<u8> {
        let mut bytes = vec![0; (self.layout.offset(0) + total.max(new)) as usize];
        let mut header = Header::part(turn, total);
        header.checksum = checksum([&bytes[..new as usize]]);
        header.encode(&mut bytes);
        bytes
    }
}
