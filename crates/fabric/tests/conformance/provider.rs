//! Providers under test: device constructors, and guarantees.

use crate::common::{
    self, AllGather, Limits, Member, MemberConfig, MemberDevices, PATIENCE, on_processes_with,
    on_threads, process_gather, waiting,
};
use crate::is_long;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::copy::Twin;
use weft_fabric::providers::sim::World;
use weft_fabric::providers::verbs::{TwinConfig, TwinNic};
use weft_fabric::providers::{
    CopyBackend, CopyDevice, HostileConfig, HostileDevice, OfiConfig, OfiDevice, OfiProvider,
    ShmConfig, ShmDevice, StagedConfig, StagedDevice, StagedMode, TcpConfig, TcpDevice,
    VerbsChoice, VerbsConfig, VerbsDevice, ofi,
};
use weft_fabric::{Device, Rank, WaitOptions};

/// Device, or the reason why it is missing.
pub type Opened = Result<Arc<dyn Device>, &'static str>;

/// Provider under test.
#[derive(Clone, Copy)]
pub struct Provider {
    /// Test module in this binary.
    pub name: &'static str,
    /// Constructor for a rank's device in a shape.
    pub device: fn(Rank, Shape) -> Opened,
    /// Devices that regions lie on.
    pub places: MemberDevices,
    /// Ranks may be processes.
    pub processes: bool,
    /// Ranks may be threads in one process.
    pub threads: bool,
    /// True if a killed rank never blocks the others.
    pub survives_kills: bool,
    /// World that kills and stops ranks, where ranks are not processes.
    pub world: Option<fn() -> World>,
    /// Connecting waits for a response from each peer, so it fails where one rejects it.
    pub answers: bool,
    /// An introduction decides which process a rank connects to; otherwise only the address does.
    pub introductions_identify: bool,
    /// Credited bytes stay unchanged until they are written again.
    pub keeps_credited_bytes: bool,
    /// A killed peer poisons the group although no control plane reports it.
    pub notices_death: bool,
    /// A post may complete on return, so a request may have ended although the peer sleeps.
    pub may_be_done_at_once: bool,
    /// Longest tested write.
    pub longest: usize,
}

/// Environment variable: which [`Provider::on_ranks`] call a process runs, by number.
const CALL: &str = "WEFT_TEST_CALL";

thread_local! {
    /// Case that this thread, or the rank on it, runs.
    pub static CASE: Cell<&'static str> = const { Cell::new("") };
    /// [`Provider::on_ranks`] calls in it so far.
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

impl Provider {
    /// Provider for ranks that may be processes, with regions in host memory.
    pub const fn new(name: &'static str, device: fn(Rank, Shape) -> Opened) -> Provider {
        Provider {
            name,
            device,
            places: MemberDevices { source: None, inbox: None },
            processes: true,
            threads: true,
            survives_kills: true,
            world: None,
            answers: true,
            introductions_identify: true,
            keeps_credited_bytes: true,
            notices_death: false,
            may_be_done_at_once: true,
            longest: 1 << 30,
        }
    }
}

/// Device configuration for a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    Default,
    /// Queue for this many parts toward a peer.
    Queue(usize),
    /// Limits that differ from rank to rank.
    Uneven,
}

impl Provider {
    /// True if there are devices in this shape; otherwise prints the reason.
    pub fn has(&self, shape: Shape) -> bool {
        (self.device)(Rank(0), shape)
            .map_err(|why| println!("skipped: {} {shape:?}: {why}", self.name))
            .is_ok()
    }

    /// True if ranks may be processes; otherwise prints the reason.
    pub fn has_processes(&self) -> bool {
        if !self.processes {
            println!("skipped: {}: all ranks are threads of one process", self.name);
        }
        self.processes
    }

    /// Joins a group over devices in this shape.
    pub fn join(
        &self,
        shape: Shape,
        joining: MemberConfig,
        rank: Rank,
        size: u32,
        gather: &mut AllGather<'_>,
    ) -> Member {
        let device = (self.device)(rank, shape).unwrap();
        let joining = MemberConfig { places: self.places, ..joining };
        Member::join_as(joining, rank, size, &[device], gather)
    }

    /// Runs each rank in a group on a separate thread. All leave after all have returned.
    pub fn group(
        &self,
        shape: Shape,
        joining: MemberConfig,
        size: u32,
        body: impl Fn(&mut Member, &mut AllGather<'_>) + Send + Sync,
    ) {
        if !self.has(shape) {
            return;
        }
        self.on_ranks(size, |rank, gather| {
            let mut member = self.join(shape, joining, rank, size, gather);
            body(&mut member, gather);
            // Posted parts leave before a rank stops polling.
            settle(&mut member);
            gather(Vec::new());
        });
    }

    /// Runs each rank on a separate thread, or in a separate process where threads cannot be ranks. There
    /// the case runs again in each process, which executes only this call.
    pub fn on_ranks(&self, size: u32, body: impl Fn(Rank, &mut AllGather<'_>) + Send + Sync) {
        if self.threads {
            let case = CASE.get();
            return on_threads(size, |rank, gather| {
                CASE.set(case);
                body(rank, gather);
            });
        }
        let call = CALLS.replace(CALLS.get() + 1).to_string();
        match common::process_rank() {
            None => {
                let total = if is_long() { 40 * PATIENCE } else { 4 * PATIENCE };
                let limits = Limits { total, ..Limits::default() };
                let name = self.test(CASE.get());
                let ended = on_processes_with(limits, &[(CALL, &call)], &name, size);
                assert!(ended.iter().all(Result::is_ok), "{ended:?}");
            }
            Some(rank) if std::env::var(CALL).as_ref() == Ok(&call) => {
                body(rank, &mut process_gather);
            }
            Some(_) => {}
        }
    }

    /// Full test name, for [`crate::common::on_processes`].
    pub fn test(&self, case: &str) -> String {
        format!("{}::{case}", self.name)
    }
}

/// Passes a barrier, so that all parts posted before have left.
pub fn settle(member: &mut Member) {
    waited(|waiter| member.engine.barrier(waiter)).unwrap();
}

/// Gives a credit and waits until it has left: the rank may not poll again.
pub fn credit(member: &mut Member, peer: Rank) {
    let credit = member.engine.credit_now(peer, member.counter).unwrap();
    waited(|waiter| member.engine.wait_for_request(credit, waiter)).unwrap();
}

/// Waits without spinning, so that each wait depends on a sleeper's wake-up.
pub fn waited<T>(wait: impl FnOnce(&mut WaitOptions<'_>) -> T) -> T {
    waiting(PATIENCE, Duration::ZERO, wait)
}

pub fn shm(_: Rank, shape: Shape) -> Opened {
    match shape {
        Shape::Default => Ok(Arc::new(ShmDevice::new(ShmConfig { host_id: "this".into() }))),
        Shape::Queue(_) => Err("a post is done when it returns; it has no queue"),
        Shape::Uneven => Err("it has no limits"),
    }
}

pub fn tcp(rank: Rank, shape: Shape) -> Opened {
    let config = match shape {
        Shape::Default => TcpConfig::default(),
        Shape::Queue(depth) => TcpConfig {
            queue_parts: depth as u32,
            queue_bytes: (depth as u64) << 10,
            max_part_bytes: 1 << 12,
            ..TcpConfig::default()
        },
        Shape::Uneven => TcpConfig {
            streams: 1 + rank.0 % 3,
            max_part_bytes: 700 << rank.0,
            queue_parts: 1 + 5 * rank.0,
            queue_bytes: 1000 << rank.0,
            ..TcpConfig::default()
        },
    };
    Ok(Arc::new(TcpDevice::new(config).unwrap()))
}

/// Copy provider over a device twin.
pub fn copy_twin(rank: Rank, shape: Shape) -> Opened {
    let device = CopyDevice::over(move || Ok(Box::new(Twin::new(rank.0.into()))), "this");
    match shape {
        Shape::Default => Ok(Arc::new(device)),
        Shape::Queue(depth) => Ok(Arc::new(device.with_limits(depth, Duration::from_secs(5)))),
        Shape::Uneven => Ok(Arc::new(device.with_limits(1 + rank.index(), PATIENCE))),
    }
}

/// `inner` in the staging wrapper, over a device twin; a queue is slots.
pub fn staged(inner: fn(Rank, Shape) -> Opened, rank: Rank, shape: Shape) -> Opened {
    staged_in(StagedMode::Always, inner, rank, shape)
}

fn staged_in(
    mode: StagedMode,
    inner: fn(Rank, Shape) -> Opened,
    rank: Rank,
    shape: Shape,
) -> Opened {
    let device = inner(rank, shape).or_else(|_| inner(rank, Shape::Default))?;
    let engines = CopyBackend::Twin { seed: rank.0.into() };
    let config = StagedConfig { mode, engines, ..StagedConfig::default() };
    let config = match shape {
        Shape::Default => config,
        Shape::Queue(depth) => {
            StagedConfig { slots: depth.min(16) as u32, slot_bytes: 1 << 12, ..config }
        }
        Shape::Uneven => StagedConfig { slots: 1 + rank.0, slot_bytes: 700 << rank.0, ..config },
    };
    Ok(Arc::new(StagedDevice::over(device, config).unwrap()))
}

pub fn staged_shm(rank: Rank, shape: Shape) -> Opened {
    staged(shm, rank, shape)
}

pub fn staged_tcp(rank: Rank, shape: Shape) -> Opened {
    staged(tcp, rank, shape)
}

/// Tcp where each rank may register GPU memory.
pub fn automatic_tcp(rank: Rank, shape: Shape) -> Opened {
    staged_in(StagedMode::Automatic { has_gpus: true }, tcp, rank, shape)
}

/// Tcp where only rank 0 may register GPU memory: the routes between all others have no slots.
pub fn automatic_tcp_beside_gpus(rank: Rank, shape: Shape) -> Opened {
    staged_in(StagedMode::Automatic { has_gpus: rank.0 == 0 }, tcp, rank, shape)
}

pub fn hostile_automatic_tcp(rank: Rank, shape: Shape) -> Opened {
    hostile(automatic_tcp, rank, shape)
}

pub fn hostile_staged_shm(rank: Rank, shape: Shape) -> Opened {
    hostile(staged_shm, rank, shape)
}

pub fn staged_hostile_tcp(rank: Rank, shape: Shape) -> Opened {
    staged(hostile_tcp, rank, shape)
}

/// `inner` in the hostile wrapper, which has a separate queue.
pub fn hostile(inner: fn(Rank, Shape) -> Opened, rank: Rank, shape: Shape) -> Opened {
    let device = inner(rank, shape).or_else(|_| inner(rank, Shape::Default))?;
    let config = HostileConfig::new(17);
    let config = match shape {
        Shape::Default => config,
        Shape::Queue(depth) => HostileConfig { depth, ..config },
        Shape::Uneven => HostileConfig { depth: 1 + rank.index(), ..config },
    };
    Ok(Arc::new(HostileDevice::over(device, config)))
}

pub fn hostile_shm(rank: Rank, shape: Shape) -> Opened {
    hostile(shm, rank, shape)
}

pub fn hostile_tcp(rank: Rank, shape: Shape) -> Opened {
    hostile(tcp, rank, shape)
}

/// Libfabric provider.
fn libfabric(provider: &str, rank: Rank, shape: Shape) -> Opened {
    ofi::library().map_err(|_| "there is no libfabric here (Debian: libfabric1)")?;
    let config = OfiConfig { provider: OfiProvider::new(provider), ..OfiConfig::default() };
    let config = match shape {
        Shape::Default => config,
        Shape::Queue(depth) => OfiConfig {
            queue_parts: depth as u32,
            max_unconsumed: (depth as u32).max(4),
            max_part_bytes: 1 << 12,
            ..config
        },
        Shape::Uneven => OfiConfig {
            queue_parts: 1 + 5 * rank.0,
            max_unconsumed: 4 << rank.0,
            max_part_bytes: 700 << rank.0,
            ..config
        },
    };
    Ok(Arc::new(OfiDevice::new(config).unwrap()))
}

pub fn ofi_tcp(rank: Rank, shape: Shape) -> Opened {
    libfabric("tcp;ofi_rxm", rank, shape)
}

pub fn ofi_shm(rank: Rank, shape: Shape) -> Opened {
    libfabric("shm", rank, shape)
}

pub fn hostile_ofi(rank: Rank, shape: Shape) -> Opened {
    hostile(ofi_tcp, rank, shape)
}

/// RDMA NIC provider, chosen by the environment.
pub fn verbs(rank: Rank, shape: Shape) -> Opened {
    let choice = VerbsChoice::from_env().unwrap();
    choice
        .check()
        .map_err(|_| "there is no active RDMA NIC here (`make rdma-lab` runs guests with some)")?;
    let config = shaped(choice.resolve(), rank, shape);
    Ok(Arc::new(VerbsDevice::new(config).unwrap()))
}

/// Verbs configuration for a shape.
fn shaped(config: VerbsConfig, rank: Rank, shape: Shape) -> VerbsConfig {
    match shape {
        Shape::Default => config,
        Shape::Queue(depth) => VerbsConfig {
            queue_requests: depth as u32,
            max_unconsumed: (depth as u32).max(4),
            max_part_bytes: 1 << 12,
            ..config
        },
        Shape::Uneven => VerbsConfig {
            queue_requests: 1 + 5 * rank.0,
            max_unconsumed: 4 << rank.0,
            max_part_bytes: 700 << rank.0,
            ..config
        },
    }
}

/// RDMA NIC provider over simulated NICs in this process: two each, one, or numbers that differ.
pub fn verbs_twin(rank: Rank, shape: Shape) -> Opened {
    let config = shaped(VerbsConfig::default(), rank, shape);
    let count = match shape {
        Shape::Default => 2,
        Shape::Queue(_) => 1,
        Shape::Uneven => 1 + rank.0 % 3,
    };
    let nics: Vec<_> = (0..count).map(|_| TwinNic::new(TwinConfig::default())).collect();
    Ok(Arc::new(VerbsDevice::over(config, &nics).unwrap()))
}

pub fn hostile_verbs_twin(rank: Rank, shape: Shape) -> Opened {
    hostile(verbs_twin, rank, shape)
}

pub fn hostile_verbs(rank: Rank, shape: Shape) -> Opened {
    hostile(verbs, rank, shape)
}
