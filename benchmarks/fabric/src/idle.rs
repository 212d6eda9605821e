//! The share of a core that a rank takes which waits for something that does not come.

use crate::group::{join, on_processes, waiting};
use crate::{Outcome, Path};
use clap::Args;
use std::time::{Duration, Instant};
use weft_fabric::{Error, Rank, Waiter, clock};

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

/// Measures, and shows what was found.
pub fn run(options: &Options) -> Outcome<()> {
    let shares = on_processes(2, || rank(options))?;
    if options.json {
        let line = serde_json::json!({
            "benchmark": "idle", "path": options.path.name(), "seconds": options.seconds,
            "percent_of_a_core": shares,
        });
        println!("{line}");
    } else {
        println!("A rank that waits over {} takes this share of a core:", options.path.name());
        for (rank, share) in shares.iter().enumerate() {
            println!("  rank {rank}  {share:.3} %");
        }
    }
    Ok(())
}

/// One rank's part: percent of a core that all threads of its process took.
fn rank(options: &Options) -> Outcome<f64> {
    let communicator = join(options.path, None)?;
    let peer = Rank(1 - communicator.rank().0);
    let counter = communicator.engine().counter()?;
    communicator.share(&[], &[counter], clock::now().after(Duration::from_secs(30)))?;
    let mut never = || false;
    let deadline = clock::now().after(Duration::from_secs(options.seconds));
    let spin = communicator.waiter(deadline, &mut never).spin;
    let mut engine = communicator.engine();
    let (began, taken) = (Instant::now(), processor_time());
    let mut waiter = Waiter { deadline, spin, interrupted: &mut never };
    match engine.wait(counter, &[(peer, 1)], &mut waiter) {
        Err(Error::Timeout { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(()) => return Err("something arrived that nobody sent".into()),
    }
    let share = (processor_time() - taken).as_secs_f64() / began.elapsed().as_secs_f64();
    waiting(Duration::ZERO, |waiter| engine.barrier(waiter))?;
    communicator.leave();
    Ok(share * 100.0)
}

/// What this process's threads have taken of the cores so far.
fn processor_time() -> Duration {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(at.tv_sec as u64, at.tv_nsec as u32)
}
