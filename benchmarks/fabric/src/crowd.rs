//! More ranks than cores: rounds between all ranks, and the slowest rank.
//!
//! In each round every rank writes 8 bytes to each other rank and waits for all writes to it; with fewer
//! cores than ranks, every wait parks and is woken.

use crate::group::{PATIENCE, join, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{Page, Rank, clock};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Rank count
    #[arg(long, default_value_t = 16)]
    ranks: u32,
    /// Measured rounds
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// JSON line on standard output
    #[arg(long)]
    json: bool,
}

/// One rank's measurements.
#[derive(Serialize, Deserialize)]
struct RankResult {
    rounds_us: Vec<f64>,
    wrong: u64,
}

const WORD: u64 = 8;

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    if options.ranks < 2 {
        return Err(format!("--ranks {}: expected at least 2", options.ranks).into());
    }
    let ranks = on_processes(options.ranks, || rank(options))?;
    let median = |result: &RankResult| percentile(&result.rounds_us, 50.0);
    let by_median = |a: &usize, b: &usize| median(&ranks[*a]).total_cmp(&median(&ranks[*b]));
    let slowest = (0..ranks.len()).max_by(by_median).unwrap_or_default();
    let all: Vec<f64> = ranks.iter().flat_map(|result| result.rounds_us.iter().copied()).collect();
    let wrong: u64 = ranks.iter().map(|result| result.wrong).sum();
    let cores = std::thread::available_parallelism()?.get();
    let largest = all.iter().copied().fold(0.0, f64::max);
    let figures = [
        ("p50_us", percentile(&all, 50.0)),
        ("p99_us", percentile(&all, 99.0)),
        ("largest_us", largest),
        ("slowest_p50_us", median(&ranks[slowest])),
        ("slowest_p99_us", percentile(&ranks[slowest].rounds_us, 99.0)),
    ];
    if options.json {
        let mut line = serde_json::json!({
            "benchmark": "crowd", "path": options.path.name(), "ranks": options.ranks,
            "cores_used": cores, "bytes": WORD, "rounds": options.rounds,
            "slowest_rank": slowest, "wrong": wrong,
        });
        for (name, value) in figures {
            line[name] = value.into();
        }
        println!("{line}");
    } else {
        let (path, rounds) = (options.path.name(), options.rounds);
        println!("{} ranks on {cores} cores over {path}, {rounds} rounds;", options.ranks);
        println!("in each, every rank writes to every other and waits for all.\n");
        let row = |(name, value): &(&str, f64)| vec![(*name).to_owned(), format!("{value:.1}")];
        print!("{}", table::format(&["a round", ""], &figures.iter().map(row).collect::<Vec<_>>()));
        println!("slowest rank {slowest}, wrong words {wrong}");
    }
    if wrong > 0 { Err(format!("{wrong} words had wrong values").into()) } else { Ok(()) }
}

/// One rank's part.
fn rank(options: &Options) -> Outcome<RankResult> {
    let communicator = join(options.path, None)?;
    // The communicator's default.
    let spin = {
        let mut never = || false;
        communicator.wait_options(clock::now(), &mut never).spin
    };
    let me = communicator.rank();
    let length = usize::try_from(u64::from(options.ranks) * WORD)?;
    let source = communicator.engine().alloc(2 * WORD as usize)?;
    // At most two rounds are in flight, so each rank has two words in every inbox.
    let inbox = communicator.engine().alloc(2 * length)?;
    let mut engine = communicator.engine();
    let counters = [engine.counter()?, engine.counter()?];
    drop(engine);
    let deadline = clock::now().after(PATIENCE);
    let remotes = communicator.share(&[(&inbox, 0..2 * length as u64)], &counters, deadline)?;
    let mut engine = communicator.engine();
    let peers: Vec<Rank> = engine.peers().collect();
    let everybody: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
    let mut result = RankResult { rounds_us: Vec::new(), wrong: 0 };
    for round in 0..options.rounds {
        let half = round % 2;
        let counter = counters[half as usize];
        let begin = Instant::now();
        source.memory().copy_in((half * WORD) as usize, &word(me, round));
        for &peer in &peers {
            waiting(spin, |waiter| engine.wait_for_credit(counter, peer, round / 2, waiter))?;
            let page = Page {
                source: source.key(),
                source_offset: half * WORD,
                destination: remotes[peer.0 as usize][0].key,
                destination_offset: half * length as u64 + u64::from(me.0) * WORD,
                length: WORD,
            };
            engine.write(peer, counter, round / 2, &[page])?;
        }
        waiting(spin, |waiter| engine.wait(counter, &everybody, waiter))?;
        result.rounds_us.push(begin.elapsed().as_secs_f64() * 1e6);
        for &peer in &peers {
            let mut seen = [0; WORD as usize];
            let at = half * length as u64 + u64::from(peer.0) * WORD;
            inbox.memory().copy_out(at as usize, &mut seen);
            result.wrong += u64::from(seen != word(peer, round));
            engine.credit(peer, counter)?;
        }
        engine.flush();
    }
    waiting(Duration::ZERO, |waiter| engine.barrier(waiter))?;
    communicator.leave();
    Ok(result)
}

/// Word that a rank writes in a round.
fn word(rank: Rank, round: u64) -> [u8; WORD as usize] {
    ((round + 1) << 16 | u64::from(rank.0)).to_le_bytes()
}
