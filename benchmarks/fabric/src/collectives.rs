//! Collectives back to back: time per call by size, without PyTorch.

use crate::group::{PATIENCE, join, on_processes, pin, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::{Args, ValueEnum};
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
    /// Collectives (default: all)
    #[arg(long, value_delimiter = ',')]
    collectives: Vec<Kind>,
    /// Algorithm (default: chosen by size)
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Bytes in the whole vector; a multiple of 4 times the ranks
    #[arg(long, value_delimiter = ',', default_values_t = SIZES)]
    sizes: Vec<usize>,
    /// Calls per size, fewer for long vectors
    #[arg(long, default_value_t = 20_000)]
    calls: usize,
    /// Channels
    #[arg(long, default_value_t = CollectivesConfig::default().channels)]
    channels: u32,
    /// Bytes per channel
    #[arg(long, default_value_t = CollectivesConfig::default().channel_bytes)]
    channel_bytes: u64,
    /// Vector bytes from which writes read the vector in place
    #[arg(long)]
    in_place_bytes: Option<u64>,
    /// Threads that reduce a long vector; ranks are not pinned if there are several
    #[arg(long, default_value_t = CollectivesConfig::default().reduction_threads)]
    reduction_threads: u32,
    /// Spin deadline for waits in microseconds
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

const SIZES: [usize; 10] =
    [16, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20];
/// Most bytes over all calls with one size; this bounds the call count.
const BYTES_OF_A_SIZE: usize = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
}

/// Microseconds per call for one collective and size.
#[derive(Serialize, Deserialize)]
struct Sample {
    kind: Kind,
    bytes: usize,
    us: Vec<f64>,
}

/// Runs the benchmark and prints rank 0's times.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(options.ranks, || rank(options))?;
    let cores = std::thread::available_parallelism()?.get();
    let mut rows = Vec::new();
    for Sample { kind, bytes, us } in &ranks[0] {
        let kind = kind.to_possible_value().map_or(String::new(), |kind| kind.get_name().into());
        let [min, p50, p99] = [0.0, 50.0, 99.0].map(|percent| percentile(us, percent));
        if options.json {
            let line = serde_json::json!({
                "benchmark": "collectives", "path": options.path.name(), "cores": cores,
                "ranks": options.ranks, "channels": options.channels,
                "channel_bytes": options.channel_bytes, "collective": kind, "bytes": bytes, "calls": us.len(),
                "algorithm": options.algorithm.map(Algorithm::name),
                "min_us": min, "p50_us": p50, "p99_us": p99,
            });
            println!("{line}");
        }
        let times = [min, p50, p99].map(|us| format!("{us:.2}"));
        rows.push([vec![kind, bytes.to_string()], times.to_vec()].concat());
    }
    if !options.json {
        println!("{} ranks over {}, {cores} cores:\n", options.ranks, options.path.name());
        let headers = ["collective", "bytes", "min us", "p50 us", "p99 us"];
        print!("{}", table::format(&headers, &rows));
    }
    Ok(())
}

/// A rank with collectives.
struct Member {
    communicator: Communicator,
    collectives: Collectives,
    spin: Duration,
    tuning: Option<(Algorithm, Tuning)>,
}

fn rank(options: &Options) -> Outcome<Vec<Sample>> {
    let spin = Duration::from_micros(options.spin_us);
    let communicator = join(options.path, Some(spin))?;
    if options.reduction_threads == 1 {
        pin(communicator.rank());
    }
    let deadline = clock::now().after(PATIENCE);
    let &Options { channels, channel_bytes, in_place_bytes, reduction_threads, .. } = options;
    let config = CollectivesConfig {
        channels,
        channel_bytes,
        in_place_bytes,
        reduction_threads,
        ..CollectivesConfig::default()
    };
    let collectives = Collectives::connect(&communicator, config, deadline)?;
    let tuning = options.algorithm.map(|algorithm| (algorithm, Tuning::default()));
    let member = Member { communicator, collectives, spin, tuning };
    let kinds = match options.collectives.as_slice() {
        [] => Kind::value_variants(),
        kinds => kinds,
    };
    let mut samples = Vec::new();
    for &kind in kinds {
        for &bytes in &options.sizes {
            let count = options.calls.min(BYTES_OF_A_SIZE / bytes.max(1)).max(1);
            samples.push(Sample { kind, bytes, us: member.calls(kind, bytes, count)? });
        }
    }
    waiting(spin, |waiter| member.collectives.close(&member.communicator, waiter))?;
    member.communicator.leave();
    Ok(samples)
}

impl Member {
    /// Microseconds per call. All-reduce and broadcast are in place, as in PyTorch.
    fn calls(&self, kind: Kind, bytes: usize, count: usize) -> Outcome<Vec<f64>> {
        let ranks = self.communicator.world_size() as usize;
        let rank = self.communicator.rank().0;
        let elements = bytes / 4;
        let (mut input, mut output) = (vec![1.0f32; elements], vec![0.0f32; elements]);
        let collective = match kind {
            Kind::AllReduce => Collective::AllReduce,
            Kind::ReduceScatter => Collective::ReduceScatter,
            Kind::AllGather => Collective::AllGather,
            Kind::Broadcast => Collective::Broadcast { root: Rank(0) },
            Kind::AllToAll => Collective::AllToAll,
        };
        let in_place = matches!(kind, Kind::AllReduce | Kind::Broadcast);
        let target = if in_place { &mut input } else { &mut output };
        let to = target.as_mut_ptr();
        let call = Call {
            collective,
            element: Element::F32,
            reduction: Reduction::Max,
            scale: Scale::None,
            elements: elements as u64,
            input: if in_place { to.cast_const().cast() } else { input.as_ptr().cast() },
            output: to.cast(),
            algorithm: self.tuning,
        };
        let mut taken = Vec::with_capacity(count);
        for number in 0..count + count / 10 + 1 {
            let begin = Instant::now();
            self.call(&call)?;
            // The first ones warm up.
            if number > count / 10 {
                taken.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
        let share = if kind == Kind::ReduceScatter { elements / ranks } else { elements };
        // SAFETY: the vector with that many elements is alive, and no call is in progress.
        let result = unsafe { std::slice::from_raw_parts(to, share) };
        if result.iter().any(|value| *value != 1.0) {
            return Err(format!("rank {rank}: wrong result of {kind:?} of {bytes} bytes").into());
        }
        Ok(taken)
    }

    fn call(&self, call: &Call) -> Outcome<()> {
        let access = &mut self.communicator.access();
        // SAFETY: the memory outlives the calls, which are complete before it is read.
        let id = unsafe { self.collectives.start(access, call)? };
        waiting(self.spin, |waiter| self.collectives.wait(access, id, waiter))?;
        Ok(())
    }
}
