//! Bare engine: ring and halving-doubling messages on `weft-netsim`, with only the dependencies.

use crate::platform::Platform;
use crate::{Case, Failure, Found};
use weft_netsim::{Engine, Link, LinkId, PathId, Tag};
use weft_predict::CpuTime;

/// Runs a case.
pub fn run(case: &Case) -> Result<Found, Failure> {
    let setup = CpuTime::start();
    let mut platform = Platform::new(case)?;
    let links: Vec<Link> = platform
        .network
        .links()
        .iter()
        .map(|link| Link { bandwidth: link.bandwidth, latency: link.latency })
        .collect();
    let mut engine = Engine::new(&links)?;
    let setup_cpu_s = setup.seconds();
    let cpu = CpuTime::start();
    let (time_s, flows) = match case.algorithm.as_str() {
        "ring" => ring(case, &mut platform, &mut engine)?,
        "hd" | "hdrm" if case.ranks.is_power_of_two() => {
            halving_doubling(case, &mut platform, &mut engine)?
        }
        other => {
            return Err(format!(
                "algorithm {other} of {} ranks: expected ring, or hd of a power of two",
                case.ranks
            )
            .into());
        }
    };
    let loads = (0..links.len() as u32).map(|link| engine.link_usage(LinkId(link)).most_flows);
    let (cpu_s, max_link_load) = (cpu.seconds(), loads.max().unwrap_or(0));
    Ok(Found { time_s, setup_cpu_s, cpu_s, flows, max_link_load })
}

fn path(
    platform: &mut Platform,
    engine: &mut Engine,
    from: u32,
    to: u32,
) -> Result<PathId, Failure> {
    let mut links = Vec::new();
    platform.path(from, to, &mut links)?;
    let links: Vec<LinkId> = links.iter().map(|link| LinkId(link.0)).collect();
    Ok(engine.add_path(&links)?)
}

fn ring(case: &Case, platform: &mut Platform, engine: &mut Engine) -> Result<(f64, u64), Failure> {
    let ranks = case.ranks;
    let steps = 2 * (ranks - 1);
    let mut paths = Vec::new();
    for rank in 0..ranks {
        paths.push(path(platform, engine, rank, (rank + 1) % ranks)?);
    }
    let sizes: Vec<u64> = (0..ranks)
        .map(|block| {
            block_start(case.bytes, ranks, block + 1) - block_start(case.bytes, ranks, block)
        })
        .collect();
    // Next step on each rank: one for each arrival.
    let mut step = vec![1; ranks as usize];
    for rank in 0..ranks {
        engine.start_flow(paths[rank as usize], sizes[rank as usize], 0.0, Tag(u64::from(rank)))?;
    }
    let (mut events, mut last, mut flows) = (Vec::new(), 0.0, u64::from(ranks));
    while let Some(time) = engine.next(&mut events)? {
        last = time;
        for event in events.drain(..) {
            let rank = (event.tag.0 as u32 + 1) % ranks;
            let next = step[rank as usize];
            step[rank as usize] += 1;
            if next < steps {
                let block = (rank + 2 * ranks - next) % ranks;
                let (path, bytes) = (paths[rank as usize], sizes[block as usize]);
                engine.start_flow(path, bytes, 0.0, Tag(u64::from(rank)))?;
                flows += 1;
            }
        }
    }
    Ok((last, flows))
}

fn halving_doubling(
    case: &Case,
    platform: &mut Platform,
    engine: &mut Engine,
) -> Result<(f64, u64), Failure> {
    let (ranks, bits) = (case.ranks, case.ranks.trailing_zeros());
    let steps = 2 * bits;
    // Bit that a step flips, and bytes per message.
    let flip = |step: u32| if step < bits { step } else { steps - 1 - step };
    let bytes = |step: u32| case.bytes >> (flip(step) + 1);
    let mut paths = Vec::new();
    for rank in 0..ranks {
        for bit in 0..bits {
            paths.push(path(platform, engine, rank, rank ^ 1 << bit)?);
        }
    }
    let start = |engine: &mut Engine, rank: u32, step: u32| {
        let path = paths[(rank * bits + flip(step)) as usize];
        engine.start_flow(path, bytes(step), 0.0, Tag(u64::from(step) << 32 | u64::from(rank)))
    };
    // Arrived steps by rank as bits, and the rank's current step.
    let mut arrived = vec![0_u64; ranks as usize];
    let mut current = vec![0; ranks as usize];
    for rank in 0..ranks {
        start(engine, rank, 0)?;
    }
    let (mut events, mut last, mut flows) = (Vec::new(), 0.0, u64::from(ranks));
    while let Some(time) = engine.next(&mut events)? {
        last = time;
        for event in events.drain(..) {
            let (step, from) = ((event.tag.0 >> 32) as u32, event.tag.0 as u32);
            let rank = (from ^ 1 << flip(step)) as usize;
            arrived[rank] |= 1 << step;
            while current[rank] < steps && arrived[rank] >> current[rank] & 1 == 1 {
                current[rank] += 1;
                if current[rank] < steps {
                    start(engine, rank as u32, current[rank])?;
                    flows += 1;
                }
            }
        }
    }
    Ok((last, flows))
}

/// First byte in a block.
fn block_start(bytes: u64, blocks: u32, block: u32) -> u64 {
    (u128::from(bytes) * u128::from(block) / u128::from(blocks)) as u64
}
