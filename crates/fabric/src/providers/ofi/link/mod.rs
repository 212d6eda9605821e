//! One group's use of the device: routes, regions, posts.
//!
//! - `connect.rs`: peers' endpoints, and greetings
//! - `events.rs`: arrivals and the bound on those that lie unconsumed, ends, losses
//! - `start.rs`, `ranges.rs`: one part handed to its NIC, and its ranges
//! - `nap.rs`: what the link sleeps on

use super::peer::{Peer, Reports, State, agreed};
use super::rail::{Event, MAX_RANGES, Rail, Sizes};
use super::region::{Keys, Region, is_reached};
use super::wire::{Address, Entry, Introduction as Greeting};
use super::{Domain, OfiConfig, realm, sys, unusable};
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{Class, ProviderKind, RegionKey, Time};
use events::{LAST_WORDS, is_loss, lose};
use nap::Nap;
use start::{Refusal, Start};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

mod connect;
mod events;
mod nap;
mod ranges;
mod start;

/// Entries of a completion queue, whatever the number of peers.
const QUEUE_BUDGET: usize = 32_768;
/// Messages of the link's own that may be under way on each NIC.
const OWN: usize = 64;
/// Arrivals of a peer beside those that are agreed on: three reports, two greetings, a farewell.
const BESIDE: usize = 6;
/// Bulk parts under way toward one peer, behind which a latency-critical part may have to wait.
const MAX_BULK: u32 = 16;
/// The most bytes of a write over shm that is copied inside of the call: they fit into a command of its queues
/// (192 bytes in libfabric 2.5), so that nothing of it is left with the sender.
const MAX_INJECTED: usize = 128;

pub struct OfiLink {
    // Endpoints go before the memory that they read and write.
    rails: Vec<Rail>,
    regions: Vec<Option<Arc<Region>>>,
    /// Regions that parts toward fenced peers may still read.
    kept: Vec<Arc<Region>>,
    domains: Vec<Arc<Domain>>,
    keys: Keys,
    group: Membership,
    address: Address,
    /// By rank, from the introduction on.
    issued: Vec<Option<Reports>>,
    /// By rank; `None` where another provider has the route.
    peers: Vec<Option<Peer>>,
    /// Ranks with reports of consumption that have not left.
    due: Vec<u32>,
    /// Ranks whose farewell has arrived, and the first poll after that.
    leaving: Vec<(u32, Option<Time>)>,
    /// Peers that are connected and not fenced.
    open: usize,
    /// Flags of the message with which the link leaves: it ends once all before it has been delivered.
    farewell: u64,
    /// The most bytes of a write that has ended when its post returns; `None`: no write has.
    max_injected: Option<u64>,
    /// The most parts under way toward one peer.
    most_parts: u32,
    nap: Nap,
}

impl OfiLink {
    pub fn open(config: &OfiConfig, domains: &[Arc<Domain>], group: Membership) -> Result<OfiLink> {
        let peers = (group.size as usize - 1).max(1);
        let infos = || domains.iter().map(|domain| domain.info());
        let parts = config.queue_parts as usize;
        let parts = infos().map(|info| info.transmit_size()).fold(parts, usize::min).max(1);
        let budget = QUEUE_BUDGET.saturating_sub(parts + OWN);
        let receives = infos().filter(|info| info.consumes_receives());
        let budget = receives.map(|info| info.receive_size()).fold(budget, usize::min);
        let room = (budget / peers).saturating_sub(BESIDE);
        if room < 4 {
            let size = group.size;
            return Err(unusable(format!(
                "{size} ranks: its completion queues hold too few arrivals"
            )));
        }
        let max_unconsumed = room.min(config.max_unconsumed as usize) as u32;
        let arrivals = peers * (max_unconsumed as usize + BESIDE);
        let mut keys = Keys::new().map_err(unusable)?;
        let is_efa = config.provider.is_efa();
        let sizes = Sizes { parts, own: OWN, arrivals, peers };
        let rails = domains.iter().map(|domain| {
            let key = keys.next(domain);
            let mut rail = Rail::open(domain, sizes, key, is_efa)?;
            if config.checks_senders && domain.info().names_senders() {
                rail.name_senders()?;
            }
            Ok(rail)
        });
        let rails = rails.collect::<Result<Vec<_>, String>>().map_err(unusable)?;
        let names = rails.iter().map(Rail::name).collect::<Result<_, String>>();
        let first = domains.first().ok_or_else(|| unusable("it has no NIC"))?.info();
        let address = Address {
            provider: config.provider.name().into(),
            format: first.address_format(),
            realm: realm(config),
            process: if config.provider.is_of_one_host() { std::process::id().into() } else { 0 },
            max_part_bytes: infos()
                .map(|it| it.max_message())
                .fold(config.max_part_bytes, u64::min),
            max_pages: infos().map(|it| it.max_ranges()).fold(MAX_RANGES as u32, u32::min),
            stripe_from: config.stripe_from,
            max_unconsumed,
            immediate_bytes: infos().map(|it| it.immediate_bytes() as u32).min().unwrap_or(0),
            names: names.map_err(unusable)?,
        };
        let nap = Nap::new(rails.iter().filter_map(Rail::descriptor).collect(), rails.len())?;
        Ok(OfiLink {
            rails,
            regions: Vec::new(),
            kept: Vec::new(),
            domains: domains.to_vec(),
            keys,
            issued: vec![None; group.size as usize],
            peers: (0..group.size).map(|_| None).collect(),
            group,
            address,
            due: Vec::new(),
            leaving: Vec::new(),
            open: 0,
            // What shm has taken lies in the receiver's memory; an answer would be written to memory of
            // a sender that is gone.
            farewell: if config.provider.is_of_one_host() { 0 } else { sys::FI_DELIVERY_COMPLETE },
            max_injected: max_injected(config, domains),
            most_parts: most_parts(parts * domains.len(), peers),
            nap,
        })
    }
}

/// The most parts under way toward one of `peers`, of the places for them all. libfabric 2.x's shm keeps what
/// a peer has not taken in the sender's own queue: a peer that does not poll would take all of it.
fn most_parts(places: usize, peers: usize) -> u32 {
    let left_to_others = if peers > 1 { places / 4 } else { 0 };
    (places - left_to_others).max(1) as u32
}

/// See [`OfiLink::max_injected`]. Other providers than shm keep a copy, which their poll has to send.
fn max_injected(config: &OfiConfig, domains: &[Arc<Domain>]) -> Option<u64> {
    let sizes = domains.iter().map(|domain| domain.info().inject_size());
    let size = sizes.fold(MAX_INJECTED, usize::min) as u64;
    config.provider.is_of_one_host().then_some(size)
}

impl Link for OfiLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Ofi
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let other = Address::decode(theirs)?;
        let (parts, max_unconsumed) = agreed(&self.address, &other);
        let max_ride = self.address.max_ride(&other);
        let rule = RouteRule { parts, ordered: false, inline: false, max_unconsumed, max_ride };
        self.address.reaches(&other).then_some(rule)
    }

    fn describe(&self, address: &[u8]) -> String {
        Address::decode(address).map_or_else(|| "ofi".into(), |it| format!("ofi ({})", it.provider))
    }

    fn introduce(&mut self, peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        let reports = Reports::issue(&self.group.lanes, peer)?;
        self.issued[peer.index()] = Some(reports);
        let targets = self.rails.iter().map(Rail::signal_target).collect();
        let Reports { consumed, presence } = reports;
        Ok(Greeting { consumed, presence, targets }.encode())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        for introduction in peers {
            let peer = self.meet(introduction)?;
            self.peers[introduction.peer.index()] = Some(peer);
            self.open += 1;
        }
        self.greet(peers, limit)
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Ofi, key, detail };
        if !is_reached(memory.place(), &self.domains) {
            let place = memory.place();
            return Err(refuse(format!(
                "its memory is {place:?}, which this provider of libfabric cannot register"
            )));
        }
        let region = Region::new(memory, &self.domains, &mut self.keys).map_err(refuse)?;
        let slot = key.0 as usize;
        if slot >= self.regions.len() {
            self.regions.resize(slot + 1, None);
        }
        self.regions[slot] = Some(Arc::new(region));
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, _peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let region = self.regions.get_mut(key.0 as usize).and_then(Option::as_mut);
        // Shared only once its group is ending.
        let region = region.and_then(Arc::get_mut);
        let unknown = || Error::Unknown { what: "region", number: key.0.into() };
        let region = region.ok_or_else(unknown)?;
        let targets = region.targets(&self.domains, &mut self.keys);
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Ofi, key, detail };
        let targets = targets.map_err(refuse)?;
        Ok(Entry { begin: range.start, end: range.end, targets }.encode())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let entry = Entry::decode(entry).filter(|entry| entry.end <= length);
        let state = self.peers.get_mut(peer.index()).and_then(Option::as_mut);
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        let state = state.ok_or_else(unknown)?;
        entry.and_then(|entry| state.import(key, entry)).ok_or_else(|| Error::Malformed {
            peer,
            what: "an ofi grant",
            detail: format!("it is not a range within {length} bytes, with a key for each NIC"),
        })
    }

    fn deregister(&mut self, key: RegionKey) {
        if let Some(region) = self.regions.get_mut(key.0 as usize) {
            *region = None;
        }
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        if let Some(Some(peer)) = self.peers.get_mut(peer.index()) {
            peer.forget(key);
        }
    }

    fn post(&mut self, work: &Work<'_>, sink: &mut Sink) -> Result<Posted, String> {
        let OfiLink { rails, regions, peers, group, max_injected, most_parts, .. } = self;
        let peer = peers.get_mut(work.peer.index()).and_then(Option::as_mut);
        let peer = peer.ok_or("ofi has no connection to it")?;
        if peer.state != State::Open {
            return post_closed(peer, work.token);
        }
        let is_bulk = work.class == Class::Bulk;
        if !peer.may_send(&group.lanes)
            || peer.parts >= *most_parts
            || is_bulk && peer.bulk >= MAX_BULK
        {
            return Ok(Posted::Full);
        }
        let index = peer.next_rail();
        let rail = &mut rails[index];
        if !rail.has_room() {
            return Ok(Posted::Full);
        }
        let mut start = Start { work, rail, peer, index, max_injected: *max_injected };
        match start.part(regions) {
            Ok((true, posted)) => {
                peer.outgoing.send();
                if posted == Posted::InFlight {
                    peer.parts += 1;
                    peer.bulk += u32::from(is_bulk);
                }
                Ok(posted)
            }
            Ok((false, _)) => Ok(Posted::Full),
            Err(Refusal::Provider(error)) if is_loss(error) => {
                peer.stuck.push(work.token);
                lose(peer, rail.describe(error), sink);
                Ok(Posted::InFlight)
            }
            Err(Refusal::Provider(error)) => Err(rail.describe(error)),
            Err(Refusal::Page(why)) => Err(why),
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        let OfiLink { rails, peers, due, leaving, group, nap, .. } = self;
        for rail in rails.iter_mut() {
            rail.poll(|event| {
                nap.note_event();
                match event {
                    Event::Arrived(immediate, sender) => {
                        Self::arrived(group, peers, (due, leaving), immediate, sender, sink);
                    }
                    Event::Ended(used) => Self::ended(peers, used, sink),
                    Event::Failed(used, error, why) => Self::failed(peers, used, error, why, sink),
                }
            });
        }
        if !self.due.is_empty() {
            self.report(sink);
        }
        if !self.leaving.is_empty() {
            self.take_leave(now, sink);
        }
        if !self.kept.is_empty() && !self.rails.iter().any(Rail::has_abandoned) {
            self.kept.clear();
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        let OfiLink { nap, rails, due, .. } = self;
        let is_open = rails.iter().any(|rail| !rail.is_closed());
        due.is_empty() && (!is_open || nap.arm(rails))
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.nap.descriptors()
    }

    fn next_deadline(&self) -> Option<Time> {
        let end =
            |(_, since): &(u32, Option<Time>)| since.map_or(Time(0), |at| at.after(LAST_WORDS));
        self.leaving.iter().map(end).min()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let Some(Some(peer)) = self.peers.get_mut(peer.index()) else { return };
        if peer.state == State::Fenced {
            return;
        }
        peer.state = State::Fenced;
        let why = "the peer was cut off before its end was known";
        peer.stuck.drain(..).for_each(|token| sink.failed(token, why));
        let mut any = false;
        for rail in &mut self.rails {
            any |= rail.abandon(peer.rank.0, |token| sink.failed(token, why));
        }
        if any {
            // The provider may read their sources until it ends them or the endpoint is closed.
            self.kept.extend(self.regions.iter().flatten().cloned());
        }
        self.open -= 1;
        self.close_if_alone();
    }
}

/// A part toward a peer that is lost waits for its fence; toward one that was fenced it fails.
#[cold]
fn post_closed(peer: &mut Peer, token: u64) -> Result<Posted, String> {
    if peer.state == State::Fenced {
        return Err("it was cut off".into());
    }
    peer.stuck.push(token);
    Ok(Posted::InFlight)
}
