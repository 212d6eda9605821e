//! Connection setup in three steps: addresses, introductions, connections.
#![allow(dead_code)] // Each test uses only some items.

use super::AllGather;
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::bytes::{Reader, put_block};
use weft_fabric::link::{Introduction, Membership};
use weft_fabric::{
    Device, Engine, EngineAddress, Generation, LaneTable, Link, Rank, Result, Time, WaitLimit,
    clock,
};

/// Time `seconds` from now.
pub fn soon(seconds: u64) -> Time {
    clock::now().after(Duration::from_secs(seconds))
}

/// Runs a wait that ends only at the deadline.
pub fn until<T>(deadline: Time, wait: impl FnOnce(&mut WaitLimit<'_>) -> T) -> T {
    wait(&mut WaitLimit { deadline, give_up: &mut || Ok(()) })
}

/// Connects an engine with all ranks' engines in `gather`.
pub fn connect(engine: &mut Engine, gather: &mut AllGather<'_>, deadline: Time) -> Result<()> {
    let decode = |bytes: &Vec<u8>| EngineAddress::decode(bytes).unwrap();
    let addresses: Vec<EngineAddress> =
        gather(engine.address().encode()).iter().map(decode).collect();
    let mut introductions = Vec::new();
    for message in engine.introduce(&addresses)? {
        put_block(&mut introductions, &message);
    }
    let me = engine.rank().0;
    let mine = |bytes: &Vec<u8>| {
        let mut reader = Reader::new(bytes);
        for _ in 0..me {
            reader.block().unwrap();
        }
        reader.block().unwrap().to_vec()
    };
    let messages: Vec<Vec<u8>> = gather(introductions).iter().map(mine).collect();
    until(deadline, |limit| engine.connect(&addresses, &messages, limit))
}

/// Addresses and introductions for a whole group within one process.
#[derive(Clone)]
pub struct Introduced {
    pub addresses: Vec<EngineAddress>,
    /// By source rank, then by destination rank.
    pub messages: Vec<Vec<Vec<u8>>>,
}

impl Introduced {
    /// Runs the first two steps for every engine in a group, in rank order.
    pub fn of(engines: &mut [Engine]) -> Introduced {
        let addresses: Vec<EngineAddress> = engines.iter().map(|engine| engine.address()).collect();
        let messages =
            engines.iter_mut().map(|engine| engine.introduce(&addresses).unwrap()).collect();
        Introduced { addresses, messages }
    }

    /// Runs one engine's last step.
    pub fn connect(&self, engine: &mut Engine, deadline: Time) -> Result<()> {
        let me = engine.rank().0 as usize;
        let messages: Vec<Vec<u8>> = self.messages.iter().map(|from| from[me].clone()).collect();
        until(deadline, |limit| engine.connect(&self.addresses, &messages, limit))
    }
}

/// Connects every engine in a group, each on a separate thread.
pub fn connect_all(engines: &mut [Engine]) {
    let introduced = &Introduced::of(engines);
    std::thread::scope(|scope| {
        for engine in engines {
            scope.spawn(|| introduced.connect(engine, soon(20)).unwrap());
        }
    });
}

/// Link in a two-rank group without an engine, and a lane table.
pub fn bare_link(device: &dyn Device, rank: Rank, lanes: usize) -> (Box<dyn Link>, Arc<LaneTable>) {
    let generation = Generation(0);
    let lanes = Arc::new(LaneTable::new(lanes, generation).unwrap());
    let group = Membership { rank, size: 2, generation, lanes: lanes.clone() };
    (device.open(group).unwrap(), lanes)
}

/// Connects a shm or copy link, whose introductions are empty, with the only peer.
pub fn connect_bare(link: &mut dyn Link, peer: Rank, address: &[u8], deadline: Time) -> Result<()> {
    let peers = [Introduction { peer, address, message: &[] }];
    until(deadline, |limit| link.connect(&peers, limit))
}
