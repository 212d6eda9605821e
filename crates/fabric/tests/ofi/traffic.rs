//! Random writes byte for byte, over one NIC and over several, under small bounds.

use crate::common::{self, AllGather, Member, on_processes, on_threads, process_gather};
use crate::{any_host, config, device, providers};
use weft_fabric::Rank;
use weft_fabric::providers::{OfiConfig, OfiDevice};

/// Joins a group over this configuration.
pub fn join(rank: Rank, size: u32, config: OfiConfig, gather: &mut AllGather<'_>) -> Member {
    Member::join(rank, size, &[device(config)], gather)
}

/// Libfabric's shm frees endpoint memory that other endpoints in the same process still use, so the ranks
/// are processes.
pub fn on_ranks(
    name: &str,
    size: u32,
    rank: impl Fn(&str, Rank, &mut AllGather<'_>) + Send + Sync,
) {
    let Some(me) = common::process_rank() else {
        if !providers().is_empty() {
            let ended = on_processes(name, size);
            assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        }
        return;
    };
    for provider in providers() {
        rank(provider, me, &mut process_gather);
    }
}

#[test]
fn threads_write_random_pages_to_each_other() {
    if providers().is_empty() {
        return;
    }
    on_threads(3, |rank, gather| {
        let mut member = join(rank, 3, config(any_host()), gather);
        for round in 0..40 {
            member.round(11, round).unwrap();
        }
        gather(Vec::new());
    });
}

#[test]
fn processes_write_random_pages_to_each_other() {
    let name = "traffic::processes_write_random_pages_to_each_other";
    on_ranks(name, 3, |provider, rank, gather| {
        let mut member = join(rank, 3, config(provider), gather);
        for round in 0..60 {
            member.round(12, round).unwrap();
        }
        drop(member);
        gather(Vec::new());
    });
}

/// Bounds so small that each is reached permanently.
#[test]
fn small_bounds_slow_writers_down_and_lose_nothing() {
    let name = "traffic::small_bounds_slow_writers_down_and_lose_nothing";
    on_ranks(name, 3, |provider, rank, gather| {
        for (queue_parts, max_unconsumed, max_part_bytes) in
            [(1, 4, 900), (16, 5, 64), (3, 1024, 7)]
        {
            let tight =
                OfiConfig { queue_parts, max_unconsumed, max_part_bytes, ..config(provider) };
            let mut member = join(rank, 3, tight, gather);
            for round in 0..4 {
                member.round(13, round).unwrap();
            }
            drop(member);
            gather(Vec::new());
        }
    });
}

/// Two rails over one NIC: parts are spread over both, with separate keys.
#[test]
fn large_writes_are_spread_over_several_rails() {
    let name = "traffic::large_writes_are_spread_over_several_rails";
    on_ranks(name, 2, |provider, rank, gather| {
        let first = device_names(provider).remove(0);
        let two =
            OfiConfig { domains: vec![first.clone(), first], stripe_from: 64, ..config(provider) };
        let mut member = join(rank, 2, two, gather);
        let route = member.engine.route(Rank(1 - rank.0)).unwrap();
        assert_eq!((route.parts.stripes, route.parts.count_contiguous(20_000)), (2, 2));
        for round in 0..20 {
            member.round(14, round).unwrap();
        }
        drop(member);
        gather(Vec::new());
    });
}

fn device_names(provider: &str) -> Vec<String> {
    OfiDevice::new(config(provider)).unwrap().domains().collect()
}
