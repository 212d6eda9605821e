//! Heap builder: checks all ranks' offers and maps the parts.

use super::location::{MemoryKind, MemoryLocation};
use super::offer::{Offer, OfferMessage};
use super::part::{self, HeapPart};
use super::process_identity::{ProcessIdentity, SAME_NAMESPACE};
use super::symmetric::Heap;
use super::user_memory::{SharedUserMemory, UserMemory};
use crate::error::{Error, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use weft_control::Rank;
use weft_fabric::{DescriptorExchange, Time, WaitLimit};

/// A rank's part, allocated and not yet connected to peers' parts.
#[derive(Debug)]
pub struct HeapBuilder {
    location: MemoryLocation,
    part: HeapPart,
    offer: Offer,
    /// Listening socket for descriptors; `None` for IPC.
    exchange: Option<DescriptorExchange>,
}

impl HeapBuilder {
    /// Allocates this rank's part, all zeros.
    ///
    /// # Errors
    /// [`Error::Empty`] for 0 bytes; driver or system errors without memory.
    pub fn allocate(location: MemoryLocation, bytes: u64) -> Result<HeapBuilder> {
        if bytes == 0 {
            return Err(Error::Empty { bytes, ranks: 1 });
        }
        HeapBuilder::of(location, HeapPart::allocate(&location, bytes)?, bytes)
    }

    pub(super) fn with_user_memory(
        location: MemoryLocation,
        memory: UserMemory,
    ) -> Result<HeapBuilder> {
        let bytes = memory.bytes;
        if bytes == 0 {
            return Err(Error::Empty { bytes, ranks: 1 });
        }
        HeapBuilder::of(location, HeapPart::User(SharedUserMemory::new(&location, memory)?), bytes)
    }

    /// Builder for an existing part.
    fn of(location: MemoryLocation, part: HeapPart, bytes: u64) -> Result<HeapBuilder> {
        let process = ProcessIdentity::here();
        let exchange = match location.memory() {
            MemoryKind::Ipc => None,
            MemoryKind::Fd | MemoryKind::Twin => Some(DescriptorExchange::open(&process.boot)?),
        };
        let (device, device_name) = part::identity(&location);
        let offer = Offer {
            memory: location.memory(),
            bytes,
            allocated: part.len(),
            process,
            device,
            device_name,
            address: exchange.as_ref().map(DescriptorExchange::address).unwrap_or_default(),
            handle: part.handle()?,
            file_offset: part.file_offset(),
        };
        Ok(HeapBuilder { location, part, offer, exchange })
    }

    /// This rank's offer for all peers, sent over the control plane; it holds a secret.
    pub fn offer(&self) -> Vec<u8> {
        OfferMessage::Offer(Box::new(self.offer.clone())).encode()
    }

    /// Maps the peers' parts. Collective, with all ranks' offers in rank order.
    ///
    /// Deadlock-free: each rank listens from allocation on, and serves all peers concurrently. On return, this rank
    /// has mapped all parts and sent its own to all.
    ///
    /// # Errors
    /// [`Error::OtherHost`], [`Error::Namespace`], [`Error::Disagreement`], [`Error::NoPeerAccess`] and
    /// [`Error::Peer`] for a peer that cannot join this heap; [`Error::Exchange`] for a peer that does not connect
    /// before the deadline; driver errors.
    pub fn connect(self, rank: u32, offers: Vec<Vec<u8>>, deadline: Time) -> Result<Heap> {
        let offers = self.check(rank, &offers)?;
        self.map(rank, &offers, &mut WaitLimit { deadline, give_up: &mut || Ok(()) })
    }

    /// Decodes and checks all ranks' offers before any descriptor exchange.
    pub(super) fn check(&self, rank: u32, offers: &[Vec<u8>]) -> Result<Vec<Offer>> {
        if offers.get(rank as usize) != Some(&self.offer()) {
            return Err(Error::WrongOffers { rank, offers: offers.len() });
        }
        let mut decoded = Vec::new();
        for (peer, bytes) in (0..).map(Rank).zip(offers) {
            let offer = match OfferMessage::decode(bytes) {
                Some(OfferMessage::Offer(offer)) => *offer,
                Some(OfferMessage::Refusal(detail)) => return Err(Error::Peer { peer, detail }),
                None => {
                    let detail = format!("{} bytes", bytes.len());
                    return Err(Error::Malformed { peer, detail });
                }
            };
            if peer.0 != rank {
                self.admit(rank, peer, &offer)?;
            }
            decoded.push(offer);
        }
        Ok(decoded)
    }

    fn admit(&self, rank: u32, peer: Rank, theirs: &Offer) -> Result<()> {
        let ours = &self.offer;
        ours.process.same_host(peer, &theirs.process)?;
        if (ours.memory, ours.bytes) != (theirs.memory, theirs.bytes) {
            let (ours, theirs) = (ours.shape(), theirs.shape());
            return Err(Error::Disagreement { peer, ours, theirs });
        }
        if ours.memory != MemoryKind::Ipc {
            ours.process.same_sockets(peer, &theirs.process)?;
        }
        part::admit(&self.location, rank, peer, theirs)
    }

    /// Sends this rank's part to the others and maps theirs.
    pub(super) fn map(
        self,
        rank: u32,
        offers: &[Offer],
        limit: &mut WaitLimit<'_>,
    ) -> Result<Heap> {
        let HeapBuilder { location, part, offer, exchange } = self;
        let addresses: Vec<(Rank, &[u8])> = (0..)
            .map(Rank)
            .zip(offers)
            .filter(|(peer, _)| peer.0 != rank)
            .map(|(peer, offer)| (peer, offer.address.as_slice()))
            .collect();
        let mut given: HashMap<Rank, OwnedFd> = HashMap::new();
        if let Some(exchange) = exchange.filter(|_| !addresses.is_empty())
            && let Some(own) = part.descriptor()?
        {
            let failed = |source| match source {
                // The wait ended early: the group has failed.
                weft_fabric::Error::Control(_) => Error::Fabric(source),
                source => Error::Exchange { source, remedy: SAME_NAMESPACE },
            };
            let swapped = exchange.swap(Rank(rank), &addresses, own.as_fd(), limit);
            let swapped = swapped.map_err(failed)?;
            given = addresses.iter().map(|(peer, _)| *peer).zip(swapped).collect();
        }
        // User memory is kept by the user.
        let ours = !matches!(part, HeapPart::User(_));
        let leaks = ours && offer.memory == MemoryKind::Ipc && offers.len() > 1;
        let mut own = Some(part);
        let mut parts = Vec::new();
        for (peer, theirs) in (0..).map(Rank).zip(offers) {
            let part = match own.take_if(|_| peer.0 == rank) {
                Some(own) => own,
                None => HeapPart::import(&location, peer, given.remove(&peer), theirs)
                    .map_err(|error| explain(error, rank, peer, &offer, theirs))?,
            };
            parts.push(Arc::new(part));
        }
        Ok(Heap::new(rank, offer.bytes, location, parts, leaks, identity(offers)))
    }
}

/// Digest over all offers, which all ranks have in the same order.
fn identity(offers: &[Offer]) -> u64 {
    let mut hasher = DefaultHasher::new();
    offers.iter().for_each(|offer| {
        OfferMessage::Offer(Box::new(offer.clone())).encode().hash(&mut hasher);
    });
    hasher.finish()
}

/// Adds the peer and the usual remedy to a CUDA error.
fn explain(error: Error, rank: u32, peer: Rank, ours: &Offer, theirs: &Offer) -> Error {
    let Error::Cuda(source) = error else { return error };
    let source = Box::new(source);
    let (here, there) = (ours.device_name.clone(), theirs.device_name.clone());
    let (mine, other) = (&ours.process, &theirs.process);
    let remedy = if ours.memory == MemoryKind::Fd {
        "the two GPUs need peer access (`nvidia-smi topo -p2p r`) and the ranks one driver version"
    } else if mine == other {
        "a process cannot open its own handle: use memory=\"fd\""
    } else if mine.processes != other.processes {
        "they are in different PID namespaces: start the containers with one --pid (such as host) \
         and --ipc=host, or use memory=\"fd\" within one network namespace"
    } else {
        "IPC handles need processes of one user that may trace each other (same PID namespace, same \
         permissions): fix the permissions, or use memory=\"fd\""
    };
    Error::Map { rank, peer, here, there, source, remedy }
}
