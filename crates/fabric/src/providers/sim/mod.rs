//! Many ranks in one process, under virtual time and a seed.
//!
//! A [`World`] is the network and everything that goes wrong in it; [`World::device`] is one rank's
//! end of it, for an [`crate::Engine`] to stand on; [`Cluster`] makes the engines, connects them and
//! runs a driver on each. Nothing here reads a clock or starts a thread: [`World::step`] moves to the
//! next thing that is due, so one seed is one run, and a run in which nothing is due any more while
//! somebody still waits is a deadlock, reported as such.
//!
//! The world also watches. Destination bytes are random from the moment a part toward them is posted
//! until it lands, and again once they are credited, so that whoever reads uncounted bytes computes
//! nonsense; and what no driver may do at all is recorded as a [`Violation`].
//!
//! - this file: the world from outside, and its faults
//! - `state.rs`: the world from inside
//! - `part.rs`: a part's way from post to completion
//! - `ranks.rs`: ranks that join, pause, die and fence each other
//! - `checks.rs`: the rules and the ledger of claimed bytes
//! - `end.rs`: the [`crate::Device`] and its [`crate::Link`]
//! - `cluster.rs`: engines and drivers over a world

mod checks;
mod cluster;
mod end;
mod part;
mod random;
mod ranks;
mod state;

pub use checks::{Breach, Violation};
pub use cluster::{Cluster, Hang, Outcome, run_groups};
pub use random::Random;

use crate::device::Device;
use crate::model::{LatencyBandwidth, NetworkModel};
use crate::parts::PartRule;
use crate::types::Time;
use end::End;
use state::{Happening, State};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weft_control::Rank;

/// What goes wrong, and how often. Nothing by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Each part leaves up to this much later than it was posted, so parts overtake each other.
    pub reorder: Duration,
    /// How often a post is followed by a pause of its rank.
    pub stall: f64,
    /// The longest such pause. While it lasts the rank is not polled, and nothing leaves or reaches it.
    pub stall_for: Duration,
    /// How often the source is read later than at post: when the part leaves, or just before it lands.
    pub late_source: f64,
    /// How often a completion does not wait for the arrival.
    pub early_completion: f64,
    /// The completion comes up to this much later than it could.
    pub completion_delay: Duration,
    /// How often a post finds the queue full although it is not.
    pub full: f64,
    /// How often a part fails. Its lane is not raised; some of its bytes may have landed.
    pub fail: f64,
    /// The part of this number fails in any case; the first that is posted is number 1.
    pub failing_part: Option<u64>,
    /// Ranks that die, and when.
    pub kills: Vec<(Time, Rank)>,
    /// Links that break, both ways, and when: every part between the two fails from then on.
    pub cuts: Vec<(Time, Rank, Rank)>,
    /// Ranks that stop for a while, as by SIGSTOP.
    pub pauses: Vec<Pause>,
    /// A rank that has been paused for this long is held for lost by its peers, although it may come
    /// back. `None`: never.
    pub silence: Option<Duration>,
    /// A peer's death, its silence or its fence is noticed up to this much later.
    pub detection: Duration,
}

/// A rank that stops and comes back.
#[derive(Clone, Debug)]
pub struct Pause {
    /// When.
    pub at: Time,
    /// Who.
    pub rank: Rank,
    /// For how long it is not polled.
    pub length: Duration,
    /// Whether its network stops with it. Otherwise what it has posted leaves and what is sent to it
    /// lands meanwhile, as on a NIC that needs no process.
    pub network: bool,
}

impl Faults {
    /// Everything that a correct program survives: disorder, pauses, late reads, delayed and early completions,
    /// back-pressure.
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

/// A world to be.
pub struct WorldConfig {
    /// Number of ranks.
    pub ranks: u32,
    /// Of all chance in it.
    pub seed: u64,
    /// What goes wrong.
    pub faults: Faults,
    /// How long bytes take.
    pub model: Box<dyn NetworkModel>,
    /// Parts that may be under way from one rank to another before a post finds the queue full.
    pub queue_parts: u32,
    /// Bytes likewise. A part larger than this is taken when nothing else is under way.
    pub queue_bytes: u64,
    /// How writes are cut, on every route.
    pub parts: PartRule,
}

impl WorldConfig {
    /// A world in which nothing goes wrong, with queues of 64 parts and writes that are never cut.
    pub fn new(ranks: u32, seed: u64) -> WorldConfig {
        WorldConfig {
            ranks,
            seed,
            faults: Faults::default(),
            model: Box::new(LatencyBandwidth::default()),
            queue_parts: 64,
            queue_bytes: u64::MAX,
            parts: PartRule::WHOLE,
        }
    }

    /// The same with these faults.
    pub fn with_faults(self, faults: Faults) -> WorldConfig {
        WorldConfig { faults, ..self }
    }
}

/// The network between the ranks. Clones are handles to one world.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl World {
    /// A world at time zero.
    pub fn new(config: WorldConfig) -> World {
        World { state: Arc::new(Mutex::new(State::new(config))) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of the world that `rank`'s engine stands on. One for each rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn device(&self, rank: Rank) -> Arc<dyn Device> {
        assert!(rank.0 < self.ranks(), "{rank} is not in a world of {}", self.ranks());
        Arc::new(End::new(self.clone(), rank))
    }

    /// Number of ranks, dead ones included.
    pub fn ranks(&self) -> u32 {
        self.state().size()
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.state().seed()
    }

    /// The time now.
    pub fn now(&self) -> Time {
        self.state().now()
    }

    /// Moves on to the next thing that is due and lets it happen. `false` if nothing is due.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Makes sure that [`World::step`] stops at this time: somebody has a deadline then.
    pub fn wake_at(&self, time: Time) {
        self.state().schedule(time, Happening::Wake);
    }

    /// A rank dies: it takes no further part, what it has under way arrives or does not, and its peers
    /// notice after a while.
    pub fn kill(&self, rank: Rank) {
        self.state().kill(rank);
    }

    /// A rank pauses, its network with it, until as many [`World::resume`]s.
    pub fn stop(&self, rank: Rank) {
        self.state().stop(rank);
    }

    /// Ends a pause.
    pub fn resume(&self, rank: Rank) {
        self.state().resume(rank);
    }

    /// Breaks the link between two ranks for good.
    pub fn cut(&self, a: Rank, b: Rank) {
        self.state().cut(a, b);
    }

    /// Whether a rank has not died.
    pub fn is_alive(&self, rank: Rank) -> bool {
        self.state().is_alive(rank)
    }

    /// Whether a rank is neither dead nor paused, and so may be polled.
    pub fn is_running(&self, rank: Rank) -> bool {
        self.state().is_running(rank)
    }

    /// What was done that no program may do, in order.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations().to_vec()
    }

    /// A number that stands for everything that has happened so far. Equal seeds and equal programs
    /// give equal numbers.
    pub fn log_hash(&self) -> u64 {
        self.state().log_hash()
    }
}
