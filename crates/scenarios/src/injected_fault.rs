//! Fault injected into one rank or link in a simulated world.

use std::time::Duration;
use weft_fabric::providers::sim::{Faults, Pause};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Rank, Time};

/// Injected fault.
#[derive(Clone, Copy, Debug)]
pub enum InjectedFault {
    /// No fault: every rank is done in the end.
    None,
    /// The rank dies.
    Killed(Rank),
    /// The link between two ranks breaks.
    Cut(Rank, Rank),
    /// Parts fail with this probability.
    FailedParts(f64),
    /// Pause shorter than the silence limit.
    Paused,
    /// Pause until peers report the rank as lost; then it resumes.
    Silent(Rank),
}

/// Maximum length, in nanoseconds, for a pause without effect.
const SHORT: u64 = 400_000;
/// Silence after which peers report a rank as lost.
const SILENCE: Duration = Duration::from_micros(400);

impl InjectedFault {
    /// Draws a fault in five out of `of` worlds with two ranks or more, one for each kind. `ends`: all
    /// ranks, in random order; `fail`: the probability for [`InjectedFault::FailedParts`].
    pub fn draw(random: &mut SplitMix64, of: u64, ends: &[Rank], fail: f64) -> InjectedFault {
        match (random.below(of), ends) {
            (0, [a, _, ..]) => InjectedFault::Killed(*a),
            (1, [a, b, ..]) => InjectedFault::Cut(*a, *b),
            (2, _) => InjectedFault::FailedParts(fail),
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
            InjectedFault::FailedParts(_) => blamed.is_some(),
            InjectedFault::Silent(silent) => silent == rank || blamed == Some(silent),
            InjectedFault::None | InjectedFault::Paused => false,
        }
    }

    /// True if this fault may end a rank.
    pub fn is_loss(self) -> bool {
        !matches!(self, InjectedFault::None | InjectedFault::Paused)
    }

    /// Adds the fault to a world with `ranks` ranks.
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
                // It resumes before, while or after peers report it as lost.
                pause(rank, random.below(2_000_000));
                faults.silence = Some(SILENCE);
            }
            InjectedFault::FailedParts(fail) => faults.fail = fail,
            InjectedFault::None => {}
        }
    }
}

/// Repeats a run with a fault just before each event: a rank is killed, cut off, paused or silent.
///
/// - `moments`: event times in the run without a fault.
/// - `ends`: the rank at fault and the link to cut, by event number; see [`in_turn`].
/// - `run`: runs the scenario with a fault at a time.
///
/// # Errors
/// The first wrong run's fault, time and error.
pub fn before_each_event(
    seed: u64,
    moments: Vec<Time>,
    ends: impl Fn(u32) -> (Rank, [Rank; 2]),
    run: impl Fn(InjectedFault, Time, &mut SplitMix64) -> Result<(), String>,
) -> Result<(), String> {
    let mut random = SplitMix64::new(!seed);
    for (event, at) in (0..).zip(moments) {
        let (rank, [a, b]) = ends(event);
        for fault in [
            InjectedFault::Killed(rank),
            InjectedFault::Cut(a, b),
            InjectedFault::Paused,
            InjectedFault::Silent(rank),
        ] {
            run(fault, at, &mut random)
                .map_err(|wrong| format!("{fault:?} at {} ns: {wrong}", at.0))?;
        }
    }
    Ok(())
}

/// One rank after another, each with the link to the next.
pub fn in_turn(ranks: u32) -> impl Fn(u32) -> (Rank, [Rank; 2]) {
    move |event| {
        let link = [event, event + 1].map(|number| Rank(number % ranks));
        (link[0], link)
    }
}
