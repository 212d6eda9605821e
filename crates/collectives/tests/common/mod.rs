//! Test helpers: schedules, a generator, an executor, and mutations.
#![allow(dead_code)]

pub mod credited;
pub mod executor;
pub mod mutate;

use weft_collectives::{Algorithm, AnySchedule, Collective, Options, Rank, build};

/// All schedules for a rank count: every collective, algorithm, some roots, some chunk counts, and every node size.
pub fn all(ranks: u32) -> Vec<AnySchedule> {
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
            let locals = match algorithm {
                Algorithm::Hierarchical => {
                    (1..=ranks).filter(|l| ranks.is_multiple_of(*l)).collect()
                }
                _ => vec![1],
            };
            for &chunks in chunks {
                for &local in &locals {
                    let options = Options { chunks, local };
                    schedules.push(build(collective, algorithm, ranks, &options).unwrap());
                }
            }
        }
    }
    schedules
}

/// Generator (xorshift64*), whose sequence the recorded mutants depend on.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        (((self.next() >> 32) * u64::from(limit)) >> 32) as u32
    }

    pub fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }
}
