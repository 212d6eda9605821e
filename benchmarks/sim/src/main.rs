//! Measures the simulator on the collectives whose speed is promised.
//!
//! - `executor.rs`: schedules through `weft-predict`, as `weft sim` runs them
//! - `engine.rs`: the same messages straight on `weft-netsim`, to see what is whose
//! - `platform.rs`: links, routes and messages in a file, for other simulators

mod engine;
mod executor;
mod platform;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::json;
use std::path::PathBuf;
use weft_predict::SplitMix64;

type Failure = Box<dyn std::error::Error>;

/// Measure the simulator on this machine.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate an all-reduce, and print what it came to and what it cost as a JSON line
    Run {
        #[command(flatten)]
        case: Case,
        /// How
        #[arg(long, value_enum, default_value = "executor")]
        through: Through,
        /// How often in this process; each run is from the description on
        #[arg(long, default_value_t = 1)]
        repeat: u32,
    },
    /// Write the network, its routes and the messages to a file
    Export {
        #[command(flatten)]
        case: Case,
        /// The file
        file: PathBuf,
    },
}

/// An all-reduce on a network. Only links cost time, nothing at the ranks.
#[derive(Args, Clone)]
pub struct Case {
    /// The network's short form
    #[arg(long, default_value = "fat-tree:leaves=32,spines=16,hosts=16,gbps=100,latency_us=0.5")]
    topology: String,
    /// `static`, `ecmp` or `unique`
    #[arg(long, default_value = "static")]
    routing: String,
    /// ECMP's seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// `ring`, `hd` or `hdrm`
    #[arg(long, default_value = "ring")]
    algorithm: String,
    /// Ranks
    #[arg(long, default_value_t = 512)]
    ranks: u32,
    /// Bytes of the vector
    #[arg(long, default_value_t = 256 << 20)]
    bytes: u64,
    /// Put ranks on endpoints in a random order of this seed, so that neighbours are far apart
    #[arg(long)]
    shuffle: Option<u64>,
}

/// What runs a case.
#[derive(Clone, Copy, ValueEnum)]
enum Through {
    /// `weft-predict`.
    Executor,
    /// Bookkeeping by hand on `weft-netsim`.
    Engine,
}

/// What a run came to.
pub struct Found {
    time_s: f64,
    /// Processor time of reading and building the network, and of all after that.
    setup_cpu_s: f64,
    cpu_s: f64,
    flows: u64,
    max_link_load: u32,
}

fn main() -> Result<(), Failure> {
    match Arguments::parse().command {
        Command::Run { case, through, repeat } => {
            for _ in 0..repeat {
                let found = match through {
                    Through::Executor => executor::run(&case)?,
                    Through::Engine => engine::run(&case)?,
                };
                let line = json!({
                    "time_s": found.time_s,
                    "setup_cpu_s": found.setup_cpu_s,
                    "cpu_s": found.cpu_s,
                    "peak_mib": peak_mib(),
                    "flows": found.flows,
                    "max_link_load": found.max_link_load,
                });
                println!("{line}");
            }
        }
        Command::Export { case, file } => platform::export(&case, &file)?,
    }
    Ok(())
}

impl Case {
    /// The endpoint of each rank, or nothing if the network's own order is meant.
    fn shuffled(&self, endpoints: u32) -> Option<Vec<u32>> {
        let mut random = SplitMix64::new(self.shuffle?);
        let mut order: Vec<u32> = (0..endpoints).collect();
        for left in (2..=order.len()).rev() {
            order.swap(left - 1, (random.bits() % left as u64) as usize);
        }
        order.truncate(self.ranks as usize);
        Some(order)
    }
}

/// The most memory that this process has had, in MiB; 0 where the system does not say.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) >> 10
}
