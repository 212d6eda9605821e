//! This rank's regions, and the connected peers on the host.

use super::address::LocalAddress;
use super::arrivals::{Arrivals, MAX_REGIONS};
use super::descriptor_socket::LocalMessage;
use super::errors::{connect_error, io_error};
use super::outbox::Hello;
use super::peer::{LocalPeer, MappedRegion};
use super::pending_peer::RendezvousEnd;
use super::rendezvous::{Connected, Rendezvous};
use super::{WaitLimit, socket, wait};
use crate::bytes::Reader;
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::lane_table::LaneTable;
use crate::link::{Introduction, MappedPeer, Membership, WorkRequest};
use crate::memory::Memory;
use crate::types::{Lane, Page, ProviderKind, RegionKey};
use rustix::fd::OwnedFd;
use rustix::process::Pid;
use std::io;
use std::sync::Arc;
use weft_control::Rank;

/// Bytes in a grant entry: the region serial.
pub(crate) const ENTRY_BYTES: usize = size_of::<u64>();

/// A provider's regions and peers, for ranks on this host.
#[derive(Debug)]
pub(crate) struct LocalPeers {
    /// Provider named in errors.
    kind: ProviderKind,
    address: LocalAddress,
    /// Present until the peers are connected.
    listener: Option<OwnedFd>,
    /// Descriptors from connected peers; `None` without peers.
    arrivals: Option<Arrivals>,
    /// Peers that are routed over this provider.
    peers: PeerMap<LocalPeer>,
    /// By key.
    regions: RegionMap<OwnedRegion>,
    next_serial: u64,
    /// True if an outbox has unsent messages, or a peer is owed a wake-up.
    has_unsent: bool,
    /// Every peer has this rank's event descriptor.
    is_wake_shared: bool,
    /// Peer with lanes raised in a batch and not marked.
    unmarked: Option<Rank>,
}

/// Region that this rank owns.
#[derive(Debug)]
struct OwnedRegion {
    memory: Arc<Memory>,
    serial: u64,
    /// Peers that have the region's descriptor.
    sent_to: Vec<Rank>,
}

impl LocalPeers {
    /// Listens for peers. Ranks with equal `host_id` and `flavour` reach each other.
    pub fn open(kind: ProviderKind, host_id: &str, flavour: &[u8]) -> Result<LocalPeers> {
        let mut address = LocalAddress::new(host_id)?;
        address.domain.extend_from_slice(flavour);
        let listener = Some(socket::listen(&address.name)?);
        let (peers, regions) = (PeerMap::default(), RegionMap::default());
        Ok(LocalPeers {
            kind,
            address,
            listener,
            arrivals: None,
            peers,
            regions,
            next_serial: 0,
            has_unsent: false,
            is_wake_shared: false,
            unmarked: None,
        })
    }

    /// See [`crate::Link::address`].
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// True if the process with this address is reachable.
    pub fn reaches(&self, address: &[u8]) -> bool {
        LocalAddress::decode(address).is_some_and(|address| self.address.reaches(&address))
    }

    /// Connects these peers, or returns an error that names the first missing one.
    pub fn connect(
        &mut self,
        group: &Membership,
        peers: &[Introduction<'_>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let (kind, generation) = (self.kind, group.generation);
        let listener = self.listener.take().ok_or_else(|| Error::Provider {
            provider: kind,
            detail: "it was connected before; make a new one for each group".into(),
        })?;
        if peers.is_empty() {
            return Ok(());
        }
        let hello = Hello { from: group.rank, generation, token: self.address.token };
        let introduction = || table(&group.lanes);
        let own = RendezvousEnd { kind, hello, listener: &listener, introduction: &introduction };
        let peers: Vec<_> = peers.iter().map(|peer| (peer.peer, peer.address)).collect();
        let Connected { peers, early, unproven } = Rendezvous::new(own, &peers)?.run(limit)?;
        for peer in peers {
            let rank = peer.rank;
            let peer = LocalPeer::new(peer, hello);
            let peer = peer.map_err(|error| io_error(kind, rank, error))?;
            self.peers.insert(rank, peer);
        }
        self.arrivals = Some(Arrivals::new(listener, generation, unproven, early));
        Ok(())
    }

    /// A connected peer's process, by pid here; `None` if this PID namespace does not show it.
    pub fn process(&self, peer: Rank) -> Option<Pid> {
        self.peers.get(peer)?.process.process
    }

    /// Sends this rank's event descriptor to the peers, before the first sleep on it is announced. False if a peer may
    /// lack it.
    pub fn share_wake(&mut self, lanes: &LaneTable) -> bool {
        self.is_wake_shared || self.send_wake(lanes)
    }

    #[cold]
    fn send_wake(&mut self, lanes: &LaneTable) -> bool {
        // Descriptors under way count against a user's limit: ranks take each other's.
        if let Err(error) = self.receive_arrivals() {
            log::debug!("a peer's event descriptor: {error}");
        }
        self.flush_links();
        let mut is_shared = true;
        for (rank, peer) in self.peers.iter_mut() {
            if !peer.has_wake {
                let wake = lanes.descriptor().try_clone_to_owned();
                peer.has_wake = wake.is_ok();
                // It stays in the outbox, unless the peer's socket is closed: that is gone.
                let sent = wake.and_then(|wake| peer.outbox.send(LocalMessage::Wake { wake }));
                if let Err(error) = sent {
                    log::debug!("event descriptor for {rank}: {error}");
                }
            }
            is_shared &= peer.has_wake && !peer.outbox.has_unsent();
        }
        self.is_wake_shared = is_shared && self.arrivals.is_some();
        self.has_unsent |= !is_shared;
        is_shared
    }

    /// Registers any kind of `memory` under `key`.
    pub fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        let index = key.0 as usize;
        if index >= MAX_REGIONS {
            let (wanted, limit) = (index as u64 + 1, MAX_REGIONS as u64);
            return Err(Error::Limit { what: "regions over shm", wanted, limit });
        }
        let (memory, serial, sent_to) = (memory.clone(), self.next_serial, Vec::new());
        self.next_serial += 1;
        self.regions.insert(key, OwnedRegion { memory, serial, sent_to });
        Ok(())
    }

    /// Sends a region's descriptor to a peer; returns the entry that the peer imports.
    pub fn grant(&mut self, key: RegionKey, peer: Rank) -> Result<[u8; ENTRY_BYTES]> {
        let own = self.regions.get_mut(key);
        let own = own.ok_or_else(|| Error::Unknown { what: "region", number: key.0.into() })?;
        let Some(descriptor) = own.memory.descriptor() else {
            let detail = "peers can write only to memory that Weft allocated: use `alloc` for \
                          destinations";
            return Err(Error::Unusable { provider: self.kind, key, detail: detail.into() });
        };
        if !own.sent_to.contains(&peer) {
            let to = self.peers.get_mut(peer);
            let to = to.ok_or_else(|| unknown(peer))?;
            let memory = descriptor
                .try_clone_to_owned()
                .map_err(|e| Error::system("cannot share a region", e))?;
            let message = LocalMessage::Region { key, serial: own.serial, memory };
            let sent = to.outbox.send(message);
            self.has_unsent |= to.outbox.has_unsent();
            // With too few descriptors it stays in the outbox; other errors empty that.
            if sent.is_ok() || to.outbox.has_unsent() {
                own.sent_to.push(peer);
            }
            sent.map_err(|e| io_error(self.kind, peer, e))?;
        }
        Ok(own.serial.to_le_bytes())
    }

    /// Maps a peer's host memory region, once per entry.
    pub fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut reader = Reader::new(entry);
        let serial = reader.u64().filter(|_| reader.is_at_end() && (key.0 as usize) < MAX_REGIONS);
        let malformed = |detail: String| Error::Malformed { peer, what: "a region", detail };
        let serial = serial.ok_or_else(|| malformed(format!("{} bytes", entry.len())))?;
        if self.is_mapped(peer, key, entry) {
            return Ok(());
        }
        let descriptor = self.receive(peer, key, serial, limit)?;
        let memory = usize::try_from(length)
            .map_err(|_| malformed(format!("{length} bytes do not fit into this process")))
            .and_then(|length| Memory::map(descriptor, length))?;
        self.peer_mut(peer)?.map(key, MappedRegion { memory: Arc::new(memory), serial });
        Ok(())
    }

    /// Receives a granted region's descriptor from the owner.
    pub fn receive(
        &mut self,
        peer: Rank,
        key: RegionKey,
        serial: u64,
        limit: &mut WaitLimit<'_>,
    ) -> Result<OwnedFd> {
        let kind = self.kind;
        loop {
            self.flush_links();
            let received = self.receive_arrivals();
            let from = self.peer_mut(peer)?;
            if let Some(descriptor) = from.arrived.remove(&(key, serial)) {
                return Ok(descriptor);
            }
            let received = from.failure.take().map_or(received, Err);
            received.map_err(|error| io_error(kind, peer, error))?;
            let Some(timeout) = limit.park()? else {
                let detail = format!("region {} has not arrived before the deadline", key.0);
                return Err(connect_error(kind, peer, detail));
            };
            let unsent = self.peers.values().filter_map(|peer| peer.outbox.interest());
            let arriving = self.arrivals.iter().flat_map(Arrivals::interest);
            let mut polled: Vec<_> = arriving.chain(unsent).collect();
            wait::sleep(&mut polled, timeout);
        }
    }

    /// Removes one of this rank's regions.
    pub fn deregister(&mut self, key: RegionKey) {
        self.regions.remove(key);
    }

    /// Unmaps a peer's region.
    pub fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        if let Ok(peer) = self.peer_mut(peer) {
            peer.unmap(key);
        }
    }

    fn receive_arrivals(&mut self) -> io::Result<()> {
        let LocalPeers { arrivals, peers, .. } = self;
        arrivals.as_mut().map_or(Ok(()), |arrivals| arrivals.receive(peers))
    }

    /// Ends messages to a peer and unmaps the peer's memory.
    pub fn disconnect(&mut self, peer: Rank) {
        self.peers.remove(peer);
    }

    /// Sends queued messages, and wakes peers that are owed it.
    pub fn flush(&mut self) {
        if self.has_unsent {
            self.flush_links();
        }
    }

    fn flush_links(&mut self) {
        if self.peers.values().any(|peer| peer.owes_wake) {
            self.pay_wakes();
        }
        self.has_unsent = false;
        for peer in self.peers.values_mut() {
            // A broken socket stops descriptors only: stores need none.
            let _ = peer.outbox.flush();
            self.has_unsent |= peer.outbox.has_unsent() || peer.owes_wake;
        }
    }

    /// Wakes peers asleep on descriptors that have arrived since: each was sent before the sleep was announced.
    #[cold]
    #[inline(never)]
    fn pay_wakes(&mut self) {
        if let Err(error) = self.receive_arrivals() {
            log::debug!("a peer's event descriptor: {error}");
        }
        self.has_unsent |= self.peers.values().any(|peer| peer.owes_wake);
    }

    /// Writes one part: copies the pages and raises the lane. An error means that the peer is
    /// unreachable.
    #[inline]
    pub fn write(&mut self, work: &WorkRequest<'_>) -> Result<(), &'static str> {
        let peer = self.peers.get_mut(work.peer);
        let peer = peer.ok_or("it is not connected over shm")?;
        for page in work.pages {
            let from = self.regions.get(page.source);
            from.and_then(|from| peer.copy(page, &from.memory)).ok_or("a page is out of bounds")?;
        }
        peer.raise(work.lane, work.piggyback).ok_or("it has no such lane")?;
        if peer.owes_wake {
            self.pay_wakes();
            let failed = |peer: &LocalPeer| peer.owes_wake && peer.failure.is_some();
            if self.peers.get(work.peer).is_some_and(failed) {
                return Err(
                    "it sleeps, and its event descriptor was lost: see the limit of descriptors",
                );
            }
        }
        Ok(())
    }

    /// Same as [`LocalPeers::write`], for one of several writes: the lane is marked at the latest by
    /// [`LocalPeers::mark_raised`].
    #[inline]
    pub fn write_in_batch(&mut self, work: &WorkRequest<'_>) -> Result<(), &'static str> {
        if work.piggyback.is_some() {
            return self.write(work);
        }
        if self.unmarked != Some(work.peer) {
            self.mark_raised();
        }
        let peer = self.peers.get_mut(work.peer);
        let peer = peer.ok_or("it is not connected over shm")?;
        let mut bytes = 0;
        for page in work.pages {
            let from = self.regions.get(page.source);
            from.and_then(|from| peer.copy(page, &from.memory)).ok_or("a page is out of bounds")?;
            bytes += page.length;
        }
        self.unmarked = Some(work.peer);
        peer.raise_in_batch(work.lane, bytes).ok_or("it has no such lane")?;
        if peer.owes_wake {
            self.pay_wakes();
        }
        Ok(())
    }

    /// Prefetches for a write to a peer.
    #[inline]
    pub fn expect_write(&mut self, peer: Rank) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.prefetch_dirty_bits();
        }
    }

    /// Marks the lanes raised by [`LocalPeers::write_in_batch`].
    #[inline]
    pub fn mark_raised(&mut self) {
        if let Some(rank) = self.unmarked.take()
            && let Some(peer) = self.peers.get_mut(rank)
        {
            peer.mark_raised();
            if peer.owes_wake {
                self.pay_wakes();
            }
        }
    }

    /// Copies a page with the CPU, as [`LocalPeer::copy`] does.
    pub fn store(&self, to: Rank, page: &Page) -> Option<()> {
        let from = self.memory(page.source)?;
        self.peers.get(to)?.copy(page, from)
    }

    /// Raises a peer's lane, as [`LocalPeer::raise`] does.
    pub fn raise(&mut self, peer: Rank, lane: Lane) -> Option<()> {
        let to = self.peers.get_mut(peer)?;
        to.raise(lane, None)?;
        if to.owes_wake {
            self.pay_wakes();
        }
        Some(())
    }

    /// Memory in one of this rank's regions.
    pub fn memory(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.regions.get(key)?.memory)
    }

    /// Memory in all of this rank's regions.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.regions.values().map(|own| &own.memory)
    }

    /// A peer's mapped host memory region.
    pub fn mapped(&self, peer: Rank, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.peers.get(peer)?.region(key)?.memory)
    }

    /// See [`crate::Link::mapped_peer`].
    pub fn mapped_peer(&self, peer: Rank, key: RegionKey) -> Option<MappedPeer> {
        self.peers.get(peer)?.mapped(key)
    }

    /// All of a peer's mapped host memory regions.
    pub fn mapped_of(&self, peer: Rank) -> impl Iterator<Item = &Arc<Memory>> {
        let peer = self.peers.get(peer);
        peer.into_iter().flat_map(LocalPeer::regions).map(|region| &region.memory)
    }

    /// True if a peer's host memory region is mapped with this entry.
    pub fn is_mapped(&self, peer: Rank, key: RegionKey, entry: &[u8]) -> bool {
        let peer = self.peers.get(peer);
        let region = peer.and_then(|peer| peer.region(key));
        region.is_some_and(|region| region.serial.to_le_bytes() == entry)
    }

    fn peer_mut(&mut self, rank: Rank) -> Result<&mut LocalPeer> {
        let peer = self.peers.get_mut(rank);
        peer.ok_or_else(|| unknown(rank))
    }
}

fn unknown(rank: Rank) -> Error {
    Error::Unknown { what: "rank", number: rank.0.into() }
}

/// A provider's introduction: the lane table.
fn table(lanes: &LaneTable) -> io::Result<LocalMessage> {
    let memory = lanes.words().memory().descriptor();
    let memory = memory.ok_or_else(|| io::Error::other("the lane table cannot be shared"))?;
    Ok(LocalMessage::Table {
        capacity: lanes.words().capacity() as u32,
        memory: memory.try_clone_to_owned()?,
    })
}
