//! Driver that writes random pages to every peer in rounds and checks every received byte.

use weft_fabric::providers::sim::Cluster;
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterId, Driver, Error, Event, Page, PartRule, Poison, Rank, Region, RemoteRegion, Requests,
    Time,
};
use weft_scenarios::Failure;

const SLOT: u64 = 256;

/// Rank traffic failure.
#[derive(Debug)]
#[allow(dead_code, reason = "the fields of the variants are printed by a failed test")]
pub enum TrafficError {
    Fabric(Error),
    Poisoned(Poison),
    Bytes { from: Rank, round: u64 },
    TooMany { from: Rank, round: u64 },
}

impl From<Error> for TrafficError {
    fn from(error: Error) -> TrafficError {
        match error {
            Error::Poisoned(poison) => TrafficError::Poisoned(poison),
            error => TrafficError::Fabric(error),
        }
    }
}

impl Failure for TrafficError {
    fn poison(&self) -> Option<&Poison> {
        match self {
            TrafficError::Poisoned(poison) => Some(poison),
            _ => None,
        }
    }
}

/// One rank's traffic with one peer.
#[derive(Clone, Default)]
struct Peer {
    sent: u64,
    credits: u64,
    writing: bool,
    received: u64,
    raises: u64,
}

pub struct Traffic {
    seed: u64,
    rank: Rank,
    rounds: u64,
    namespace: u16,
    rule: PartRule,
    counter: CounterId,
    source: Region,
    inbox: Region,
    remote: Vec<Option<RemoteRegion>>,
    peers: Vec<Peer>,
    /// Inbox when the group was poisoned: unchanged from then on.
    left_behind: Option<Vec<u8>>,
}

impl Traffic {
    /// Ranges that `from` writes into a slot at `to` in a round: a pure function, computed by both.
    fn plan(&self, from: Rank, to: Rank, round: u64) -> Vec<(u64, u64)> {
        let name = (u64::from(from.0) << 40) | (u64::from(to.0) << 20) | round;
        let mut random = SplitMix64::new(self.seed.wrapping_mul(31) ^ name);
        let mut pages = Vec::new();
        let mut at = 0;
        for _ in 0..random.below(7) {
            let begin = at + random.below(20);
            let end = (begin + random.below(80)).min(SLOT);
            if begin >= end {
                break;
            }
            pages.push((begin, end - begin));
            at = end;
        }
        random.shuffle(&mut pages);
        pages
    }

    fn byte(from: Rank, to: Rank, round: u64, offset: u64) -> u8 {
        (u64::from(from.0) * 7 + u64::from(to.0) * 13 + round * 29 + offset * 3) as u8
    }

    fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.rank;
        (0..self.peers.len() as u32).map(Rank).filter(move |rank| *rank != me)
    }

    fn receive(&mut self, from: Rank, requests: &mut Requests) -> Result<(), TrafficError> {
        let round = self.peers[from.0 as usize].received;
        let seen = self.peers[from.0 as usize].raises;
        if round == self.rounds || seen == 0 {
            return Ok(());
        }
        let plan = self.plan(from, self.rank, round);
        let expected = self.rule.count(plan.iter().map(|(_, length)| *length));
        if seen > expected {
            return Err(TrafficError::TooMany { from, round });
        }
        if seen < expected {
            return Ok(());
        }
        for (begin, length) in plan {
            let mut bytes = vec![0; length as usize];
            let slot = u64::from(from.0) * SLOT;
            self.inbox.memory().copy_out((slot + begin) as usize, &mut bytes);
            let right = |(i, b): (usize, &u8)| {
                *b == Traffic::byte(from, self.rank, round, begin + i as u64)
            };
            if !bytes.iter().enumerate().all(right) {
                return Err(TrafficError::Bytes { from, round });
            }
        }
        let peer = &mut self.peers[from.0 as usize];
        (peer.received, peer.raises) = (round + 1, 0);
        requests.credit(from, self.counter);
        Ok(())
    }

    fn send(&mut self, to: Rank, requests: &mut Requests) {
        let peer = &self.peers[to.0 as usize];
        let round = peer.sent;
        if round == self.rounds || peer.writing || peer.credits < round {
            return;
        }
        let Some(remote) = self.remote[to.0 as usize] else { return };
        let slot = u64::from(to.0) * SLOT;
        let plan = self.plan(self.rank, to, round);
        for &(begin, length) in &plan {
            let bytes: Vec<u8> = (begin..begin + length)
                .map(|offset| Traffic::byte(self.rank, to, round, offset))
                .collect();
            self.source.memory().copy_in((slot + begin) as usize, &bytes);
        }
        let pages = plan.into_iter().map(|(begin, length)| Page {
            source: self.source.key(),
            source_offset: slot + begin,
            destination: remote.key,
            destination_offset: u64::from(self.rank.0) * SLOT + begin,
            length,
        });
        let namespace = u64::from(self.namespace) << Event::NAMESPACE_SHIFT;
        requests.write(to, self.counter, round, pages, namespace | u64::from(to.0));
        let peer = &mut self.peers[to.0 as usize];
        (peer.sent, peer.writing) = (round + 1, true);
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    fn inbox(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.inbox.memory().len()];
        self.inbox.memory().copy_out(0, &mut bytes);
        bytes
    }

    /// True if a peer wrote to this rank after the engine had reported the poison.
    pub fn was_written_after_poison(&self) -> bool {
        self.left_behind.as_ref().is_some_and(|bytes| *bytes != self.inbox())
    }

    pub fn is_done(&self) -> bool {
        self.others().all(|rank| {
            let peer = &self.peers[rank.0 as usize];
            peer.sent == self.rounds && peer.received == self.rounds && !peer.writing
        })
    }
}

impl Driver for Traffic {
    type Error = TrafficError;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        std::slice::from_ref(&self.counter)
    }

    fn poll(
        &mut self,
        _now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<(), TrafficError> {
        for event in events {
            match event {
                Event::Raised { peer, count, .. } => {
                    self.peers[peer.0 as usize].raises = *count;
                }
                Event::Credited { peer, credits, .. } => {
                    self.peers[peer.0 as usize].credits = *credits;
                }
                Event::Completed { tag } => self.peers[*tag as u32 as usize].writing = false,
                Event::Poisoned(poison) => {
                    self.left_behind = Some(self.inbox());
                    return Err(TrafficError::Poisoned(poison.clone()));
                }
            }
        }
        for peer in self.others() {
            self.receive(peer, requests)?;
            self.send(peer, requests);
        }
        Ok(())
    }
}

/// Connected traffic on every rank.
pub fn traffic(cluster: &mut Cluster, rounds: u64) -> Result<Vec<Traffic>, Error> {
    let counter = cluster.counter()?;
    let size = cluster.ranks().count() as u64;
    let mut sources = Vec::new();
    let mut inboxes = Vec::new();
    for rank in cluster.ranks() {
        sources.push(cluster.engine(rank).alloc((SLOT * size) as usize)?);
        inboxes.push(cluster.engine(rank).alloc((SLOT * size) as usize)?);
    }
    let slot = |peer: Rank| u64::from(peer.0) * SLOT..u64::from(peer.0 + 1) * SLOT;
    let remote = cluster
        .share(|owner, peer| vec![(inboxes[owner.0 as usize].clone(), slot(peer))], &[counter])?;
    let mut drivers = Vec::new();
    for rank in cluster.ranks() {
        let at = rank.0 as usize;
        let peer = Rank((rank.0 + 1) % size as u32);
        let rule = cluster.engine(rank).route(peer).map_or(PartRule::WHOLE, |route| route.parts);
        drivers.push(Traffic {
            seed: cluster.world().seed(),
            rank,
            rounds,
            namespace: cluster.engine(rank).namespace(),
            rule,
            counter,
            source: sources[at].clone(),
            inbox: inboxes[at].clone(),
            remote: remote[at].iter().map(|regions| regions.first().copied()).collect(),
            peers: vec![Peer::default(); size as usize],
            left_behind: None,
        });
    }
    Ok(drivers)
}
