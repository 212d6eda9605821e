//! Threads that share a rank's communicator: writes beside another thread's wait, and many threads that
//! write and wait at once.

use crate::group::{PATIENCE, join, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{
    Communicator, CounterConfig, CounterId, Page, Rank, Region, RemoteRegion, WaitOptions, clock,
};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Measured writes beside each wait kind
    #[arg(long, default_value_t = 100_000)]
    writes: u64,
    /// Threads on each rank that write and wait at once
    #[arg(long, default_value_t = 8)]
    threads: usize,
    /// Seconds for that measurement
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

/// Another thread's wait during the measured writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Beside {
    None,
    Parked,
    Spinning,
}

const BESIDE: [Beside; 3] = [Beside::None, Beside::Parked, Beside::Spinning];

/// One rank's measurements; empty for rank 1.
#[derive(Default, Serialize, Deserialize)]
struct RankResult {
    writes_ns: Vec<(Beside, Vec<f64>)>,
    rounds: Vec<u64>,
}

const WORD: u64 = 8;
/// Writes between two waits for the peer's credits.
const WINDOW: u64 = 1024;
/// Marker for a thread's last round.
const LAST: u64 = u64::MAX;

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let (path, cores) = (options.path.name(), std::thread::available_parallelism()?.get());
    let mut rows = Vec::new();
    for (beside, ns) in &ranks[0].writes_ns {
        let (p50, p99) = (percentile(ns, 50.0), percentile(ns, 99.0));
        let largest = ns.iter().copied().fold(0.0, f64::max);
        if options.json {
            let line = serde_json::json!({
                "benchmark": "write beside a wait", "path": path, "cores": cores, "wait": beside,
                "bytes": WORD, "writes": ns.len(), "p50_ns": p50, "p99_ns": p99, "largest_ns": largest,
            });
            println!("{line}");
        }
        let figures = [p50, p99, largest].map(|ns| format!("{ns:.0}"));
        rows.push([vec![format!("{beside:?}").to_lowercase()], figures.to_vec()].concat());
    }
    let rounds = &ranks[0].rounds;
    let all: u64 = rounds.iter().sum();
    let per_second = all as f64 / options.seconds as f64;
    let slowest = rounds.iter().copied().min().unwrap_or_default() as f64;
    let share = slowest * rounds.len() as f64 / all as f64;
    if options.json {
        let line = serde_json::json!({
            "benchmark": "threads", "path": path, "cores": cores, "threads": rounds.len(),
            "rounds_per_second": per_second, "slowest_of_mean": share,
        });
        println!("{line}");
        return Ok(());
    }
    println!(
        "A write of {WORD} bytes over {path}, {cores} cores, beside a wait of another thread:\n"
    );
    print!("{}", table::format(&["wait", "p50 ns", "p99 ns", "largest ns"], &rows));
    println!("\n{} threads: {per_second:.0} round trips per second in all,", rounds.len());
    println!("the slowest thread {:.0} % of the mean", share * 100.0);
    Ok(())
}

fn soon() -> weft_fabric::Time {
    clock::now().after(PATIENCE)
}

fn rank(options: &Options) -> Outcome<RankResult> {
    let communicator = join(options.path, Some(Duration::ZERO))?;
    let mut result = RankResult::default();
    for beside in BESIDE {
        let writes_ns = beside_a_wait(&communicator, beside, options.writes)?;
        result.writes_ns.push((beside, writes_ns));
    }
    result.rounds = at_once(&communicator, options)?;
    waiting(Duration::ZERO, |waiter| communicator.barrier(waiter))?;
    communicator.leave();
    Ok(result)
}

/// Nanoseconds per write while another thread waits.
fn beside_a_wait(communicator: &Communicator, beside: Beside, writes: u64) -> Outcome<Vec<f64>> {
    let mut engine = communicator.engine();
    let last = engine.counter()?;
    let config = CounterConfig { window: WINDOW as u32, ..CounterConfig::default() };
    let counter = engine.counter_with(config)?;
    let (source, inbox) = (engine.alloc(WORD as usize)?, engine.alloc(WORD as usize)?);
    drop(engine);
    let peer = Rank(1 - communicator.rank().0);
    let granted = communicator.share(&[(&inbox, 0..WORD)], &[last, counter], soon())?;
    let page = word(&source, &granted[peer.index()][0], 0);
    if communicator.rank() == Rank(1) {
        for _ in 0..writes {
            waiting(Duration::ZERO, |w| communicator.wait(counter, &[(peer, 1)], w))?;
            communicator.engine().credit(peer, counter)?;
        }
        communicator.engine().signal(peer, last, 0)?;
        return Ok(Vec::new());
    }
    let spin = if beside == Beside::Spinning { PATIENCE } else { Duration::ZERO };
    let wait = || waiting(spin, |w| communicator.wait(last, &[(peer, 1)], w));
    std::thread::scope(|scope| {
        let waiter = (beside != Beside::None).then(|| scope.spawn(wait));
        let mut taken = Vec::with_capacity(writes as usize);
        for round in 0..writes {
            if round >= WINDOW {
                let needed = round - WINDOW + 1;
                while communicator.engine().credits(counter, peer)? < needed {
                    communicator.engine().progress();
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            let begin = Instant::now();
            communicator.engine().write(peer, counter, round, &[page])?;
            taken.push(begin.elapsed().as_nanos() as f64);
        }
        match waiter {
            Some(waiter) => waiter.join().map_err(|_| "the waiting thread panicked")??,
            None => wait()?,
        }
        Ok(taken)
    })
}

fn word(source: &Region, remote: &RemoteRegion, at: u64) -> Page {
    Page {
        source: source.key(),
        source_offset: at,
        destination: remote.key,
        destination_offset: at,
        length: WORD,
    }
}

/// Round trips between each thread on rank 0 and the thread with the same number on rank 1.
fn at_once(communicator: &Communicator, options: &Options) -> Outcome<Vec<u64>> {
    let mut engine = communicator.engine();
    let counters: Vec<CounterId> =
        (0..options.threads).map(|_| engine.counter()).collect::<Result<_, _>>()?;
    let length = options.threads * WORD as usize;
    let (source, inbox) = (engine.alloc(length)?, engine.alloc(length)?);
    drop(engine);
    let peer = Rank(1 - communicator.rank().0);
    let granted = communicator.share(&[(&inbox, 0..length as u64)], &counters, soon())?;
    let until = Instant::now() + Duration::from_secs(options.seconds);
    let rounds = |thread: usize| -> weft_fabric::Result<u64> {
        let (counter, at) = (counters[thread], thread * WORD as usize);
        let page = word(&source, &granted[peer.index()][0], at as u64);
        let mut never = || false;
        let mut waiter =
            WaitOptions { deadline: soon(), spin: Duration::ZERO, interrupted: &mut never };
        for round in 0.. {
            let mut seen = [0; WORD as usize];
            let mut receive = |waiter: &mut WaitOptions<'_>| -> weft_fabric::Result<u64> {
                communicator.wait(counter, &[(peer, 1)], waiter)?;
                inbox.memory().copy_out(at, &mut seen);
                communicator.engine().credit(peer, counter)?;
                Ok(u64::from_le_bytes(seen))
            };
            let value = if communicator.rank() == Rank(1) {
                receive(&mut waiter)?
            } else if Instant::now() < until {
                round
            } else {
                LAST
            };
            communicator.wait_for_credit(counter, peer, round, &mut waiter)?;
            source.memory().copy_in(at, &value.to_le_bytes());
            let request = communicator.engine().write(peer, counter, round, &[page])?;
            communicator.wait_for_request(request, &mut waiter)?;
            if communicator.rank() == Rank(0) {
                receive(&mut waiter)?;
            }
            if value == LAST {
                communicator.engine().flush();
                return Ok(round);
            }
        }
        Ok(0)
    };
    std::thread::scope(|scope| {
        let rounds = &rounds;
        let threads: Vec<_> =
            (0..options.threads).map(|thread| scope.spawn(move || rounds(thread))).collect();
        threads
            .into_iter()
            .map(|thread| Ok(thread.join().map_err(|_| "a thread panicked")??))
            .collect()
    })
}
