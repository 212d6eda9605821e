//! The share of a core that a rank takes which waits for something that does not come, and how soon it is
//! awake when something comes.

use crate::group::{join, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{Error, Page, Rank, Time, clock};

/// What to measure.
#[derive(Args)]
pub struct Options {
    /// How the ranks reach each other
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Seconds to wait
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// What one rank measured.
#[derive(Serialize, Deserialize)]
struct Found {
    /// Percent of a core that all threads of its process took.
    share: f64,
    /// From each of the peer's signals to the end of this rank's wait.
    wakes_us: Vec<f64>,
}

/// Signals to a rank that sleeps.
const WAKES: u64 = 200;
/// Long enough for a rank to sleep.
const ASLEEP: Duration = Duration::from_millis(5);

/// Measures, and shows what was found.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let shares: Vec<f64> = ranks.iter().map(|found| found.share).collect();
    let wakes: Vec<f64> = ranks.into_iter().flat_map(|found| found.wakes_us).collect();
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

fn rank(options: &Options) -> Outcome<Found> {
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
    let mut waiter = communicator.waiter(deadline, &mut never);
    match communicator.wait(counter, &[(peer, 1)], &mut waiter) {
        Err(Error::Timeout { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(()) => return Err("something arrived that nobody sent".into()),
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
    Ok(Found { share: share * 100.0, wakes_us })
}

/// What this process's threads have taken of the cores so far.
pub fn processor_time() -> Duration {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(at.tv_sec as u64, at.tv_nsec as u32)
}
