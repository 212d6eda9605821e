//! Short calls over memory that ranks map: the same results as calls over sockets, any order with long calls, waits
//! that sleep, ranks that die.

use crate::communicators::process_communicator;
use crate::ranks::{on_processes, process_rank};
use crate::{KINDS, Member, on_threads, sum_of, sum_of_all, vector};
use rustix::process::{Signal, getpid, kill_process};
use std::sync::Mutex;
use std::time::Duration;
use weft_collectives::{
    Call, CallId, Collective, CollectivesConfig, Element, Rank as Root, Reduction, RunError, Scale,
};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Cause, Error, ProviderKind, Rank, clock};

const ELEMENTS: [Element; 5] =
    [Element::F32, Element::F16, Element::Bf16, Element::F64, Element::I16];
const SCALES: [Scale; 3] = [Scale::None, Scale::Average, Scale::Before(0.3)];

/// Reduction results on random bytes, NaN and infinities among them.
fn reductions(member: &Member) -> Vec<Vec<u8>> {
    let mut results = Vec::new();
    let mut random = SplitMix64::new(1 + member.rank() as u64);
    let ranks = 3;
    for element in ELEMENTS {
        for (collective, scale, count) in [Collective::AllReduce, Collective::ReduceScatter]
            .into_iter()
            .flat_map(|collective| SCALES.map(|scale| (collective, scale)))
            .flat_map(|(collective, scale)| {
                [1, 5, 130, 700].map(|count| (collective, scale, count))
            })
        {
            let bytes = element.bytes() * count * ranks;
            // Not aligned.
            let mut memory: Vec<u8> = (0..bytes + 1).map(|_| random.bits() as u8).collect();
            let mut output = vec![0; bytes];
            let call = Call {
                collective,
                element,
                reduction: Reduction::Sum,
                scale,
                elements: (count * ranks) as u64,
                input: memory[1..].as_ptr(),
                output: output.as_mut_ptr(),
                algorithm: None,
            };
            member.run(&call).unwrap();
            let in_place = Call { output: memory[1..].as_mut_ptr(), ..call };
            if collective == Collective::AllReduce {
                member.run(&in_place).unwrap();
                assert_eq!(memory[1..], output);
            }
            results.push(output);
        }
    }
    results
}

/// Write parts that a rank has posted.
fn posted(member: &Member) -> u64 {
    let statistics = member.communicator.engine().statistics();
    statistics.peers.iter().map(|peer| peer.totals.parts).sum()
}

#[test]
fn short_calls_post_no_writes() {
    // Elements in the longest message: 64 KiB among few ranks, 16 KiB among more.
    for (ranks, longest) in [(2u32, 8192), (4, 8192), (5, 2048)] {
        on_threads(ranks, ProviderKind::Shm, CollectivesConfig::default(), |member| {
            let gather = |share: usize| {
                let (mine, collective) = (vector(share, 1, member.rank()), Collective::AllGather);
                let mut all = vec![0; share * ranks as usize];
                let input = mine.as_ptr().cast();
                member.run(&Call { collective, input, ..sum_of(&mut all) }).unwrap();
                assert!(
                    (0..).zip(all.chunks(share)).all(|(rank, one)| one == vector(share, 1, rank))
                );
            };
            member.barrier().unwrap();
            let before = posted(member);
            gather(longest);
            assert_eq!(posted(member), before);
            gather(longest + 1);
            assert_ne!(posted(member), before);
        });
    }
}

#[test]
fn results_have_the_bits_of_calls_by_writes() {
    let [shm, tcp] = KINDS.map(|kind| {
        let results = Mutex::new([Vec::new(), Vec::new(), Vec::new()]);
        on_threads(3, kind, CollectivesConfig::default(), |member| {
            let mine = reductions(member);
            results.lock().unwrap()[member.rank()] = mine;
        });
        results.into_inner().unwrap()
    });
    assert!(shm == tcp);
}

/// Calls with random lengths, short and long; up to 20 are in flight and end in any wait order.
fn random_calls(member: &Member, seed: u64, ranks: usize) {
    let mut random = SplitMix64::new(seed);
    let mut own = SplitMix64::new(seed ^ (member.rank() as u64) << 7);
    let mut in_flight: Vec<(CallId, Vec<i64>, Vec<i64>)> = Vec::new();
    for call in 0..400 {
        let length = match random.bits() % 4 {
            0 => 1 + random.bits() as usize % 12_000,
            _ => 1 + random.bits() as usize % 160,
        };
        let is_broadcast = random.bits().is_multiple_of(2);
        let root = random.bits() as usize % ranks;
        let mut mine = vector(length, call, member.rank());
        let reduced = sum_of(&mut mine);
        let (call, right) = match is_broadcast {
            true => {
                let collective = Collective::Broadcast { root: Root(root as u32) };
                (Call { collective, ..reduced }, vector(length, call, root))
            }
            false => (reduced, sum_of_all(length, call, ranks)),
        };
        in_flight.push((member.start(&call).unwrap(), mine, right));
        while in_flight.len() > own.bits() as usize % 20 {
            let (id, mine, right) = in_flight.swap_remove(own.bits() as usize % in_flight.len());
            if own.bits().is_multiple_of(3) {
                while !member.is_done(id).unwrap() {
                    std::thread::yield_now();
                }
            } else {
                wait_spinning(member, id, Duration::from_micros(own.bits() % 2 * 50));
            }
            assert!(mine == right);
        }
    }
    for (id, mine, right) in in_flight {
        wait_spinning(member, id, Duration::ZERO);
        assert!(mine == right);
    }
}

fn wait_spinning(member: &Member, id: CallId, spin: Duration) {
    let (mut never, deadline) = (|| false, clock::now().after(crate::PATIENCE));
    let mut options = member.communicator.wait_options(deadline, &mut never);
    options.spin = spin;
    member.collectives.wait(&mut member.communicator.access(), id, &mut options).unwrap();
}

#[test]
fn short_and_long_calls_mix_in_any_order_of_waits() {
    for (ranks, seed) in [(2, 1), (3, 2), (5, 3)] {
        on_threads(ranks, ProviderKind::Shm, CollectivesConfig::default(), |member| {
            random_calls(member, seed, ranks as usize);
        });
    }
}

#[test]
fn two_groups_of_one_rank_do_not_disturb_each_other() {
    on_threads(2, ProviderKind::Shm, CollectivesConfig::default(), |first| {
        let config = CollectivesConfig { channels: 1, ..CollectivesConfig::default() };
        let second =
            weft_collectives::Collectives::connect(&first.communicator, config, crate::soon());
        let second = second.unwrap();
        let mut never = || false;
        for call in 0..300u64 {
            let mut own = [vector(9, call, first.rank()), vector(9, !call, first.rank())];
            let [one, other] = own.each_mut().map(|own| sum_of(own));
            let one = first.start(&one).unwrap();
            // SAFETY: the memory is alive and not accessed until the wait below has returned.
            let other = unsafe { second.start(&mut first.communicator.access(), &other) }.unwrap();
            let mut options = first.communicator.wait_options(crate::soon(), &mut never);
            options.spin = Duration::ZERO;
            second.wait(&mut first.communicator.access(), other, &mut options).unwrap();
            first.wait_for(one, crate::PATIENCE).unwrap();
            assert_eq!(own, [sum_of_all(9, call, 2), sum_of_all(9, !call, 2)]);
        }
        let mut options = first.communicator.wait_options(crate::soon(), &mut never);
        second.close(&first.communicator, &mut options).unwrap();
    });
}

/// Two threads sleep in waits for different calls, so that one gets messages that the other has taken.
#[test]
fn threads_that_sleep_in_waits_are_woken_by_messages_that_others_take() {
    on_threads(2, ProviderKind::Shm, CollectivesConfig::default(), |member| {
        for call in 0..200u64 {
            let mut own = [vector(3, call, member.rank()), vector(3, !call, member.rank())];
            let calls = own.each_mut().map(|own| sum_of(own));
            let pause = || std::thread::sleep(Duration::from_micros(200 * (member.rank() as u64)));
            let ids = calls.map(|call| {
                pause();
                member.start(&call).unwrap()
            });
            std::thread::scope(|scope| {
                for id in ids {
                    scope.spawn(move || wait_spinning(member, id, Duration::ZERO));
                }
            });
            assert_eq!(own, [sum_of_all(3, call, 2), sum_of_all(3, !call, 2)]);
        }
    });
}

#[test]
fn a_root_that_is_far_ahead_waits_for_room_and_names_the_peer() {
    on_threads(2, ProviderKind::Shm, CollectivesConfig::default(), |member| {
        let mut memory: Vec<_> = (0..50).map(|call| vector(10, call, member.rank())).collect();
        let collective = Collective::Broadcast { root: Root(0) };
        let mut start =
            |call: usize| member.start(&Call { collective, ..sum_of(&mut memory[call]) }).unwrap();
        if member.rank() == 0 {
            let ids: Vec<_> = (0..50).map(&mut start).collect();
            let error = member.wait_for(ids[49], Duration::from_millis(20)).unwrap_err();
            let RunError::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(missing[0].rank, Rank(1));
            member.barrier().unwrap();
            member.wait_for(ids[49], crate::PATIENCE).unwrap();
        } else {
            member.barrier().unwrap();
            for call in 0..50 {
                let id = start(call);
                member.wait_for(id, crate::PATIENCE).unwrap();
            }
        }
        for (call, memory) in (0..).zip(memory) {
            assert_eq!(memory, vector(10, call, 0));
        }
    });
}

#[test]
fn survivors_name_a_rank_killed_between_short_calls() {
    let name = "short::survivors_name_a_rank_killed_between_short_calls";
    let Some(rank) = process_rank() else {
        let outcomes = on_processes(name, 3);
        assert_eq!(outcomes, [Ok(()), Err("killed by 9".into()), Ok(())]);
        return;
    };
    let communicator = process_communicator(rank, 3, ProviderKind::Shm);
    let member = Member::new(communicator, CollectivesConfig::default());
    // A survivor may be in the killed rank's last call: that one too may fail.
    let certain = if rank == Rank(1) { 1000 } else { 999 };
    for call in 0..certain {
        let mut mine = vector(10, call, member.rank());
        member.sum(&mut mine).unwrap();
        assert_eq!(mine, sum_of_all(10, call, 3));
    }
    if rank == Rank(1) {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let mut memory = vector(10, certain, member.rank());
    let error = (0..).find_map(|_| member.sum(&mut memory).err()).unwrap();
    let RunError::Fabric(Error::Poisoned(poison)) = &error else { panic!("{error}") };
    assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(1))));
    assert!(matches!(member.sum(&mut memory), Err(RunError::Fabric(Error::Poisoned(_)))));
    member.close().unwrap();
}
