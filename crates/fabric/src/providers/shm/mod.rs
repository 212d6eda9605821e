//! Ranks of one host: a write is stores into the peer's mapping and one release store of its lane.
//!
//! No lock, and a system call only to wake a peer that sleeps. Regions and lane tables are sealed
//! memory without names, whose descriptors travel over a Unix socket between each pair of ranks;
//! nothing is left behind. A post is done when it returns, so nothing ever needs progress, and
//! [`Provider::poll`] only pushes descriptors that a socket did not take at once.
//!
//! Every process that was given a descriptor is trusted: it can write all of that region at any time,
//! and what it has mapped cannot be taken back. That is why a poisoned group's memory is never used
//! again. A peer's death is noticed by the control plane, not here.
//!
//! - this file: posting, regions
//! - `connect.rs`: meeting the peers
//! - `link.rs`: the socket and its messages
//! - `address.rs`: what ranks know of each other before they meet
//! - [`exchange`]: one descriptor to each peer and one from each, for whoever else shares memory
//! - `beneath.rs`: what the `copy` provider takes from this one

mod address;
mod beneath;
mod connect;
pub mod exchange;
mod link;

#[cfg(any(test, feature = "fuzz"))]
pub use address::fuzz as fuzz_address;

use crate::bytes::Reader;
use crate::error::{Error, Result};
use crate::lane_table::{LaneWords, wake};
use crate::lanes::Wake;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::provider::{Capabilities, Group, Posted, Provider, Sink, Work};
use crate::types::{Generation, Lane, Page, ProviderKind, RegionKey, Time};
use address::Address;
use connect::refused;
use link::{Link, Message};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// Regions of one peer that can be written at a time. Keys are small numbers, given out densely.
const MAX_REGIONS: usize = 1 << 16;

/// How to open the provider.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Names this host. Ranks with different names do not reach each other here, so tests can pretend
    /// to be several hosts.
    pub host_id: String,
}

/// The provider. One for each engine.
#[derive(Debug)]
pub struct ShmProvider {
    /// In whose name errors are reported: `copy` is built on this provider.
    kind: ProviderKind,
    address: Address,
    /// Until the peers are connected.
    listener: Option<OwnedFd>,
    peers: Vec<Option<Peer>>,
    /// By key.
    regions: Vec<Option<Local>>,
    next_serial: u64,
    /// Whether some socket did not take all that was to be sent.
    unsent: bool,
}

/// A region of ours.
#[derive(Debug)]
struct Local {
    memory: Arc<Memory>,
    serial: u64,
    /// Who has its descriptor.
    pushed: Vec<Rank>,
}

/// A peer's memory as it is mapped here.
#[derive(Debug)]
struct Peer {
    /// By the peer's keys.
    regions: Vec<Option<Mapped>>,
    words: LaneWords,
    /// What each of its lanes that we raise has risen to; we are their only agent.
    raised: Vec<u64>,
    wake: OwnedFd,
    generation: Generation,
    link: Link,
    /// Descriptors that came and were not imported yet, by key and serial.
    arrived: HashMap<(RegionKey, u64), OwnedFd>,
}

#[derive(Debug)]
struct Mapped {
    memory: Arc<Memory>,
    serial: u64,
}

impl ShmProvider {
    /// Opens the provider and starts to listen for peers.
    pub fn new(config: ShmConfig) -> Result<ShmProvider> {
        ShmProvider::beneath(ProviderKind::Shm, &config.host_id, &[])
    }

    fn flush_links(&mut self) {
        self.unsent = false;
        for link in self.peers.iter_mut().flatten().map(|peer| &mut peer.link) {
            // A broken socket only means that no more descriptors pass; writes need none.
            self.unsent |= link.flush().is_ok() && link.has_unsent();
        }
    }
}

impl Peer {
    fn new(link: Link, words: LaneWords, wake: OwnedFd, generation: Generation) -> Peer {
        let raised = vec![0; words.capacity()];
        let (regions, arrived) = (Vec::new(), HashMap::new());
        Peer { regions, words, raised, wake, generation, link, arrived }
    }

    fn copy(&self, page: &Page, from: &Memory) -> Option<()> {
        let to = &self.regions.get(page.destination.0 as usize)?.as_ref()?.memory;
        from.try_copy_to(page.source_offset, to, page.destination_offset, page.length)
    }

    fn raise(&mut self, lane: Lane, rider: Option<Lane>) -> Option<()> {
        let (number, value) = self.next(lane)?;
        let asleep = match rider {
            None => self.words.lanes().raise(number, value),
            Some(rider) => {
                let (other, others) = self.next(rider)?;
                if other == number ^ 1 {
                    self.words.lanes().raise_both(number, value, others)
                } else {
                    // The peer waits for the bytes rather than for the credit.
                    self.wake(self.words.lanes().raise(number, value));
                    self.words.lanes().raise(other, others)
                }
            }
        };
        self.wake(asleep);
        Some(())
    }

    /// The number of a lane and what it rises to.
    fn next(&mut self, lane: Lane) -> Option<(usize, u64)> {
        let number = lane.id().get() as usize;
        let value = self.raised.get_mut(number).filter(|_| lane.generation() == self.generation)?;
        *value += 1;
        Some((number, *value))
    }

    fn wake(&self, asleep: Wake) {
        wake(self.words.lanes(), asleep, self.wake.as_fd());
    }

    /// Takes the messages that have come; an error ends the link.
    fn hear(&mut self) -> std::io::Result<()> {
        while let Some(message) = self.link.receive()? {
            match message {
                Message::Region { key, serial, memory } if self.arrived.len() < MAX_REGIONS => {
                    self.arrived.insert((key, serial), memory);
                }
                _ => return Err(std::io::Error::other("it sent messages in the wrong order")),
            }
        }
        Ok(())
    }
}

impl Provider for ShmProvider {
    fn kind(&self) -> ProviderKind {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { parts: PartRule::WHOLE, registered_destination: false, inline: true }
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn reaches(&self, address: &[u8]) -> bool {
        Address::decode(address).is_some_and(|address| address.domain == self.address.domain)
    }

    fn connect(&mut self, group: &Group<'_>) -> Result<()> {
        self.meet(group)
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = "the CPU cannot read it; copy it to host memory first".into();
            return Err(Error::Unusable { provider: self.kind, key, detail });
        }
        self.keep(key, memory)
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, _range: Range<u64>) -> Result<Vec<u8>> {
        let local = self.regions.get_mut(key.0 as usize).and_then(Option::as_mut);
        let local = local.ok_or_else(|| Error::Unknown { what: "region", number: key.0.into() })?;
        let Some(descriptor) = local.memory.descriptor() else {
            let detail = "peers can write only to memory that Weft allocated: use `alloc` for what \
                          is to be a destination";
            return Err(Error::Unusable { provider: self.kind, key, detail: detail.into() });
        };
        if !local.pushed.contains(&peer) {
            let to = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
            let to = to.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
            let memory = descriptor
                .try_clone_to_owned()
                .map_err(|e| Error::system("cannot share a region", e))?;
            let message = Message::Region { key, serial: local.serial, memory };
            to.link.send(message).map_err(|e| refused(self.kind, peer, e.to_string()))?;
            self.unsent |= to.link.has_unsent();
            local.pushed.push(peer);
        }
        Ok(local.serial.to_le_bytes().to_vec())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        deadline: Time,
    ) -> Result<()> {
        let mut reader = Reader::new(entry);
        let serial = reader.u64().filter(|_| reader.is_at_end() && (key.0 as usize) < MAX_REGIONS);
        let malformed = |detail: String| Error::Malformed { peer, what: "a region", detail };
        let serial = serial.ok_or_else(|| malformed(format!("{} bytes", entry.len())))?;
        let from = self.peers.get(peer.0 as usize).and_then(Option::as_ref);
        let known = from.and_then(|from| from.regions.get(key.0 as usize)?.as_ref());
        if known.is_some_and(|known| known.serial == serial) {
            return Ok(());
        }
        let descriptor = self.receive(peer, key, serial, deadline)?;
        let memory = usize::try_from(length)
            .map_err(|_| malformed(format!("{length} bytes do not fit into this process")))
            .and_then(|length| Memory::map(descriptor, length))?;
        let from = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        let from = from.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
        let index = key.0 as usize;
        if from.regions.len() <= index {
            from.regions.resize_with(index + 1, || None);
        }
        from.regions[index] = Some(Mapped { memory: Arc::new(memory), serial });
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        if let Some(slot) = self.regions.get_mut(key.0 as usize) {
            *slot = None;
        }
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        let peer = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        if let Some(mapped) = peer.and_then(|peer| peer.regions.get_mut(key.0 as usize)) {
            *mapped = None;
        }
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        let peer = self.peers.get_mut(work.peer.0 as usize).and_then(Option::as_mut);
        let peer = peer.ok_or("it is not connected over shm")?;
        for page in work.pages {
            let from = self.regions.get(page.source.0 as usize).and_then(Option::as_ref);
            from.and_then(|from| peer.copy(page, &from.memory)).ok_or("a page is out of bounds")?;
        }
        peer.raise(work.lane, work.rider).ok_or("it has no such lane")?;
        Ok(Posted::Done)
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, _sink: &mut Sink) {
        if self.unsent {
            self.flush_links();
        }
    }

    /// Drops everything that is mapped of the peer. Nothing is ever in flight.
    fn fence(&mut self, peer: Rank, _sink: &mut Sink) {
        if let Some(slot) = self.peers.get_mut(peer.0 as usize) {
            *slot = None;
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}
