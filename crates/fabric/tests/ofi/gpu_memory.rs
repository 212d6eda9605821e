//! Simulated GPUs over libfabric: memory there is a source, and a destination that is flushed.
//!
//! Libfabric registers it as host memory and writes to it at once. The order of flushes and lanes is tested in
//! `link/tests.rs`, with a NIC that withholds payload.

use crate::common::{Member, PATIENCE, on_threads, put, take, waiting};
use crate::{any_host, config, providers};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_fabric::providers::OfiDevice;
use weft_fabric::providers::ofi::{Flush, Gpus, TwinGpuControls, TwinGpus};
use weft_fabric::{
    Device, DmaBuf, Error, Memory, Page, ProviderKind, Rank, Reader, Region, RemoteRegion,
};

const BYTES: usize = 100_000;

/// GPUs that record each flush.
struct Watched {
    gpus: TwinGpus,
    flushed: Arc<Mutex<Vec<u32>>>,
}

impl Gpus for Watched {
    fn allocate(&self, device: u32, length: usize) -> Option<Result<Memory, String>> {
        Gpus::allocate(&self.gpus, device, length)
    }

    fn export(&self, memory: &Memory) -> Result<DmaBuf, String> {
        self.gpus.export(memory)
    }

    fn has_peer_memory(&self) -> bool {
        self.gpus.has_peer_memory()
    }

    fn flush_of(&self, device: u32, reader: Reader) -> Result<Option<Flush>, String> {
        let (flushed, flush) = (self.flushed.clone(), self.gpus.flush_of(device, reader)?);
        Ok(flush.map(|flush| -> Flush {
            Box::new(move || {
                flushed.lock().unwrap().push(device);
                flush()
            })
        }))
    }

    fn are_simulated(&self) -> bool {
        true
    }
}

/// A rank whose source and inbox lie in GPUs.
struct Rig {
    member: Member,
    controls: Arc<TwinGpuControls>,
    flushed: Arc<Mutex<Vec<u32>>>,
    source: Region,
    inbox: Region,
    peer: Rank,
}

fn rig(rank: Rank, gather: &mut crate::common::AllGather<'_>) -> Rig {
    let (controls, flushed) = (Arc::<TwinGpuControls>::default(), Arc::default());
    let gpus = TwinGpus::new(&controls);
    let watched = Watched { gpus: gpus.clone(), flushed: Arc::clone(&flushed) };
    let device = OfiDevice::with_gpus(config(any_host()), Arc::new(watched)).unwrap();
    let devices: [Arc<dyn Device>; 1] = [Arc::new(device)];
    let mut member = Member::join(rank, 2, &devices, gather);
    let source = member.engine.register(gpus.allocate(0, BYTES).unwrap()).unwrap();
    let inbox = member.engine.alloc_device(1, BYTES).unwrap();
    Rig { member, controls, flushed, source, inbox, peer: Rank(1 - rank.0) }
}

impl Rig {
    /// Writes the source to the peer's inbox.
    fn write(&mut self, remote: &RemoteRegion, round: u64) -> weft_fabric::Result<()> {
        let page = Page {
            source: self.source.key(),
            source_offset: 0,
            destination: remote.key,
            destination_offset: 0,
            length: BYTES as u64,
        };
        let Member { engine, counter, .. } = &mut self.member;
        waiting(PATIENCE, Duration::ZERO, |waiter| {
            engine.wait_for_credit(*counter, self.peer, round, waiter)?;
            let request = engine.write(self.peer, *counter, round, &[page])?;
            engine.wait_for_request(request, waiter)
        })
    }

    /// Waits for the peer's write.
    fn wait(&mut self) -> weft_fabric::Result<()> {
        let raises = self.member.raises(self.peer, [BYTES]);
        let Member { engine, counter, .. } = &mut self.member;
        waiting(PATIENCE, Duration::ZERO, |waiter| {
            engine.wait(*counter, &[(self.peer, raises)], waiter)
        })
    }
}

#[test]
fn payload_in_a_gpu_is_flushed_before_a_wait_returns() {
    if providers().is_empty() {
        return;
    }
    on_threads(2, |rank, gather| {
        let mut rig = rig(rank, gather);
        let inbox = rig.inbox.clone();
        let remote = rig.member.exchange_regions(rig.peer, &inbox, gather);
        for round in 0..20 {
            let [mine, theirs] = [rank, rig.peer].map(|it| 1 + round as u8 + 100 * it.0 as u8);
            put(&rig.source, 0, &[mine; BYTES]);
            rig.write(&remote, round).unwrap();
            rig.wait().unwrap();
            assert!(take(&rig.inbox, 0, BYTES).iter().all(|byte| *byte == theirs));
            // Peers write into GPU 1 only, and each round ends with a lane.
            let flushed = rig.flushed.lock().unwrap().clone();
            assert!(flushed.len() > round as usize, "{} flushes in round {round}", flushed.len());
            assert!(flushed.iter().all(|gpu| *gpu == 1));
            let (peer, counter) = (rig.peer, rig.member.counter);
            rig.member.engine.credit(peer, counter).unwrap();
        }
        gather(Vec::new());
    });
}

#[test]
fn a_destination_in_a_gpu_that_cannot_be_flushed_is_refused_and_a_source_is_not() {
    if providers().is_empty() {
        return;
    }
    on_threads(2, |rank, gather| {
        let mut rig = rig(rank, gather);
        rig.controls.cannot_flush.store(true, SeqCst);
        let inbox = rig.inbox.clone();
        let refused = rig.member.engine.grant(rig.peer, &[(&inbox, 0..BYTES as u64)], &[]);
        let Err(Error::Unusable { provider: ProviderKind::Ofi, detail, .. }) = refused else {
            panic!("it is granted")
        };
        assert!(detail.starts_with("writes of NICs into GPU 1: "), "{detail}");
        gather(Vec::new());
    });
}

#[test]
fn a_failed_flush_ends_the_group_with_the_reason() {
    if providers().is_empty() {
        return;
    }
    on_threads(2, |rank, gather| {
        let mut rig = rig(rank, gather);
        let inbox = rig.inbox.clone();
        let remote = rig.member.exchange_regions(rig.peer, &inbox, gather);
        if rank == Rank(0) {
            // The peer may close the connection before the write completes here.
            drop(rig.write(&remote, 0));
            gather(Vec::new());
            return;
        }
        rig.controls.fails_flushes.store(true, SeqCst);
        let error = rig.wait().unwrap_err();
        let Error::Poisoned(poison) = error else { panic!("{error}") };
        let expected = "writes into GPU 1 were not flushed: the test fails flushes";
        assert!(poison.detail.contains(expected), "{}", poison.detail);
        gather(Vec::new());
    });
}
