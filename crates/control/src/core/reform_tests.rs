//! Whole ranks, each with a program that reforms whenever its group is poisoned, on a network that
//! exists only here. A seed decides which link delivers next, and when a rank dies, is taken for
//! dead by another, stops waiting, or loses the handle it was given. One step is one unit of time.

use super::super::Down;
use super::super::tests::member;
use super::*;
use crate::member::number;
use std::collections::{BTreeMap, VecDeque};

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % limit.max(1) as u64) as usize
    }
}

enum Packet {
    Frame(Arc<[u8]>),
    /// The other end closed: the last packet of a link.
    Closed,
}

/// One rank and its program.
struct Process {
    core: Core,
    /// The generation of the program's handle, and the handle.
    generation: u32,
    handle: Option<Arc<()>>,
    reforming: bool,
    /// The others go on without it.
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
    random: Random,
    /// How many deaths, suspicions, timeouts and lost handles are still to come.
    mishaps: usize,
}

impl World {
    fn new(size: usize, seed: u64, mishaps: usize) -> World {
        let process = |me: u32| {
            let mut core = Core::new(Rank(me), number((0..size as u32).map(member)));
            let handle = Some(core.first_handle());
            Process { core, generation: 0, handle, reforming: false, out: false, dead: false }
        };
        World {
            processes: (0..size as u32).map(process).collect(),
            links: BTreeMap::new(),
            closed: BTreeSet::new(),
            random: Random(seed),
            mishaps,
        }
    }

    /// Moves what a rank wants to send into its links.
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

    /// A rank dies: each link loses some of its last packets.
    fn kill(&mut self, rank: usize) {
        self.processes[rank].dead = true;
        for other in (0..self.processes.len()).filter(|other| *other != rank) {
            let link = self.links.entry((rank, other)).or_default();
            if !self.closed.contains(&(rank, other)) {
                link.truncate(self.random.below(link.len() + 1));
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
                core.link_down(peer, Down::Closed("closed".into()));
                self.push(to, from, Packet::Closed);
            }
        }
        self.transmit(to);
    }

    /// What the program of a rank does next. False if it has nothing to do.
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
                    if self.mishaps > 0 && self.random.below(8) == 0 {
                        // As if what is built on the group had failed: the old handle is all there is.
                        self.mishaps -= 1;
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

    fn mishap(&mut self) {
        self.mishaps -= 1;
        let rank = self.random.below(self.processes.len());
        if !self.processes[rank].runs() {
            return;
        }
        match self.random.below(4) {
            0 | 1 => self.kill(rank),
            2 => {
                let other = self.random.below(self.processes.len());
                if other != rank {
                    let down = Down::Silent("silent".into());
                    self.processes[rank].core.link_down(Rank(other as u32), down);
                    self.transmit(rank);
                }
            }
            _ => {
                let process = &mut self.processes[rank];
                if process.reforming {
                    process.core.reform_pause();
                    process.reforming = false;
                    // The repeat is not a matter of poison.
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
            if self.mishaps > 0 && self.random.below(12) == 0 {
                self.mishap();
            }
            let busy: Vec<(usize, usize)> =
                self.links.iter().filter(|(_, link)| !link.is_empty()).map(|(at, _)| *at).collect();
            let rank = self.random.below(size);
            if self.random.below(3) == 0 {
                self.step(rank);
            } else if let Some((from, to)) = busy.get(self.random.below(busy.len())) {
                self.deliver(*from, *to);
            } else if self.mishaps > 0 {
                self.mishap();
            } else if !(0..size).any(|rank| self.step(rank)) && self.links_are_empty() {
                return;
            }
        }
        panic!("seed {seed}: the ranks never come to rest");
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
fn survivors_come_to_one_group_whatever_is_lost_at_whichever_step() {
    let replay = std::env::var("WEFT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seeds = replay.map_or(0..4000, |seed| seed..seed + 1);
    for seed in seeds {
        let mut random = Random(seed);
        let (size, mishaps) = (2 + random.below(6), 1 + random.below(6));
        let mut world = World::new(size, seed, mishaps);
        // It begins with a loss.
        let first = world.random.below(size);
        world.kill(first);
        world.run(seed);
        world.check(seed);
    }
}

/// Ranks 0 to `size`, the last of which is dead, all of them in `reform`.
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
fn a_second_loss_leads_to_another_round_in_the_same_call() {
    let mut world = after_a_loss(4);
    // Rank 0 has all views and forms the group; the view of rank 2, which dies, never reaches rank 1.
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
fn an_old_handle_goes_on_only_once_the_new_ones_are_gone() {
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
