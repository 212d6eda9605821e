//! Page lists between two GPUs over the provider copy, beside one copy with the same bytes.
//!
//! The bytes model a KV cache with 61 layers, 4096 tokens and 1152 B for each. Page lengths take turns
//! in each round. Before, each list is written once to cleared memory, pages in random order, and every
//! byte is checked.

use crate::arena;
use crate::group::{PATIENCE, on_processes, waiting};
use crate::statistics::percentile;
use crate::{Outcome, table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use weft_control::{Config, Overrides};
use weft_fabric::providers::CopyBackend;
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    Communicator, CommunicatorConfig, CounterId, Engine, Memory, Page, ProviderKind, Rank, Region,
    RemoteRegion, clock,
};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// GPUs for rank 0 and rank 1
    #[arg(long, num_args = 2, value_delimiter = ',', default_values_t = [0, 1])]
    gpus: Vec<u32>,
    /// Host memory in place of GPUs, for tests
    #[arg(long)]
    twin: bool,
    /// Layers, with the tokens and bytes below
    #[arg(long, default_value_t = 61)]
    layers: u64,
    /// Tokens in a page, one list for each
    #[arg(long, value_delimiter = ',', default_values_t = [128, 64, 32, 16, 4, 1])]
    tokens: Vec<u64>,
    /// Timed rounds
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// JSON line on standard output
    #[arg(long)]
    json: bool,
}

const TOKENS: u64 = 4096;
const TOKEN_BYTES: u64 = 1152;
/// Spin of all waits.
const SPIN: Duration = Duration::from_secs(1);

/// Seconds for one list, by round.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Times {
    /// Tokens in a page; 0: one copy.
    tokens: u64,
    pages: usize,
    /// Until the write has returned and was flushed.
    posted: Vec<f64>,
    /// Until the lane has risen.
    written: Vec<f64>,
}

/// Runs the benchmark and prints the results.
pub fn run(options: &Options) -> Outcome<()> {
    let ranks = on_processes(2, || rank(options))?;
    let times = ranks.first().ok_or("no rank reported")?;
    let bytes = options.layers * TOKENS * TOKEN_BYTES;
    let whole = times.first().map_or(f64::NAN, |times| percentile(&times.written, 50.0));
    let summary: Vec<_> = times
        .iter()
        .map(|times| {
            let (p50, p99) = (percentile(&times.written, 50.0), percentile(&times.written, 99.0));
            serde_json::json!({
                "tokens": times.tokens, "pages": times.pages, "rounds": times.written.len(),
                "gigabytes_per_second_p50": bytes as f64 / p50 / 1e9,
                "seconds_p50": p50, "seconds_p99": p99, "of_one_copy": whole / p50,
                "posted_seconds_p50": percentile(&times.posted, 50.0),
            })
        })
        .collect();
    if options.json {
        let gpus = if options.twin { &[][..] } else { &options.gpus };
        let line = serde_json::json!({
            "benchmark": "page-lists", "bytes": bytes, "gpus": gpus, "lists": summary,
        });
        println!("{line}");
        return Ok(());
    }
    let cell = |row: &serde_json::Value, name: &str, scale: f64, digits: usize| {
        format!("{:.digits$}", row[name].as_f64().unwrap_or(f64::NAN) * scale)
    };
    let rows: Vec<Vec<String>> = summary
        .iter()
        .map(|row| {
            vec![
                row["tokens"].to_string(),
                row["pages"].to_string(),
                cell(row, "gigabytes_per_second_p50", 1.0, 1),
                cell(row, "of_one_copy", 1.0, 2),
                cell(row, "seconds_p50", 1e6, 0),
                cell(row, "seconds_p99", 1e6, 0),
                cell(row, "posted_seconds_p50", 1e6, 0),
            ]
        })
        .collect();
    let headers = ["tokens", "pages", "GB/s", "of one copy", "us p50", "us p99", "posted us"];
    print!("{}", table::format(&headers, &rows));
    Ok(())
}

fn join(options: &Options) -> Outcome<Communicator> {
    let mut config = CommunicatorConfig::new(Config::from_env(Overrides::default())?);
    config.providers = vec![ProviderKind::Copy];
    if options.twin {
        config.devices = CopyBackend::Twin { seed: 1 };
    }
    config.spin = Some(SPIN);
    Ok(Communicator::init(config)?)
}

/// One rank's part; the times on rank 0.
fn rank(options: &Options) -> Outcome<Vec<Times>> {
    let communicator = join(options)?;
    let (me, peer) = (communicator.rank(), Rank(1 - communicator.rank().0));
    let bytes = options.layers * TOKENS * TOKEN_BYTES;
    let gpu = options.gpus[me.index()];
    let mut engine = communicator.engine();
    let host = engine.alloc(bytes as usize)?;
    let [source, inbox] = [(); 2].map(|()| engine.alloc_device(gpu, bytes as usize));
    let (source, inbox) = (source?, inbox?);
    let counter = engine.counter()?;
    drop(engine);
    let whole = 0..bytes;
    let shared = [(&host, whole.clone()), (&source, whole.clone()), (&inbox, whole)];
    let remotes = communicator.share(&shared, &[counter], clock::now().after(PATIENCE))?;
    let remote = &remotes[peer.index()];
    let end = End { me, peer, counter, bytes };
    let mut rounds = Rounds::default();
    let engine = &mut communicator.engine();
    // Rank 0's GPU gets bytes that rank 0 can compute.
    if me.0 == 1 {
        arena::fill_source(host.memory(), 1);
    }
    let pages = [end.all(&host, &remote[1])];
    end.transfer(engine, Rank(1), &pages, &mut rounds)?;
    let expected = Memory::shared(bytes as usize)?;
    arena::fill_source(&expected, 1);
    let lists: Vec<List> = std::iter::once(0)
        .chain(options.tokens.iter().copied())
        .map(|tokens| end.list(tokens, &source, &remote[2]))
        .collect();
    for list in &lists {
        host.memory().fill(0, bytes as usize, 0);
        end.transfer(engine, Rank(0), &[end.all(&host, &remote[2])], &mut rounds)?;
        end.transfer(engine, Rank(0), &list.pages, &mut rounds)?;
        end.transfer(engine, Rank(1), &[end.all(&inbox, &remote[0])], &mut rounds)?;
        if me.0 == 0 {
            list.check(host.memory(), &expected)?;
        }
    }
    let mut times: Vec<Times> = lists
        .iter()
        .map(|list| Times { tokens: list.tokens, pages: list.pages.len(), ..Times::default() })
        .collect();
    for round in 0..options.rounds + 2 {
        for (list, times) in lists.iter().zip(&mut times) {
            let (posted, written) = end.transfer(engine, Rank(0), &list.pages, &mut rounds)?;
            if round >= 2 {
                times.posted.push(posted);
                times.written.push(written);
            }
        }
    }
    Ok(times)
}

/// Rounds that this rank has written.
#[derive(Default)]
struct Rounds(u64);

struct List {
    tokens: u64,
    pages: Vec<Page>,
}

impl List {
    /// Compares the destination's bytes with the expected ones at the sources.
    fn check(&self, found: &Memory, expected: &Memory) -> Outcome<()> {
        for page in &self.pages {
            let length = page.length as usize;
            // SAFETY: the bytes have arrived, and no write to either range is in flight.
            let (found, expected) = unsafe {
                let found = found.bytes(page.destination_offset as usize, length);
                (found, expected.bytes(page.source_offset as usize, length))
            };
            if found != expected {
                return Err(format!("wrong bytes with {} tokens in a page", self.tokens).into());
            }
        }
        Ok(())
    }
}

struct End {
    me: Rank,
    peer: Rank,
    counter: CounterId,
    bytes: u64,
}

impl End {
    /// One page with all bytes.
    fn all(&self, source: &Region, to: &RemoteRegion) -> Page {
        Page {
            source: source.key(),
            source_offset: 0,
            destination: to.key,
            destination_offset: 0,
            length: self.bytes,
        }
    }

    /// All bytes in pages with so many tokens, whose places at the destination are a permutation.
    fn list(&self, tokens: u64, source: &Region, to: &RemoteRegion) -> List {
        if tokens == 0 {
            return List { tokens, pages: vec![self.all(source, to)] };
        }
        let length = tokens * TOKEN_BYTES;
        let count = self.bytes / length;
        let mut places: Vec<u64> = (0..count).collect();
        let mut random = SplitMix64::new(tokens);
        for last in (1..count).rev() {
            places.swap(last as usize, random.below(last + 1) as usize);
        }
        let page = |(at, place): (u64, &u64)| Page {
            source_offset: at * length,
            destination_offset: place * length,
            length,
            ..self.all(source, to)
        };
        List { tokens, pages: (0..count).zip(&places).map(page).collect() }
    }

    /// Writes pages from one rank to the other, which waits for them and answers with a credit. Seconds
    /// until the write was posted, and until its sources may be reused.
    fn transfer(
        &self,
        engine: &mut Engine,
        from: Rank,
        pages: &[Page],
        rounds: &mut Rounds,
    ) -> Outcome<(f64, f64)> {
        let (peer, counter) = (self.peer, self.counter);
        if self.me != from {
            let rule = engine.route(peer).ok_or("the peer has no route")?.parts;
            let raises = rule.count(pages.iter().map(|page| page.length));
            waiting(SPIN, |waiter| engine.wait(counter, &[(peer, raises)], waiter))?;
            engine.credit(peer, counter)?;
            engine.flush();
            return Ok((0.0, 0.0));
        }
        waiting(SPIN, |waiter| engine.wait_for_credit(counter, peer, rounds.0, waiter))?;
        let begin = Instant::now();
        let request = engine.write(peer, counter, rounds.0, pages)?;
        engine.flush();
        let posted = begin.elapsed().as_secs_f64();
        waiting(SPIN, |waiter| engine.wait_for_request(request, waiter))?;
        rounds.0 += 1;
        Ok((posted, begin.elapsed().as_secs_f64()))
    }
}
