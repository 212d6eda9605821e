//! Two connected ends, with regions on a twin's device and in host memory.

use super::super::link::StagedLink;
use super::super::{StagedConfig, StagedCounters, StagedDevice, StagedMode};
use crate::clock;
use crate::device::Device;
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Link, Membership, PostStatus, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::providers::copy::{Twin, TwinControls};
use crate::providers::{ShmConfig, ShmDevice, TcpConfig, TcpDevice};
use crate::types::{Generation, Lane, Page, RegionKey, TrafficClass};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use weft_control::Rank;

pub const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes in a region, and the granted ones.
pub const BYTES: usize = 10_000;
pub const GRANTED: u64 = 8_000;
/// Region keys.
pub const GPU: u32 = 0;
pub const HOST: u32 = 1;
pub const SLOTS: u64 = 4;
pub fn tcp() -> Arc<dyn Device> {
    Arc::new(TcpDevice::new(TcpConfig::default()).unwrap())
}

pub fn shm() -> Arc<dyn Device> {
    Arc::new(ShmDevice::new(ShmConfig { host_id: "this".into() }))
}

pub fn page(from: u32, to: u32, at: u64) -> Page {
    let (source, destination) = (RegionKey(from), RegionKey(to));
    Page { source, source_offset: at, destination, destination_offset: at, length: 100 }
}

pub fn value(at: usize) -> u8 {
    1 + (at % 250) as u8
}

/// Checks a page's bytes at the owner.
pub fn check_page(ends: &Ends, key: u32, at: u64) {
    let at = at as usize;
    let expected: Vec<u8> = (at..at + 100).map(value).collect();
    assert!(ends.owner.bytes(key)[at..at + 100] == expected, "page at {at} of region {key}");
}

pub struct End {
    pub link: StagedLink,
    pub lanes: Arc<LaneTable>,
    pub controls: Arc<TwinControls>,
    pub counters: Arc<StagedCounters>,
    pub sink: Sink,
    /// On a twin's device, and in host memory.
    pub regions: Vec<Arc<Memory>>,
}

impl End {
    pub fn new(inner: Arc<dyn Device>, rank: u32, drain_timeout: Duration) -> End {
        End::with_mode(inner, rank, drain_timeout, StagedMode::Always)
    }

    pub fn with_mode(
        inner: Arc<dyn Device>,
        rank: u32,
        drain_timeout: Duration,
        mode: StagedMode,
    ) -> End {
        let controls = Arc::new(TwinControls::default());
        let slot_bytes = 1 << 13;
        let config = StagedConfig { mode, slot_bytes, drain_timeout, ..StagedConfig::default() };
        let twin = controls.clone();
        let device = StagedDevice::over(inner, config).unwrap();
        let device = device
            .with_engines(move || Ok(Box::new(Twin::with_controls(rank.into(), twin.clone()))));
        let lanes = Arc::new(LaneTable::new(64, Generation(0)).unwrap());
        let (size, generation) = (2, Generation(0));
        let group = Membership { rank: Rank(rank), size, generation, lanes: lanes.clone() };
        let link = device.link(group).unwrap();
        let counters = device.counters().clone();
        End { link, lanes, controls, counters, sink: Sink::default(), regions: Vec::new() }
    }

    pub fn register(&mut self) {
        let gpu = self.link.allocate(0, BYTES).unwrap_or_else(|| Memory::shared(BYTES));
        let gpu = Arc::new(gpu.unwrap());
        self.regions = vec![gpu, Arc::new(Memory::shared(BYTES).unwrap())];
        for (key, memory) in (0..).zip(&self.regions) {
            self.link.register(RegionKey(key), memory).unwrap();
        }
    }

    pub fn poll(&mut self) {
        self.link.poll(clock::now(), &mut self.sink);
    }

    pub fn pause(&self, paused: bool) {
        self.controls.pause.store(paused, SeqCst);
    }

    /// Bytes in a region; a twin's devices are host memory.
    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self, key: u32) -> &mut [u8] {
        let memory = &self.regions[key as usize];
        // SAFETY: `memory` keeps the bytes, and no copy is in flight.
        unsafe { std::slice::from_raw_parts_mut(memory.address() as *mut u8, BYTES) }
    }
}

pub struct Ends {
    pub writer: End,
    pub owner: End,
    /// The owner's lane that the writer raises.
    pub lane: Lane,
    /// A lane that another rank holds.
    pub other: Lane,
}

impl Ends {
    pub fn over(inner: fn() -> Arc<dyn Device>, drain_timeout: Duration) -> Ends {
        let ends = [0, 1].map(|rank| End::new(inner(), rank, drain_timeout));
        let mut ends = Ends::connected(ends);
        ends.iter_mut().for_each(End::register);
        Ends::share(ends)
    }

    /// Ends over tcp: the writer's mode, and the owner's.
    pub fn in_modes(modes: [StagedMode; 2]) -> Ends {
        let mut ends = Ends::unshared(modes);
        ends.iter_mut().for_each(End::register);
        Ends::share(ends)
    }

    /// Connected ends over tcp without regions.
    pub fn unshared([writer, owner]: [StagedMode; 2]) -> [End; 2] {
        let modes = [(0, writer), (1, owner)];
        Ends::connected(modes.map(|(rank, mode)| End::with_mode(tcp(), rank, PATIENCE, mode)))
    }

    pub fn connected(mut ends: [End; 2]) -> [End; 2] {
        let addresses = [ends[0].link.address(), ends[1].link.address()];
        let mut introduce = |me: usize| {
            let peer = Rank(1 - me as u32);
            assert!(ends[me].link.route(&addresses[1 - me]).is_some());
            ends[me].link.introduce(peer, &addresses[1 - me]).unwrap()
        };
        let messages = [introduce(0), introduce(1)];
        let deadline = clock::now().after(PATIENCE);
        std::thread::scope(|scope| {
            for (me, end) in ends.iter_mut().enumerate() {
                let (address, message) = (&addresses[1 - me], &messages[1 - me]);
                scope.spawn(move || {
                    let peer = Introduction { peer: Rank(1 - me as u32), address, message };
                    let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
                    end.link.connect(&[peer], &mut limit).unwrap();
                });
            }
        });
        ends
    }

    /// Grants the owner's regions to the writer.
    pub fn share(ends: [End; 2]) -> Ends {
        Ends::share_some(ends, &[GPU, HOST])
    }

    /// Grants the owner's regions with these keys to the writer, whose regions get values.
    pub fn share_some([mut writer, mut owner]: [End; 2], keys: &[u32]) -> Ends {
        let deadline = clock::now().after(PATIENCE);
        for key in keys.iter().copied().map(RegionKey) {
            let entry = owner.link.grant(key, Rank(0), 0..GRANTED).unwrap();
            let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
            writer.link.import(Rank(1), key, BYTES as u64, &entry, &mut limit).unwrap();
        }
        for &key in keys {
            writer.bytes(key).iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at));
        }
        let lane = owner.lanes.issue(Rank(0), 2).unwrap();
        let other = owner.lanes.issue(Rank(7), 2).unwrap();
        Ends { writer, owner, lane, other }
    }

    pub fn work<'a>(&self, token: u64, class: TrafficClass, pages: &'a [Page]) -> WorkRequest<'a> {
        let (peer, lane) = (Rank(1), self.lane);
        WorkRequest { token, peer, lane, credits: None, piggyback: None, class, pages }
    }

    /// Posts a part with 100-byte pages: source region, destination region, offset.
    pub fn post(&mut self, token: u64, pages: &[(u32, u32, u64)]) -> Result<PostStatus, String> {
        self.post_as(TrafficClass::Latency, token, pages)
    }

    pub fn post_as(
        &mut self,
        class: TrafficClass,
        token: u64,
        pages: &[(u32, u32, u64)],
    ) -> Result<PostStatus, String> {
        let pages: Vec<Page> = pages.iter().map(|&(from, to, at)| page(from, to, at)).collect();
        let work = self.work(token, class, &pages);
        self.writer.link.post(&work, &mut self.writer.sink)
    }

    pub fn step(&mut self) {
        self.writer.link.flush(&mut self.writer.sink);
        self.writer.poll();
        self.owner.poll();
    }

    /// Steps for a while: long enough for a part to arrive.
    pub fn settle(&mut self) {
        for _ in 0..300 {
            self.step();
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    pub fn until(&mut self, what: &str, is_met: impl Fn(&Ends) -> bool) {
        let deadline = clock::now().after(PATIENCE);
        while !is_met(self) {
            assert!(clock::now() < deadline, "{what} does not come");
            self.step();
        }
    }

    pub fn raised(&self) -> u64 {
        self.owner.lanes.value(self.lane.id())
    }

    /// Parts that have ended at the writer, with failures.
    pub fn ended(&self) -> (usize, usize) {
        (self.writer.sink.completed.len(), self.writer.sink.failures.len())
    }

    pub fn refused(&self) -> u64 {
        self.owner.counters.refused_slots.load(SeqCst)
    }
}
