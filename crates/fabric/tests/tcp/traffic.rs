//! Random writes byte for byte under back-pressure, in parts as short as a byte.

use crate::ends::{End, linked, on_threads, waiting};
use weft_fabric::providers::TcpConfig;
use weft_fabric::random::{self, SplitMix64};
use weft_fabric::{Page, Rank};

fn mix(seed: u64) -> u64 {
    random::mix(seed.wrapping_mul(SplitMix64::INCREMENT))
}

/// Ranges that `from` writes to `to` in a round: offsets within the slot and lengths, in a random order.
fn plan(seed: u64, from: u32, to: u32, round: u64, slot: u64) -> Vec<(u64, u64)> {
    let mut state = mix(seed ^ (u64::from(from) << 40) ^ (u64::from(to) << 20) ^ round);
    let mut next = |bound: u64| {
        state = mix(state);
        state % bound
    };
    let pages = match next(5) {
        0 => 0,
        1 => 1,
        2 => 300 + next(300),
        _ => 1 + next(40),
    };
    let stride = slot / pages.max(1);
    let mut plan: Vec<(u64, u64)> = (0..pages)
        .map(|page| {
            let length = if next(4) == 0 { 0 } else { next(stride + 1) };
            (page * stride + next(stride - length + 1), length)
        })
        .collect();
    for index in (1..plan.len()).rev() {
        plan.swap(index, next(index as u64 + 1) as usize);
    }
    plan
}

fn byte(from: u32, to: u32, round: u64, offset: u64) -> u8 {
    mix((u64::from(from) << 50) ^ (u64::from(to) << 44) ^ (round << 32) ^ offset) as u8
}

/// Rounds of random writes from each rank to each other, with every byte in every slot compared.
fn exchange(mut end: End, seed: u64, rounds: u64, slot: u64) {
    let me = end.engine.rank().0;
    let peers: Vec<Rank> = end.engine.peers().collect();
    let size = end.engine.size();
    let mut expected = vec![0u8; slot as usize * size as usize];
    for round in 0..rounds {
        let mut requests = Vec::new();
        for &peer in &peers {
            waiting(|w| end.engine.wait_for_credit(end.counter, peer, round, w)).unwrap();
            let base = slot * u64::from(peer.0);
            let remote = end.remotes[peer.0 as usize].unwrap();
            let pages: Vec<Page> = plan(seed, me, peer.0, round, slot)
                .into_iter()
                .map(|(offset, length)| {
                    let bytes: Vec<u8> =
                        (offset..offset + length).map(|o| byte(me, peer.0, round, o)).collect();
                    end.source.memory().copy_in((base + offset) as usize, &bytes);
                    Page {
                        source: end.source.key(),
                        source_offset: base + offset,
                        destination: remote.key,
                        destination_offset: slot * u64::from(me) + offset,
                        length,
                    }
                })
                .collect();
            requests.push(end.engine.write(peer, end.counter, round, &pages).unwrap());
        }
        let mut wanted = Vec::new();
        for &peer in &peers {
            let pages = plan(seed, peer.0, me, round, slot);
            let rule = end.engine.route(peer).unwrap().parts;
            wanted.push((peer, rule.count(pages.iter().map(|(_, length)| *length))));
            for (offset, length) in pages {
                for o in offset..offset + length {
                    expected[(slot * u64::from(peer.0) + o) as usize] = byte(peer.0, me, round, o);
                }
            }
        }
        waiting(|w| end.engine.wait(end.counter, &wanted, w)).unwrap();
        let mut seen = vec![0; expected.len()];
        end.destination.memory().copy_out(0, &mut seen);
        assert!(seen == expected, "rank {me}, round {round}, seed {seed}");
        for &peer in &peers {
            end.engine.credit(peer, end.counter).unwrap();
        }
        end.engine.flush();
        for request in requests {
            waiting(|w| end.engine.wait_for_request(request, w)).unwrap();
        }
    }
}

#[test]
fn tiny_queues_and_parts_slow_writers_down_and_lose_nothing() {
    let tiny = |streams, max_part_bytes, queue_bytes, queue_parts| TcpConfig {
        streams,
        max_part_bytes,
        queue_bytes,
        queue_parts,
        ..TcpConfig::default()
    };
    for (seed, config) in
        [(4, tiny(1, 700, 1, 1)), (5, tiny(3, 5_000, 4_000, 2)), (6, tiny(2, 1, 1 << 20, 3))]
    {
        let slot = if config.max_part_bytes == 1 { 700 } else { 30_000 };
        let ends = linked(3, &config, slot);
        on_threads(ends, |end| exchange(end, seed, 6, slot as u64));
    }
}
