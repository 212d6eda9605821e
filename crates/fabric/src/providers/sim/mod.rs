//! Simulated network: many ranks in one process, under virtual time and a seed.
//!
//! [`World`] is the network with its faults; [`World::device`] is the device of one rank, for an
//! [`crate::Engine`]; [`Cluster`] creates engines, connects them and runs a driver on each. The simulator
//! reads no clock and starts no thread: [`World::step`] advances to the next event, so that equal seeds
//! give equal runs. A run with waiting ranks and an empty calendar is a deadlock ([`RunError::Deadlock`]).
//!
//! The world also checks its users. Destination bytes are random from the post of a part toward them until
//! it lands, and again from their credit on, so that a reader of uncounted bytes gets garbage. Each broken
//! rule is recorded as a [`Violation`].
//!
//! - this file: configuration, faults and the public world
//! - `state.rs`: state of the world: calendar, links, parts
//! - `part.rs`: a part from post to completion
//! - `ranks.rs`: ranks that join, pause, die and fence each other
//! - `violations.rs`: rules of the counted write, and the ledger of claimed bytes
//! - `link.rs`: [`crate::Device`] and [`crate::Link`] of a rank
//! - `cluster.rs`: engines and drivers over a world

mod cluster;
mod link;
mod part;
mod ranks;
mod state;
mod violations;

pub use cluster::{Cluster, Outcome, RunError, run_groups};
pub use violations::{Violation, ViolationKind};

use crate::device::Device;
use crate::network_model::{LatencyBandwidth, NetworkModel};
use crate::parts::PartRule;
use crate::types::Time;
use link::SimDevice;
use state::{SimEvent, State};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weft_control::Rank;

/// Injected faults and their frequencies; none by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Maximum delay between post and departure; parts overtake each other.
    pub reorder: Duration,
    /// Probability that a post starts a pause of its rank.
    pub stall: f64,
    /// Maximum length of such a pause. A paused rank is not polled; no bytes leave or reach it.
    pub stall_for: Duration,
    /// Probability that the source is read after the post: at departure or just before arrival.
    pub late_source: f64,
    /// Probability that the completion precedes the arrival.
    pub early_completion: f64,
    /// Maximum additional delay of a completion.
    pub completion_delay: Duration,
    /// Probability that a post reports a full queue although it has room.
    pub full: f64,
    /// Probability that a part fails: its lane is not raised, some of its bytes may have landed.
    pub fail: f64,
    /// Number of a part that always fails; the first posted part is number 1.
    pub failing_part: Option<u64>,
    /// Deaths of ranks, with their times.
    pub kills: Vec<(Time, Rank)>,
    /// Links that break in both directions, with their times: each part between the two fails from then on.
    pub cuts: Vec<(Time, Rank, Rank)>,
    /// Temporary stops of ranks, as by SIGSTOP.
    pub pauses: Vec<Pause>,
    /// Length of a pause after which peers report the rank as lost, although it may resume. `None`: never.
    pub silence: Option<Duration>,
    /// Maximum delay until a peer's death, silence or fence is noticed.
    pub detection: Duration,
}

/// Temporary stop of one rank.
#[derive(Clone, Debug)]
pub struct Pause {
    /// Start of the pause.
    pub at: Time,
    /// Rank that pauses.
    pub rank: Rank,
    /// Time without polls.
    pub length: Duration,
    /// True: its network stops too. False: posted parts leave and parts toward it land meanwhile, as on a
    /// NIC that needs no process.
    pub network: bool,
}

impl Faults {
    /// All faults that a correct program survives: reordering, pauses, late reads, delayed and early
    /// completions, back-pressure.
    pub fn rough() -> Faults {
        Faults {
            reorder: Duration::from_micros(20),
            stall: 0.02,
            stall_for: Duration::from_micros(200),
            late_source: 0.5,
            early_completion: 0.3,
            completion_delay: Duration::from_micros(10),
            full: 0.05,
            detection: Duration::from_micros(100),
            ..Faults::default()
        }
    }
}

/// Configuration of a [`World`].
pub struct WorldConfig {
    /// Number of ranks.
    pub ranks: u32,
    /// Seed of all draws (SplitMix64).
    pub seed: u64,
    /// Injected faults.
    pub faults: Faults,
    /// Timing of transfers.
    pub model: Box<dyn NetworkModel>,
    /// Parts in flight from one rank to another before a post finds the queue full.
    pub queue_parts: u32,
    /// Bytes in flight, likewise. A larger part is accepted by an empty queue.
    pub queue_bytes: u64,
    /// Rule by which writes are cut, on all routes.
    pub parts: PartRule,
    /// Allows two uses that protocols may order by other writes: writes to bytes that have landed, before their
    /// owner's credit; changes of the source of a part that has landed, before its completion. By default they are
    /// violations.
    pub reuse: bool,
}

impl WorldConfig {
    /// Configuration without faults, with queues of 64 parts and uncut writes.
    pub fn new(ranks: u32, seed: u64) -> WorldConfig {
        WorldConfig {
            ranks,
            seed,
            faults: Faults::default(),
            model: Box::new(LatencyBandwidth::default()),
            queue_parts: 64,
            queue_bytes: u64::MAX,
            parts: PartRule::WHOLE,
            reuse: false,
        }
    }

    /// Replaces the faults.
    pub fn with_faults(self, faults: Faults) -> WorldConfig {
        WorldConfig { faults, ..self }
    }
}

/// Network between the ranks. Clones are handles of one world.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl World {
    /// World at time zero.
    pub fn new(config: WorldConfig) -> World {
        World { state: Arc::new(Mutex::new(State::new(config))) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device of one rank.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn device(&self, rank: Rank) -> Arc<dyn Device> {
        assert!(rank.0 < self.ranks(), "{rank} is not in a world of {}", self.ranks());
        Arc::new(SimDevice::new(self.clone(), rank))
    }

    /// Number of ranks, dead ones included.
    pub fn ranks(&self) -> u32 {
        self.state().size()
    }

    /// Seed of the world.
    pub fn seed(&self) -> u64 {
        self.state().seed()
    }

    /// Current virtual time.
    pub fn now(&self) -> Time {
        self.state().now()
    }

    /// Advances to the next event and executes it; `false` with an empty calendar.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Schedules a stop of [`World::step`] at a deadline of a rank.
    pub fn wake_at(&self, time: Time) {
        self.state().schedule(time, SimEvent::Wake);
    }

    /// Kills a rank: some of its parts in flight arrive, and its peers notice after [`Faults::detection`].
    pub fn kill(&self, rank: Rank) {
        self.state().kill(rank);
    }

    /// Pauses a rank and its network until as many [`World::resume`]s.
    pub fn stop(&self, rank: Rank) {
        self.state().stop(rank);
    }

    /// Ends one pause.
    pub fn resume(&self, rank: Rank) {
        self.state().resume(rank);
    }

    /// Breaks the link between two ranks permanently.
    pub fn cut(&self, a: Rank, b: Rank) {
        self.state().cut(a, b);
    }

    /// True until the rank dies.
    pub fn is_alive(&self, rank: Rank) -> bool {
        self.state().is_alive(rank)
    }

    /// True if a rank is neither dead nor paused, and may be polled.
    pub fn is_running(&self, rank: Rank) -> bool {
        self.state().is_running(rank)
    }

    /// Recorded violations, in order.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations().to_vec()
    }

    /// Hash of all events so far. Equal seeds and equal programs give equal hashes.
    pub fn log_hash(&self) -> u64 {
        self.state().log_hash()
    }
}
