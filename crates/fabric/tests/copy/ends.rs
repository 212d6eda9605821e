//! Ranks over device twins, and link pairs without engines.

use crate::common::{AllGather, Member, MemberDevices, PATIENCE, bare_link, connect_bare, until};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::link::{PostStatus, Sink, WorkRequest};
use weft_fabric::providers::CopyDevice;
use weft_fabric::providers::copy::{Twin, TwinControls};
use weft_fabric::{
    Device, Generation, Lane, LaneId, LaneTable, Link, Memory, Page, Rank, RegionKey, TrafficClass,
    clock,
};

pub fn copy(seed: u64) -> CopyDevice {
    CopyDevice::over(move || Ok(Box::new(Twin::new(seed))), "this")
}

pub fn controlled(seed: u64, controls: &Arc<TwinControls>) -> CopyDevice {
    let controls = controls.clone();
    let twin = move || Twin::with_controls(seed, controls.clone());
    CopyDevice::over(move || Ok(Box::new(twin())), "this")
}

pub fn join(places: MemberDevices, rank: Rank, size: u32, gather: &mut AllGather<'_>) -> Member {
    let devices: [Arc<dyn Device>; 1] = [Arc::new(copy(u64::from(rank.0)))];
    Member::join_on(places, rank, size, &devices, gather)
}

/// Bytes in each region of a [`Pair`].
pub const BYTES: usize = 10_000;
const LANES: usize = 8;

/// Writing link and owning link on one thread.
pub struct Pair {
    pub writer: Box<dyn Link>,
    pub owner: Box<dyn Link>,
    pub lanes: Arc<LaneTable>,
    /// The writer's regions on device 0 and in host memory, the owner's on device 1 and in host memory.
    pub sources: [Arc<Memory>; 2],
    pub inboxes: [Arc<Memory>; 2],
    pub sink: Sink,
}

/// Device region key.
pub const DEVICE: u32 = 0;
/// Host region key.
pub const HOST: u32 = 1;

impl Pair {
    pub fn of(writer: CopyDevice, owner: CopyDevice) -> Pair {
        let (mut writer, _) = bare_link(&writer, Rank(0), LANES);
        let (mut owner, lanes) = bare_link(&owner, Rank(1), LANES);
        lanes.issue(Rank(0), LANES as u32).unwrap();
        let deadline = clock::now().after(PATIENCE);
        let (to_writer, to_owner) = (writer.address(), owner.address());
        std::thread::scope(|scope| {
            scope.spawn(|| connect_bare(&mut *writer, Rank(1), &to_owner, deadline).unwrap());
            connect_bare(&mut *owner, Rank(0), &to_writer, deadline).unwrap();
        });
        let regions = |link: &mut dyn Link, device| {
            let on_device = link.allocate(device, BYTES).unwrap().unwrap();
            let regions = [Arc::new(on_device), Arc::new(Memory::shared(BYTES).unwrap())];
            for (key, memory) in (0..).zip(&regions) {
                link.register(RegionKey(key), memory).unwrap();
            }
            regions
        };
        let (sources, inboxes) = (regions(&mut *writer, 0), regions(&mut *owner, 1));
        for key in [DEVICE, HOST].map(RegionKey) {
            let entry = owner.grant(key, Rank(0), 0..BYTES as u64).unwrap();
            let bytes = BYTES as u64;
            until(deadline, |limit| writer.import(Rank(1), key, bytes, &entry, limit)).unwrap();
        }
        Pair { writer, owner, lanes, sources, inboxes, sink: Sink::default() }
    }

    /// Posts 100-byte pages: source region, destination region, offset.
    pub fn post(
        &mut self,
        token: u64,
        lane: u32,
        pages: &[(u32, u32, u64)],
    ) -> Result<PostStatus, String> {
        let page = |&(from, to, at): &(u32, u32, u64)| Page {
            source: RegionKey(from),
            source_offset: at,
            destination: RegionKey(to),
            destination_offset: at,
            length: 100,
        };
        let pages: Vec<Page> = pages.iter().map(page).collect();
        let lane = Lane::new(LaneId::new(lane).unwrap(), Generation(0));
        let (class, pages) = (TrafficClass::Latency, &pages);
        let work = WorkRequest {
            token,
            peer: Rank(1),
            lane,
            credits: None,
            piggyback: None,
            class,
            pages,
        };
        self.writer.post(&work, &mut self.sink)
    }

    pub fn flush(&mut self) {
        self.writer.flush(&mut self.sink);
    }

    pub fn poll(&mut self) {
        self.writer.poll(clock::now(), &mut self.sink);
    }

    /// Polls until `parts` parts have ended; returns tokens with failure causes.
    pub fn ended(&mut self, parts: usize) -> Vec<(u64, Option<String>)> {
        let deadline = clock::now().after(PATIENCE);
        while self.ended_parts() < parts && clock::now() < deadline {
            self.poll();
            std::thread::sleep(Duration::from_micros(10));
        }
        let Sink { completed, failures, .. } = &mut self.sink;
        let failed = failures.drain(..).map(|(token, why)| (token, Some(why)));
        completed.drain(..).map(|token| (token, None)).chain(failed).collect()
    }

    /// Parts that have ended and are not returned yet.
    pub fn ended_parts(&self) -> usize {
        self.sink.completed.len() + self.sink.failures.len()
    }

    pub fn raised(&self, lane: u32) -> u64 {
        self.lanes.value(LaneId::new(lane).unwrap())
    }
}

pub fn fill(memory: &Memory, value: u8) {
    // SAFETY: a twin's devices are host memory, which `memory` keeps.
    unsafe { std::ptr::write_bytes(memory.address() as *mut u8, value, memory.len()) };
}

pub fn bytes(memory: &Memory, at: usize) -> Vec<u8> {
    assert!(at + 100 <= memory.len());
    // SAFETY: as in `fill`.
    (at..at + 100).map(|at| unsafe { *((memory.address() as usize + at) as *const u8) }).collect()
}
