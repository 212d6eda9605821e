//! One peer of this host: its regions and lanes as they are mapped here.

use super::link::wrong_order;
use super::{Link, MAX_REGIONS, Message};
use crate::lane_table::{LaneWords, wake};
use crate::lanes::Wake;
use crate::memory::Memory;
use crate::types::{Lane, Page, RegionKey};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// A peer's memory as it is mapped here, and the link over which its descriptors come.
#[derive(Debug)]
pub(crate) struct Peer {
    /// By the peer's keys.
    regions: Vec<Option<MappedRegion>>,
    words: LaneWords,
    /// The lanes of the peer that this rank has raised; this rank is their only agent.
    raised: Vec<RaisedLane>,
    wake: OwnedFd,
    pub(super) link: Link,
    /// Descriptors that came and were not imported yet, by key and serial.
    pub(super) arrived: HashMap<(RegionKey, u64), OwnedFd>,
}

/// A lane of a peer and the value that this rank raised it to.
#[derive(Clone, Copy, Debug)]
struct RaisedLane {
    lane: Lane,
    value: u64,
}

impl RaisedLane {
    /// No lane at zero differs from a lane that was begun at zero in nothing that is read.
    const NONE: RaisedLane = RaisedLane { lane: Lane::from_immediate(0), value: 0 };
}

#[derive(Debug)]
pub(super) struct MappedRegion {
    pub memory: Arc<Memory>,
    pub serial: u64,
}

impl Peer {
    /// A peer whose introduction is its lane table.
    pub(super) fn new(link: Link, introduction: Message) -> io::Result<Peer> {
        let Message::Table { capacity, memory, wake } = introduction else {
            return Err(wrong_order());
        };
        let length = LaneWords::bytes_for(capacity as usize);
        let memory = Memory::map(memory, length).map_err(io::Error::other)?;
        let words = LaneWords::new(memory.into(), capacity as usize);
        let words = words.ok_or_else(|| io::Error::other("its lane table is no table"))?;
        let (raised, regions, arrived) = (Vec::new(), Vec::new(), HashMap::new());
        Ok(Peer { regions, words, raised, wake, link, arrived })
    }

    /// Copies a page with the CPU; `None` if it is not inside both regions, or one of them is not of
    /// host memory.
    #[inline]
    pub fn copy(&self, page: &Page, from: &Memory) -> Option<()> {
        let to = &self.region(page.destination)?.memory;
        from.try_copy_to(page.source_offset, to, page.destination_offset, page.length)
    }

    /// Raises a lane by one, and that of a rider; `None` if the peer has no such lane. Stores of this
    /// process that came before are visible to a reader of the new value (release).
    #[inline]
    pub fn raise(&mut self, lane: Lane, rider: Option<Lane>) -> Option<()> {
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

    /// The number of a lane and its next value.
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

    /// A lane that is raised for the first time since it was issued, and so stands at zero.
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

    /// A region of host memory that is mapped here.
    #[inline]
    pub(super) fn region(&self, key: RegionKey) -> Option<&MappedRegion> {
        self.regions.get(key.0 as usize)?.as_ref()
    }

    /// Every region of host memory that is mapped here.
    pub(super) fn regions(&self) -> impl Iterator<Item = &MappedRegion> {
        self.regions.iter().flatten()
    }

    pub(super) fn map(&mut self, key: RegionKey, region: MappedRegion) {
        let index = key.0 as usize;
        if self.regions.len() <= index {
            self.regions.resize_with(index + 1, || None);
        }
        self.regions[index] = Some(region);
    }

    pub(super) fn unmap(&mut self, key: RegionKey) {
        if let Some(mapped) = self.regions.get_mut(key.0 as usize) {
            *mapped = None;
        }
    }

    /// Takes the descriptors that have come; an error ends the link.
    pub(super) fn receive_descriptors(&mut self) -> io::Result<()> {
        while let Some(message) = self.link.receive()? {
            match message {
                Message::Region { key, serial, memory } if self.arrived.len() < MAX_REGIONS => {
                    self.arrived.insert((key, serial), memory);
                }
                _ => return Err(wrong_order()),
            }
        }
        Ok(())
    }
}
