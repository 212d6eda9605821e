//! Fixed work for callgrind: user-space instructions for a write at the source, and for an arrival at the
//! owner. `benchmarks/instructions.py` runs this and compares.
//!
//! The counted code never waits, so that equal programs give equal counts: all writes are one round, and
//! all arrivals precede the first poll.

use crate::group::{PATIENCE, join, mesh, on_processes_under, waiting};
use crate::null::Null;
use crate::posting::{NullRank, PAGES, PEERS, null_rank};
use crate::{Outcome, Path};
use clap::{Args, ValueEnum};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::{
    CounterConfig, CounterId, Device, Engine, EngineAddress, EngineConfig, Generation, MemberWrite,
    Page, PeerGroup, PeerWrite, Rank, Region, RemoteRegion, Time, WaitLimit, clock,
};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Device or path for the writes
    #[arg(long, value_enum, default_value = "null")]
    over: Over,
    /// Counted operation
    #[arg(long, value_enum, default_value = "write")]
    operation: Operation,
    /// Program that runs the counted rank
    #[arg(long, num_args = 1.., allow_hyphen_values = true)]
    under: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Over {
    /// Device whose writes complete at once without effect: only the engine's cost.
    Null,
    /// Device whose writes complete at the next poll, as on a NIC.
    Later,
    /// Provider verbs over a null device, whose requests complete at the next poll.
    VerbsNull,
    Shm,
    Tcp,
    OfiTcp,
    OfiShm,
}

impl Over {
    /// Path between two processes; `None` for a device.
    fn path(self) -> Option<Path> {
        match self {
            Over::Null | Over::Later | Over::VerbsNull => None,
            Over::Shm => Some(Path::Shm),
            Over::Tcp => Some(Path::Tcp),
            Over::OfiTcp => Some(Path::OfiTcp),
            Over::OfiShm => Some(Path::OfiShm),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// Write with 8 bytes.
    Write,
    /// The same with 16 in flight.
    Stream,
    /// Part with 8 pages; counted for each work request.
    Pages,
    /// Wait for a write that has arrived, and the credit.
    Arrival,
    /// Scatter with 8 bytes to each of 63 peers; counted per peer.
    Scatter,
    /// The same over a peer group.
    GroupScatter,
    /// Put by a proxy, 64 in each turn.
    ProxyPut,
    /// Put by a proxy's SCATTER to 63 peers; counted per peer.
    ProxyScatter,
    /// A query at the front end: submission, write, answer, report.
    FrontEndQuery,
    /// A query at the accelerator node: arrival, batch, answer.
    AcceleratorQuery,
}

/// Repetitions of each operation.
const REPEATS: usize = 256;
/// Writes in flight in a stream.
const IN_FLIGHT: usize = 16;
/// Scatter count.
const SCATTERS: usize = 8;
const LENGTH: u64 = 8;

/// Runs the operation and prints how often.
pub fn run(options: &Options) -> Outcome<()> {
    if let Operation::FrontEndQuery | Operation::AcceleratorQuery = options.operation {
        let repeats = crate::dispatch::instructions::run()?;
        println!("{}", serde_json::json!({ "repeats": repeats }));
        return Ok(());
    }
    if let Operation::ProxyPut | Operation::ProxyScatter = options.operation {
        let is_scatter = options.operation == Operation::ProxyScatter;
        let repeats = crate::proxy::count(SCATTERS, is_scatter)?;
        println!("{}", serde_json::json!({ "repeats": repeats }));
        return Ok(());
    }
    if let Some(path) = options.over.path() {
        on_processes_under(&options.under, 2, || rank(options, path))?;
    } else if options.over == Over::VerbsNull {
        verbs(options.operation)?;
    } else {
        let later = options.over == Over::Later;
        match options.operation {
            Operation::ProxyPut
            | Operation::ProxyScatter
            | Operation::Arrival
            | Operation::FrontEndQuery
            | Operation::AcceleratorQuery => {
                return Err("--operation arrival: expected a path between two processes".into());
            }
            Operation::Pages => return Err("--operation pages: expected --over verbs-null".into()),
            Operation::Write => null_writes(later, 1)?,
            Operation::Stream => null_writes(later, IN_FLIGHT)?,
            Operation::Scatter => null_scatters(later)?,
            Operation::GroupScatter => null_group_scatters(later)?,
        }
    }
    let repeats = match options.operation {
        Operation::Scatter | Operation::GroupScatter => SCATTERS * PEERS as usize,
        Operation::Pages => REPEATS * PAGES,
        _ => REPEATS,
    };
    println!("{}", serde_json::json!({ "repeats": repeats }));
    Ok(())
}

/// One rank's part. Rank 0 is counted.
fn rank(options: &Options, path: Path) -> Outcome<()> {
    let communicator = join(path, Some(Duration::ZERO))?;
    let (me, peer) = (communicator.rank(), Rank(1 - communicator.rank().0));
    let mut engine = communicator.engine();
    let (source, inbox) = (engine.alloc(4096)?, engine.alloc(4096)?);
    let counters = (0..REPEATS).map(|_| engine.counter()).collect::<Result<Vec<_>, _>>()?;
    drop(engine);
    let deadline = clock::now().after(PATIENCE);
    let remotes = communicator.share(&[(&inbox, 0..4096)], &counters, deadline)?;
    let remote = remotes[peer.0 as usize][0];
    let control = mesh(&communicator)?.clone();
    let engine = &mut *communicator.engine();
    match (options.operation, me.0) {
        (Operation::Write, 0) => {
            writes(engine, counters[0], &page(&source, remote))?;
            await_raises(engine, counters[1], 1)?;
        }
        (Operation::Write, _) => {
            await_raises(engine, counters[0], REPEATS as u64)?;
            engine.signal(peer, counters[1], 0)?;
        }
        (Operation::Arrival, 0) => {
            for &counter in &counters {
                await_raises(engine, counter, 1)?;
            }
            arrivals(engine, &counters)?;
        }
        (Operation::Arrival, _) => {
            for &counter in &counters {
                engine.write(peer, counter, 0, &[page(&source, remote)])?;
            }
            for &counter in &counters {
                waiting(Duration::ZERO, |waiter| engine.wait_for_credit(counter, peer, 1, waiter))?;
            }
        }
        _ => return Err("streams and scatters: expected --over null or later".into()),
    }
    control.barrier(PATIENCE)?;
    communicator.leave();
    Ok(())
}

fn page(source: &Region, remote: RemoteRegion) -> Page {
    let (source, destination) = (source.key(), remote.key);
    Page { source, source_offset: 0, destination, destination_offset: 0, length: LENGTH }
}

fn await_raises(engine: &mut Engine, counter: CounterId, raises: u64) -> Outcome<()> {
    let peer = Rank(1 - engine.rank().0);
    Ok(waiting(Duration::ZERO, |waiter| engine.wait(counter, &[(peer, raises)], waiter))?)
}

/// Code counted for a write; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
fn writes(engine: &mut Engine, counter: CounterId, page: &Page) -> Outcome<()> {
    let peer = Rank(1 - engine.rank().0);
    for _ in 0..REPEATS {
        engine.write(peer, counter, 0, std::slice::from_ref(page))?;
    }
    Ok(())
}

/// Same as [`writes`], with completions and several writes in flight.
#[inline(never)]
fn completed_writes(
    engine: &mut Engine,
    counter: CounterId,
    pages: &[Page],
    in_flight: usize,
) -> Outcome<()> {
    let mut events = Vec::with_capacity(16);
    for _ in 0..REPEATS / in_flight {
        let mut request = engine.write(Rank(1), counter, 0, pages)?;
        for _ in 1..in_flight {
            request = engine.write(Rank(1), counter, 0, pages)?;
        }
        events.clear();
        engine.poll(Time(0), &mut events);
        if !engine.is_drained(request) {
            return Err("a write did not complete".into());
        }
    }
    Ok(())
}

/// Code counted for scatters with completions; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
fn scatters(engine: &mut Engine, counter: CounterId, writes: &[PeerWrite<'_>]) -> Outcome<()> {
    let mut events = Vec::with_capacity(16);
    for _ in 0..SCATTERS {
        let request = engine.scatter(writes, counter, 0, None)?;
        events.clear();
        engine.poll(Time(0), &mut events);
        if !engine.is_drained(request) {
            return Err("a scatter did not complete".into());
        }
    }
    Ok(())
}

/// As [`scatters`], over a peer group.
#[inline(never)]
fn group_scatters(
    engine: &mut Engine,
    group: &mut PeerGroup,
    writes: &[MemberWrite],
) -> Outcome<()> {
    let mut events = Vec::with_capacity(16);
    for _ in 0..SCATTERS {
        let request = engine.scatter_group(group, 0, writes, None)?;
        events.clear();
        engine.poll(Time(0), &mut events);
        if !engine.is_drained(request) {
            return Err("a scatter did not complete".into());
        }
    }
    Ok(())
}

/// Code counted for an arrival; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
fn arrivals(engine: &mut Engine, counters: &[CounterId]) -> Outcome<()> {
    let peer = Rank(1 - engine.rank().0);
    for &counter in counters {
        await_raises(engine, counter, 1)?;
        engine.credit(peer, counter)?;
        engine.flush();
    }
    Ok(())
}

/// Rank 0 in a group whose peers are grants without processes.
pub struct SingleRank {
    /// Peers and their counters.
    pub peers: Vec<(Engine, CounterId)>,
    pub engine: Engine,
    pub counter: CounterId,
    pub source: Region,
    pub remotes: Vec<RemoteRegion>,
}

/// Connects rank 0 with peers over null devices. The counter has a window; in a window of several rounds the peers'
/// credits arrive.
pub fn single_rank(ranks: u32, later: bool, window: u32) -> Outcome<SingleRank> {
    let null = Null { later, raised: (window > 1).then(Arc::default) };
    let deadline = clock::now().after(PATIENCE);
    let mut engines = Vec::new();
    for rank in 0..ranks {
        let devices: [Arc<dyn Device>; 1] = [Arc::new(null.clone())];
        let lanes = if window > 1 { 4096 } else { 256 };
        let config = EngineConfig { lanes, ..EngineConfig::default() };
        engines.push(Engine::new(config, Rank(rank), ranks, Generation(0), &devices)?);
    }
    let addresses: Vec<EngineAddress> = engines.iter().map(Engine::address).collect();
    let messages = vec![Vec::new(); ranks as usize];
    for engine in &mut engines {
        engine.introduce(&addresses)?;
        let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
        engine.connect(&addresses, &messages, &mut limit)?;
    }
    let others = engines.split_off(1);
    let mut engine = engines.pop().ok_or("no rank 0")?;
    let shape = CounterConfig { window, ..CounterConfig::default() };
    let (source, counter) = (engine.alloc(4096)?, engine.counter_with(shape)?);
    let (mut remotes, mut peers) = (Vec::new(), Vec::new());
    for mut peer in others {
        let (inbox, its_counter) = (peer.alloc(4096)?, peer.counter_with(shape)?);
        let grant = peer.grant(Rank(0), &[(&inbox, 0..4096)], &[its_counter])?;
        remotes.extend(engine.import(peer.rank(), &grant, &[counter], deadline)?);
        // Peers that return credits import rank 0's lanes as well.
        if window > 1 {
            let grant = engine.grant(peer.rank(), &[], &[counter])?;
            peer.import(Rank(0), &grant, &[its_counter], deadline)?;
            peers.push((peer, its_counter));
        }
    }
    Ok(SingleRank { peers, engine, counter, source, remotes })
}

fn null_writes(later: bool, in_flight: usize) -> Outcome<()> {
    let SingleRank { mut engine, counter, source, remotes, .. } = single_rank(2, later, 1)?;
    let page = page(&source, remotes[0]);
    if later {
        // Warms up the request memory.
        for _ in 0..IN_FLIGHT {
            engine.write(Rank(1), counter, 0, &[page])?;
        }
        engine.poll(Time(0), &mut Vec::new());
        return completed_writes(&mut engine, counter, &[page], in_flight);
    }
    writes(&mut engine, counter, &page)
}

fn null_scatters(later: bool) -> Outcome<()> {
    let SingleRank { mut engine, counter, source, remotes, .. } = single_rank(1 + PEERS, later, 1)?;
    let pages: Vec<[Page; 1]> = remotes.iter().map(|&remote| [page(&source, remote)]).collect();
    let writes: Vec<PeerWrite<'_>> = remotes
        .iter()
        .zip(&pages)
        .map(|(remote, pages)| PeerWrite { peer: remote.peer, pages })
        .collect();
    scatters(&mut engine, counter, &writes)
}

fn null_group_scatters(later: bool) -> Outcome<()> {
    let SingleRank { mut engine, counter, source, remotes, .. } = single_rank(1 + PEERS, later, 1)?;
    let mut group = engine.peer_group(counter, &source, &remotes)?;
    let write = |member| MemberWrite { member, length: LENGTH, ..MemberWrite::default() };
    let writes: Vec<MemberWrite> = (0..PEERS).map(write).collect();
    group_scatters(&mut engine, &mut group, &writes)
}

/// Counted operations over the provider verbs.
fn verbs(operation: Operation) -> Outcome<()> {
    let is_scatter = matches!(operation, Operation::Scatter | Operation::GroupScatter);
    let mut rank = null_rank(if is_scatter { PEERS } else { 1 }, 0)?;
    let count = if operation == Operation::Pages { PAGES } else { 1 };
    let pages: Vec<Vec<Page>> =
        (0..rank.remotes.len()).map(|member| rank.pages(member, count, LENGTH)).collect();
    let NullRank { ref mut engine, counter, ref source, ref remotes, .. } = rank;
    match operation {
        Operation::Scatter => {
            let both = remotes.iter().zip(&pages);
            let writes: Vec<PeerWrite<'_>> =
                both.map(|(remote, pages)| PeerWrite { peer: remote.peer, pages }).collect();
            scatters(engine, counter, &writes)
        }
        Operation::GroupScatter => {
            let mut group = engine.peer_group(counter, source, remotes)?;
            let write = |member| MemberWrite { member, length: LENGTH, ..MemberWrite::default() };
            let writes: Vec<MemberWrite> = (0..PEERS).map(write).collect();
            group_scatters(engine, &mut group, &writes)
        }
        Operation::Stream => completed_writes(engine, counter, &pages[0], IN_FLIGHT),
        _ => completed_writes(engine, counter, &pages[0], 1),
    }
}
