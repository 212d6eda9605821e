//! One group's links over simulated NICs, without engines, all on one thread.

use crate::common::{soon, until};
use std::sync::Arc;
use weft_fabric::link::{Introduction, Membership, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::verbs::{TwinConfig, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    Device, Generation, Lane, LaneTable, Link, Memory, Page, Rank, RegionKey, TrafficClass, clock,
};

/// Bytes in each rank's region.
pub const BYTES: u64 = 10_000;

/// One rank: a NIC, a link, and a lane for each peer.
pub struct End {
    pub nic: Arc<TwinNic>,
    pub link: Box<dyn Link>,
    pub lanes: Arc<LaneTable>,
    /// Lane that each rank raises; this rank's own is unused.
    pub granted: Vec<Lane>,
    pub memory: Arc<Memory>,
    pub sink: Sink,
}

/// All ranks in a group.
pub struct Links(pub Vec<End>);

/// Each rank's device.
pub fn devices(
    config: &VerbsConfig,
    nic: &TwinConfig,
    size: u32,
) -> Vec<(Arc<TwinNic>, VerbsDevice)> {
    let nics = (0..size).map(|_| TwinNic::new(nic.clone()));
    nics.map(|nic| {
        let device = VerbsDevice::over(config.clone(), std::slice::from_ref(&nic)).unwrap();
        (nic, device)
    })
    .collect()
}

/// Group in which a rank is a member.
pub fn membership(rank: Rank, size: u32) -> Membership {
    let generation = Generation(0);
    let lanes = Arc::new(LaneTable::new(256, generation).unwrap());
    Membership { rank, size, generation, lanes }
}

impl Links {
    /// Ranks without connections. Each has a region, key 0, full of the rank's number and one.
    pub fn open(config: &VerbsConfig, nic: &TwinConfig, size: u32) -> Links {
        Links::over(devices(config, nic, size))
    }

    /// [`Links::open`] over these devices.
    pub fn over(devices: Vec<(Arc<TwinNic>, VerbsDevice)>) -> Links {
        let size = devices.len() as u32;
        let open = |(rank, (nic, device)): (u32, (Arc<TwinNic>, VerbsDevice))| {
            let group = membership(Rank(rank), size);
            let lanes = group.lanes.clone();
            let mut link = device.open(group).unwrap();
            let memory = Arc::new(Memory::shared(BYTES as usize).unwrap());
            memory.fill(0, BYTES as usize, 1 + rank as u8);
            link.register(RegionKey(0), &memory).unwrap();
            let granted = (0..size).map(|peer| lanes.issue(Rank(peer), 2).unwrap()).collect();
            End { nic, link, lanes, granted, memory, sink: Sink::default() }
        };
        Links((0..).zip(devices).map(open).collect())
    }

    /// Connects all ranks, each on a thread, after `delay` has run there, and grants all regions to all.
    pub fn connect(&mut self, delay: impl Fn(Rank) + Sync) {
        let addresses: Vec<Vec<u8>> = self.0.iter().map(|end| end.link.address()).collect();
        let size = self.0.len();
        let messages: Vec<Vec<Vec<u8>>> = self
            .0
            .iter_mut()
            .enumerate()
            .map(|(me, end)| {
                let to = |peer: usize| match peer == me {
                    true => Vec::new(),
                    false => end.link.introduce(Rank(peer as u32), &addresses[peer]).unwrap(),
                };
                (0..size).map(to).collect()
            })
            .collect();
        std::thread::scope(|scope| {
            for (me, end) in self.0.iter_mut().enumerate() {
                let (addresses, messages, delay) = (&addresses, &messages, &delay);
                scope.spawn(move || {
                    let others = (0..size).filter(|peer| *peer != me);
                    let peers: Vec<Introduction<'_>> = others
                        .map(|peer| Introduction {
                            peer: Rank(peer as u32),
                            address: &addresses[peer],
                            message: &messages[peer][me],
                        })
                        .collect();
                    delay(Rank(me as u32));
                    until(soon(20), |limit| end.link.connect(&peers, limit)).unwrap();
                });
            }
        });
        self.grant(RegionKey(0));
    }

    /// Grants a whole region, [`BYTES`] long, at each rank to all peers.
    pub fn grant(&mut self, key: RegionKey) {
        let size = self.0.len();
        for (owner, writer) in (0..size).flat_map(|a| (0..size).map(move |b| (a, b))) {
            if owner != writer {
                let peer = Rank(owner as u32);
                let entry = self.0[owner].link.grant(key, Rank(writer as u32), 0..BYTES).unwrap();
                let link = &mut self.0[writer].link;
                until(soon(20), |limit| link.import(peer, key, BYTES, &entry, limit)).unwrap();
            }
        }
    }

    /// Connected ranks.
    pub fn connected(config: &VerbsConfig, size: u32) -> Links {
        let mut links = Links::open(config, &TwinConfig::default(), size);
        links.connect(|_| {});
        links
    }

    /// Posts a write with 100-byte pages, or a signal without any, that raises the writer's lane.
    pub fn post(&mut self, from: u32, to: u32, token: u64, pages: u64) -> PostStatus {
        let lane = self.0[to as usize].granted[from as usize];
        self.post_to(from, to, token, pages, lane, None)
    }

    /// [`Links::post`] to any lane, with a credit on it or without.
    pub fn post_to(
        &mut self,
        from: u32,
        to: u32,
        token: u64,
        pages: u64,
        lane: Lane,
        piggyback: Option<Lane>,
    ) -> PostStatus {
        let page = |at| Page {
            source: RegionKey(0),
            source_offset: 200 * at,
            destination: RegionKey(0),
            destination_offset: 200 * at,
            length: 100,
        };
        let pages: Vec<Page> = (0..pages).map(page).collect();
        let (peer, class) = (Rank(to), TrafficClass::Latency);
        let work =
            WorkRequest { token, peer, lane, credits: None, piggyback, class, pages: &pages };
        let end = &mut self.0[from as usize];
        end.link.post(&work, &mut end.sink).unwrap()
    }

    /// Polls each rank often enough for completions, arrivals and events.
    pub fn settle(&mut self) {
        for end in &mut self.0 {
            // The first poll after a sleep looks at events.
            end.link.prepare_sleep();
            end.link.poll(clock::now(), &mut end.sink);
        }
        for end in &mut self.0 {
            (0..20).for_each(|_| end.link.poll(clock::now(), &mut end.sink));
        }
    }

    /// Value of the lane at `owner` that `writer` raises.
    pub fn raised(&self, owner: u32, writer: u32) -> u64 {
        let end = &self.0[owner as usize];
        end.lanes.value(end.granted[writer as usize].id())
    }

    /// First byte in a page at `owner`.
    pub fn byte(&self, owner: u32, page: usize) -> u8 {
        let mut seen = [0];
        self.0[owner as usize].memory.copy_out(200 * page, &mut seen);
        seen[0]
    }

    /// Fences a peer; returns tokens for the parts that failed by it.
    pub fn fence(&mut self, rank: u32, peer: u32) -> Vec<u64> {
        let end = &mut self.0[rank as usize];
        end.link.fence(Rank(peer), &mut end.sink);
        end.sink.failures.drain(..).map(|(token, _)| token).collect()
    }
}
