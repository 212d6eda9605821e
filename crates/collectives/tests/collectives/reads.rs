//! Reads from peer memory in place: which calls use them, wrong addresses, ranks that die or lack the permission.

use crate::communicators::{communicators, process_communicator};
use crate::ranks::{on_processes, process_rank};
use crate::{Member, on_threads, sum_of, sum_of_all, vector};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;
use weft_collectives::{
    Algorithm, Call, Collective, CollectivesConfig, Options, Rank, Reduction, RunError, Scale,
};
use weft_fabric::{Cause, Error, ProviderKind};

const SHM: ProviderKind = ProviderKind::Shm;
const BY_READS: Option<(Algorithm, Options)> =
    Some((Algorithm::DirectRead, Options { chunks: 8, local: 1 }));
/// Elements in a vector that is read in place where a call asks for it.
const LONG: usize = 80_000;

#[test]
fn long_vectors_are_read_in_place_over_shm_and_never_over_tcp() {
    for (kind, reads) in [(SHM, true), (ProviderKind::Tcp, false)] {
        on_threads(2, kind, CollectivesConfig::default(), |member| {
            let selected = |length: usize| {
                let (share, mut all) = (vec![0i64; length / 2], vec![0; length]);
                let (collective, input) = (Collective::AllGather, share.as_ptr().cast());
                let call = Call { collective, input, ..sum_of(&mut all) };
                member.collectives.selected(&mut member.communicator.access(), &call).unwrap().0
            };
            assert_eq!(selected(600_000) == Algorithm::DirectRead, reads);
            assert_ne!(selected(10), Algorithm::DirectRead);
            let mut long = vec![0; 600_000];
            let sum = sum_of(&mut long);
            let by = member.collectives.selected(&mut member.communicator.access(), &sum).unwrap();
            assert_eq!(by.0 == Algorithm::OneShot, reads);
            let mut own = vector(LONG, 1, member.rank());
            let by_reads = member.run(&Call { algorithm: BY_READS, ..sum_of(&mut own) });
            match by_reads {
                Ok(()) => assert!(reads && own == sum_of_all(LONG, 1, 2)),
                Err(error) => assert!(!reads && matches!(error, RunError::TooLarge { .. })),
            }
        });
    }
}

#[test]
fn results_in_the_memory_of_the_input_are_those_of_separate_memory() {
    for (ranks, channel_bytes) in [(2, 1 << 20), (3, 4096), (4, 8192)] {
        let config =
            CollectivesConfig { channels: 2, channel_bytes, ..CollectivesConfig::default() };
        on_threads(ranks as u32, SHM, config, |member| {
            let (me, share) = (member.rank(), 10_007usize);
            let whole = share * ranks;
            for seed in 0..4 {
                let expected = sum_of_all(whole, seed, ranks);
                let mut sum = vector(whole, seed, me);
                member.run(&Call { algorithm: BY_READS, ..sum_of(&mut sum) }).unwrap();
                assert!(sum == expected);
                // The memory is the caller's again: no peer reads it any more.
                sum.fill(-1);
                let mut scattered = vector(whole, seed, me);
                let own = me * share;
                let output = scattered[own..].as_mut_ptr().cast();
                let call = Call {
                    collective: Collective::ReduceScatter,
                    algorithm: BY_READS,
                    ..sum_of(&mut scattered)
                };
                member.run(&Call { output, ..call }).unwrap();
                assert!(scattered[own..own + share] == expected[own..own + share]);
                let mut gathered = vec![-1; whole];
                gathered[own..own + share].copy_from_slice(&vector(share, seed, me));
                let input = gathered[own..].as_ptr().cast();
                let call = Call {
                    collective: Collective::AllGather,
                    algorithm: BY_READS,
                    ..sum_of(&mut gathered)
                };
                member.run(&Call { input, ..call }).unwrap();
                assert!((0..ranks).all(|rank| {
                    gathered[rank * share..(rank + 1) * share] == vector(share, seed, rank)
                }));
                gathered.fill(-1);
            }
        });
    }
}

#[test]
fn averages_and_scaled_sums_have_the_bits_of_written_ones() {
    on_threads(4, SHM, CollectivesConfig::default(), |member| {
        for scale in [Scale::Average, Scale::Before(0.3)] {
            let reduced = |algorithm| {
                let input: Vec<f32> =
                    vector(LONG, 3, member.rank()).iter().map(|&one| one as f32 / 7.0).collect();
                let mut output = vec![0f32; LONG];
                let call = Call {
                    element: weft_collectives::Element::F32,
                    reduction: Reduction::Sum,
                    scale,
                    input: input.as_ptr().cast(),
                    output: output.as_mut_ptr().cast(),
                    algorithm: Some((algorithm, Options::default())),
                    elements: LONG as u64,
                    ..sum_of(&mut [])
                };
                member.run(&call).unwrap();
                output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(reduced(Algorithm::DirectRead) == reduced(Algorithm::TwoShot));
        }
    });
}

#[test]
fn a_wrong_address_poisons_the_group_and_names_its_rank() {
    communicators(3, SHM, None, |communicator| {
        let member = Member::new(communicator, CollectivesConfig::default());
        let mut own = vec![1i64; LONG];
        let collective = Collective::Broadcast { root: Rank(1) };
        let mut call = Call { collective, algorithm: BY_READS, ..sum_of(&mut own) };
        if member.rank() == 1 {
            // The root does not copy if the output is the input.
            call.input = std::ptr::without_provenance(4096);
            call.output = call.input.cast_mut();
        }
        let error = member.run(&call).unwrap_err();
        let RunError::Fabric(Error::Poisoned(poison)) = &error else { panic!("{error}") };
        assert_eq!((poison.kind, poison.rank), (Cause::Protocol, Some(weft_fabric::Rank(1))));
        assert!(poison.detail.contains("0x1000 of its memory cannot be read"), "{}", poison.detail);
    });
}

#[test]
fn a_call_that_is_shorter_at_a_peer_poisons_the_group() {
    communicators(2, SHM, None, |communicator| {
        let member = Member::new(communicator, CollectivesConfig::default());
        let mut own = vec![1i64; LONG];
        let collective = Collective::Broadcast { root: Rank(0) };
        let mut call = Call { collective, algorithm: BY_READS, ..sum_of(&mut own) };
        call.elements -= u64::from(member.rank() == 0);
        let error = member.run(&call).unwrap_err();
        let RunError::Fabric(Error::Poisoned(poison)) = &error else { panic!("{error}") };
        assert_eq!((poison.kind, poison.rank), (Cause::Protocol, Some(weft_fabric::Rank(0))));
        assert!(poison.detail.contains("length of its input is 639992"), "{}", poison.detail);
    });
}

#[test]
fn survivors_name_a_rank_that_is_killed_while_its_memory_is_read() {
    let name = "reads::survivors_name_a_rank_that_is_killed_while_its_memory_is_read";
    let Some(rank) = process_rank() else {
        assert_eq!(on_processes(name, 3), [Ok(()), Err("killed by 9".into()), Ok(())]);
        return;
    };
    let member = Member::new(process_communicator(rank, 3, SHM), CollectivesConfig::default());
    let mut own = vec![1i64; 1 << 20];
    let mut call = Call { algorithm: BY_READS, ..sum_of(&mut own) };
    if let Err(error) = member.run(&call) {
        // The kernel may refuse to read from other processes; a killed rank is named then as well.
        assert!(matches!(error, RunError::TooLarge { .. }), "{error}");
        call.algorithm = None;
    }
    for _ in 0..3 {
        member.run(&call).unwrap();
    }
    if rank.0 == 1 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            kill_process(getpid(), Signal::KILL).unwrap();
        });
    }
    let error = (0..).find_map(|_| member.run(&call).err()).unwrap();
    let RunError::Fabric(Error::Poisoned(poison)) = &error else { panic!("{error}") };
    assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(weft_fabric::Rank(1))));
    member.close().unwrap();
}
