//! Regions of this rank, and the connected peers of its host.

use super::peer::MappedRegion;
use super::{
    ConnectedPeer, LocalAddress, LocalMessage, LocalPeer, MAX_REGIONS, Rendezvous, RendezvousEnd,
    WaitLimit, connect_error, socket, wait,
};
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

/// Bytes of a grant's entry: the serial of the region.
pub(crate) const ENTRY_BYTES: usize = size_of::<u64>();

/// Regions and peers of a provider for ranks of this host.
#[derive(Debug)]
pub(crate) struct LocalPeers {
    /// Provider named in errors.
    kind: ProviderKind,
    address: LocalAddress,
    /// Present until the peers are connected.
    listener: Option<OwnedFd>,
    /// Peers of which this provider has the route.
    peers: PeerMap<LocalPeer>,
    /// By key.
    regions: RegionMap<OwnedRegion>,
    next_serial: u64,
    /// True if a socket has unsent messages.
    has_unsent: bool,
    /// Peer with lanes raised in a batch and not marked.
    unmarked: Option<Rank>,
}

/// A region of this rank.
#[derive(Debug)]
struct OwnedRegion {
    memory: Arc<Memory>,
    serial: u64,
    /// Peers that have its descriptor.
    sent_to: Vec<Rank>,
}

impl LocalPeers {
    /// Listens for peers. Ranks of equal `host_id` and `flavour` reach each other.
    pub fn open(kind: ProviderKind, host_id: &str, flavour: &[u8]) -> Result<LocalPeers> {
        let mut address = LocalAddress::new(host_id)?;
        address.domain.extend_from_slice(flavour);
        let listener = Some(socket::listen(&address.name)?);
        let (peers, regions) = (PeerMap::default(), RegionMap::default());
        Ok(LocalPeers {
            kind,
            address,
            listener,
            peers,
            regions,
            next_serial: 0,
            has_unsent: false,
            unmarked: None,
        })
    }

    /// See [`crate::Link::address`].
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// True if the process with this address is reachable.
    pub fn reaches(&self, address: &[u8]) -> bool {
        LocalAddress::decode(address).is_some_and(|address| address.domain == self.address.domain)
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
        let own = RendezvousEnd {
            kind,
            rank: group.rank,
            generation,
            token: self.address.token,
            listener: &listener,
            introduction: &|| table(&group.lanes),
        };
        let peers: Vec<_> = peers.iter().map(|peer| (peer.peer, peer.address)).collect();
        let met = Rendezvous::new(own, &peers)?.run(limit)?;
        for ConnectedPeer { rank, link, introduction } in met {
            let peer = LocalPeer::new(link, introduction);
            let peer = peer.map_err(|error| connect_error(kind, rank, error))?;
            self.peers.insert(rank, peer);
        }
        Ok(())
    }

    /// The process of a connected peer, by its number here.
    pub fn process(&mut self, peer: Rank) -> Result<Pid> {
        let kind = self.kind;
        let process = self.peer_mut(peer)?.link.process();
        process.map_err(|error| connect_error(kind, peer, error))
    }

    /// Registers `memory` of any kind under `key`.
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
            to.link.send(message).map_err(|e| connect_error(self.kind, peer, e))?;
            self.has_unsent |= to.link.has_unsent();
            own.sent_to.push(peer);
        }
        Ok(own.serial.to_le_bytes())
    }

    /// Maps a peer's region of host memory, once per entry.
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

    /// Receives the descriptor of a granted region from its owner.
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
            let from = self.peer_mut(peer)?;
            let received = from.receive_descriptors();
            if let Some(descriptor) = from.arrived.remove(&(key, serial)) {
                return Ok(descriptor);
            }
            received.map_err(|error| connect_error(kind, peer, error))?;
            let Some(timeout) = limit.park()? else {
                let detail = format!("region {} has not arrived before the deadline", key.0);
                return Err(connect_error(kind, peer, detail));
            };
            let links = self.peers.iter();
            let mut polled: Vec<_> =
                links.map(|(rank, other)| other.link.interest(rank == peer)).collect();
            wait::sleep(&mut polled, timeout);
        }
    }

    /// Removes a region of this rank.
    pub fn deregister(&mut self, key: RegionKey) {
        self.regions.remove(key);
    }

    /// Unmaps a peer's region.
    pub fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        if let Ok(peer) = self.peer_mut(peer) {
            peer.unmap(key);
        }
    }

    /// Closes the connection to a peer and unmaps its memory.
    pub fn disconnect(&mut self, peer: Rank) {
        self.peers.remove(peer);
    }

    /// Sends queued messages.
    pub fn flush(&mut self) {
        if self.has_unsent {
            self.flush_links();
        }
    }

    fn flush_links(&mut self) {
        self.has_unsent = false;
        for link in self.peers.values_mut().map(|peer| &mut peer.link) {
            // A broken socket stops descriptors only: stores need none.
            self.has_unsent |= link.flush().is_ok() && link.has_unsent();
        }
    }

    /// Writes one part: copies its pages and raises its lane. An error means that the peer is unreachable.
    #[inline]
    pub fn write(&mut self, work: &WorkRequest<'_>) -> Result<(), &'static str> {
        let peer = self.peers.get_mut(work.peer);
        let peer = peer.ok_or("it is not connected over shm")?;
        for page in work.pages {
            let from = self.regions.get(page.source);
            from.and_then(|from| peer.copy(page, &from.memory)).ok_or("a page is out of bounds")?;
        }
        peer.raise(work.lane, work.piggyback).ok_or("it has no such lane")
    }

    /// As [`LocalPeers::write`], for one of several writes: the lane is marked at the latest by
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
        peer.raise_in_batch(work.lane, bytes).ok_or("it has no such lane")
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
        }
    }

    /// Copies a page with the CPU, as [`LocalPeer::copy`] does.
    pub fn store(&self, to: Rank, page: &Page) -> Option<()> {
        let from = self.memory(page.source)?;
        self.peers.get(to)?.copy(page, from)
    }

    /// Raises a lane of a peer, as [`LocalPeer::raise`] does.
    pub fn raise(&mut self, peer: Rank, lane: Lane) -> Option<()> {
        self.peers.get_mut(peer)?.raise(lane, None)
    }

    /// The memory of a region of this rank.
    pub fn memory(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.regions.get(key)?.memory)
    }

    /// The memory of every region of this rank.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.regions.values().map(|own| &own.memory)
    }

    /// A peer's mapped region of host memory.
    pub fn mapped(&self, peer: Rank, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.peers.get(peer)?.region(key)?.memory)
    }

    /// See [`crate::Link::mapped_peer`].
    pub fn mapped_peer(&self, peer: Rank, key: RegionKey) -> Option<MappedPeer> {
        self.peers.get(peer)?.mapped(key)
    }

    /// Every mapped region of host memory of a peer.
    pub fn mapped_of(&self, peer: Rank) -> impl Iterator<Item = &Arc<Memory>> {
        let peer = self.peers.get(peer);
        peer.into_iter().flat_map(LocalPeer::regions).map(|region| &region.memory)
    }

    /// True if a peer's region of host memory is mapped with this entry.
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

/// Introduction of a provider: its lane table and wake-up descriptor.
fn table(lanes: &LaneTable) -> io::Result<LocalMessage> {
    let memory = lanes.words().memory().descriptor();
    let memory = memory.ok_or_else(|| io::Error::other("the lane table cannot be shared"))?;
    Ok(LocalMessage::Table {
        capacity: lanes.words().capacity() as u32,
        memory: memory.try_clone_to_owned()?,
        wake: lanes.descriptor().try_clone_to_owned()?,
    })
}
