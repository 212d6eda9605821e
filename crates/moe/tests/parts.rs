//! A round's data parts for each peer, over a provider whose parts take few pages.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use common::Batch;
use std::cell::RefCell;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::{Driver as _, EngineConfig, Memory, PartRule, Rank, Region};
use weft_moe::{
    Config, DType, Driver, Error, Layout, RoundHandle, Rows, RowsMut, Shape, Stage, TokenInput,
    Weighting,
};

const MIB: u64 = 1 << 20;
const RANKS: u32 = 3;

/// Parts and credits from one rank to another in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    header: u64,
    rows: u64,
    replies: u64,
    credits: u64,
}

/// Tokens with `hidden` bfloat16, each for all ranks.
fn config(tokens: u32, private_rows: u32, hidden: u32, layout: Layout) -> Config {
    let config = Config::new(RANKS, 0, RANKS, RANKS).sized(tokens, hidden).dtype(DType::BF16);
    Config { private_rows, layout, ..config }
}

fn batch(config: &Config, rank: u32) -> Batch {
    let token = |at: usize| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(rank) >> 24;
    let elements = (config.max_tokens * config.hidden) as usize;
    let tokens = (0..elements).flat_map(|at| [token(at) as u8, 0x3f]).collect();
    let ids = (0..config.max_tokens).flat_map(|_| 0..i64::from(RANKS)).collect();
    Batch { ids, weights: None, tokens, scales: Vec::new() }
}

struct Member {
    driver: Driver,
    batch: Batch,
    begun: u64,
    live: Option<(RoundHandle, Region)>,
    received: Vec<u8>,
    output: Vec<u8>,
    /// By peer that wrote, in every round.
    arrived: Vec<(Rank, [u64; 3])>,
}

/// Runs `rounds` rounds with combine. Every rank's arrivals and parts must equal `cost` for each peer and
/// round; returns what each rank received and computed in the last one.
fn run(config: &Config, parts: PartRule, rounds: u64, cost: Cost) -> Vec<(Vec<u8>, Vec<u8>)> {
    let world = WorldConfig::new(RANKS, 7).with_faults(Faults::rough());
    let world = World::new(WorldConfig { parts, ..world });
    let mut cluster = Cluster::with_config(&world, EngineConfig::default()).unwrap();
    let mut members = Vec::new();
    for rank in cluster.ranks() {
        let shape = Shape::new(Config { rank: rank.0, ..config.clone() }).unwrap();
        members.push(Member {
            driver: Driver::allocate(cluster.engine(rank), &shape).unwrap(),
            batch: batch(config, rank.0),
            begun: 0,
            live: None,
            received: Vec::new(),
            output: vec![0; config.max_tokens as usize * shape.row_bytes(config.output_dtype)],
            arrived: Vec::new(),
        });
    }
    for owner in cluster.ranks() {
        for peer in cluster.ranks().filter(|peer| *peer != owner) {
            let owners = &members[owner.index()].driver;
            let grant = owners.grant(cluster.engine(owner), peer).unwrap();
            let driver = &mut members[peer.index()].driver;
            driver.link(cluster.engine(peer), owner, &grant, weft_fabric::Time::MAX).unwrap();
        }
    }
    let members = RefCell::new(members);
    let outcomes = cluster.run(|engine, now, events, requests| {
        let member = &mut members.borrow_mut()[engine.rank().index()];
        member.driver.poll(now, events, requests)?;
        let Some((handle, _)) = member.live else {
            if member.begun == rounds {
                return Ok(true);
            }
            let region = engine.register(Memory::from_bytes(member.batch.tokens.clone()))?;
            let input = TokenInput { region: region.key(), memory: region.memory().clone() };
            let handle = member.driver.begin(input, &member.batch.ids, None, None)?;
            (member.live, member.begun) = (Some((handle, region)), member.begun + 1);
            member.driver.poll(now, &[], requests)?;
            return Ok(false);
        };
        match member.driver.stage(handle) {
            Stage::Dispatched => {
                let received = member.driver.received(handle)?;
                let token = received.plan.shape().token_bytes();
                let slots = received.plan.slots().iter().enumerate();
                let rows = slots.map(|(position, &slot)| match config.layout {
                    Layout::Contiguous { .. } => position,
                    Layout::Indexed => slot as usize,
                });
                let mut all = vec![0; received.plan.positions() * token];
                for (row, out) in rows.zip(all.chunks_exact_mut(token)) {
                    received.memory.copy_out(received.bytes.start + row * received.stride, out);
                }
                let outputs = Rows::new(&all, token, token);
                while member.driver.reply(handle, outputs, Weighting::AtCombine)? {}
                member.received = all;
                member.driver.poll(now, &[], requests)?;
            }
            Stage::Combined => {
                let row = member.driver.shape().row_bytes(config.output_dtype);
                let out = RowsMut::new(&mut member.output, row, row);
                member.driver.sum_replies(handle, out, Weighting::AtCombine)?;
                // The sets are used in turn; each has three counters.
                let channel = (handle.round() % u64::from(config.channels)) as usize;
                let counters: Vec<_> = member.driver.counters()[3 * channel..][..3].to_vec();
                for peer in engine.peers() {
                    let count = |at: usize| engine.count(counters[at], peer).unwrap();
                    member.arrived.push((peer, [0, 1, 2].map(count)));
                }
                member.driver.release(handle, requests)?;
                if let Some((_, region)) = member.live.take() {
                    engine.release(&region);
                }
            }
            _ => {}
        }
        Ok::<bool, Error>(false)
    });
    let outcomes = outcomes.unwrap();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done)), "{outcomes:?}");
    cluster.settle().unwrap();
    assert_eq!(world.violations(), []);
    let members = members.into_inner();
    for (rank, member) in cluster.ranks().zip(&members) {
        assert_eq!(member.arrived.len() as u64, rounds * u64::from(RANKS - 1));
        for (peer, arrived) in &member.arrived {
            assert_eq!(*arrived, [cost.header, cost.rows, cost.replies], "{peer} to {rank}");
        }
        let engine = cluster.engine(rank);
        for peer in engine.statistics().peers {
            let of_round = cost.header + cost.rows + cost.replies + cost.credits;
            assert_eq!(peer.totals.parts, rounds * of_round, "{rank} to {}", peer.rank);
        }
        for peer in engine.peers() {
            let credits: u64 = member
                .driver
                .counters()
                .chunks_exact(3)
                .map(|of_set| engine.credits(of_set[0], peer).unwrap())
                .sum();
            assert_eq!(credits, rounds * cost.credits, "{peer} to {rank}");
        }
    }
    members.into_iter().map(|member| (member.received, member.output)).collect()
}

fn rule(max_pages_per_part: u32) -> PartRule {
    PartRule { max_part_bytes: MIB, max_pages_per_part, ..PartRule::WHOLE }
}

/// A decode step with 7168 bfloat16. A row takes 14,348 bytes, including the record, so a part takes 73.
#[test]
#[cfg_attr(miri, ignore = "it moves tens of megabytes")]
fn a_decode_round_is_at_most_three_data_parts_and_one_credit_for_each_peer() {
    let layout = Layout::Contiguous { pad_to: 1 };
    for (tokens, private, rows, replies) in [
        // The header, the private rows, the replies: three in the whole round.
        (1, 32, 1, 1),
        (32, 32, 1, 1),
        (73, 73, 1, 1),
        // Three in dispatch: with the remainder.
        (33, 32, 2, 1),
        (105, 32, 2, 2),
        (128, 64, 2, 2),
        // Past the bound: a remainder with 74 rows.
        (106, 32, 3, 2),
    ] {
        for pages in [1, 4] {
            let cost = Cost { header: 1, rows, replies, credits: 1 };
            run(&config(tokens, private, 7168, layout), rule(pages), 2, cost);
        }
    }
}

#[test]
fn packed_rounds_have_the_bytes_of_rounds_that_are_not_packed() {
    for layout in [Layout::Indexed, Layout::Contiguous { pad_to: 4 }] {
        let config = config(9, 4, 20, layout);
        let cost = Cost { header: 1, rows: 2, replies: 1, credits: 1 };
        let unpacked = run(&config, PartRule::WHOLE, 5, cost);
        assert_eq!(unpacked, run(&config, rule(1), 5, cost));
        // Four private rows and five others, each with a page for records, at four pages a part.
        assert_eq!(unpacked, run(&config, rule(4), 5, cost));
        // Sixteen-page parts take all rows in either.
        assert_eq!(unpacked, run(&config, rule(16), 5, cost));
    }
}
