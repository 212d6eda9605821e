//! A rank that writes random bytes, headers, raises and credits: the other one reports a violation or waits.

use std::collections::BTreeSet;
use std::sync::Mutex;
use weft_collectives::RunError;
use weft_collectives::messages::header::Header;
use weft_collectives::messages::{Driver, MessagesConfig};
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    Cause, CounterConfig, CounterId, Driver as _, Error, Event, Grant, Page, Rank, Region,
    RegionKey, Requests, Time,
};
use weft_scenarios::seeds;

const VICTIM: Rank = Rank(0);
const CONFIG: MessagesConfig =
    MessagesConfig { slots: 3, slot_bytes: 96, max_unexpected_bytes: 1000 };
/// Bytes from one slot to the next.
const STRIDE: u64 = 128;
const ROUNDS: u64 = 40;

/// The hostile rank.
struct Hostile {
    random: SplitMix64,
    counter: CounterId,
    source: Region,
    region: RegionKey,
    round: u64,
    credits: u64,
    sequence: u64,
}

impl Hostile {
    fn connect(cluster: &mut Cluster, driver: &mut Driver, seed: u64) -> Hostile {
        let engine = cluster.engine(Rank(1));
        let bytes = 2 * u64::from(CONFIG.slots) * STRIDE;
        let source = engine.alloc(bytes as usize).unwrap();
        let shape = CounterConfig { window: CONFIG.slots, ..CounterConfig::default() };
        let counter = engine.counter_with(shape).unwrap();
        let mine = engine.grant(VICTIM, &[(&source, 0..bytes)], &[counter]).unwrap();
        let theirs: Grant = driver.grant(cluster.engine(VICTIM), Rank(1)).unwrap();
        driver.link(cluster.engine(VICTIM), Rank(1), &mine, Time::MAX).unwrap();
        let remotes = cluster.engine(Rank(1)).import(VICTIM, &theirs, &[counter], Time::MAX);
        let (region, random) = (remotes.unwrap()[0].key, SplitMix64::new(seed));
        Hostile { random, counter, source, region, round: 0, credits: 0, sequence: 0 }
    }

    /// Random bytes, or a header that is valid except for the length.
    fn fill(&mut self, bytes: &mut [u8]) {
        self.random.fill(bytes);
        if self.random.chance(0.8) {
            let length =
                [3, 100, 2000, u64::MAX >> self.random.below(64)][self.random.below(4) as usize];
            let header = Header { sequence: self.sequence, tag: self.random.below(4), length };
            self.sequence += u64::from(length < 64);
            bytes[..32].copy_from_slice(&header.encode());
            bytes[31] = u8::from(self.random.chance(0.02));
        }
    }

    /// Writes slots while the victim's credits allow.
    fn step(&mut self, events: &[Event], requests: &mut Requests) {
        for event in events {
            if let Event::Credited { credits, .. } = event {
                self.credits = *credits;
            }
        }
        while self.round < ROUNDS && self.round < self.credits + u64::from(CONFIG.slots) {
            self.write_slot(requests);
        }
    }

    fn write_slot(&mut self, requests: &mut Requests) {
        let mut bytes = [0; 96];
        self.fill(&mut bytes);
        let slot = self.round % u64::from(CONFIG.slots);
        let offset = slot * STRIDE;
        self.source.memory().copy_in(offset as usize, &bytes);
        let page = Page {
            source: self.source.key(),
            source_offset: offset,
            destination: self.region,
            destination_offset: u64::from(CONFIG.slots) * STRIDE + offset,
            length: bytes.len() as u64,
        };
        let pages = (!self.random.chance(0.1)).then_some(page);
        requests.write(VICTIM, self.counter, self.round, pages, 0);
        if self.random.chance(0.02) {
            requests.write(VICTIM, self.counter, self.round, [], 0);
        }
        if self.random.chance(0.02) {
            requests.credit(VICTIM, self.counter);
        }
        self.round += 1;
    }
}

/// The rank that is attacked: it starts receives and sends at random.
struct Victim {
    random: SplitMix64,
    driver: Driver,
    memory: Vec<Vec<u8>>,
}

impl Victim {
    fn step(
        &mut self,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<(), RunError> {
        self.driver.poll(now, events, requests)?;
        if events.is_empty() || self.memory.len() > 60 {
            return Ok(());
        }
        let (tag, room) = (self.random.below(4), self.random.below(300));
        let mut memory = vec![0; room as usize];
        let address = memory.as_mut_ptr();
        let from = self.random.chance(0.5).then_some(Rank(1));
        self.memory.push(memory);
        // SAFETY: the memory is kept until the driver is dropped.
        unsafe { self.driver.receive(from, tag, address, room, requests) }?;
        if self.random.chance(0.2) {
            // SAFETY: as above.
            unsafe { self.driver.send(Rank(1), tag, address, room, requests) }?;
        }
        Ok(())
    }
}

/// Field in the violation that the victim reports, if it reports one.
fn attack(seed: u64) -> Result<Option<&'static str>, String> {
    let config = WorldConfig::new(2, seed).with_faults(Faults::rough());
    let mut cluster = Cluster::new(&World::new(config)).map_err(|error| error.to_string())?;
    let mut driver =
        Driver::allocate(cluster.engine(VICTIM), &CONFIG).map_err(|e| e.to_string())?;
    let mut hostile = Hostile::connect(&mut cluster, &mut driver, seed);
    let mut victim = Victim { random: SplitMix64::new(!seed), driver, memory: Vec::new() };
    let outcomes = cluster.run(|engine, now, events, requests| {
        if engine.rank() == VICTIM {
            victim.step(now, events, requests)?;
        } else {
            hostile.step(events, requests);
        }
        Ok::<_, RunError>(false)
    });
    // Without a violation both wait in the end.
    let Ok(outcomes) = outcomes else { return Ok(None) };
    match &outcomes[0] {
        Outcome::Failed(RunError::Violation { peer: Rank(1), what, .. }) => Ok(Some(what)),
        // A second write in a round that was credited meanwhile fails at the attacker itself.
        Outcome::Failed(RunError::Fabric(Error::Poisoned(poison)))
            if poison.kind == Cause::User =>
        {
            Ok(None)
        }
        other => Err(format!("the victim ended in {other:?}")),
    }
}

#[test]
fn random_bytes_and_raises_are_violations_or_messages() {
    let found = Mutex::new(BTreeSet::new());
    seeds::each("random_bytes", 1000, |seed| {
        found.lock().unwrap().extend(attack(seed)?);
        Ok(())
    });
    let chosen = ["WEFT_SEED", "WEFT_SEEDS"].iter().any(|name| std::env::var_os(name).is_some());
    if !cfg!(miri) && !chosen {
        // Each field is violated by some seed.
        assert_eq!(found.into_inner().unwrap().len(), 5);
    }
}
