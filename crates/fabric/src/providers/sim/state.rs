//! The world from inside: what is due, and what each rank has.

use super::checks::{Breach, Ledger, Violation};
use super::part::Part;
use super::random::{Random, mix};
use super::{Faults, Pause, WorldConfig};
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::model::{FlowId, NetworkModel};
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Something due at a time.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    Depart(u64),
    Arrive(u64),
    Complete(u64),
    Notice { at: Rank, lost: Rank, why: &'static str },
    Pause(Pause),
    Silence(Rank),
    Thaw(Rank),
    Resume(Rank),
    ResumeHost(Rank),
    Kill(Rank),
    Cut(Rank, Rank),
    Wake,
}

/// One end of a group: a rank of the world in one of its groups. The first that a rank opens has the
/// rank's own number.
#[derive(Default)]
pub(super) struct RankState {
    /// The rank of the world whose end it is.
    pub host: u32,
    pub is_open: bool,
    /// The ends of its group, by their rank in it, this one included.
    pub members: Vec<Rank>,
    pub lanes: Option<Arc<LaneTable>>,
    pub regions: BTreeMap<RegionKey, Arc<Memory>>,
    pub grants: BTreeMap<(RegionKey, Rank), Vec<Range<u64>>>,
    pub ledger: Ledger,
    pub dead: bool,
    /// Pauses of the rank alone that have not ended.
    pub frozen: u32,
    /// Likewise of the rank and its network, and what waits for that.
    pub stops: u32,
    pub deferred: Vec<Happening>,
    pub fenced: BTreeSet<Rank>,
    /// What the engine has not yet polled.
    pub completions: Vec<(u64, Result<(), String>)>,
    pub lost: Vec<(Rank, String)>,
    /// Parts and bytes under way, by destination.
    pub queued: BTreeMap<Rank, (u32, u64)>,
}

pub(super) struct State {
    pub seed: u64,
    pub random: Random,
    pub faults: Faults,
    pub model: Box<dyn NetworkModel>,
    pub queue_parts: u32,
    pub queue_bytes: u64,
    pub parts_rule: PartRule,
    pub now: Time,
    pub due: BTreeMap<(Time, u64), Happening>,
    pub scheduled: u64,
    /// Ranks of the world.
    pub hosts: u32,
    /// Their ends: one for each at least, more where a rank is in several groups.
    pub ranks: Vec<RankState>,
    pub parts: BTreeMap<u64, Part>,
    pub posted: u64,
    pub cuts: BTreeSet<(Rank, Rank)>,
    pub arrived: Vec<FlowId>,
    pub scratch: Vec<u8>,
    pub violations: Vec<Violation>,
    /// How long after a loss its hearer wants to be polled again.
    pub loss_grace: Duration,
    pub log: u64,
}

impl State {
    pub fn new(config: WorldConfig) -> State {
        let mut state = State {
            seed: config.seed,
            random: Random::new(config.seed),
            faults: config.faults,
            model: config.model,
            queue_parts: config.queue_parts.max(1),
            queue_bytes: config.queue_bytes,
            parts_rule: config.parts,
            now: Time(0),
            due: BTreeMap::new(),
            scheduled: 0,
            hosts: config.ranks,
            ranks: (0..config.ranks)
                .map(|host| RankState { host, ..RankState::default() })
                .collect(),
            parts: BTreeMap::new(),
            posted: 0,
            cuts: BTreeSet::new(),
            arrived: Vec::new(),
            scratch: Vec::new(),
            violations: Vec::new(),
            loss_grace: Duration::ZERO,
            log: 0,
        };
        for (time, rank) in state.faults.kills.clone() {
            state.schedule(time, Happening::Kill(rank));
        }
        for (time, a, b) in state.faults.cuts.clone() {
            state.schedule(time, Happening::Cut(a, b));
        }
        for pause in state.faults.pauses.clone() {
            state.schedule(pause.at, Happening::Pause(pause));
        }
        state
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn size(&self) -> u32 {
        self.hosts
    }

    /// The ends of a rank of the world.
    pub fn ends_of(&self, host: Rank) -> Vec<Rank> {
        let ends = (0..).map(Rank).zip(&self.ranks);
        ends.filter(|(_, end)| end.host == host.0).map(|(end, _)| end).collect()
    }

    /// One more end of a rank of the world.
    pub fn open_end(&mut self, host: Rank) -> Rank {
        let first = &mut self.ranks[host.0 as usize];
        if !std::mem::replace(&mut first.is_open, true) {
            return host;
        }
        let state = self.at(host);
        let (dead, frozen, stops) = (state.dead, state.frozen, state.stops);
        let end =
            RankState { host: host.0, is_open: true, dead, frozen, stops, ..RankState::default() };
        self.ranks.push(end);
        Rank(self.ranks.len() as u32 - 1)
    }

    pub fn now(&self) -> Time {
        self.now
    }

    pub fn part_rule(&self) -> PartRule {
        self.parts_rule
    }

    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    pub fn log_hash(&self) -> u64 {
        self.log
    }

    /// Whether an end has not died.
    pub fn is_alive(&self, rank: Rank) -> bool {
        !self.at(rank).dead
    }

    pub fn is_running(&self, rank: Rank) -> bool {
        !self.at(rank).dead && !self.is_paused(rank)
    }

    pub fn is_paused(&self, rank: Rank) -> bool {
        self.at(rank).stops > 0 || self.at(rank).frozen > 0
    }

    pub fn schedule(&mut self, time: Time, what: Happening) {
        self.scheduled += 1;
        self.due.insert((time.max(self.now), self.scheduled), what);
    }

    pub fn schedule_in(&mut self, delay: Duration, what: Happening) {
        self.schedule(self.now.after(delay), what);
    }

    /// Moves on to the next thing due.
    pub fn step(&mut self) -> bool {
        let due = self.due.first_key_value().map(|((time, _), _)| *time);
        let flow = self.model.next_event();
        let Some(next) = due.into_iter().chain(flow).min() else { return false };
        self.now = self.now.max(next);
        if flow.is_some_and(|flow| flow <= next) {
            let mut arrived = std::mem::take(&mut self.arrived);
            self.model.advance(next, &mut arrived);
            for flow in arrived.drain(..) {
                self.happen(Happening::Arrive(flow.0));
            }
            self.arrived = arrived;
        } else if let Some((_, what)) = self.due.pop_first() {
            self.happen(what);
        }
        true
    }

    pub fn happen(&mut self, what: Happening) {
        match what {
            Happening::Depart(part) => self.depart(part),
            Happening::Arrive(part) => self.arrive(part),
            Happening::Complete(part) => self.complete(part),
            Happening::Notice { at, lost, why } => {
                self.note(2, [u64::from(at.0), u64::from(lost.0), 0]);
                self.at_mut(at).lost.push((lost, why.to_owned()));
            }
            Happening::Pause(pause) => self.pause(&pause),
            Happening::Silence(rank) => self.silence(rank),
            Happening::Thaw(rank) => self.thaw(rank),
            Happening::Resume(end) => self.resume_end(end),
            Happening::ResumeHost(rank) => self.resume(rank),
            Happening::Kill(rank) => self.kill(rank),
            Happening::Cut(a, b) => self.cut(a, b),
            Happening::Wake => {}
        }
    }

    /// Folds what happened into the number that stands for the run.
    pub fn note(&mut self, what: u64, details: [u64; 3]) {
        for word in [what, self.now.0].into_iter().chain(details) {
            self.log = mix(self.log ^ word).wrapping_add(word);
        }
    }

    pub fn at(&self, rank: Rank) -> &RankState {
        &self.ranks[rank.0 as usize]
    }

    pub fn at_mut(&mut self, rank: Rank) -> &mut RankState {
        &mut self.ranks[rank.0 as usize]
    }

    /// Records what nobody may do.
    pub fn violated(
        &mut self,
        breach: Breach,
        rank: Rank,
        peer: Rank,
        bytes: Option<(Rank, RegionKey, Range<u64>)>,
        lane: Option<Lane>,
    ) {
        let lane = lane.map(|lane| lane.id());
        self.violations.push(Violation { at: self.now, breach, rank, peer, bytes, lane });
    }
}
