//! Connecting: a peer's endpoints, and the greetings by which both ends know that they reach each other.

use super::super::peer::{Peer, agreed};
use super::super::rail::Use;
use super::super::unusable;
use super::super::wire::{Address, Introduction as Greeting, immediate};
use super::OfiLink;
use super::events::lose;
use crate::clock;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Sink};
use crate::local::WaitLimit;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::Rank;

/// Sleep between two looks while peers connect.
const LOOK: Duration = Duration::from_micros(100);

impl OfiLink {
    /// Takes in a peer's endpoints, and where its signals are aimed.
    pub(super) fn meet(&mut self, introduction: &Introduction<'_>) -> Result<Peer> {
        let peer = introduction.peer;
        let malformed = |what| {
            let detail = "it is of another wire version or damaged".into();
            Error::Malformed { peer, what, detail }
        };
        let address = Address::decode(introduction.address);
        let address = address.ok_or_else(|| malformed("an ofi address"))?;
        let theirs = Greeting::decode(introduction.message);
        let theirs = theirs.ok_or_else(|| malformed("an ofi introduction"))?;
        let ours = self.issued.get(peer.index()).copied().flatten();
        let ours = ours.ok_or_else(|| unusable(format!("{peer} was not introduced")))?;
        let count = self.rails.len().min(address.names.len());
        if theirs.targets.len() < count {
            return Err(malformed("an ofi introduction"));
        }
        let length = self.address.names[0].len();
        let ends = self.rails.iter_mut().zip(&address.names).zip(&theirs.targets);
        let ends = ends.take(count).map(|((rail, name), target)| {
            if name.len() > length.max(256) {
                return Err(malformed("an ofi address"));
            }
            // SAFETY: `route` found provider and address format to be ours; providers check the rest.
            let inserted = unsafe { rail.insert(peer, &padded(name)) };
            inserted.map(|address| (address, *target)).map_err(|why| refused(peer, why))
        });
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let (_, max_unconsumed) = agreed(&self.address, &address);
        Ok(Peer::new(peer, ours, theirs, max_unconsumed, ends))
    }

    /// Greets every peer, and waits until each has greeted and has our greeting: an introduction of an
    /// earlier incarnation connects to no rank.
    pub(super) fn greet(
        &mut self,
        peers: &[Introduction<'_>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut to_greet: Vec<Rank> = peers.iter().map(|peer| peer.peer).collect();
        let mut to_answer = to_greet.clone();
        let mut sink = Sink::default();
        loop {
            to_greet.retain(|&peer| !self.signal_presence(peer, 0, &mut sink));
            to_answer.retain(|&peer| {
                let state = self.peers[peer.index()].as_ref();
                let is_due = state.is_some_and(|peer| peer.has_greeted(&self.group.lanes));
                !is_due || !self.signal_presence(peer, 0, &mut sink)
            });
            self.poll(clock::now(), &mut sink);
            // A peer that has connected may write already; the engine takes marks with its first poll.
            sink.raised.drain(..).for_each(|lane| self.group.lanes.mark(lane));
            if let Some((peer, why)) = sink.lost.pop() {
                return Err(refused(peer, why));
            }
            let lanes = &self.group.lanes;
            let mut connected = self.peers.iter().flatten();
            let missing = connected.find(|peer| peer.own > 0 || !peer.is_connected(lanes));
            let missing = missing.map(|peer| peer.rank).or_else(|| to_answer.first().copied());
            let Some(missing) = missing else { return Ok(()) };
            match limit.park()? {
                Some(park) => std::thread::sleep(park.min(LOOK)),
                None => {
                    let why = "it has not answered before the deadline";
                    return Err(refused(missing, why.into()));
                }
            }
        }
    }

    /// Raises a peer's lane for our presence; true if that has left, or never will.
    pub(super) fn signal_presence(&mut self, peer: Rank, flags: u64, sink: &mut Sink) -> bool {
        let Some(Some(peer)) = self.peers.get_mut(peer.index()) else { return true };
        let (used, immediate) =
            (Use::Own { peer: peer.rank.0 }, immediate(peer.theirs.presence, None));
        match self.rails[0].signal(peer.ends[0], immediate, flags, used) {
            Ok(true) => {
                peer.own += 1;
                true
            }
            Ok(false) => false,
            Err(error) => {
                lose(peer, self.rails[0].describe(error), sink);
                true
            }
        }
    }
}

pub fn refused(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Ofi, detail }
}

/// A name with room behind it for a provider that reads a whole address of its format.
fn padded(name: &[u8]) -> Vec<u8> {
    let mut padded = name.to_vec();
    padded.resize(name.len().max(256) + 1, 0);
    padded
}
