//! From offers to a heap: who is refused, and how the others are mapped.

use super::offer::{Offer, Said};
use super::part::{self, Part};
use super::surroundings::SAME_NAMESPACE;
use super::{Heap, HeapBuilder, Memory};
use crate::error::{Error, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use std::collections::HashMap;
use std::sync::Arc;
use weft_control::Rank;
use weft_fabric::Time;
use weft_fabric::local::WaitLimit;

impl HeapBuilder {
    /// Maps the peers' parts. Every rank calls this with the offers of all ranks, in rank order.
    ///
    /// No order of ranks can deadlock: each listens since it has allocated, and serves all its peers at
    /// once. When it returns, this rank has mapped all and given its own to all.
    ///
    /// # Errors
    /// [`Error::OtherHost`], [`Error::Namespace`], [`Error::Disagreement`], [`Error::NoPeerAccess`] and
    /// [`Error::Peer`] for a peer that cannot be in this heap; [`Error::Exchange`] if one was not there
    /// before the deadline; what the driver says of the memory.
    pub fn connect(self, rank: u32, offers: Vec<Vec<u8>>, deadline: Time) -> Result<Heap> {
        let offers = self.check(rank, &offers)?;
        self.map(rank, &offers, &mut WaitLimit { deadline, give_up: &mut || Ok(()) })
    }

    /// The offers of all ranks, if all of them can be in one heap. Nothing has travelled yet.
    pub(super) fn check(&self, rank: u32, offers: &[Vec<u8>]) -> Result<Vec<Offer>> {
        if offers.get(rank as usize) != Some(&self.offer()) {
            return Err(Error::WrongOffers { rank, offers: offers.len() });
        }
        let mut decoded = Vec::new();
        for (peer, bytes) in (0..).map(Rank).zip(offers) {
            let offer = match Said::decode(bytes) {
                Some(Said::Offer(offer)) => *offer,
                Some(Said::Refusal(detail)) => return Err(Error::Peer { peer, detail }),
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
        ours.surroundings.same_host(peer, &theirs.surroundings)?;
        if (ours.memory, ours.bytes) != (theirs.memory, theirs.bytes) {
            let (ours, theirs) = (ours.shape(), theirs.shape());
            return Err(Error::Disagreement { peer, ours, theirs });
        }
        if ours.memory != Memory::Ipc {
            ours.surroundings.same_sockets(peer, &theirs.surroundings)?;
        }
        part::admit(&self.place, rank, peer, theirs)
    }

    /// Gives this rank's part to the others and maps theirs.
    pub(super) fn map(
        self,
        rank: u32,
        offers: &[Offer],
        limit: &mut WaitLimit<'_>,
    ) -> Result<Heap> {
        let HeapBuilder { place, part, offer, exchange } = self;
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
                // The wait was given up.
                weft_fabric::Error::Control(_) => Error::Fabric(source),
                source => Error::Exchange { source, remedy: SAME_NAMESPACE },
            };
            let swapped = exchange.swap(Rank(rank), &addresses, own.as_fd(), limit);
            let swapped = swapped.map_err(failed)?;
            given = addresses.iter().map(|(peer, _)| *peer).zip(swapped).collect();
        }
        let leaks = offer.memory == Memory::Ipc && offers.len() > 1;
        let mut own = Some(part);
        let mut parts = Vec::new();
        for (peer, theirs) in (0..).map(Rank).zip(offers) {
            let part = match own.take_if(|_| peer.0 == rank) {
                Some(own) => own,
                None => Part::import(&place, peer, given.remove(&peer), theirs)
                    .map_err(|error| explain(error, rank, peer, &offer, theirs))?,
            };
            parts.push(Arc::new(part));
        }
        Ok(Heap::new(rank, offer.bytes, place, parts, leaks))
    }
}

/// Adds to CUDA's word whose memory it was about, and what usually stands behind it.
fn explain(error: Error, rank: u32, peer: Rank, ours: &Offer, theirs: &Offer) -> Error {
    let Error::Cuda(source) = error else { return error };
    let source = Box::new(source);
    let (here, there) = (ours.device_name.clone(), theirs.device_name.clone());
    let (mine, other) = (&ours.surroundings, &theirs.surroundings);
    let remedy = if ours.memory == Memory::Fd {
        "the two GPUs must reach each other (`nvidia-smi topo -p2p r`) and the ranks must use one \
         driver"
    } else if mine == other {
        "both are of one process, which cannot open its own handle: use memory=\"fd\""
    } else if mine.processes != other.processes {
        "they are in different PID namespaces: start the containers with one --pid (such as host) \
         and --ipc=host, or use memory=\"fd\" within one network namespace"
    } else {
        "handles are opened only between processes of one user that may trace each other (same PID \
         namespace, same permissions): see to that, or use memory=\"fd\""
    };
    Error::Map { rank, peer, here, there, source, remedy }
}
