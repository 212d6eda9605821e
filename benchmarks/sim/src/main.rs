//! Simulator benchmark on all-reduces.
//!
//! - `executor.rs`: schedules on `weft-predict`, as `weft sim` runs them
//! - `engine.rs`: the same messages on bare `weft-netsim`, to separate both costs
//! - `platform.rs`: links, routes and messages in a file, for other simulators

mod engine;
mod executor;
mod platform;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::json;
use std::path::PathBuf;
use weft_control::random::SplitMix64;

type Failure = Box<dyn std::error::Error>;

/// Simulator benchmark
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate an all-reduce; prints the time and processor time as a JSON line
    Run {
        #[command(flatten)]
        case: Case,
        /// Side
        #[arg(long, value_enum, default_value = "executor")]
        through: Through,
        /// Runs in this process, each with a new network
        #[arg(long, default_value_t = 1)]
        repeat: u32,
    },
    /// Network, routes and messages as a file
    Export {
        #[command(flatten)]
        case: Case,
        /// File
        file: PathBuf,
    },
}

/// All-reduce on a network, with only link costs.
#[derive(Args, Clone)]
pub struct Case {
    /// Network in short form, e.g. bigraph:switches=16,endpoints=4
    #[arg(long, default_value = "fat-tree:leaves=32,spines=16,hosts=16,gbps=100,latency_us=0.5")]
    topology: String,
    /// `static`, `ecmp` or `unique`
    #[arg(long, default_value = "static")]
    routing: String,
    /// ECMP hash seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// `ring`, `hd` or `hdrm`
    #[arg(long, default_value = "ring")]
    algorithm: String,
    /// Ranks
    #[arg(long, default_value_t = 512)]
    ranks: u32,
    /// Vector length in bytes
    #[arg(long, default_value_t = 256 << 20)]
    bytes: u64,
    /// Seed for a random rank placement
    #[arg(long)]
    shuffle: Option<u64>,
}

/// Side that runs a case.
#[derive(Clone, Copy, ValueEnum)]
enum Through {
    /// `weft-predict`.
    Executor,
    /// Bare `weft-netsim`.
    Engine,
}

/// Run results.
pub struct Found {
    time_s: f64,
    /// Processor time to build the network, and for the run.
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
    /// Endpoint by rank; `None` for the network's own order.
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

/// This process's peak resident memory in MiB; 0 if the system does not report it.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) >> 10
}
