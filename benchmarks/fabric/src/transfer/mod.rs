//! Transfers between two processes, in two patterns.
//!
//! - *ping-pong*: a message goes, one of the same size comes back; one way is half of a round trip,
//!   until the receiver has seen that all bytes are there
//! - *stream*: messages in one direction, in windows of about 1 MiB; two windows are under way, and
//!   the receiver acknowledges each. Throughput counts until the last acknowledgement
//!
//! Weft and the bare operations run in the same two processes, over the same memory, in turn: each
//! round measures every size with every side. The first round is a warm-up and not counted. Every
//! message is checked, outside of the measured time.
//!
//! - `side.rs`: what a side can do, and both patterns over it
//! - `weft.rs`, `memory.rs`, `socket.rs`: the sides

mod memory;
mod side;
mod socket;
mod weft;

use crate::arena::{self, Slots};
use crate::group::{join, mesh, on_processes, waiting};
use crate::statistics::{self, Measured};
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use side::{Batch, Side, ping_pong, stream};
use std::time::Duration;
use weft_fabric::{Engine, Region, RemoteRegion};

/// What to measure.
#[derive(Args)]
pub struct Options {
    /// How the processes reach each other
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Rounds to measure; a median of fewer than 15 says little
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Bytes of a message
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20]
    )]
    sizes: Vec<usize>,
    /// Measure Weft alone, and print every sample
    #[arg(long)]
    samples: bool,
    /// Take the engine for each call, as threads do that share a communicator; a progress thread, where
    /// the provider demands one, then runs beside the caller
    #[arg(long)]
    shared: bool,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Whether messages of this size are streamed: over libfabric all are, as its loop does.
    fn streams(&self, size: usize) -> bool {
        self.path.ofi_provider().is_some() || size >= SHORTEST_STREAMED && !self.samples
    }
}

/// Messages move in one of two patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// There and back.
    PingPong,
    /// One direction.
    Stream,
}

/// One batch as one rank saw it.
#[derive(Serialize, Deserialize)]
pub struct Sample {
    /// How messages moved.
    pub pattern: Pattern,
    /// What moved them.
    pub side: String,
    /// Bytes of a message.
    pub bytes: usize,
    /// Nanoseconds for each message, one way.
    pub one_way_ns: Vec<f64>,
    /// Messages that arrived with wrong bytes.
    pub wrong: usize,
}

/// Bytes of a window of a stream, at least, and messages in it, at most.
const WINDOW_BYTES: usize = 1 << 20;
const WINDOW_MESSAGES: usize = 64;
/// A stream of smaller messages measures the cost of a message, which ping-pong shows better.
const SHORTEST_STREAMED: usize = 4 << 10;
/// A busy wait: on this path nobody ever parks.
const SPIN: Duration = Duration::from_secs(3600);

/// Measures, and shows what was found.
pub fn run(options: &Options) -> Outcome<()> {
    if let Some(size) = options.sizes.iter().find(|&&s| s == 0 || s > arena::LONGEST) {
        return Err(format!("a message of {size} bytes: choose 1 to {}", arena::LONGEST).into());
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
        return Err(format!("{wrong} messages arrived with wrong bytes").into());
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
        "Two processes over {}, {} rounds of every size and side in turn; progress by the caller.",
        options.path.name(),
        options.rounds
    );
    println!("`ratio` is the bare operation's time divided by Weft's, median over rounds.\n");
    print!(
        "{}",
        table::format(&Measured::HEADERS, &measured.iter().map(Measured::row).collect::<Vec<_>>())
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

    // Every page of every mapping is touched before anything is measured.
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

/// The sides to compare with: none when only Weft's samples are wanted, nor over libfabric, whose loop is a
/// program of its own (`benchmarks/peers/ofi.c`).
fn open_bare(
    options: &Options,
    control: &weft_control::Control,
    source: &Region,
    inbox: &Region,
) -> Outcome<Vec<Box<dyn Side>>> {
    Ok(match (options.samples, options.path) {
        (true, _) | (false, Path::OfiTcp | Path::OfiShm) => Vec::new(),
        (false, Path::Shm) => memory::open(control, source, inbox)?,
        (false, Path::Tcp) => vec![Box::new(socket::Socket::open(control, source, inbox)?)],
    })
}

/// What both ranks do, in the same order.
struct Plan {
    rank: u32,
    source: Region,
    inbox: Region,
    slots: Slots,
    samples: Vec<Sample>,
}

impl Plan {
    /// Every side once, another one first each round.
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

    /// Measures one side, then checks what arrived.
    fn batch(
        &mut self,
        side: &mut dyn Side,
        pattern: Pattern,
        size: usize,
        count: usize,
    ) -> Outcome<()> {
        let batch = Batch { offsets: self.slots.take(count, size), length: size };
        side.meet()?;
        let one_way_ns = match pattern {
            Pattern::PingPong => ping_pong(side, &batch, self.rank)?,
            Pattern::Stream => stream(side, &batch, self.rank, window(size))?,
        };
        side.meet()?;
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

/// Messages of a batch: enough to be timed, never more than slots, and tens of milliseconds at most.
fn messages(pattern: Pattern, size: usize, region: usize) -> usize {
    let fitting = region / size.next_multiple_of(64);
    match pattern {
        Pattern::PingPong => ((16 << 20) / size).clamp(2, 500).min(fitting),
        Pattern::Stream => ((64 << 20) / size).clamp(3, 4096).min(fitting),
    }
}

/// Messages of a window.
fn window(size: usize) -> usize {
    (WINDOW_BYTES / size).clamp(1, WINDOW_MESSAGES)
}

/// How a side waits: it spins.
fn spinning<T>(f: impl FnOnce(&mut weft_fabric::Waiter<'_>) -> T) -> T {
    waiting(SPIN, f)
}

/// The page that takes `length` bytes at `offset` from our source to the same place of a peer's inbox.
fn page(source: &Region, inbox: RemoteRegion, offset: usize, length: usize) -> weft_fabric::Page {
    weft_fabric::Page {
        source: source.key(),
        source_offset: offset as u64,
        destination: inbox.key,
        destination_offset: offset as u64,
        length: length as u64,
    }
}

/// How often a write of `length` bytes raises its lane.
fn parts(engine: &Engine, peer: weft_fabric::Rank, length: usize) -> u64 {
    engine.route(peer).map_or(1, |route| route.parts.count([length as u64]))
}
