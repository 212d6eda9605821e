//! Soak test: counted writes with mixed sizes for a given time.
//!
//! Both ranks write to each other continuously. In each round a rank makes some writes with random sizes
//! from a seed that both have. The receiver computes each lane's raises, waits for exactly these, checks
//! that there are no more, and checks every byte. Resident memory is checked after the first tenth of the
//! time.

use crate::arena::{self, Slots};
use crate::group::{PATIENCE, join, mesh, on_processes, waiting};
use crate::{Outcome, Path};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::random::SplitMix64;
use weft_fabric::{CounterId, Engine, Page, Rank, Region, RemoteRegion, RequestId, clock};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Path between the ranks
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Run length in seconds
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Most writes per rank
    #[arg(long, default_value_t = 1_000_000_000)]
    writes: u64,
    /// Random seed for the sizes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// JSON line on standard output
    #[arg(long)]
    json: bool,
}

/// One rank's measurements.
#[derive(Clone, Serialize, Deserialize)]
struct RankResult {
    writes: u64,
    bytes: u64,
    raises: u64,
    wrong_counts: u64,
    wrong_writes: u64,
    seconds: f64,
    /// Resident memory after the first tenth, and the maximum and last value since then.
    early_kib: u64,
    most_kib: u64,
    last_kib: u64,
}

/// Most writes per round.
const BURST: u64 = 8;
/// Rounds between two clock checks, after which both ranks agree to continue.
const CHECK_ROUNDS: u64 = 256;
/// Bytes in each rank's source and inbox: twice the maximum for two rounds in flight, so that their writes
/// never overlap.
const REGION: usize = 128 << 20;
/// Tolerated growth in resident memory: allocator and stack pages.
const TOLERATED_KIB: u64 = 1024;
/// Counters used in turn.
const COUNTERS: u64 = 2;

/// Runs the soak test and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let fault = |result: &RankResult| {
        result.wrong_counts + result.wrong_writes > 0
            || result.most_kib > result.early_kib + TOLERATED_KIB
    };
    if options.json {
        let (path, seed) = (options.path.name(), options.seed);
        let line = serde_json::json!({
            "benchmark": "soak", "path": path, "seed": seed, "ranks": ranks,
        });
        println!("{line}");
    } else {
        for (rank, result) in ranks.iter().enumerate() {
            println!(
                "rank {rank} over {}: {} writes, {:.1} GB, {} raises in {:.0} s; wrong counts {}, \
                 wrong writes {}; resident {} KiB early, {} most, {} last",
                options.path.name(),
                result.writes,
                result.bytes as f64 / 1e9,
                result.raises,
                result.seconds,
                result.wrong_counts,
                result.wrong_writes,
                result.early_kib,
                result.most_kib,
                result.last_kib,
            );
        }
    }
    if ranks.iter().any(fault) {
        return Err("wrong counts, wrong bytes, or growing memory".into());
    }
    Ok(())
}

/// One rank's part.
fn rank(options: &Options) -> Outcome<RankResult> {
    let communicator = join(options.path, None)?;
    let (me, peer) = (communicator.rank(), Rank(1 - communicator.rank().0));
    let mut engine = communicator.engine();
    let (source, inbox) = (engine.alloc(REGION)?, engine.alloc(REGION)?);
    arena::fill_source(source.memory(), me.0);
    inbox.memory().fill(0, REGION, 0);
    let counters = [engine.counter()?, engine.counter()?];
    drop(engine);
    let deadline = clock::now().after(PATIENCE);
    let remotes = communicator.share(&[(&inbox, 0..REGION as u64)], &counters, deadline)?;
    let spin = {
        let mut never = || false;
        communicator.wait_options(deadline, &mut never).spin
    };
    let mut end = SoakRank {
        peer,
        source,
        inbox,
        remote: remotes[peer.0 as usize][0],
        counters,
        spin,
        out: Plan::new(options.seed ^ u64::from(me.0) << 32),
        back: Plan::new(options.seed ^ u64::from(peer.0) << 32),
    };
    let result = end.should_continue(mesh(&communicator)?, &mut communicator.engine(), options)?;
    communicator.leave();
    Ok(result)
}

struct SoakRank {
    peer: Rank,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
    counters: [CounterId; COUNTERS as usize],
    spin: Duration,
    /// Write plans for this rank and the peer.
    out: Plan,
    back: Plan,
}

impl SoakRank {
    fn should_continue(
        &mut self,
        control: &weft_control::Control,
        engine: &mut Engine,
        options: &Options,
    ) -> Outcome<RankResult> {
        let begin = Instant::now();
        let limit = Duration::from_secs(options.seconds);
        let mut result = RankResult {
            writes: 0,
            bytes: 0,
            raises: 0,
            wrong_counts: 0,
            wrong_writes: 0,
            seconds: 0.0,
            early_kib: 0,
            most_kib: 0,
            last_kib: 0,
        };
        let mut rounds = 0..;
        loop {
            for round in rounds.by_ref().take(CHECK_ROUNDS as usize) {
                self.round(engine, round, &mut result)?;
            }
            result.last_kib = resident_kib()?;
            if begin.elapsed() >= limit / 10 {
                if result.early_kib == 0 {
                    result.early_kib = result.last_kib;
                }
                result.most_kib = result.most_kib.max(result.last_kib);
            }
            let over = begin.elapsed() >= limit || result.writes >= options.writes;
            let said = control.all_gather(&[u8::from(over)], PATIENCE)?;
            if said.iter().any(|over| over == &[1]) {
                result.seconds = begin.elapsed().as_secs_f64();
                return Ok(result);
            }
        }
    }

    /// Writes a round and reads the peer's.
    fn round(&mut self, engine: &mut Engine, round: u64, result: &mut RankResult) -> Outcome<()> {
        let (spin, peer) = (self.spin, self.peer);
        let counter = self.counters[(round % COUNTERS) as usize];
        waiting(spin, |waiter| engine.wait_for_credit(counter, peer, round / COUNTERS, waiter))?;
        let mut requests: Vec<RequestId> = Vec::new();
        for (offset, length) in self.out.round() {
            let page = Page {
                source: self.source.key(),
                source_offset: offset as u64,
                destination: self.remote.key,
                destination_offset: offset as u64,
                length: length as u64,
            };
            requests.push(engine.write(peer, counter, round / COUNTERS, &[page])?);
            result.writes += 1;
            result.bytes += length as u64;
        }
        let expected = self.back.round();
        let rule = engine.route(peer).ok_or("the peer has no route")?.parts;
        let raises: u64 = expected.iter().map(|&(_, length)| rule.count([length as u64])).sum();
        waiting(spin, |waiter| engine.wait(counter, &[(peer, raises)], waiter))?;
        result.wrong_counts += u64::from(engine.count(counter, peer)? != raises);
        result.raises += raises;
        for (offset, length) in expected {
            let right =
                arena::check_and_scrub(self.inbox.memory(), self.source.memory(), offset, length);
            result.wrong_writes += u64::from(!right);
        }
        for request in requests {
            waiting(spin, |waiter| engine.wait_for_request(request, waiter))?;
        }
        engine.credit(peer, counter)?;
        engine.flush();
        Ok(())
    }
}

/// Seeded plan for one rank's writes.
struct Plan {
    random: SplitMix64,
    slots: Slots,
}

impl Plan {
    fn new(seed: u64) -> Plan {
        Plan { random: SplitMix64::new(seed), slots: Slots::new(REGION) }
    }

    /// Offsets and lengths for the next round's writes. Most are short; a few have megabytes.
    fn round(&mut self) -> Vec<(usize, usize)> {
        let count = 1 + self.random.below(BURST);
        let write = |_| {
            let power = match self.random.below(1000) {
                0 => 21,
                1..20 => 16,
                20..200 => 12,
                _ => 8,
            };
            let length = 1 + self.random.below(1 << power) as usize;
            (self.slots.take(1, length)[0], length)
        };
        (0..count).map(write).collect()
    }
}

/// This process's private resident memory in KiB, without shared mappings such as regions.
fn resident_kib() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let value = line.and_then(|line| line.split_whitespace().next());
    Ok(value.ok_or("/proc/self/status: no RssAnon")?.parse()?)
}
