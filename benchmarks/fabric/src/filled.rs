//! Collectives on vectors that are written before each call and read after it: the same calls as in
//! `peers/mpi.c`.

use crate::group::{PATIENCE, join, on_processes, pin, waiting};
use crate::{Outcome, Path};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_collectives::{
    Algorithm, Call, Collective, Collectives, CollectivesConfig, Element, Options as Tuning, Rank,
    Reduction, Scale,
};
use weft_fabric::{Communicator, clock};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Ranks
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Collectives: all-reduce, reduce-scatter, all-gather, broadcast, all-to-all
    #[arg(long, value_delimiter = ',', default_value = "all-reduce")]
    collectives: Vec<String>,
    /// Algorithm (default: chosen by size)
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Bytes in the larger one among input and output
    #[arg(long, value_delimiter = ',', default_values_t = [4])]
    sizes: Vec<usize>,
    /// Seconds per case
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,
    /// Calls per case, at most
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// Spin deadline for waits in microseconds, by default the communicator's
    #[arg(long)]
    spin_us: Option<u64>,
}

const WARM_UP: usize = 3;
const LEAST_CALLS: usize = 5;

/// One collective and size at a rank.
#[derive(Serialize, Deserialize)]
struct Case {
    collective: String,
    bytes: usize,
    wrong: u32,
    us: Vec<f64>,
}

/// Runs the benchmark and prints a JSON line for each case: the slowest rank's microseconds for each call.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(options.ranks, || rank(options))?;
    let (first, others) = ranks.split_first().ok_or("no ranks")?;
    for (number, case) in first.iter().enumerate() {
        let mut us = case.us.clone();
        let mut wrong = case.wrong;
        for other in others.iter().filter_map(|cases| cases.get(number)) {
            us.iter_mut().zip(&other.us).for_each(|(us, theirs)| *us = us.max(*theirs));
            wrong += other.wrong;
        }
        let (collective, bytes) = (case.collective.clone(), case.bytes);
        println!("{}", serde_json::to_string(&Case { collective, bytes, wrong, us })?);
    }
    Ok(())
}

fn rank(options: &Options) -> Outcome<Vec<Case>> {
    let communicator = join(options.path, options.spin_us.map(Duration::from_micros))?;
    let spin = communicator.wait_options(clock::now(), &mut || false).spin;
    if options.ranks as usize <= std::thread::available_parallelism()?.get() {
        pin(communicator.rank());
    }
    let deadline = clock::now().after(PATIENCE);
    let collectives = Collectives::connect(&communicator, CollectivesConfig::default(), deadline)?;
    let mut cases = Vec::new();
    for name in &options.collectives {
        for &bytes in &options.sizes {
            let vectors = Vectors::new(&communicator, name, bytes, options.algorithm)?;
            let mut member =
                Member { communicator: &communicator, collectives: &collectives, spin, vectors };
            let (us, wrong) = member.measure(options.seconds, options.calls)?;
            cases.push(Case { collective: name.clone(), bytes, wrong, us });
        }
    }
    waiting(spin, |waiter| collectives.close(&communicator, waiter))?;
    communicator.leave();
    Ok(cases)
}

/// Memory for a case. All-reduce and broadcast are in place.
struct Vectors {
    collective: Collective,
    ranks: usize,
    rank: usize,
    share: usize,
    elements: usize,
    algorithm: Option<Algorithm>,
    input: Vec<f32>,
    output: Vec<f32>,
}

impl Vectors {
    fn new(
        communicator: &Communicator,
        name: &str,
        bytes: usize,
        algorithm: Option<Algorithm>,
    ) -> Outcome<Vectors> {
        let ranks = communicator.world_size() as usize;
        let share = (bytes / 4 / ranks).max(1);
        let (collective, inputs, outputs) = match name {
            "all-reduce" => (Collective::AllReduce, 0, (bytes / 4).max(1)),
            "broadcast" => (Collective::Broadcast { root: Rank(0) }, 0, (bytes / 4).max(1)),
            "reduce-scatter" => (Collective::ReduceScatter, share * ranks, share),
            "all-gather" => (Collective::AllGather, share, share * ranks),
            "all-to-all" => (Collective::AllToAll, share * ranks, share * ranks),
            _ => return Err(format!("collective {name:?}: not known").into()),
        };
        Ok(Vectors {
            collective,
            ranks,
            rank: communicator.rank().index(),
            share,
            elements: inputs.max(outputs),
            algorithm,
            input: vec![0.0; inputs],
            output: vec![0.0; outputs],
        })
    }

    fn fill(&mut self, number: usize) {
        let value = (self.rank + number % 1000) as f32;
        self.output.fill(if self.input.is_empty() { value } else { -1.0 });
        self.input.fill(value);
    }

    fn call(&mut self) -> Call {
        let output = self.output.as_mut_ptr();
        let in_place = self.input.is_empty();
        let input = if in_place { output.cast_const() } else { self.input.as_ptr() };
        Call {
            collective: self.collective,
            element: Element::F32,
            reduction: Reduction::Sum,
            scale: Scale::None,
            elements: self.elements as u64,
            input: input.cast(),
            output: output.cast(),
            algorithm: self.algorithm.map(|algorithm| (algorithm, Tuning::default())),
        }
    }

    fn is_wrong(&self, number: usize) -> bool {
        let base = number % 1000;
        let sum = self.ranks * (self.ranks - 1) / 2 + self.ranks * base;
        let expected = |at: usize| match self.collective {
            Collective::AllReduce | Collective::ReduceScatter => sum as f32,
            Collective::Broadcast { .. } => base as f32,
            Collective::AllGather | Collective::AllToAll => (base + at / self.share) as f32,
        };
        let wrong = |(at, value): (usize, &f32)| *value != expected(at);
        self.output.iter().enumerate().any(wrong)
    }
}

/// A rank on one case.
struct Member<'a> {
    communicator: &'a Communicator,
    collectives: &'a Collectives,
    spin: Duration,
    vectors: Vectors,
}

impl Member<'_> {
    /// Microseconds per call, and the number of wrong results.
    fn measure(&mut self, seconds: f64, most: usize) -> Outcome<(Vec<f64>, u32)> {
        let mut longest = 0f64;
        for number in 0..WARM_UP {
            longest = longest.max(self.timed(number)?);
        }
        // All ranks make equally many calls.
        let estimates = vec![longest.to_le_bytes().to_vec(); self.vectors.ranks];
        let estimates = self.communicator.exchange(&estimates, clock::now().after(PATIENCE))?;
        let estimate = |bytes: &Vec<u8>| bytes[..].try_into().map_or(0.0, f64::from_le_bytes);
        let longest = estimates.iter().map(estimate).fold(longest, f64::max);
        let calls = ((seconds * 1e6 / longest) as usize).clamp(LEAST_CALLS, most);
        let (mut us, mut wrong) = (Vec::with_capacity(calls), 0);
        for number in 0..calls {
            us.push(self.timed(number)?);
            wrong += u32::from(self.vectors.is_wrong(number));
        }
        Ok((us, wrong))
    }

    fn timed(&mut self, number: usize) -> Outcome<f64> {
        self.vectors.fill(number);
        waiting(self.spin, |waiter| self.communicator.barrier(waiter))?;
        let begin = Instant::now();
        let access = &mut self.communicator.access();
        let call = self.vectors.call();
        // SAFETY: the vectors outlive the call, which is complete before they are read or written.
        let id = unsafe { self.collectives.start(access, &call)? };
        waiting(self.spin, |waiter| self.collectives.wait(access, id, waiter))?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    }
}
