//! Peer on this host: mapped regions and lanes.

use super::address::ProofToken;
use super::credentials::PeerCredentials;
use super::descriptor_socket::{LocalMessage, wrong_order};
use super::outbox::{Hello, Outbox};
use super::rendezvous::ConnectedPeer;
use crate::id_map::RegionMap;
use crate::lane_table::{LaneWords, wake};
use crate::lanes::Wake;
use crate::link::MappedPeer;
use crate::memory::Memory;
use crate::types::{Lane, Page, RegionKey};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, OnceLock};

/// A peer's mapped memory, and the descriptors to it and from it.
#[derive(Debug)]
pub(crate) struct LocalPeer {
    /// By the peer's keys.
    regions: RegionMap<MappedRegion>,
    words: Arc<LaneWords>,
    /// Peer lanes that this rank, the only agent on them, has raised.
    raised: Vec<RaisedLane>,
    unmarked: UnmarkedLanes,
    /// Leaf that the last marked lanes in a batch belong to.
    last_leaf: usize,
    /// Wakes the peer's sleeps on descriptors; empty before it announces the first.
    wake: Arc<OnceLock<OwnedFd>>,
    /// A raise found it asleep on a descriptor that this rank does not have yet.
    pub(super) owes_wake: bool,
    /// Token in the peer's hello.
    pub(super) token: ProofToken,
    /// Peer process when it connected.
    pub(super) process: PeerCredentials,
    pub(super) outbox: Outbox,
    /// It was sent this rank's event descriptor.
    pub(super) has_wake: bool,
    /// Received descriptors before they are imported, by key and serial.
    pub(super) arrived: HashMap<(RegionKey, u64), OwnedFd>,
    /// Error on the last connection.
    pub(super) failure: Option<io::Error>,
}

/// Peer lane and the value to which this rank has raised it.
#[derive(Clone, Copy, Debug)]
struct RaisedLane {
    lane: Lane,
    value: u64,
}

impl RaisedLane {
    /// Placeholder: reads like a lane at zero.
    const NONE: RaisedLane = RaisedLane { lane: Lane::from_immediate(0), value: 0 };
}

/// Lanes raised in a batch without dirty bits.
#[derive(Debug, Default)]
struct UnmarkedLanes {
    /// Leaves with the raised lanes' bits.
    leaves: [(u32, u64); UnmarkedLanes::LEAVES],
    count: usize,
    raises: u32,
    /// Bytes in these writes.
    bytes: u64,
}

impl UnmarkedLanes {
    /// Most leaves.
    const LEAVES: usize = 8;
    /// Raises and bytes after which the peer is notified, so that it works on them while others are written.
    const MAX_RAISES: u32 = 16;
    const MAX_BYTES: u64 = 16 << 10;

    /// Adds a lane; true if the lanes are to be marked now.
    #[inline]
    fn add(&mut self, lane: usize, bytes: u64) -> bool {
        let (leaf, bit) = ((lane / 64) as u32, 1 << (lane % 64));
        let known = self.leaves[..self.count].iter_mut().rev().find(|known| known.0 == leaf);
        match known {
            Some(known) => known.1 |= bit,
            None => {
                self.leaves[self.count] = (leaf, bit);
                self.count += 1;
            }
        }
        self.raises += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.count == UnmarkedLanes::LEAVES
            || self.raises >= UnmarkedLanes::MAX_RAISES
            || self.bytes >= UnmarkedLanes::MAX_BYTES
    }
}

#[derive(Debug)]
pub(super) struct MappedRegion {
    pub memory: Arc<Memory>,
    pub serial: u64,
}

impl LocalPeer {
    /// Makes a peer from the introduction, a lane table.
    pub(super) fn new(peer: ConnectedPeer, hello: Hello) -> io::Result<LocalPeer> {
        let ConnectedPeer { address, process, introduction, .. } = peer;
        let LocalMessage::Table { capacity, memory } = introduction else {
            return Err(wrong_order());
        };
        let length = LaneWords::bytes_for(capacity as usize);
        let memory = Memory::map(memory, length).map_err(io::Error::other)?;
        let words = LaneWords::new(memory.into(), capacity as usize);
        let words = words.ok_or_else(|| io::Error::other("its lane table is malformed"))?;
        Ok(LocalPeer {
            regions: RegionMap::default(),
            words: Arc::new(words),
            raised: Vec::new(),
            unmarked: UnmarkedLanes::default(),
            last_leaf: 0,
            wake: Arc::default(),
            owes_wake: false,
            token: address.token,
            process,
            outbox: Outbox::new(address.name, process, hello),
            has_wake: false,
            arrived: HashMap::new(),
            failure: None,
        })
    }

    /// Copies a page with the CPU; `None` if it is outside a region, or if a region is not host memory.
    #[inline]
    pub fn copy(&self, page: &Page, from: &Memory) -> Option<()> {
        let to = &self.region(page.destination)?.memory;
        from.try_copy_to(page.source_offset, to, page.destination_offset, page.length)
    }

    /// Raises a lane by one, and a piggybacked credit's lane; `None` if the peer has no such lane. This
    /// process's earlier stores are visible to a reader that sees the new value (release store).
    #[inline]
    pub fn raise(&mut self, lane: Lane, piggyback: Option<Lane>) -> Option<()> {
        let (number, value) = self.next(lane)?;
        let asleep = match piggyback {
            None => self.words.lanes().raise(number, value),
            Some(piggyback) => {
                let (other, others) = self.next(piggyback)?;
                if other == number ^ 1 {
                    self.words.lanes().raise_both(number, value, others)
                } else {
                    // The data lane first: the peer more likely waits for it.
                    self.wake(self.words.lanes().raise(number, value));
                    self.words.lanes().raise(other, others)
                }
            }
        };
        self.wake(asleep);
        Some(())
    }

    /// Prefetches the dirty bits that were set last for a batch, for the next one.
    #[inline]
    pub fn prefetch_dirty_bits(&self) {
        self.words.prefetch_leaf(self.last_leaf);
    }

    /// [`LocalPeer::raise`] in a batch, for a write with `bytes` bytes. [`LocalPeer::mark_raised`]
    /// follows the last one.
    #[inline]
    pub fn raise_in_batch(&mut self, lane: Lane, bytes: u64) -> Option<()> {
        let (number, value) = self.next(lane)?;
        self.words.lanes().raise_unmarked(number, value);
        if self.unmarked.add(number, bytes) {
            self.mark_raised();
        }
        Some(())
    }

    /// Sets dirty bits for the lanes raised in a batch, and wakes the peer.
    pub fn mark_raised(&mut self) {
        let UnmarkedLanes { leaves, count, .. } = std::mem::take(&mut self.unmarked);
        if count > 0 {
            self.last_leaf = leaves[count - 1].0 as usize;
            let leaves = leaves[..count].iter().map(|&(leaf, lanes)| (leaf as usize, lanes));
            self.wake(self.words.lanes().set_all_dirty(leaves));
        }
    }

    /// Lane number and next value.
    #[inline]
    fn next(&mut self, lane: Lane) -> Option<(usize, u64)> {
        let number = lane.id().get() as usize;
        let raised = match self.raised.get_mut(number) {
            Some(raised) if raised.lane == lane => raised,
            _ => self.begin(lane)?,
        };
        raised.value += 1;
        Some((number, raised.value))
    }

    /// Entry for a lane raised for the first time since it was issued, at value zero.
    #[cold]
    fn begin(&mut self, lane: Lane) -> Option<&mut RaisedLane> {
        let number = lane.id().get() as usize;
        if number >= self.words.capacity() {
            return None;
        }
        if self.raised.len() <= number {
            let room = (number + 1).next_power_of_two().min(self.words.capacity());
            self.raised.resize(room, RaisedLane::NONE);
        }
        self.raised[number] = RaisedLane { lane, value: 0 };
        Some(&mut self.raised[number])
    }

    #[inline]
    fn wake(&mut self, asleep: Wake) {
        if asleep != Wake::No {
            self.owes_wake |= !wake(self.words.lanes(), asleep, self.wake.get());
        }
    }

    /// Sets the peer's event descriptor, and does the wake-up that was owed.
    pub(super) fn set_wake(&mut self, descriptor: OwnedFd) {
        // A second one is the first.
        let _ = self.wake.set(descriptor);
        if std::mem::take(&mut self.owes_wake) {
            wake(self.words.lanes(), Wake::Descriptor, self.wake.get());
        }
    }

    /// Mapped host memory region.
    #[inline]
    pub(super) fn region(&self, key: RegionKey) -> Option<&MappedRegion> {
        self.regions.get(key)
    }

    /// Mapped host memory region, with the doorbell.
    pub(super) fn mapped(&self, key: RegionKey) -> Option<MappedPeer> {
        let memory = self.region(key)?.memory.clone();
        Some(MappedPeer { memory, words: self.words.clone(), wake: self.wake.clone() })
    }

    /// Every mapped host memory region.
    pub(super) fn regions(&self) -> impl Iterator<Item = &MappedRegion> {
        self.regions.values()
    }

    pub(super) fn map(&mut self, key: RegionKey, region: MappedRegion) {
        self.regions.insert(key, region);
    }

    pub(super) fn unmap(&mut self, key: RegionKey) {
        self.regions.remove(key);
    }
}
