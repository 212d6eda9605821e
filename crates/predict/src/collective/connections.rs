//! Who writes to whom, over which path, and what is under way there.

use weft_topology::EndpointId;

use crate::error::Error;
use crate::world::{Path, World};

/// No connection, no entry.
pub(crate) const NONE: u32 = u32::MAX;
/// From how many peers on a rank looks them up in a table of all ranks.
const DENSE: usize = 24;

/// One direction between two ranks. Its writes arrive in the order in which they were posted, as on a
/// reliable queue pair: a write posted behind another one moves when that one has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connection {
    pub path: Path,
    pub from: u32,
    pub to: u32,
    /// Writes posted and writes arrived since the start.
    pub sent: u32,
    pub arrived: u32,
    /// The lane of the first write of a round, and how far each next one's is from it. So a lane need not be
    /// counted: writes arrive in order, and which of them raises it follows from its number.
    first_lane: u32,
    stride: i32,
    /// Where lanes do not follow such a rule, the place of the list of them; else `NONE`.
    irregular: u32,
    /// Writes of a round, known once the sender has ended its first one; until then 0.
    period: u32,
    /// The first and the last write in the queue behind the one that moves.
    pub first: u32,
    pub last: u32,
}

/// A write that waits for those before it on its connection.
#[derive(Clone, Copy, Debug)]
struct Queued {
    bytes: u64,
    /// When its first byte would arrive if nothing were before it.
    ready_s: f64,
    next: u32,
}

/// All connections of a set of ranks, made when first used.
pub(crate) struct Connections {
    pub list: Vec<Connection>,
    peers: Vec<Peers>,
    queue: Vec<Queued>,
    free: u32,
    endpoints: Vec<EndpointId>,
    /// Tells the connections of one set of ranks from those of another for ECMP's hash.
    group: u64,
    /// The lanes of the first round's writes, in order, of connections that are irregular.
    lanes: Vec<Vec<u32>>,
}

impl Connection {
    /// Writes posted and not yet arrived.
    pub fn under_way(&self) -> u32 {
        self.sent - self.arrived
    }

    /// Takes note of the lane of the next write of the first round.
    fn learn(&mut self, lane: u32, lists: &mut Vec<Vec<u32>>) {
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

    /// The write of a round, counted from 0, that raises `lane` for the `count`th time, as far as known.
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

    /// Whether in `round` of the receiver `lane` has risen `count` times.
    fn risen(&self, round: u32, lane: u32, count: u32, lists: &[Vec<u32>]) -> bool {
        if self.arrived == 0 {
            return false;
        }
        let Some(write) = self.write_of(lane, count, lists) else { return false };
        if self.period == 0 {
            return round == 0 && write < self.arrived;
        }
        write < self.period && self.arrived > round * self.period + write
    }
}

/// The connection of a rank to a peer.
#[derive(Clone, Copy, Debug)]
struct Peer {
    rank: u32,
    connection: u32,
}

/// The connections of one rank to others, by peer.
#[derive(Clone, Debug, Default)]
struct Peers {
    list: Vec<Peer>,
    /// The place of each rank in the list, once that is long.
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
            // Most have a few, and growing costs more than making room for them at once.
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

impl Connections {
    pub fn new(endpoints: Vec<EndpointId>, group: u64) -> Connections {
        Connections {
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

    /// The connection from one rank to another.
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

    /// Sends `bytes` that are posted at `posted_s`, behind what is under way on the connection.
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
            connection.learn(lane, &mut self.lanes);
        }
        connection.sent += 1;
        let ready_s = posted_s + connection.path.latency_s;
        if connection.under_way() == 1 {
            return world.start_flow(connection.path, bytes, ready_s - world.now(), tag);
        }
        let queued = Queued { bytes, ready_s, next: NONE };
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

    /// Notes that the write that moved has arrived, and starts the one behind it.
    pub fn arrive(&mut self, world: &mut World, number: u32, tag: u64) -> Result<(), Error> {
        let connection = &mut self.list[number as usize];
        connection.arrived += 1;
        let place = connection.first;
        if place == NONE {
            return Ok(());
        }
        let Queued { bytes, ready_s, next } = self.queue[place as usize];
        connection.first = next;
        self.queue[place as usize].next = self.free;
        self.free = place;
        let delay = (ready_s - world.now()).max(0.0);
        world.start_flow(connection.path, bytes, delay, tag)
    }

    /// Whether in `round` of its receiver a connection's `lane` has risen `count` times.
    pub fn risen(&self, number: u32, round: u32, lane: u32, count: u32) -> bool {
        self.list[number as usize].risen(round, lane, count, &self.lanes)
    }

    /// Notes that a rank has posted all writes of its first round.
    pub fn end_first_round(&mut self, rank: u32) {
        for peer in &self.peers[rank as usize].list {
            let connection = &mut self.list[peer.connection as usize];
            connection.period = connection.sent;
        }
    }
}
