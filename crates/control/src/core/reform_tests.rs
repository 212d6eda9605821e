//! Ranks on a simulated network, each with a program that calls `reform` whenever the group is poisoned. A seed
//! decides which link delivers next, and when a rank dies, is suspected by another, times out, or drops the new
//! handle. One step is one time unit.

use super::super::ConnectionLoss;
use super::super::tests::member;
use super::*;
use crate::member::number_members;
use crate::random::SplitMix64;
use std::collections::{BTreeMap, VecDeque};

/// Uniform draw below `limit`, zero for an empty range.
fn below(random: &mut SplitMix64, limit: usize) -> usize {
    (random.bits() % limit.max(1) as u64) as usize
}

enum Packet {
    Frame(Arc<[u8]>),
    /// The other end closed: a link's last packet.
    Closed,
}

/// Rank with a program.
struct Process {
    core: Core,
    /// The program handle's generation.
    generation: u32,
    handle: Option<Arc<()>>,
    reforming: bool,
    /// True once the others have excluded it.
    out: bool,
    dead: bool,
}

impl Process {
    fn runs(&self) -> bool {
        !self.dead && !self.out
    }

    fn members(&self) -> Vec<Rank> {
        let group = &self.core.groups[&self.core.newest];
        group.members.iter().map(|member| member.original_rank).collect()
    }
}

struct World {
    processes: Vec<Process>,
    links: BTreeMap<(usize, usize), VecDeque<Packet>>,
    /// Links whose sender has closed.
    closed: BTreeSet<(usize, usize)>,
    random: SplitMix64,
    /// Remaining faults: deaths, suspicions, timeouts and dropped handles.
    faults: usize,
}

impl World {
    fn new(size: usize, seed: u64, faults: usize) -> World {
        let process = |me: u32| {
            let mut core = Core::new(Rank(me), number_members((0..size as u32).map(member)));
            let handle = Some(core.first_handle());
            Process { core, generation: 0, handle, reforming: false, out: false, dead: false }
        };
        World {
            processes: (0..size as u32).map(process).collect(),
            links: BTreeMap::new(),
            closed: BTreeSet::new(),
            random: SplitMix64::new(seed),
            faults,
        }
    }

    /// Moves a rank's queued frames into its links.
    fn transmit(&mut self, from: usize) {
        for action in std::mem::take(&mut self.processes[from].core.actions) {
            let (to, packet) = match action {
                Action::Send(to, frame) => (to.index(), Packet::Frame(frame)),
                Action::Close(to) => (to.index(), Packet::Closed),
                Action::Poisoned(..) | Action::Left(..) => continue,
            };
            self.push(from, to, packet);
        }
    }

    fn push(&mut self, from: usize, to: usize, packet: Packet) {
        if self.closed.contains(&(from, to)) {
            return;
        }
        if matches!(packet, Packet::Closed) {
            self.closed.insert((from, to));
        }
        self.links.entry((from, to)).or_default().push_back(packet);
    }

    /// Kills a rank: each link may lose some last packets.
    fn kill(&mut self, rank: usize) {
        self.processes[rank].dead = true;
        for other in (0..self.processes.len()).filter(|other| *other != rank) {
            let link = self.links.entry((rank, other)).or_default();
            if !self.closed.contains(&(rank, other)) {
                link.truncate(below(&mut self.random, link.len() + 1));
            }
            self.push(rank, other, Packet::Closed);
        }
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let packet = self.links.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let (Some(packet), false) = (packet, self.processes[to].dead) else { return };
        let (core, peer) = (&mut self.processes[to].core, Rank(from as u32));
        match packet {
            Packet::Frame(frame) => {
                let message = Message::parse(&frame[4..]).unwrap();
                core.receive(peer, message, 0).unwrap();
            }
            Packet::Closed => {
                core.connection_lost(peer, ConnectionLoss::Closed("closed".into()));
                self.push(to, from, Packet::Closed);
            }
        }
        self.transmit(to);
    }

    /// Advances a rank's program; false if it is idle.
    fn step(&mut self, rank: usize) -> bool {
        let process = &mut self.processes[rank];
        if !process.runs() {
            return false;
        }
        let moved = if !process.reforming {
            process.core.poisoned(process.generation).is_some()
                && match process.core.reform(process.generation) {
                    Ok(()) => {
                        process.reforming = true;
                        true
                    }
                    Err(Error::Excluded { .. }) => {
                        process.out = true;
                        process.core.leave();
                        true
                    }
                    Err(error) => panic!("rank {rank}: {error}"),
                }
        } else {
            match process.core.reform_poll() {
                None => false,
                Some(Ok(formed)) => {
                    process.reforming = false;
                    if self.faults > 0 && below(&mut self.random, 8) == 0 {
                        // As if a higher layer had failed: only the old handle is left.
                        self.faults -= 1;
                        drop(formed);
                        process.core.reform(process.generation).unwrap();
                        process.reforming = true;
                    } else {
                        process.generation = formed.generation;
                        process.handle = Some(formed.handle);
                    }
                    true
                }
                Some(Err(Error::Excluded { .. })) => {
                    process.core.reform_pause();
                    process.out = true;
                    process.core.leave();
                    true
                }
                Some(Err(error)) => panic!("rank {rank}: {error}"),
            }
        };
        self.transmit(rank);
        moved
    }

    fn inject_fault(&mut self) {
        self.faults -= 1;
        let rank = below(&mut self.random, self.processes.len());
        if !self.processes[rank].runs() {
            return;
        }
        match below(&mut self.random, 4) {
            0 | 1 => self.kill(rank),
            2 => {
                let other = below(&mut self.random, self.processes.len());
                if other != rank {
                    let down = ConnectionLoss::Silent("silent".into());
                    self.processes[rank].core.connection_lost(Rank(other as u32), down);
                    self.transmit(rank);
                }
            }
            _ => {
                let process = &mut self.processes[rank];
                if process.reforming {
                    process.core.reform_pause();
                    process.reforming = false;
                    // The repeat does not depend on poison.
                    if process.core.reform(process.generation).is_ok() {
                        process.reforming = true;
                    }
                    self.transmit(rank);
                }
            }
        }
    }

    fn run(&mut self, seed: u64) {
        let size = self.processes.len();
        for _ in 0..20_000 {
            if self.faults > 0 && below(&mut self.random, 12) == 0 {
                self.inject_fault();
            }
            let busy: Vec<(usize, usize)> =
                self.links.iter().filter(|(_, link)| !link.is_empty()).map(|(at, _)| *at).collect();
            let rank = below(&mut self.random, size);
            if below(&mut self.random, 3) == 0 {
                self.step(rank);
            } else if let Some((from, to)) = busy.get(below(&mut self.random, busy.len())) {
                self.deliver(*from, *to);
            } else if self.faults > 0 {
                self.inject_fault();
            } else if !(0..size).any(|rank| self.step(rank)) && self.links_are_empty() {
                return;
            }
        }
        panic!("seed {seed}: the ranks never settle");
    }

    fn links_are_empty(&self) -> bool {
        self.links.values().all(VecDeque::is_empty)
    }

    fn check(&self, seed: u64) {
        for (rank, process) in self.processes.iter().enumerate().filter(|(_, p)| p.runs()) {
            let missing = process.core.reform_missing();
            assert!(!process.reforming, "seed {seed}: rank {rank} waits for {missing:?}");
            assert_eq!(process.generation, process.core.newest, "seed {seed}: rank {rank}");
            assert_eq!(process.core.poisoned(process.generation), None, "seed {seed}: rank {rank}");
            for other in process.members() {
                let theirs = &self.processes[other.index()];
                assert!(theirs.runs(), "seed {seed}: rank {rank} has {other}, which is gone");
                let same = theirs.generation == process.generation;
                assert!(same, "seed {seed}: rank {rank} and {other} are in different generations");
                assert_eq!(
                    theirs.members(),
                    process.members(),
                    "seed {seed}: rank {rank}, {other}"
                );
            }
        }
    }
}

#[test]
fn survivors_form_one_group_after_any_losses_at_any_step() {
    let replay = std::env::var("WEFT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seeds = replay.map_or(0..4000, |seed| seed..seed + 1);
    for seed in seeds {
        let mut random = SplitMix64::new(seed);
        let (size, faults) = (2 + below(&mut random, 6), 1 + below(&mut random, 6));
        let mut world = World::new(size, seed, faults);
        // The first fault is a loss.
        let first = below(&mut world.random, size);
        world.kill(first);
        world.run(seed);
        world.check(seed);
    }
}

/// Ranks 0 to `size`, all in `reform`; the last is dead.
fn after_a_loss(size: usize) -> World {
    let mut world = World::new(size, 1, 0);
    world.kill(size - 1);
    for rank in 0..size - 1 {
        world.deliver(size - 1, rank);
        assert!(world.step(rank), "it reforms");
    }
    world
}

#[test]
fn a_second_loss_leads_to_another_view_change_in_the_same_call() {
    let mut world = after_a_loss(4);
    // Rank 0 has all views and forms the group; rank 2, which dies, has a view that never reaches rank 1.
    let view_arrives = |world: &mut World, from, to| {
        while world.links.get(&(from, to)).is_some_and(|link| !link.is_empty()) {
            world.deliver(from, to);
        }
    };
    for from in [1, 2] {
        view_arrives(&mut world, from, 0);
    }
    world.step(0);
    assert_eq!(world.processes[0].core.newest, 1);
    assert_eq!(world.processes[0].members(), [0, 1, 2].map(Rank));
    world.links.get_mut(&(2, 1)).unwrap().clear();
    world.kill(2);
    world.run(0);
    world.check(0);
    for rank in [0, 1] {
        assert_eq!(world.processes[rank].members(), [0, 1].map(Rank));
        assert_eq!(world.processes[rank].core.newest, 2);
    }
}

#[test]
fn an_old_handle_continues_only_once_the_new_ones_are_dropped() {
    let mut world = after_a_loss(3);
    world.run(0);
    let process = &mut world.processes[0];
    assert!(matches!(process.core.reform(0), Err(Error::Superseded)), "there is a newer handle");
    process.handle = None;
    process.core.reform(0).unwrap();
    process.reforming = true;
    world.transmit(0);
    world.run(0);
    world.check(0);
    assert_eq!(world.processes[1].generation, 2);
}
