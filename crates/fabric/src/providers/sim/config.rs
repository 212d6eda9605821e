//! World configuration, and faults.

use crate::network_model::{LatencyBandwidth, NetworkModel};
use crate::parts::PartRule;
use crate::types::Time;
use std::time::Duration;
use weft_control::Rank;

/// Injected faults and how often they occur; none by default. For example,
/// `Faults { fail: 0.01, ..Faults::default() }` fails one part in a hundred.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Maximum delay between post and departure; parts overtake each other.
    pub reorder: Duration,
    /// Probability that a post starts a pause on the rank.
    pub stall: f64,
    /// Maximum length of such a pause. A paused rank is not polled; no bytes leave or reach it.
    pub stall_for: Duration,
    /// Probability that the source is read after the post: at departure or just before arrival.
    pub late_source: f64,
    /// Probability that the completion precedes the arrival.
    pub early_completion: f64,
    /// Maximum additional delay for a completion.
    pub completion_delay: Duration,
    /// Probability that a post reports a full queue although it has room.
    pub full: f64,
    /// Probability that a part fails: the lane is not raised, some bytes may have landed.
    pub fail: f64,
    /// Number of a part that always fails; the first posted part is number 1.
    pub failing_part: Option<u64>,
    /// Times at which ranks die.
    pub kills: Vec<(Time, Rank)>,
    /// Times at which links break in both directions: each part between the two ranks fails from then on.
    pub cuts: Vec<(Time, Rank, Rank)>,
    /// Temporary rank stops, as by SIGSTOP.
    pub pauses: Vec<Pause>,
    /// Pause length after which peers report the rank as lost, although it may resume. `None`: never.
    pub silence: Option<Duration>,
    /// Maximum delay until a peer's death, silence or fence is noticed.
    pub detection: Duration,
}

/// Temporary stop on one rank.
#[derive(Clone, Debug)]
pub struct Pause {
    /// Time at which the pause starts.
    pub at: Time,
    /// Rank that pauses.
    pub rank: Rank,
    /// Time without polls.
    pub length: Duration,
    /// True: the network stops too. False: posted parts leave and parts toward the rank land meanwhile,
    /// as on a NIC that needs no process.
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

/// [`super::World`] configuration.
pub struct WorldConfig {
    /// World size.
    pub ranks: u32,
    /// Seed for all draws (SplitMix64).
    pub seed: u64,
    /// Injected faults.
    pub faults: Faults,
    /// Transfer timing.
    pub model: Box<dyn NetworkModel>,
    /// Parts in flight from one rank to another before a post finds the queue full.
    pub queue_parts: u32,
    /// Bytes in flight, likewise. A larger part is accepted by an empty queue.
    pub queue_bytes: u64,
    /// Rule by which writes are cut, on all routes.
    pub parts: PartRule,
    /// Allows two uses that protocols may order by other writes: writes to bytes that have landed, before
    /// the owner's credit; changes to the source after the part has landed, before the completion. By
    /// default they are violations.
    pub reuse: bool,
}

impl WorldConfig {
    /// Configuration without faults, with 64-part queues and uncut writes.
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
