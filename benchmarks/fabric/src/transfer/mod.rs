//! Transfers between two processes, in two patterns.
//!
//! - *ping-pong*: a message and a response with the same size; one way is half a round trip, until the
//!   receiver has observed all bytes
//! - *stream*: messages in one direction, in windows of about 1 MiB; two windows are in flight, and the
//!   receiver acknowledges each. Throughput counts until the last acknowledgement
//!
//! Weft and the bare operations run in the same two processes, over the same memory, in turn: each round
//! measures every size with every implementation. The first round is a warm-up and not counted. Every
//! message is checked, outside the measured time.
//!
//! - `side.rs`: the implementation trait, and both patterns over it
//! - `weft.rs`, `memory.rs`, `socket.rs`: the implementations

mod memory;
mod side;
mod socket;
mod weft;

use crate::arena::{self, Slots};
use crate::group::{join, mesh, on_processes, waiting};
use crate::statistics::{self, TransferSummary};
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use side::{Batch, Side, ping_pong, stream};
use std::time::Duration;
use weft_fabric::{Engine, Region, RemoteRegion};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the processes
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Measured rounds; medians need 15 or more
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Bytes per message, for example 8,65536
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20]
    )]
    sizes: Vec<usize>,
    /// Only Weft's samples, all printed
    #[arg(long)]
    samples: bool,
    /// Engine locked for each call, as by threads that share a communicator; a progress thread, where the
    /// provider demands one, then runs beside the caller
    #[arg(long)]
    shared: bool,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

impl Options {
    /// True if messages with this size are streamed: over NICs and libfabric all are, as in their own
    /// benchmarks.
    fn streams(&self, size: usize) -> bool {
        !matches!(self.path, Path::Shm | Path::Tcp) || size >= SHORTEST_STREAMED && !self.samples
    }
}

/// Message pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Both directions in turn.
    PingPong,
    /// One direction.
    Stream,
}

/// One rank's measurement for one batch.
#[derive(Serialize, Deserialize)]
pub struct Sample {
    /// The batch's pattern.
    pub pattern: Pattern,
    /// Implementation name.
    pub side: String,
    /// Bytes per message.
    pub bytes: usize,
    /// One-way nanoseconds per message.
    pub one_way_ns: Vec<f64>,
    /// Messages with wrong bytes.
    pub wrong: usize,
}

/// Minimum bytes per stream window, and the maximum message count.
const WINDOW_BYTES: usize = 1 << 20;
const WINDOW_MESSAGES: usize = 64;
/// Shortest streamed message: below, a stream measures per-message cost, which ping-pong shows better.
const SHORTEST_STREAMED: usize = 4 << 10;
/// Spin time in a busy wait: this path never parks.
const SPIN: Duration = Duration::from_secs(3600);

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    if let Some(size) = options.sizes.iter().find(|&&s| s == 0 || s > arena::LONGEST) {
        return Err(format!("message of {size} bytes: expected 1 to {}", arena::LONGEST).into());
    }
    let ranks = on_processes(2, || rank(options))?;
    let wrong: usize = ranks.iter().flatten().map(|sample| sample.wrong).sum();
    if options.samples {
        for (here, there) in ranks[0].iter().zip(&ranks[1]) {
            let line = serde_json::json!({
                "pattern": here.pattern, "side": here.side, "bytes": here.bytes,
                "one_way_ns": [here.one_way_ns, there.one_way_ns], "wrong": here.wrong + there.wrong,
            });
            println!("{line}");
        }
    } else {
        show(options, &ranks)?;
    }
    if wrong > 0 {
        return Err(format!("{wrong} messages had wrong bytes").into());
    }
    Ok(())
}

fn show(options: &Options, ranks: &[Vec<Sample>]) -> Outcome<()> {
    let measured = statistics::summarise(options.path, ranks);
    if options.json {
        for line in &measured {
            println!("{}", serde_json::to_string(line)?);
        }
        return Ok(());
    }
    println!(
        "Two processes over {}, {} rounds of every size and implementation in turn; progress by the caller.",
        options.path.name(),
        options.rounds
    );
    println!("`ratio` is the bare operation's time divided by Weft's, median over rounds.\n");
    print!(
        "{}",
        table::format(
            &TransferSummary::HEADERS,
            &measured.iter().map(TransferSummary::row).collect::<Vec<_>>()
        )
    );
    Ok(())
}

/// One rank's part.
fn rank(options: &Options) -> Outcome<Vec<Sample>> {
    let communicator = join(options.path, Some(SPIN))?;
    let rank = communicator.rank();
    let bytes = arena::region_bytes();
    let source = communicator.engine().alloc(bytes)?;
    let inbox = communicator.engine().alloc(bytes)?;
    arena::fill_source(source.memory(), rank.0);
    inbox.memory().fill(0, bytes, 0);

    let mut bare = open_bare(options, mesh(&communicator)?, &source, &inbox)?;
    let mut weft = weft::Weft::open(&communicator, options.shared, &source, &inbox)?;
    let mut plan =
        Plan { rank: rank.0, source, inbox, slots: Slots::new(bytes), samples: Vec::new() };

    // Touches every page in every mapping before the measurement.
    plan.batch(&mut weft, Pattern::PingPong, arena::LONGEST, bytes / arena::LONGEST)?;
    for side in &mut bare {
        plan.batch(side.as_mut(), Pattern::PingPong, arena::LONGEST, bytes / arena::LONGEST)?;
    }
    for round in 0..=options.rounds {
        if round == 1 {
            plan.samples.clear();
        }
        for &size in &options.sizes {
            for pattern in [Pattern::PingPong, Pattern::Stream] {
                if pattern == Pattern::Stream && !options.streams(size) {
                    continue;
                }
                plan.round(&mut weft, &mut bare, pattern, size, round)?;
            }
        }
    }
    drop(bare);
    communicator.leave();
    Ok(plan.samples)
}

/// Implementations to compare with: none when only Weft's samples are asked for, nor over libfabric and
/// NICs, whose loops are separate programs (`benchmarks/peers/ofi.c`; perftest).
fn open_bare(
    options: &Options,
    control: &weft_control::Control,
    source: &Region,
    inbox: &Region,
) -> Outcome<Vec<Box<dyn Side>>> {
    Ok(match (options.samples, options.path) {
        (true, _) | (false, Path::OfiTcp | Path::OfiShm | Path::Verbs) => Vec::new(),
        (false, Path::Shm) => memory::open(control, source, inbox)?,
        (false, Path::Tcp) => vec![Box::new(socket::Socket::open(control, source, inbox)?)],
    })
}

/// Plan for both ranks, in the same order.
struct Plan {
    rank: u32,
    source: Region,
    inbox: Region,
    slots: Slots,
    samples: Vec<Sample>,
}

impl Plan {
    /// Measures each implementation once, starting with another one in each round.
    fn round(
        &mut self,
        weft: &mut weft::Weft<'_>,
        bare: &mut [Box<dyn Side>],
        pattern: Pattern,
        size: usize,
        round: usize,
    ) -> Outcome<()> {
        let count = messages(pattern, size, self.inbox.memory().len());
        let sides = 1 + bare.len();
        for turn in 0..sides {
            let side: &mut dyn Side = match (round + turn) % sides {
                0 => &mut *weft,
                other => bare[other - 1].as_mut(),
            };
            if side.moves(pattern, size) {
                self.batch(side, pattern, size, count)?;
            }
        }
        Ok(())
    }

    /// Measures one implementation, then checks the messages.
    fn batch(
        &mut self,
        side: &mut dyn Side,
        pattern: Pattern,
        size: usize,
        count: usize,
    ) -> Outcome<()> {
        let batch = Batch { offsets: self.slots.take(count, size), length: size };
        side.barrier()?;
        let one_way_ns = match pattern {
            Pattern::PingPong => ping_pong(side, &batch, self.rank)?,
            Pattern::Stream => stream(side, &batch, self.rank, window(size))?,
        };
        side.barrier()?;
        let receives = pattern == Pattern::PingPong || self.rank == 1;
        let (inbox, source) = (self.inbox.memory(), self.source.memory());
        let checked = receives && side.carries_bytes();
        let wrong = batch
            .offsets
            .iter()
            .filter(|&&offset| checked && !arena::check_and_scrub(inbox, source, offset, size));
        let wrong = wrong.count();
        let side = side.name().to_owned();
        self.samples.push(Sample { pattern, side, bytes: size, one_way_ns, wrong });
        Ok(())
    }
}

/// Messages per batch: enough for a measurement, at most as many as slots, and tens of milliseconds at
/// most.
fn messages(pattern: Pattern, size: usize, region: usize) -> usize {
    let fitting = region / size.next_multiple_of(64);
    match pattern {
        Pattern::PingPong => ((16 << 20) / size).clamp(2, 500).min(fitting),
        Pattern::Stream => ((64 << 20) / size).clamp(3, 4096).min(fitting),
    }
}

/// Messages per window.
fn window(size: usize) -> usize {
    (WINDOW_BYTES / size).clamp(1, WINDOW_MESSAGES)
}

/// Runs a wait that spins.
fn spinning<T>(f: impl FnOnce(&mut weft_fabric::WaitOptions<'_>) -> T) -> T {
    waiting(SPIN, f)
}

/// Page with `length` bytes from `offset` in our source to the same offset in a peer's inbox.
fn page(source: &Region, inbox: RemoteRegion, offset: usize, length: usize) -> weft_fabric::Page {
    weft_fabric::Page {
        source: source.key(),
        source_offset: offset as u64,
        destination: inbox.key,
        destination_offset: offset as u64,
        length: length as u64,
    }
}

/// Raises on its lane by a write with `length` bytes.
fn parts(engine: &Engine, peer: weft_fabric::Rank, length: usize) -> u64 {
    engine.route(peer).map_or(1, |route| route.parts.count([length as u64]))
}
