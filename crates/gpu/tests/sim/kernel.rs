//! Rank program: a kernel that pushes random commands and checks what arrives, and the proxy that serves it.

use crate::model::{Model, Round};
use crate::scenario::{MAX_PUT, Scenario};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use weft_fabric::providers::sim::{Cluster, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterConfig, CounterId, Driver as _, Engine, Event, Poison, Rank, Region, RemoteRegion,
    Requests, Time,
};
use weft_gpu::Error;
use weft_gpu::proxy::{
    Command, CommandFields, MappedRing, Place, ProxyConfig, ProxyDriver, QUARTERS, RingReader,
    RingWriter, SLOT_WORDS, Target, Template, TemplateMember, Window, WordConfig, Words,
};
use weft_scenarios::{Failure, sleeps};

/// Failure in a rank's program.
#[derive(Debug)]
pub enum Wrong {
    Proxy(Error),
    #[expect(dead_code, reason = "shown by Debug")]
    Outcome(String),
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Wrong {
        Wrong::Proxy(error)
    }
}

impl From<weft_fabric::Error> for Wrong {
    fn from(error: weft_fabric::Error) -> Wrong {
        Wrong::Proxy(error.into())
    }
}

impl Failure for Wrong {
    fn poison(&self) -> Option<&Poison> {
        match self {
            Wrong::Proxy(Error::Fabric(weft_fabric::Error::Poisoned(poison))) => Some(poison),
            _ => None,
        }
    }
}

fn ensure(right: bool, wrong: impl FnOnce() -> String) -> Result<(), Wrong> {
    if right { Ok(()) } else { Err(Wrong::Outcome(wrong())) }
}

/// Memory that kernel and proxy share.
pub struct Memory {
    slots: Vec<[AtomicU32; SLOT_WORDS]>,
    released: AtomicU64,
    list: Vec<AtomicU32>,
    words: Vec<AtomicU32>,
}

impl Memory {
    pub fn new(scenario: &Scenario) -> Memory {
        let words = scenario.ranks as usize * scenario.holds.len();
        Memory {
            slots: (0..scenario.slots).map(|_| Default::default()).collect(),
            released: AtomicU64::new(0),
            list: (0..scenario.ranks + 3).map(|_| AtomicU32::new(u32::MAX)).collect(),
            words: (0..words).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    fn ring(&self) -> MappedRing<'_> {
        MappedRing { slots: &self.slots, released: &self.released }
    }
}

/// Command of which some quarters are not stored yet.
struct Push {
    ticket: u64,
    fields: CommandFields,
    left: Vec<usize>,
}

/// Source chunks that are free once the own word has a value.
struct Draining {
    word: u32,
    value: u32,
    chunks: Vec<u32>,
}

pub struct Program<'a> {
    rank: Rank,
    random: SplitMix64,
    scenario: &'a Scenario,
    model: &'a RefCell<Model>,
    driver: ProxyDriver,
    counters: Vec<CounterId>,
    reader: RingReader<MappedRing<'a>>,
    writer: RingWriter<MappedRing<'a>>,
    memory: &'a Memory,
    source: Region,
    inbox: Region,
    // The kernel.
    next_ticket: u64,
    pushes: Vec<Push>,
    to_push: u32,
    free_chunks: Vec<u32>,
    used_chunks: Vec<u32>,
    draining: VecDeque<Draining>,
    /// By word: the value, and the DRAINED commands so far.
    drained: Vec<u32>,
    asked: Vec<u32>,
    /// First ticket at which the list is free again.
    list_until: u64,
    asleep_until: Time,
}

/// A chunk and a cell have room for the longest put.
const CELL: u64 = MAX_PUT;

/// Cells for one word and source at a destination: one for each round of a run. They are used again only for words that
/// are held, since bytes are free once they were credited.
fn cells(scenario: &Scenario) -> u64 {
    u64::from(scenario.commands) + 1
}

fn cell(scenario: &Scenario, source: Rank, word: u32, round: u64) -> u64 {
    let hold = scenario.holds[word as usize];
    let round = if hold { round % u64::from(scenario.rounds) } else { round };
    ((source.index() * scenario.holds.len() + word as usize) as u64 * cells(scenario) + round)
        * CELL
}

impl weft_scenarios::Program for Program<'_> {
    type Failure = Wrong;

    /// One look at the world; true once all commands have ended and all that was put here was seen.
    fn step(
        &mut self,
        world: &World,
        engine: &mut Engine,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        if !sleeps(&mut self.asleep_until, self.scenario.laziness, &mut self.random, world, now) {
            let mut acted = 0;
            while acted < 4 && self.act()? {
                acted += 1;
            }
            if acted > 0 {
                world.wake_at(now.after(Duration::from_nanos(1)));
            }
        }
        let late = self.random.chance(0.5);
        if !late {
            self.take_commands(requests)?;
        }
        self.driver.poll(now, events, requests)?;
        if late {
            self.take_commands(requests)?;
        }
        self.raise_words()?;
        for peer in engine.peers() {
            for (word, counter) in (0..).zip(&self.counters) {
                let credits = engine.credits(*counter, peer)?;
                let released = self.model.borrow_mut().word(self.rank, peer, word).released;
                ensure(credits <= released, || {
                    format!("{credits} credits from {peer} for word {word}: released {released}")
                })?;
            }
        }
        Ok(self.is_over())
    }

    fn waits_for(&self) -> String {
        let Program { rank, to_push, next_ticket, .. } = self;
        let (taken, draining) = (self.reader.taken(), self.draining.len());
        let waits: Vec<_> = self.driver.waits_for().collect();
        format!(
            "{rank}: {to_push} to push, {taken} of {next_ticket} taken, {draining} draining, {} stored in part, waits \
             for credits of {waits:?}",
            self.pushes.len()
        )
    }
}

impl<'a> Program<'a> {
    /// A linked program for every rank.
    pub fn connect(
        cluster: &mut Cluster,
        scenario: &'a Scenario,
        model: &'a RefCell<Model>,
        memories: &'a [Memory],
    ) -> Result<Vec<Program<'a>>, Error> {
        let shape = CounterConfig { window: scenario.rounds, ..CounterConfig::default() };
        let counters: Vec<CounterId> =
            scenario.holds.iter().map(|_| cluster.counter_with(shape)).collect::<Result<_, _>>()?;
        let inbox_bytes = u64::from(scenario.ranks) * scenario.holds.len() as u64 * cells(scenario);
        let inbox_bytes = inbox_bytes * CELL;
        let (mut sources, mut inboxes) = (Vec::new(), Vec::new());
        for rank in cluster.ranks() {
            let engine = cluster.engine(rank);
            sources.push(engine.alloc((u64::from(scenario.chunks) * CELL) as usize)?);
            inboxes.push(engine.alloc(inbox_bytes as usize)?);
        }
        let granted = |owner: Rank, _| vec![(inboxes[owner.index()].clone(), 0..inbox_bytes)];
        let remote = cluster.share(granted, &counters)?;
        let program = |rank: Rank| {
            let at = rank.index();
            let shared = (scenario, model, &memories[at]);
            let regions = [&sources[at], &inboxes[at]];
            Program::new(cluster.engine(rank), shared, &counters, regions, &remote[at])
        };
        (0..scenario.ranks).map(Rank).map(program).collect()
    }

    fn new(
        engine: &mut Engine,
        (scenario, model, memory): (&'a Scenario, &'a RefCell<Model>, &'a Memory),
        counters: &[CounterId],
        [source, inbox]: [&Region; 2],
        remote: &[Vec<RemoteRegion>],
    ) -> Result<Program<'a>, Error> {
        let rank = engine.rank();
        let mut peers: Vec<Rank> = engine.peers().collect();
        let mut random = SplitMix64::new(scenario.seed.wrapping_mul(31) ^ u64::from(rank.0));
        random.shuffle(&mut peers);
        // Chunk i of a scatter's source is for member i; destinations are set by the offsets of this rank's cells.
        let member = |(index, peer)| TemplateMember {
            peer,
            source_offset: index * CELL,
            destination_offset: 0,
        };
        let template = Template { members: (0..).zip(peers).map(member).collect() };
        let windows = vec![
            Window {
                source: Some((source.key(), source.memory().len() as u64)),
                ..Window::default()
            },
            Window {
                source: None,
                destinations: remote.iter().map(|owned| owned.first().copied()).collect(),
            },
        ];
        let word =
            |(counter, hold): (&CounterId, &bool)| WordConfig { counter: *counter, hold: *hold };
        let config = ProxyConfig {
            words: counters.iter().zip(&scenario.holds).map(word).collect(),
            rounds: scenario.rounds,
            windows,
            templates: vec![template],
            list_lengths: memory.list.len() as u32,
            max_put_bytes: MAX_PUT,
            max_outstanding: scenario.max_outstanding,
        };
        Ok(Program {
            rank,
            driver: ProxyDriver::new(engine, config)?,
            random,
            scenario,
            model,
            counters: counters.to_vec(),
            reader: RingReader::new(memory.ring()),
            writer: RingWriter::new(memory.ring()),
            memory,
            source: source.clone(),
            inbox: inbox.clone(),
            next_ticket: 0,
            pushes: Vec::new(),
            to_push: scenario.commands,
            free_chunks: (0..scenario.chunks).collect(),
            used_chunks: Vec::new(),
            draining: VecDeque::new(),
            drained: vec![0; counters.len()],
            asked: vec![0; counters.len()],
            list_until: 0,
            asleep_until: Time(0),
        })
    }

    fn is_over(&self) -> bool {
        self.to_push == 0
            && self.draining.is_empty()
            && self.used_chunks.is_empty()
            && self.reader.taken() == self.next_ticket
            && self.driver.is_idle()
            && self.model.borrow_mut().is_over(self.rank)
    }

    fn take_commands(&mut self, requests: &mut Requests) -> Result<(), Wrong> {
        let (driver, list) = (&mut self.driver, &self.memory.list);
        while driver.has_room() {
            let taken =
                self.reader.take(|ticket, fields| driver.accept(ticket, fields, list, requests));
            match taken.map_err(Error::from)? {
                Some(accepted) => accepted?,
                None => break,
            }
        }
        Ok(())
    }

    /// Raises words, and checks the bytes in all rounds that they count: before the credits leave, after which the
    /// simulator overwrites them.
    fn raise_words(&mut self) -> Result<(), Wrong> {
        let each = self.counters.len();
        let words = Words::new(self.memory.words.as_slice(), each);
        self.driver.take_words(|update| words.raise(update).unwrap());
        for source in (0..self.scenario.ranks).map(Rank) {
            for word in 0..each as u32 {
                let position = words.position(source, word);
                let value = self.memory.words[position].load(Ordering::Acquire);
                if source == self.rank {
                    self.drained[word as usize] = value;
                } else {
                    self.see(source, word, value)?;
                }
            }
        }
        Ok(())
    }

    fn see(&self, source: Rank, word: u32, value: u32) -> Result<(), Wrong> {
        let mut model = self.model.borrow_mut();
        let known = model.word(source, self.rank, word);
        let (seen, sent) = (known.seen, known.sent.len() as u64);
        ensure((seen..=sent).contains(&value.into()), || {
            format!("word {word} of {source} is {value}: expected {seen} to {sent}")
        })?;
        known.seen = value.into();
        if !self.scenario.holds[word as usize] {
            for round in seen..value.into() {
                self.check_bytes(source, word, round, &known.sent[round as usize])?;
            }
            known.released = value.into();
        }
        Ok(())
    }

    fn check_bytes(
        &self,
        source: Rank,
        word: u32,
        number: u64,
        round: &Round,
    ) -> Result<(), Wrong> {
        let mut bytes = vec![0; round.bytes.len()];
        self.inbox.memory().copy_out(round.offset as usize, &mut bytes);
        ensure(bytes == round.bytes, || {
            format!("round {number} of word {word} from {source}: {bytes:?}, not {:?}", round.bytes)
        })
    }

    /// One step of the kernel; false if it can do nothing now.
    fn act(&mut self) -> Result<bool, Wrong> {
        let first = self.random.below(4);
        for step in 0..4 {
            let acted = match (first + step) % 4 {
                0 => self.store(),
                1 => self.release()?,
                2 => self.reuse_chunks(),
                _ => self.push(),
            };
            if acted {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Stores one quarter of a command whose slot is free.
    fn store(&mut self) -> bool {
        let free = |push: &Push| self.writer.has_room(push.ticket);
        let ready: Vec<usize> =
            (0..self.pushes.len()).filter(|at| free(&self.pushes[*at])).collect();
        if ready.is_empty() {
            return false;
        }
        let at = ready[self.random.below(ready.len() as u64) as usize];
        let Push { ticket, fields, left } = &mut self.pushes[at];
        let quarter = left.swap_remove(self.random.below(left.len() as u64) as usize);
        self.writer.store_quarter(*ticket, fields, quarter);
        if left.is_empty() {
            self.pushes.swap_remove(at);
        }
        true
    }

    fn push_command(&mut self, command: Command) {
        let left = (0..QUARTERS).collect();
        self.pushes.push(Push { ticket: self.next_ticket, fields: command.fields(), left });
        self.next_ticket += 1;
    }

    /// Checks held rounds and gives some of them back.
    fn release(&mut self) -> Result<bool, Wrong> {
        let words = 0..self.counters.len() as u32;
        let ends =
            self.peers().into_iter().flat_map(|peer| words.clone().map(move |word| (peer, word)));
        let held: Vec<(Rank, u32, u64, u64)> = ends
            .map(|(peer, word)| {
                let mut model = self.model.borrow_mut();
                let known = model.word(peer, self.rank, word);
                (peer, word, known.released, known.seen)
            })
            .filter(|(_, _, released, seen)| released < seen)
            .collect();
        if held.is_empty() {
            return Ok(false);
        }
        let (peer, word, from, to) = held[self.random.below(held.len() as u64) as usize];
        let count = 1 + self.random.below(to - from);
        for round in from..from + count {
            let mut model = self.model.borrow_mut();
            let sent = &model.word(peer, self.rank, word).sent[round as usize];
            self.check_bytes(peer, word, round, sent)?;
        }
        self.model.borrow_mut().word(peer, self.rank, word).released += count;
        self.push_command(Command::Release { peer, word, count: count as u32 });
        Ok(true)
    }

    /// Overwrites chunks that a DRAINED command has given back.
    fn reuse_chunks(&mut self) -> bool {
        let Some(Draining { word, value, .. }) = self.draining.front() else { return false };
        if (self.drained[*word as usize].wrapping_sub(*value) as i32) < 0 {
            return false;
        }
        let Some(Draining { chunks, .. }) = self.draining.pop_front() else { return false };
        for chunk in chunks {
            let at = u64::from(chunk) * CELL;
            self.source.memory().fill(at as usize, CELL as usize, self.random.bits() as u8);
            self.free_chunks.push(chunk);
        }
        true
    }

    /// Pushes a put, signal, scatter or DRAINED command.
    fn push(&mut self) -> bool {
        // Some tickets ahead of the ring, as blocks of a kernel are.
        if self.pushes.len() > 3 {
            return false;
        }
        let ending = self.to_push == 0 && !self.used_chunks.is_empty();
        if ending || (self.to_push > 0 && self.random.chance(0.1)) {
            self.drain();
            return true;
        }
        if self.to_push == 0 {
            self.model.borrow_mut().finished[self.rank.index()] = true;
            return false;
        }
        let peers = self.peers();
        let peer = peers[self.random.below(peers.len() as u64) as usize];
        let word = self.random.below(self.counters.len() as u64) as u32;
        let target = Target { word, hold: self.scenario.holds[word as usize] };
        match self.random.below(6) {
            0 => {
                self.note(peer, word, None);
                self.push_command(Command::Signal { peer, target });
            }
            1 => return self.scatter(target),
            _ => {
                let Some(chunk) = self.free_chunks.pop() else {
                    return self.drain_if_needed();
                };
                self.used_chunks.push(chunk);
                let length = 1 + self.random.below(MAX_PUT);
                let source = Place { window: 0, offset: u64::from(chunk) * CELL };
                let offset = self.note(peer, word, Some((source.offset, length)));
                let destination = Place { window: 1, offset };
                self.push_command(Command::Put { peer, target, source, destination, length });
            }
        }
        self.to_push -= 1;
        true
    }

    /// A scatter to the template's first peers, from the first chunks.
    fn scatter(&mut self, target: Target) -> bool {
        let released = self.memory.released.load(Ordering::Acquire);
        let members = self.driver.limits().templates[0].members.clone();
        let count = 1 + self.random.below(members.len() as u64) as usize;
        let chunks = 0..count as u32;
        if released < self.list_until || !chunks.clone().all(|c| self.free_chunks.contains(&c)) {
            return self.drain_if_needed();
        }
        // All rounds have one destination offset: a scatter is possible where the peers' next rounds have equal cells.
        let next = |member: &TemplateMember| {
            let mut model = self.model.borrow_mut();
            let round = model.word(self.rank, member.peer, target.word).sent.len() as u64;
            cell(self.scenario, self.rank, target.word, round)
        };
        let offset = next(&members[0]);
        if members[..count].iter().any(|member| next(member) != offset) {
            return false;
        }
        self.free_chunks.retain(|chunk| !chunks.contains(chunk));
        self.used_chunks.extend(chunks);
        let list = self.random.below((self.memory.list.len() - count) as u64 + 1) as usize;
        for length in &self.memory.list {
            length.store(u32::MAX, Ordering::Relaxed);
        }
        for (at, member) in members[..count].iter().enumerate() {
            let length = self.random.below(MAX_PUT + 1);
            self.memory.list[list + at].store(length as u32, Ordering::Relaxed);
            let bytes = (length > 0).then_some((member.source_offset, length));
            self.note(member.peer, target.word, bytes);
        }
        self.list_until = self.next_ticket + 1;
        self.push_command(Command::Scatter {
            template: 0,
            target,
            source: Place { window: 0, offset: 0 },
            destination: Place { window: 1, offset },
            count: count as u32,
            list: list as u32,
        });
        self.to_push -= 1;
        true
    }

    /// Fills a source and notes the round in the model; returns the destination offset.
    fn note(&mut self, peer: Rank, word: u32, bytes: Option<(u64, u64)>) -> u64 {
        let mut model = self.model.borrow_mut();
        let known = model.word(self.rank, peer, word);
        let offset = cell(self.scenario, self.rank, word, known.sent.len() as u64);
        let (at, length) = bytes.unwrap_or_default();
        let bytes: Vec<u8> = (0..length).map(|_| self.random.bits() as u8).collect();
        self.source.memory().copy_in(at as usize, &bytes);
        known.sent.push(Round { offset, bytes });
        offset
    }

    fn drain(&mut self) {
        let word = self.random.below(self.counters.len() as u64) as u32;
        self.asked[word as usize] += 1;
        let value = self.asked[word as usize];
        let chunks = std::mem::take(&mut self.used_chunks);
        self.draining.push_back(Draining { word, value, chunks });
        self.push_command(Command::Drained { word });
    }

    /// Without free chunks: asks for them, unless that was done.
    fn drain_if_needed(&mut self) -> bool {
        let needed = !self.used_chunks.is_empty();
        if needed {
            self.drain();
        }
        needed
    }

    fn peers(&self) -> Vec<Rank> {
        (0..self.scenario.ranks).map(Rank).filter(|peer| *peer != self.rank).collect()
    }

    /// All rounds have been credited, and no more.
    pub fn check_credits(&self, engine: &mut Engine) -> Result<(), String> {
        for peer in self.peers() {
            for (word, counter) in (0..).zip(&self.counters) {
                let credits = engine.credits(*counter, peer).map_err(|error| error.to_string())?;
                let sent = self.model.borrow_mut().word(self.rank, peer, word).sent.len() as u64;
                if credits != sent {
                    return Err(format!("{credits} credits for {sent} rounds to {peer}"));
                }
            }
        }
        Ok(())
    }
}
