//! Fixed work for callgrind to count: what a write costs its source, and what an arrival costs its
//! owner, in instructions of user space. `benchmarks/instructions.py` runs this and compares.
//!
//! Nothing here waits while it is counted, so the same program counts the same number again: all
//! writes are one round, and all arrivals are there before the first is looked at.

use crate::group::{PATIENCE, join, mesh, on_processes_under, waiting};
use crate::{Outcome, Path};
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::descriptor::Address;
use weft_fabric::link::{Introduction, Membership, Posted, Scatter, ScatterPosted, Sink, Work};
use weft_fabric::memory::Memory;
use weft_fabric::{
    CounterId, Device, Engine, EngineConfig, Generation, Link, MemberWrite, Page, PeerGroup,
    PeerWrite, ProviderKind, Rank, Region, RegionKey, RemoteRegion, RouteRule, Time, WaitLimit,
    clock,
};

/// What to do.
#[derive(Args)]
pub struct Options {
    /// What carries the writes
    #[arg(long, value_enum, default_value = "null")]
    over: Over,
    /// What is done
    #[arg(long, value_enum, default_value = "write")]
    operation: Operation,
    /// Run the rank that is counted under this program
    #[arg(long, num_args = 1.., allow_hyphen_values = true)]
    under: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Over {
    /// A device whose writes complete at once and do nothing: what is left is the engine's.
    Null,
    /// A device whose writes complete at the next poll, as those of a NIC do.
    Later,
    Shm,
    Tcp,
    OfiTcp,
    OfiShm,
}

impl Over {
    /// The path between two processes, if it is one.
    fn path(self) -> Option<Path> {
        match self {
            Over::Null | Over::Later => None,
            Over::Shm => Some(Path::Shm),
            Over::Tcp => Some(Path::Tcp),
            Over::OfiTcp => Some(Path::OfiTcp),
            Over::OfiShm => Some(Path::OfiShm),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// A write of 8 bytes.
    Write,
    /// The same with 16 of them under way at a time.
    Stream,
    /// Waiting for a write that is there, and crediting it.
    Arrival,
    /// Writes of 8 bytes to 63 peers as one request; counted for each of them.
    Scatter,
    /// The same over a peer group.
    GroupScatter,
}

/// How often it is done.
const REPEATS: usize = 256;
/// Writes of a stream that are under way at a time.
const UNDER_WAY: usize = 16;
/// How many scatters, and to how many peers each.
const SCATTERS: usize = 8;
const PEERS: u32 = 63;
const LENGTH: u64 = 8;

/// Does it, and says how often.
pub fn run(options: &Options) -> Outcome<()> {
    if let Some(path) = options.over.path() {
        on_processes_under(&options.under, 2, || rank(options, path))?;
    } else {
        let later = options.over == Over::Later;
        match options.operation {
            Operation::Arrival => return Err("nothing arrives over these devices".into()),
            Operation::Write => null_writes(later, 1)?,
            Operation::Stream => null_writes(later, UNDER_WAY)?,
            Operation::Scatter => null_scatters(later)?,
            Operation::GroupScatter => null_group_scatters(later)?,
        }
    }
    let repeats = match options.operation {
        Operation::Scatter | Operation::GroupScatter => SCATTERS * PEERS as usize,
        Operation::Write | Operation::Stream | Operation::Arrival => REPEATS,
    };
    println!("{}", serde_json::json!({ "repeats": repeats }));
    Ok(())
}

/// One rank's part. Rank 0 is the one that is counted.
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
        (Operation::Stream | Operation::Scatter | Operation::GroupScatter, _) => {
            return Err("only null and later count streams and scatters".into());
        }
        (Operation::Arrival, _) => {
            for &counter in &counters {
                engine.write(peer, counter, 0, &[page(&source, remote)])?;
            }
            for &counter in &counters {
                waiting(Duration::ZERO, |waiter| engine.wait_for_credit(counter, peer, 1, waiter))?;
            }
        }
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

/// What callgrind counts for a write. Its name is known to `benchmarks/instructions.py`.
#[inline(never)]
fn writes(engine: &mut Engine, counter: CounterId, page: &Page) -> Outcome<()> {
    let peer = Rank(1 - engine.rank().0);
    for _ in 0..REPEATS {
        engine.write(peer, counter, 0, std::slice::from_ref(page))?;
    }
    Ok(())
}

/// As [`writes`], with their completions; so many are under way at a time.
#[inline(never)]
fn completed_writes(
    engine: &mut Engine,
    counter: CounterId,
    page: &Page,
    under_way: usize,
) -> Outcome<()> {
    let mut events = Vec::with_capacity(16);
    for _ in 0..REPEATS / under_way {
        let mut request = engine.write(Rank(1), counter, 0, std::slice::from_ref(page))?;
        for _ in 1..under_way {
            request = engine.write(Rank(1), counter, 0, std::slice::from_ref(page))?;
        }
        events.clear();
        engine.poll(Time(0), &mut events);
        if !engine.is_drained(request) {
            return Err("a write did not complete".into());
        }
    }
    Ok(())
}

/// What callgrind counts for scatters, with their completions. Its name is known to
/// `benchmarks/instructions.py`.
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

/// What callgrind counts for an arrival. Its name is known to `benchmarks/instructions.py`.
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

/// Rank 0 of a group whose peers exist as grants alone.
struct Lone {
    engine: Engine,
    counter: CounterId,
    source: Region,
    remotes: Vec<RemoteRegion>,
}

fn lone(ranks: u32, later: bool) -> Outcome<Lone> {
    let deadline = clock::now().after(PATIENCE);
    let mut engines = Vec::new();
    for rank in 0..ranks {
        let devices: [Arc<dyn Device>; 1] = [Arc::new(Null { later })];
        let config = EngineConfig { lanes: 256, ..EngineConfig::default() };
        engines.push(Engine::new(config, Rank(rank), ranks, Generation(0), &devices)?);
    }
    let addresses: Vec<Address> = engines.iter().map(Engine::address).collect();
    let messages = vec![Vec::new(); ranks as usize];
    for engine in &mut engines {
        engine.introduce(&addresses)?;
        let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
        engine.connect(&addresses, &messages, &mut limit)?;
    }
    let mut peers = engines.into_iter();
    let mut engine = peers.next().ok_or("there is no rank 0")?;
    let (source, counter) = (engine.alloc(4096)?, engine.counter()?);
    let mut remotes = Vec::new();
    for mut peer in peers {
        let (inbox, its_counter) = (peer.alloc(4096)?, peer.counter()?);
        let grant = peer.grant(Rank(0), &[(&inbox, 0..4096)], &[its_counter])?;
        remotes.extend(engine.import(peer.rank(), &grant, &[counter], deadline)?);
    }
    Ok(Lone { engine, counter, source, remotes })
}

fn null_writes(later: bool, under_way: usize) -> Outcome<()> {
    let Lone { mut engine, counter, source, remotes } = lone(2, later)?;
    let page = page(&source, remotes[0]);
    if later {
        // Requests find their memory there.
        for _ in 0..UNDER_WAY {
            engine.write(Rank(1), counter, 0, &[page])?;
        }
        engine.poll(Time(0), &mut Vec::new());
        return completed_writes(&mut engine, counter, &page, under_way);
    }
    writes(&mut engine, counter, &page)
}

fn null_scatters(later: bool) -> Outcome<()> {
    let Lone { mut engine, counter, source, remotes } = lone(1 + PEERS, later)?;
    let pages: Vec<[Page; 1]> = remotes.iter().map(|&remote| [page(&source, remote)]).collect();
    let writes: Vec<PeerWrite<'_>> = remotes
        .iter()
        .zip(&pages)
        .map(|(remote, pages)| PeerWrite { peer: remote.peer, pages })
        .collect();
    scatters(&mut engine, counter, &writes)
}

fn null_group_scatters(later: bool) -> Outcome<()> {
    let Lone { mut engine, counter, source, remotes } = lone(1 + PEERS, later)?;
    let mut group = engine.peer_group(counter, &source, &remotes)?;
    let write = |member| MemberWrite { member, length: LENGTH, ..MemberWrite::default() };
    let writes: Vec<MemberWrite> = (0..PEERS).map(write).collect();
    group_scatters(&mut engine, &mut group, &writes)
}

/// Takes every post and moves nothing.
struct Null {
    /// Whether posts complete at the next poll.
    later: bool,
}

struct NullLink {
    later: bool,
    /// Tokens of posts that complete at the next poll.
    posted: Vec<u64>,
}

const QUEUE: usize = 1024;

impl Device for Null {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, _group: Membership) -> weft_fabric::Result<Box<dyn Link>> {
        Ok(Box::new(NullLink { later: self.later, posted: Vec::with_capacity(QUEUE) }))
    }
}

impl Link for NullLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn route(&self, _theirs: &[u8]) -> Option<RouteRule> {
        Some(RouteRule { inline: !self.later, ..RouteRule::STORES })
    }

    fn connect(
        &mut self,
        _: &[Introduction<'_>],
        _: &mut WaitLimit<'_>,
    ) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn register(&mut self, _key: RegionKey, _memory: &Arc<Memory>) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn grant(&mut self, _: RegionKey, _: Rank, _: Range<u64>) -> weft_fabric::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn import(
        &mut self,
        _peer: Rank,
        _key: RegionKey,
        _length: u64,
        _entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn deregister(&mut self, _key: RegionKey) {}

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> Result<Posted, String> {
        if !self.later {
            return Ok(Posted::Done);
        }
        if self.posted.len() == self.posted.capacity() {
            return Ok(Posted::Full);
        }
        self.posted.push(work.token);
        Ok(Posted::InFlight)
    }

    fn post_scatter(&mut self, scatter: &Scatter<'_>, _sink: &mut Sink) -> ScatterPosted {
        let taken = scatter.parts.len();
        if !self.later {
            return ScatterPosted { taken, ..ScatterPosted::default() };
        }
        self.posted.extend(scatter.parts.iter().map(|part| scatter.token(part)));
        ScatterPosted { taken, in_flight: taken as u32, failed: None }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        // The engine has drained the sink.
        sink.completed.reserve(QUEUE);
        std::mem::swap(&mut self.posted, &mut sink.completed);
    }

    fn fence(&mut self, _peer: Rank, _sink: &mut Sink) {}
}
