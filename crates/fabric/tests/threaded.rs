//! The adaptor that gives a provider a thread, around a small provider in memory and around shm.

mod common;

use common::{AllGather, Member, PATIENCE, on_processes, on_threads, process_gather, waiting};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weft_fabric::lane_table::LaneTable;
use weft_fabric::memory::Memory;
use weft_fabric::provider::{Capabilities, Group, Posted, Sink, Work};
use weft_fabric::providers::{ShmConfig, ShmProvider, TcpConfig, TcpProvider, Threaded};
use weft_fabric::{
    Cause, Error, Event, Lane, PartRule, Poison, Provider, ProviderKind, Rank, RegionKey, Result,
    Time, clock,
};

/// One part on its way.
struct Part {
    from: Rank,
    lane: Lane,
    bytes: Vec<(RegionKey, u64, Vec<u8>)>,
}

/// Where parts for one rank arrive.
struct Mailbox {
    parts: Mutex<VecDeque<Part>>,
    wake: OwnedFd,
}

type Network = Arc<Vec<Mailbox>>;

/// Parts that a mailbox holds; then posts to it find the queue full.
const CAPACITY: usize = 3;

fn network(size: u32) -> Network {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let mailbox =
        |_| Mailbox { parts: Mutex::new(VecDeque::new()), wake: eventfd(0, flags).unwrap() };
    Arc::new((0..size).map(mailbox).collect())
}

/// Copies parts through mailboxes. A post completes at the next poll.
struct Mail {
    me: Rank,
    network: Network,
    memories: HashMap<RegionKey, Arc<Memory>>,
    lanes: Option<Arc<LaneTable>>,
    posted: Vec<u64>,
    /// Never delivers or completes anything.
    stuck: bool,
}

fn mail(me: Rank, network: &Network, stuck: bool) -> Box<dyn Provider> {
    let (network, memories) = (network.clone(), HashMap::new());
    let mail = Mail { me, network, memories, lanes: None, posted: Vec::new(), stuck };
    Box::new(Threaded::new(Box::new(mail)).unwrap())
}

impl Provider for Mail {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }
    fn capabilities(&self) -> Capabilities {
        let parts = PartRule { max_part_bytes: 1000, max_pages_per_part: 3 };
        Capabilities { parts, registered_destination: true, inline: false }
    }
    fn address(&self) -> Vec<u8> {
        vec![self.me.0 as u8]
    }
    fn reaches(&self, _: &[u8]) -> bool {
        true
    }
    fn connect(&mut self, group: &Group<'_>) -> Result<()> {
        self.lanes = Some(group.lanes.clone());
        Ok(())
    }
    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        self.memories.insert(key, memory.clone());
        Ok(())
    }
    fn grant(&mut self, _: RegionKey, _: Rank, _: Range<u64>) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn import(&mut self, _: Rank, _: RegionKey, _: u64, _: &[u8], _: Time) -> Result<()> {
        Ok(())
    }
    fn deregister(&mut self, key: RegionKey) {
        self.memories.remove(&key);
    }
    fn post(&mut self, work: &Work<'_>, _: &mut Sink) -> std::result::Result<Posted, String> {
        if self.stuck {
            return Ok(if work.pages.is_empty() { Posted::Full } else { Posted::InFlight });
        }
        let mailbox = &self.network[work.peer.0 as usize];
        let mut parts = mailbox.parts.lock().unwrap();
        if parts.len() == CAPACITY {
            return Ok(Posted::Full);
        }
        let read = |page: &weft_fabric::Page| {
            let mut bytes = vec![0; page.length as usize];
            self.memories[&page.source].copy_out(page.source_offset as usize, &mut bytes);
            (page.destination, page.destination_offset, bytes)
        };
        let bytes = work.pages.iter().map(read).collect();
        parts.push_back(Part { from: self.me, lane: work.lane, bytes });
        self.posted.push(work.token);
        rustix::io::write(&mailbox.wake, &1u64.to_ne_bytes()).unwrap();
        Ok(Posted::InFlight)
    }
    fn flush(&mut self, _: &mut Sink) {}
    fn poll(&mut self, _: Time, sink: &mut Sink) {
        self.posted.drain(..).for_each(|token| sink.done(token));
        let (Some(lanes), mailbox) = (&self.lanes, &self.network[self.me.0 as usize]) else {
            return;
        };
        let mut parts = mailbox.parts.lock().unwrap();
        let _ = rustix::io::read(&mailbox.wake, &mut [0; 8]);
        let arrived = parts.len();
        for part in parts.drain(..) {
            for (key, offset, bytes) in part.bytes {
                self.memories[&key].copy_in(offset as usize, &bytes);
            }
            assert!(lanes.arrive(part.from, part.lane));
        }
        // A full mailbox is empty now: whoever found it so may go on.
        for other in self.network.iter().filter(|_| arrived > 0) {
            rustix::io::write(&other.wake, &1u64.to_ne_bytes()).unwrap();
        }
    }
    fn fence(&mut self, _: Rank, sink: &mut Sink) {
        self.posted.drain(..).for_each(|token| sink.failed(token, "fenced"));
    }
    fn descriptor(&self) -> Option<RawFd> {
        Some(self.network[self.me.0 as usize].wake.as_raw_fd())
    }
}

#[test]
fn random_pages_cross_a_provider_of_small_queues() {
    let network = network(3);
    on_threads(3, |rank, gather| {
        let mut member = Member::join(rank, 3, vec![mail(rank, &network, false)], gather);
        for round in 0..40 {
            member.round(21, round).unwrap();
        }
        gather(Vec::new());
    });
}

fn threaded_shm() -> Box<dyn Provider> {
    let shm = ShmProvider::new(ShmConfig { host_id: "this".into() }).unwrap();
    Box::new(Threaded::new(Box::new(shm)).unwrap())
}

fn join(rank: Rank, size: u32, gather: &mut AllGather<'_>) -> Member {
    Member::join(rank, size, vec![threaded_shm()], gather)
}

#[test]
fn random_pages_cross_shm_with_a_thread() {
    on_threads(3, |rank, gather| {
        let mut member = join(rank, 3, gather);
        for round in 0..40 {
            member.round(22, round).unwrap();
        }
        gather(Vec::new());
    });
}

#[test]
fn random_pages_cross_tcp_with_a_thread() {
    on_threads(3, |rank, gather| {
        let tcp = TcpProvider::new(TcpConfig::default()).unwrap();
        let threaded = Threaded::new(Box::new(tcp)).unwrap();
        let mut member = Member::join(rank, 3, vec![Box::new(threaded)], gather);
        for round in 0..40 {
            member.round(23, round).unwrap();
        }
        gather(Vec::new());
    });
}

#[test]
fn many_requests_at_once_fill_the_ring_and_all_complete() {
    on_threads(2, |rank, gather| {
        let mut member = join(rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        for _ in 0..3000 {
            member.engine.signal(peer, counter, 0).unwrap();
        }
        waiting(PATIENCE, Duration::ZERO, |waiter| {
            member.engine.wait(counter, &[(peer, 3000)], waiter).unwrap();
            while member.engine.statistics().requests > 0 {
                member.engine.poll(clock::now(), &mut Vec::new());
                assert!(clock::now() < waiter.deadline);
            }
        });
        gather(Vec::new());
    });
}

/// Requests that no provider ends are failed by the fence, wherever they are.
#[test]
fn a_poisoned_group_drains() {
    let network = network(2);
    on_threads(2, |rank, gather| {
        let mut member = Member::join(rank, 2, vec![mail(rank, &network, true)], gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        for _ in 0..2000 {
            member.engine.signal(peer, counter, 0).unwrap();
        }
        let poison = Poison { kind: Cause::User, rank: None, detail: "enough".into() };
        member.engine.poison(poison);
        let mut events: Vec<Event> = Vec::new();
        member.engine.poll(clock::now(), &mut events);
        assert!(matches!(events.last(), Some(Event::Poisoned(_))));
        assert_eq!(member.engine.statistics().requests, 0);
        let error = member.engine.signal(peer, counter, 0).unwrap_err();
        assert!(matches!(error, Error::Poisoned(_)), "{error}");
        gather(Vec::new());
    });
}

#[test]
fn the_thread_sleeps_when_idle_and_ends_at_once() {
    let Some(rank) = common::process_rank() else {
        let ended = on_processes("the_thread_sleeps_when_idle_and_ends_at_once", 2);
        assert!(ended.iter().all(std::result::Result::is_ok), "{ended:?}");
        return;
    };
    let member = join(rank, 2, &mut process_gather);
    let looks = 40;
    let asleep = (0..looks).filter(|_| {
        std::thread::sleep(Duration::from_millis(10));
        progress_thread().expect("there is a thread").contains(") S ")
    });
    let asleep = asleep.count();
    assert!(asleep > looks * 3 / 4, "asleep at {asleep} of {looks} looks");
    process_gather(Vec::new());
    let begin = Instant::now();
    drop(member);
    assert!(begin.elapsed() < Duration::from_secs(2));
    assert_eq!(progress_thread(), None);
}

/// What the system says of this process's progress thread.
fn progress_thread() -> Option<String> {
    std::fs::read_dir("/proc/self/task").unwrap().find_map(|entry| {
        let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        stat.contains("(weft-shm)").then_some(stat)
    })
}
