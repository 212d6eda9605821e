//! Peer of this host: its mapped regions and lanes.

use super::descriptor_socket::wrong_order;
use super::{DescriptorSocket, LocalMessage, MAX_REGIONS};
use crate::id_map::RegionMap;
use crate::lane_table::{LaneWords, wake};
use crate::lanes::Wake;
use crate::link::MappedPeer;
use crate::memory::Memory;
use crate::types::{Lane, Page, RegionKey};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// A peer's mapped memory, and the socket that carries its descriptors.
#[derive(Debug)]
pub(crate) struct LocalPeer {
    /// By the peer's keys.
    regions: RegionMap<MappedRegion>,
    words: Arc<LaneWords>,
    /// Lanes of the peer that this rank has raised; this rank is their only agent.
    raised: Vec<RaisedLane>,
    unmarked: UnmarkedLanes,
    /// Leaf of the last lanes marked of a batch.
    last_leaf: usize,
    wake: Arc<OwnedFd>,
    pub(super) link: DescriptorSocket,
    /// Received descriptors before their import, by key and serial.
    pub(super) arrived: HashMap<(RegionKey, u64), OwnedFd>,
}

/// Lane of a peer and the value to which this rank has raised it.
#[derive(Clone, Copy, Debug)]
struct RaisedLane {
    lane: Lane,
    value: u64,
}

impl RaisedLane {
    /// Placeholder: reads like a lane at zero.
    const NONE: RaisedLane = RaisedLane { lane: Lane::from_immediate(0), value: 0 };
}

/// Lanes raised in a batch without their dirty bits.
#[derive(Debug, Default)]
struct UnmarkedLanes {
    /// Leaves with the bits of raised lanes.
    leaves: [(u32, u64); UnmarkedLanes::LEAVES],
    count: usize,
    raises: u32,
    /// Bytes of their writes.
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
    /// A peer from its introduction, the lane table.
    pub(super) fn new(link: DescriptorSocket, introduction: LocalMessage) -> io::Result<LocalPeer> {
        let LocalMessage::Table { capacity, memory, wake } = introduction else {
            return Err(wrong_order());
        };
        let length = LaneWords::bytes_for(capacity as usize);
        let memory = Memory::map(memory, length).map_err(io::Error::other)?;
        let words = LaneWords::new(memory.into(), capacity as usize);
        let words = words.ok_or_else(|| io::Error::other("its lane table is malformed"))?;
        let (raised, regions, arrived) = (Vec::new(), RegionMap::default(), HashMap::new());
        let (words, wake) = (Arc::new(words), Arc::new(wake));
        let unmarked = UnmarkedLanes::default();
        Ok(LocalPeer { regions, words, raised, unmarked, last_leaf: 0, wake, link, arrived })
    }

    /// Copies a page with the CPU; `None` if it is outside of a region, or if a region is not host memory.
    #[inline]
    pub fn copy(&self, page: &Page, from: &Memory) -> Option<()> {
        let to = &self.region(page.destination)?.memory;
        from.try_copy_to(page.source_offset, to, page.destination_offset, page.length)
    }

    /// Raises a lane by one, and that of a piggybacked credit; `None` if the peer has no such lane. Earlier
    /// stores of this process are visible to a reader of the new value (release store).
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

    /// [`LocalPeer::raise`] in a batch, of a write of `bytes` bytes. [`LocalPeer::mark_raised`] follows the last one.
    #[inline]
    pub fn raise_in_batch(&mut self, lane: Lane, bytes: u64) -> Option<()> {
        let (number, value) = self.next(lane)?;
        self.words.lanes().raise_unmarked(number, value);
        if self.unmarked.add(number, bytes) {
            self.mark_raised();
        }
        Some(())
    }

    /// Sets the dirty bits of the lanes raised in a batch, and wakes the peer.
    pub fn mark_raised(&mut self) {
        let UnmarkedLanes { leaves, count, .. } = std::mem::take(&mut self.unmarked);
        if count > 0 {
            self.last_leaf = leaves[count - 1].0 as usize;
            let leaves = leaves[..count].iter().map(|&(leaf, lanes)| (leaf as usize, lanes));
            self.wake(self.words.lanes().set_all_dirty(leaves));
        }
    }

    /// Number of a lane and its next value.
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

    /// Entry of a lane at its first raise since its issue, at value zero.
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
    fn wake(&self, asleep: Wake) {
        wake(self.words.lanes(), asleep, self.wake.as_fd());
    }

    /// A mapped region of host memory.
    #[inline]
    pub(super) fn region(&self, key: RegionKey) -> Option<&MappedRegion> {
        self.regions.get(key)
    }

    /// A mapped region of host memory, with the doorbell.
    pub(super) fn mapped(&self, key: RegionKey) -> Option<MappedPeer> {
        let memory = self.region(key)?.memory.clone();
        Some(MappedPeer { memory, words: self.words.clone(), wake: self.wake.clone() })
    }

    /// Every mapped region of host memory.
    pub(super) fn regions(&self) -> impl Iterator<Item = &MappedRegion> {
        self.regions.values()
    }

    pub(super) fn map(&mut self, key: RegionKey, region: MappedRegion) {
        self.regions.insert(key, region);
    }

    pub(super) fn unmap(&mut self, key: RegionKey) {
        self.regions.remove(key);
    }

    /// Receives descriptors; an error ends the connection.
    pub(super) fn receive_descriptors(&mut self) -> io::Result<()> {
        while let Some(message) = self.link.receive()? {
            match message {
                LocalMessage::Region { key, serial, memory }
                    if self.arrived.len() < MAX_REGIONS =>
                {
                    self.arrived.insert((key, serial), memory);
                }
                _ => return Err(wrong_order()),
            }
        }
        Ok(())
    }
}
