//! Memory that can be a region, by peer.

use crate::common::{
    AllGather, Member, MemberDevices, PATIENCE, bare_link, on_threads, put, take, until, waiting,
};
use crate::ends::{Pair, copy, join};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::copy::{CopyBackend, CopyConfig, Twin};
use weft_fabric::providers::{CopyDevice, ShmConfig, ShmDevice, TcpConfig, TcpDevice};
use weft_fabric::{
    Device, EngineConfig, Error, Generation, Grant, Link, Memory, MemoryKind, Page, ProviderKind,
    Rank, RegionKey, clock,
};

#[test]
fn memory_of_a_device_needs_the_copy_provider() {
    let shm = ShmDevice::new(ShmConfig { host_id: "this".into() });
    let engine = |device: Arc<dyn Device>| {
        let config = EngineConfig::default();
        weft_fabric::Engine::new(config, Rank(0), 1, Generation(0), &[device]).unwrap()
    };
    let error = engine(Arc::new(shm)).alloc_device(0, 10).unwrap_err();
    assert!(matches!(error, Error::NoDevices { device: 0 }), "{error}");
    assert!(error.to_string().contains("WEFT_PROVIDERS"), "{error}");
    let mut engine = engine(Arc::new(copy(0)));
    let error = engine.alloc_device(8, 10).unwrap_err();
    assert!(error.to_string().contains("device 8"), "{error}");
    let region = engine.alloc_device(7, 10).unwrap();
    assert_eq!((region.memory().kind(), region.memory().len()), (MemoryKind::Device(7), 10));
    assert_eq!(take(&region, 0, 10), [0; 10]);
}

/// Toward a peer over sockets, device memory is rejected before any write, and other requests continue.
#[test]
fn memory_of_a_device_does_not_travel_over_tcp() {
    let join = |rank: Rank, gather: &mut AllGather<'_>| {
        let here = format!("host {}", rank.0);
        let devices: [Arc<dyn Device>; 2] = [
            Arc::new(CopyDevice::over(|| Ok(Box::new(Twin::new(0))), &here)),
            Arc::new(TcpDevice::new(TcpConfig::default()).unwrap()),
        ];
        Member::join(rank, 2, &devices, gather)
    };
    on_threads(2, |rank, gather| {
        let mut member = join(rank, gather);
        let (peer, counter) = (Rank(1 - rank.0), member.counter);
        assert_eq!(member.engine.route(peer).unwrap().provider, ProviderKind::Tcp);
        let region = member.engine.alloc_device(0, 8).unwrap();
        let error = member.engine.grant(peer, &[(&region, 0..8)], &[]).unwrap_err();
        assert!(matches!(error, Error::Unusable { provider: ProviderKind::Tcp, .. }), "{error}");
        let page = Page {
            source: region.key(),
            source_offset: 0,
            destination: member.remotes[&peer].key,
            destination_offset: 0,
            length: 8,
        };
        let error = member.engine.write(peer, counter, 0, &[page]).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("host memory only; copy it to host memory first; or use copy"),
            "{error}"
        );
        for round in 0..5 {
            member.round(1, round).unwrap();
        }
        gather(Vec::new());
    });
}

#[test]
fn a_key_may_be_of_host_memory_now_and_of_a_device_then() {
    on_threads(2, |rank, gather| {
        let mut member = join(MemberDevices::default(), rank, 2, gather);
        let peer = Rank(1 - rank.0);
        let mut keys = Vec::new();
        for turn in 0..4u8 {
            let engine = &mut member.engine;
            let place = (turn % 2 == 0).then_some(turn.into());
            let region = crate::common::region(engine, place, 8);
            keys.push(region.key());
            let said = gather(engine.grant(peer, &[(&region, 0..8)], &[]).unwrap().encode());
            let theirs = Grant::decode(&said[peer.0 as usize]).unwrap();
            let deadline = clock::now().after(PATIENCE);
            let remote = engine.import(peer, &theirs, &[], deadline).unwrap()[0];
            // Again: it is known.
            engine.import(peer, &theirs, &[], deadline).unwrap();
            put(&member.source, 0, &[turn + 1; 8]);
            let page = Page {
                source: member.source.key(),
                source_offset: 0,
                destination: remote.key,
                destination_offset: 0,
                length: 8,
            };
            let counter = member.counter;
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                engine.wait_for_credit(counter, peer, turn.into(), waiter).unwrap();
                let request = engine.write(peer, counter, turn.into(), &[page]).unwrap();
                engine.wait(counter, &[(peer, 1)], waiter).unwrap();
                assert_eq!(take(&region, 0, 8), [turn + 1; 8]);
                engine.wait_for_request(request, waiter).unwrap();
                engine.credit(peer, counter).unwrap();
            });
            engine.release(&region);
        }
        assert!(keys.iter().all(|key| *key == keys[0]));
        gather(Vec::new());
    });
}

#[test]
fn entries_that_are_none_are_refused() {
    let mut pair = Pair::of(copy(1), copy(2));
    let import = |pair: &mut Pair, key, length, entry: &[u8], deadline| {
        let writer = &mut pair.writer;
        until(deadline, |limit| writer.import(Rank(1), RegionKey(key), length, entry, limit))
    };
    let deadline = clock::now().after(PATIENCE);
    let entry = pair.owner.grant(RegionKey(0), Rank(0), 0..10).unwrap();
    assert_eq!(entry.len(), 24);
    for length in [0, 1, 7, 9, 23] {
        let error = import(&mut pair, 5, 10, &entry[..length], deadline);
        assert!(matches!(error, Err(Error::Malformed { .. })), "{error:?}");
    }
    // A descriptor that never arrives.
    let error = import(&mut pair, 5, 10, &entry, clock::now());
    assert!(matches!(error, Err(Error::Connect { provider: ProviderKind::Copy, .. })), "{error:?}");
    // A descriptor for less memory than announced.
    let memory = pair.owner.allocate(0, 10).unwrap().unwrap();
    pair.owner.register(RegionKey(2), &memory.into()).unwrap();
    let entry = pair.owner.grant(RegionKey(2), Rank(0), 0..10).unwrap();
    let error = import(&mut pair, 2, 1 << 20, &entry, deadline).unwrap_err();
    assert!(error.to_string().contains("cannot be mapped"), "{error}");
}

#[test]
fn lent_memory_of_a_device_is_a_source_and_no_destination() {
    on_threads(2, |rank, gather| {
        let mut member = join(MemberDevices { source: None, inbox: Some(0) }, rank, 2, gather);
        let bytes = Box::leak(Box::new([3u8; 100]));
        let address = std::ptr::NonNull::from(bytes).cast();
        // SAFETY: the bytes are never freed.
        let memory =
            unsafe { Memory::user_buffer(address, 100, MemoryKind::Device(1), Box::new(())) };
        let region = member.engine.register(memory).unwrap();
        let peer = Rank(1 - rank.0);
        let error = member.engine.grant(peer, &[(&region, 0..3)], &[]).unwrap_err();
        assert!(error.to_string().contains("alloc"), "{error}");
        let page = Page {
            source: region.key(),
            source_offset: 0,
            destination: member.remotes[&peer].key,
            destination_offset: 50,
            length: 100,
        };
        let counter = member.counter;
        waiting(PATIENCE, Duration::ZERO, |waiter| {
            let request = member.engine.write(peer, counter, 0, &[page]).unwrap();
            member.engine.wait_for_request(request, waiter).unwrap();
            member.engine.wait(counter, &[(peer, 1)], waiter).unwrap();
        });
        assert_eq!(take(&member.inbox, 50, 100), [3; 100]);
        gather(Vec::new());
    });
}

#[test]
fn only_ranks_of_one_host_with_the_same_devices_reach_each_other() {
    let twin = |host: &str| {
        let devices = CopyBackend::Twin { seed: 0 };
        let device = CopyDevice::new(CopyConfig { host_id: host.into(), devices }).unwrap();
        bare_link(&device, Rank(0), 4).0
    };
    let shm = bare_link(&ShmDevice::new(ShmConfig { host_id: "a".into() }), Rank(0), 4).0;
    let reaches = |link: &dyn Link, address: &[u8]| link.route(address).is_some();
    assert!(reaches(&*twin("a"), &twin("a").address()));
    assert!(!reaches(&*twin("a"), &twin("b").address()));
    assert!(!reaches(&*twin("a"), &shm.address()) && !reaches(&*shm, &twin("a").address()));
}
