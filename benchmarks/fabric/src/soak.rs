//! Counted writes of mixed sizes for as long as one wants.
//!
//! Both ranks write to each other all the time. In each round a rank makes some writes of random sizes,
//! which the other knows from the seed: it computes what each lane must rise by, waits for exactly
//! that, looks that it did not rise by more, and checks every byte. Memory is watched from the end of
//! the first tenth on.

use crate::arena::{self, Slots};
use crate::group::{PATIENCE, join, mesh, on_processes, waiting};
use crate::{Outcome, Path};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_fabric::{CounterId, Engine, Page, Rank, Region, RemoteRegion, RequestId, clock};

/// For how long.
#[derive(Args)]
pub struct Options {
    /// How the ranks reach each other
    #[arg(long, value_enum, default_value = "shm")]
    path: Path,
    /// Seconds to run
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Stop earlier, after so many writes of each rank
    #[arg(long, default_value_t = 1_000_000_000)]
    writes: u64,
    /// Of the sizes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// What one rank saw.
#[derive(Clone, Serialize, Deserialize)]
struct Found {
    writes: u64,
    bytes: u64,
    raises: u64,
    wrong_counts: u64,
    wrong_writes: u64,
    seconds: f64,
    /// Resident memory after the first tenth, and the most and the last since then.
    early_kib: u64,
    most_kib: u64,
    last_kib: u64,
}

/// Writes of a round, at most.
const BURST: u64 = 8;
/// Rounds between two looks at the clock. Both ranks agree there whether to go on.
const STRETCH: u64 = 256;
/// Bytes of each rank's source and inbox: twice what the two rounds under way can take, so that their
/// writes never meet.
const REGION: usize = 128 << 20;
/// Growth of resident memory that no leak explains: pages of the allocator and of stacks.
const TOLERATED_KIB: u64 = 1024;
/// Counters used in turn.
const BUFFERS: u64 = 2;

/// Runs, and shows what was found.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let fault = |found: &Found| {
        found.wrong_counts + found.wrong_writes > 0
            || found.most_kib > found.early_kib + TOLERATED_KIB
    };
    if options.json {
        let (path, seed) = (options.path.name(), options.seed);
        let line = serde_json::json!({
            "benchmark": "soak", "path": path, "seed": seed, "ranks": ranks,
        });
        println!("{line}");
    } else {
        for (rank, found) in ranks.iter().enumerate() {
            println!(
                "rank {rank} over {}: {} writes, {:.1} GB, {} raises in {:.0} s; wrong counts {}, \
                 wrong writes {}; resident {} KiB early, {} most, {} last",
                options.path.name(),
                found.writes,
                found.bytes as f64 / 1e9,
                found.raises,
                found.seconds,
                found.wrong_counts,
                found.wrong_writes,
                found.early_kib,
                found.most_kib,
                found.last_kib,
            );
        }
    }
    if ranks.iter().any(fault) {
        return Err("counts or bytes were wrong, or memory grew".into());
    }
    Ok(())
}

/// One rank's part.
fn rank(options: &Options) -> Outcome<Found> {
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
        communicator.waiter(deadline, &mut never).spin
    };
    let mut end = End {
        peer,
        source,
        inbox,
        remote: remotes[peer.0 as usize][0],
        counters,
        spin,
        out: Plan::new(options.seed ^ u64::from(me.0) << 32),
        back: Plan::new(options.seed ^ u64::from(peer.0) << 32),
    };
    let found = end.go_on(mesh(&communicator)?, &mut communicator.engine(), options)?;
    communicator.leave();
    Ok(found)
}

struct End {
    peer: Rank,
    source: Region,
    inbox: Region,
    remote: RemoteRegion,
    counters: [CounterId; BUFFERS as usize],
    spin: Duration,
    /// What we write, and what the peer does.
    out: Plan,
    back: Plan,
}

impl End {
    fn go_on(
        &mut self,
        control: &weft_control::Control,
        engine: &mut Engine,
        options: &Options,
    ) -> Outcome<Found> {
        let begin = Instant::now();
        let limit = Duration::from_secs(options.seconds);
        let mut found = Found {
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
            for round in rounds.by_ref().take(STRETCH as usize) {
                self.round(engine, round, &mut found)?;
            }
            found.last_kib = resident_kib()?;
            if begin.elapsed() >= limit / 10 {
                if found.early_kib == 0 {
                    found.early_kib = found.last_kib;
                }
                found.most_kib = found.most_kib.max(found.last_kib);
            }
            let over = begin.elapsed() >= limit || found.writes >= options.writes;
            let said = control.all_gather(&[u8::from(over)], PATIENCE)?;
            if said.iter().any(|over| over == &[1]) {
                found.seconds = begin.elapsed().as_secs_f64();
                return Ok(found);
            }
        }
    }

    /// Writes a round and reads the peer's.
    fn round(&mut self, engine: &mut Engine, round: u64, found: &mut Found) -> Outcome<()> {
        let (spin, peer) = (self.spin, self.peer);
        let counter = self.counters[(round % BUFFERS) as usize];
        waiting(spin, |waiter| engine.wait_for_credit(counter, peer, round / BUFFERS, waiter))?;
        let mut requests: Vec<RequestId> = Vec::new();
        for (offset, length) in self.out.round() {
            let page = Page {
                source: self.source.key(),
                source_offset: offset as u64,
                destination: self.remote.key,
                destination_offset: offset as u64,
                length: length as u64,
            };
            requests.push(engine.write(peer, counter, round / BUFFERS, &[page])?);
            found.writes += 1;
            found.bytes += length as u64;
        }
        let expected = self.back.round();
        let rule = engine.route(peer).ok_or("the peer has no route")?.parts;
        let raises: u64 = expected.iter().map(|&(_, length)| rule.count([length as u64])).sum();
        waiting(spin, |waiter| engine.wait(counter, &[(peer, raises)], waiter))?;
        found.wrong_counts += u64::from(engine.count(counter, peer)? != raises);
        found.raises += raises;
        for (offset, length) in expected {
            let right =
                arena::check_and_scrub(self.inbox.memory(), self.source.memory(), offset, length);
            found.wrong_writes += u64::from(!right);
        }
        for request in requests {
            waiting(spin, |waiter| engine.wait_for_request(request, waiter))?;
        }
        engine.credit(peer, counter)?;
        engine.flush();
        Ok(())
    }
}

/// What one rank writes, round after round; the same seed gives the same again.
struct Plan {
    random: u64,
    slots: Slots,
}

impl Plan {
    fn new(seed: u64) -> Plan {
        Plan { random: seed, slots: Slots::new(REGION) }
    }

    /// Places and lengths of the next round's writes. Most are short; a few are of megabytes.
    fn round(&mut self) -> Vec<(usize, usize)> {
        let count = 1 + self.below(BURST);
        let write = |_| {
            let power = match self.below(1000) {
                0 => 21,
                1..20 => 16,
                20..200 => 12,
                _ => 8,
            };
            let length = 1 + self.below(1 << power) as usize;
            (self.slots.take(1, length)[0], length)
        };
        (0..count).map(write).collect()
    }

    fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*, from Vigna, "An experimental exploration of Marsaglia's xorshift generators".
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % limit
    }
}

/// Resident memory of this process that is its own: what it shares, such as regions, is left out.
fn resident_kib() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let value = line.and_then(|line| line.split_whitespace().next());
    Ok(value.ok_or("the kernel does not say how much memory is resident")?.parse()?)
}
