//! More ranks than cores: every rank answers every other, and nobody may starve.
//!
//! In each round every rank writes 8 bytes to each other rank and waits for the writes of all; with
//! fewer cores than ranks, every wait parks and is woken.

use crate::group::{PATIENCE, join, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, Path, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{Page, Rank, clock};

/// What to measure.
#[derive(Args)]
pub struct Options {
    /// How the ranks reach each other
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Ranks
    #[arg(long, default_value_t = 16)]
    ranks: u32,
    /// Rounds to measure
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// What one rank saw.
#[derive(Serialize, Deserialize)]
struct Found {
    rounds_us: Vec<f64>,
    wrong: u64,
}

const WORD: u64 = 8;

/// Measures, and shows what was found.
pub fn run(options: &Options) -> Outcome<()> {
    if options.ranks < 2 {
        return Err("a crowd has at least 2 ranks".into());
    }
    let ranks = on_processes(options.ranks, || rank(options))?;
    let median = |found: &Found| percentile(&found.rounds_us, 50.0);
    let by_median = |a: &usize, b: &usize| median(&ranks[*a]).total_cmp(&median(&ranks[*b]));
    let slowest = (0..ranks.len()).max_by(by_median).unwrap_or_default();
    let all: Vec<f64> = ranks.iter().flat_map(|found| found.rounds_us.iter().copied()).collect();
    let wrong: u64 = ranks.iter().map(|found| found.wrong).sum();
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
    if wrong > 0 { Err(format!("{wrong} words arrived wrong").into()) } else { Ok(()) }
}

/// One rank's part.
fn rank(options: &Options) -> Outcome<Found> {
    let communicator = join(options.path, None)?;
    // What the communicator itself would choose.
    let spin = {
        let mut never = || false;
        communicator.waiter(clock::now(), &mut never).spin
    };
    let me = communicator.rank();
    let length = usize::try_from(u64::from(options.ranks) * WORD)?;
    let source = communicator.engine().alloc(2 * WORD as usize)?;
    // Two rounds are under way at most, so each rank has two words of every inbox.
    let inbox = communicator.engine().alloc(2 * length)?;
    let mut engine = communicator.engine();
    let counters = [engine.counter()?, engine.counter()?];
    drop(engine);
    let deadline = clock::now().after(PATIENCE);
    let remotes = communicator.share(&[(&inbox, 0..2 * length as u64)], &counters, deadline)?;
    let mut engine = communicator.engine();
    let peers: Vec<Rank> = engine.peers().collect();
    let everybody: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 1)).collect();
    let mut found = Found { rounds_us: Vec::new(), wrong: 0 };
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
        found.rounds_us.push(begin.elapsed().as_secs_f64() * 1e6);
        for &peer in &peers {
            let mut seen = [0; WORD as usize];
            let at = half * length as u64 + u64::from(peer.0) * WORD;
            inbox.memory().copy_out(at as usize, &mut seen);
            found.wrong += u64::from(seen != word(peer, round));
            engine.credit(peer, counter)?;
        }
        engine.flush();
    }
    waiting(Duration::ZERO, |waiter| engine.barrier(waiter))?;
    communicator.leave();
    Ok(found)
}

/// What a rank writes in a round.
fn word(rank: Rank, round: u64) -> [u8; WORD as usize] {
    ((round + 1) << 16 | u64::from(rank.0)).to_le_bytes()
}
