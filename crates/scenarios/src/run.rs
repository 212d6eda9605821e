//! Programs on all ranks, and what holds after a run.

use crate::injected_fault::InjectedFault;
use std::fmt::Debug;
use std::time::Duration;
use weft_fabric::providers::sim::{Cluster, Outcome, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Cause, Engine, Error, Event, Poison, Rank, Requests, Time};

/// One rank's program.
pub trait Program {
    /// Error that ends the program.
    type Failure: Failure;

    /// Polls once, and does what is possible; true once the program is over.
    fn step(
        &mut self,
        world: &World,
        engine: &mut Engine,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Self::Failure>;

    /// Unfinished calls, for a deadlock's report.
    fn waits_for(&self) -> String;
}

/// Error that ends a rank's program.
pub trait Failure: Debug + From<Error> {
    /// The group's poison, if it is the error.
    fn poison(&self) -> Option<&Poison>;
}

/// Runs programs, in rank order, until each is over, and checks their outcomes. Returns each event's time.
///
/// # Errors
/// Text that describes the deadlock or the wrong outcomes.
pub fn run<P: Program>(
    cluster: &mut Cluster,
    programs: &mut [P],
    fault: InjectedFault,
) -> Result<Vec<Time>, String> {
    let world = cluster.world().clone();
    let mut moments = Vec::new();
    let outcomes = cluster.run(|engine, now, events, requests| {
        if moments.last() != Some(&now) {
            moments.push(now);
        }
        programs[engine.rank().index()].step(&world, engine, now, events, requests)
    });
    let outcomes = outcomes.map_err(|hang| {
        let waiting: Vec<String> = programs.iter().map(Program::waits_for).collect();
        format!("{hang}\n{}", waiting.join("\n"))
    })?;
    check_outcomes(&outcomes, fault).map(|()| moments)
}

/// Longest sleep of a program that could proceed.
const NAP: Duration = Duration::from_micros(30);

/// True while a program sleeps until a time; with probability `laziness`, it falls asleep now.
pub fn sleeps(
    until: &mut Time,
    laziness: f64,
    random: &mut SplitMix64,
    world: &World,
    now: Time,
) -> bool {
    if now >= *until && random.chance(laziness) {
        *until = now.after(random.duration(NAP));
        world.wake_at(*until);
        return true;
    }
    now < *until
}

/// Checks that each rank is done, was killed, or names the rank or link at fault.
///
/// # Errors
/// Text with the wrong outcomes.
pub fn check_outcomes<F: Failure>(
    outcomes: &[Outcome<F>],
    fault: InjectedFault,
) -> Result<(), String> {
    let is_right = |rank: Rank, outcome: &Outcome<F>| match outcome {
        Outcome::Done => true,
        Outcome::Killed => matches!(fault, InjectedFault::Killed(killed) if killed == rank),
        Outcome::Failed(failure) => failure.poison().is_some_and(|poison| {
            let is_loss = matches!(poison.kind, Cause::Lost | Cause::Failed);
            is_loss && fault.explains(rank, poison.rank)
        }),
    };
    let wrong: Vec<String> = (0..)
        .zip(outcomes)
        .filter(|(rank, outcome)| !is_right(Rank(*rank), outcome))
        .map(|(rank, outcome)| format!("rank {rank} ended in {outcome:?}"))
        .collect();
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("{fault:?}, but {}", wrong.join("; "))),
    }
}

/// Completes all parts in flight, and checks that no rank has broken a counted write rule.
///
/// # Errors
/// Text that describes the deadlock or the first violation.
pub fn settle(cluster: &mut Cluster) -> Result<(), String> {
    cluster.settle().map_err(|hang| hang.to_string())?;
    match cluster.world().violations().first() {
        Some(violation) => Err(violation.to_string()),
        None => Ok(()),
    }
}
