//! Ranks as threads or as processes, and the traffic that they exchange to test a provider.
#![allow(dead_code)] // Each test uses its part.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use weft_fabric::descriptor::{Address, Grant};
use weft_fabric::{
    CounterId, Engine, EngineConfig, Generation, Page, Provider, Rank, Region, RemoteRegion,
    Waiter, clock,
};

/// Gives every rank what every rank said, in rank order.
pub type AllGather<'a> = dyn FnMut(Vec<u8>) -> Vec<Vec<u8>> + 'a;

/// Long enough for anything that is expected to happen on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that each rank may write to each other.
pub const SLOT: usize = 40_000;

/// A repeatable source of numbers.
pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Waits up to `patience`, spinning for `spin`.
pub fn waiting<T>(patience: Duration, spin: Duration, f: impl FnOnce(&mut Waiter<'_>) -> T) -> T {
    let mut never = || false;
    f(&mut Waiter { deadline: clock::now().after(patience), spin, interrupted: &mut never })
}

/// One rank with memory and a counter that all others may write to and raise.
pub struct Member {
    pub engine: Engine,
    pub counter: CounterId,
    pub source: Region,
    pub inbox: Region,
    pub remotes: BTreeMap<Rank, RemoteRegion>,
    /// How long a round waits for anything.
    pub patience: Duration,
}

impl Member {
    /// Joins a group of `size`; every rank calls this.
    pub fn join(
        rank: Rank,
        size: u32,
        providers: Vec<Box<dyn Provider>>,
        gather: &mut AllGather<'_>,
    ) -> Member {
        let deadline = clock::now().after(PATIENCE);
        let config = EngineConfig::default();
        let mut engine = Engine::new(config, rank, size, Generation(3), providers).unwrap();
        let addresses: Vec<Address> = gather(engine.address().encode())
            .iter()
            .map(|bytes| Address::decode(bytes).unwrap())
            .collect();
        engine.connect(&addresses, deadline).unwrap();
        let counter = engine.counter().unwrap();
        engine.use_for_barriers(counter);
        let inbox = engine.alloc(SLOT * size as usize).unwrap();
        let source = engine.alloc(SLOT).unwrap();
        let mut grants: Vec<Vec<u8>> = Vec::new();
        for peer in (0..size).map(Rank) {
            let all = 0..inbox.memory().len() as u64;
            grants.push(if peer == rank {
                Vec::new()
            } else {
                engine.grant(peer, &[(&inbox, all)], &[counter]).unwrap().encode()
            });
        }
        let mut joined = Vec::new();
        for grant in &grants {
            weft_fabric::bytes::put_block(&mut joined, grant);
        }
        let mut remotes = BTreeMap::new();
        for (number, bytes) in gather(joined).iter().enumerate() {
            let peer = Rank(number as u32);
            if peer == rank {
                continue;
            }
            let mut reader = weft_fabric::bytes::Reader::new(bytes);
            for _ in 0..rank.0 {
                reader.block().unwrap();
            }
            let grant = Grant::decode(reader.block().unwrap()).unwrap();
            let imported = engine.import(peer, &grant, &[counter], deadline).unwrap();
            remotes.insert(peer, imported[0]);
        }
        Member { engine, counter, source, inbox, remotes, patience: PATIENCE }
    }

    /// Writes this round's random pages to every peer, checks theirs, gives credit.
    pub fn round(&mut self, seed: u64, round: u64) -> weft_fabric::Result<()> {
        let me = self.engine.rank();
        for (peer, remote) in self.remotes.clone() {
            let wait = |waiter: &mut Waiter<'_>| {
                self.engine.wait_for_credit(self.counter, peer, round, waiter)
            };
            waiting(self.patience, Duration::ZERO, wait)?;
            let (bytes, ranges) = plan(seed, me, peer, round);
            self.source.memory().copy_in(0, &bytes);
            let pages: Vec<Page> = ranges
                .iter()
                .map(|&(offset, length)| Page {
                    source: self.source.key(),
                    source_offset: offset as u64,
                    destination: remote.key,
                    destination_offset: (SLOT * me.0 as usize + offset) as u64,
                    length: length as u64,
                })
                .collect();
            let request = self.engine.write(peer, self.counter, round, &pages)?;
            waiting(self.patience, Duration::ZERO, |waiter| {
                self.engine.wait_for_request(request, waiter)
            })?;
        }
        for peer in self.remotes.keys().copied().collect::<Vec<_>>() {
            let (bytes, ranges) = plan(seed, peer, me, round);
            let rule = self.engine.route(peer).unwrap().parts;
            let raises = rule.count(ranges.iter().map(|&(_, length)| length as u64));
            waiting(self.patience, Duration::ZERO, |waiter| {
                self.engine.wait(self.counter, &[(peer, raises)], waiter)
            })?;
            for (offset, length) in ranges {
                let mut seen = vec![0; length];
                self.inbox.memory().copy_out(SLOT * peer.0 as usize + offset, &mut seen);
                assert!(seen == bytes[offset..offset + length], "{me} got wrong bytes of {peer}");
            }
            self.engine.credit(peer, self.counter)?;
        }
        self.engine.flush();
        Ok(())
    }
}

/// What one rank writes to another in a round: a slot's bytes, and the ranges of it that travel.
fn plan(seed: u64, from: Rank, to: Rank, round: u64) -> (Vec<u8>, Vec<(usize, usize)>) {
    let mut random = Random(seed ^ (u64::from(from.0) << 40) ^ (u64::from(to.0) << 20) ^ round);
    let mut ranges = Vec::new();
    let mut offset = 0;
    for _ in 0..random.below(8) {
        offset += random.below(100) as usize;
        let longest = if random.below(4) == 0 { 4000 } else { 70 };
        let length = random.below(longest) as usize;
        ranges.push((offset, length));
        offset += length;
    }
    let bytes = (0..SLOT).map(|_| random.below(256) as u8).collect();
    (bytes, ranges)
}

/// What each rank has said so far, in order.
struct Forum {
    said: Mutex<Vec<Vec<Vec<u8>>>>,
    changed: Condvar,
}

impl Forum {
    fn new(size: u32) -> Forum {
        Forum { said: Mutex::new(vec![Vec::new(); size as usize]), changed: Condvar::new() }
    }

    /// Panics if a rank stays silent, so that one that failed does not leave the others waiting.
    fn gather(&self, rank: Rank, mine: Vec<u8>) -> Vec<Vec<u8>> {
        let mut said = self.said.lock().unwrap();
        let round = said[rank.0 as usize].len();
        said[rank.0 as usize].push(mine);
        self.changed.notify_all();
        let silent = |said: &mut Vec<Vec<Vec<u8>>>| said.iter().any(|of| of.len() <= round);
        let (said, late) = self.changed.wait_timeout_while(said, PATIENCE, silent).unwrap();
        assert!(!late.timed_out(), "a rank did not come to gather {round}");
        said.iter().map(|of| of[round].clone()).collect()
    }
}

/// Runs `rank` on a thread for each of `size` ranks.
pub fn on_threads(size: u32, rank: impl Fn(Rank, &mut AllGather<'_>) + Send + Sync) {
    let forum = Forum::new(size);
    std::thread::scope(|scope| {
        for me in (0..size).map(Rank) {
            let (forum, rank) = (&forum, &rank);
            scope.spawn(move || rank(me, &mut |mine| forum.gather(me, mine)));
        }
    });
}

const RANK_VARIABLE: &str = "WEFT_TEST_RANK";

/// Runs the test `name` of this binary as `size` processes, in which [`process_rank`] says who they
/// are. Returns how each ended.
pub fn on_processes(name: &str, size: u32) -> Vec<Result<(), String>> {
    let spawn = |number: u32| {
        Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(RANK_VARIABLE, number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..size).map(spawn).collect();
    let forum = Forum::new(size);
    std::thread::scope(|scope| {
        let relay = |(number, child)| {
            let forum = &forum;
            scope.spawn(move || relay(Rank(number), child, forum))
        };
        let relays: Vec<_> = (0..).zip(children).map(relay).collect();
        relays.into_iter().map(|relay| relay.join().unwrap()).collect()
    })
}

fn relay(rank: Rank, mut child: Child, forum: &Forum) -> Result<(), String> {
    let mut input = child.stdin.take().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        // libtest may have begun the line with the test's name.
        let Some((_, mine)) = line.split_once('@') else { continue };
        let all = forum.gather(rank, mine.as_bytes().to_vec()).join(&b' ');
        input.write_all(&all).unwrap();
        input.write_all(b"\n").unwrap();
    }
    let status = child.wait().unwrap();
    match status.signal() {
        _ if status.success() => Ok(()),
        Some(signal) => Err(format!("killed by {signal}")),
        None => Err(status.to_string()),
    }
}

/// In a process of [`on_processes`]: its rank.
pub fn process_rank() -> Option<Rank> {
    std::env::var(RANK_VARIABLE).ok().map(|rank| Rank(rank.parse().unwrap()))
}

/// In a process of [`on_processes`]: how it gathers.
pub fn process_gather(mine: Vec<u8>) -> Vec<Vec<u8>> {
    let hex: String = mine.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("@{hex}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let byte = |at: &[u8]| u8::from_str_radix(std::str::from_utf8(at).unwrap(), 16).unwrap();
    line.trim_end_matches('\n')
        .split(' ')
        .map(|hex| hex.as_bytes().chunks(2).map(byte).collect())
        .collect()
}
