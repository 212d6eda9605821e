//! Fixed work for callgrind: user-space instructions per query at the front end, and at the accelerator node.
//! `benchmarks/instructions.py` runs this and compares.
//!
//! One thread drives both ends over a shared memory pair, so no counted code waits. Drivers and engines are counted;
//! service queues and turns are not.

use super::ANSWER;
use super::service::{Answers, deadline, pair_config_over, schema};
use crate::{Outcome, Path};
use std::sync::Arc;
use weft_dispatch::{
    Accelerator, AcceleratorConfig, Connection, FrontEnd, Hello, Input, LedgerConfig, NodeId,
    Report, Role,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Communicator, Memory, Requests, Time};

/// Bytes per query.
const BYTES: usize = 64;
const SLOTS: u32 = 64;
/// Queries per round, all in flight at a time.
const BATCH: u64 = 32;
/// Counted rounds, and rounds before.
const ROUNDS: u64 = 8;
const WARM: u64 = 4;

/// Runs the queries; returns how many are counted.
pub fn run() -> Outcome<usize> {
    let listener = Listener::bind(pair_config_over(Path::Shm, SLOTS, "127.0.0.1:0"))?;
    let address = listener.address().to_string();
    let other = std::thread::spawn(move || {
        join(Role::Accelerator, || {
            connect(&pair_config_over(Path::Shm, SLOTS, &address), deadline())
        })
    });
    let front_end = join(Role::FrontEnd, || listener.accept(deadline(), &mut || false))?;
    let accelerator = other.join().map_err(|_| "the accelerator's end panicked")??;
    let memory = Arc::new(Memory::shared(BYTES)?);
    let key = front_end.0.engine().register(memory.clone())?.key();
    let config = LedgerConfig { queries: SLOTS, nodes: 1, slots: SLOTS, ..LedgerConfig::default() };
    let mut queries = FrontEnd::new(config, schema(BYTES), &[memory])?;
    let node = queries.join(front_end.1, &[key])?;
    let mut accelerators = Accelerator::new(AcceleratorConfig::default(), schema(BYTES), Answers)?;
    let index = accelerators.join(accelerator.1)?;
    let mut front = FrontEndSide { pair: front_end.0, queries, node, requests: requests() };
    let mut back =
        AcceleratorSide { pair: accelerator.0, accelerators, index, requests: requests() };
    for _ in 0..WARM {
        front.send()?;
        back.answer()?;
        front.receive()?;
    }
    for _ in 0..ROUNDS {
        front_end_queries(&mut front, FrontEndSide::send)?;
        accelerator_queries(&mut back)?;
        front_end_queries(&mut front, FrontEndSide::receive)?;
    }
    Ok((ROUNDS * BATCH) as usize)
}

fn join(
    role: Role,
    pair: impl FnOnce() -> weft_fabric::Result<Communicator>,
) -> Result<(Communicator, Connection), String> {
    let pair = pair().map_err(|error| error.to_string())?;
    let name = format!("{role:?}");
    let hello = Hello { role, slots: SLOTS, checksum: false, name, schema: Some(schema(BYTES)) };
    let connection = Connection::over(&pair, &hello, deadline());
    Ok((pair, connection.map_err(|error| error.to_string())?))
}

fn requests() -> Requests {
    Requests::with_capacity(2 * BATCH as usize, 4 * BATCH as usize)
}

struct FrontEndSide {
    pair: Communicator,
    queries: FrontEnd,
    node: NodeId,
    requests: Requests,
}

impl FrontEndSide {
    fn send(&mut self) -> Outcome<()> {
        for token in 0..BATCH {
            let input = Input { memory: 0, offset: 0, length: BYTES as u64 };
            self.queries.submit(token, &[input], Time::MAX)?;
        }
        self.queries.poll(Time(0), self.node, &[], &mut self.requests)?;
        self.pair.engine().submit(&mut self.requests)?;
        Ok(())
    }

    fn receive(&mut self) -> Outcome<()> {
        let mut events = Vec::with_capacity(BATCH as usize);
        self.pair.engine().poll(Time(0), &mut events);
        self.queries.poll(Time(0), self.node, &events, &mut self.requests)?;
        let mut answered = 0;
        while let Some(report) = self.queries.next_report() {
            let Report::Answered { answer, .. } = report else { continue };
            answered += u64::from(answer.tensors().all(|tensor| tensor.len() == ANSWER));
        }
        if answered == BATCH { Ok(()) } else { Err("queries without an answer".into()) }
    }
}

struct AcceleratorSide {
    pair: Communicator,
    accelerators: Accelerator<Answers>,
    index: usize,
    requests: Requests,
}

impl AcceleratorSide {
    fn answer(&mut self) -> Outcome<()> {
        let mut events = Vec::with_capacity(BATCH as usize);
        self.pair.engine().poll(Time(0), &mut events);
        self.accelerators.poll(Time(0), self.index, &events, &mut self.requests)?;
        self.pair.engine().submit(&mut self.requests)?;
        Ok(())
    }
}

/// Code counted for a front end; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
fn front_end_queries(
    side: &mut FrontEndSide,
    step: fn(&mut FrontEndSide) -> Outcome<()>,
) -> Outcome<()> {
    step(side)
}

/// Code counted for an accelerator node; `benchmarks/instructions.py` refers to its name.
#[inline(never)]
fn accelerator_queries(side: &mut AcceleratorSide) -> Outcome<()> {
    side.answer()
}
