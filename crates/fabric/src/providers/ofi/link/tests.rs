//! Flushes and lanes over scripted completions: libfabric opens the queue, and a function in this file takes
//! the place of `fi_cq_read`.

use super::super::super::control_lanes::ControlLanes;
use super::super::super::granted_regions::RemoteMemory;
use super::super::super::twin_gpus::{self, TwinGpuControls, TwinGpus, WithheldWrite};
use super::super::peer::OfiPeer;
use super::super::wire::{OfiIntroduction, immediate};
use super::super::{OfiConfig, info, library};
use super::*;
use crate::clock;
use crate::lane_table::LaneTable;
use crate::memory::{DmaBuf, Reader};
use crate::providers::gpu_memory::{Flush, cannot_flush};
use crate::registration::IdleLimits;
use crate::types::{Generation, Lane};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

const BYTES: usize = 64;
const REGION: RegionKey = RegionKey(7);
const PEER: Rank = Rank(1);

/// Arrival on a lane, with one byte value for a place in GPU memory.
#[derive(Clone, Copy)]
struct Arrival {
    lane: Lane,
    to: u64,
    length: usize,
    value: u8,
}

thread_local! {
    /// Arrivals by read.
    static BATCHES: RefCell<VecDeque<Vec<Arrival>>> = RefCell::default();
}

/// `fi_cq_read` of a NIC that withholds what it writes into a GPU until a flush.
unsafe extern "C" fn read(_: *mut sys::Cq, entries: *mut sys::CqEntry, count: usize) -> isize {
    let Some(batch) = BATCHES.with_borrow_mut(VecDeque::pop_front) else { return -sys::FI_EAGAIN };
    assert!(batch.len() <= count);
    for (index, it) in batch.iter().enumerate() {
        let bytes = vec![it.value; it.length];
        match twin_gpus::memory_at(it.to).unwrap().flushed_gpu() {
            Some(gpu) => twin_gpus::withhold(WithheldWrite { gpu, key: 0, to: it.to, bytes }),
            // SAFETY: the test's memory, which lives.
            None => unsafe { (it.to as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) },
        }
        let entry = sys::CqEntry {
            op_context: std::ptr::null_mut(),
            flags: sys::FI_REMOTE_CQ_DATA,
            len: it.length,
            buf: std::ptr::null_mut(),
            data: immediate(it.lane, None),
        };
        // SAFETY: the caller's array has room for `count` entries.
        unsafe { entries.add(index).write(entry) };
    }
    batch.len() as isize
}

/// Lanes of a test, in the order in which they were issued.
#[derive(Clone)]
struct Lanes {
    table: Arc<LaneTable>,
    issued: Arc<Mutex<Vec<Lane>>>,
}

impl Lanes {
    fn raised(&self) -> usize {
        let issued = self.issued.lock().unwrap();
        issued.iter().filter(|lane| self.table.value(lane.id()) > 0).count()
    }
}

/// GPUs that record, at each flush, the GPU and how many lanes have risen.
struct Watched {
    gpus: TwinGpus,
    lanes: Lanes,
    flushes: Arc<Mutex<Vec<(u32, usize)>>>,
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
        let (lanes, flushes) = (self.lanes.clone(), self.flushes.clone());
        let flush = self.gpus.flush_of(device, reader)?;
        Ok(flush.map(|flush| -> Flush {
            Box::new(move || {
                flushes.lock().unwrap().push((device, lanes.raised()));
                flush()
            })
        }))
    }

    fn are_simulated(&self) -> bool {
        true
    }
}

/// A rank's link over scripted completions, and GPU memory there.
struct Rig {
    link: OfiLink,
    lanes: Lanes,
    flushes: Arc<Mutex<Vec<(u32, usize)>>>,
    controls: Arc<TwinGpuControls>,
    gpus: TwinGpus,
    memory: Arc<Memory>,
    sink: Sink,
}

impl Rig {
    /// `None`, with a message, without libfabric.
    fn new(reports_lengths: bool) -> Option<Rig> {
        if let Err(why) = library() {
            println!("skipped: {why}");
            return None;
        }
        let config = OfiConfig::default();
        let offer = info::offers(&config.provider, config.bind, 0).unwrap().remove(0);
        let domains = [Arc::new(Domain::open(offer).unwrap())];
        let generation = Generation(0);
        let table = Arc::new(LaneTable::new(256, generation).unwrap());
        let lanes = Lanes { table: table.clone(), issued: Arc::default() };
        let (controls, flushes) = (Arc::<TwinGpuControls>::default(), Arc::default());
        let gpus = TwinGpus::new(&controls);
        let watched =
            Watched { gpus: gpus.clone(), lanes: lanes.clone(), flushes: Arc::clone(&flushes) };
        let watched: Arc<dyn Gpus> = Arc::new(watched);
        let sources = SourceCache::new(IdleLimits::NONE);
        let group = Membership { rank: Rank(0), size: 2, generation, lanes: table };
        let mut link = OfiLink::open(&config, &domains, (&watched, &sources), group).unwrap();
        link.rails[0].script(read, reports_lengths);
        let memory = Arc::new(gpus.allocate(0, BYTES).unwrap());
        Some(Rig { link, lanes, flushes, controls, gpus, memory, sink: Sink::default() })
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) {
        self.link.register(key, memory).unwrap();
    }

    /// Registers the memory and grants it.
    fn grant(&mut self) {
        let memory = self.memory.clone();
        self.register(REGION, &memory);
        self.link.grant(REGION, PEER, 0..BYTES as u64).unwrap();
    }

    /// Polls a batch with one arrival for each length, to separate places and on separate lanes.
    fn poll(&mut self, lengths: &[usize]) {
        let mut batch = Vec::new();
        for &length in lengths {
            let lane = self.lanes.table.issue(PEER, 2).unwrap();
            let mut issued = self.lanes.issued.lock().unwrap();
            issued.push(lane);
            let value = issued.len() as u8;
            let to = self.memory.address() + 8 * u64::from(value - 1);
            batch.push(Arrival { lane, to, length, value });
        }
        BATCHES.with_borrow_mut(|batches| batches.push_back(batch.clone()));
        self.link.poll(clock::now(), &mut self.sink);
        for arrival in batch.iter().filter(|it| self.lanes.table.value(it.lane.id()) > 0) {
            let mut seen = vec![0; arrival.length];
            // SAFETY: the test's memory, which lives.
            unsafe { seen.as_mut_ptr().copy_from(arrival.to as *const u8, arrival.length) };
            assert_eq!(seen, vec![arrival.value; arrival.length], "a lane rose before the bytes");
        }
    }

    fn flushes(&self) -> Vec<(u32, usize)> {
        self.flushes.lock().unwrap().clone()
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn lanes_rise_after_the_one_flush_of_their_batch() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.grant();
    rig.poll(&[8, 1, 5]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (3, vec![(0, 0)]));
    rig.poll(&[0, 8]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (5, vec![(0, 0), (0, 3)]));
    assert!(rig.sink.lost.is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn empty_arrivals_need_no_flush_where_lengths_are_known() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.grant();
    rig.poll(&[0, 0]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (2, vec![]));

    let Some(mut rig) = Rig::new(false) else { return };
    rig.grant();
    rig.poll(&[0, 0]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (2, vec![(0, 0)]));
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn only_gpus_with_granted_memory_are_flushed() {
    let Some(mut rig) = Rig::new(true) else { return };
    let memory = Arc::new(Memory::shared(BYTES).unwrap());
    rig.register(RegionKey(1), &memory);
    rig.link.grant(RegionKey(1), PEER, 0..BYTES as u64).unwrap();
    let source = rig.memory.clone();
    rig.register(RegionKey(2), &source);
    rig.controls.is_ordered.store(true, SeqCst);
    rig.memory = Arc::new(rig.gpus.allocate(0, BYTES).unwrap());
    rig.poll(&[8]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (1, vec![]));

    rig.controls.is_ordered.store(false, SeqCst);
    rig.grant();
    rig.poll(&[8]);
    assert_eq!(rig.flushes(), [(0, 1)]);
    rig.link.deregister(REGION);
    rig.poll(&[8]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (3, vec![(0, 1)]));
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn memory_for_the_owner_is_not_flushed_where_the_platform_orders_writes_for_it() {
    for (reader, flushes) in [(Reader::Owner, vec![]), (Reader::All, vec![(0, 0)])] {
        let Some(mut rig) = Rig::new(true) else { return };
        rig.controls.is_ordered_for_owner.store(true, SeqCst);
        rig.memory = Arc::new(rig.gpus.allocate(0, BYTES).unwrap().read_by(reader));
        rig.grant();
        rig.poll(&[8]);
        assert_eq!((rig.lanes.raised(), rig.flushes()), (1, flushes));
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn memory_of_a_gpu_that_cannot_be_flushed_is_refused_as_a_destination() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.controls.cannot_flush.store(true, SeqCst);
    let memory = rig.memory.clone();
    rig.register(REGION, &memory);
    let refused = rig.link.grant(REGION, PEER, 0..BYTES as u64).unwrap_err();
    let Error::Unusable { provider: ProviderKind::Ofi, key: REGION, detail } = refused else {
        panic!("{refused}")
    };
    assert_eq!(detail, cannot_flush("GPU 0"));
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn a_failed_flush_raises_no_lane_and_loses_the_peers_of_the_nic() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.grant();
    let local = ControlLanes::issue(&rig.lanes.table, PEER).unwrap();
    let ControlLanes { consumed, presence } = local;
    let remote = OfiIntroduction { consumed, presence, targets: Vec::new() };
    let endpoints = vec![(0, RemoteMemory { base: 0, key: 0 })];
    rig.link.peers.insert(PEER, OfiPeer::new(PEER, local, remote, 16, endpoints));
    rig.controls.fails_flushes.store(true, SeqCst);
    rig.poll(&[8, 0]);
    assert_eq!((rig.lanes.raised(), rig.flushes()), (0, vec![(0, 0)]));
    let nic = rig.link.rails[0].nic();
    let why = format!("{nic}: writes into GPU 0 were not flushed: the test fails flushes");
    assert_eq!(rig.sink.lost, [(PEER, why)]);
}
