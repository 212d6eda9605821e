//! Core share that a waiting rank takes, and the wake-up latency.

use crate::group::{join, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{Error, Page, Rank, Time, clock};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Wait length in seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// JSON line on standard output
    #[arg(long)]
    json: bool,
}

/// One rank's measurements.
#[derive(Serialize, Deserialize)]
struct RankResult {
    /// Processor time for all threads in the process, in percent of a core.
    share: f64,
    /// Times from each peer signal to the end of this rank's wait.
    wakes_us: Vec<f64>,
}

/// Signals to a sleeping rank.
const WAKES: u64 = 200;
/// Time after which a waiting rank sleeps.
const ASLEEP: Duration = Duration::from_millis(5);

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let shares: Vec<f64> = ranks.iter().map(|result| result.share).collect();
    let wakes: Vec<f64> = ranks.into_iter().flat_map(|result| result.wakes_us).collect();
    let (p50, p99) = (percentile(&wakes, 50.0), percentile(&wakes, 99.0));
    if options.json {
        let line = serde_json::json!({
            "benchmark": "idle", "path": options.path.name(), "seconds": options.seconds,
            "percent_of_a_core": shares, "wake_p50_us": p50, "wake_p99_us": p99,
        });
        println!("{line}");
    } else {
        println!("A rank that waits over {} takes this share of a core:", options.path.name());
        for (rank, share) in shares.iter().enumerate() {
            println!("  rank {rank}  {share:.3} %");
        }
        println!("It is awake {p50:.1} us after a signal (p50), {p99:.1} us (p99).");
    }
    Ok(())
}

fn rank(options: &Options) -> Outcome<RankResult> {
    let communicator = join(options.path, Some(Duration::ZERO))?;
    let peer = Rank(1 - communicator.rank().0);
    let mut engine = communicator.engine();
    let (counter, wakes) = (engine.counter()?, engine.counter()?);
    let (source, inbox) = (engine.alloc(8)?, engine.alloc(8)?);
    drop(engine);
    let deadline = clock::now().after(Duration::from_secs(30));
    let granted = communicator.share(&[(&inbox, 0..8)], &[counter, wakes], deadline)?;
    let mut never = || false;
    let deadline = clock::now().after(Duration::from_secs(options.seconds));
    let (began, taken) = (Instant::now(), processor_time());
    let mut waiter = communicator.wait_options(deadline, &mut never);
    match communicator.wait(counter, &[(peer, 1)], &mut waiter) {
        Err(Error::Timeout { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(()) => return Err("a raise arrived without a signal".into()),
    }
    let share = (processor_time() - taken).as_secs_f64() / began.elapsed().as_secs_f64();
    waiting(Duration::ZERO, |waiter| communicator.barrier(waiter))?;
    let mut wakes_us = Vec::new();
    for round in 0..WAKES {
        if communicator.rank() == Rank(0) {
            std::thread::sleep(ASLEEP);
            source.memory().copy_in(0, &clock::now().0.to_le_bytes());
            let (source, destination) = (source.key(), granted[peer.index()][0].key);
            let page =
                Page { source, source_offset: 0, destination, destination_offset: 0, length: 8 };
            communicator.engine().write(peer, wakes, round, &[page])?;
            waiting(Duration::ZERO, |waiter| {
                communicator.wait_for_credit(wakes, peer, round + 1, waiter)
            })?;
        } else {
            waiting(Duration::ZERO, |waiter| communicator.wait(wakes, &[(peer, 1)], waiter))?;
            let (now, mut sent) = (clock::now(), [0; 8]);
            inbox.memory().copy_out(0, &mut sent);
            let sent = Time(u64::from_le_bytes(sent));
            wakes_us.push(now.since(sent).as_secs_f64() * 1e6);
            communicator.engine().credit(peer, wakes)?;
            communicator.engine().flush();
        }
    }
    waiting(Duration::ZERO, |waiter| communicator.barrier(waiter))?;
    communicator.leave();
    Ok(RankResult { share: share * 100.0, wakes_us })
}

/// Processor time for this process's threads so far.
pub fn processor_time() -> Duration {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(at.tv_sec as u64, at.tv_nsec as u32)
}
