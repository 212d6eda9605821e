//! Twin heap between threads and between processes.

#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;

use ranks::{PATIENCE, on_processes, on_threads, process_gather, process_rank};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weft_control::{Cause, Control, Error as ControlError, Operation, Poison, local_world};
use weft_fabric::{
    Communicator, CommunicatorConfig, Error as FabricError, IdleLimits, Page, Rank, Reader,
    RegistrationCache, Time, clock,
};
use weft_gpu::domain::{Domain, Registrations};
use weft_gpu::heap::HeapBuilder;
use weft_gpu::{Error, Heap, MemoryLocation};

/// Part layout: a flag for each source, then a page for each.
const PAGE: usize = 4096;

fn bytes(size: u32) -> u64 {
    (64 + size as usize * PAGE) as u64
}

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

fn join(rank: Rank, size: u32, gather: &mut ranks::AllGather<'_>) -> Heap {
    let builder = HeapBuilder::allocate(MemoryLocation::Twin, bytes(size)).unwrap();
    let offers = gather(builder.offer());
    builder.connect(rank.0, offers, soon()).unwrap()
}

/// Writes a page to each rank, including this one, and raises the flag; then checks all pages that arrive.
fn round(heap: &Heap, epoch: u32) {
    let me = heap.rank();
    for peer in (0..heap.size()).map(|step| (me + step) % heap.size()) {
        let there = heap.host_view(peer).unwrap();
        there.fill(64 + me as usize * PAGE, PAGE, (epoch as u8) ^ (me as u8) ^ 0x5a);
        there.word32(me as usize * 4).store(epoch, Ordering::Release);
    }
    let here = heap.host_view(me).unwrap();
    for peer in 0..heap.size() {
        let begin = Instant::now();
        while here.word32(peer as usize * 4).load(Ordering::Acquire) != epoch {
            assert!(begin.elapsed() < PATIENCE, "rank {peer} did not come to {epoch}");
            std::thread::yield_now();
        }
        let mut page = [0; PAGE];
        here.read(64 + peer as usize * PAGE, &mut page);
        let right = (epoch as u8) ^ (peer as u8) ^ 0x5a;
        assert!(page.iter().all(|&byte| byte == right), "bytes of rank {peer} in {epoch}");
    }
}

#[test]
fn threads_write_into_each_others_parts() {
    on_threads(4, |rank, gather| {
        let heap = join(rank, 4, gather);
        assert_eq!((heap.rank(), heap.size(), heap.bytes()), (rank.0, 4, bytes(4)));
        assert_eq!(heap.addresses().len(), 4);
        assert_eq!(heap.own(), heap.address(rank.0));
        assert!(heap.host_view(4).is_none());
        for epoch in 1..40 {
            round(&heap, epoch);
            gather(Vec::new());
        }
    });
}

#[test]
fn processes_write_into_each_others_parts_and_leave_no_files() {
    let Some(rank) = process_rank() else {
        let name = "processes_write_into_each_others_parts_and_leave_no_files";
        let ended = on_processes(name, 3);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        return;
    };
    let mut names = Vec::new();
    let heap = join(rank, 3, &mut |mine| {
        let all = process_gather(mine);
        for text in all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()) {
            names.extend(text.find("weft-").map(|at| text[at..at + 37].to_owned()));
        }
        all
    });
    for epoch in 1..40 {
        round(&heap, epoch);
        process_gather(Vec::new());
    }
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(names.len() == 3 && names.iter().all(|name| !sockets.contains(name)), "{names:?}");
}

/// A dead rank's part, both pages and flags, stays mapped at the peers.
#[test]
fn a_killed_owner_leaves_its_part_to_the_others() {
    let name = "a_killed_owner_leaves_its_part_to_the_others";
    let Some(rank) = process_rank() else {
        let ended = on_processes(name, 3);
        assert_eq!(ended, [Ok(()), Err("killed by 9".into()), Ok(())]);
        return;
    };
    let heap = join(rank, 3, &mut process_gather);
    round(&heap, 1);
    // The second gather is a barrier after the first round.
    let processes = process_gather(std::process::id().to_le_bytes().to_vec());
    if rank == Rank(1) {
        let myself = rustix::process::getpid();
        rustix::process::kill_process(myself, rustix::process::Signal::KILL).unwrap();
    }
    let dead = u32::from_le_bytes(processes[1].as_slice().try_into().unwrap());
    let begin = Instant::now();
    // A zombie has released its memory already.
    while std::fs::read_to_string(format!("/proc/{dead}/stat"))
        .is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
    {
        assert!(begin.elapsed() < PATIENCE, "process {dead} does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let other = 2 - rank.0;
    let orphan = heap.host_view(1).unwrap();
    assert_eq!(orphan.word32(rank.0 as usize * 4).load(Ordering::Acquire), 1);
    orphan.fill(64 + rank.0 as usize * PAGE, PAGE, 7);
    orphan.word32(rank.0 as usize * 4).store(2, Ordering::Release);
    // The survivors still exchange data in it.
    while orphan.word32(other as usize * 4).load(Ordering::Acquire) != 2 {
        assert!(begin.elapsed() < PATIENCE, "rank {other} did not write");
        std::thread::yield_now();
    }
    let mut page = [0; PAGE];
    orphan.read(64 + other as usize * PAGE, &mut page);
    assert_eq!(page, [7; PAGE]);
}

#[test]
fn heaps_are_dropped_in_any_order() {
    for first in 0..3 {
        let mut heaps = Heap::local_group(&[MemoryLocation::Twin; 3], bytes(3)).unwrap();
        std::thread::scope(|scope| {
            for heap in &heaps {
                scope.spawn(|| round(heap, 1));
            }
        });
        drop(heaps.remove(first));
        for heap in &heaps {
            assert_eq!(heap.host_view(first as u32).unwrap().word32(0).load(Ordering::Acquire), 1);
        }
    }
}

#[test]
fn a_local_group_shares_one_part_for_each_rank() {
    let heaps = Heap::local_group(&[MemoryLocation::Twin; 4], 1000).unwrap();
    for heap in &heaps {
        assert_eq!((heap.size(), heap.bytes()), (4, 1000));
        assert_eq!(heap.addresses(), heaps[0].addresses());
        let window = heap.host_view(heap.rank()).unwrap();
        assert_eq!(window.at(0, 1000) as u64, heap.own());
        let mut zeros = [1; 1000];
        window.read(0, &mut zeros);
        assert_eq!(zeros, [0; 1000]);
    }
    assert!(matches!(Heap::local_group(&[], 1), Err(Error::Empty { .. })));
    assert!(matches!(Heap::local_group(&[MemoryLocation::Twin], 0), Err(Error::Empty { .. })));
}

#[test]
fn offers_of_other_heaps_are_rejected_by_name() {
    let refused = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
        let builder = HeapBuilder::allocate(MemoryLocation::Twin, 64).unwrap();
        let peer = HeapBuilder::allocate(MemoryLocation::Twin, 64).unwrap();
        let mut offers = vec![builder.offer(), peer.offer()];
        change(&mut offers);
        builder.connect(0, offers, clock::now().after(Duration::from_millis(200))).unwrap_err()
    };
    let larger = HeapBuilder::allocate(MemoryLocation::Twin, 65).unwrap();
    let error = refused(&|offers| offers[1] = larger.offer()).to_string();
    assert!(error.contains("heap of 65 bytes"), "{error}");
    let error = refused(&|offers| offers[1].truncate(20)).to_string();
    assert!(error.contains("malformed offer of memory from rank 1"), "{error}");
    assert!(matches!(refused(&|offers| offers.swap(0, 1)), Error::WrongOffers { .. }));
    assert!(matches!(refused(&|offers| offers.clear()), Error::WrongOffers { .. }));
    // The peer exists and never connects.
    let begin = Instant::now();
    let error = refused(&|_| ()).to_string();
    assert!(error.contains("rank 1") && error.contains("network namespace"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// A peer whose socket is gone is detected immediately, not at the deadline.
#[test]
fn a_missing_socket_is_reported_as_another_namespace() {
    let builder = HeapBuilder::allocate(MemoryLocation::Twin, 64).unwrap();
    let gone = HeapBuilder::allocate(MemoryLocation::Twin, 64).unwrap().offer();
    let begin = Instant::now();
    let offers = vec![builder.offer(), gone];
    let error = builder.connect(0, offers, soon()).unwrap_err();
    assert!(begin.elapsed() < PATIENCE / 2);
    let error = error.to_string();
    for part in ["rank 1", "network namespace", "container", "memory=\"ipc\""] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Runs each rank in a communicator on a separate thread.
fn on_communicators<T: Send>(
    size: u32,
    adjust: impl Fn(&mut weft_control::Config) + Copy + Send + Sync,
    rank: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    let world = local_world(size, adjust).unwrap();
    std::thread::scope(|scope| {
        let start = |control: Control| {
            let rank = &rank;
            scope.spawn(move || {
                let mut config = weft_control::Config::new(control.rank().0, size);
                adjust(&mut config);
                rank(Communicator::over(control, CommunicatorConfig::new(config)).unwrap())
            })
        };
        let threads: Vec<_> = world.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Each rank writes from its first block into the other's second.
#[test]
fn a_write_by_a_peer_arrives_in_a_block_and_a_segment_is_one_memory() {
    const BYTES: u64 = 4096;
    on_communicators(
        2,
        |_| (),
        |communicator| {
            let (location, list) = (MemoryLocation::Twin, Registrations::default());
            let domain = Domain::create(&communicator, location, list, soon()).unwrap();
            let block = || domain.allocate(&communicator, BYTES, 1, soon()).unwrap();
            let (first, second) = (block(), block());
            assert_eq!(first.segment(), second.segment());
            let memory = first.memory().unwrap();
            assert!(Arc::ptr_eq(&memory, &second.memory().unwrap()));
            assert_eq!(memory.reader(), Reader::All);
            assert_eq!(memory.address() + second.offset(), second.own());

            let cache = RegistrationCache::new(IdleLimits::default());
            let registered = [&first, &second]
                .map(|block| cache.get(&block.memory().unwrap(), |_| Ok(())).unwrap());
            assert_eq!((cache.statistics().misses, cache.statistics().live), (1, 1));
            drop(registered);

            let peer = Rank(1 - communicator.rank().0);
            let region = communicator.engine().register(memory).unwrap();
            let counter = communicator.engine().counter().unwrap();
            let range = second.offset()..second.offset() + BYTES;
            let remotes = communicator.share(&[(&region, range)], &[counter], soon()).unwrap();
            let sent = 70 + communicator.rank().0 as u8;
            let here = first.host_view(communicator.rank().0).unwrap();
            here.fill(first.offset() as usize, BYTES as usize, sent);
            let page = Page {
                source: region.key(),
                source_offset: first.offset(),
                destination: remotes[peer.index()][0].key,
                destination_offset: second.offset(),
                length: BYTES,
            };
            let round = communicator.engine().next_round(counter, peer).unwrap();
            communicator.engine().write(peer, counter, round, &[page]).unwrap();
            let mut never = || false;
            let mut waiter = communicator.wait_options(soon(), &mut never);
            communicator.wait(counter, &[(peer, 1)], &mut waiter).unwrap();
            let mut arrived = [0; BYTES as usize];
            here.read(second.offset() as usize, &mut arrived);
            assert_eq!(arrived, [70 + peer.0 as u8; BYTES as usize]);
            communicator.barrier(&mut waiter).unwrap();

            // The region keeps the segment mapped, also without blocks and the domain.
            drop((first, second, domain));
            let mut kept = [0; 1];
            region.memory().copy_out((page.destination_offset + BYTES - 1) as usize, &mut kept);
            assert_eq!(kept, [70 + peer.0 as u8]);
        },
    );
}

#[test]
fn a_communicator_makes_and_closes_a_heap() {
    on_communicators(
        3,
        |_| (),
        |communicator| {
            for epoch in 1..4 {
                let heap =
                    Heap::create(&communicator, MemoryLocation::Twin, bytes(3), soon()).unwrap();
                assert_eq!(heap.rank(), communicator.rank().0);
                round(&heap, epoch);
                heap.close(&communicator, soon()).unwrap();
            }
        },
    );
}

#[test]
fn one_rank_that_fails_fails_all_with_its_reason() {
    let begin = Instant::now();
    let errors = on_communicators(
        3,
        |_| (),
        |communicator| {
            // Exceeds the address space.
            let bytes = if communicator.rank().0 == 1 { 1 << 62 } else { 64 };
            Heap::create(&communicator, MemoryLocation::Twin, bytes, soon())
                .unwrap_err()
                .to_string()
        },
    );
    assert!(begin.elapsed() < PATIENCE / 2);
    assert!(errors[1].contains("4611686018427387904 bytes"), "{errors:?}");
    for other in [0, 2] {
        let expected = format!("rank 1 failed to make its part of the heap: {}", errors[1]);
        assert_eq!(errors[other], expected);
    }
}

/// Rank 1 allocates its part, and is lost while the others wait for the descriptor.
#[test]
fn a_rank_that_is_lost_while_the_others_wait_for_its_part_is_named_at_once() {
    for listens in [true, false] {
        let errors = on_communicators(
            3,
            |_| (),
            |communicator| {
                if communicator.rank().0 != 1 {
                    let begin = Instant::now();
                    let error =
                        Heap::create(&communicator, MemoryLocation::Twin, 64, soon()).unwrap_err();
                    return (Some(error), begin.elapsed());
                }
                let builder = HeapBuilder::allocate(MemoryLocation::Twin, 64).unwrap();
                let control = communicator.control();
                for said in [Vec::new(), builder.offer(), Vec::new()] {
                    control.all_gather_as(Operation::Heap, &said, PATIENCE).unwrap();
                }
                let _listening = listens.then_some(builder);
                std::thread::sleep(Duration::from_millis(300));
                control.mesh().unwrap().abandon();
                // A departure after that is not announced.
                while control.check().is_ok() {
                    std::thread::yield_now();
                }
                (None, Duration::ZERO)
            },
        );
        for (error, within) in [&errors[0], &errors[2]] {
            let lost = |cause: &Poison| cause.kind == Cause::Lost && cause.rank == Some(Rank(1));
            let error = error.as_ref().unwrap();
            let Error::Fabric(FabricError::Control(ControlError::Poisoned(cause))) = error else {
                panic!("{error:?}")
            };
            assert!(lost(cause), "{cause:?}");
            assert!(*within < PATIENCE / 4, "{within:?}");
        }
    }
}

#[test]
fn ranks_of_two_hosts_are_rejected_before_any_exchange() {
    let begin = Instant::now();
    let two_hosts = |config: &mut weft_control::Config| {
        config.host_id = format!("host {}", config.rank.0 / 2);
    };
    let errors = on_communicators(3, two_hosts, |communicator| {
        Heap::create(&communicator, MemoryLocation::Twin, 64, soon()).unwrap_err().to_string()
    });
    assert!(begin.elapsed() < PATIENCE / 2);
    assert!(errors[0].starts_with("rank 2 is on another host"), "{errors:?}");
    assert!(errors[0].contains("host 1") && errors[0].contains("host 0"), "{errors:?}");
    assert!(errors[2].starts_with("rank 0 is on another host"), "{errors:?}");
}

#[test]
fn a_heap_on_a_gpu_without_cuda_names_the_missing_library() {
    match weft_cuda::driver() {
        Err(error) => assert!(error.to_string().contains("libcuda"), "{error}"),
        Ok(driver) => {
            let Ok(device) = driver.device(0) else {
                eprintln!("not tested: a GPU's heap, as there is no GPU");
                return;
            };
            for memory in [weft_gpu::MemoryKind::Fd, weft_gpu::MemoryKind::Ipc] {
                let place = MemoryLocation::Cuda { device, memory };
                match Heap::local_group(&[place, place], 1 << 20) {
                    Ok(heaps) => assert_eq!(heaps[0].addresses(), heaps[1].addresses()),
                    Err(error) => assert!(!device.can_share_fds(), "{error}"),
                }
            }
            let place = MemoryLocation::Cuda { device, memory: weft_gpu::MemoryKind::Twin };
            assert!(matches!(HeapBuilder::allocate(place, 64), Err(Error::TwinOnDevice { .. })));
        }
    }
}
