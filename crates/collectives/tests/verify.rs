//! Every schedule is what it says.

use weft_collectives::{Algorithm, AnySchedule, Collective, Options, Rank, Schedule, build, verify};

/// All schedules for a number of ranks.
fn all(ranks: u32) -> Vec<AnySchedule> {
    let root = |root: u32| Collective::Broadcast { root: Rank(root) };
    let mut collectives = vec![
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::AllToAll,
        root(0),
    ];
    if ranks > 1 {
        collectives.extend([root(ranks - 1), root(ranks / 2)]);
    }
    let mut schedules = Vec::new();
    for collective in collectives {
        for &algorithm in Algorithm::of(collective) {
            let chunks: &[u32] = match algorithm {
                Algorithm::Tree | Algorithm::Chain => &[1, 2, 3, 7],
                _ => &[1],
            };
            for &chunks in chunks {
                for local in 1..=ranks {
                    if ranks % local != 0 || algorithm != Algorithm::Hierarchical && local > 1 {
                        continue;
                    }
                    schedules.push(
                        build(collective, algorithm, ranks, &Options { chunks, local }).unwrap(),
                    );
                }
            }
        }
    }
    schedules
}

#[test]
fn every_algorithm_for_up_to_70_ranks() {
    let mut count = 0;
    for ranks in 1..=70 {
        for schedule in all(ranks) {
            count += 1;
            let proof = verify(&schedule).unwrap_or_else(|error| {
                panic!("{} {} of {ranks}: {error}", schedule.name(), schedule.collective())
            });
            if ranks == 64 {
                println!("{proof}");
            }
        }
    }
    println!("{count} schedules");
}
