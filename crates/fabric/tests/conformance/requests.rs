//! All request kinds, and lengths from zero to 1 GiB at odd offsets.

use crate::common::{Member, MemberConfig, PATIENCE, SplitMix64, fill, put, region, take};
use crate::provider::{Provider, Shape, settle, waited};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use weft_fabric::random::mix;
use weft_fabric::{Event, MemberWrite, Page, PeerWrite, Rank, Requests, ScatterWrite, clock};

const RANKS: u32 = 3;
const SLOT: usize = 4000;
/// Tag for a driver's scatter.
const TAG: u64 = 77;
/// Value for bytes that no write has reached.
const UNTOUCHED: u8 = 0xee;

/// Slices to write: offset in the source, offset in the slot, length.
type StridedPages = Vec<(usize, usize, usize)>;

/// Requests of each kind, with the same slices toward every peer.
fn kinds() -> Vec<(&'static str, StridedPages)> {
    let paged = (0..20).map(|page| (7 * page, (page * 13 % 20) * 150 + 3, 7 * page)).collect();
    let strided = (0..16).map(|row| (5 + 24 * row, 1 + 40 * row, 8)).collect();
    let with_empty = vec![(0, 0, 0), (9, 11, 100), (0, 0, 0), (500, 300, 1)];
    vec![
        ("a signal", Vec::new()),
        ("an empty page", vec![(0, 0, 0)]),
        ("one page", vec![(3, 5, 1000)]),
        ("the whole slot", vec![(0, 0, SLOT)]),
        ("pages", paged),
        ("strides", strided),
        ("pages, some empty", with_empty),
    ]
}

pub fn every_kind_of_request_arrives(provider: &Provider) {
    let joining = MemberConfig { slot: SLOT, source: SLOT, ..MemberConfig::default() };
    provider.group(Shape::Default, joining, RANKS, |member, _| {
        let calls = Arc::new(AtomicU32::new(0));
        let mut seed = 0;
        for (name, slices) in kinds() {
            for way in [each_alone, scattered, scattered_over_a_group, scattered_by_a_driver] {
                seed += 1;
                put(&member.source, 0, &bytes_of(member.engine.rank(), seed));
                fill(&member.inbox, 0, SLOT * RANKS as usize, UNTOUCHED);
                settle(member);
                let Some(raises) = way(member, &slices, &calls) else { continue };
                for peer in member.engine.peers().collect::<Vec<_>>() {
                    let raises = raises(member, peer);
                    let (engine, counter) = (&mut member.engine, member.counter);
                    waited(|w| engine.wait(counter, &[(peer, raises)], w)).unwrap();
                    let theirs = bytes_of(peer, seed);
                    let mut slot = vec![UNTOUCHED; SLOT];
                    for &(from, to, length) in &slices {
                        slot[to..to + length].copy_from_slice(&theirs[from..from + length]);
                    }
                    assert!(member.slot_of(peer) == slot, "{name} of {peer}");
                    member.engine.credit(peer, counter).unwrap();
                }
                // Credits have left: the inbox is filled after them, and sources change.
                settle(member);
            }
        }
    });
}

fn bytes_of(rank: Rank, seed: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(u64::from(rank.0) << 32 | seed);
    (0..SLOT).map(|_| random.below(256) as u8).collect()
}

/// Lane raises by each peer's writes.
type Raises = Box<dyn Fn(&Member, Rank) -> u64>;

fn pages(member: &Member, peer: Rank, slices: &StridedPages) -> Vec<Page> {
    slices.iter().map(|&(from, to, length)| member.page(peer, from, to, length)).collect()
}

fn raises_of(slices: &StridedPages) -> Raises {
    let lengths: Vec<usize> = slices.iter().map(|slice| slice.2).collect();
    Box::new(move |member, peer| member.raises(peer, lengths.iter().copied()))
}

/// Opens the next round toward a peer, after the peer's credit.
fn open_round(member: &mut Member, peer: Rank) -> u64 {
    let round = member.engine.next_round(member.counter, peer).unwrap();
    waited(|w| member.engine.wait_for_credit(member.counter, peer, round, w)).unwrap();
    round
}

/// A write to each peer.
fn each_alone(member: &mut Member, slices: &StridedPages, _: &Arc<AtomicU32>) -> Option<Raises> {
    let mut requests = Vec::new();
    for peer in member.engine.peers().collect::<Vec<_>>() {
        let (round, counter) = (open_round(member, peer), member.counter);
        let pages = pages(member, peer, slices);
        requests.push(if pages.is_empty() {
            member.engine.signal(peer, counter, round).unwrap()
        } else {
            member.engine.write(peer, counter, round, &pages).unwrap()
        });
    }
    for request in requests {
        waited(|w| member.engine.wait_for_request(request, w)).unwrap();
    }
    Some(raises_of(slices))
}

/// Two writes to each peer in one scatter with a callback: the slices, and a signal.
fn scattered(member: &mut Member, slices: &StridedPages, calls: &Arc<AtomicU32>) -> Option<Raises> {
    let peers: Vec<Rank> = member.engine.peers().collect();
    let pages: Vec<Vec<Page>> = peers.iter().map(|&peer| pages(member, peer, slices)).collect();
    let mut writes = Vec::new();
    for (&peer, pages) in peers.iter().zip(&pages) {
        writes.push(PeerWrite { peer, pages });
        writes.push(PeerWrite { peer, pages: &[] });
        open_round(member, peer);
    }
    let (before, counted) = (calls.load(Ordering::SeqCst), calls.clone());
    let done = Box::new(move |outcome: Result<(), String>| {
        outcome.unwrap();
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let request = member.engine.scatter_next(&writes, member.counter, Some(done)).unwrap();
    waited(|w| member.engine.wait_for_request(request, w)).unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), before + 1, "the callback is called once");
    let raises = raises_of(slices);
    Some(Box::new(move |member, peer| raises(member, peer) + 1))
}

/// A scatter over a peer group, with one page for each member.
fn scattered_over_a_group(
    member: &mut Member,
    slices: &StridedPages,
    _: &Arc<AtomicU32>,
) -> Option<Raises> {
    let &[(source_offset, to, length)] = &slices[..] else { return None };
    let begin = SLOT * member.engine.rank().0 as usize;
    let remotes: Vec<_> = member.remotes.values().copied().collect();
    let mut group = member.engine.peer_group(member.counter, &member.source, &remotes).unwrap();
    for peer in member.engine.peers().collect::<Vec<_>>() {
        open_round(member, peer);
    }
    let write = |place| MemberWrite {
        member: place,
        source_offset: source_offset as u64,
        destination_offset: (begin + to) as u64,
        length: length as u64,
    };
    let writes: Vec<MemberWrite> = (0..RANKS - 1).map(write).collect();
    let request = member.engine.scatter_group_next(&mut group, &writes, None).unwrap();
    waited(|w| member.engine.wait_for_request(request, w)).unwrap();
    Some(raises_of(slices))
}

/// A driver's scatter, with one page for each peer.
fn scattered_by_a_driver(
    member: &mut Member,
    slices: &StridedPages,
    _: &Arc<AtomicU32>,
) -> Option<Raises> {
    let &[(from, to, length)] = &slices[..] else { return None };
    let (mut requests, mut writes) = (Requests::default(), Vec::new());
    for peer in member.engine.peers().collect::<Vec<_>>() {
        let (round, page) = (open_round(member, peer), member.page(peer, from, to, length));
        let Page { source_offset, destination, destination_offset, length, .. } = page;
        writes.push(ScatterWrite {
            peer,
            round,
            source_offset,
            destination,
            destination_offset,
            length,
        });
    }
    let mut list = requests.scatter(member.counter, member.source.key());
    writes.into_iter().for_each(|write| list.push(write));
    list.finish(TAG);
    member.engine.submit(&mut requests).unwrap();
    let (begin, mut completed) = (clock::now(), 0);
    while completed == 0 {
        assert!(clock::now().since(begin) < PATIENCE, "the scatter does not complete");
        let mut events = Vec::new();
        member.engine.poll(clock::now(), &mut events);
        completed += events.iter().filter(|event| **event == Event::Completed { tag: TAG }).count();
    }
    assert_eq!(completed, 1);
    Some(raises_of(slices))
}

/// Byte at an offset in a write, by a seed.
fn byte(seed: usize, at: usize) -> u8 {
    mix((seed as u64) << 32 ^ at as u64) as u8
}

pub fn writes_of_any_length_arrive_at_any_offset(provider: &Provider) {
    const LONGEST: usize = (5 << 20) + 3;
    let lengths =
        [0, 1, 2, 7, 8, 63, 64, 65, 1023, 1025, 4095, 4097, 65_537, (1 << 20) + 1, LONGEST];
    let joining =
        MemberConfig { slot: LONGEST + 200, source: LONGEST + 200, ..MemberConfig::default() };
    provider.group(Shape::Default, joining, 2, |member, _| {
        let (me, peer) = (member.engine.rank().0 as usize, Rank(1 - member.engine.rank().0));
        for (turn, length) in lengths.into_iter().enumerate() {
            let (from, to) = ((turn * 13 + me) % 64 + 1, (turn * 29 + 3 * me) % 64 + 65);
            let theirs = (turn * 29 + 3 * (1 - me)) % 64 + 65;
            let bytes: Vec<u8> = (0..length).map(|at| byte(2 * turn + me, at)).collect();
            put(&member.source, from, &bytes);
            fill(&member.inbox, peer.0 as usize * member.slot, length + 200, UNTOUCHED);
            settle(member);
            let page = member.page(peer, from, to, length);
            let round = open_round(member, peer);
            let request = member.engine.write(peer, member.counter, round, &[page]).unwrap();
            let raises = member.raises(peer, [length]);
            waited(|w| member.engine.wait(member.counter, &[(peer, raises)], w)).unwrap();
            let slot = &member.slot_of(peer)[..length + 200];
            let (before, rest) = slot.split_at(theirs);
            let (written, after) = rest.split_at(length);
            let right = |(at, seen): (usize, &u8)| *seen == byte(2 * turn + 1 - me, at);
            assert!(written.iter().enumerate().all(right), "{length} bytes at {theirs}");
            let untouched = before.iter().chain(after).all(|seen| *seen == UNTOUCHED);
            assert!(untouched, "beside {length} bytes at {theirs}");
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            member.engine.credit(peer, member.counter).unwrap();
            settle(member);
        }
    });
}

/// Memory available in the system, in bytes.
fn available() -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

pub fn a_gibibyte_arrives(provider: &Provider) {
    // One provider at a time.
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    const CHUNK: usize = 1 << 20;
    let _turn = EXCLUSIVE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (length, needed) = (provider.longest, 2 * provider.longest + (1 << 30));
    let available = available();
    if available < needed {
        let mib = |bytes: usize| bytes >> 20;
        println!(
            "skipped: {} MiB of memory are needed, {} are available",
            mib(needed),
            mib(available)
        );
        return;
    }
    if !provider.has(Shape::Default) {
        return;
    }
    // Each MiB starts one byte later in the same random bytes.
    let words = (0..(CHUNK as u64 + length as u64 / CHUNK as u64) / 8 + 1).map(mix);
    let random: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let chunk = |number: usize| &random[number..number + CHUNK];
    provider.on_ranks(2, |rank, gather| {
        let mut member = provider.join(Shape::Default, MemberConfig::default(), rank, 2, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        let bytes = if rank == Rank(0) { 1 } else { length };
        let inbox = region(&mut member.engine, provider.places.inbox, bytes);
        let remote = member.exchange_regions(peer, &inbox, gather);
        settle(&mut member);
        if rank == Rank(0) {
            let source = region(&mut member.engine, provider.places.source, length);
            for number in 0..length / CHUNK {
                put(&source, number * CHUNK, chunk(number));
            }
            let page = Page {
                source: source.key(),
                source_offset: 0,
                destination: remote.key,
                destination_offset: 0,
                length: length as u64,
            };
            let round = open_round(&mut member, peer);
            let request = member.engine.write(peer, counter, round, &[page]).unwrap();
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            // The owner responds after checking.
            waited(|w| member.engine.wait(counter, &[(peer, 1)], w)).unwrap();
        } else {
            let raises = member.raises(peer, [length]);
            waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
            for number in 0..length / CHUNK {
                assert!(take(&inbox, number * CHUNK, CHUNK) == chunk(number), "MiB {number}");
            }
            let round = open_round(&mut member, peer);
            let answer = member.engine.signal(peer, counter, round).unwrap();
            waited(|w| member.engine.wait_for_request(answer, w)).unwrap();
        }
        gather(Vec::new());
    });
}
