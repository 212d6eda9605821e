//! Fault injected into one rank or link of a simulated world.

use std::time::Duration;
use weft_fabric::providers::sim::{Faults, Pause};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Rank, Time};

/// Injected fault.
#[derive(Clone, Copy, Debug)]
pub enum InjectedFault {
    None,
    Killed(Rank),
    Cut(Rank, Rank),
    FailedParts,
    /// Pause shorter than the silence limit.
    Paused,
    /// Pause until its peers report it as lost; then the rank resumes.
    Silent(Rank),
}

/// Maximum length, in nanoseconds, of a pause without effect.
const SHORT: u64 = 400_000;
/// Silence after which peers report a rank as lost.
const SILENCE: Duration = Duration::from_micros(400);

impl InjectedFault {
    /// Draws a fault in five of `of` worlds of two ranks or more, one of each kind. `ends`: all ranks, in
    /// random order.
    pub fn draw(random: &mut SplitMix64, of: u64, ends: &[Rank]) -> InjectedFault {
        match (random.below(of), ends) {
            (0, [a, _, ..]) => InjectedFault::Killed(*a),
            (1, [a, b, ..]) => InjectedFault::Cut(*a, *b),
            (2, _) => InjectedFault::FailedParts,
            (3, _) => InjectedFault::Paused,
            (4, [a, _, ..]) => InjectedFault::Silent(*a),
            _ => InjectedFault::None,
        }
    }

    /// True if this fault explains that unfinished `rank` names `blamed`. A rank that was reported as lost
    /// during a pause finds all connections closed, and names any peer.
    pub fn explains(self, rank: Rank, blamed: Option<Rank>) -> bool {
        match self {
            InjectedFault::Killed(killed) => blamed == Some(killed),
            InjectedFault::Cut(a, b) => blamed == Some(a) || blamed == Some(b),
            InjectedFault::FailedParts => blamed.is_some(),
            InjectedFault::Silent(silent) => silent == rank || blamed == Some(silent),
            InjectedFault::None | InjectedFault::Paused => false,
        }
    }

    /// Adds the fault to those of a world with `ranks` ranks.
    pub fn add_to(self, faults: &mut Faults, ranks: u32, at: Time, random: &mut SplitMix64) {
        let network = random.chance(0.5);
        let mut pause = |rank, length| {
            let length = Duration::from_nanos(length);
            faults.pauses.push(Pause { at, rank, length, network });
        };
        match self {
            InjectedFault::Killed(rank) => faults.kills.push((at, rank)),
            InjectedFault::Cut(a, b) => faults.cuts.push((at, a, b)),
            InjectedFault::Paused => {
                pause(Rank(random.below(ranks.into()) as u32), random.below(SHORT))
            }
            InjectedFault::Silent(rank) => {
                // It resumes before, while or after its peers report it as lost.
                pause(rank, random.below(2_000_000));
                faults.silence = Some(SILENCE);
            }
            InjectedFault::None | InjectedFault::FailedParts => {}
        }
    }
}
