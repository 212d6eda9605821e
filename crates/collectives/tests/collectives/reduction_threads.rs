//! Long vectors that several threads on a rank reduce.

use crate::communicators::process_communicator;
use crate::ranks::{on_processes, process_rank};
use crate::{KINDS, Member, algorithms, on_threads, sum_of, sum_of_all, vector};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use weft_collectives::{Call, Collective, CollectivesConfig, Element, RunError, Scale};
use weft_fabric::ProviderKind;

/// Elements whose blocks are long enough for several threads.
const LENGTH: usize = 300_000;

fn of_threads(reduction_threads: u32) -> CollectivesConfig {
    CollectivesConfig { reduction_threads, ..CollectivesConfig::default() }
}

/// Floats with any bits but infinities and NaN, whose sums depend on the order.
fn floats(seed: u64, rank: usize) -> Vec<f32> {
    vector(LENGTH, seed, rank).into_iter().map(|bits| bits as f32).collect()
}

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    for kind in KINDS {
        let results = Mutex::new(Vec::new());
        for threads in [1, 2, 3] {
            on_threads(2, kind, of_threads(threads), |member| {
                let mut made = Vec::new();
                for collective in [Collective::AllReduce, Collective::ReduceScatter] {
                    for (index, algorithm) in (0..).zip(algorithms(collective)) {
                        for scale in [Scale::None, Scale::Before(0.3), Scale::Average] {
                            let input = floats(index, member.rank());
                            let mut output = vec![0f32; LENGTH];
                            let call = Call {
                                collective,
                                element: Element::F32,
                                scale,
                                elements: LENGTH as u64,
                                input: input.as_ptr().cast(),
                                output: output.as_mut_ptr().cast(),
                                algorithm: Some(algorithm),
                                ..sum_of(&mut [])
                            };
                            match member.run(&call) {
                                // Only shm reads memory in place.
                                Err(RunError::TooLarge { .. }) => continue,
                                run => run.unwrap(),
                            }
                            made.push((
                                algorithm,
                                output.iter().map(|one| one.to_bits()).collect(),
                            ));
                        }
                    }
                }
                let made: Vec<(_, Vec<u32>)> = made;
                assert!(made.len() > 15, "{}", made.len());
                results.lock().unwrap().push((member.rank(), made));
            });
        }
        let results = results.into_inner().unwrap();
        for (rank, made) in &results {
            let (_, first) = results.iter().find(|(other, _)| other == rank).unwrap();
            for ((algorithm, bits), (_, expected)) in made.iter().zip(first) {
                assert!(bits == expected, "{algorithm:?} over {kind:?}, rank {rank}");
            }
        }
    }
}

#[test]
fn long_gathers_are_read_by_several_threads() {
    on_threads(2, ProviderKind::Shm, of_threads(3), |member| {
        let share = vector(LENGTH, 5, member.rank());
        let mut all = vec![0i64; 2 * LENGTH];
        let input = share.as_ptr().cast();
        let collective = Collective::AllGather;
        member.run(&Call { collective, input, ..sum_of(&mut all) }).unwrap();
        assert!((0..2).all(|rank| all[rank * LENGTH..][..LENGTH] == vector(LENGTH, 5, rank)));
    });
}

#[test]
fn the_threads_of_a_group_end_with_it() {
    let name = "reduction_threads::the_threads_of_a_group_end_with_it";
    let Some(rank) = process_rank() else {
        assert_eq!(on_processes(name, 2), [Ok(()), Ok(())]);
        return;
    };
    let named = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
        // A thread that has ended meanwhile has no name.
        names.flatten().filter(|name| name.starts_with("weft-reduce-")).count()
    };
    // A thread takes its name only after it has started, and is listed for a moment after it was
    // joined.
    let becomes = |count: usize| {
        let until = Instant::now() + Duration::from_secs(60);
        while named() != count {
            assert!(Instant::now() < until, "{} threads: expected {count}", named());
            std::thread::yield_now();
        }
    };
    let communicator = process_communicator(rank, 2, ProviderKind::Shm);
    let member = Member::new(communicator, of_threads(3));
    let mut short = vector(100, 1, member.rank());
    member.sum(&mut short).unwrap();
    assert_eq!(named(), 0);
    for seed in 0..3 {
        let mut long = vector(LENGTH, seed, member.rank());
        member.sum(&mut long).unwrap();
        assert!(long == sum_of_all(LENGTH, seed, 2));
        becomes(2);
    }
    member.close().unwrap();
    becomes(0);
}
