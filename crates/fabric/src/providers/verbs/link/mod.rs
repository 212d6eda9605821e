//! One group's use of the device: routes, regions, posts.
//!
//! - `connect.rs`: the peers' queue pairs, and greetings
//! - `events.rs`: arrivals and the bound on unconsumed ones, completions, asynchronous events, losses
//! - `losses.rs`: reports a lost peer
//! - `page.rs`, `post.rs`: posts a page as one work request, and a part as a chain

use super::super::control_lanes::ControlLanes;
use super::super::gpu_memory::{FlushedGpus, Gpus};
use super::super::granted_regions::GrantEntry;
use super::super::presence::{Departures, PeerState};
use super::config::{MAX_PAGES, VerbsConfig};
use super::library::Library;
use super::names;
use super::nic::Nic;
use super::objects::provider_error;
use super::pair::CONTROL_REQUESTS;
use super::peer::VerbsPeer;
use super::rail::{QueueSizes, Rail};
use super::region::RegisteredRegion;
use super::wire::{PortAddress, VerbsAddress, VerbsIntroduction};
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{
    Introduction, Link, Membership, PostStatus, RouteRule, Scatter, ScatterStatus, Sink,
    WorkRequest,
};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{ProviderKind, RegionKey, Time, TrafficClass};
use losses::report_lost;
use page::PageTemplate;
use post::{ChainTemplate, PostError};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

mod connect;
mod events;
mod losses;
mod page;
mod post;
#[cfg(test)]
mod tests;

/// Control arrivals from a peer: three reports, two greetings, a farewell.
const CONTROL_ARRIVALS: u32 = CONTROL_REQUESTS;
/// Fewest unconsumed arrivals from a peer.
const MIN_UNCONSUMED: u32 = 4;
/// Completion queue polls between two looks at asynchronous events.
const POLLS_PER_EVENT: u32 = 1024;

pub struct VerbsLink {
    // Drop order: queue pairs before the memory that they access.
    /// By rank, from the introduction on.
    peers: PeerMap<VerbsPeer>,
    regions: RegionMap<RegisteredRegion>,
    rails: Vec<Rail>,
    gpus: Arc<dyn Gpus>,
    /// GPUs whose memory peers may write.
    flushed_gpus: FlushedGpus,
    config: Arc<VerbsConfig>,
    group: Membership,
    address: VerbsAddress,
    sizes: QueueSizes,
    /// Work requests for the next part.
    template: ChainTemplate,
    /// Work request for the next page in a scatter.
    page: PageTemplate,
    /// Ranks with unsent consumption reports.
    reports_due: Vec<u32>,
    departures: Departures,
    /// Polls until the next look at asynchronous events.
    polls_left: u32,
}

impl VerbsLink {
    pub fn open(
        library: &'static Library,
        config: &Arc<VerbsConfig>,
        nics: &[Nic],
        gpus: &Arc<dyn Gpus>,
        group: Membership,
    ) -> Result<VerbsLink> {
        let lanes = group.lanes.words().capacity();
        if lanes > names::LANES {
            let limit = names::LANES as u64;
            return Err(Error::Limit { what: "lanes of verbs", wanted: lanes as u64, limit });
        }
        let peers = (group.size - 1).max(1);
        let sizes = queue_sizes(config, nics, peers).map_err(provider_error)?;
        let receives = peers * (sizes.unconsumed + CONTROL_ARRIVALS);
        let completions = receives + peers * (sizes.requests + CONTROL_REQUESTS);
        let open = |nic: &Nic| {
            let (completions, receives) = (completions as usize, receives as usize);
            Rail::open(library, nic, config.gid_index, completions, receives)
                .map_err(|why| format!("{}: {why}", nic.name()))
        };
        let rails = open_usable(nics, open).map_err(provider_error)?;
        let nics = || rails.iter().map(|rail| &rail.nic);
        let longest = nics().map(|nic| u64::from(nic.attributes.max_msg_sz));
        let port = |nic: &Nic| PortAddress {
            gid: nic.gid.gid,
            lid: nic.attributes.lid,
            mtu: nic.attributes.active_mtu.clamp(1, 5) as u8,
            network: nic.network,
        };
        let address = VerbsAddress {
            link_layer: rails[0].nic.attributes.link_layer,
            max_part_bytes: longest.fold(config.max_part_bytes, u64::min).max(1),
            max_pages: sizes.requests.min(MAX_PAGES),
            stripe_from: config.stripe_from,
            max_unconsumed: sizes.unconsumed,
            ports: nics().map(port).collect(),
        };
        Ok(VerbsLink {
            peers: PeerMap::default(),
            regions: RegionMap::default(),
            rails,
            gpus: gpus.clone(),
            flushed_gpus: FlushedGpus::default(),
            config: config.clone(),
            group,
            address,
            sizes,
            template: ChainTemplate::new(),
            page: PageTemplate::new(),
            reports_due: Vec::new(),
            departures: Departures::default(),
            polls_left: POLLS_PER_EVENT,
        })
    }
}

/// Rails for the NICs that are usable now: a NIC that failed since the device was opened is left out.
///
/// # Errors
/// The reasons, if no NIC is left.
fn open_usable(
    nics: &[Nic],
    open: impl Fn(&Nic) -> Result<Rail, String>,
) -> Result<Vec<Rail>, String> {
    let (mut rails, mut reasons) = (Vec::new(), Vec::new());
    for nic in nics {
        match open(nic) {
            Ok(rail) => rails.push(rail),
            Err(why) => reasons.push(why),
        }
    }
    if rails.is_empty() {
        return Err(reasons.join("; "));
    }
    reasons.iter().for_each(|why| log::warn!("{why}; the group does without this NIC"));
    Ok(rails)
}

/// Queue sizes toward each of `peers` peers. A NIC's completion queue has an entry for each work request
/// and each arrival that peers may have under way, so it cannot overflow.
fn queue_sizes(config: &VerbsConfig, nics: &[Nic], peers: u32) -> Result<QueueSizes, String> {
    let least = |limit: fn(&Nic) -> i32| nics.iter().map(limit).min().unwrap_or(0).max(0) as u32;
    let completions = least(|nic| nic.limits.max_cqe) / peers;
    let receives = least(|nic| nic.limits.max_srq_wr) / peers;
    let requests = least(|nic| nic.limits.max_qp_wr);
    let room = completions.saturating_sub(CONTROL_REQUESTS + CONTROL_ARRIVALS);
    let requests = config.queue_requests.min(requests.saturating_sub(CONTROL_REQUESTS));
    let requests = requests.min(room / 2).min(room.saturating_sub(MIN_UNCONSUMED));
    let unconsumed = (room - requests).min(receives.saturating_sub(CONTROL_ARRIVALS));
    let sizes = QueueSizes { requests, unconsumed: unconsumed.min(config.max_unconsumed) };
    if sizes.requests < 1 || sizes.unconsumed < MIN_UNCONSUMED {
        let names: Vec<String> = nics.iter().map(Nic::name).collect();
        return Err(format!(
            "{} ranks: {} has completion queues of {} entries, too few for so large a group",
            peers + 1,
            names.join(", "),
            least(|nic| nic.limits.max_cqe)
        ));
    }
    Ok(sizes)
}

impl Link for VerbsLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Verbs
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn route(&self, remote: &[u8]) -> Option<RouteRule> {
        let other = VerbsAddress::decode(remote)?;
        let rule = RouteRule {
            parts: self.address.rule(&other),
            // The same order as on a queue pair; stripes take several.
            ordered: self.address.shared_ports(&other).len() == 1,
            max_unconsumed: self.address.unconsumed(&other),
            max_piggyback: RouteRule::LONGEST_CARRIER,
            ..RouteRule::DEFERRED
        };
        self.address.reaches(&other).then_some(rule)
    }

    fn introduce(&mut self, peer: Rank, address: &[u8]) -> Result<Vec<u8>> {
        let address =
            VerbsAddress::decode(address).ok_or_else(|| malformed(peer, "a verbs address"))?;
        let local = ControlLanes::issue(&self.group.lanes, peer)?;
        let mut pairs = Vec::new();
        for rails in self.address.shared_ports(&address) {
            let (rail, first_packet) = (&mut self.rails[rails.0], random_packet()?);
            let pair = rail.open_pair(peer, self.sizes.requests, rails, first_packet);
            pairs.push(pair.map_err(provider_error)?);
        }
        let introduction = VerbsIntroduction {
            consumed: local.consumed,
            presence: local.presence,
            pairs: pairs.iter().map(|pair| pair.address()).collect(),
        };
        let max_unconsumed = self.address.unconsumed(&address);
        let ranks = (self.group.rank, peer);
        self.peers.insert(peer, VerbsPeer::new(ranks, local, max_unconsumed, pairs));
        Ok(introduction.encode())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        peers.iter().try_for_each(|introduction| self.connect_pairs(introduction))?;
        self.exchange_greetings(peers, limit)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        Some(self.gpus.allocate(device, length)?.map_err(provider_error))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Verbs, key, detail };
        let domains = self.rails.iter().map(Rail::domain);
        let paging = self.config.on_demand_paging;
        let region = RegisteredRegion::new(memory, domains, &*self.gpus, paging);
        self.regions.insert(key, region.map_err(refuse)?);
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, _peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let unknown = || Error::Unknown { what: "region", number: key.0.into() };
        let region = self.regions.get_mut(key).ok_or_else(unknown)?;
        let refuse = |detail| Error::Unusable { provider: ProviderKind::Verbs, key, detail };
        if let Some(gpu) = region.gpu() {
            self.flushed_gpus.add(&*self.gpus, gpu).map_err(refuse)?;
        }
        let (domains, paging) = (self.rails.iter().map(Rail::domain), self.config.on_demand_paging);
        let targets = region.targets(domains, &*self.gpus, paging);
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
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        let state = self.peers.get_mut(peer).ok_or_else(unknown)?;
        let nics = state.pairs.iter().map(|pair| pair.remote_rail + 1).max().unwrap_or(0);
        let imported = entry.and_then(|entry| state.granted.import(key, entry, nics));
        imported.ok_or_else(|| Error::Malformed {
            peer,
            what: "a verbs grant",
            detail: format!("expected a range within {length} bytes and a key for each NIC"),
        })
    }

    fn deregister(&mut self, key: RegionKey) {
        let region = self.regions.remove(key);
        if region.is_some_and(|region| region.granted_gpu().is_some()) {
            let VerbsLink { regions, flushed_gpus, .. } = self;
            let is_target = |gpu| regions.values().any(|it| it.granted_gpu() == Some(gpu));
            flushed_gpus.retain(is_target);
        }
    }

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.granted.remove(key);
        }
    }

    fn post(&mut self, work: &WorkRequest<'_>, sink: &mut Sink) -> Result<PostStatus, String> {
        let VerbsLink { rails, regions, peers, group, template, .. } = self;
        let peer = peers.get_mut(work.peer).ok_or("verbs has no connection to it")?;
        if peer.state != PeerState::Open {
            return peer.state.post_closed(&mut peer.parked, work.token);
        }
        let is_bulk = work.class == TrafficClass::Bulk;
        let most_arrivals = 1 + u32::from(work.piggyback.is_some());
        if !peer.may_post(most_arrivals, is_bulk, &group.lanes) {
            return Ok(PostStatus::Full);
        }
        let pair = peer.next_pair();
        match template.post(work, peer, pair, regions) {
            Ok(Some(arrivals)) => {
                peer.posted(arrivals, is_bulk);
                Ok(PostStatus::InFlight)
            }
            Ok(None) => Ok(PostStatus::Full),
            Err(PostError::Page(why)) => Err(why),
            Err(PostError::Provider(error)) => {
                Ok(post_failed(peer, pair, rails, work.token, error, sink))
            }
        }
    }

    fn post_scatter(&mut self, scatter: &Scatter<'_>, sink: &mut Sink) -> ScatterStatus {
        let mut posted = ScatterStatus::default();
        self.page.discard_source();
        loop {
            let VerbsLink { rails, regions, peers, group, page, .. } = self;
            let run = page.post_run(scatter, posted.taken, peers, regions, &group.lanes);
            posted.taken += run.posted;
            posted.in_flight += run.posted as u32;
            let Some(part) = scatter.parts.get(posted.taken) else { return posted };
            let outcome = match (run.error, peers.get_mut(part.peer)) {
                (Some(error), Some(peer)) => {
                    let pair = peer.next_pair();
                    Ok(post_failed(peer, pair, rails, scatter.token(part), error, sink))
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
        self.polls_left -= 1;
        if self.polls_left == 0 {
            self.read_events(sink);
        }
        if !self.reports_due.is_empty() {
            self.report(sink);
        }
        if !self.departures.is_empty() {
            let VerbsLink { departures, peers, .. } = self;
            departures.end(now, |rank| {
                if let Some(peer) = peers.get_mut(rank) {
                    report_lost(peer, "the peer has left".into(), sink);
                }
            });
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        // A look at asynchronous events is due after a sleep, which they may end.
        self.polls_left = 1;
        self.reports_due.is_empty() && self.rails.iter_mut().all(Rail::may_sleep)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.rails.iter().flat_map(Rail::descriptors).collect()
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
        peer.park_all();
        // Once the queue pairs are destroyed, no NIC accesses memory for this peer.
        peer.pairs.clear();
        let why = "the peer was fenced before the part was complete";
        peer.parked.drain(..).for_each(|token| sink.failed(token, why));
    }
}

/// Loses a peer on whose pair a post has failed; the part waits for the fence.
#[cold]
fn post_failed(
    peer: &mut VerbsPeer,
    pair: usize,
    rails: &[Rail],
    token: u64,
    error: i32,
    sink: &mut Sink,
) -> PostStatus {
    peer.parked.push(token);
    let why = super::objects::check("ibv_post_send", error).err().unwrap_or_default();
    let name = rails[peer.pairs[pair].rail].nic.name();
    report_lost(peer, format!("{name}: {why}"), sink);
    PostStatus::InFlight
}

/// Random first packet sequence number.
fn random_packet() -> Result<u32> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes)
        .map_err(|e| provider_error(format!("no random bytes from the system: {e}")))?;
    Ok(u32::from_le_bytes(bytes) & 0xff_ffff)
}

fn malformed(peer: Rank, what: &'static str) -> Error {
    Error::Malformed { peer, what, detail: "another wire version, or damaged".into() }
}
