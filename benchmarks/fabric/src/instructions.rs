//! Fixed work for callgrind to count: what a write costs its source, and what an arrival costs its
//! owner, in instructions of user space. `benchmarks/instructions.py` runs this and compares.
//!
//! Nothing here waits while it is counted, so the same program counts the same number again: all
//! writes are one round, and all arrivals are there before the first is looked at.

use crate::group::{PATIENCE, join, on_processes_under, waiting};
use crate::{Outcome, Path};
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::descriptor::Address;
use weft_fabric::memory::Memory;
use weft_fabric::provider::{Capabilities, Group, Posted, Sink, Work};
use weft_fabric::{
    CounterId, Engine, EngineConfig, Generation, Page, PartRule, Provider, ProviderKind, Rank,
    Region, RegionKey, RemoteRegion, Time, clock,
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
    /// A provider that does nothing: what is left is the engine's.
    Null,
    Shm,
    Tcp,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// A write of 8 bytes.
    Write,
    /// Waiting for a write that is there, and crediting it.
    Arrival,
}

/// How often it is done.
const REPEATS: usize = 256;
const LENGTH: u64 = 8;

/// Does it, and says how often.
pub fn run(options: &Options) -> Outcome<()> {
    if options.over == Over::Null {
        if options.operation == Operation::Arrival {
            return Err("nothing arrives over the null provider".into());
        }
        null()?;
    } else {
        on_processes_under(&options.under, 2, || rank(options))?;
    }
    println!("{}", serde_json::json!({ "repeats": REPEATS }));
    Ok(())
}

/// One rank's part. Rank 0 is the one that is counted.
fn rank(options: &Options) -> Outcome<()> {
    let path = if options.over == Over::Shm { Path::Shm } else { Path::Tcp };
    let mut communicator = join(path, Some(Duration::ZERO))?;
    let (me, peer) = (communicator.rank(), Rank(1 - communicator.rank().0));
    let engine = communicator.engine();
    let (source, inbox) = (engine.alloc(4096)?, engine.alloc(4096)?);
    let counters = (0..REPEATS).map(|_| engine.counter()).collect::<Result<Vec<_>, _>>()?;
    let deadline = clock::now().after(PATIENCE);
    let remotes = communicator.share(&[(&inbox, 0..4096)], &counters, deadline)?;
    let remote = remotes[peer.0 as usize][0];
    let control = communicator.control().clone();
    let engine = communicator.engine();
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

/// Writes over the null provider, to a second engine of this process.
fn null() -> Outcome<()> {
    let new = |rank| -> Outcome<Engine> {
        let providers: Vec<Box<dyn Provider>> = vec![Box::new(Null)];
        Ok(Engine::new(EngineConfig::default(), Rank(rank), 2, Generation(0), providers)?)
    };
    let (mut here, mut there) = (new(0)?, new(1)?);
    let addresses: Vec<Address> = vec![here.address(), there.address()];
    let deadline = clock::now().after(PATIENCE);
    here.connect(&addresses, deadline)?;
    there.connect(&addresses, deadline)?;
    let (source, inbox) = (here.alloc(4096)?, there.alloc(4096)?);
    let (counter, its_counter) = (here.counter()?, there.counter()?);
    let grant = there.grant(Rank(0), &[(&inbox, 0..4096)], &[its_counter])?;
    let remotes = here.import(Rank(1), &grant, &[counter], deadline)?;
    writes(&mut here, counter, &page(&source, remotes[0]))
}

/// Takes every post and does nothing.
struct Null;

impl Provider for Null {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { parts: PartRule::WHOLE, registered_destination: true, inline: true }
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn reaches(&self, _address: &[u8]) -> bool {
        true
    }

    fn connect(&mut self, _group: &Group<'_>) -> weft_fabric::Result<()> {
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
        _deadline: Time,
    ) -> weft_fabric::Result<()> {
        Ok(())
    }

    fn deregister(&mut self, _key: RegionKey) {}

    fn post(&mut self, _work: &Work<'_>, _sink: &mut Sink) -> Result<Posted, String> {
        Ok(Posted::Done)
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, _sink: &mut Sink) {}

    fn fence(&mut self, _peer: Rank, _sink: &mut Sink) {}

    fn descriptor(&self) -> Option<std::os::fd::RawFd> {
        None
    }
}
