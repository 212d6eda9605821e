//! Ranks that join, pause, break, die and fence each other.

use super::config::Pause;
use super::state::{SimEvent, State};
use super::violations::ViolationKind;
use crate::lane_table::LaneTable;
use crate::link::Sink;
use crate::memory::Memory;
use crate::network_model::FlowId;
use crate::types::RegionKey;
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

impl State {
    /// Joins a link to the group with these links, by rank.
    pub fn join(&mut self, link: Rank, members: &[Rank], lanes: &Arc<LaneTable>) {
        let state = self.link_mut(link);
        state.lanes = Some(lanes.clone());
        state.members = members.to_vec();
    }

    pub fn register(&mut self, rank: Rank, key: RegionKey, memory: &Arc<Memory>) {
        self.link_mut(rank).regions.insert(key, memory.clone());
    }

    pub fn grant(&mut self, rank: Rank, key: RegionKey, peer: Rank, range: Range<u64>) {
        self.link_mut(rank).grants.entry((key, peer)).or_default().push(range);
    }

    /// Releases a region; a part in flight that reads or writes it is a violation.
    pub fn deregister(&mut self, rank: Rank, key: RegionKey) {
        let mut found = Vec::new();
        for part in self.parts.values() {
            let open = !part.completed;
            if open && part.from == rank && part.pages.iter().any(|page| page.source == key) {
                found.push((ViolationKind::SourceReleased, part.to, part.lane));
            }
            let writes = part.pages.iter().any(|page| page.destination == key);
            if !part.ended && part.to == rank && writes {
                found.push((ViolationKind::DestinationReleased, part.from, part.lane));
            }
        }
        let state = self.link_mut(rank);
        let length = state.regions.remove(&key).map_or(0, |memory| memory.len() as u64);
        state.grants.retain(|(granted, _), _| *granted != key);
        state.ledger.remove_region(key);
        for (kind, peer, lane) in found {
            self.record_violation(kind, rank, peer, Some((rank, key, 0..length)), Some(lane));
        }
    }

    /// Moves completions and losses into a poll's sink.
    pub fn collect(&mut self, rank: Rank, sink: &mut Sink) {
        if self.is_running(rank) {
            if !self.link(rank).lost.is_empty() {
                self.schedule_in(self.loss_grace, SimEvent::Wake);
            }
            let state = self.link_mut(rank);
            for (token, result) in state.completions.drain(..) {
                match result {
                    Ok(()) => sink.done(token),
                    Err(why) => sink.failed(token, why),
                }
            }
            sink.lost.append(&mut state.lost);
        }
    }

    pub fn pause(&mut self, pause: &Pause) {
        self.log_event(10, [u64::from(pause.rank.0), pause.length.as_nanos() as u64, 0]);
        if pause.network {
            self.stop(pause.rank);
            self.schedule_in(pause.length, SimEvent::ResumeHost(pause.rank));
        } else {
            for link in self.links_of(pause.rank) {
                self.link_mut(link).pauses += 1;
            }
            self.schedule_in(pause.length, SimEvent::Thaw(pause.rank));
        }
        if let Some(silence) = self.faults.silence {
            self.schedule_in(silence, SimEvent::Silence(pause.rank));
        }
    }

    pub fn thaw(&mut self, rank: Rank) {
        for link in self.links_of(rank) {
            self.link_mut(link).pauses -= 1;
        }
    }

    /// Notifies a rank's peers if it is still paused.
    pub fn silence(&mut self, rank: Rank) {
        for link in self.links_of(rank) {
            if self.is_alive(link) && self.is_paused(link) {
                self.notify(link, "it has been silent for too long");
            }
        }
    }

    pub fn stop(&mut self, rank: Rank) {
        for link in self.links_of(rank) {
            self.stop_link(link);
        }
    }

    pub fn stop_link(&mut self, link: Rank) {
        self.link_mut(link).stops += 1;
    }

    pub fn resume(&mut self, rank: Rank) {
        for link in self.links_of(rank) {
            self.resume_link(link);
        }
    }

    pub fn resume_link(&mut self, rank: Rank) {
        let state = self.link_mut(rank);
        state.stops = state.stops.saturating_sub(1);
        if state.stops == 0 {
            for what in std::mem::take(&mut state.deferred) {
                self.schedule(self.now(), what);
            }
        }
    }

    /// Kills a rank. Half the rank's parts in flight still arrive; half the parts toward it fail when the
    /// senders notice, the others are drained by fences.
    pub fn kill(&mut self, rank: Rank) {
        for link in self.links_of(rank) {
            self.kill_link(link);
        }
    }

    fn kill_link(&mut self, rank: Rank) {
        if std::mem::replace(&mut self.link_mut(rank).dead, true) {
            return;
        }
        self.log_event(6, [u64::from(rank.0), 0, 0]);
        for id in self.parts_matching(|part| part.from == rank && !part.ended) {
            if self.random.chance(0.5) {
                self.discard(id);
            }
        }
        for id in self.parts_matching(|part| part.to == rank && !part.ended) {
            self.discard(id);
            if self.random.chance(0.5) {
                let delay = self.random.duration(self.faults.detection);
                self.complete_in(delay, id, Err("the peer does not answer"));
            }
        }
        self.notify(rank, "its process has ended");
    }

    /// Schedules a loss notice at each connected peer.
    fn notify(&mut self, rank: Rank, why: &'static str) {
        for peer in self.link(rank).members.clone().into_iter().filter(|peer| *peer != rank) {
            self.notify_peer(peer, rank, why);
        }
    }

    pub fn notify_peer(&mut self, at: Rank, lost: Rank, why: &'static str) {
        let peer = self.link(at);
        if peer.lanes.is_some() && !peer.fenced.contains(&lost) {
            let delay = self.random.duration(self.faults.detection);
            self.schedule_in(delay, SimEvent::Notice { at, lost, why });
        }
    }

    /// Breaks the link between two ranks; parts on it fail.
    pub fn cut(&mut self, a: Rank, b: Rank) {
        self.log_event(7, [u64::from(a.0), u64::from(b.0), 0]);
        self.cuts.insert((a.min(b), a.max(b)));
        let on_it = |state: &State, from: Rank, to: Rank| {
            let hosts = (state.host_of(from), state.host_of(to));
            hosts == (a, b) || hosts == (b, a)
        };
        for id in self.parts_matching(|part| on_it(self, part.from, part.to) && !part.ended) {
            self.model.cancel(FlowId(id));
            self.fail(id, "the link is cut");
        }
    }

    pub fn host_of(&self, link: Rank) -> Rank {
        Rank(self.link(link).host)
    }

    pub fn is_cut(&self, a: Rank, b: Rank) -> bool {
        let (a, b) = (self.host_of(a), self.host_of(b));
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// True if `owner` accepts bytes from `from`.
    pub fn accepts(&self, owner: Rank, from: Rank) -> bool {
        let owner = self.link(owner);
        owner.lanes.is_some() && !owner.dead && !owner.fenced.contains(&from)
    }

    /// Checks that a rank whose engine reported a poisoned group has fenced all peers: from here on the
    /// rank's memory may go.
    pub fn check_fenced(&mut self, rank: Rank) {
        for peer in self.link(rank).members.clone().into_iter().filter(|peer| *peer != rank) {
            if self.accepts(rank, peer) {
                self.record_violation(ViolationKind::NotFenced, rank, peer, None, None);
            }
        }
    }

    /// Fences `peer` at `rank`; parts in flight from `rank` toward it fail at once.
    pub fn fence(&mut self, rank: Rank, peer: Rank, sink: &mut Sink) {
        if !self.link_mut(rank).fenced.insert(peer) {
            return;
        }
        self.log_event(8, [u64::from(rank.0), u64::from(peer.0), 0]);
        for id in self.parts_matching(|part| part.to == rank && part.from == peer && !part.ended) {
            self.discard(id);
        }
        for id in self.parts_matching(|part| part.from == rank && part.to == peer) {
            self.discard(id);
            let Some(part) = self.parts.remove(&id) else { continue };
            if !part.completed {
                self.unqueue(rank, peer, part.bytes());
                sink.failed(part.token, "the peer was fenced");
            }
        }
        self.notify_peer(peer, rank, "it has closed the connection");
    }

    /// Closes a link; called when the engine is dropped.
    pub fn leave(&mut self, rank: Rank) {
        self.log_event(9, [u64::from(rank.0), 0, 0]);
        for id in self.parts_matching(|part| part.from == rank || part.to == rank) {
            self.discard(id);
        }
        self.parts.retain(|_, part| part.from != rank);
        let was_joined = self.link_mut(rank).lanes.take().is_some();
        let state = self.link_mut(rank);
        state.regions.clear();
        state.completions.clear();
        if was_joined && self.is_alive(rank) {
            self.notify(rank, "it has closed the connection");
        }
    }
}
