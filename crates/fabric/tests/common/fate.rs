//! What becomes of somebody in a simulated world.

use std::time::Duration;
use weft_fabric::providers::sim::{Faults, Pause, Random};
use weft_fabric::{Rank, Time};

/// What the world does to somebody, if it does.
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    Well,
    Killed(Rank),
    Cut(Rank, Rank),
    FailedParts,
    /// Paused, for shorter than anybody minds.
    Paused,
    /// Paused until its peers hold it for lost; then it comes back.
    Silent(Rank),
}

/// A pause this long goes unnoticed.
const SHORT: u64 = 400_000;
/// How long the peers of a rank are patient.
const SILENCE: Duration = Duration::from_micros(400);

impl Fate {
    /// Adds it to the faults of a world of so many ranks.
    pub fn befall(self, faults: &mut Faults, ranks: u32, at: Time, random: &mut Random) {
        let network = random.chance(0.5);
        let mut pause = |rank, length| {
            let length = Duration::from_nanos(length);
            faults.pauses.push(Pause { at, rank, length, network });
        };
        match self {
            Fate::Killed(rank) => faults.kills.push((at, rank)),
            Fate::Cut(a, b) => faults.cuts.push((at, a, b)),
            Fate::Paused => pause(Rank(random.below(ranks.into()) as u32), random.below(SHORT)),
            Fate::Silent(rank) => {
                // It comes back before, while or after its peers give it up.
                pause(rank, random.below(2_000_000));
                faults.silence = Some(SILENCE);
            }
            Fate::Well | Fate::FailedParts => {}
        }
    }
}
