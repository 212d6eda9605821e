//! This rank's regions, and the table of the peers of its host that are connected.

use super::peer::MappedRegion;
use super::{
    Address, MAX_REGIONS, Meeting, Message, MetPeer, Party, Peer, WaitLimit, refused, socket, wait,
};
use crate::bytes::Reader;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Membership, Work};
use crate::memory::Memory;
use crate::types::{Lane, Page, ProviderKind, RegionKey};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use weft_control::Rank;

/// Bytes of the entry that a grant returns: the serial of the region.
pub(crate) const ENTRY_BYTES: usize = size_of::<u64>();

/// Regions, peers and links of a provider for ranks of this host.
#[derive(Debug)]
pub(crate) struct LocalPeers {
    /// The provider that errors name.
    kind: ProviderKind,
    address: Address,
    /// Until the peers are connected.
    listener: Option<OwnedFd>,
    /// By rank; `None` where another provider has the route.
    peers: Vec<Option<Peer>>,
    /// By key.
    regions: Vec<Option<OwnRegion>>,
    next_serial: u64,
    /// Whether some link holds unsent messages.
    has_unsent: bool,
}

/// A region of this rank.
#[derive(Debug)]
struct OwnRegion {
    memory: Arc<Memory>,
    serial: u64,
    /// The peers that have its descriptor.
    sent_to: Vec<Rank>,
}

impl LocalPeers {
    /// Listens for peers. Ranks of equal `host_id` and `flavour` reach each other.
    pub fn open(kind: ProviderKind, host_id: &str, flavour: &[u8]) -> Result<LocalPeers> {
        let mut address = Address::new(host_id)?;
        address.domain.extend_from_slice(flavour);
        let listener = Some(socket::listen(&address.name)?);
        let (peers, regions) = (Vec::new(), Vec::new());
        Ok(LocalPeers {
            kind,
            address,
            listener,
            peers,
            regions,
            next_serial: 0,
            has_unsent: false,
        })
    }

    /// See [`crate::Link::address`].
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// Whether the process with this address can be met.
    pub fn reaches(&self, address: &[u8]) -> bool {
        Address::decode(address).is_some_and(|address| address.domain == self.address.domain)
    }

    /// Connects these peers, or fails naming the first that is missing.
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
        let party = Party {
            kind,
            rank: group.rank,
            generation,
            token: self.address.token,
            listener: &listener,
            introduction: &|| table(&group.lanes),
        };
        let peers: Vec<_> = peers.iter().map(|peer| (peer.peer, peer.address)).collect();
        let met = Meeting::new(party, &peers)?.run(limit)?;
        self.peers.resize_with(group.size as usize, || None);
        for MetPeer { rank, link, introduction } in met {
            let peer = Peer::new(link, introduction);
            let peer = peer.map_err(|error| refused(kind, rank, error))?;
            if let Some(slot) = self.peers.get_mut(rank.index()) {
                *slot = Some(peer);
            }
        }
        Ok(())
    }

    /// Makes `memory`, of whichever place, known as `key`.
    pub fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        let index = key.0 as usize;
        if index >= MAX_REGIONS {
            let (wanted, limit) = (index as u64 + 1, MAX_REGIONS as u64);
            return Err(Error::Limit { what: "regions over shm", wanted, limit });
        }
        if self.regions.len() <= index {
            self.regions.resize_with(index + 1, || None);
        }
        let (memory, serial, sent_to) = (memory.clone(), self.next_serial, Vec::new());
        self.next_serial += 1;
        self.regions[index] = Some(OwnRegion { memory, serial, sent_to });
        Ok(())
    }

    /// Sends a region's descriptor to a peer; returns the entry that the peer imports.
    pub fn grant(&mut self, key: RegionKey, peer: Rank) -> Result<[u8; ENTRY_BYTES]> {
        let own = self.regions.get_mut(key.0 as usize).and_then(Option::as_mut);
        let own = own.ok_or_else(|| Error::Unknown { what: "region", number: key.0.into() })?;
        let Some(descriptor) = own.memory.descriptor() else {
            let detail = "peers can write only to memory that Weft allocated: use `alloc` for what \
                          is to be a destination";
            return Err(Error::Unusable { provider: self.kind, key, detail: detail.into() });
        };
        if !own.sent_to.contains(&peer) {
            let to = self.peers.get_mut(peer.index()).and_then(Option::as_mut);
            let to = to.ok_or_else(|| unknown(peer))?;
            let memory = descriptor
                .try_clone_to_owned()
                .map_err(|e| Error::system("cannot share a region", e))?;
            let message = Message::Region { key, serial: own.serial, memory };
            to.link.send(message).map_err(|e| refused(self.kind, peer, e))?;
            self.has_unsent |= to.link.has_unsent();
            own.sent_to.push(peer);
        }
        Ok(own.serial.to_le_bytes())
    }

    /// Maps a peer's region of host memory, once for each entry.
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

    /// Takes the descriptor of a region that was granted, which its owner sends over the link.
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
            received.map_err(|error| refused(kind, peer, error))?;
            let Some(timeout) = limit.park()? else {
                let detail = format!("region {} did not come before the deadline", key.0);
                return Err(refused(kind, peer, detail));
            };
            let links = (0..).map(Rank).zip(&self.peers);
            let mut polled: Vec<_> = links
                .filter_map(|(rank, other)| Some(other.as_ref()?.link.interest(rank == peer)))
                .collect();
            wait::sleep(&mut polled, timeout);
        }
    }

    /// Forgets a region of this rank.
    pub fn deregister(&mut self, key: RegionKey) {
        if let Some(slot) = self.regions.get_mut(key.0 as usize) {
            *slot = None;
        }
    }

    /// Unmaps a peer's region.
    pub fn forget(&mut self, peer: Rank, key: RegionKey) {
        if let Ok(peer) = self.peer_mut(peer) {
            peer.unmap(key);
        }
    }

    /// Drops the link to a peer and all that is mapped of it.
    pub fn disconnect(&mut self, peer: Rank) {
        if let Some(slot) = self.peers.get_mut(peer.index()) {
            *slot = None;
        }
    }

    /// Sends messages that their sockets did not take at once.
    pub fn flush(&mut self) {
        if self.has_unsent {
            self.flush_links();
        }
    }

    fn flush_links(&mut self) {
        self.has_unsent = false;
        for link in self.peers.iter_mut().flatten().map(|peer| &mut peer.link) {
            // A broken link stops descriptors alone: stores need none.
            self.has_unsent |= link.flush().is_ok() && link.has_unsent();
        }
    }

    /// Writes one part: copies its pages and raises its lane. The error is the reason why the peer
    /// cannot be written to.
    #[inline]
    pub fn write(&mut self, work: &Work<'_>) -> Result<(), &'static str> {
        let peer = self.peers.get_mut(work.peer.0 as usize).and_then(Option::as_mut);
        let peer = peer.ok_or("it is not connected over shm")?;
        for page in work.pages {
            let from = self.regions.get(page.source.0 as usize).and_then(Option::as_ref);
            from.and_then(|from| peer.copy(page, &from.memory)).ok_or("a page is out of bounds")?;
        }
        peer.raise(work.lane, work.rider).ok_or("it has no such lane")
    }

    /// Copies a page with the CPU, as [`Peer::copy`] does.
    pub fn store(&self, to: Rank, page: &Page) -> Option<()> {
        let from = self.memory(page.source)?;
        self.peers.get(to.index())?.as_ref()?.copy(page, from)
    }

    /// Raises a lane of a peer, as [`Peer::raise`] does.
    pub fn raise(&mut self, peer: Rank, lane: Lane) -> Option<()> {
        self.peers.get_mut(peer.index())?.as_mut()?.raise(lane, None)
    }

    /// The memory of a region of this rank.
    pub fn memory(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.regions.get(key.0 as usize)?.as_ref()?.memory)
    }

    /// The memory of every region of this rank.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.regions.iter().flatten().map(|own| &own.memory)
    }

    /// A peer's region of host memory, as it is mapped here.
    pub fn mapped(&self, peer: Rank, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.peers.get(peer.index())?.as_ref()?.region(key)?.memory)
    }

    /// Every region of host memory of a peer, as it is mapped here.
    pub fn mapped_of(&self, peer: Rank) -> impl Iterator<Item = &Arc<Memory>> {
        let peer = self.peers.get(peer.index()).and_then(Option::as_ref);
        peer.into_iter().flat_map(Peer::regions).map(|region| &region.memory)
    }

    /// Whether a peer's region of host memory is mapped here with this entry.
    pub fn is_mapped(&self, peer: Rank, key: RegionKey, entry: &[u8]) -> bool {
        let peer = self.peers.get(peer.index()).and_then(Option::as_ref);
        let region = peer.and_then(|peer| peer.region(key));
        region.is_some_and(|region| region.serial.to_le_bytes() == entry)
    }

    fn peer_mut(&mut self, rank: Rank) -> Result<&mut Peer> {
        let peer = self.peers.get_mut(rank.index()).and_then(Option::as_mut);
        peer.ok_or_else(|| unknown(rank))
    }
}

fn unknown(rank: Rank) -> Error {
    Error::Unknown { what: "rank", number: rank.0.into() }
}

/// The introduction of a provider: its lanes, and the descriptor that wakes it.
fn table(lanes: &LaneTable) -> io::Result<Message> {
    let memory = lanes.words().memory().descriptor();
    let memory = memory.ok_or_else(|| io::Error::other("the lane table cannot be shared"))?;
    Ok(Message::Table {
        capacity: lanes.words().capacity() as u32,
        memory: memory.try_clone_to_owned()?,
        wake: lanes.descriptor().try_clone_to_owned()?,
    })
}
