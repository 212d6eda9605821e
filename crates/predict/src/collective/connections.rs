//! Connections between ranks: paths, writes in flight, queued writes, lane order.

use weft_topology::EndpointId;

use crate::error::Error;
use crate::world::{Path, World};

/// Index that stands for no connection or entry.
pub(crate) const NONE: u32 = u32::MAX;
/// Peer count above which a rank has a table with all ranks.
const DENSE: usize = 24;

/// One direction between two ranks. Writes arrive in post order, as on a reliable queue pair: a write moves once the
/// previous one has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connection {
    pub path: Path,
    pub from: u32,
    pub to: u32,
    /// Posted and arrived write counts.
    pub sent: u32,
    pub arrived: u32,
    /// Lane for a segment's first write, and the stride to the next ones. Lanes need no counters: writes arrive in
    /// order, and the lane number tells which write raises it.
    first_lane: u32,
    stride: i32,
    /// Index in the lists of lanes without such a stride; else `NONE`.
    irregular: u32,
    /// Writes per segment; 0 until the sender ends its first one.
    period: u32,
    /// First and last queued write behind the one in flight.
    pub first: u32,
    pub last: u32,
}

/// Write queued behind others on the same connection.
#[derive(Clone, Copy, Debug)]
struct QueuedWrite {
    bytes: u64,
    /// Time when the first byte would arrive on an idle connection.
    ready_s: f64,
    next: u32,
}

/// Connections among a set of ranks, created at first use.
pub(crate) struct ConnectionTable {
    pub list: Vec<Connection>,
    peers: Vec<Peers>,
    queue: Vec<QueuedWrite>,
    free: u32,
    endpoints: Vec<EndpointId>,
    /// Number of the rank set, as input to the ECMP hash.
    group: u64,
    /// Lanes for the first segment's writes, in order, on irregular connections.
    lanes: Vec<Vec<u32>>,
}

impl Connection {
    /// Number of writes in flight.
    pub fn in_flight(&self) -> u32 {
        self.sent - self.arrived
    }

    /// Records the lane for the first segment's next write.
    fn record_lane(&mut self, lane: u32, lists: &mut Vec<Vec<u32>>) {
        if self.irregular != NONE {
            lists[self.irregular as usize].push(lane);
            return;
        }
        let off = lane.wrapping_sub(self.first_lane) as i32;
        match self.sent {
            0 => self.first_lane = lane,
            1 => self.stride = off,
            sent if i64::from(off) == i64::from(self.stride) * i64::from(sent) => {}
            sent => {
                self.irregular = lists.len() as u32;
                let (first, stride) = (self.first_lane, self.stride);
                let lane_of = |write| first.wrapping_add_signed(stride * write as i32);
                lists.push((0..sent).map(lane_of).chain([lane]).collect());
            }
        }
    }

    /// Index within a segment of the write that raises `lane` for the `count`th time, if recorded.
    fn write_of(&self, lane: u32, count: u32, lists: &[Vec<u32>]) -> Option<u32> {
        if self.irregular != NONE {
            let list = &lists[self.irregular as usize];
            let mut rises = (0u32..).zip(list).filter(|(_, other)| **other == lane);
            return rises.nth((count as usize).saturating_sub(1)).map(|(write, _)| write);
        }
        let off = lane.wrapping_sub(self.first_lane) as i32;
        match self.stride {
            1 if off >= 0 && count == 1 => Some(off as u32),
            0 => (off == 0).then(|| count.saturating_sub(1)),
            stride if off % stride == 0 && off / stride >= 0 && count == 1 => {
                Some((off / stride) as u32)
            }
            _ => None,
        }
    }

    /// True if `lane` has risen `count` times in the receiver's `segment`.
    fn risen(&self, segment: u32, lane: u32, count: u32, lists: &[Vec<u32>]) -> bool {
        if self.arrived == 0 {
            return false;
        }
        let Some(write) = self.write_of(lane, count, lists) else { return false };
        if self.period == 0 {
            return segment == 0 && write < self.arrived;
        }
        write < self.period && self.arrived > segment * self.period + write
    }
}

/// A rank's connection to a peer.
#[derive(Clone, Copy, Debug)]
struct Peer {
    rank: u32,
    connection: u32,
}

/// One rank's connections, by peer.
#[derive(Clone, Debug, Default)]
struct Peers {
    list: Vec<Peer>,
    /// Index in the list by rank, for long lists.
    dense: Vec<u32>,
}

impl Peers {
    fn find(&self, peer: u32) -> Option<usize> {
        if self.dense.is_empty() {
            return self.list.iter().position(|other| other.rank == peer);
        }
        let place = self.dense[peer as usize];
        (place != NONE).then_some(place as usize)
    }

    fn add(&mut self, peer: u32, connection: u32, ranks: usize) {
        let place = self.list.len();
        if place == 0 {
            // Most ranks have a few peers: one reservation costs less than growth.
            self.list.reserve_exact(ranks.min(10));
        }
        self.list.push(Peer { rank: peer, connection });
        if !self.dense.is_empty() {
            self.dense[peer as usize] = place as u32;
        } else if self.list.len() > DENSE {
            self.dense = vec![NONE; ranks];
            for (place, peer) in self.list.iter().enumerate() {
                self.dense[peer.rank as usize] = place as u32;
            }
        }
    }
}

impl ConnectionTable {
    pub fn new(endpoints: Vec<EndpointId>, group: u64) -> ConnectionTable {
        ConnectionTable {
            list: Vec::with_capacity(endpoints.len()),
            peers: vec![Peers::default(); endpoints.len()],
            queue: Vec::new(),
            free: NONE,
            endpoints,
            group,
            lanes: Vec::new(),
        }
    }

    pub fn endpoint(&self, rank: u32) -> EndpointId {
        self.endpoints[rank as usize]
    }

    /// Connection from one rank to another.
    pub fn get(&mut self, world: &mut World, from: u32, to: u32) -> Result<u32, Error> {
        if let Some(place) = self.peers[from as usize].find(to) {
            return Ok(self.peers[from as usize].list[place].connection);
        }
        let ranks = self.endpoints.len() as u64;
        let flow = (self.group * ranks + u64::from(from)) * ranks + u64::from(to);
        let path = world.path(self.endpoint(from), self.endpoint(to), flow)?;
        let number = self.list.len() as u32;
        self.list.push(Connection {
            path,
            from,
            to,
            sent: 0,
            arrived: 0,
            first_lane: 0,
            stride: 0,
            irregular: NONE,
            period: 0,
            first: NONE,
            last: NONE,
        });
        self.peers[from as usize].add(to, number, ranks as usize);
        Ok(number)
    }

    /// Sends `bytes` posted at `posted_s`, behind the writes in flight.
    pub fn send(
        &mut self,
        world: &mut World,
        number: u32,
        lane: u32,
        bytes: u64,
        posted_s: f64,
        tag: u64,
    ) -> Result<(), Error> {
        let connection = &mut self.list[number as usize];
        if connection.period == 0 {
            connection.record_lane(lane, &mut self.lanes);
        }
        connection.sent += 1;
        let ready_s = posted_s + connection.path.latency_s;
        if connection.in_flight() == 1 {
            return world.start_flow(connection.path, bytes, ready_s - world.now(), tag);
        }
        let queued = QueuedWrite { bytes, ready_s, next: NONE };
        let place = if self.free == NONE {
            self.queue.push(queued);
            self.queue.len() as u32 - 1
        } else {
            let place = self.free;
            self.free = self.queue[place as usize].next;
            self.queue[place as usize] = queued;
            place
        };
        if connection.first == NONE {
            connection.first = place;
        } else {
            self.queue[connection.last as usize].next = place;
        }
        connection.last = place;
        Ok(())
    }

    /// Records that the write in flight has arrived, and starts the next one.
    pub fn arrive(&mut self, world: &mut World, number: u32, tag: u64) -> Result<(), Error> {
        let connection = &mut self.list[number as usize];
        connection.arrived += 1;
        let place = connection.first;
        if place == NONE {
            return Ok(());
        }
        let QueuedWrite { bytes, ready_s, next } = self.queue[place as usize];
        connection.first = next;
        self.queue[place as usize].next = self.free;
        self.free = place;
        let delay = (ready_s - world.now()).max(0.0);
        world.start_flow(connection.path, bytes, delay, tag)
    }

    /// True if a connection's `lane` has risen `count` times in the receiver's `segment`.
    pub fn risen(&self, number: u32, segment: u32, lane: u32, count: u32) -> bool {
        self.list[number as usize].risen(segment, lane, count, &self.lanes)
    }

    /// Records how many writes a segment has, at the end of the rank's first one.
    pub fn end_first_segment(&mut self, rank: u32) {
        for peer in &self.peers[rank as usize].list {
            let connection = &mut self.list[peer.connection as usize];
            connection.period = connection.sent;
        }
    }
}
