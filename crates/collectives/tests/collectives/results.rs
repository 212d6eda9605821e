//! Results for every collective and algorithm.

use crate::{KINDS, algorithms, on_threads, sum_of, sum_of_all, vector};
use weft_collectives::{
    Algorithm, Call, Collective, CollectivesConfig, Element, Rank, Reduction, RunError, Scale,
};
use weft_fabric::ProviderKind;

/// Staging memory so short that vectors with some KiB take many chunks.
const SMALL: CollectivesConfig = CollectivesConfig {
    channels: 3,
    channel_bytes: 8192,
    in_place_bytes: Some(4096),
    reproducible: false,
    reduction_threads: 1,
};

fn expected(collective: Collective, share: usize, seed: u64, ranks: usize, me: usize) -> Vec<i64> {
    let whole = if collective.shares() { share * ranks } else { share };
    match collective {
        Collective::AllReduce => sum_of_all(whole, seed, ranks),
        Collective::ReduceScatter => {
            sum_of_all(whole, seed, ranks)[me * share..(me + 1) * share].to_vec()
        }
        Collective::AllGather => (0..ranks).flat_map(|rank| vector(share, seed, rank)).collect(),
        Collective::Broadcast { root } => vector(share, seed, root.0 as usize),
        Collective::AllToAll => (0..ranks)
            .flat_map(|rank| vector(whole, seed, rank)[me * share..(me + 1) * share].to_vec())
            .collect(),
    }
}

#[test]
fn every_algorithm_computes_its_collective() {
    for kind in KINDS {
        for ranks in [1, 2, 3, 4, 6] {
            on_threads(ranks, kind, SMALL, |member| {
                let (me, ranks) = (member.rank(), ranks as usize);
                let root = Rank(ranks as u32 - 1);
                let collectives = [
                    Collective::AllReduce,
                    Collective::ReduceScatter,
                    Collective::AllGather,
                    Collective::AllToAll,
                    Collective::Broadcast { root },
                ];
                let mut seed = 0;
                for collective in collectives {
                    let mut choices: Vec<_> =
                        algorithms(collective).into_iter().map(Some).collect();
                    choices.push(None);
                    // Only shm reads memory in place.
                    let reads = kind == ProviderKind::Shm;
                    choices.retain(|one| {
                        reads || one.is_none_or(|(one, _)| one != Algorithm::DirectRead)
                    });
                    for algorithm in choices {
                        for share in [0, 1, 3, 77, 5000] {
                            seed += 1;
                            let whole = if collective.shares() { share * ranks } else { share };
                            let input = match collective {
                                Collective::AllGather => vector(share, seed, me),
                                _ => vector(whole, seed, me),
                            };
                            let length = match collective {
                                Collective::ReduceScatter => share,
                                _ => whole,
                            };
                            let mut output = vec![-1; length];
                            let call = Call {
                                collective,
                                element: Element::I64,
                                reduction: Reduction::Sum,
                                scale: Scale::None,
                                elements: whole as u64,
                                input: input.as_ptr().cast(),
                                output: output.as_mut_ptr().cast(),
                                algorithm,
                            };
                            member.run(&call).unwrap();
                            let right = expected(collective, share, seed, ranks, me);
                            assert!(
                                output == right,
                                "{collective} by {algorithm:?} over {kind:?}, {share} elements, rank {me}"
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn averages_and_scaled_sums_are_those_of_the_elements() {
    for kind in KINDS {
        on_threads(3, kind, SMALL, |member| {
            for length in [1usize, 100, 3000] {
                let of = |rank: usize| (0..length).map(move |i| (i + rank) as f32);
                let mut vector: Vec<f32> = of(member.rank()).collect();
                let mut call = Call {
                    element: Element::F32,
                    scale: Scale::Average,
                    elements: length as u64,
                    input: vector.as_ptr().cast(),
                    output: vector.as_mut_ptr().cast(),
                    ..sum_of(&mut [])
                };
                member.run(&call).unwrap();
                assert!(vector.iter().zip(of(1)).all(|(a, b)| *a == b));
                vector.iter_mut().zip(of(member.rank())).for_each(|(a, b)| *a = b);
                call.scale = Scale::Before(0.5);
                member.run(&call).unwrap();
                assert!(vector.iter().zip(of(1)).all(|(a, b)| *a == 1.5 * b));
            }
        });
    }
}

#[test]
fn a_scale_is_ignored_by_collectives_that_do_not_reduce() {
    on_threads(2, KINDS[0], SMALL, |member| {
        let all = [1.0f32, 2.0, 3.0, 4.0];
        for scale in [Scale::Before(0.5), Scale::Average] {
            let mut gathered = [0.0f32; 4];
            let call = Call {
                collective: Collective::AllGather,
                element: Element::F32,
                scale,
                elements: 4,
                input: all[2 * member.rank()..].as_ptr().cast(),
                output: gathered.as_mut_ptr().cast(),
                ..sum_of(&mut [])
            };
            member.run(&call).unwrap();
            assert_eq!(gathered, all);
        }
    });
}

#[test]
fn many_calls_may_be_under_way() {
    for kind in KINDS {
        on_threads(3, kind, SMALL, |member| {
            let lengths = [1, 10_000, 3, 500, 40_000, 7];
            for round in 0..5 {
                let seed = |index: usize| (100 * round + index) as u64;
                let mut vectors: Vec<Vec<i64>> = (0..)
                    .zip(lengths)
                    .map(|(index, length)| vector(length, seed(index), member.rank()))
                    .collect();
                let ids: Vec<_> =
                    vectors.iter_mut().map(|one| member.start(&sum_of(one)).unwrap()).collect();
                for id in ids.into_iter().rev() {
                    member.wait_for(id, crate::PATIENCE).unwrap();
                }
                for (index, one) in vectors.iter().enumerate() {
                    assert!(*one == sum_of_all(lengths[index], seed(index), 3), "call {index}");
                }
            }
        });
    }
}

#[test]
fn arguments_that_no_call_can_have_are_rejected_before_any_work() {
    on_threads(2, KINDS[0], SMALL, |member| {
        let mut vector = vec![1i64; 4];
        let good = sum_of(&mut vector);
        let start = good.input;
        let rejected = [
            Call { element: Element::F32, reduction: Reduction::Xor, ..good },
            Call { elements: u64::MAX / 4, ..good },
            Call { input: std::ptr::null(), ..good },
            Call { output: start.wrapping_add(8).cast_mut(), ..good },
            Call { collective: Collective::Broadcast { root: Rank(2) }, ..good },
            Call { collective: Collective::AllGather, elements: 3, ..good },
            Call { scale: Scale::Average, reduction: Reduction::Max, ..good },
            Call { algorithm: algorithms_of_all_to_all(), ..good },
        ];
        for call in rejected {
            let error = member.start(&call).unwrap_err();
            assert!(matches!(error, RunError::Invalid { .. }), "{error}");
        }
        member.sum(&mut vector).unwrap();
        assert_eq!(vector, [2; 4]);
    });
}

fn algorithms_of_all_to_all() -> Option<(weft_collectives::Algorithm, weft_collectives::Options)> {
    algorithms(Collective::AllToAll).first().copied()
}
