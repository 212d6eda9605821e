//! GPU memory over simulated NICs and GPUs: payload is visible only after a flush, and no lane rises
//! before. NICs read only what was released.

use crate::common::{Member, PATIENCE, on_threads, put, take, waiting};
use crate::links::{BYTES, Links};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_fabric::link::{PostStatus, WorkRequest};
use weft_fabric::providers::verbs::{Flush, Gpus, TwinConfig, TwinGpuControls, TwinGpus, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    Device, DmaBuf, Error, Lane, LaneTable, Memory, MemoryKind, Page, ProviderKind, Rank, Reader,
    RegionKey, TrafficClass, clock,
};

/// Regions at a rank: one on the host, and two on GPUs.
const HOST: RegionKey = RegionKey(0);
const GPUS: [RegionKey; 2] = [RegionKey(1), RegionKey(2)];

/// Write under way: the lane that it raises, and the payload.
struct Expected {
    lane: Lane,
    payload: Arc<Memory>,
    ranges: Vec<Range<usize>>,
    value: u8,
}

/// Writes toward one rank, each on a separate lane.
struct Watch {
    lanes: Arc<LaneTable>,
    writes: Vec<Expected>,
}

impl Watch {
    /// Panics if a lane is raised and a payload byte is not visible; returns how many lanes were raised.
    fn check(&self, when: &str) -> usize {
        let is_raised = |write: &&Expected| self.lanes.value(write.lane.id()) > 0;
        let raised = self.writes.iter().filter(is_raised);
        raised.inspect(|write| write.assert_visible(when)).count()
    }
}

impl Expected {
    fn assert_visible(&self, when: &str) {
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            let mut seen = vec![0; range.len()];
            read(&self.payload, range.start, &mut seen);
            let all = vec![self.value; range.len()];
            assert_eq!(seen, all, "{when}: the lane of write {} rose first", self.value);
        }
    }
}

/// Reads host memory, or simulated GPU memory.
fn read(memory: &Memory, offset: usize, bytes: &mut [u8]) {
    assert!(offset + bytes.len() <= memory.len());
    let from = (memory.address() as usize + offset) as *const u8;
    // SAFETY: the range was checked, and the memory is this process's.
    unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
}

/// Writes host memory, or simulated GPU memory.
fn fill(memory: &Memory, offset: usize, length: usize, value: u8) {
    assert!(offset + length <= memory.len());
    let to = (memory.address() as usize + offset) as *mut u8;
    // SAFETY: as in `read`.
    unsafe { std::ptr::write_bytes(to, value, length) };
}

/// GPUs that look at the rank's lanes before each flush.
struct Watched {
    gpus: TwinGpus,
    watch: Arc<Mutex<Option<Watch>>>,
}

impl Gpus for Watched {
    fn allocate(&self, device: u32, length: usize) -> Option<Result<Memory, String>> {
        Gpus::allocate(&self.gpus, device, length)
    }

    fn export(&self, memory: &Memory) -> Result<DmaBuf, String> {
        self.gpus.export(memory)
    }

    fn has_peer_memory(&self) -> bool {
        self.gpus.has_peer_memory()
    }

    fn flush_of(&self, device: u32, reader: Reader) -> Result<Option<Flush>, String> {
        let (watch, flush) = (self.watch.clone(), self.gpus.flush_of(device, reader)?);
        Ok(flush.map(|flush| -> Flush {
            Box::new(move || {
                // A link that ends with a failed test flushes, too.
                if !std::thread::panicking()
                    && let Some(watch) = &*watch.lock().unwrap()
                {
                    watch.check("before a flush");
                }
                flush()
            })
        }))
    }
}

/// One rank's GPUs, GPU memory, and what arrives there.
struct Rig {
    gpus: TwinGpus,
    controls: Arc<TwinGpuControls>,
    memories: Vec<Arc<Memory>>,
    watch: Arc<Mutex<Option<Watch>>>,
}

impl Rig {
    /// Stores to a region: on a GPU by a kernel, for which the host then waits if it `synchronizes`.
    fn store(&self, key: RegionKey, offset: usize, length: usize, value: u8, synchronizes: bool) {
        let memory = &self.memories[key.0 as usize];
        let MemoryKind::Device(device) = memory.kind() else {
            return fill(memory, offset, length, value);
        };
        let kernel = self.gpus.launch(device);
        kernel.store(memory.address() + offset as u64, &vec![value; length]);
        if synchronizes {
            self.gpus.synchronize(device);
        }
    }

    fn flushes(&self) -> u64 {
        self.controls.flushes.load(SeqCst)
    }
}

/// Group whose ranks have GPUs. GPU regions are registered once it is connected.
struct Group {
    links: Links,
    rigs: Vec<Rig>,
    written: u8,
    /// The host waits for kernels before it writes what they have stored.
    synchronizes: bool,
}

impl Group {
    /// `nics`: per rank.
    fn connected(size: u32, nics: usize) -> Group {
        let mut rigs = Vec::new();
        let mut devices = Vec::new();
        for _ in 0..size {
            let controls = Arc::<TwinGpuControls>::default();
            let gpus = TwinGpus::new(&controls);
            let watch = Arc::new(Mutex::new(None));
            let watched = Watched { gpus: gpus.clone(), watch: watch.clone() };
            let nics: Vec<_> = (0..nics).map(|_| TwinNic::new(TwinConfig::default())).collect();
            let config = VerbsConfig::default();
            let device = VerbsDevice::over_with_gpus(config, &nics, Arc::new(watched)).unwrap();
            devices.push((nics[0].clone(), device));
            rigs.push(Rig { gpus, controls, memories: Vec::new(), watch });
        }
        let mut links = Links::over(devices);
        links.connect(|_| {});
        for (rig, end) in rigs.iter_mut().zip(&links.0) {
            rig.memories.push(end.memory.clone());
            let (lanes, writes) = (end.lanes.clone(), Vec::new());
            *rig.watch.lock().unwrap() = Some(Watch { lanes, writes });
        }
        Group { links, rigs, written: 0, synchronizes: true }
    }

    /// Registers both GPUs' memory at each rank.
    fn register(&mut self) {
        self.register_for(Reader::default());
    }

    /// [`Group::register`] for this reader.
    fn register_for(&mut self, reader: Reader) {
        for (rig, end) in self.rigs.iter_mut().zip(&mut self.links.0) {
            for (device, key) in (0..).zip(GPUS) {
                let memory = end.link.allocate(device, BYTES as usize).unwrap().unwrap();
                let memory = Arc::new(memory.read_by(reader));
                end.link.register(key, &memory).unwrap();
                rig.memories.push(memory);
            }
        }
    }

    /// Registers both GPUs' memory at each rank, and grants it to all.
    fn grant(&mut self) {
        self.register();
        GPUS.into_iter().for_each(|key| self.links.grant(key));
    }

    /// Posts a write with one page in each length to a separate place, with a separate lane.
    fn write(&mut self, write: &Write) -> PostStatus {
        const SLOT: usize = 250;
        self.written += 1;
        let Write { from, to, source, destination, ref lengths } = *write;
        let (value, slot) = (self.written, SLOT * usize::from(self.written - 1));
        let mut ranges = Vec::new();
        let mut begin = slot;
        for &length in lengths {
            ranges.push(begin..begin + usize::from(length));
            begin += usize::from(length);
        }
        assert!(begin <= slot + SLOT && begin <= BYTES as usize);
        self.rigs[from as usize].store(source, slot, begin - slot, value, self.synchronizes);
        let lane = self.links.0[to as usize].lanes.issue(Rank(from), 2).unwrap();
        let page = |range: &Range<usize>| Page {
            source,
            source_offset: range.start as u64,
            destination,
            destination_offset: range.start as u64,
            length: range.len() as u64,
        };
        let pages: Vec<Page> = ranges.iter().map(page).collect();
        let payload = self.rigs[to as usize].memories[destination.0 as usize].clone();
        // Distinct from what the group has filled it with.
        fill(&payload, slot, begin - slot, 0);
        if let Some(watch) = &mut *self.rigs[to as usize].watch.lock().unwrap() {
            watch.writes.push(Expected { lane, payload, ranges, value });
        }
        let work = WorkRequest {
            token: value.into(),
            peer: Rank(to),
            lane,
            credits: None,
            piggyback: None,
            class: TrafficClass::Latency,
            pages: &pages,
        };
        let end = &mut self.links.0[from as usize];
        end.link.post(&work, &mut end.sink).unwrap()
    }

    fn poll(&mut self, rank: u32) {
        let end = &mut self.links.0[rank as usize];
        end.link.poll(clock::now(), &mut end.sink);
    }

    /// Checks what has arrived at a rank; returns how many lanes were raised.
    fn check(&self, rank: u32) -> usize {
        let watch = self.rigs[rank as usize].watch.lock().unwrap();
        watch.as_ref().unwrap().check("after a poll")
    }
}

/// Test write.
#[derive(Clone, Debug)]
struct Write {
    from: u32,
    to: u32,
    source: RegionKey,
    destination: RegionKey,
    lengths: Vec<u8>,
}

impl Write {
    /// One 8-byte page from rank 0 to rank 1.
    fn short(source: RegionKey, destination: RegionKey) -> Write {
        Write { from: 0, to: 1, source, destination, lengths: vec![8] }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(Write),
    Poll(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let region = || prop::sample::select(vec![HOST, GPUS[0], GPUS[1]]);
    let lengths = prop::collection::vec(0u8..83, 0..4);
    let write = (0u32..3, 1u32..3, region(), region(), lengths);
    let write = write.prop_map(|(from, ahead, source, destination, lengths)| {
        let to = (from + ahead) % 3;
        Step::Write(Write { from, to, source, destination, lengths })
    });
    prop_oneof![write, (0u32..3).prop_map(Step::Poll)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Looked at before each flush, and after each poll.
    #[test]
    fn no_lane_rises_before_its_payload_is_visible(
        nics in 1usize..3,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut group = Group::connected(3, nics);
        group.grant();
        let mut written = [0; 3];
        for step in &steps {
            match step {
                Step::Write(_) if group.written == 40 => {}
                Step::Write(write) => {
                    prop_assert_eq!(group.write(write), PostStatus::InFlight);
                    written[write.to as usize] += 1;
                }
                Step::Poll(rank) => {
                    group.poll(*rank);
                    group.check(*rank);
                }
            }
        }
        for rank in 0..3 {
            (0..4).for_each(|_| group.poll(rank));
            prop_assert_eq!(group.check(rank), written[rank as usize]);
        }
        prop_assert!(group.links.0.iter().all(|end| end.sink.lost.is_empty()));
    }
}

#[test]
fn arrivals_of_one_batch_share_a_flush_and_empty_ones_need_none() {
    let mut group = Group::connected(3, 1);
    group.grant();
    for from in [0, 2] {
        for destination in [GPUS[0], HOST, GPUS[0]] {
            group.write(&Write { from, ..Write::short(HOST, destination) });
        }
    }
    group.poll(1);
    // One for each GPU that peers may write to.
    assert_eq!((group.check(1), group.rigs[1].flushes()), (6, 2));
    group.write(&Write { lengths: Vec::new(), ..Write::short(HOST, GPUS[0]) });
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (7, 2));
    assert_eq!((group.rigs[0].flushes(), group.rigs[2].flushes()), (0, 0));
}

#[test]
fn a_group_without_granted_memory_of_gpus_does_not_flush() {
    let mut group = Group::connected(2, 1);
    group.register();
    group.write(&Write::short(GPUS[0], HOST));
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (1, 0));

    let mut group = Group::connected(2, 1);
    group.grant();
    group.links.0[1].link.deregister(GPUS[1]);
    group.write(&Write::short(HOST, HOST));
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (1, 1));
    group.links.0[1].link.deregister(GPUS[0]);
    group.write(&Write::short(HOST, HOST));
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (2, 1));
}

#[test]
fn gpus_that_order_the_writes_of_nics_are_not_flushed() {
    let mut group = Group::connected(2, 1);
    group.rigs[1].controls.is_ordered.store(true, SeqCst);
    group.grant();
    group.write(&Write::short(GPUS[1], GPUS[0]));
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (1, 0));
}

#[test]
fn memory_for_the_owner_is_not_flushed_where_the_platform_orders_writes_for_it() {
    for (reader, flushes) in [(Reader::Owner, 0), (Reader::All, 1)] {
        let mut group = Group::connected(2, 1);
        group.rigs[1].controls.is_ordered_for_owner.store(true, SeqCst);
        group.register_for(reader);
        group.links.grant(GPUS[0]);
        group.write(&Write::short(HOST, GPUS[0]));
        group.poll(1);
        assert_eq!((group.check(1), group.rigs[1].flushes()), (1, flushes));
    }
}

#[test]
fn memory_of_a_gpu_that_cannot_be_flushed_is_refused_as_a_destination() {
    let mut group = Group::connected(2, 1);
    group.rigs[0].controls.cannot_flush.store(true, SeqCst);
    group.register();
    let refused = group.links.0[0].link.grant(GPUS[1], Rank(1), 0..BYTES).unwrap_err();
    let Error::Unusable { provider: ProviderKind::Verbs, key, detail } = refused else {
        panic!("{refused}")
    };
    assert_eq!(key, GPUS[1]);
    assert!(detail.starts_with("writes of NICs into GPU 1: "), "{detail}");
    assert!(detail.ends_with("cannot flush them; receive into memory of the host"), "{detail}");
}

#[test]
fn a_failed_flush_raises_no_lane_and_loses_the_peers_of_its_nic() {
    let mut group = Group::connected(3, 1);
    group.grant();
    group.rigs[1].controls.fails_flushes.store(true, SeqCst);
    group.write(&Write::short(HOST, GPUS[0]));
    group.poll(1);
    assert_eq!(group.check(1), 0);
    let (end, name) = (&group.links.0[1], group.links.0[1].nic.name());
    let why = format!("{name}:1: writes into GPU 0 were not flushed: the test fails flushes");
    assert_eq!(end.sink.lost, [0, 2].map(|peer| (Rank(peer), why.clone())));
}

#[test]
fn a_nic_reads_of_a_gpu_only_what_was_released() {
    let mut group = Group::connected(2, 1);
    group.grant();
    let arrived = |group: &mut Group| {
        group.write(&Write::short(GPUS[0], GPUS[1]));
        group.poll(1);
        let expected = group.rigs[1].watch.lock().unwrap().as_mut().unwrap().writes.pop().unwrap();
        let mut seen = [0; 8];
        read(&expected.payload, expected.ranges[0].start, &mut seen);
        seen
    };
    group.synchronizes = false;
    assert_eq!(arrived(&mut group), [0; 8], "the kernel's stores have left before the release");
    group.synchronizes = true;
    assert_eq!(arrived(&mut group), [2; 8]);
}

/// A work request on host memory holds the bytes; the twin refuses one that would hold GPU bytes.
#[test]
fn short_writes_from_a_gpu_are_read_by_the_nic() {
    let mut group = Group::connected(2, 1);
    group.grant();
    for source in [HOST, GPUS[0]] {
        group.links.0[0].nic.pause(true);
        group.write(&Write::short(source, GPUS[1]));
        let (slot, value) = (250 * usize::from(group.written - 1), group.written);
        // A change after the post.
        group.rigs[0].store(source, slot, 8, 99, true);
        group.links.0[0].nic.pause(false);
        let inlined = source == HOST;
        let watch = &group.rigs[1].watch;
        watch.lock().unwrap().as_mut().unwrap().writes.last_mut().unwrap().value =
            if inlined { value } else { 99 };
        group.poll(1);
        assert_eq!(group.check(1), usize::from(value));
    }
    assert!(group.links.0[0].sink.lost.is_empty());
}

#[test]
fn memory_that_is_not_exported_is_refused_by_name_or_registered_by_its_address() {
    let mut group = Group::connected(2, 1);
    group.rigs[0].controls.refuses_export.store(true, SeqCst);
    let memory = Arc::new(group.rigs[0].gpus.allocate(0, BYTES as usize).unwrap());
    let refused = group.links.0[0].link.register(GPUS[0], &memory).unwrap_err();
    let Error::Unusable { provider: ProviderKind::Verbs, key, detail } = refused else {
        panic!("{refused}")
    };
    assert_eq!((key, detail.as_str()), (GPUS[0], "the test refuses to export memory"));

    for rig in &group.rigs {
        rig.controls.refuses_export.store(true, SeqCst);
        rig.controls.has_peer_memory.store(true, SeqCst);
    }
    group.grant();
    group.write(&Write::short(GPUS[1], GPUS[0]));
    group.poll(1);
    assert_eq!((group.check(1), group.rigs[1].flushes()), (1, 2));
}

#[test]
fn a_wait_returns_once_payload_in_a_gpu_is_visible() {
    const LENGTH: usize = 100_000;
    on_threads(2, |rank, gather| {
        let nic = TwinNic::new(TwinConfig::default());
        let gpus = TwinGpus::new(&Arc::default());
        let config = VerbsConfig { max_part_bytes: 30_000, ..VerbsConfig::default() };
        let device =
            VerbsDevice::over_with_gpus(config, std::slice::from_ref(&nic), Arc::new(gpus.clone()));
        let devices: [Arc<dyn Device>; 1] = [Arc::new(device.unwrap())];
        let mut member = Member::join(rank, 2, &devices, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let engine = &mut member.engine;
        let source = engine.register(gpus.allocate(0, LENGTH).unwrap()).unwrap();
        let inbox = engine.alloc_device(1, LENGTH).unwrap();
        let remote = member.exchange_regions(peer, &inbox, gather);
        for round in 0..20 {
            let (mine, theirs) = [rank, peer].map(|it| 1 + round as u8 + 100 * it.0 as u8).into();
            put(&source, 0, &[mine; LENGTH]);
            let page = Page {
                source: source.key(),
                source_offset: 0,
                destination: remote.key,
                destination_offset: 0,
                length: LENGTH as u64,
            };
            let raises = member.raises(peer, [LENGTH]);
            let engine = &mut member.engine;
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                engine.wait_for_credit(counter, peer, round, waiter).unwrap();
                let request = engine.write(peer, counter, round, &[page]).unwrap();
                engine.wait(counter, &[(peer, raises)], waiter).unwrap();
                assert!(take(&inbox, 0, LENGTH).iter().all(|byte| *byte == theirs));
                engine.wait_for_request(request, waiter).unwrap();
                engine.credit(peer, counter).unwrap();
            });
        }
        gather(Vec::new());
    });
}
