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
    /// Five of `of` worlds fare badly, one in each way, if they have two ranks or more. `ends` are all ranks, in
    /// a random order.
    pub fn draw(random: &mut Random, of: u64, ends: &[Rank]) -> Fate {
        match (random.below(of), ends) {
            (0, [a, _, ..]) => Fate::Killed(*a),
            (1, [a, b, ..]) => Fate::Cut(*a, *b),
            (2, _) => Fate::FailedParts,
            (3, _) => Fate::Paused,
            (4, [a, _, ..]) => Fate::Silent(*a),
            _ => Fate::Well,
        }
    }

    /// Whether `rank`, which is not done, may say that the group was poisoned by this one. A rank that was
    /// given up while it was paused finds that everybody has closed the connection, and says so.
    pub fn explains(self, rank: Rank, blamed: Option<Rank>) -> bool {
        match self {
            Fate::Killed(killed) => blamed == Some(killed),
            Fate::Cut(a, b) => blamed == Some(a) || blamed == Some(b),
            Fate::FailedParts => blamed.is_some(),
            Fate::Silent(silent) => silent == rank || blamed == Some(silent),
            Fate::Well | Fate::Paused => false,
        }
    }

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
