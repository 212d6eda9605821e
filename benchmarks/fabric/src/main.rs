//! Fabric benchmarks, compared with the bare operations below it.
//!
//! - `group.rs`: ranks as processes that run this program
//! - `arena.rs`: benchmark memory, slots, and the check on every byte
//! - `transfer/`: latency and throughput between two ranks
//! - `crowd.rs`, `idle.rs`: more ranks than cores, and ranks that wait
//! - `threads.rs`: threads that share a rank's communicator
//! - `messages.rs`: tagged messages between two ranks
//! - `collectives.rs`: collectives back to back, by size; `filled.rs`: with vectors written before each call
//! - `pairs.rs`: pair groups: formation, idle pairs, a process burst
//! - `dispatch/`: query dispatch between two processes
//! - `soak.rs`: counted writes with mixed sizes for a given time
//! - `posting.rs`: verbs posting cost over a null device
//! - `proxy.rs`: puts by a proxy over a null device
//! - `page_lists.rs`: page lists between two GPUs
//! - `instructions.rs`: fixed work for callgrind
//! - `null.rs`: device that moves no bytes
//! - `statistics.rs`, `table.rs`: percentiles, and tables with them

mod arena;
mod collectives;
mod crowd;
mod dispatch;
mod filled;
mod group;
mod idle;
mod instructions;
mod messages;
mod null;
mod page_lists;
mod pairs;
mod posting;
mod proxy;
mod soak;
mod statistics;
mod table;
mod threads;
mod transfer;

use clap::{Parser, Subcommand, ValueEnum};
use weft_fabric::ProviderKind;

/// Weft fabric benchmarks on this machine.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Latency and throughput between two processes, compared with bare operations
    Transfer(transfer::Options),
    /// Round trips among more ranks than cores
    Crowd(crowd::Options),
    /// Core share that a waiting rank takes, and the wake-up latency
    Idle(idle::Options),
    /// Writes beside another thread's wait, and threads that write and wait at once
    Threads(threads::Options),
    /// Tagged messages between two processes: latency and throughput
    Messages(messages::Options),
    /// Collectives back to back: time per call by size
    Collectives(collectives::Options),
    /// Collectives on vectors that are written before each call and read after it
    Filled(filled::Options),
    /// Pair groups: formation time, idle pair cost, a process burst
    Pairs(pairs::Options),
    /// Query dispatch between two processes, compared with bare loops
    Dispatch(dispatch::Options),
    /// Counted writes with mixed sizes, with checks on counts, bytes and memory
    Soak(soak::Options),
    /// Posting cost in the provider verbs over a null device
    Posting(posting::Options),
    /// Puts by a proxy over a null device
    Proxy(proxy::Options),
    /// Page lists between two GPUs over copy engines, compared with one copy
    PageLists(page_lists::Options),
    /// Fixed operation counts, for callgrind
    Instructions(instructions::Options),
}

/// Path between ranks.
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
    /// RDMA NICs, chosen by the environment.
    Verbs,
}

impl Path {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Path::Shm => "shm",
            Path::Tcp => "tcp",
            Path::OfiTcp => "ofi-tcp",
            Path::OfiShm => "ofi-shm",
            Path::Verbs => "verbs",
        }
    }

    /// Provider for the path.
    pub fn provider(self) -> ProviderKind {
        match self {
            Path::Shm => ProviderKind::Shm,
            Path::Tcp => ProviderKind::Tcp,
            Path::OfiTcp | Path::OfiShm => ProviderKind::Ofi,
            Path::Verbs => ProviderKind::Verbs,
        }
    }

    /// Provider within libfabric.
    pub fn ofi_provider(self) -> Option<&'static str> {
        match self {
            Path::OfiTcp => Some("tcp;ofi_rxm"),
            Path::OfiShm => Some("shm"),
            Path::Shm | Path::Tcp | Path::Verbs => None,
        }
    }
}

/// Result with an error message for the user.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> std::process::ExitCode {
    let outcome = match Arguments::parse().benchmark {
        Benchmark::Transfer(options) => transfer::run(&options),
        Benchmark::Crowd(options) => crowd::run(&options),
        Benchmark::Idle(options) => idle::run(&options),
        Benchmark::Threads(options) => threads::run(&options),
        Benchmark::Messages(options) => messages::run(&options),
        Benchmark::Collectives(options) => collectives::run(&options),
        Benchmark::Filled(options) => filled::run(&options),
        Benchmark::Pairs(options) => pairs::run(&options),
        Benchmark::Dispatch(options) => dispatch::run(&options),
        Benchmark::Soak(options) => soak::run(&options),
        Benchmark::Posting(options) => posting::run(&options),
        Benchmark::Proxy(options) => proxy::run(&options),
        Benchmark::PageLists(options) => page_lists::run(&options),
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
