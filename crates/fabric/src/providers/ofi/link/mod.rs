//! One group's use of the device: routes, regions, posts.
//!
//! - `connect.rs`: peers' endpoints, and greetings
//! - `events.rs`: arrivals and the bound on unconsumed ones, completions, losses
//! - `losses.rs`: reports a lost peer
//! - `page.rs`, `post.rs`: posts a page from a prepared message, and any part
//! - `ranges.rs`: a part's ranges
//! - `sleep.rs`: a sleeping link's descriptors or timer

use super::super::control_lanes::ControlLanes;
use super::super::gpu_memory::{FlushedGpus, Gpus};
use super::super::granted_regions::GrantEntry;
use super::super::presence::{Departures, PeerState};
use super::config::{OfiConfig, provider_error, realm};
use super::objects::Domain;
use super::peer::{OfiPeer, negotiate};
use super::post_limits::PostLimits;
use super::rail::{MAX_RANGES, QueueSizes, Rail};
use super::region::{KeyGenerator, RegisteredRegion, SourceCache, can_register};
use super::sys;
use super::wire::{OfiAddress, OfiIntroduction};
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{
    Introduction, Link, Membership, PostStatus, RouteRule, Scatter, ScatterStatus, Sink,
    WorkRequest, described,
};
use crate::local::WaitLimit;
use crate::memory::{Memory, MemoryKind};
use crate::types::{ProviderKind, RegionKey, Time, TrafficClass};
use losses::{is_loss, report_lost};
use page::{PageLink, PageTemplate, RunEnd};
use post::{PartPost, PostError};
use sleep::SleepState;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

mod connect;
mod events;
mod losses;
mod page;
mod post;
mod ranges;
mod sleep;
#[cfg(test)]
mod tests;

/// Completion queue entries, for any number of peers.
const QUEUE_BUDGET: usize = 32_768;
/// Control messages in flight on each NIC.
const MAX_CONTROL: usize = 64;
/// Control arrivals from a peer: three reports, two greetings, a farewell.
const CONTROL_ARRIVALS: usize = 6;
pub struct OfiLink {
    // Drop order: endpoints before the memory that they access.
    rails: Vec<Rail>,
    regions: RegionMap<Arc<RegisteredRegion>>,
    /// Regions that parts toward fenced peers may still read.
    kept: Vec<Arc<RegisteredRegion>>,
    domains: Vec<Arc<Domain>>,
    gpus: Arc<dyn Gpus>,
    sources: SourceCache,
    /// GPUs whose memory peers may write.
    flushed_gpus: FlushedGpus,
    keys: KeyGenerator,
    group: Membership,
    address: OfiAddress,
    /// Control lanes by rank, from the introduction on.
    issued: Vec<Option<ControlLanes>>,
    /// By rank; `None` where another provider has the route.
    peers: PeerMap<OfiPeer>,
    /// Ranks with unsent consumption reports.
    reports_due: Vec<u32>,
    departures: Departures,
    /// Connected, unfenced peers.
    open: usize,
    /// Farewell flags: it completes after all earlier messages are delivered.
    farewell: u64,
    limits: PostLimits,
    /// Message for the next page in a scatter.
    page: PageTemplate,
    sleep: SleepState,
}

impl OfiLink {
    pub fn open(
        config: &OfiConfig,
        domains: &[Arc<Domain>],
        (gpus, sources): (&Arc<dyn Gpus>, &SourceCache),
        group: Membership,
    ) -> Result<OfiLink> {
        let peers = (group.size as usize - 1).max(1);
        let infos = || domains.iter().map(|domain| domain.info());
        let parts = config.queue_parts as usize;
        let parts = infos().map(|info| info.transmit_size()).fold(parts, usize::min).max(1);
        let budget = QUEUE_BUDGET.saturating_sub(parts + MAX_CONTROL);
        let receives = infos().filter(|info| info.consumes_receives());
        let budget = receives.map(|info| info.receive_size()).fold(budget, usize::min);
        let room = (budget / peers).saturating_sub(CONTROL_ARRIVALS);
        if room < 4 {
            let size = group.size;
            return Err(provider_error(format!(
                "{size} ranks: the completion queues have too few entries for so large a group"
            )));
        }
        let max_unconsumed = room.min(config.max_unconsumed as usize) as u32;
        let arrivals = peers * (max_unconsumed as usize + CONTROL_ARRIVALS);
        let mut keys = KeyGenerator::new().map_err(provider_error)?;
        let is_efa = config.provider.is_efa();
        let sizes = QueueSizes { parts, control: MAX_CONTROL, arrivals, peers };
        let rails = domains.iter().map(|domain| {
            let key = keys.next(domain);
            let mut rail = Rail::open(domain, sizes, key, is_efa)?;
            if config.checks_senders && domain.info().names_senders() {
                rail.enable_senders()?;
            }
            Ok(rail)
        });
        let rails = rails.collect::<Result<Vec<_>, String>>().map_err(provider_error)?;
        let names = rails.iter().map(Rail::name).collect::<Result<_, String>>();
        let first = domains.first().ok_or_else(|| provider_error("no NIC"))?.info();
        let address = OfiAddress {
            provider: config.provider.name().into(),
            format: first.address_format(),
            realm: realm(config),
            process: if config.provider.is_single_host() { std::process::id().into() } else { 0 },
            max_part_bytes: infos()
                .map(|it| it.max_message())
                .fold(config.max_part_bytes, u64::min),
            max_pages: infos().map(|it| it.max_ranges()).fold(MAX_RANGES as u32, u32::min),
            stripe_from: config.stripe_from,
            max_unconsumed,
            immediate_bytes: infos().map(|it| it.immediate_bytes() as u32).min().unwrap_or(0),
            names: names.map_err(provider_error)?,
        };
        let sleep =
            SleepState::new(rails.iter().filter_map(Rail::descriptor).collect(), rails.len())?;
        Ok(OfiLink {
            rails,
            regions: RegionMap::default(),
            kept: Vec::new(),
            domains: domains.to_vec(),
            gpus: gpus.clone(),
            sources: sources.clone(),
            flushed_gpus: FlushedGpus::default(),
            keys,
            issued: vec![None; group.size as usize],
            peers: PeerMap::default(),
            group,
            address,
            reports_due: Vec::new(),
            departures: Departures::default(),
            open: 0,
            // Parts that shm accepted are in the receiver's memory; a response would be written into the
            // memory of a sender that has left.
            farewell: if config.provider.is_single_host() { 0 } else { sys::FI_DELIVERY_COMPLETE },
            limits: PostLimits::new(config, domains, parts * domains.len(), peers),
            page: PageTemplate::new(),
            sleep,
        })
    }
}

impl Link for OfiLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Ofi
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn route(&self, remote: &[u8]) -> Option<RouteRule> {
        let other = OfiAddress::decode(remote)?;
        let (parts, max_unconsumed) = negotiate(&self.address, &other);
        let max_piggyback = self.address.max_piggyback(&other);
        let rule = RouteRule {
            parts,
            ordered: false,
            max_unconsumed,
            max_piggyback,
            ..RouteRule::DEFERRED
        };
        self.address.reaches(&other).then_some(rule)
    }

    fn describe(&self, address: &[u8]) -> String {
        OfiAddress::decode(address).map_or_else(
            || described(ProviderKind::Ofi, address),
            |it| format!("ofi ({})", it.provider),
        )
    }

    fn introduce(&mut self, peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        let reports = ControlLanes::issue(&self.group.lanes, peer)?;
        self.issued[peer.index()] = Some(reports);
        let targets = self.rails.iter().map(Rail::signal_target).collect();
        let ControlLanes { consumed, presence } = reports;
        Ok(OfiIntroduction { consumed, presence, targets }.encode())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        for introduction in peers {
            let peer = self.add_peer(introduction)?;
            self.peers.insert(introduction.peer, peer);
            self.open += 1;
        }
        self.exchange_greetings(peers, limit)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        can_register(MemoryKind::Device(device), &self.domains, &*self.gpus).then_some(())?;
        let memory = self.gpus.allocate(device, length)?;
        Some(memory.map_err(|detail| Error::Provider { provider: ProviderKind::Ofi, detail }))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Ofi, key, detail };
        if !can_register(memory.kind(), &self.domains, &*self.gpus) {
            let place = memory.kind();
            return Err(refuse(format!(
                "its memory is {place:?}, which this provider of libfabric cannot register"
            )));
        }
        let OfiLink { domains, sources, keys, gpus, .. } = self;
        let region = RegisteredRegion::new(memory, domains, (sources, keys), &**gpus, refuse)?;
        self.regions.insert(key, Arc::new(region));
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, _peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let region = self.regions.get_mut(key);
        // Shared only while the group ends.
        let region = region.and_then(Arc::get_mut);
        let unknown = || Error::Unknown { what: "region", number: key.0.into() };
        let region = region.ok_or_else(unknown)?;
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Ofi, key, detail };
        if let Some(gpu) = region.gpu() {
            self.flushed_gpus.add(&*self.gpus, gpu).map_err(refuse)?;
        }
        let targets = region.targets(&self.domains, &mut self.keys);
        let targets = targets.map_err(refuse)?;
        Ok(GrantEntry { begin: range.start, end: range.end, targets }.encode())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let entry = GrantEntry::decode(entry).filter(|entry| entry.end <= length);
        let state = self.peers.get_mut(peer);
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        let state = state.ok_or_else(unknown)?;
        entry.and_then(|entry| state.import(key, entry)).ok_or_else(|| Error::Malformed {
            peer,
            what: "an ofi grant",
            detail: format!("expected a range within {length} bytes and a key for each NIC"),
        })
    }

    fn deregister(&mut self, key: RegionKey) {
        let region = self.regions.remove(key);
        if region.is_some_and(|region| region.granted_gpu().is_some()) {
            let OfiLink { regions, flushed_gpus, .. } = self;
            let is_target = |gpu| regions.values().any(|it| it.granted_gpu() == Some(gpu));
            flushed_gpus.retain(is_target);
        }
    }

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.remove_remote(key);
        }
    }

    fn post(&mut self, work: &WorkRequest<'_>, sink: &mut Sink) -> Result<PostStatus, String> {
        let OfiLink { rails, regions, peers, group, limits, .. } = self;
        let peer = peers.get_mut(work.peer);
        let peer = peer.ok_or("ofi has no connection to it")?;
        if peer.state != PeerState::Open {
            return peer.state.post_closed(&mut peer.parked, work.token);
        }
        let is_bulk = work.class == TrafficClass::Bulk;
        if !peer.may_post(limits.max_parts, is_bulk, &group.lanes) {
            return Ok(PostStatus::Full);
        }
        let index = peer.next_rail();
        let rail = &mut rails[index];
        if !rail.has_room() {
            return Ok(PostStatus::Full);
        }
        let mut post = PartPost { work, rail, peer, index, limits: *limits };
        match post.part(regions) {
            Ok((true, posted)) => {
                peer.posted(posted, is_bulk);
                Ok(posted)
            }
            Ok((false, _)) => Ok(PostStatus::Full),
            Err(PostError::Provider(error)) => post_failed(peer, rail, work.token, error, sink),
            Err(PostError::Page(why)) => Err(why),
        }
    }

    fn post_scatter(&mut self, scatter: &Scatter<'_>, sink: &mut Sink) -> ScatterStatus {
        let mut posted = ScatterStatus::default();
        self.page.discard_source();
        loop {
            let OfiLink { rails, regions, peers, group, limits, page, .. } = self;
            let (lanes, limits) = (&*group.lanes, *limits);
            let mut link = PageLink { rails, peers, regions, lanes, limits };
            let end = page.post_run(scatter, &mut link, &mut posted);
            let Some(part) = scatter.parts.get(posted.taken) else { return posted };
            let outcome = match (end, peers.get_mut(part.peer)) {
                (RunEnd::Full, _) => return posted,
                (RunEnd::Failed(error, rail), Some(peer)) => {
                    post_failed(peer, &rails[rail], scatter.token(part), error, sink)
                }
                _ => self.post(&scatter.work(part), sink),
            };
            if !posted.add(outcome) {
                return posted;
            }
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        for index in 0..self.rails.len() {
            self.poll_rail(index, sink);
        }
        if !self.reports_due.is_empty() {
            self.report(sink);
        }
        if !self.departures.is_empty() {
            let OfiLink { departures, peers, .. } = self;
            departures.end(now, |rank| {
                if let Some(peer) = peers.get_mut(rank) {
                    report_lost(peer, "the peer has left".into(), sink);
                }
            });
        }
        if !self.kept.is_empty() && !self.rails.iter().any(Rail::has_abandoned) {
            self.kept.clear();
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        let OfiLink { sleep, rails, reports_due, .. } = self;
        let is_open = rails.iter().any(|rail| !rail.is_closed());
        reports_due.is_empty() && (!is_open || sleep.arm(rails))
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.sleep.descriptors()
    }

    fn next_deadline(&self) -> Option<Time> {
        self.departures.next_deadline()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let Some(peer) = self.peers.get_mut(peer) else { return };
        if peer.state == PeerState::Fenced {
            return;
        }
        peer.state = PeerState::Fenced;
        let why = "the peer was fenced before the part was complete";
        peer.parked.drain(..).for_each(|token| sink.failed(token, why));
        let mut any = false;
        for rail in &mut self.rails {
            any |= rail.abandon(peer.rank.0, |token| sink.failed(token, why));
        }
        if any {
            // The provider may read these sources until it completes them or the endpoint is closed.
            self.kept.extend(self.regions.values().cloned());
        }
        self.open -= 1;
        self.close_if_unused();
    }
}

/// Outcome for a post that the provider has refused with an error. After a loss the part waits for the fence.
///
/// # Errors
/// The reason, for an error that does not end the connection.
#[cold]
fn post_failed(
    peer: &mut OfiPeer,
    rail: &Rail,
    token: u64,
    error: i32,
    sink: &mut Sink,
) -> Result<PostStatus, String> {
    let why = rail.describe(error);
    if !is_loss(error) {
        return Err(why);
    }
    peer.parked.push(token);
    report_lost(peer, why, sink);
    Ok(PostStatus::InFlight)
}
