//! Scatters over a scripted `fi_writemsg`: the parts are the same messages, with the same outcomes, as when
//! posted one by one.

use super::super::super::super::control_lanes::ControlLanes;
use super::super::super::super::granted_regions::{GrantEntry, RemoteMemory};
use super::super::super::super::twin_gpus::TwinGpus;
use super::super::super::objects::Domain;
use super::super::super::region::SourceCache;
use super::super::super::wire::OfiIntroduction;
use super::super::super::{OfiConfig, info, library};
use super::super::OfiLink;
use super::*;
use crate::clock;
use crate::lane_table::LaneTable;
use crate::link::{Link, Membership, Sink};
use crate::memory::Memory;
use crate::providers::gpu_memory::Gpus;
use crate::providers::scatter_posts::{self, Outcome};
use crate::registration::IdleLimits;
use crate::types::{Generation, Lane};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::VecDeque;
use weft_control::Rank;

const PEERS: u32 = 2;
/// Bytes in a region, and in the grant for it.
const BYTES: u64 = 2048;
const GRANTED: std::ops::Range<u64> = 64..2000;
/// Parts in flight on a NIC, and unconsumed arrivals at a peer.
const PARTS: u32 = 8;
const UNCONSUMED: u32 = 30;
const AGAIN: i32 = sys::FI_EAGAIN as i32;

/// Scripted provider: refusals to come, and what it has accepted.
#[derive(Default)]
struct Script {
    /// Accepted messages, with source offsets.
    messages: Vec<Message>,
    /// Contexts to complete.
    in_flight: VecDeque<usize>,
    /// Posts until one is refused, with the error number.
    refusal: Option<(u32, i32)>,
    /// Source memory.
    sources: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Message {
    peer: sys::Address,
    source: (u64, usize),
    destination: (u64, usize, u64),
    immediate: u64,
    flags: u64,
    counts: (usize, usize),
}

thread_local! {
    static SCRIPT: RefCell<Script> = RefCell::default();
}

/// `fi_writemsg`.
unsafe extern "C" fn write(_: *mut sys::Ep, message: *const sys::RmaMessage, flags: u64) -> isize {
    SCRIPT.with_borrow_mut(|script| {
        if let Some((left, error)) = &mut script.refusal {
            if *left == 0 {
                let error = *error;
                script.refusal = None;
                return -(error as isize);
            }
            *left -= 1;
        }
        // SAFETY: the message and what it points to are valid during the call.
        let (message, source, destination) = unsafe {
            let message = &*message;
            assert_eq!(message.iov_count, message.rma_iov_count);
            (message, *message.msg_iov, *message.rma_iov)
        };
        script.in_flight.push_back(message.context.addr());
        let is_signal = destination.len == 0;
        let at = (source.iov_base.addr() as u64).wrapping_sub(script.sources);
        script.messages.push(Message {
            peer: message.addr,
            source: (if is_signal { 0 } else { at }, source.iov_len),
            destination: (destination.addr, destination.len, destination.key),
            immediate: message.data,
            flags,
            counts: (message.iov_count, message.rma_iov_count),
        });
        0
    })
}

/// `fi_cq_read`: one completion.
unsafe extern "C" fn read(_: *mut sys::Cq, entries: *mut sys::CqEntry, _: usize) -> isize {
    let context = SCRIPT.with_borrow_mut(|script| script.in_flight.pop_front());
    let Some(context) = context else { return -sys::FI_EAGAIN };
    let op_context = context as *mut c_void;
    let entry = sys::CqEntry { op_context, flags: 0, len: 0, buf: null_mut(), data: 0 };
    // SAFETY: the caller's array has room.
    unsafe { entries.write(entry) };
    1
}

/// Step in a run.
#[derive(Clone, Debug)]
enum Step {
    Scatter {
        parts: Vec<(u32, Page)>,
        class: TrafficClass,
    },
    /// Refuses a post after some others.
    Refuse(u32, i32),
    Poll,
    /// The peer grants a region again, under another key.
    Grant(u32, u64),
    Fence(u32),
}

/// Rank 0 with regions 0 and 1, which both peers have granted to it.
struct Rig {
    link: OfiLink,
    lanes: Vec<Lane>,
    sink: Sink,
    scatters: u64,
}

impl Rig {
    /// A link with this many NICs; `None`, with a message, without libfabric.
    fn new(nics: usize) -> Option<Rig> {
        if let Err(why) = library() {
            println!("skipped: {why}");
            return None;
        }
        let config =
            OfiConfig { queue_parts: PARTS, max_unconsumed: UNCONSUMED, ..OfiConfig::default() };
        let offer = info::offers(&config.provider, config.bind, 0).unwrap().remove(0);
        let domain = Arc::new(Domain::open(offer).unwrap());
        let domains = vec![domain; nics];
        let gpus: Arc<dyn Gpus> = Arc::new(TwinGpus::new(&Arc::default()));
        let (sources, generation) = (SourceCache::new(IdleLimits::NONE), Generation(0));
        let lanes = Arc::new(LaneTable::new(256, generation).unwrap());
        let group = Membership { rank: Rank(0), size: 1 + PEERS, generation, lanes: lanes.clone() };
        let mut link = OfiLink::open(&config, &domains, (&gpus, &sources), group).unwrap();
        for rail in &mut link.rails {
            rail.script(read, true);
            rail.script_writes(write);
        }
        let memory = Arc::new(Memory::shared(2 * BYTES as usize).unwrap());
        SCRIPT.with_borrow_mut(|script| {
            *script = Script { sources: memory.address(), ..Script::default() };
        });
        link.register(RegionKey(0), &memory).unwrap();
        link.register(RegionKey(1), &memory).unwrap();
        let mut rig = Rig { link, lanes: Vec::new(), sink: Sink::default(), scatters: 0 };
        for peer in 1..=PEERS {
            rig.lanes.push(lanes.issue(Rank(peer), 2).unwrap());
            let local = ControlLanes::issue(&lanes, Rank(peer)).unwrap();
            let ControlLanes { consumed, presence } = local;
            let remote = OfiIntroduction { consumed, presence, targets: Vec::new() };
            let endpoint = |nic| {
                let address = u64::from(100 * peer) + nic as u64;
                (address, RemoteMemory { base: 0, key: address })
            };
            let endpoints = (0..nics).map(endpoint).collect();
            let state = OfiPeer::new(Rank(peer), local, remote, UNCONSUMED, endpoints);
            rig.link.peers.insert(Rank(peer), state);
            rig.link.open += 1;
            rig.grant(peer, 7);
        }
        Some(rig)
    }

    fn grant(&mut self, peer: u32, salt: u64) {
        let Some(state) = self.link.peers.get_mut(Rank(peer)) else { return };
        let nics = state.endpoints.len() as u64;
        for region in [0, 1] {
            let base = u64::from(peer) << 40 | u64::from(region) << 32;
            let target = |nic| RemoteMemory { base, key: base + 16 * salt + nic };
            let targets = (0..nics).map(target).collect();
            let std::ops::Range { start: begin, end } = GRANTED;
            state.import(RegionKey(region), GrantEntry { begin, end, targets }).unwrap();
        }
    }

    /// Posts a scatter's parts: by one call as far as it goes, or all one by one. The parts behind one
    /// that was not accepted follow one by one, as the engine posts them.
    fn scatter(
        &mut self,
        parts: &[(u32, Page)],
        class: TrafficClass,
        is_one_call: bool,
    ) -> Vec<Outcome> {
        self.scatters += 1;
        let part = |&(peer, page): &(u32, Page)| {
            let lane = *self.lanes.get(peer as usize - 1).unwrap_or(&self.lanes[0]);
            ScatterPart { peer: Rank(peer), lane, page, ..ScatterPart::EMPTY }
        };
        let parts: Vec<ScatterPart> = parts.iter().map(part).collect();
        let scatter = Scatter { token: self.scatters << 24, class, parts: &parts };
        let Rig { link, sink, .. } = self;
        scatter_posts::post(link, sink, &scatter, is_one_call)
    }

    /// Runs a step; returns post outcomes, messages, and all events.
    fn run(&mut self, step: &Step, is_one_call: bool) -> String {
        let mut outcomes = Vec::new();
        match *step {
            Step::Scatter { ref parts, class } => {
                outcomes = self.scatter(parts, class, is_one_call);
            }
            Step::Refuse(posts, error) => {
                SCRIPT.with_borrow_mut(|script| script.refusal = Some((posts, error)));
            }
            Step::Poll => self.link.poll(clock::now(), &mut self.sink),
            Step::Grant(peer, salt) => self.grant(peer, salt),
            Step::Fence(peer) => self.link.fence(Rank(peer), &mut self.sink),
        }
        let messages = SCRIPT.with_borrow_mut(|script| std::mem::take(&mut script.messages));
        let Sink { completed, failures, lost, .. } = &self.sink;
        format!("{outcomes:?} {messages:?} {completed:?} {failures:?} {lost:?}")
    }
}

/// Runs the steps; returns a text for each.
fn runs(nics: usize, steps: &[Step], is_one_call: bool) -> Option<Vec<String>> {
    let mut rig = Rig::new(nics)?;
    Some(steps.iter().map(|step| rig.run(step, is_one_call)).collect())
}

fn page() -> impl Strategy<Value = Page> {
    let key = || prop_oneof![20 => Just(0), 10 => Just(1), 1 => Just(7)].prop_map(RegionKey);
    let length = prop_oneof![1 => Just(0), 2 => Just(8), 2 => Just(700)];
    let offset = || prop_oneof![20 => 64..1300_u64, 1 => 0..4100_u64, 1 => Just(u64::MAX - 20)];
    (key(), offset(), key(), offset(), length).prop_map(
        |(source, source_offset, destination, destination_offset, length)| Page {
            source,
            source_offset,
            destination,
            destination_offset,
            length,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let peer = || prop_oneof![30 => 1..=PEERS, 1 => Just(1 + PEERS)];
    let class = prop_oneof![Just(TrafficClass::Latency), Just(TrafficClass::Bulk)];
    let parts = prop::collection::vec((peer(), page()), 0..12);
    let error = prop_oneof![
        4 => Just(AGAIN),
        2 => Just(libc::ENOMEM),
        1 => Just(libc::EINVAL),
        1 => Just(libc::ECONNRESET),
    ];
    prop_oneof![
        12 => (parts, class).prop_map(|(parts, class)| Step::Scatter { parts, class }),
        4 => (0..9_u32, error).prop_map(|(posts, error)| Step::Refuse(posts, error)),
        4 => Just(Step::Poll),
        1 => (1..=PEERS, 8..99_u64).prop_map(|(peer, salt)| Step::Grant(peer, salt)),
        1 => peer().prop_map(Step::Fence),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    #[cfg_attr(miri, ignore = "miri loads no library")]
    fn a_scatter_posts_the_messages_of_its_parts_posted_one_by_one(
        nics in 1_usize..3,
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let Some(scattered) = runs(nics, &steps, true) else { return Ok(()) };
        let separate = runs(nics, &steps, false).unwrap();
        for ((step, scattered), separate) in steps.iter().zip(scattered).zip(separate) {
            prop_assert_eq!(scattered, separate, "{:?}", step);
        }
    }
}

const fn to(destination: u32, length: u64) -> Page {
    Page {
        source: RegionKey(0),
        source_offset: 100,
        destination: RegionKey(destination),
        destination_offset: GRANTED.start,
        length,
    }
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn a_scatter_resumes_behind_the_part_that_the_provider_refused() {
    let Some(mut rig) = Rig::new(1) else { return };
    let (class, parts) = (TrafficClass::Latency, [(1, to(0, 8)), (2, to(0, 9)), (1, to(1, 10))]);
    for error in [AGAIN, libc::ENOMEM] {
        rig.run(&Step::Refuse(1, error), true);
        // The second part was refused, and the third is accepted behind it.
        assert_eq!(rig.scatter(&parts, class, true), [(1, 1, None), (1, 1, None)]);
        assert_eq!(rig.scatter(&parts[1..2], class, true), [(1, 1, None)]);
        let messages = SCRIPT.with_borrow_mut(|script| std::mem::take(&mut script.messages));
        let lengths: Vec<usize> = messages.iter().map(|it| it.destination.1).collect();
        assert_eq!(lengths, [8, 10, 9]);
        rig.run(&Step::Poll, true);
        rig.run(&Step::Poll, true);
        rig.run(&Step::Poll, true);
        assert_eq!(std::mem::take(&mut rig.sink.completed).len(), 3);
    }
    rig.run(&Step::Fence(1), true);
    rig.run(&Step::Fence(2), true);
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn a_prepared_target_ends_with_its_grant() {
    let Some(mut rig) = Rig::new(1) else { return };
    let (class, parts) = (TrafficClass::Latency, [(1, to(0, 8))]);
    let key = |rig: &mut Rig| {
        assert_eq!(rig.scatter(&parts, class, true), [(1, 1, None)]);
        SCRIPT.with_borrow_mut(|script| script.messages.pop().unwrap().destination.2)
    };
    let before = key(&mut rig);
    rig.grant(1, 8);
    assert_eq!(key(&mut rig), before + 16);
    rig.link.remove_remote(Rank(1), RegionKey(0));
    let [(0, 0, Some(why))] = &rig.scatter(&parts, class, true)[..] else {
        panic!("it was posted")
    };
    assert!(why.contains("region 0 was not granted"), "{why}");
}

#[test]
#[cfg_attr(miri, ignore = "miri loads no library")]
fn a_prepared_source_ends_with_its_scatter() {
    let Some(mut rig) = Rig::new(1) else { return };
    let (class, parts) = (TrafficClass::Latency, [(1, to(0, 8))]);
    for place in 1..4 {
        let memory = Arc::new(Memory::shared(BYTES as usize).unwrap());
        rig.link.deregister(RegionKey(0));
        rig.link.register(RegionKey(0), &memory).unwrap();
        SCRIPT.with_borrow_mut(|script| script.sources = memory.address());
        assert_eq!(rig.scatter(&parts, class, true), [(1, 1, None)], "in place {place}");
        let message = SCRIPT.with_borrow_mut(|script| script.messages.pop().unwrap());
        assert_eq!(message.source, (100, 8));
    }
}
