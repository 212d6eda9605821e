//! One connection: sending queued frames, receiving frames.
//!
//! Large payloads are received directly into the destination. One read takes the rest of a large frame
//! and the small frames behind it, one send takes as many frames as are queued.

use super::super::granted_ranges::GrantedRanges;
use super::channel::Channel;
use super::regions::TcpRegions;
use super::segments::Segments;
use super::send_queue::SendQueue;
use super::socket::ReceiveVectors;
use super::wire::{Head, MAX_HEAD};
use crate::lane_table::LaneTable;
use crate::link::Sink;
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey};
use std::io;
use weft_control::Rank;

/// Bytes that one poll moves on a stream, in each direction.
const POLL_BYTES: usize = 4 << 20;
/// Read buffer. Large payloads bypass it, except for bytes that arrive in one read with the head.
const READ_BUFFER: usize = 16 << 10;
/// Buffer prefix offered before the next frame's head, if the last payload was large: most of the next
/// payload then bypasses the buffer too.
const HEADER_PEEK: usize = 256;
/// Minimum length for a large payload.
const LARGE_PAYLOAD: u32 = 8 << 10;

/// Reason given for an orderly close.
pub(super) const CLOSED: &str = "connection closed by the peer";

pub(super) struct Stream {
    /// `None` after the stream has ended.
    pub channel: Option<Channel>,
    /// True while epoll watches for room to send.
    pub watches_output: bool,
    /// True while it is on the link's list of streams to flush.
    pub dirty: bool,
    /// Link flush count when the last part was copied into the queue.
    pub copied_at: u64,
    pub send_queue: SendQueue,
    /// Bytes at the front of the queue that a TLS session has taken, some of which it holds.
    encrypted: usize,
    input: FrameReader,
}

impl Stream {
    pub fn new(channel: Channel) -> Stream {
        // In a function, since Rust 1.88 warns that a constant used only by `const _` is never used.
        const { assert!(READ_BUFFER > MAX_HEAD) };
        Stream {
            channel: Some(channel),
            watches_output: false,
            dirty: false,
            copied_at: 0,
            send_queue: SendQueue::default(),
            encrypted: 0,
            input: FrameReader {
                buffer: vec![0; READ_BUFFER].into(),
                begin: 0,
                end: 0,
                destinations: Segments::default(),
                lane: None,
                last_was_large: false,
            },
        }
    }

    /// Closes the socket. Unsent frames stay queued.
    pub fn close(&mut self) {
        self.channel = None;
        self.input.destinations.clear();
    }

    /// True if frames, or encrypted bytes from them, have not left.
    pub fn has_unsent(&self) -> bool {
        !self.send_queue.is_empty() || self.channel.as_ref().is_some_and(Channel::has_unsent)
    }

    /// True if received bytes are unread that epoll does not report.
    pub fn has_unread(&mut self) -> bool {
        self.channel.as_mut().is_some_and(Channel::has_unread)
    }

    /// Sends until the queue is empty, the kernel accepts no more, or a poll's limit is reached. After an
    /// error the stream may still receive.
    pub fn send(&mut self, sink: &mut Sink) -> io::Result<()> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        channel.flush()?;
        if channel.has_unsent() {
            return Ok(());
        }
        self.send_queue.sent(std::mem::take(&mut self.encrypted), sink);
        let mut moved = 0;
        while !self.send_queue.is_empty() && moved < POLL_BYTES {
            let sources = self.send_queue.sources(POLL_BYTES - moved);
            let wanted = sources.len();
            let sent = match channel.send(&sources) {
                Ok(sent) => sent,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if channel.has_unsent() {
                self.encrypted = sent;
                break;
            }
            self.send_queue.sent(sent, sink);
            moved += sent;
            if sent < wanted && !channel.is_buffered() {
                break;
            }
        }
        Ok(())
    }

    /// Receives until the socket is empty or a poll's limit is reached.
    pub fn receive(&mut self, check: &GrantCheck<'_>) -> Result<(), StreamEnd> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        let mut moved = 0;
        while moved < POLL_BYTES {
            let (room, direct) = self.input.room();
            let wanted = room.len();
            let got = match channel.receive(room) {
                Ok(0) if self.input.is_between_frames() => {
                    return Err(StreamEnd::Closed(CLOSED.into()));
                }
                Ok(0) => {
                    let why = "connection closed in the middle of a write";
                    return Err(StreamEnd::Closed(why.into()));
                }
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(StreamEnd::Closed(format!("connection failed: {e}"))),
            };
            self.input.received(got, direct, check).map_err(StreamEnd::Violation)?;
            moved += got;
            if got < wanted && !channel.is_buffered() {
                break;
            }
        }
        Ok(())
    }
}

/// Reason why a stream's input ended.
pub(super) enum StreamEnd {
    /// Closed by the other end, or failed.
    Closed(String),
    /// Protocol violation. No byte in the frame was written.
    Violation(String),
}

/// Frame check before any byte touches memory, and the lanes that an arriving frame raises.
pub(super) struct GrantCheck<'a> {
    pub peer: Rank,
    pub rule: PartRule,
    /// Ranges that this peer may write, and the memory behind them.
    pub granted: &'a GrantedRanges,
    pub regions: &'a TcpRegions,
    pub lanes: &'a LaneTable,
}

impl GrantCheck<'_> {
    /// Resolves a frame's pages to checked destinations.
    ///
    /// # Errors
    /// Reason why a page is rejected.
    fn resolve(&self, head: &Head<'_>, destinations: &mut Segments) -> Result<(), String> {
        destinations.clear();
        for page in head.pages() {
            self.granted.check(page.key, page.offset, page.length.into())?;
            let memory = self.regions.get(RegionKey(page.key));
            // A granted range is within the region; this holds even if that were violated.
            let memory = memory.ok_or_else(|| format!("region {} is unknown", page.key))?;
            let (offset, length) = (page.offset as usize, page.length as usize);
            if offset.checked_add(length).is_none_or(|end| end > memory.len()) {
                return Err(format!("region {} ends before {offset}+{length}", page.key));
            }
            destinations.push(memory.clone(), offset, length);
        }
        Ok(())
    }
}

struct FrameReader {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Destinations for the rest of the current frame.
    destinations: Segments,
    /// Lane that the current frame raises once complete. The buffer is empty while there is one.
    lane: Option<Lane>,
    last_was_large: bool,
}

impl FrameReader {
    fn is_between_frames(&self) -> bool {
        self.lane.is_none() && self.begin == self.end
    }

    /// Ranges for the next bytes, and how many bytes bypass the buffer.
    fn room(&mut self) -> (ReceiveVectors<'_>, usize) {
        let mut room = ReceiveVectors::new();
        let all =
            self.destinations.each(|memory, offset, length| room.memory(memory, offset, length));
        let direct = room.len();
        if all {
            let peek = self.last_was_large && direct == 0 && self.end == 0;
            let end = if peek { HEADER_PEEK } else { self.buffer.len() };
            room.bytes(&mut self.buffer[self.end..end]);
        }
        (room, direct)
    }

    fn received(
        &mut self,
        got: usize,
        direct: usize,
        check: &GrantCheck<'_>,
    ) -> Result<(), String> {
        self.destinations.advance(got.min(direct));
        self.end += got - got.min(direct);
        loop {
            if let Some(lane) = self.lane {
                self.begin += self.destinations.copy_in(&self.buffer[self.begin..self.end]);
                if !self.destinations.is_done() {
                    break;
                }
                self.destinations.clear();
                self.lane = None;
                // A lane that the peer does not hold is dropped, counted and logged by the table.
                check.lanes.arrive_from(check.peer, lane);
            }
            let bytes = &self.buffer[self.begin..self.end];
            let Some(head) = Head::parse(bytes, check.rule)? else { break };
            check.resolve(&head, &mut self.destinations)?;
            self.lane = Some(head.lane);
            self.last_was_large = head.payload >= LARGE_PAYLOAD;
            self.begin += head.len();
        }
        // The rest is shorter than a head, so the buffer has room.
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        Ok(())
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::certificates::Files;
    use super::*;
    use crate::memory::Memory;
    use crate::types::{Generation, LaneId, Page};
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::time::Duration;
    use weft_control::Tls;
    use weft_control::pair::{
        IncomingConnection, IncomingStep, MaybeTlsStream, PairSettings, dial_stream,
    };

    /// Both ends of a TLS data connection.
    fn ends() -> (MaybeTlsStream, MaybeTlsStream) {
        let files = Files::new("stream", "127.0.0.1");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let with = |tls: Tls| PairSettings {
            address: address.to_string(),
            source: None,
            secret: None,
            host_id: "host".into(),
            silence_timeout: Duration::from_secs(15),
            interrupt: None,
            tls: tls.with_payloads(),
        };
        let (certificate, key) = (files.path("cert"), files.path("key"));
        let here = with(Tls::default().with_certificate(&certificate, &key).unwrap());
        let there = with(Tls::default().with_authorities(&files.path("ca")).unwrap());
        let limit = Duration::from_secs(30);
        std::thread::scope(|scope| {
            let dialed = scope.spawn(|| dial_stream(&there, address, &[7; 16], limit).unwrap());
            let accepted = listener.accept().unwrap().0;
            let mut incoming = IncomingConnection::new(accepted, &here).unwrap();
            while incoming.step() == Ok(IncomingStep::Pending) {
                std::thread::yield_now();
            }
            (incoming.into_stream(), dialed.join().unwrap().unwrap())
        })
    }

    #[test]
    fn a_part_is_done_once_its_encrypted_bytes_have_left() {
        const BYTES: usize = 16 << 20;
        let (mut accepted, dialed) = ends();
        let mut stream = Stream::new(Channel::new(dialed));
        let memory = Arc::new(Memory::shared(BYTES).unwrap());
        let page = Page {
            source: RegionKey(1),
            source_offset: 0,
            destination: RegionKey(2),
            destination_offset: 0,
            length: BYTES as u64,
        };
        let lane = Lane::new(LaneId::new(3).unwrap(), Generation(1));
        stream.send_queue.push_borrowed(lane, &[page], [&memory].into_iter(), 5);
        let (mut sink, mut bytes, mut received) = (Sink::default(), [0; 4096], 0);
        while sink.completed.is_empty() {
            stream.send(&mut sink).unwrap();
            assert_eq!(sink.completed.is_empty(), stream.has_unsent());
            // A slow reader: the socket is full all the time.
            match accepted.read(&mut bytes) {
                Ok(count) => received += count,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        while let Ok(count @ 1..) = accepted.read(&mut bytes) {
            received += count;
        }
        assert!(received > BYTES, "{received}");
    }
}
