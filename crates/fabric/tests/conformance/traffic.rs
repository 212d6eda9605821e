//! Random writes byte for byte: many ranks, processes, full queues, ranks configured differently.

use crate::common::{
    self, Member, MemberConfig, SplitMix64, fill, on_processes, process_gather, take,
};
use crate::is_long;
use crate::provider::{Provider, Shape, settle, waited};
use std::time::{Duration, Instant};
use weft_fabric::{Error, Page, PeerWrite, Rank, RequestId, clock};

pub fn threads_write_random_pages_to_each_other(provider: &Provider) {
    provider.group(Shape::Default, MemberConfig::default(), 4, |member, _| rounds(member, 11, 40));
}

pub fn eight_ranks_write_to_each_other(provider: &Provider) {
    provider.group(Shape::Default, MemberConfig::default(), 8, |member, _| rounds(member, 12, 12));
}

fn rounds(member: &mut Member, seed: u64, rounds: u64) {
    for round in 0..rounds {
        member.round(seed, round).unwrap();
    }
    // The next round belongs to a barrier.
    let counter = member.counter;
    for peer in member.engine.peers().collect::<Vec<_>>() {
        waited(|w| member.engine.wait_for_credit(counter, peer, rounds, w)).unwrap();
    }
}

pub fn processes_write_random_pages_to_each_other(provider: &Provider) {
    const RANKS: u32 = 3;
    let Some(rank) = common::process_rank() else {
        if provider.has_processes() && provider.has(Shape::Default) {
            let name = provider.test("processes_write_random_pages_to_each_other");
            let ended = on_processes(&name, RANKS);
            assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        }
        return;
    };
    let joining = MemberConfig::default();
    let mut member = provider.join(Shape::Default, joining, rank, RANKS, &mut process_gather);
    rounds(&mut member, 13, 60);
    settle(&mut member);
    process_gather(Vec::new());
}

pub fn full_queues_slow_writers_down_and_lose_nothing(provider: &Provider) {
    for depth in [1, 16, 4096] {
        let stream = Stream::new(provider, depth as u64, 600);
        provider.group(Shape::Queue(depth), Stream::CONFIG, 3, |member, _| stream.run(member));
    }
}

pub fn ranks_configured_differently_reach_each_other(provider: &Provider) {
    let stream = Stream::new(provider, 21, 400);
    provider.group(Shape::Uneven, Stream::CONFIG, 4, |member, _| stream.run(member));
}

pub fn writes_in_random_order_arrive_byte_for_byte(provider: &Provider) {
    let writes = if is_long() { 1_000_000 } else { 20_000 };
    // Each rank writes half.
    let stream = Stream::new(provider, 22, writes / 2);
    provider.group(Shape::Default, Stream::CONFIG, 2, |member, _| stream.run(member));
}

/// Writes from each rank to each other in random order, as many rounds at a time as the window has. Each
/// round has a cell in the slot, and writes one or more ranges there.
struct Stream {
    seed: u64,
    writes: u64,
    /// [`Provider::keeps_credited_bytes`].
    keeps_credited_bytes: bool,
}

/// Bytes in a round's cell.
const CELL: usize = 4096;
const WINDOW: usize = 32;
const MOST_RANKS: usize = 4;

/// Writer's state toward one peer.
struct Outgoing {
    peer: Rank,
    /// Rounds that the window permits and that are not written.
    open: Vec<u64>,
    /// Rounds permitted.
    permitted: u64,
    /// Last request on each cell.
    requests: Vec<Option<RequestId>>,
}

impl Stream {
    const CONFIG: MemberConfig = MemberConfig {
        places: common::MemberDevices { source: None, inbox: None },
        generation: weft_fabric::Generation(3),
        slot: WINDOW * CELL,
        source: MOST_RANKS * WINDOW * CELL,
        window: WINDOW as u32,
    };

    fn new(provider: &Provider, seed: u64, writes: u64) -> Stream {
        Stream { seed, writes, keeps_credited_bytes: provider.keeps_credited_bytes }
    }

    /// Ranges in a round's cell, and the byte value.
    fn plan(&self, from: Rank, to: Rank, round: u64) -> (Vec<(usize, usize)>, u8) {
        let ends = u64::from(from.0) << 56 | u64::from(to.0) << 48;
        let mut random = SplitMix64::new(self.seed << 32 ^ ends ^ round);
        let value = 1 + random.below(255) as u8;
        let ranges = match random.below(10) {
            0 => Vec::new(),
            1 => (0..8).map(|part| (part * 512 + random.below(100) as usize, 300)).collect(),
            2 => vec![(0, CELL)],
            _ => {
                let longest = if random.below(2) == 0 { 64 } else { 3000 };
                let length = random.below(longest) as usize;
                vec![(random.below((CELL - length) as u64) as usize, length)]
            }
        };
        (ranges, value)
    }

    fn run(&self, member: &mut Member) {
        let me = member.engine.rank();
        let mut random = SplitMix64::new(self.seed ^ u64::from(me.0) << 20);
        let peers: Vec<Rank> = member.engine.peers().collect();
        let outgoing =
            |&peer| Outgoing { peer, open: Vec::new(), permitted: 0, requests: vec![None; WINDOW] };
        let mut outgoing: Vec<Outgoing> = peers.iter().map(outgoing).collect();
        let mut next: Vec<(Rank, u64)> = peers.iter().map(|&peer| (peer, 0)).collect();
        let deadline = Instant::now() + Duration::from_secs(if is_long() { 600 } else { 60 });
        loop {
            let written: usize =
                outgoing.iter_mut().map(|to| self.write_some(member, to, &mut random)).sum();
            let read: usize = next.iter_mut().map(|from| self.read_some(member, from)).sum();
            let all_written =
                outgoing.iter().all(|to| to.permitted == self.writes && to.open.is_empty());
            if all_written && next.iter().all(|(_, round)| *round == self.writes) {
                break;
            }
            assert!(Instant::now() < deadline, "{me} is stuck, having read {next:?}");
            member.engine.poll(clock::now(), &mut Vec::new());
            if written + read == 0 {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // The next round belongs to a barrier.
        for Outgoing { peer, requests, .. } in outgoing {
            let counter = member.counter;
            let credits = self.writes + WINDOW as u64 - 1;
            waited(|w| member.engine.wait_for_credit(counter, peer, credits, w)).unwrap();
            for request in requests.into_iter().flatten() {
                waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            }
        }
    }

    /// Writes some open rounds, in random order.
    fn write_some(&self, member: &mut Member, to: &mut Outgoing, random: &mut SplitMix64) -> usize {
        let (me, counter) = (member.engine.rank(), member.counter);
        while to.permitted < self.writes
            && member.engine.has_credit(counter, to.peer, to.permitted).unwrap()
        {
            to.open.push(to.permitted);
            to.permitted += 1;
        }
        // Some wait, to be overtaken.
        let most = to.open.len().min(1 + random.below(WINDOW as u64) as usize);
        let mut written = 0;
        for _ in 0..most {
            let place = random.below(to.open.len() as u64) as usize;
            let round = to.open[place];
            let cell = round as usize % WINDOW;
            if to.requests[cell].is_some_and(|request| !member.engine.is_drained(request)) {
                // The peer has all the bytes, and this end still borrows the source.
                continue;
            }
            to.open.swap_remove(place);
            let (ranges, value) = self.plan(me, to.peer, round);
            let begin = (to.peer.0 as usize * WINDOW + cell) * CELL;
            let pages: Vec<Page> = ranges
                .iter()
                .map(|&(at, length)| {
                    fill(&member.source, begin + at, length, value);
                    member.page(to.peer, begin + at, cell * CELL + at, length)
                })
                .collect();
            let request = member.engine.write(to.peer, counter, round, &pages).unwrap();
            to.requests[cell] = Some(request);
            written += 1;
        }
        written
    }

    /// Reads a peer's complete rounds, in order.
    fn read_some(&self, member: &mut Member, (peer, round): &mut (Rank, u64)) -> usize {
        let (me, counter) = (member.engine.rank(), member.counter);
        let begin = *round;
        while *round < self.writes {
            let (ranges, value) = self.plan(*peer, me, *round);
            let raises = member.raises(*peer, ranges.iter().map(|range| range.1));
            let count = member.engine.count(counter, *peer).unwrap();
            assert!(
                count <= raises,
                "{count} raises in round {round} of {peer}, {raises} were due"
            );
            if count < raises {
                break;
            }
            let at = peer.0 as usize * member.slot + *round as usize % WINDOW * CELL;
            let seen = take(&member.inbox, at, CELL);
            let mut expected = if self.keeps_credited_bytes { vec![0; CELL] } else { seen.clone() };
            ranges.iter().for_each(|&(at, length)| expected[at..at + length].fill(value));
            assert!(seen == expected, "round {round} of {peer} at {me}");
            fill(&member.inbox, at, CELL, 0);
            member.engine.credit(*peer, counter).unwrap();
            *round += 1;
        }
        (*round - begin) as usize
    }
}

/// Scatters with several writes to each of seven peers, over two-part queues.
pub fn a_scatter_cut_short_by_a_full_queue_arrives_whole(provider: &Provider) {
    const RANKS: usize = 8;
    const WRITES: usize = 5;
    const LENGTH: usize = 1500;
    let shape = if provider.has(Shape::Queue(2)) { Shape::Queue(2) } else { Shape::Default };
    let slot = WRITES * LENGTH;
    let joining = MemberConfig { slot, source: RANKS * slot, ..MemberConfig::default() };
    provider.group(shape, joining, RANKS as u32, |member, _| {
        let me = member.engine.rank().0 as usize;
        let value = |from: usize, to: usize, turn: usize| (1 + from + 8 * to + 64 * turn) as u8;
        for turn in 0..12 {
            let peers: Vec<Rank> = member.engine.peers().collect();
            let mut pages = Vec::new();
            for &peer in &peers {
                let to = peer.0 as usize;
                fill(&member.source, to * slot, slot, value(me, to, turn));
                for write in 0..WRITES {
                    let at = write * LENGTH;
                    pages.push((peer, [member.page(peer, to * slot + at, at, LENGTH)]));
                }
            }
            let writes: Vec<PeerWrite<'_>> =
                pages.iter().map(|(peer, pages)| PeerWrite { peer: *peer, pages }).collect();
            let counter = member.counter;
            for &peer in &peers {
                let round = member.engine.next_round(counter, peer).unwrap();
                waited(|w| member.engine.wait_for_credit(counter, peer, round, w)).unwrap();
            }
            let request = member.engine.scatter_next(&writes, counter, None).unwrap();
            for &peer in &peers {
                let raises = WRITES as u64 * member.raises(peer, [LENGTH]);
                waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
                let theirs = value(peer.0 as usize, me, turn);
                assert!(member.slot_of(peer).iter().all(|seen| *seen == theirs), "{peer}, {turn}");
                member.engine.credit(peer, counter).unwrap();
            }
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            settle(member);
        }
    });
}

/// Two ranks take turns, each asleep until the other writes.
pub fn a_sleeping_rank_is_woken_for_each_turn(provider: &Provider) {
    const TURNS: u32 = 100;
    provider.group(Shape::Default, MemberConfig::default(), 2, |member, _| {
        let (me, counter) = (member.engine.rank(), member.counter);
        let peer = Rank(1 - me.0);
        let begin = Instant::now();
        for turn in 0..u64::from(TURNS) {
            waited(|w| member.engine.wait_for_credit(counter, peer, turn, w)).unwrap();
            if me == Rank(1) {
                waited(|w| member.engine.wait(counter, &[(peer, 1)], w)).unwrap();
            }
            let page = member.page(peer, 0, 0, 2000);
            let request = member.engine.write(peer, counter, turn, &[page]).unwrap();
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            if me == Rank(0) {
                waited(|w| member.engine.wait(counter, &[(peer, 1)], w)).unwrap();
            }
            member.engine.credit(peer, counter).unwrap();
        }
        waited(|w| member.engine.wait_for_credit(counter, peer, TURNS.into(), w)).unwrap();
        // A sleeper without a wake-up sleeps 50 ms, longer than a turn.
        assert!(begin.elapsed() < TURNS * Duration::from_millis(50), "wake-ups were lost");
    });
}

/// Each rank writes right after giving a credit, which the write then carries where the route permits it.
/// Elsewhere the credit leaves behind the write, so two rounds in the window have separate bytes.
pub fn credits_that_writes_carry_arrive(provider: &Provider) {
    const TURNS: u64 = 300;
    const LENGTH: usize = 100;
    let joining = MemberConfig { window: 2, ..MemberConfig::default() };
    provider.group(Shape::Default, joining, 2, |member, _| {
        let (me, counter) = (member.engine.rank(), member.counter);
        let peer = Rank(1 - me.0);
        let value = |rank: Rank, turn: u64| (1 + (turn * 2 + u64::from(rank.0)) % 255) as u8;
        let place = |turn: u64| turn as usize % 2 * LENGTH;
        let read = |member: &mut Member, turn: u64| {
            waited(|w| member.engine.wait(counter, &[(peer, 1)], w)).unwrap();
            let seen = &member.slot_of(peer)[place(turn)..][..LENGTH];
            assert!(seen == [value(peer, turn); LENGTH], "turn {turn}");
            member.engine.credit(peer, counter).unwrap();
        };
        for turn in 0..TURNS {
            if me == Rank(1) {
                read(member, turn);
            }
            fill(&member.source, 0, LENGTH, value(me, turn));
            let page = member.page(peer, 0, place(turn), LENGTH);
            let request = match member.engine.write(peer, counter, turn, &[page]) {
                Err(Error::NoCredit { .. }) => {
                    waited(|w| member.engine.wait_for_credit(counter, peer, turn, w)).unwrap();
                    member.engine.write(peer, counter, turn, &[page]).unwrap()
                }
                written => written.unwrap(),
            };
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            if me == Rank(0) {
                read(member, turn);
            }
        }
        // All rounds in the window are credited.
        waited(|w| member.engine.wait_for_credit(counter, peer, TURNS + 1, w)).unwrap();
    });
}
