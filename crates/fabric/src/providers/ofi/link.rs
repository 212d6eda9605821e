//! One group's use of the device: routes, regions, posts, the bound on unconsumed arrivals, and the end.

use super::peer::{Peer, Reports, State, agreed};
use super::rail::{Event, MAX_RANGES, Message, Rail, Sizes, Use};
use super::region::{Keys, Region, is_reached};
use super::wire::{Address, Entry, Introduction as Greeting, Target, immediate, lanes_of};
use super::{Domain, OfiConfig, realm, sys, unusable};
use crate::clock;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{Class, Page, ProviderKind, RegionKey, Time};
use nap::Nap;
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

#[path = "nap.rs"]
mod nap;

/// Entries of a completion queue, whatever the number of peers.
const QUEUE_BUDGET: usize = 32_768;
/// Messages of the link's own that may be under way on each NIC.
const OWN: usize = 64;
/// Arrivals of a peer beside those that are agreed on: its reports, a greeting, a farewell.
const BESIDE: usize = 5;
/// Bulk parts under way toward one peer, behind which a latency-critical part may have to wait.
const MAX_BULK: u32 = 16;
/// How long a link that is dropped waits for what it has sent to be delivered.
const LINGER: Duration = Duration::from_secs(1);
/// After a peer's farewell: how long what it sent before may still be on its way.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// Sleep between two looks while peers connect.
const LOOK: Duration = Duration::from_micros(100);

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
    /// Ranks that have said farewell, and the first poll after that.
    leaving: Vec<(u32, Option<Time>)>,
    /// Peers that are connected and not fenced.
    open: usize,
    /// Flags of the message with which the link leaves: it ends once all before it has been delivered.
    farewell: u64,
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
            Rail::open(domain, sizes, key, is_efa)
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
            nap,
        })
    }

    /// Takes in a peer's endpoints, and where its signals are aimed.
    fn meet(&self, introduction: &Introduction<'_>) -> Result<Peer> {
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
        let ends = self.rails.iter().zip(&address.names).zip(&theirs.targets);
        let ends = ends.take(count).map(|((rail, name), target)| {
            if name.len() > length.max(256) {
                return Err(malformed("an ofi address"));
            }
            // SAFETY: `route` found provider and address format to be ours; providers check the rest.
            let inserted = unsafe { rail.insert(&padded(name)) };
            inserted.map(|address| (address, *target)).map_err(|why| refused(peer, why))
        });
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let (_, max_unconsumed) = agreed(&self.address, &address);
        Ok(Peer::new(peer, ours, theirs, max_unconsumed, ends))
    }

    /// Greets every peer, and waits until each has greeted and has our greeting: an introduction of an
    /// earlier incarnation connects to nobody.
    fn greet(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
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
    fn signal_presence(&mut self, peer: Rank, flags: u64, sink: &mut Sink) -> bool {
        let Some(Some(peer)) = self.peers.get_mut(peer.index()) else { return true };
        let (used, immediate) =
            (Use::Own { peer: peer.rank.0 }, immediate(peer.theirs.presence, None));
        match self.rails[0].signal(peer.ends[0], immediate, flags, used) {
            Ok(true) => {
                peer.own += 1;
                true
            }
            Ok(false) => false,
            Err((_, why)) => {
                lose(peer, why, sink);
                true
            }
        }
    }

    /// Sends the reports of consumption that are due, as far as the provider takes them.
    #[cold]
    fn report(&mut self, sink: &mut Sink) {
        let OfiLink { due, peers, rails, .. } = self;
        due.retain(|&rank| {
            let Some(Some(peer)) = peers.get_mut(rank as usize) else { return false };
            while peer.due > 0 && peer.state == State::Open {
                let immediate = immediate(peer.theirs.consumed, None);
                let used = Use::Own { peer: rank };
                match rails[0].signal(peer.ends[0], immediate, 0, used) {
                    Ok(true) => {
                        peer.due -= 1;
                        peer.own += 1;
                    }
                    Ok(false) => return true,
                    Err((_, why)) => lose(peer, why, sink),
                }
            }
            false
        });
    }

    /// Raises the lanes of an arrival, and counts it as consumed.
    #[inline]
    fn arrived(
        group: &Membership,
        peers: &mut [Option<Peer>],
        (due, leaving): (&mut Vec<u32>, &mut Vec<(u32, Option<Time>)>),
        immediate: u64,
    ) {
        let (lane, rider) = lanes_of(immediate);
        if let Some(rider) = rider {
            group.lanes.arrive_in_poll(rider);
        }
        let holder = group.lanes.arrive_in_poll(lane).or_else(|| group.lanes.last_holder(lane));
        let peer = holder.and_then(|holder| peers.get_mut(holder.index())?.as_mut());
        let Some(peer) = peer else { return };
        let rank = peer.rank.0;
        if peer.is_report(lane) {
            if peer.is_leaving(&group.lanes) && !leaving.iter().any(|(known, _)| *known == rank) {
                leaving.push((rank, None));
            }
        } else if peer.incoming.consume() {
            peer.due += 1;
            if !due.contains(&rank) {
                due.push(rank);
            }
        }
    }

    /// Reports the loss of peers that have left, once all that they sent has had time to arrive: nothing
    /// sent to them ends any more.
    #[cold]
    fn take_leave(&mut self, now: Time, sink: &mut Sink) {
        let peers = &mut self.peers;
        self.leaving.retain_mut(|(rank, since)| {
            let since = *since.get_or_insert(now);
            let is_over = now.since(since) >= LAST_WORDS;
            if is_over && let Some(Some(peer)) = peers.get_mut(*rank as usize) {
                lose(peer, "it has left".into(), sink);
            }
            !is_over
        });
    }

    fn ended(peers: &mut [Option<Peer>], used: Use, sink: &mut Sink) {
        match used {
            Use::Part { token, peer, is_bulk } => {
                if let Some(Some(peer)) = peers.get_mut(peer as usize) {
                    peer.parts -= 1;
                    peer.bulk -= u32::from(is_bulk);
                }
                sink.done(token);
            }
            Use::Own { peer } => {
                if let Some(Some(peer)) = peers.get_mut(peer as usize) {
                    peer.own -= 1;
                }
            }
            Use::Abandoned | Use::Receive | Use::Free => {}
        }
    }

    /// An operation has failed. If that is the end of the peer's connection, its parts wait for the fence:
    /// the control plane may report next that the peer has left in peace.
    #[cold]
    fn failed(peers: &mut [Option<Peer>], used: Use, error: i32, why: String, sink: &mut Sink) {
        let (token, peer, is_bulk) = match used {
            Use::Part { token, peer, is_bulk } => (Some(token), peer, is_bulk),
            Use::Own { peer } => (None, peer, false),
            Use::Abandoned | Use::Receive | Use::Free => return,
        };
        let Some(Some(peer)) = peers.get_mut(peer as usize) else { return };
        peer.bulk -= u32::from(is_bulk);
        peer.parts -= u32::from(token.is_some());
        peer.own -= u32::from(token.is_none());
        if !is_loss(error) && peer.state != State::Lost {
            match token {
                Some(token) => sink.failed(token, why),
                None => lose(peer, why, sink),
            }
            return;
        }
        peer.stuck.extend(token);
        lose(peer, why, sink);
    }

    /// Closes the endpoints once no peer is left.
    fn close_if_alone(&mut self) {
        if self.open == 0 {
            self.rails.iter_mut().for_each(Rail::close);
            self.kept.clear();
        }
    }
}

/// Reports a peer as lost, once.
#[cold]
fn lose(peer: &mut Peer, why: String, sink: &mut Sink) {
    if peer.state == State::Open {
        peer.state = State::Lost;
        sink.lost.push((peer.rank, why));
    }
}

/// Errors that end a connection; others are of one write.
fn is_loss(error: i32) -> bool {
    [
        libc::ECONNRESET,
        libc::ECONNREFUSED,
        libc::ECONNABORTED,
        libc::EPIPE,
        libc::ENOTCONN,
        libc::ETIMEDOUT,
        libc::EHOSTUNREACH,
        libc::EHOSTDOWN,
        libc::ENETUNREACH,
        libc::ENETDOWN,
        libc::ESHUTDOWN,
        libc::ECANCELED,
        libc::EIO,
    ]
    .contains(&error)
}

fn refused(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Ofi, detail }
}

/// A name with room behind it for a provider that reads a whole address of its format.
fn padded(name: &[u8]) -> Vec<u8> {
    let mut padded = name.to_vec();
    padded.resize(name.len().max(256) + 1, 0);
    padded
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
        let OfiLink { rails, regions, peers, group, .. } = self;
        let peer = peers.get_mut(work.peer.index()).and_then(Option::as_mut);
        let peer = peer.ok_or("ofi has no connection to it")?;
        if peer.state != State::Open {
            return post_closed(peer, work.token);
        }
        let is_bulk = work.class == Class::Bulk;
        if !peer.may_send(&group.lanes) || is_bulk && peer.bulk >= MAX_BULK {
            return Ok(Posted::Full);
        }
        let index = peer.next_rail();
        let rail = &mut rails[index];
        if !rail.has_room() {
            return Ok(Posted::Full);
        }
        let used = Use::Part { token: work.token, peer: work.peer.0, is_bulk };
        let immediate = immediate(work.lane, work.rider);
        let written = match work.pages {
            [] => rail.signal(peer.ends[index], immediate, 0, used),
            [page] if page.length > 0 => {
                let Slice { source, mut descriptor, destination } =
                    Slice::of(page, regions, peer, index)?;
                let mut message = Message {
                    address: peer.ends[index].0,
                    sources: &[source],
                    descriptors: std::slice::from_mut(&mut descriptor),
                    destinations: &[destination],
                    immediate,
                };
                // SAFETY: the engine keeps sources until the part has ended, as does `kept` after a fence.
                unsafe { rail.write(&mut message, 0, used) }
            }
            pages => {
                let mut ranges = Ranges::new();
                for page in pages.iter().filter(|page| page.length > 0) {
                    ranges.push(Slice::of(page, regions, peer, index)?)?;
                }
                // SAFETY: as above.
                unsafe { ranges.write(rail, peer.ends[index], immediate, used) }
            }
        };
        match written {
            Ok(true) => {
                peer.outgoing.send();
                peer.parts += 1;
                peer.bulk += u32::from(is_bulk);
                Ok(Posted::InFlight)
            }
            Ok(false) => Ok(Posted::Full),
            Err((error, why)) if is_loss(error) => {
                peer.stuck.push(work.token);
                lose(peer, why, sink);
                Ok(Posted::InFlight)
            }
            Err((_, why)) => Err(why),
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        let OfiLink { rails, peers, due, leaving, group, nap, .. } = self;
        for rail in rails.iter_mut() {
            rail.poll(|event| {
                nap.note_event();
                match event {
                    Event::Arrived(immediate) => {
                        Self::arrived(group, peers, (due, leaving), immediate);
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

/// One page of a part as its NIC takes it.
struct Slice {
    source: libc::iovec,
    descriptor: *mut c_void,
    destination: sys::RmaRange,
}

impl Slice {
    #[inline]
    fn of(
        page: &Page,
        regions: &[Option<Arc<Region>>],
        peer: &mut Peer,
        rail: usize,
    ) -> Result<Slice, String> {
        let region = regions.get(page.source.0 as usize).and_then(Option::as_ref);
        let source = region.and_then(|it| it.source(rail, page.source_offset, page.length));
        let outside = || format!("the source is outside of region {}", page.source.0);
        let (address, descriptor) = source.ok_or_else(outside)?;
        let destination =
            peer.destination(rail, page.destination, page.destination_offset, page.length)?;
        let iov_base = address as *mut c_void;
        let source = libc::iovec { iov_base, iov_len: page.length as usize };
        Ok(Slice { source, descriptor, destination })
    }
}

/// The ranges of a part of several pages, or of none.
struct Ranges {
    sources: [libc::iovec; MAX_RANGES],
    descriptors: [*mut c_void; MAX_RANGES],
    destinations: [sys::RmaRange; MAX_RANGES],
    count: usize,
}

impl Ranges {
    fn new() -> Ranges {
        let null = std::ptr::null_mut();
        Ranges {
            sources: [libc::iovec { iov_base: null, iov_len: 0 }; MAX_RANGES],
            descriptors: [null; MAX_RANGES],
            destinations: [sys::RmaRange { addr: 0, len: 0, key: 0 }; MAX_RANGES],
            count: 0,
        }
    }

    fn push(&mut self, slice: Slice) -> Result<(), String> {
        let Ranges { sources, descriptors, destinations, count } = self;
        if *count == MAX_RANGES {
            return Err(format!("a part of more than {MAX_RANGES} pages"));
        }
        sources[*count] = slice.source;
        descriptors[*count] = slice.descriptor;
        destinations[*count] = slice.destination;
        *count += 1;
        Ok(())
    }

    /// [`Rail::write`] of these ranges.
    ///
    /// # Safety
    /// As there.
    unsafe fn write(
        &mut self,
        rail: &mut Rail,
        end: (sys::Address, Target),
        immediate: u64,
        used: Use,
    ) -> Result<bool, (i32, String)> {
        let Ranges { sources, descriptors, destinations, count } = self;
        if *count == 0 {
            return rail.signal(end, immediate, 0, used);
        }
        let mut message = Message {
            address: end.0,
            sources: &sources[..*count],
            descriptors: &mut descriptors[..*count],
            destinations: &destinations[..*count],
            immediate,
        };
        // SAFETY: by the caller's promise.
        unsafe { rail.write(&mut message, 0, used) }
    }
}

impl Drop for OfiLink {
    /// What was posted shall arrive although its sender leaves: a provider may keep it until it is polled.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        let lanes = self.group.lanes.clone();
        let is_here = |peer: &&Peer| {
            peer.state == State::Open && peer.is_connected(&lanes) && !peer.is_leaving(&lanes)
        };
        let mut to_leave: Vec<Rank> =
            self.peers.iter().flatten().filter(is_here).map(|peer| peer.rank).collect();
        loop {
            to_leave.retain(|&peer| !self.signal_presence(peer, self.farewell, &mut sink));
            self.poll(clock::now(), &mut sink);
            let mut here = self.peers.iter().flatten().filter(is_here);
            let is_waiting = here.any(|peer| peer.own + peer.parts > 0) || !to_leave.is_empty();
            if !is_waiting || clock::now() >= deadline {
                return;
            }
            std::thread::yield_now();
        }
    }
}
