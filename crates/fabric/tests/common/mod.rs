//! Ranks as threads or as processes, and the traffic that they exchange to test a provider.
#![allow(dead_code, unused_imports)] // Each test uses only some items.

mod connect;
mod ranks;

pub use connect::{Introduced, bare_link, connect, connect_all, connect_bare, soon, until};
pub use ranks::{
    AllGather, Limits, PATIENCE, on_processes, on_processes_with, on_threads, process_gather,
    process_rank,
};
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterConfig, CounterId, Device, Engine, EngineConfig, Generation, Grant, Page, Rank, Region,
    RemoteRegion, WaitOptions, clock,
};

/// Bytes that each rank may write to each other.
pub const SLOT: usize = 40_000;

/// Runs a wait for up to `patience` that spins for `spin`.
pub fn waiting<T>(
    patience: Duration,
    spin: Duration,
    f: impl FnOnce(&mut WaitOptions<'_>) -> T,
) -> T {
    let mut never = || false;
    f(&mut WaitOptions { deadline: clock::now().after(patience), spin, interrupted: &mut never })
}

/// Stops this process, with all threads, until it is continued.
pub fn stop_here() {
    // SAFETY: no pointers. A signal to this thread, so it stops here and not a little later.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Waits until a process has stopped.
pub fn until_stopped(process: Pid) {
    let status = format!("/proc/{}/status", process.as_raw_nonzero());
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(&status).unwrap().contains("State:\tT") {
        assert!(Instant::now() < deadline, "the process did not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank with memory and a counter that all others may write and raise.
pub struct Member {
    pub engine: Engine,
    pub counter: CounterId,
    pub source: Region,
    pub inbox: Region,
    pub remotes: BTreeMap<Rank, RemoteRegion>,
    /// Bytes that each other rank may write here.
    pub slot: usize,
    /// Time limit for each wait in a round.
    pub patience: Duration,
}

/// Shape of a [`Member`]'s memory and counter, the same at all ranks but for `places`.
#[derive(Clone, Copy, Debug)]
pub struct MemberConfig {
    pub places: MemberDevices,
    pub generation: Generation,
    /// Bytes that each rank may write to each other.
    pub slot: usize,
    /// Source bytes.
    pub source: usize,
    /// Counter rounds that may be open at a time.
    pub window: u32,
}

impl Default for MemberConfig {
    fn default() -> MemberConfig {
        let (places, generation) = (MemberDevices::default(), Generation(3));
        MemberConfig { places, generation, slot: SLOT, source: SLOT, window: 1 }
    }
}

/// Devices for a member's regions; `None`: host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemberDevices {
    pub source: Option<u32>,
    pub inbox: Option<u32>,
}

/// Creates a region in host memory or on a device.
pub fn region(engine: &mut Engine, place: Option<u32>, length: usize) -> Region {
    match place {
        None => engine.alloc(length).unwrap(),
        Some(device) => engine.alloc_device(device, length).unwrap(),
    }
}

/// Copies bytes into a region, including those on a twin's device, whose addresses are the CPU's.
pub fn put(region: &Region, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.memory().len());
    let to = (region.memory().address() as usize + offset) as *mut u8;
    // SAFETY: the range was checked, and the region keeps the memory.
    unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
}

/// Sets bytes in a region, like [`put`].
pub fn fill(region: &Region, offset: usize, length: usize, value: u8) {
    put(region, offset, &vec![value; length]);
}

/// Copies bytes out of a region, like [`put`].
pub fn take(region: &Region, offset: usize, length: usize) -> Vec<u8> {
    assert!(offset + length <= region.memory().len());
    let from = (region.memory().address() as usize + offset) as *const u8;
    let mut bytes = vec![0; length];
    // SAFETY: as in `put`.
    unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), length) };
    bytes
}

impl Member {
    /// Joins a group with `size` ranks; called by every rank.
    pub fn join(
        rank: Rank,
        size: u32,
        devices: &[Arc<dyn Device>],
        gather: &mut AllGather<'_>,
    ) -> Member {
        Member::join_on(MemberDevices::default(), rank, size, devices, gather)
    }

    /// Joins with regions on devices.
    pub fn join_on(
        places: MemberDevices,
        rank: Rank,
        size: u32,
        devices: &[Arc<dyn Device>],
        gather: &mut AllGather<'_>,
    ) -> Member {
        Member::join_as(
            MemberConfig { places, ..MemberConfig::default() },
            rank,
            size,
            devices,
            gather,
        )
    }

    /// Joins with memory and a counter in this shape.
    pub fn join_as(
        joining: MemberConfig,
        rank: Rank,
        size: u32,
        devices: &[Arc<dyn Device>],
        gather: &mut AllGather<'_>,
    ) -> Member {
        let MemberConfig { places, generation, slot, source, window } = joining;
        let deadline = clock::now().after(PATIENCE);
        let config = EngineConfig::default();
        let mut engine = Engine::new(config, rank, size, generation, devices).unwrap();
        connect(&mut engine, gather, deadline).unwrap();
        let shape = CounterConfig { window, ..CounterConfig::default() };
        let counter = engine.counter_with(shape).unwrap();
        engine.use_for_barriers(counter);
        let inbox = region(&mut engine, places.inbox, slot * size as usize);
        let source = region(&mut engine, places.source, source);
        let mut grants: Vec<Vec<u8>> = Vec::new();
        for peer in (0..size).map(Rank) {
            let all = 0..inbox.memory().len() as u64;
            grants.push(if peer == rank {
                Vec::new()
            } else {
                engine.grant(peer, &[(&inbox, all)], &[counter]).unwrap().encode()
            });
        }
        let mut joined = Vec::new();
        for grant in &grants {
            weft_fabric::bytes::put_block(&mut joined, grant);
        }
        let mut remotes = BTreeMap::new();
        for (number, bytes) in gather(joined).iter().enumerate() {
            let peer = Rank(number as u32);
            if peer == rank {
                continue;
            }
            let mut reader = weft_fabric::bytes::Reader::new(bytes);
            for _ in 0..rank.0 {
                reader.block().unwrap();
            }
            let grant = Grant::decode(reader.block().unwrap()).unwrap();
            let imported = engine.import(peer, &grant, &[counter], deadline).unwrap();
            remotes.insert(peer, imported[0]);
        }
        Member { engine, counter, source, inbox, remotes, slot, patience: PATIENCE }
    }

    /// Page from the source to this rank's slot at `peer`, at these offsets.
    pub fn page(&self, peer: Rank, from: usize, to: usize, length: usize) -> Page {
        assert!(to + length <= self.slot);
        Page {
            source: self.source.key(),
            source_offset: from as u64,
            destination: self.remotes[&peer].key,
            destination_offset: (self.slot * self.engine.rank().0 as usize + to) as u64,
            length: length as u64,
        }
    }

    /// Bytes written by `peer`.
    pub fn slot_of(&self, peer: Rank) -> Vec<u8> {
        take(&self.inbox, self.slot * peer.0 as usize, self.slot)
    }

    /// Lane raises by a write from `peer` whose pages have these lengths.
    pub fn raises(&self, peer: Rank, lengths: impl IntoIterator<Item = usize>) -> u64 {
        let lengths: Vec<u64> = lengths.into_iter().map(|length| length as u64).collect();
        self.engine.route(peer).unwrap().parts.count(lengths)
    }

    /// Grants `peer` a whole region and imports the region that it grants; called by every rank with a
    /// partner.
    pub fn exchange_regions(
        &mut self,
        peer: Rank,
        mine: &Region,
        gather: &mut AllGather<'_>,
    ) -> RemoteRegion {
        let all = 0..mine.memory().len() as u64;
        let granted = self.engine.grant(peer, &[(mine, all)], &[]).unwrap();
        let grant = Grant::decode(&gather(granted.encode())[peer.0 as usize]).unwrap();
        let deadline = clock::now().after(PATIENCE);
        self.engine.import(peer, &grant, &[], deadline).unwrap()[0]
    }

    /// Writes this round's random pages to every peer, checks theirs, gives credit.
    pub fn round(&mut self, seed: u64, round: u64) -> weft_fabric::Result<()> {
        let me = self.engine.rank();
        for (peer, remote) in self.remotes.clone() {
            let wait = |waiter: &mut WaitOptions<'_>| {
                self.engine.wait_for_credit(self.counter, peer, round, waiter)
            };
            waiting(self.patience, Duration::ZERO, wait)?;
            let (bytes, ranges) = plan(seed, me, peer, round);
            put(&self.source, 0, &bytes);
            let pages: Vec<Page> = ranges
                .iter()
                .map(|&(offset, length)| Page {
                    source: self.source.key(),
                    source_offset: offset as u64,
                    destination: remote.key,
                    destination_offset: (SLOT * me.0 as usize + offset) as u64,
                    length: length as u64,
                })
                .collect();
            let request = self.engine.write(peer, self.counter, round, &pages)?;
            waiting(self.patience, Duration::ZERO, |waiter| {
                self.engine.wait_for_request(request, waiter)
            })?;
        }
        for peer in self.remotes.keys().copied().collect::<Vec<_>>() {
            let (bytes, ranges) = plan(seed, peer, me, round);
            let rule = self.engine.route(peer).unwrap().parts;
            let raises = rule.count(ranges.iter().map(|&(_, length)| length as u64));
            waiting(self.patience, Duration::ZERO, |waiter| {
                self.engine.wait(self.counter, &[(peer, raises)], waiter)
            })?;
            for (offset, length) in ranges {
                let seen = take(&self.inbox, SLOT * peer.0 as usize + offset, length);
                assert!(seen == bytes[offset..offset + length], "{me} got wrong bytes of {peer}");
            }
            self.engine.credit(peer, self.counter)?;
        }
        self.engine.flush();
        Ok(())
    }
}

/// One rank's write to another in a round: slot bytes, and the slot ranges that are sent.
fn plan(seed: u64, from: Rank, to: Rank, round: u64) -> (Vec<u8>, Vec<(usize, usize)>) {
    let mut random =
        SplitMix64::new(seed ^ (u64::from(from.0) << 40) ^ (u64::from(to.0) << 20) ^ round);
    let mut ranges = Vec::new();
    let mut offset = 0;
    for _ in 0..random.below(8) {
        offset += random.below(100) as usize;
        let longest = if random.below(4) == 0 { 4000 } else { 70 };
        let length = random.below(longest) as usize;
        ranges.push((offset, length));
        offset += length;
    }
    let bytes = (0..SLOT).map(|_| random.below(256) as u8).collect();
    (bytes, ranges)
}
