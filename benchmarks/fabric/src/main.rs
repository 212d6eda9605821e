//! Measures the fabric beside the bare operations that it stands on.
//!
//! - `group.rs`: ranks as processes: this program starts itself once for each
//! - `arena.rs`: the memory that is written, its slots, and the check of every byte
//! - `transfer/`: latency and throughput between two ranks
//! - `crowd.rs`, `idle.rs`: many ranks on few cores, and ranks with nothing to do
//! - `threads.rs`: threads of a rank that share its communicator
//! - `pairs.rs`: pair groups: forming, many idle ones, a burst of processes
//! - `soak.rs`: counted writes of mixed sizes for as long as one wants
//! - `instructions.rs`: fixed work for callgrind to count
//! - `statistics.rs`, `table.rs`: percentiles, and how they are shown

mod arena;
mod crowd;
mod group;
mod idle;
mod instructions;
mod pairs;
mod soak;
mod statistics;
mod table;
mod threads;
mod transfer;

use clap::{Parser, Subcommand, ValueEnum};
use weft_fabric::ProviderKind;

/// Measure Weft's fabric on this machine.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Latency and throughput between two processes, beside the bare operations
    Transfer(transfer::Options),
    /// Round trips among more ranks than there are cores
    Crowd(crowd::Options),
    /// The share of a core that a waiting rank takes, and how soon it is awake
    Idle(idle::Options),
    /// A write beside another thread's wait, and threads that write and wait at once
    Threads(threads::Options),
    /// Pair groups: time to form one, cost of idle ones, a burst of processes
    Pairs(pairs::Options),
    /// Counted writes of mixed sizes, every count and byte checked, memory watched
    Soak(soak::Options),
    /// Fixed numbers of operations, to be counted by callgrind
    Instructions(instructions::Options),
}

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Path {
    /// Shared memory.
    Shm,
    /// Sockets on loopback.
    Tcp,
    /// libfabric's `tcp;ofi_rxm` on loopback.
    OfiTcp,
    /// libfabric's `shm`.
    OfiShm,
}

impl Path {
    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Path::Shm => "shm",
            Path::Tcp => "tcp",
            Path::OfiTcp => "ofi-tcp",
            Path::OfiShm => "ofi-shm",
        }
    }

    /// The provider that it is.
    pub fn provider(self) -> ProviderKind {
        match self {
            Path::Shm => ProviderKind::Shm,
            Path::Tcp => ProviderKind::Tcp,
            Path::OfiTcp | Path::OfiShm => ProviderKind::Ofi,
        }
    }

    /// The provider within libfabric.
    pub fn ofi_provider(self) -> Option<&'static str> {
        match self {
            Path::OfiTcp => Some("tcp;ofi_rxm"),
            Path::OfiShm => Some("shm"),
            Path::Shm | Path::Tcp => None,
        }
    }
}

/// What a benchmark can fail with, worded for the user.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> std::process::ExitCode {
    let outcome = match Arguments::parse().benchmark {
        Benchmark::Transfer(options) => transfer::run(&options),
        Benchmark::Crowd(options) => crowd::run(&options),
        Benchmark::Idle(options) => idle::run(&options),
        Benchmark::Threads(options) => threads::run(&options),
        Benchmark::Pairs(options) => pairs::run(&options),
        Benchmark::Soak(options) => soak::run(&options),
        Benchmark::Instructions(options) => instructions::run(&options),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weft-bench-fabric: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
