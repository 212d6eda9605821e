//! What happens to ranks: they join, pause, break, die and fence each other.

use super::Pause;
use super::checks::Breach;
use super::state::{Happening, State};
use crate::lane_table::LaneTable;
use crate::link::Sink;
use crate::memory::Memory;
use crate::model::FlowId;
use crate::types::RegionKey;
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

impl State {
    /// An end joins the group of these ends, by their rank in it.
    pub fn join(&mut self, end: Rank, members: &[Rank], lanes: &Arc<LaneTable>) {
        let state = self.at_mut(end);
        state.lanes = Some(lanes.clone());
        state.members = members.to_vec();
    }

    pub fn register(&mut self, rank: Rank, key: RegionKey, memory: &Arc<Memory>) {
        self.at_mut(rank).regions.insert(key, memory.clone());
    }

    pub fn grant(&mut self, rank: Rank, key: RegionKey, peer: Rank, range: Range<u64>) {
        self.at_mut(rank).grants.entry((key, peer)).or_default().push(range);
    }

    /// A region is released. Nothing under way may read or write it.
    pub fn deregister(&mut self, rank: Rank, key: RegionKey) {
        let mut breaches = Vec::new();
        for part in self.parts.values() {
            let open = !part.completed;
            if open && part.from == rank && part.pages.iter().any(|page| page.source == key) {
                breaches.push((Breach::SourceReleased, part.to, part.lane));
            }
            let writes = part.pages.iter().any(|page| page.destination == key);
            if !part.ended && part.to == rank && writes {
                breaches.push((Breach::DestinationReleased, part.from, part.lane));
            }
        }
        let state = self.at_mut(rank);
        let length = state.regions.remove(&key).map_or(0, |memory| memory.len() as u64);
        state.grants.retain(|(granted, _), _| *granted != key);
        state.ledger.forget(key);
        for (breach, peer, lane) in breaches {
            self.violated(breach, rank, peer, Some((rank, key, 0..length)), Some(lane));
        }
    }

    /// What the engine's poll finds.
    pub fn collect(&mut self, rank: Rank, sink: &mut Sink) {
        if self.is_running(rank) {
            if !self.at(rank).lost.is_empty() {
                self.schedule_in(self.loss_grace, Happening::Wake);
            }
            let state = self.at_mut(rank);
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
        self.note(10, [u64::from(pause.rank.0), pause.length.as_nanos() as u64, 0]);
        if pause.network {
            self.stop(pause.rank);
            self.schedule_in(pause.length, Happening::ResumeHost(pause.rank));
        } else {
            for end in self.ends_of(pause.rank) {
                self.at_mut(end).frozen += 1;
            }
            self.schedule_in(pause.length, Happening::Thaw(pause.rank));
        }
        if let Some(silence) = self.faults.silence {
            self.schedule_in(silence, Happening::Silence(pause.rank));
        }
    }

    pub fn thaw(&mut self, rank: Rank) {
        for end in self.ends_of(rank) {
            self.at_mut(end).frozen -= 1;
        }
    }

    /// The peers of a rank that is still paused have waited long enough.
    pub fn silence(&mut self, rank: Rank) {
        for end in self.ends_of(rank) {
            if self.is_alive(end) && self.is_paused(end) {
                self.notify(end, "it has been silent for too long");
            }
        }
    }

    pub fn stop(&mut self, rank: Rank) {
        for end in self.ends_of(rank) {
            self.stop_end(end);
        }
    }

    pub fn stop_end(&mut self, end: Rank) {
        self.at_mut(end).stops += 1;
    }

    pub fn resume(&mut self, rank: Rank) {
        for end in self.ends_of(rank) {
            self.resume_end(end);
        }
    }

    pub fn resume_end(&mut self, rank: Rank) {
        let state = self.at_mut(rank);
        state.stops = state.stops.saturating_sub(1);
        if state.stops == 0 {
            for what in std::mem::take(&mut state.deferred) {
                self.schedule(self.now(), what);
            }
        }
    }

    /// The rank takes no further part. Half of what it had under way still arrives; half of what was
    /// under way to it fails when its peers notice, the rest is drained by their fences.
    pub fn kill(&mut self, rank: Rank) {
        for end in self.ends_of(rank) {
            self.kill_end(end);
        }
    }

    fn kill_end(&mut self, rank: Rank) {
        if std::mem::replace(&mut self.at_mut(rank).dead, true) {
            return;
        }
        self.note(6, [u64::from(rank.0), 0, 0]);
        for id in self.parts_where(|part| part.from == rank && !part.ended) {
            if self.random.chance(0.5) {
                self.vanish(id);
            }
        }
        for id in self.parts_where(|part| part.to == rank && !part.ended) {
            self.vanish(id);
            if self.random.chance(0.5) {
                let delay = self.random.up_to(self.faults.detection);
                self.finish_in(delay, id, Err("the peer does not answer"));
            }
        }
        self.notify(rank, "its process has ended");
    }

    /// Every peer that is still connected notices that `rank` is gone.
    fn notify(&mut self, rank: Rank, why: &'static str) {
        for peer in self.at(rank).members.clone().into_iter().filter(|peer| *peer != rank) {
            self.notify_one(peer, rank, why);
        }
    }

    pub fn notify_one(&mut self, at: Rank, lost: Rank, why: &'static str) {
        let peer = self.at(at);
        if peer.lanes.is_some() && !peer.fenced.contains(&lost) {
            let delay = self.random.up_to(self.faults.detection);
            self.schedule_in(delay, Happening::Notice { at, lost, why });
        }
    }

    /// Breaks the link between two ranks; what is on it fails.
    pub fn cut(&mut self, a: Rank, b: Rank) {
        self.note(7, [u64::from(a.0), u64::from(b.0), 0]);
        self.cuts.insert((a.min(b), a.max(b)));
        let on_it = |state: &State, from: Rank, to: Rank| {
            let hosts = (state.host_of(from), state.host_of(to));
            hosts == (a, b) || hosts == (b, a)
        };
        for id in self.parts_where(|part| on_it(self, part.from, part.to) && !part.ended) {
            self.model.cancel(FlowId(id));
            self.fail(id, "the link is cut");
        }
    }

    pub fn host_of(&self, end: Rank) -> Rank {
        Rank(self.at(end).host)
    }

    pub fn is_cut(&self, a: Rank, b: Rank) -> bool {
        let (a, b) = (self.host_of(a), self.host_of(b));
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// Whether `owner` takes bytes from `from`.
    pub fn accepts(&self, owner: Rank, from: Rank) -> bool {
        let owner = self.at(owner);
        owner.lanes.is_some() && !owner.dead && !owner.fenced.contains(&from)
    }

    /// The engine of `rank` said that its group is poisoned: from here on its memory may go.
    pub fn check_fenced(&mut self, rank: Rank) {
        for peer in self.at(rank).members.clone().into_iter().filter(|peer| *peer != rank) {
            if self.accepts(rank, peer) {
                self.violated(Breach::NotFenced, rank, peer, None, None);
            }
        }
    }

    /// `rank` cuts `peer` off, and hears at once that what it had under way to it has failed.
    pub fn fence(&mut self, rank: Rank, peer: Rank, sink: &mut Sink) {
        if !self.at_mut(rank).fenced.insert(peer) {
            return;
        }
        self.note(8, [u64::from(rank.0), u64::from(peer.0), 0]);
        for id in self.parts_where(|part| part.to == rank && part.from == peer && !part.ended) {
            self.vanish(id);
        }
        for id in self.parts_where(|part| part.from == rank && part.to == peer) {
            self.vanish(id);
            let Some(part) = self.parts.remove(&id) else { continue };
            if !part.completed {
                self.unqueue(rank, peer, part.bytes());
                sink.failed(part.token, "the peer was cut off");
            }
        }
        self.notify_one(peer, rank, "it has closed the connection");
    }

    /// The rank's engine is gone, in peace or not.
    pub fn leave(&mut self, rank: Rank) {
        self.note(9, [u64::from(rank.0), 0, 0]);
        for id in self.parts_where(|part| part.from == rank || part.to == rank) {
            self.vanish(id);
        }
        self.parts.retain(|_, part| part.from != rank);
        let was_joined = self.at_mut(rank).lanes.take().is_some();
        let state = self.at_mut(rank);
        state.regions.clear();
        state.completions.clear();
        if was_joined && self.is_alive(rank) {
            self.notify(rank, "it has closed the connection");
        }
    }
}
