//! Query dispatch between two processes, beside bare loops.
//!
//! The front end is this process, the accelerator node a second one. Every query reads other bytes from a source
//! larger than the last-level cache. An answer has the query's first 8 bytes, and for one query in [`SUMMED`] the sum
//! over all bytes; the front end compares each with the source.
//!
//! - `samples.rs`: queries and answers
//! - `service.rs`: side `weft`, the services at both ends
//! - `socket.rs`, `sockets.rs`: side `socket`, the same bytes over one connection or several
//! - `libfabric.rs`: side `libfabric`, the same bytes as bare libfabric writes
//! - `instructions.rs`: fixed work for callgrind
//! - `local.rs`: side `local`, each sample copied within the process; side `writes`, two counted writes

pub mod instructions;
mod libfabric;
mod local;
mod samples;
mod service;
mod socket;
mod sockets;

use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::Args;
use samples::Samples;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use weft_dispatch::ServiceConfig;

/// One query in this many has the sum over all bytes in the answer.
const SUMMED: u64 = 64;
/// Bytes per answer.
const ANSWER: usize = 16;
/// Bytes in front of a query and an answer, as in a slot.
const HEADER: usize = 64;
/// Environment variable: task for the second process, `SIDE BYTES ADDRESS`.
const WORK: &str = "WEFT_BENCH_DISPATCH";

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the processes
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Bytes per query
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1024, 150_528])]
    bytes: Vec<usize>,
    /// Seconds per measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Measurements per side, in turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Slots in the connection (default: 1 MiB of queries, from 32 to 512)
    #[arg(long)]
    slots: Option<u32>,
    /// Connections between the two processes, each with separate slots; queries alternate between them
    #[arg(long, default_value_t = 1)]
    connections: u32,
    /// Microseconds for which an idle service polls before it yields the core
    #[arg(long, default_value_t = 20)]
    spin_us: u64,
    /// TLS for control connections and payloads, with certificates from the environment (WEFT_TLS_*)
    #[arg(long)]
    tls: bool,
    /// Folder with the program for the side libfabric
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Sides, for example weft,socket: weft, socket, libfabric, local or writes (default: as the path has)
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

impl Options {
    fn service(&self) -> ServiceConfig {
        ServiceConfig { spin: Duration::from_micros(self.spin_us), ..ServiceConfig::default() }
    }

    fn slots(&self, bytes: usize) -> u32 {
        self.slots.unwrap_or_else(|| ((1 << 20) / bytes.max(1)).clamp(32, 512) as u32)
    }
}

/// Measurement for one side.
#[derive(Clone, Default)]
struct Measured {
    queries_per_s: f64,
    /// Round trips with one query in flight.
    round_trips_ns: Vec<f64>,
    /// Growth in this process's resident memory through the connections.
    resident_kib: Option<f64>,
    wrong: u64,
}

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    if let Ok(work) = std::env::var(WORK) {
        return work_of_child(options, &work);
    }
    let mut rows = Vec::new();
    for &bytes in &options.bytes {
        let samples = Arc::new(Samples::new(bytes)?);
        let sides: Vec<&str> = match (options.sides.as_slice(), options.path) {
            ([], Path::Shm) => vec!["weft", "local", "writes"],
            ([], Path::Tcp) => vec!["weft", "socket"],
            ([], Path::OfiTcp | Path::OfiShm) => vec!["weft", "libfabric"],
            ([], Path::Verbs) => vec!["weft"],
            (given, _) => given.iter().map(String::as_str).collect(),
        };
        let mut found = vec![Vec::new(); sides.len()];
        for _ in 0..options.rounds {
            for (side, found) in sides.iter().zip(&mut found) {
                found.push(measure(options, side, &samples)?);
            }
        }
        for (side, rounds) in sides.iter().zip(&found) {
            rows.push(report(options, bytes, side, rounds, &found[0]));
        }
    }
    if !options.json {
        let headers = ["bytes", "side", "queries/s", "ratio", "p50 us", "p99 us", "wrong"];
        print!("{}", table::format(&headers, &rows));
    }
    Ok(())
}

fn measure(options: &Options, side: &str, samples: &Arc<Samples>) -> Outcome<Measured> {
    let time = Duration::from_secs_f64(options.seconds);
    let measured = match side {
        "weft" => service::measure(options, samples, time),
        "socket" if options.connections > 1 => {
            let slots = options.slots(samples.bytes());
            sockets::measure(samples, time, slots, options.connections)
        }
        "socket" => socket::measure(samples, time, options.slots(samples.bytes())),
        "libfabric" => libfabric::measure(options, samples.bytes(), time),
        "local" => Ok(local::copies(samples, time, options.slots(samples.bytes()))),
        "writes" => local::writes(options, samples),
        other => {
            Err(format!("side {other}: expected weft, socket, libfabric, local or writes").into())
        }
    }?;
    if measured.wrong > 0 {
        return Err(format!("side {side}: {} wrong answers", measured.wrong).into());
    }
    Ok(measured)
}

/// Prints a JSON line, or returns the table row.
fn report(
    options: &Options,
    bytes: usize,
    side: &str,
    rounds: &[Measured],
    weft: &[Measured],
) -> Vec<String> {
    let rates: Vec<f64> = rounds.iter().map(|round| round.queries_per_s).collect();
    let ratios: Vec<f64> = weft
        .iter()
        .zip(rounds)
        .map(|(weft, other)| weft.queries_per_s / other.queries_per_s)
        .collect();
    let trips: Vec<f64> =
        rounds.iter().flat_map(|round| round.round_trips_ns.iter().copied()).collect();
    let (rate, ratio) = (percentile(&rates, 50.0), percentile(&ratios, 50.0));
    let micros = |percent| percentile(&trips, percent) / 1000.0;
    let (p50, p99) = (micros(50.0), micros(99.0));
    let resident: Vec<f64> = rounds.iter().filter_map(|round| round.resident_kib).collect();
    // Later rounds take memory that the first has left.
    let resident = percentile(&resident, 100.0);
    let finite = |value: f64| value.is_finite().then_some(value);
    if options.json {
        let line = serde_json::json!({
            "benchmark": "dispatch", "path": options.path.name(), "side": side, "bytes": bytes,
            "tls": options.tls, "slots": options.slots(bytes), "connections": options.connections,
            "kib_per_connection": finite(resident / f64::from(options.connections)), "spin_us": options.spin_us, "rounds": rounds.len(),
            "queries_per_s": finite(rate), "round_rates": rates.iter().map(|rate| finite(*rate)).collect::<Vec<_>>(),
            // Weft's rate divided by this side's, median over rounds.
            "weft_ratio": finite(ratio).filter(|_| side != "weft"),
            "p50_us": finite(p50), "p99_us": finite(p99), "round_trips": trips.len(),
        });
        println!("{line}");
    }
    let number = |value: f64, text: String| if value.is_finite() { text } else { String::new() };
    vec![
        bytes.to_string(),
        side.to_owned(),
        number(rate, format!("{rate:.0}")),
        if side == "weft" { String::new() } else { number(ratio, format!("{ratio:.2}")) },
        number(p50, format!("{p50:.2}")),
        number(p99, format!("{p99:.2}")),
        rounds.iter().map(|round| round.wrong).sum::<u64>().to_string(),
    ]
}

/// Starts the second process.
fn start(side: &str, bytes: usize, address: &str) -> Outcome<Child> {
    Ok(Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(WORK, format!("{side} {bytes} {address}"))
        .stdout(Stdio::null())
        .spawn()?)
}

fn work_of_child(options: &Options, work: &str) -> Outcome<()> {
    let words: Vec<&str> = work.split(' ').collect();
    let &[side, bytes, address] = words.as_slice() else {
        return Err("malformed task of a child process".into());
    };
    let bytes = bytes.parse()?;
    // The front end's threads are free to take another core.
    crate::group::pin(weft_fabric::Rank(1));
    match side {
        "weft" => service::accelerator(options, bytes, address),
        "socket" if options.connections > 1 => {
            sockets::accelerator(bytes, address, options.connections)
        }
        "socket" => socket::accelerator(bytes, address),
        _ => local::answer_writes(options, bytes, address),
    }
}
