//! Collectives over shm and tcp, between threads and between processes.

#[path = "common/communicators.rs"]
mod communicators;
#[path = "collectives/ends.rs"]
mod ends;
#[path = "collectives/placement.rs"]
mod placement;
#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;
#[path = "collectives/reads.rs"]
mod reads;
#[path = "collectives/reduction_threads.rs"]
mod reduction_threads;
#[path = "collectives/reproducible.rs"]
mod reproducible;
#[path = "collectives/results.rs"]
mod results;
#[path = "collectives/short.rs"]
mod short;
#[path = "collectives/threads.rs"]
mod threads;
#[path = "collectives/tuner.rs"]
mod tuner;

use std::time::Duration;
use weft_collectives::{
    Algorithm, Call, CallId, Collective, Collectives, CollectivesConfig, Element, Options,
    Reduction, RunError, Scale,
};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Communicator, ProviderKind, Time, clock};

const KINDS: [ProviderKind; 2] = [ProviderKind::Shm, ProviderKind::Tcp];
/// Timeout above any step's time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// A rank with collectives.
struct Member {
    communicator: Communicator,
    collectives: Collectives,
}

impl Member {
    fn new(communicator: Communicator, config: CollectivesConfig) -> Member {
        let collectives = Collectives::connect(&communicator, config, soon()).unwrap();
        Member { communicator, collectives }
    }

    fn rank(&self) -> usize {
        self.communicator.rank().0 as usize
    }

    /// Starts a call on memory that stays valid and untouched until it ends.
    fn start(&self, call: &Call) -> Result<CallId, RunError> {
        // SAFETY: by this function's contract, which the tests keep.
        unsafe { self.collectives.start(&mut self.communicator.access(), call) }
    }

    fn is_done(&self, id: CallId) -> Result<bool, RunError> {
        self.collectives.is_done(&mut self.communicator.access(), id)
    }

    fn wait_for(&self, id: CallId, patience: Duration) -> Result<(), RunError> {
        let (mut never, deadline) = (|| false, clock::now().after(patience));
        let mut options = self.communicator.wait_options(deadline, &mut never);
        self.collectives.wait(&mut self.communicator.access(), id, &mut options)
    }

    fn run(&self, call: &Call) -> Result<(), RunError> {
        self.wait_for(self.start(call)?, PATIENCE)
    }

    /// Sum of a vector over all ranks, in place.
    fn sum(&self, vector: &mut [i64]) -> Result<(), RunError> {
        self.run(&sum_of(vector))
    }

    fn barrier(&self) -> Result<(), weft_fabric::Error> {
        let mut never = || false;
        self.communicator.barrier(&mut self.communicator.wait_options(soon(), &mut never))
    }

    fn close(&self) -> Result<(), RunError> {
        let mut never = || false;
        let mut options = self.communicator.wait_options(soon(), &mut never);
        self.collectives.close(&self.communicator, &mut options)
    }
}

/// In-place vector all-reduce.
fn sum_of(vector: &mut [i64]) -> Call {
    Call {
        collective: Collective::AllReduce,
        element: Element::I64,
        reduction: Reduction::Sum,
        scale: Scale::None,
        elements: vector.len() as u64,
        input: vector.as_ptr().cast(),
        output: vector.as_mut_ptr().cast(),
        algorithm: None,
    }
}

/// Runs `rank` on `size` ranks with collectives, each on a separate thread; all close together.
fn on_threads(
    size: u32,
    kind: ProviderKind,
    config: CollectivesConfig,
    rank: impl Fn(&Member) + Send + Sync,
) {
    communicators::communicators(size, kind, None, |communicator| {
        let member = Member::new(communicator, config);
        rank(&member);
        member.close().unwrap();
    });
}

/// A rank's vector; equal for equal arguments.
fn vector(length: usize, seed: u64, rank: usize) -> Vec<i64> {
    let mut random = SplitMix64::new(seed ^ (rank as u64) << 32);
    (0..length).map(|_| random.bits() as i64).collect()
}

/// Sum of all ranks' vectors.
fn sum_of_all(length: usize, seed: u64, ranks: usize) -> Vec<i64> {
    let mut sum = vec![0i64; length];
    for rank in 0..ranks {
        let vector = vector(length, seed, rank);
        sum.iter_mut().zip(vector).for_each(|(sum, one)| *sum = sum.wrapping_add(one));
    }
    sum
}

/// Algorithms for a collective with options that any rank count takes.
fn algorithms(collective: Collective) -> Vec<(Algorithm, Options)> {
    Algorithm::of(collective).iter().map(|algorithm| (*algorithm, Options::default())).collect()
}
