//! One connection: sending what waits, receiving frames.
//!
//! Large frames are received right into where they go. One read takes the rest of a large frame and
//! the small frames behind it, one send takes as many frames as there are.

use super::granted::Granted;
use super::output::Output;
use super::pieces::Pieces;
use super::socket::Room;
use super::wire::{Head, MAX_HEAD};
use crate::lane_table::LaneTable;
use crate::link::Sink;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::Lane;
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::sync::Arc;
use weft_control::Rank;

/// Bytes that one poll sends or receives on one stream before it turns to the next.
const TURN: usize = 4 << 20;
/// The read buffer. Large payloads go around it, but for what comes in one read with their head.
const BUFFER: usize = 16 << 10;
/// As much of it as is offered while nothing is known of the next frame, if the last was large: the
/// payload of the next then goes around the buffer too, but for what comes with its head.
const GLIMPSE: usize = 256;
/// Payloads from this length on are large.
const LARGE: u32 = 8 << 10;
const _: () = assert!(BUFFER > MAX_HEAD);

/// The plain end of a connection.
pub(super) const CLOSED: &str = "its connection was closed at the other end";

pub(super) struct Stream {
    /// `None` once it has ended.
    pub socket: Option<OwnedFd>,
    /// Whether epoll watches for room to send.
    pub watched_for_room: bool,
    /// Whether it is on the provider's list of streams to flush.
    pub dirty: bool,
    /// Flushes of the link before the last part was copied into the output.
    pub copied_at: u64,
    pub output: Output,
    input: Input,
}

impl Stream {
    pub fn new(socket: OwnedFd) -> Stream {
        Stream {
            socket: Some(socket),
            watched_for_room: false,
            dirty: false,
            copied_at: 0,
            output: Output::default(),
            input: Input {
                buffer: vec![0; BUFFER].into(),
                begin: 0,
                end: 0,
                landing: Pieces::default(),
                lane: None,
                last_was_large: false,
            },
        }
    }

    /// Ends it. What waits to be sent stays where it is.
    pub fn close(&mut self) {
        self.socket = None;
        self.input.landing.clear();
    }

    /// Sends until all is sent, the kernel takes no more, or the turn is over. An error says that
    /// nothing more can be sent; there may still be something to receive.
    pub fn send(&mut self, sink: &mut Sink) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut turn = 0;
        while !self.output.is_empty() && turn < TURN {
            let sources = self.output.sources(TURN - turn);
            let wanted = sources.len();
            let sent = match sources.send(socket.as_fd()) {
                Ok(sent) => sent,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.output.sent(sent, sink);
            turn += sent;
            if sent < wanted {
                break;
            }
        }
        Ok(())
    }

    /// Receives until nothing is left or the turn is over.
    pub fn receive(&mut self, gate: &Gate<'_>) -> Result<(), Ended> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut turn = 0;
        while turn < TURN {
            let (room, direct) = self.input.room();
            let wanted = room.len();
            let got = match room.receive(socket.as_fd()) {
                Ok(0) if self.input.is_between_frames() => {
                    return Err(Ended::Closed(CLOSED.into()));
                }
                Ok(0) => {
                    let why = "its connection was closed in the middle of a write";
                    return Err(Ended::Closed(why.into()));
                }
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Ended::Closed(format!("its connection broke: {e}"))),
            };
            self.input.received(got, direct, gate).map_err(Ended::Violation)?;
            turn += got;
            if got < wanted {
                break;
            }
        }
        Ok(())
    }
}

/// Why a stream will bring nothing more.
pub(super) enum Ended {
    /// The other end closed it, or it broke.
    Closed(String),
    /// A frame broke the rules. Nothing of it was written.
    Violation(String),
}

/// What a frame is checked against before any of it touches memory, and whom its arrival raises.
pub(super) struct Gate<'a> {
    pub peer: Rank,
    pub rule: PartRule,
    /// What this peer may write, and the memory it lies in.
    pub granted: &'a Granted,
    pub regions: &'a [Option<Arc<Memory>>],
    pub lanes: &'a LaneTable,
}

impl Gate<'_> {
    /// The places of a frame's payload, all of them checked, or why one is refused.
    fn admit(&self, head: &Head<'_>, landing: &mut Pieces) -> Result<(), String> {
        landing.clear();
        for page in head.pages() {
            self.granted.check(page.key, page.offset, page.length.into())?;
            let memory = self.regions.get(page.key as usize).and_then(Option::as_ref);
            // Granted, so known and in range; but what a peer says shall not depend on that.
            let memory = memory.ok_or_else(|| format!("region {} is not known", page.key))?;
            let (offset, length) = (page.offset as usize, page.length as usize);
            if offset.checked_add(length).is_none_or(|end| end > memory.len()) {
                return Err(format!("region {} ends before {offset}+{length}", page.key));
            }
            landing.push(memory.clone(), offset, length);
        }
        Ok(())
    }
}

struct Input {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Where the rest of the frame under way goes.
    landing: Pieces,
    /// What the frame under way raises once it has landed. The buffer is empty while there is one.
    lane: Option<Lane>,
    last_was_large: bool,
}

impl Input {
    fn is_between_frames(&self) -> bool {
        self.lane.is_none() && self.begin == self.end
    }

    /// Where the next bytes go, and how many of them go past the buffer.
    fn room(&mut self) -> (Room<'_>, usize) {
        let mut room = Room::new();
        let all = self.landing.each(|memory, offset, length| room.memory(memory, offset, length));
        let direct = room.len();
        if all {
            let glimpse = self.last_was_large && direct == 0 && self.end == 0;
            let end = if glimpse { GLIMPSE } else { self.buffer.len() };
            room.bytes(&mut self.buffer[self.end..end]);
        }
        (room, direct)
    }

    fn received(&mut self, got: usize, direct: usize, gate: &Gate<'_>) -> Result<(), String> {
        self.landing.advance(got.min(direct));
        self.end += got - got.min(direct);
        loop {
            if let Some(lane) = self.lane {
                self.begin += self.landing.copy_in(&self.buffer[self.begin..self.end]);
                if !self.landing.is_done() {
                    break;
                }
                self.landing.clear();
                self.lane = None;
                // A lane named wrongly is dropped, counted and logged by the table.
                gate.lanes.arrive_from(gate.peer, lane);
            }
            let bytes = &self.buffer[self.begin..self.end];
            let Some(head) = Head::parse(bytes, gate.rule)? else { break };
            gate.admit(&head, &mut self.landing)?;
            self.lane = Some(head.lane);
            self.last_was_large = head.payload >= LARGE;
            self.begin += head.len();
        }
        // What is left is less than a head, so there is always room to receive.
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        Ok(())
    }
}
