//! Chunk calls: chunk rings, with a flag for each source.
//!
//! A block's teams (sender, receiver or reducer, copier) take turns on one thread: each goes as far as it can. The
//! protocol is the same as in `kernels/collectives/chunks.cuh`.
//!
//! Memory order: the chunk bytes, then the flag with release; the flag with acquire, then the bytes. A chunk is read
//! before the flag for a later chunk, which is the credit, is raised.

use super::super::plan::Kernel;
use super::{AwaitedValue, Block, Failed, Phase, is_reached};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;
use weft_gpu::twin::Backoff;

/// Contribution ring, or the data itself in calls without arithmetic.
const CONTRIBUTED: u32 = 0;
/// All-reduce result ring.
const REDUCED: u32 = 1;

/// Call in a block.
struct Chunks<'a> {
    block: Block<'a>,
    /// Sequence numbers at which the call begins, by ring and peer.
    base: [Vec<u32>; 2],
    /// Chunks exchanged with each peer, in the longer direction.
    count: Vec<u32>,
    /// Largest count. Row `i` contains chunk `i` for all peers that have one.
    most: u32,
}

/// Role for a team that waits for chunks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Copies messages to the output.
    Receiver,
    /// Reduces contributions.
    Reducer,
    /// Copies results to the output.
    Copier,
}

/// Team that waits for chunks, row by row.
struct Team {
    role: Role,
    /// Rows that it has consumed.
    rows: u32,
    /// Peers in the next row that have arrived, in [`Chunks::peer`] order.
    steps: u32,
    /// Time when the present wait began.
    begun: Option<Instant>,
}

impl Team {
    fn new(role: Role) -> Team {
        Team { role, rows: 0, steps: 0, begun: None }
    }

    fn ring(&self) -> u32 {
        if self.role == Role::Copier { REDUCED } else { CONTRIBUTED }
    }

    fn phase(&self) -> Phase {
        if self.role == Role::Copier { Phase::Results } else { Phase::Contributions }
    }
}

impl<'a> Block<'a> {
    pub(super) fn run_chunks(&self) -> Result<(), Failed> {
        let chunks = Chunks::new(*self);
        let mut teams = match self.call.plan.kernel {
            Kernel::AllReduceChunks => vec![Team::new(Role::Reducer), Team::new(Role::Copier)],
            Kernel::ReduceChunks => vec![Team::new(Role::Reducer)],
            _ => {
                chunks.copy_own();
                vec![Team::new(Role::Receiver)]
            }
        };
        let (mut sent, mut backoff) = (0, Backoff::default());
        while sent < chunks.most || teams.iter().any(|team| team.rows < chunks.most) {
            self.jitter();
            let mut advanced = false;
            while sent < chunks.most && may_send(sent, &teams, self.layout().ring_chunks) {
                chunks.send_row(sent);
                (sent, advanced) = (sent + 1, true);
            }
            let mut rows_before = chunks.most;
            for team in &mut teams {
                if !self.twin.jitter.postpones() {
                    advanced |= chunks.advance(team, rows_before)?;
                }
                rows_before = team.rows;
            }
            match advanced {
                true => backoff = Backoff::default(),
                false => backoff.pause(),
            }
        }
        chunks.end(teams.len() > 1);
        Ok(())
    }
}

/// Credits: a contribution may be sent once the one half a ring before has been consumed, and the result one ring
/// before.
fn may_send(row: u32, teams: &[Team], ring_chunks: u32) -> bool {
    teams.iter().all(|team| match team.role {
        Role::Copier => row < team.rows + ring_chunks,
        Role::Receiver | Role::Reducer => row < team.rows + ring_chunks / 2,
    })
}

impl<'a> Chunks<'a> {
    fn new(block: Block<'a>) -> Chunks<'a> {
        let sequence = |ring, peer| block.state(block.layout().sequence(ring, block.number, peer));
        let base = [CONTRIBUTED, REDUCED]
            .map(|ring| (0..block.ranks()).map(|peer| sequence(ring, peer)).collect());
        let mut chunks = Chunks { block, base, count: Vec::new(), most: 0 };
        let count = |peer: u32| match peer == block.rank() {
            true => 0,
            false => chunks.count_of(block.call.plan.messages[peer as usize].longer),
        };
        chunks.count = (0..block.ranks()).map(count).collect();
        chunks.most = chunks.count.iter().copied().max().unwrap_or(0);
        chunks
    }

    /// Stores the sequence numbers for the next call.
    fn end(&self, reduced: bool) {
        for ring in [CONTRIBUTED, REDUCED].into_iter().take(if reduced { 2 } else { 1 }) {
            for (peer, count) in (0..).zip(&self.count) {
                let at = self.block.layout().sequence(ring, self.block.number, peer);
                self.block.set_state(at, self.sequence(ring, peer, *count));
            }
        }
    }

    fn chunk_bytes(&self) -> u64 {
        self.block.call.plan.chunk_bytes.into()
    }

    /// Chunks in a message for this block: chunk `c` belongs to block `c % grid`.
    fn count_of(&self, bytes: u64) -> u32 {
        let (all, number) = (bytes.div_ceil(self.chunk_bytes()), u64::from(self.block.number));
        all.saturating_sub(number).div_ceil(self.block.call.plan.grid.into()) as u32
    }

    /// Offset where this block's chunk begins in its message.
    fn start(&self, row: u32) -> u64 {
        let (grid, number) = (self.block.call.plan.grid, self.block.number);
        (u64::from(row) * u64::from(grid) + u64::from(number)) * self.chunk_bytes()
    }

    /// Chunk length; 0 behind the message end.
    fn length(&self, row: u32, bytes: u64) -> usize {
        bytes.saturating_sub(self.start(row)).min(self.chunk_bytes()) as usize
    }

    fn sequence(&self, ring: u32, peer: u32, row: u32) -> u32 {
        self.base[ring as usize][peer as usize].wrapping_add(row)
    }

    fn has_chunk(&self, peer: u32, row: u32) -> bool {
        row < self.count[peer as usize]
    }

    /// A team's peer at a step, from 0 on.
    fn peer(&self, role: Role, step: u32) -> u32 {
        match role {
            Role::Reducer => step,
            Role::Receiver | Role::Copier => self.block.peer(self.block.ranks() - step),
        }
    }

    /// Copies this rank's message to itself, if it goes elsewhere.
    fn copy_own(&self) {
        let rank = self.block.rank();
        let (from, to) = (self.block.sent_to(rank), self.block.received_from(rank));
        if from.begin != to.begin {
            for row in 0..self.count_of(to.bytes) {
                let start = self.start(row);
                to.store(start, &from.load(start, self.length(row, to.bytes)));
            }
        }
    }

    /// Sends a contribution row.
    fn send_row(&self, row: u32) {
        for peer in (1..self.block.ranks()).map(|step| self.block.peer(step)) {
            if self.has_chunk(peer, row) {
                let from = self.block.sent_to(peer);
                let bytes = from.load(self.start(row), self.length(row, from.bytes));
                self.send(CONTRIBUTED, peer, row, &bytes);
            }
        }
    }

    /// Writes a chunk to a peer's ring, and raises the flag.
    fn send(&self, ring: u32, peer: u32, row: u32, bytes: &[u8]) {
        let (layout, number, rank) = (self.block.layout(), self.block.number, self.block.rank());
        let (memory, sequence) = (self.block.memory(peer), self.sequence(ring, peer, row));
        self.block.jitter();
        memory.write(layout.chunk(ring, number, rank, sequence), bytes);
        self.block.jitter();
        let flag = memory.word(layout.flag(ring, number, rank));
        flag.store(sequence.wrapping_add(1), Release);
    }

    /// Chunk that has arrived from a peer.
    fn received(&self, ring: u32, peer: u32, row: u32, length: usize) -> Vec<u8> {
        let sequence = self.sequence(ring, peer, row);
        let mut bytes = vec![0; length];
        self.block.jitter();
        let at = self.block.layout().chunk(ring, self.block.number, peer, sequence);
        self.block.own().read(at, &mut bytes);
        bytes
    }

    /// True once a row's chunk has arrived from a peer; fails after the wait timeout.
    ///
    /// A wait for a row from `rows_before` on, which the team before has not consumed, has no limit yet: that team's
    /// wait has, and names the peer that is missing, rather than one that is blocked as well.
    fn has_arrived(&self, team: &mut Team, peer: u32, rows_before: u32) -> Result<bool, Failed> {
        let (block, ring) = (&self.block, team.ring());
        let expected = self.sequence(ring, peer, team.rows).wrapping_add(1);
        let flag = block.own().word(block.layout().flag(ring, block.number, peer));
        let seen = flag.load(Acquire);
        if is_reached(seen, expected) {
            team.begun = None;
            return Ok(true);
        }
        if team.rows >= rows_before {
            return Ok(false);
        }
        let begun = *team.begun.get_or_insert_with(Instant::now);
        let value = AwaitedValue { peer, slot: expected, expected, seen };
        match block.twin.watch.has_expired(begun, block.record(team.phase(), value)) {
            true => Err(Failed),
            false => Ok(false),
        }
    }

    /// Lets a team consume the chunks that have arrived; false if there are none. The team before it has consumed
    /// `rows_before` rows.
    fn advance(&self, team: &mut Team, rows_before: u32) -> Result<bool, Failed> {
        let mut advanced = false;
        while team.rows < self.most {
            while team.steps < self.block.ranks() {
                let peer = self.peer(team.role, team.steps);
                if self.has_chunk(peer, team.rows) {
                    if !self.has_arrived(team, peer, rows_before)? {
                        return Ok(advanced);
                    }
                    if team.role != Role::Reducer {
                        self.copy_chunk(team.ring(), peer, team.rows);
                    }
                    advanced = true;
                }
                team.steps += 1;
            }
            if team.role == Role::Reducer {
                self.reduce_row(team.rows);
            }
            (team.rows, team.steps, advanced) = (team.rows + 1, 0, true);
        }
        Ok(advanced)
    }

    /// Copies a chunk from a ring to the output.
    fn copy_chunk(&self, ring: u32, peer: u32, row: u32) {
        let out = self.block.received_from(peer);
        let length = self.length(row, out.bytes);
        out.store(self.start(row), &self.received(ring, peer, row, length));
    }

    /// Reduces a contribution row in rank order; in an all-reduce, sends the result to all peers.
    fn reduce_row(&self, row: u32) {
        let (block, start) = (&self.block, self.start(row));
        let (mine, out) = (block.sent_to(block.rank()), block.received_from(block.rank()));
        let length = self.length(row, mine.bytes);
        let mut result = Vec::new();
        if length > 0 {
            let contribution = |rank| match rank == block.rank() {
                true => mine.load(start, length),
                false => self.received(CONTRIBUTED, rank, row, length),
            };
            let contributions: Vec<Vec<u8>> = (0..block.ranks()).map(contribution).collect();
            result = block.call.reduce(&contributions);
            out.store(start, &result);
        }
        if block.call.plan.kernel == Kernel::AllReduceChunks {
            for peer in (1..block.ranks()).map(|step| block.peer(step)) {
                if self.has_chunk(peer, row) {
                    self.send(REDUCED, peer, row, &result);
                }
            }
        }
    }
}
