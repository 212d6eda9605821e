//! A peer: its streams, what it was granted, and how it is lost.

use super::granted::Granted;
use super::stream::{CLOSED, Ended, Gate, Stream};
use super::{TcpConfig, TcpCounters};
use crate::lane_table::LaneTable;
use crate::link::{Posted, Sink, Work};
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{Class, Time};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_control::Rank;

/// Payloads up to this length are copied when they are posted: cheaper than to remember whom to
/// tell that they were sent, and their sources are free at once.
const COPIED: u64 = 1024;
/// When one stream of a peer has ended: how long the others may still bring what it sent before.
const LAST_WORDS: Duration = Duration::from_millis(250);

pub(super) struct Peer {
    rank: Rank,
    rule: PartRule,
    streams: Vec<Stream>,
    state: State,
    /// A part has found the queue full: whoever posted it waits to be woken when there is room.
    refused: bool,
    /// What it may write here.
    pub granted: Granted,
    /// What may be written there.
    pub imported: Granted,
}

enum State {
    Open,
    /// A stream has ended, first noticed by the poll of this time.
    Ending {
        since: Option<Time>,
        why: String,
    },
    /// Reported as lost.
    Lost,
    Fenced,
}

/// What all peers of a provider share.
pub(super) struct Shared<'a> {
    pub epoll: &'a OwnedFd,
    pub regions: &'a [Option<Arc<Memory>>],
    pub lanes: &'a LaneTable,
    pub counters: &'a TcpCounters,
}

/// The rank and the stream that an event is of.
pub(super) fn of_event(event: &epoll::Event) -> (usize, usize) {
    let data = { event.data }.u64();
    ((data >> 32) as usize, (data & 0xffff_ffff) as usize)
}

fn event_data(rank: Rank, stream: usize) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(rank.0) << 32 | stream as u64)
}

impl Peer {
    pub fn new(
        rank: Rank,
        rule: PartRule,
        sockets: Vec<OwnedFd>,
        epoll: &OwnedFd,
    ) -> rustix::io::Result<Peer> {
        for (index, socket) in sockets.iter().enumerate() {
            epoll::add(epoll, socket, event_data(rank, index), epoll::EventFlags::IN)?;
        }
        Ok(Peer {
            rank,
            rule,
            streams: sockets.into_iter().map(Stream::new).collect(),
            state: State::Open,
            refused: false,
            granted: Granted::default(),
            imported: Granted::default(),
        })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How writes to and from it are cut.
    pub fn rule(&self) -> PartRule {
        self.rule
    }

    /// When an ending peer counts as lost.
    pub fn deadline(&self) -> Option<Time> {
        match &self.state {
            State::Ending { since, .. } => Some(since.map_or(Time(0), |at| at.after(LAST_WORDS))),
            _ => None,
        }
    }

    pub fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending { .. })
    }

    /// Queues a part, after so many flushes of the link; also returns the stream that must be flushed now
    /// and was not to be before.
    ///
    /// Toward a peer that is lost, parts are taken and stay where they are until it is fenced: the
    /// control plane may yet say that it has left in peace, and a part reported as failed, a late
    /// credit above all, would poison a group that has nothing wrong with it.
    pub fn post<'a>(
        &mut self,
        work: &Work<'_>,
        payload: u64,
        sources: impl Iterator<Item = &'a Arc<Memory>>,
        config: &TcpConfig,
        flushes: u64,
    ) -> Result<(Posted, Option<u32>), String> {
        if matches!(self.state, State::Fenced) {
            return Err("it was cut off".into());
        }
        let copied = payload <= COPIED;
        if copied && matches!(self.state, State::Lost) {
            return Ok((Posted::Done, None));
        }
        let (mut bytes, mut parts) = (0, 0);
        for stream in &self.streams {
            bytes += stream.output.bytes();
            parts += stream.output.parts();
        }
        // Bulk fills one queue, so that there is always room for as much that must not wait behind it.
        let queues = if work.class == Class::Bulk { 1 } else { 2 };
        let (most_parts, most_bytes) = (
            config.queue_parts.saturating_mul(queues),
            config.queue_bytes.saturating_mul(queues.into()),
        );
        if parts >= most_parts || (parts > 0 && bytes + payload > most_bytes) {
            self.refused = true;
            return Ok((Posted::Full, None));
        }
        let load = |stream: &Stream| {
            // What is small goes with what is about to leave: one system call here and one there.
            let waits = if copied { stream.watched_for_room.into() } else { stream.output.bytes() };
            (stream.socket.is_none(), waits)
        };
        // Bulk leaves the first stream to parts that must not wait behind it.
        let first = usize::from(work.class == Class::Bulk && self.streams.len() > 1);
        let lightest = (first..self.streams.len()).min_by_key(|&index| load(&self.streams[index]));
        let index = lightest.ok_or("it has no streams")?;
        let stream = &mut self.streams[index];
        let posted = if copied {
            stream.output.push_copied(work.lane, work.pages, sources);
            stream.copied_at = flushes;
            Posted::Done
        } else {
            stream.output.push_borrowed(work.lane, work.pages, sources, work.token);
            Posted::InFlight
        };
        let news = !std::mem::replace(&mut stream.dirty, true);
        Ok((posted, news.then_some(index as u32)))
    }

    /// Sends what one stream has, and has epoll say when there is room for the rest, or for what was
    /// refused.
    pub fn send(&mut self, index: usize, epoll: &OwnedFd, sink: &mut Sink) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        stream.dirty = false;
        let mut result = stream.send(sink);
        let rest = result.is_ok() && (self.refused || !stream.output.is_empty());
        sink.held |= rest;
        if let Some(socket) = &stream.socket
            && rest != stream.watched_for_room
        {
            let room = if rest { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let flags = epoll::EventFlags::IN | room;
            let watched = epoll::modify(epoll, socket, event_data(self.rank, index), flags);
            stream.watched_for_room = rest;
            result = result.and(watched.map_err(Into::into));
        }
        if let Err(e) = result {
            // The socket stays open: what came before it broke is still to be received.
            self.begin_to_end(format!("its connection broke: {e}"));
        }
    }

    /// Completes `token` once for each stream whose output has parts that were copied since the last
    /// flush but one, when these have been sent. Returns for how many.
    pub fn hold(&mut self, token: u64, flushes: u64) -> u32 {
        let mut held = 0;
        for stream in &mut self.streams {
            if stream.copied_at + 1 >= flushes && !stream.output.is_empty() {
                stream.output.mark(token);
                held += 1;
            }
        }
        held
    }

    pub fn send_all(&mut self, epoll: &OwnedFd, sink: &mut Sink) {
        for index in 0..self.streams.len() {
            self.send(index, epoll, sink);
        }
    }

    /// Whether anything that was posted has not reached the other end's kernel, but may.
    pub fn has_undelivered(&self) -> bool {
        let undelivered = |stream: &Stream| {
            stream.socket.as_ref().is_some_and(|socket| {
                !stream.output.is_empty() || super::socket::unacknowledged(socket.as_fd()) > 0
            })
        };
        matches!(self.state, State::Open) && self.streams.iter().any(undelivered)
    }

    /// Attends to an event of one stream.
    pub fn ready(
        &mut self,
        index: usize,
        flags: epoll::EventFlags,
        shared: &Shared<'_>,
        sink: &mut Sink,
    ) {
        // An event of a poll in which the peer was lost before.
        if self.streams.get(index).is_none_or(|stream| stream.socket.is_none()) {
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.refused = false;
            self.send(index, shared.epoll, sink);
        }
        // Everything but room to send: bytes, the end, an error.
        if flags == epoll::EventFlags::OUT {
            return;
        }
        let gate = Gate {
            peer: self.rank,
            rule: self.rule,
            granted: &self.granted,
            regions: shared.regions,
            lanes: shared.lanes,
        };
        match self.streams[index].receive(&gate) {
            Ok(()) => {}
            Err(Ended::Closed(why)) => {
                self.streams[index].close();
                self.begin_to_end(why);
            }
            Err(Ended::Violation(why)) => {
                shared.counters.refused_frames.fetch_add(1, Ordering::Relaxed);
                log::error!("{} broke the wire's rules: {why}", self.rank);
                self.lose(format!("it broke the wire's rules and was cut off: {why}"), sink);
            }
        }
    }

    /// Of several streams' reasons the first is kept, unless it was a plain end.
    fn begin_to_end(&mut self, reason: String) {
        match &mut self.state {
            State::Open => self.state = State::Ending { since: None, why: reason },
            State::Ending { why, .. } if why == CLOSED => *why = reason,
            _ => {}
        }
    }

    /// Whether a peer that is ending has ended: all its streams have, or the others brought nothing
    /// that ended them for a while. It is lost then.
    pub fn has_ended(&mut self, now: Time, sink: &mut Sink) -> bool {
        let State::Ending { since, why } = &mut self.state else { return true };
        let since = *since.get_or_insert(now);
        if self.streams.iter().any(|s| s.socket.is_some()) && now.since(since) < LAST_WORDS {
            return false;
        }
        let why = std::mem::take(why);
        self.lose(why, sink);
        true
    }

    fn lose(&mut self, why: String, sink: &mut Sink) {
        self.state = State::Lost;
        self.close();
        sink.lost.push((self.rank, why));
    }

    pub fn fence(&mut self, sink: &mut Sink) {
        self.state = State::Fenced;
        self.close();
        for stream in &mut self.streams {
            stream.output.fail("the peer was cut off before all of it was sent", sink);
        }
    }

    fn close(&mut self) {
        self.streams.iter_mut().for_each(Stream::close);
    }
}
