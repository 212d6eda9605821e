//! The proxy's cost for each put, over a null device that moves no bytes and completes each post at the next poll.
//!
//! One thread runs the turns of `weft-proxy-N`: commands out of the ring, the driver, the engine. Kernels are replaced
//! by stores to the ring between the turns, and are not measured. Peers give a credit for each put between the turns; the
//! next turn takes them.

use crate::Outcome;
use crate::instructions::{SingleRank, single_rank};
use crate::posting::PEERS;
use clap::Args;
use serde_json::json;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Instant;
use weft_fabric::{CounterId, Engine, MemberWrite, PeerGroup, Rank, Requests, Time};
use weft_gpu::proxy::{
    Command, MappedRing, Place, ProxyConfig, ProxyDriver, RingReader, RingWriter, SLOT_WORDS,
    Target, Template, TemplateMember, Window, WordConfig,
};

/// Benchmark options.
#[derive(Args)]
pub struct Options {
    /// Print JSON lines in place of a table
    #[arg(long)]
    json: bool,
}

const SLOTS: usize = 1024;
/// Commands in a turn, as the proxy's thread takes them.
const EACH_TURN: usize = 64;
const LENGTH: u64 = 8;
const REGION: u64 = 4096;
const TARGET: Target = Target { word: 0, hold: false };
/// Turns in a sample, samples, and samples discarded before them.
const TURNS: usize = 16;
const SAMPLES: usize = 50;
const WARM_UP: usize = 5;

/// A rank's proxy without its thread, and a kernel's end of the ring.
pub struct NullProxy {
    engine: Engine,
    driver: ProxyDriver,
    requests: Requests,
    /// [`Engine::drive_onward`]'s.
    last_poll: u64,
    reader: RingReader<MappedRing<'static>>,
    writer: RingWriter<MappedRing<'static>>,
    lengths: Vec<AtomicU32>,
    peers: Vec<(Engine, CounterId)>,
    ticket: u64,
}

impl NullProxy {
    /// Proxy with this many peers, all in one template.
    pub fn new(peers: u32) -> Outcome<NullProxy> {
        let rounds = if peers == 1 { EACH_TURN as u32 } else { 4 };
        let SingleRank { mut engine, counter, source, remotes, peers: others } =
            single_rank(1 + peers, true, rounds)?;
        let destinations = std::iter::once(None).chain(remotes.iter().copied().map(Some)).collect();
        let member =
            |peer| TemplateMember { peer: Rank(peer), source_offset: 0, destination_offset: 0 };
        let config = ProxyConfig {
            words: vec![WordConfig { counter, hold: false }],
            rounds,
            windows: vec![Window { source: Some((source.key(), REGION)), destinations }],
            templates: vec![Template { members: (1..=peers).map(member).collect() }],
            list_lengths: peers,
            max_put_bytes: LENGTH,
            ..ProxyConfig::default()
        };
        let driver = ProxyDriver::new(&mut engine, config)?;
        // Kernels' memory lives as long as the process.
        let slots: Vec<[AtomicU32; SLOT_WORDS]> = (0..SLOTS).map(|_| Default::default()).collect();
        let ring =
            MappedRing { slots: slots.leak(), released: Box::leak(Box::new(AtomicU64::new(0))) };
        Ok(NullProxy {
            requests: driver.requests(),
            last_poll: 0,
            reader: RingReader::new(ring),
            writer: RingWriter::new(ring),
            lengths: (0..peers).map(|_| AtomicU32::new(LENGTH as u32)).collect(),
            ticket: 0,
            engine,
            driver,
            peers: others,
        })
    }

    /// A kernel's part: a turn's puts to the first peer, or one SCATTER to all.
    pub fn push(&mut self, scatters: bool) -> Outcome<()> {
        let place = Place { window: 0, offset: 0 };
        let (source, destination, length) = (place, place, LENGTH);
        let put = Command::Put { peer: Rank(1), target: TARGET, source, destination, length };
        let count = self.peers.len() as u32;
        let scatter =
            Command::Scatter { template: 0, target: TARGET, source, destination, count, list: 0 };
        let (command, commands) = if scatters { (scatter, 1) } else { (put, EACH_TURN) };
        for _ in 0..commands {
            if !self.writer.push(self.ticket, &command.fields()) {
                return Err("the ring is full".into());
            }
            self.ticket += 1;
        }
        Ok(())
    }

    /// One turn of the thread with all commands in the ring, and one that completes them.
    #[inline(always)]
    pub fn turn(&mut self) -> Outcome<()> {
        let NullProxy { engine, driver, requests, last_poll, reader, lengths, .. } = self;
        for _ in 0..EACH_TURN {
            let taken =
                reader.take(|ticket, fields| driver.accept(ticket, fields, lengths, requests));
            match taken? {
                Some(accepted) => accepted?,
                None => break,
            }
        }
        engine.drive_onward(driver, requests, last_poll)?;
        engine.drive_onward(driver, requests, last_poll)?;
        if driver.is_idle() { Ok(()) } else { Err("a put did not complete".into()) }
    }

    /// Peers' part: credits for what was put.
    pub fn give_credits(&mut self, rounds: usize) -> Outcome<()> {
        give_credits(&mut self.peers, rounds)
    }
}

/// Each peer's credits for rank 0's writes to it.
fn give_credits(peers: &mut [(Engine, CounterId)], rounds: usize) -> Outcome<()> {
    for (peer, counter) in peers {
        let mut requests = Requests::default();
        (0..rounds).for_each(|_| requests.credit(Rank(0), *counter));
        peer.submit(&mut requests)?;
        peer.flush();
    }
    Ok(())
}

/// Counted code; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
pub fn proxy_turn(proxy: &mut NullProxy) -> Outcome<()> {
    proxy.turn()
}

/// Runs `turns` turns for callgrind; returns the puts.
pub fn count(turns: usize, scatters: bool) -> Outcome<usize> {
    let mut proxy = NullProxy::new(if scatters { PEERS } else { 1 })?;
    let (each, rounds) = if scatters { (PEERS as usize, 1) } else { (EACH_TURN, EACH_TURN) };
    for _ in 0..turns {
        proxy.push(scatters)?;
        proxy_turn(&mut proxy)?;
        proxy.give_credits(rounds)?;
    }
    Ok(turns * each)
}

/// Nanoseconds for each put, by sample, sorted.
fn time(scatters: bool) -> Outcome<Vec<f64>> {
    let mut proxy = NullProxy::new(if scatters { PEERS } else { 1 })?;
    let (each, rounds) = if scatters { (PEERS as usize, 1) } else { (EACH_TURN, EACH_TURN) };
    let mut samples = Vec::new();
    for sample in 0..WARM_UP + SAMPLES {
        let mut ns = 0.0;
        for _ in 0..TURNS {
            proxy.push(scatters)?;
            let begin = Instant::now();
            proxy_turn(&mut proxy)?;
            ns += begin.elapsed().as_nanos() as f64;
            proxy.give_credits(rounds)?;
        }
        if sample >= WARM_UP {
            samples.push(ns / (TURNS * each) as f64);
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// As [`time`], for the engine's scatter over a peer group: in a round of its own with a credit from each peer, as a
/// SCATTER has, or all in one round.
fn time_group_scatter(credits: bool) -> Outcome<Vec<f64>> {
    let rounds = if credits { 4 } else { 1 };
    let SingleRank { mut engine, counter, source, remotes, mut peers } =
        single_rank(1 + PEERS, true, rounds)?;
    let mut group: PeerGroup = engine.peer_group(counter, &source, &remotes)?;
    let write = |member| MemberWrite { member, length: LENGTH, ..MemberWrite::default() };
    let writes: Vec<MemberWrite> = (0..PEERS).map(write).collect();
    let (mut samples, mut events) = (Vec::new(), Vec::with_capacity(2 * PEERS as usize));
    let mut round = 0;
    for sample in 0..WARM_UP + SAMPLES {
        let mut ns = 0.0;
        for _ in 0..TURNS {
            let begin = Instant::now();
            events.clear();
            if credits {
                engine.poll(Time(0), &mut events);
            }
            let request = engine.scatter_group(&mut group, round, &writes, None)?;
            engine.poll(Time(0), &mut events);
            if !engine.is_drained(request) {
                return Err("a scatter did not complete".into());
            }
            ns += begin.elapsed().as_nanos() as f64;
            if credits {
                give_credits(&mut peers, 1)?;
                round += 1;
            }
        }
        if sample >= WARM_UP {
            samples.push(ns / (TURNS * PEERS as usize) as f64);
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// Runs all operations and prints the times.
pub fn run(options: &Options) -> Outcome<()> {
    for (operation, samples) in [
        ("put", time(false)?),
        ("SCATTER to 63 peers", time(true)?),
        ("group scatter to 63 peers", time_group_scatter(false)?),
        ("group scatter to 63 peers with credits", time_group_scatter(true)?),
    ] {
        let (least, median) = (samples[0], samples[samples.len() / 2]);
        if options.json {
            let line = json!({
                "benchmark": "proxy", "device": "null", "operation": operation,
                "ns_each_least": least, "ns_each_p50": median,
            });
            println!("{line}");
        } else {
            println!("{operation:39} {least:6.1} ns each at least, {median:6.1} ns p50");
        }
    }
    Ok(())
}
