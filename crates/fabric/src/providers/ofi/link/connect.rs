//! Connections: a peer's endpoints, and greetings that confirm the route in both directions.

use super::super::config::provider_error;
use super::super::peer::{OfiPeer, negotiate};
use super::super::slots::SlotUse;
use super::super::wire::{OfiAddress, OfiIntroduction, immediate};
use super::OfiLink;
use super::losses::report_lost;
use crate::clock;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Sink};
use crate::local::WaitLimit;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::Rank;

/// Sleep between two polls while peers connect.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

impl OfiLink {
    /// Makes a peer from the endpoints and signal targets that it sent.
    pub(super) fn add_peer(&mut self, introduction: &Introduction<'_>) -> Result<OfiPeer> {
        let peer = introduction.peer;
        let malformed = |what| {
            let detail = "another wire version, or damaged".into();
            Error::Malformed { peer, what, detail }
        };
        let address = OfiAddress::decode(introduction.address);
        let address = address.ok_or_else(|| malformed("an ofi address"))?;
        let remote = OfiIntroduction::decode(introduction.message);
        let remote = remote.ok_or_else(|| malformed("an ofi introduction"))?;
        let local = self.issued.get(peer.index()).copied().flatten();
        let local = local.ok_or_else(|| provider_error(format!("no introduction to {peer}")))?;
        let count = self.rails.len().min(address.names.len());
        if remote.targets.len() < count {
            return Err(malformed("an ofi introduction"));
        }
        let length = self.address.names[0].len();
        let endpoints = self.rails.iter_mut().zip(&address.names).zip(&remote.targets);
        let endpoints = endpoints.take(count).map(|((rail, name), target)| {
            if name.len() > length.max(256) {
                return Err(malformed("an ofi address"));
            }
            // SAFETY: `route` found provider and address format to be ours; providers check the rest.
            let inserted = unsafe { rail.insert(peer, &padded(name)) };
            inserted.map(|address| (address, *target)).map_err(|why| refusal(peer, why))
        });
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        let (_, max_unconsumed) = negotiate(&self.address, &address);
        Ok(OfiPeer::new(peer, local, remote, max_unconsumed, endpoints))
    }

    /// Greets every peer, and waits until each has greeted and received our greeting: an introduction
    /// from an earlier process with the same rank does not connect.
    pub(super) fn exchange_greetings(
        &mut self,
        peers: &[Introduction<'_>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut to_greet: Vec<Rank> = peers.iter().map(|peer| peer.peer).collect();
        let mut to_confirm = to_greet.clone();
        let mut sink = Sink::default();
        loop {
            to_greet.retain(|&peer| !self.signal_presence(peer, 0, &mut sink));
            to_confirm.retain(|&peer| {
                let state = self.peers.get(peer);
                let is_due = state.is_some_and(|peer| peer.has_greeted(&self.group.lanes));
                !is_due || !self.signal_presence(peer, 0, &mut sink)
            });
            self.poll(clock::now(), &mut sink);
            // A connected peer may already write; the engine takes dirty bits with the first poll.
            sink.raised.drain(..).for_each(|lane| self.group.lanes.set_dirty(lane));
            if let Some((peer, why)) = sink.lost.pop() {
                return Err(refusal(peer, why));
            }
            let lanes = &self.group.lanes;
            let mut connected = self.peers.values();
            let missing = connected.find(|peer| peer.control > 0 || !peer.is_connected(lanes));
            let missing = missing.map(|peer| peer.rank).or_else(|| to_confirm.first().copied());
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

    /// Raises a peer's presence lane; true if the message is posted, or can no longer be.
    pub(super) fn signal_presence(&mut self, peer: Rank, flags: u64, sink: &mut Sink) -> bool {
        let Some(peer) = self.peers.get_mut(peer) else { return true };
        let (slot_use, immediate) =
            (SlotUse::Control { peer: peer.rank.0 }, immediate(peer.remote.presence, None));
        match self.rails[0].signal(peer.endpoints[0], immediate, flags, slot_use) {
            Ok(true) => {
                peer.control += 1;
                true
            }
            Ok(false) => false,
            Err(error) => {
                report_lost(peer, self.rails[0].describe(error), sink);
                true
            }
        }
    }
}

pub fn refusal(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Ofi, detail }
}

/// Name, padded for a provider that reads a whole address in this format.
fn padded(name: &[u8]) -> Vec<u8> {
    let mut padded = name.to_vec();
    padded.resize(name.len().max(256) + 1, 0);
    padded
}
