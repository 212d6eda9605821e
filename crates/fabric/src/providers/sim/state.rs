//! World state: calendar, links, parts.

use super::config::{Faults, Pause, WorldConfig};
use super::part_record::Part;
use super::violations::{Ledger, Violation, ViolationKind};
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::network_model::{FlowId, NetworkModel};
use crate::parts::PartRule;
use crate::random::{SplitMix64, mix};
use crate::types::{Lane, RegionKey, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Calendar event.
#[derive(Clone, Debug)]
pub(super) enum SimEvent {
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

/// State of one link: a world rank in one of the rank's groups. A rank's first link has the rank's
/// number.
#[derive(Default)]
pub(super) struct LinkState {
    /// World rank that owns the link.
    pub host: u32,
    pub is_open: bool,
    /// Links in the group by rank, itself included.
    pub members: Vec<Rank>,
    pub lanes: Option<Arc<LaneTable>>,
    pub regions: BTreeMap<RegionKey, Arc<Memory>>,
    pub grants: BTreeMap<(RegionKey, Rank), Vec<Range<u64>>>,
    pub ledger: Ledger,
    pub dead: bool,
    /// Open pauses for only the rank.
    pub pauses: u32,
    /// Open pauses for the rank and the network, and the events deferred until they end.
    pub stops: u32,
    pub deferred: Vec<SimEvent>,
    pub fenced: BTreeSet<Rank>,
    /// Completions and losses that the engine has not polled yet.
    pub completions: Vec<(u64, Result<(), String>)>,
    pub lost: Vec<(Rank, String)>,
    /// Parts and bytes in flight, by destination.
    pub queued: BTreeMap<Rank, (u32, u64)>,
}

pub(super) struct State {
    pub seed: u64,
    pub random: SplitMix64,
    pub faults: Faults,
    pub model: Box<dyn NetworkModel>,
    pub queue_parts: u32,
    pub queue_bytes: u64,
    /// See [`WorldConfig::reuse`](super::WorldConfig::reuse).
    pub reuse: bool,
    pub parts_rule: PartRule,
    pub now: Time,
    pub calendar: BTreeMap<(Time, u64), SimEvent>,
    pub scheduled: u64,
    /// World size.
    pub hosts: u32,
    /// Links by rank: at least one each, more for a rank in several groups.
    pub links: Vec<LinkState>,
    pub parts: BTreeMap<u64, Part>,
    pub posted: u64,
    pub cuts: BTreeSet<(Rank, Rank)>,
    pub arrived: Vec<FlowId>,
    pub scratch: Vec<u8>,
    pub violations: Vec<Violation>,
    /// Delay after a reported loss until the engine is polled again.
    pub loss_grace: Duration,
    pub log: u64,
}

impl State {
    pub fn new(config: WorldConfig) -> State {
        let mut state = State {
            seed: config.seed,
            random: SplitMix64::new(config.seed),
            faults: config.faults,
            model: config.model,
            queue_parts: config.queue_parts.max(1),
            queue_bytes: config.queue_bytes,
            reuse: config.reuse,
            parts_rule: config.parts,
            now: Time(0),
            calendar: BTreeMap::new(),
            scheduled: 0,
            hosts: config.ranks,
            links: (0..config.ranks)
                .map(|host| LinkState { host, ..LinkState::default() })
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
            state.schedule(time, SimEvent::Kill(rank));
        }
        for (time, a, b) in state.faults.cuts.clone() {
            state.schedule(time, SimEvent::Cut(a, b));
        }
        for pause in state.faults.pauses.clone() {
            state.schedule(pause.at, SimEvent::Pause(pause));
        }
        state
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn size(&self) -> u32 {
        self.hosts
    }

    /// A world rank's links.
    pub fn links_of(&self, host: Rank) -> Vec<Rank> {
        let links = (0..).map(Rank).zip(&self.links);
        links.filter(|(_, link)| link.host == host.0).map(|(link, _)| link).collect()
    }

    /// Opens a link for a world rank.
    pub fn open_link(&mut self, host: Rank) -> Rank {
        let first = &mut self.links[host.0 as usize];
        if !std::mem::replace(&mut first.is_open, true) {
            return host;
        }
        let state = self.link(host);
        let (dead, pauses, stops) = (state.dead, state.pauses, state.stops);
        let link =
            LinkState { host: host.0, is_open: true, dead, pauses, stops, ..LinkState::default() };
        self.links.push(link);
        Rank(self.links.len() as u32 - 1)
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

    /// True until the link's rank dies.
    pub fn is_alive(&self, rank: Rank) -> bool {
        !self.link(rank).dead
    }

    pub fn is_running(&self, rank: Rank) -> bool {
        !self.link(rank).dead && !self.is_paused(rank)
    }

    pub fn is_paused(&self, rank: Rank) -> bool {
        self.link(rank).stops > 0 || self.link(rank).pauses > 0
    }

    pub fn schedule(&mut self, time: Time, what: SimEvent) {
        self.scheduled += 1;
        self.calendar.insert((time.max(self.now), self.scheduled), what);
    }

    pub fn schedule_in(&mut self, delay: Duration, what: SimEvent) {
        self.schedule(self.now.after(delay), what);
    }

    /// Advances to the next event and executes it; `false` with an empty calendar.
    pub fn step(&mut self) -> bool {
        let due = self.calendar.first_key_value().map(|((time, _), _)| *time);
        let flow = self.model.next_event();
        let Some(next) = due.into_iter().chain(flow).min() else { return false };
        self.now = self.now.max(next);
        if flow.is_some_and(|flow| flow <= next) {
            let mut arrived = std::mem::take(&mut self.arrived);
            self.model.advance(next, &mut arrived);
            for flow in arrived.drain(..) {
                self.handle(SimEvent::Arrive(flow.0));
            }
            self.arrived = arrived;
        } else if let Some((_, what)) = self.calendar.pop_first() {
            self.handle(what);
        }
        true
    }

    pub fn handle(&mut self, what: SimEvent) {
        match what {
            SimEvent::Depart(part) => self.depart(part),
            SimEvent::Arrive(part) => self.arrive(part),
            SimEvent::Complete(part) => self.complete(part),
            SimEvent::Notice { at, lost, why } => {
                self.log_event(2, [u64::from(at.0), u64::from(lost.0), 0]);
                self.link_mut(at).lost.push((lost, why.to_owned()));
            }
            SimEvent::Pause(pause) => self.pause(&pause),
            SimEvent::Silence(rank) => self.silence(rank),
            SimEvent::Thaw(rank) => self.thaw(rank),
            SimEvent::Resume(link) => self.resume_link(link),
            SimEvent::ResumeHost(rank) => self.resume(rank),
            SimEvent::Kill(rank) => self.kill(rank),
            SimEvent::Cut(a, b) => self.cut(a, b),
            SimEvent::Wake => {}
        }
    }

    /// Folds an event into the run's hash.
    pub fn log_event(&mut self, what: u64, details: [u64; 3]) {
        for word in [what, self.now.0].into_iter().chain(details) {
            self.log = mix(self.log ^ word).wrapping_add(word);
        }
    }

    pub fn link(&self, rank: Rank) -> &LinkState {
        &self.links[rank.0 as usize]
    }

    pub fn link_mut(&mut self, rank: Rank) -> &mut LinkState {
        &mut self.links[rank.0 as usize]
    }

    /// Records a violation.
    pub fn record_violation(
        &mut self,
        kind: ViolationKind,
        rank: Rank,
        peer: Rank,
        bytes: Option<(Rank, RegionKey, Range<u64>)>,
        lane: Option<Lane>,
    ) {
        let lane = lane.map(|lane| lane.id());
        self.violations.push(Violation { at: self.now, kind, rank, peer, bytes, lane });
    }
}
