//! Posting cost in the provider verbs over a null device: a simulated NIC that accepts every work request,
//! completes it at the next poll and moves no byte. These figures leave out device and doorbell.

use crate::Outcome;
use crate::group::PATIENCE;
use crate::null::Null;
use clap::Args;
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use weft_fabric::providers::verbs::{TwinConfig, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    CounterId, Device, Engine, EngineAddress, EngineConfig, Generation, MemberWrite, Page,
    PeerGroup, PeerWrite, Rank, Region, RemoteRegion, RequestId, Time, WaitLimit, clock,
};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Print JSON lines in place of a table
    #[arg(long)]
    json: bool,
}

/// Peers per scatter.
pub const PEERS: u32 = 63;
/// Bytes per MoE dispatch page: 7168 16-bit elements.
const PAGE: u64 = 14 << 10;
/// Pages per part.
pub const PAGES: usize = 8;
/// Unread arrivals per peer: a null device reports none as consumed, so they bound the posts in a run.
const MAX_UNCONSUMED: u32 = 1024;
/// Samples per case, and samples discarded before the first.
const SAMPLES: usize = 900;
const WARM_UP: usize = 100;

/// Figures for one operation.
#[derive(Serialize)]
struct Case {
    benchmark: &'static str,
    device: &'static str,
    operation: &'static str,
    /// Work requests.
    requests: usize,
    /// Nanoseconds for the call that posts, without the two clock readings.
    post_ns_p50: f64,
    post_ns_p99: f64,
    /// The same with the poll that completes it.
    complete_ns_p50: f64,
    complete_ns_p99: f64,
}

/// Rank 0 in a group over verbs whose NIC has become a null device.
pub struct NullRank {
    // Drop order: peers deliver farewells while rank 0's queue pairs exist.
    /// Peers, which no longer poll.
    _peers: Vec<Engine>,
    pub engine: Engine,
    pub counter: CounterId,
    pub source: Region,
    pub remotes: Vec<RemoteRegion>,
}

/// Connects rank 0 with `peers` others over simulated NICs, and turns the NIC into a null device whose
/// requests complete after `polls` polls.
pub fn null_rank(peers: u32, polls: u32) -> Outcome<NullRank> {
    let ranks = 1 + peers;
    let deadline = clock::now().after(PATIENCE);
    let config = VerbsConfig { max_unconsumed: MAX_UNCONSUMED, ..VerbsConfig::default() };
    let nics: Vec<Arc<TwinNic>> = (0..ranks).map(|_| TwinNic::new(TwinConfig::default())).collect();
    let mut engines = Vec::new();
    for rank in 0..ranks {
        let nic = std::slice::from_ref(&nics[rank as usize]);
        let verbs: Arc<dyn Device> = Arc::new(VerbsDevice::over(config.clone(), nic)?);
        // The peers have no connections over verbs with each other.
        let devices = if rank == 0 { vec![verbs] } else { vec![Arc::new(Null::default()), verbs] };
        let config = EngineConfig { lanes: 256, ..EngineConfig::default() };
        engines.push(Engine::new(config, Rank(rank), ranks, Generation(0), &devices)?);
    }
    let addresses: Vec<EngineAddress> = engines.iter().map(Engine::address).collect();
    let introduce = |engine: &mut Engine| engine.introduce(&addresses);
    let messages = engines.iter_mut().map(introduce).collect::<Result<Vec<_>, _>>()?;
    std::thread::scope(|scope| {
        let connecting = engines.iter_mut().enumerate().map(|(me, engine)| {
            let (addresses, messages) = (&addresses, &messages);
            scope.spawn(move || {
                let to_me = messages.iter().map(|from| from[me].clone()).collect::<Vec<_>>();
                let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
                engine.connect(addresses, &to_me, &mut limit)
            })
        });
        let connecting: Vec<_> = connecting.collect();
        connecting.into_iter().try_for_each(|rank| -> Outcome<()> {
            Ok(rank.join().map_err(|_| "a rank panicked")??)
        })
    })?;
    let mut peers = engines.split_off(1);
    let mut engine = engines.pop().ok_or("no rank 0")?;
    let (source, counter) = (engine.alloc(PAGES * PAGE as usize)?, engine.counter()?);
    let mut remotes = Vec::new();
    for peer in &mut peers {
        let (inbox, its_counter) = (peer.alloc(PAGES * PAGE as usize)?, peer.counter()?);
        let all = 0..PAGES as u64 * PAGE;
        let grant = peer.grant(Rank(0), &[(&inbox, all)], &[its_counter])?;
        remotes.extend(engine.import(peer.rank(), &grant, &[counter], deadline)?);
    }
    nics[0].become_null(polls);
    Ok(NullRank { engine, counter, source, remotes, _peers: peers })
}

impl NullRank {
    /// Pages with one length toward a peer, one behind the other.
    pub fn pages(&self, member: usize, count: usize, length: u64) -> Vec<Page> {
        let page = |index| Page {
            source: self.source.key(),
            source_offset: index * PAGE,
            destination: self.remotes[member].key,
            destination_offset: index * PAGE,
            length,
        };
        (0..count as u64).map(page).collect()
    }
}

/// Runs all operations and prints the times.
pub fn run(options: &Options) -> Outcome<()> {
    let mut cases = Vec::new();
    for (operation, count, length) in [
        ("signal", 0, 0),
        ("write of 64 B", 1, 64),
        ("write of a page of 14 KiB", 1, PAGE),
        ("part of 8 pages", PAGES, PAGE),
    ] {
        let mut rank = null_rank(1, 0)?;
        let (pages, counter) = (rank.pages(0, count, length), rank.counter);
        let post = |engine: &mut Engine| engine.write(Rank(1), counter, 0, &pages);
        cases.push(measure(&mut rank.engine, operation, count.max(1), post)?);
    }
    let mut rank = null_rank(PEERS, 0)?;
    let pages: Vec<Vec<Page>> = (0..PEERS as usize).map(|peer| rank.pages(peer, 1, PAGE)).collect();
    let both = rank.remotes.iter().zip(&pages);
    let writes: Vec<PeerWrite<'_>> =
        both.map(|(remote, pages)| PeerWrite { peer: remote.peer, pages }).collect();
    let counter = rank.counter;
    let post = |engine: &mut Engine| engine.scatter(&writes, counter, 0, None);
    cases.push(measure(&mut rank.engine, "scatter of 63 pages", PEERS as usize, post)?);

    let mut rank = null_rank(PEERS, 0)?;
    let mut group: PeerGroup = rank.engine.peer_group(rank.counter, &rank.source, &rank.remotes)?;
    let write = |member| MemberWrite { member, length: PAGE, ..MemberWrite::default() };
    let writes: Vec<MemberWrite> = (0..PEERS).map(write).collect();
    let post = |engine: &mut Engine| engine.scatter_group(&mut group, 0, &writes, None);
    cases.push(measure(&mut rank.engine, "group scatter of 63 pages", PEERS as usize, post)?);
    print(options, &cases)
}

/// Times an operation, and the poll that completes it.
fn measure(
    engine: &mut Engine,
    operation: &'static str,
    requests: usize,
    mut post: impl FnMut(&mut Engine) -> weft_fabric::Result<RequestId>,
) -> Outcome<Case> {
    let (mut posts, mut wholes) = (Vec::new(), Vec::new());
    let mut events = Vec::with_capacity(16);
    let clock_ns = clock_cost();
    for sample in 0..WARM_UP + SAMPLES {
        events.clear();
        let begin = Instant::now();
        let request = black_box(post(engine)?);
        let posted = begin.elapsed();
        while !engine.is_drained(request) {
            engine.poll(Time(0), &mut events);
        }
        let whole = begin.elapsed();
        if sample >= WARM_UP {
            posts.push((posted.as_nanos() as f64 - clock_ns).max(0.0));
            wholes.push((whole.as_nanos() as f64 - 2.0 * clock_ns).max(0.0));
        }
    }
    posts.sort_by(f64::total_cmp);
    wholes.sort_by(f64::total_cmp);
    let at = |sorted: &[f64], share: f64| sorted[(share * (sorted.len() - 1) as f64) as usize];
    Ok(Case {
        benchmark: "posting",
        device: "null",
        operation,
        requests,
        post_ns_p50: at(&posts, 0.5),
        post_ns_p99: at(&posts, 0.99),
        complete_ns_p50: at(&wholes, 0.5),
        complete_ns_p99: at(&wholes, 0.99),
    })
}

/// Nanoseconds between two clock readings.
fn clock_cost() -> f64 {
    let reading = |_| {
        let begin = Instant::now();
        begin.elapsed().as_nanos() as f64
    };
    let mut readings: Vec<f64> = (0..1001).map(reading).collect();
    readings.sort_by(f64::total_cmp);
    readings[500]
}

fn print(options: &Options, cases: &[Case]) -> Outcome<()> {
    if options.json {
        for case in cases {
            println!("{}", serde_json::to_string(case)?);
        }
        return Ok(());
    }
    println!(
        "operation                   requests  post p50 ns  p99 ns  with completion p50 ns  p99 ns"
    );
    for case in cases {
        println!(
            "{:27} {:8} {:12.0} {:7.0} {:23.0} {:7.0}",
            case.operation,
            case.requests,
            case.post_ns_p50,
            case.post_ns_p99,
            case.complete_ns_p50,
            case.complete_ns_p99
        );
    }
    Ok(())
}
