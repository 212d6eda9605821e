//! Twin tests: ranks as threads, against a direct reference over whole vectors.

mod case;
mod group;
mod memory;
mod transfers;

use super::*;
use crate::device::family::OTHER_CALL;
use crate::device::plan::{CallOptions, DeviceAlgorithm, Kernel};
use case::{Case, Kind, Prepared, plain, sequences};
use group::Group;
use proptest::prelude::*;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use weft_gpu::table::Word;

/// Runs the cases on all ranks and compares the results.
fn check(group: &Group, cases: &[Case]) {
    let calls: Vec<Prepared> = cases.iter().map(|case| case.prepare(&group.layout)).collect();
    let ranks: Vec<u32> = (0..group.layout.ranks).collect();
    group.run(&calls, &ranks);
    for (rank, state) in group.ranks.iter().enumerate() {
        assert_eq!(state.watch.fatal(), None);
        calls.iter().for_each(|call| call.check(rank));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 300 }))]

    #[test]
    fn sequences_of_calls_have_the_results_of_the_reference(
        (ranks, blocks, cases, seed) in sequences(),
        epoch in prop_oneof![Just(0), (0u32..8).prop_map(|less| u32::MAX - less)],
        sequence in prop_oneof![Just(0), (0u32..40).prop_map(|less| 0u32.wrapping_sub(less))],
    ) {
        let group = Group::new(ranks, blocks);
        group.set_state(epoch, sequence);
        for (rank, state) in (0..).zip(&group.ranks) {
            state.twin.set_jitter(seed.wrapping_add(rank));
        }
        check(&group, &cases);
    }
}

/// Long calls in small chunks that each need a credit, with late teams.
#[test]
fn rings_are_not_overwritten_by_ranks_that_are_ahead() {
    for seed in 1..if cfg!(miri) { 2 } else { 80 } {
        let group = Group::new(2 + seed as u32 % 3, 1);
        for (rank, state) in (0..).zip(&group.ranks) {
            state.twin.set_jitter(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(10 * seed + rank));
        }
        let cases = [Kind::AllReduce, Kind::AllToAllUneven, Kind::ReduceScatter].map(|kind| {
            let case = plain(kind, 2000, DeviceAlgorithm::TwoShot);
            Case { options: CallOptions { chunk_bytes: Some(16), ..case.options }, seed, ..case }
        });
        check(&group, &cases);
    }
}

/// Kinds and algorithms that reach each kernel.
fn one_of_each_kernel() -> [(Kind, DeviceAlgorithm, Kernel); 9] {
    use DeviceAlgorithm::{CopyEngine, Direct, OneShot, TwoShot};
    [
        (Kind::AllToAll, OneShot, Kernel::ExchangePackets),
        (Kind::AllToAll, TwoShot, Kernel::ExchangeChunks),
        (Kind::AllReduce, OneShot, Kernel::ReducePackets),
        (Kind::ReduceScatter, TwoShot, Kernel::ReduceChunks),
        (Kind::AllReduce, TwoShot, Kernel::AllReduceChunks),
        (Kind::AllToAll, Direct, Kernel::ExchangeDirect),
        (Kind::AllToAll, CopyEngine, Kernel::CopyEntry),
        (Kind::ReduceScatter, Direct, Kernel::ReduceDirect),
        (Kind::AllReduce, Direct, Kernel::AllReduceDirect),
    ]
}

fn phase_of(kernel: Kernel) -> u32 {
    FAMILY.first_phase
        + match kernel.transport() {
            Transport::Packets => 0,
            Transport::Chunks => 1,
            Transport::Direct => 3,
        }
}

#[test]
fn every_kernel_runs_a_call_of_several_rings_of_small_chunks() {
    let group = Group::new(2, 1);
    let case = |(kind, algorithm, _)| {
        let case = plain(kind, 90, algorithm);
        Case { options: CallOptions { chunk_bytes: Some(16), ..case.options }, ..case }
    };
    check(&group, &one_of_each_kernel().map(case));
}

#[test]
fn calls_of_every_element_and_reduction_have_the_bits_of_whole_vectors() {
    let group = Group::new(3, 2);
    let algorithms = [DeviceAlgorithm::OneShot, DeviceAlgorithm::TwoShot, DeviceAlgorithm::Direct];
    let mut cases = Vec::new();
    for (element, reduction, algorithm, average) in Element::ALL.iter().flat_map(|element| {
        let of = move |reduction| algorithms.map(move |algorithm| (*element, reduction, algorithm));
        let plain = Reduction::ALL.into_iter().flat_map(of).map(|(e, r, a)| (e, r, a, false));
        plain.chain(of(Reduction::Sum).map(|(e, r, a)| (e, r, a, true)))
    }) {
        for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::Reduce] {
            let case = plain(kind, 301, algorithm);
            cases.push(Case { element, reduction, average, ..case });
        }
    }
    cases.retain(|case| case.reduction.supports(case.element));
    check(&group, &cases);
}

#[test]
fn packets_continue_after_the_last_epoch_with_the_other_half() {
    let group = Group::new(3, 2);
    group.set_state(u32::MAX - 2, 0);
    check(&group, &vec![plain(Kind::AllReduce, 2000, DeviceAlgorithm::OneShot); 6]);
    let epoch = group.heaps[0].raw().word(group.layout.epoch(0)).load(Relaxed);
    // MAX - 1, MAX, 2, 3, 4, 5.
    assert_eq!(epoch, 5);
}

#[test]
fn a_rank_that_does_not_call_is_named_and_outputs_are_poisoned() {
    for (limit, in_place) in [(0, false), (200, false), (200, true)] {
        for (kind, algorithm, kernel) in one_of_each_kernel() {
            let group = Group::new(3, 2);
            group.set_limit(Duration::from_secs(60));
            // A call that succeeds, and then one without rank 1.
            let case = Case { in_place, ..plain(kind, 3000, algorithm) };
            check(&group, std::slice::from_ref(&case));
            group.set_limit(Duration::from_millis(limit));
            let calls = [case.prepare(&group.layout), case.prepare(&group.layout)];
            assert_eq!(calls[0].plans[0].kernel, kernel);
            let start = Barrier::new(2);
            thread::scope(|scope| {
                for rank in [0, 2] {
                    let (calls, twin, start) = (&calls, &group.ranks[rank].twin, &start);
                    scope.spawn(move || {
                        start.wait();
                        calls.iter().for_each(|call| call.run(twin, rank));
                    });
                }
            });
            for rank in [0, 2] {
                let record = group.ranks[rank].watch.fatal().expect("a record");
                assert_eq!(record.code, Code::Timeout);
                assert_eq!((record.rank, record.phase), (rank as u32, phase_of(kernel)));
                assert_eq!(record.channel, 0);
                if limit > 0 {
                    assert_eq!(record.peer, Some(1), "{kernel:?}");
                }
                assert!(record.seen < record.expected, "{record:?}");
                // In place, the poisoned output is all the input or a part.
                calls.iter().for_each(|call| call.check_poisoned(rank));
            }
        }
    }
}

#[test]
fn a_late_rank_has_its_results_or_an_error_after_others_have_timed_out() {
    for (kind, algorithm, kernel) in one_of_each_kernel() {
        for count in [10, 5000] {
            let group = Group::new(2, 1);
            let options = CallOptions {
                algorithm: Some(algorithm),
                chunk_bytes: Some(256),
                ..CallOptions::default()
            };
            let call = Case { options, ..plain(kind, count, algorithm) }.prepare(&group.layout);
            group.set_limit(Duration::from_millis(10));
            call.run(&group.ranks[0].twin, 0);
            call.run(&group.ranks[1].twin, 1);
            // Peers may write to the outputs in direct calls after their own rank has failed.
            if kernel.transport() != Transport::Direct {
                call.check_poisoned(0);
            }
            match group.ranks[1].watch.fatal() {
                None => call.check(1),
                Some(_) => call.check_poisoned(1),
            }
        }
    }
}

/// Neither rank accesses the other's tensors.
#[test]
fn direct_calls_that_differ_between_ranks_fail_on_both() {
    for (kind, algorithm, kernel) in one_of_each_kernel() {
        if kernel.transport() != Transport::Direct {
            continue;
        }
        let group = Group::new(2, 1);
        let case = plain(kind, 500, algorithm);
        let other = Case { seed: 8, ..case.clone() };
        let calls = [case, other].map(|case| case.prepare(&group.layout));
        thread::scope(|scope| {
            for (rank, call) in calls.iter().enumerate() {
                let twin = &group.ranks[rank].twin;
                scope.spawn(move || call.run(twin, rank));
            }
        });
        for (rank, call) in calls.iter().enumerate() {
            let record = group.ranks[rank].watch.fatal().expect("a record");
            let found = (record.code, record.phase, record.peer);
            let expected = (Code::Family(OTHER_CALL), phase_of(kernel), Some(1 - rank as u32));
            assert_eq!(found, expected);
            call.check_poisoned(rank);
        }
    }
}

/// A rank whose exit fails leaves the vector in an in-place all-reduce as it is: peers that have entered read it.
#[test]
fn a_failed_exit_keeps_what_peers_may_read() {
    let group = Group::new(2, 1);
    let case = Case { in_place: true, ..plain(Kind::AllReduce, 512, DeviceAlgorithm::Direct) };
    let call = case.prepare(&group.layout);
    group.set_limit(Duration::from_millis(10));
    // Rank 1 enters and does not exit.
    let entry = 1u64 << 32 | u64::from(case.seed as u32);
    group.heaps[0].raw().packet(group.layout.signal(0, 1)).store(entry, Relaxed);
    call.run(&group.ranks[0].twin, 0);
    let record = group.ranks[0].watch.fatal().expect("a record");
    assert_eq!((record.code, record.peer), (Code::Timeout, Some(1)));
    assert_eq!(record.phase, FAMILY.first_phase + Phase::Exit as u32);
    // The rank's own slice has the result, and the other one is the input.
    let tensors = &call.tensors[0];
    let (place, bytes) = (tensors.output, tensors.memory.bytes(tensors.expected.len()));
    let half = place.begin + place.length / 2;
    assert!(bytes[place.begin..half] == tensors.expected[place.begin..half]);
    assert!(bytes[half..] == tensors.initial[half..]);
}

#[test]
fn an_abort_ends_the_waits_of_all_kernels() {
    for (kind, algorithm, kernel) in one_of_each_kernel() {
        let group = Group::new(2, 1);
        let call = plain(kind, 3000, algorithm).prepare(&group.layout);
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| call.run(&group.ranks[0].twin, 0));
            thread::sleep(Duration::from_millis(10));
            group.ranks[0].watch.abort();
        });
        assert!(begun.elapsed() < Duration::from_secs(30), "the limit is longer");
        let record = group.ranks[0].watch.fatal().expect("a record");
        assert_eq!(
            (record.code, record.phase, record.peer),
            (Code::Aborted, phase_of(kernel), Some(1))
        );
        call.check_poisoned(0);
        // The peer has the data, or its own timeout ends the wait.
        group.ranks[1].watch.abort();
        call.run(&group.ranks[1].twin, 1);
    }
}

#[test]
fn calls_of_a_dead_domain_or_of_closed_memory_poison_outputs_without_a_record() {
    for (kind, algorithm, _) in one_of_each_kernel() {
        let group = Group::new(2, 1);
        let call = plain(kind, 30, algorithm).prepare(&group.layout);
        group.ranks[0].table.raw().word(Word::Dead as u64).store(9, Relaxed);
        group.heaps[1].raw().word(group.layout.closed).store(1, Relaxed);
        group.run(std::slice::from_ref(&call), &[0, 1]);
        for rank in [0, 1] {
            assert_eq!(group.ranks[rank].watch.fatal(), None);
            call.check_poisoned(rank);
        }
        // No flag or packet has been written.
        for heap in &group.heaps {
            let raw = heap.raw();
            let flags = group.layout.flag(0, 0, 0)..group.layout.signal(0, 1) + 8;
            assert!(flags.step_by(4).all(|at| raw.word(at).load(Relaxed) == 0));
            let packet = raw.packet(group.layout.unit(0, 1, 1, 0));
            assert_eq!(packet.load(Relaxed), 0);
        }
    }
}

#[test]
fn one_rank_copies_its_input() {
    let group = Group::new(1, 2);
    let mut cases = Vec::new();
    for (kind, count) in
        Kind::ALL.into_iter().flat_map(|kind| [(kind, 0), (kind, 7), (kind, 50_000)])
    {
        for in_place in [false, true] {
            for algorithm in [None, Some(DeviceAlgorithm::TwoShot), Some(DeviceAlgorithm::Direct)] {
                let options = CallOptions { algorithm, ..CallOptions::default() };
                let case = plain(kind, count, algorithm.unwrap_or(DeviceAlgorithm::OneShot));
                cases.push(Case { in_place, options, shift: 3, average: true, ..case });
            }
        }
    }
    check(&group, &cases);
}

#[test]
fn blocks_of_the_longest_messages_fill_their_rings_several_times() {
    let group = Group::new(3, 2);
    let bytes = u64::from(group.layout.chunk_capacity) * u64::from(group.layout.ring_chunks);
    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::AllToAllUneven, Kind::Broadcast] {
        let case = plain(kind, 5 * bytes / 4 + 3, DeviceAlgorithm::TwoShot);
        check(&group, &[case.clone(), plain(kind, 5, DeviceAlgorithm::TwoShot), case]);
    }
}
