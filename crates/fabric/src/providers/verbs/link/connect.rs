//! Connections: queue pairs toward the peers, and greetings that confirm them in both directions.
//!
//! A packet for a queue pair that the owner has not connected yet is dropped, and the sender repeats it
//! only after [`super::super::VerbsConfig::ack_timeout`], which outlives network failures. Therefore:
//!
//! 1. The lower rank greets. As long as the greeting has no acknowledgement, it resets the queue pair and
//!    greets again, with the same packet numbers: a greeting that had arrived is a duplicate then.
//! 2. The higher rank answers, and is silent otherwise, so that a reset loses no other packet.
//! 3. The lower rank confirms the answer, and resets no more. If the answer had arrived before a reset, both
//!    ends have received one packet, and the queue pair goes on behind it.

use super::super::super::control_lanes::ControlLanes;
use super::super::chains::ChainUse;
use super::super::objects::provider_error;
use super::super::pair::Path;
use super::super::peer::VerbsPeer;
use super::super::wire::{VerbsAddress, VerbsIntroduction};
use super::losses::report_lost;
use super::{VerbsLink, malformed};
use crate::clock;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Sink};
use crate::local::WaitLimit;
use crate::types::{Lane, ProviderKind, Time};
use std::time::Duration;
use weft_control::Rank;

/// Sleep between two polls while peers connect.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Time before a greeting without acknowledgement is repeated: the first, and the longest after doublings.
const FIRST_REPEAT: Duration = Duration::from_millis(20);
const LONGEST_REPEAT: Duration = Duration::from_millis(640);

/// Greeting that this rank sends first.
struct Greeting {
    peer: Rank,
    /// Next time to repeat the greeting.
    repeat_at: Time,
    interval: Duration,
}

impl VerbsLink {
    /// Connects the queue pairs toward a peer.
    pub(super) fn connect_pairs(&mut self, introduction: &Introduction<'_>) -> Result<()> {
        let rank = introduction.peer;
        let address = VerbsAddress::decode(introduction.address);
        let address = address.ok_or_else(|| malformed(rank, "a verbs address"))?;
        let message = VerbsIntroduction::decode(introduction.message);
        let message = message.ok_or_else(|| malformed(rank, "a verbs introduction"))?;
        let peer = self.peers.get_mut(rank);
        let peer = peer.ok_or_else(|| provider_error(format!("no introduction to {rank}")))?;
        if message.pairs.len() != peer.pairs.len() {
            return Err(malformed(rank, "a verbs introduction"));
        }
        peer.remote = Some(ControlLanes { consumed: message.consumed, presence: message.presence });
        for (pair, &end) in peer.pairs.iter().zip(&message.pairs) {
            let port = address.ports.get(pair.remote_rail);
            let port = *port.ok_or_else(|| malformed(rank, "a verbs address"))?;
            peer.ends.push((port, end));
            let rail = &self.rails[pair.rail];
            let path = Path { nic: &rail.nic, config: &self.config, port, pair: end };
            pair.connect(&path, 0)
                .map_err(|why| refusal(rank, format!("{}: {why}", rail.nic.name())))?;
        }
        Ok(())
    }

    /// Exchanges greetings with all peers.
    pub(super) fn exchange_greetings(
        &mut self,
        peers: &[Introduction<'_>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut sink = Sink::default();
        let mut to_answer = Vec::new();
        let mut greetings = Vec::new();
        for peer in peers.iter().map(|introduction| introduction.peer) {
            to_answer.push(peer);
            if self.group.rank < peer {
                self.signal_presence(peer, &mut sink);
                let repeat_at = clock::now().after(FIRST_REPEAT);
                greetings.push(Greeting { peer, repeat_at, interval: FIRST_REPEAT });
            }
        }
        loop {
            self.poll(clock::now(), &mut sink);
            self.repeat_greetings(&mut greetings, &mut sink)?;
            // The answer to a greeting, or the message that confirms an answer.
            to_answer.retain(|&peer| {
                let has_greeted = self.has_greeted(peer);
                if has_greeted {
                    self.signal_presence(peer, &mut sink);
                }
                !has_greeted
            });
            // A connected peer may already write; the engine takes dirty bits with the first poll.
            sink.raised.drain(..).for_each(|lane| self.group.lanes.set_dirty(lane));
            if let Some((peer, why)) = sink.lost.pop() {
                return Err(refusal(peer, why));
            }
            let is_missing =
                |peer: &&VerbsPeer| peer.has_in_flight() || !peer.is_connected(&self.group.lanes);
            let missing = self.peers.values().find(is_missing).map(|peer| peer.rank);
            let Some(missing) = missing else { return Ok(()) };
            match limit.park()? {
                Some(park) => std::thread::sleep(park.min(POLL_INTERVAL)),
                None => {
                    let why = "no greeting before the deadline";
                    return Err(refusal(missing, why.into()));
                }
            }
        }
    }

    fn has_greeted(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.has_greeted(&self.group.lanes))
    }

    /// Repeats the greetings that are due, until they are acknowledged or answered.
    fn repeat_greetings(&mut self, greetings: &mut Vec<Greeting>, sink: &mut Sink) -> Result<()> {
        let now = clock::now();
        greetings.retain(|it| {
            let peer = self.peers.get(it.peer);
            peer.is_some_and(|peer| peer.has_in_flight() && !peer.has_greeted(&self.group.lanes))
        });
        for greeting in greetings.iter_mut().filter(|it| it.repeat_at <= now) {
            self.reset_pair(greeting.peer)?;
            // Arrivals from before the reset.
            self.poll(now, sink);
            let is_answered = self.has_greeted(greeting.peer);
            self.connect_again(greeting.peer, u32::from(is_answered))?;
            if !is_answered {
                self.signal_presence(greeting.peer, sink);
            }
            greeting.interval = (2 * greeting.interval).min(LONGEST_REPEAT);
            greeting.repeat_at = now.after(greeting.interval);
        }
        Ok(())
    }

    /// Resets the queue pair that greets.
    fn reset_pair(&mut self, rank: Rank) -> Result<()> {
        let Some(peer) = self.peers.get_mut(rank) else { return Ok(()) };
        peer.pairs[0].reset().map_err(|why| refusal(rank, why))
    }

    /// Connects the greeting queue pair after a reset; see [`super::super::pair::Pair::connect`].
    fn connect_again(&mut self, rank: Rank, exchanged: u32) -> Result<()> {
        let Some(peer) = self.peers.get(rank) else { return Ok(()) };
        let (rail, (port, pair)) = (&self.rails[peer.pairs[0].rail], peer.ends[0]);
        let path = Path { nic: &rail.nic, config: &self.config, port, pair };
        let connected = peer.pairs[0].connect(&path, exchanged);
        connected.map_err(|why| refusal(rank, format!("{}: {why}", rail.nic.name())))
    }

    /// Raises a peer's presence lane.
    pub(super) fn signal_presence(&mut self, peer: Rank, sink: &mut Sink) {
        let Some(peer) = self.peers.get_mut(peer) else { return };
        if let Some(lane) = peer.remote.map(|remote| remote.presence) {
            self.template.signal(peer, lane, sink);
        }
    }
}

impl super::post::ChainTemplate {
    /// Posts a control message, for which each pair reserves room; a peer that refuses it is lost.
    pub(super) fn signal(&mut self, peer: &mut VerbsPeer, lane: Lane, sink: &mut Sink) {
        let (pair, immediate) = (&mut peer.pairs[0], lane.immediate());
        if let Err(error) = self.post_signal(pair, immediate, ChainUse::Control) {
            let why = super::super::objects::check("ibv_post_send", error);
            report_lost(peer, why.err().unwrap_or_default(), sink);
        }
    }
}

pub fn refusal(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Verbs, detail }
}

#[cfg(test)]
mod tests {
    use super::super::super::config::VerbsConfig;
    use super::super::super::device::VerbsDevice;
    use super::super::super::{TwinConfig, TwinNic};
    use super::*;
    use crate::lane_table::LaneTable;
    use crate::link::{Membership, WorkRequest};
    use crate::types::{Generation, TrafficClass};
    use std::sync::Arc;

    fn link(rank: u32) -> (VerbsLink, Arc<TwinNic>) {
        let twin = TwinNic::new(TwinConfig::default());
        // A lost packet is not repeated within the test.
        let config = VerbsConfig { ack_timeout: 31, ..VerbsConfig::default() };
        let device = VerbsDevice::over(config, std::slice::from_ref(&twin)).unwrap();
        let generation = Generation(0);
        let lanes = Arc::new(LaneTable::new(64, generation).unwrap());
        let group = Membership { rank: Rank(rank), size: 2, generation, lanes };
        let VerbsDevice { library, config, nics, gpus, .. } = &device;
        (VerbsLink::open(library, config, nics, gpus, group).unwrap(), twin)
    }

    /// The answer arrives after the last poll and before the reset.
    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_queue_pair_goes_on_behind_an_answer_that_arrived_before_its_reset() {
        let ((mut lower, _one), (mut higher, _two)) = (link(0), link(1));
        let (here, there) = (lower.address(), higher.address());
        let to_higher = lower.introduce(Rank(1), &there).unwrap();
        let to_lower = higher.introduce(Rank(0), &here).unwrap();
        let peer = Introduction { peer: Rank(1), address: &there, message: &to_lower };
        lower.connect_pairs(&peer).unwrap();
        let peer = Introduction { peer: Rank(0), address: &here, message: &to_higher };
        higher.connect_pairs(&peer).unwrap();
        let mut sink = Sink::default();
        lower.signal_presence(Rank(1), &mut sink);
        higher.poll(clock::now(), &mut sink);
        assert!(higher.has_greeted(Rank(0)));
        higher.signal_presence(Rank(0), &mut sink);

        let due = Greeting { peer: Rank(1), repeat_at: Time(0), interval: FIRST_REPEAT };
        lower.repeat_greetings(&mut vec![due], &mut sink).unwrap();
        assert!(lower.has_greeted(Rank(1)), "the answer is lost");
        lower.signal_presence(Rank(1), &mut sink);
        let lanes = [&lower, &higher].map(|link| link.group.lanes.clone());
        let lane = lanes[0].issue(Rank(1), 2).unwrap();
        for round in 1..4 {
            let work = WorkRequest {
                token: round,
                peer: Rank(0),
                lane,
                credits: None,
                piggyback: None,
                class: TrafficClass::Latency,
                pages: &[],
            };
            higher.post(&work, &mut sink).unwrap();
            for _ in 0..10 {
                lower.poll(clock::now(), &mut sink);
                higher.poll(clock::now(), &mut sink);
            }
            assert_eq!(lanes[0].value(lane.id()), round);
        }
        assert!(higher.peers.get(Rank(0)).unwrap().is_connected(&lanes[1]));
        assert!(sink.lost.is_empty() && sink.failures.is_empty(), "{sink:?}");
        assert_eq!(sink.completed, [1, 2, 3]);
    }
}
