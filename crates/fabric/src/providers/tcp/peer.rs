//! Peer: streams, grants, and how it is lost.

use super::super::granted_ranges::GrantedRanges;
use super::channel::Channel;
use super::config::{TcpConfig, TcpCounters};
use super::regions::TcpRegions;
use super::stream::{CLOSED, GrantCheck, Stream, StreamEnd};
use crate::lane_table::LaneTable;
use crate::link::{PostStatus, Sink, WorkRequest};
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{Time, TrafficClass};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_control::Rank;

/// Longest payload that a post copies: cheaper than a completion for it, and the source is free at once.
const MAX_COPIED: u64 = 1024;
/// Time for a peer's other streams to deliver earlier bytes after one stream has ended.
const DRAIN_GRACE: Duration = Duration::from_millis(250);

pub(super) struct Peer {
    rank: Rank,
    rule: PartRule,
    streams: Vec<Stream>,
    state: State,
    /// A post found the queue full: the poster waits for room.
    refused_post: bool,
    /// Ranges that it may write here.
    pub granted: GrantedRanges,
    /// Ranges that may be written there.
    pub imported: GrantedRanges,
}

enum State {
    Open,
    /// A stream has ended, first seen by the poll at this time.
    Ending {
        since: Option<Time>,
        why: String,
    },
    /// Reported as lost.
    Lost,
    Fenced,
}

/// Link state that all peers share.
pub(super) struct LinkContext<'a> {
    pub epoll: &'a OwnedFd,
    pub regions: &'a TcpRegions,
    pub lanes: &'a LaneTable,
    pub counters: &'a TcpCounters,
}

/// Rank and stream in an event.
pub(super) fn stream_of(event: &epoll::Event) -> (usize, usize) {
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
        channels: Vec<Channel>,
        epoll: &OwnedFd,
    ) -> rustix::io::Result<Peer> {
        for (index, channel) in channels.iter().enumerate() {
            epoll::add(epoll, channel, event_data(rank, index), epoll::EventFlags::IN)?;
        }
        Ok(Peer {
            rank,
            rule,
            streams: channels.into_iter().map(Stream::new).collect(),
            state: State::Open,
            refused_post: false,
            granted: GrantedRanges::default(),
            imported: GrantedRanges::default(),
        })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Rule by which writes to and from it are cut.
    pub fn rule(&self) -> PartRule {
        self.rule
    }

    /// Time at which an ending peer is lost.
    pub fn deadline(&self) -> Option<Time> {
        match &self.state {
            State::Ending { since, .. } => Some(since.map_or(Time(0), |at| at.after(DRAIN_GRACE))),
            _ => None,
        }
    }

    pub fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending { .. })
    }

    /// Queues a part after `flushes` link flushes. Also returns the stream if that has to be flushed and
    /// was not before.
    ///
    /// A lost peer accepts parts, which wait for the fence: the control plane may report an orderly
    /// leave, and a part reported as failed, such as a late credit, would poison an intact group.
    pub fn post<'a>(
        &mut self,
        work: &WorkRequest<'_>,
        payload: u64,
        sources: impl Iterator<Item = &'a Arc<Memory>>,
        config: &TcpConfig,
        flushes: u64,
    ) -> Result<(PostStatus, Option<u32>), String> {
        if matches!(self.state, State::Fenced) {
            return Err("the peer is fenced".into());
        }
        let copied = payload <= MAX_COPIED;
        if copied && matches!(self.state, State::Lost) {
            return Ok((PostStatus::Done, None));
        }
        let (mut bytes, mut parts) = (0, 0);
        for stream in &self.streams {
            bytes += stream.send_queue.bytes();
            parts += stream.send_queue.parts();
        }
        // Bulk fills one queue, so that latency-critical parts always find room behind it.
        let queues = if work.class == TrafficClass::Bulk { 1 } else { 2 };
        let (max_parts, max_bytes) = (
            config.queue_parts.saturating_mul(queues),
            config.queue_bytes.saturating_mul(queues.into()),
        );
        if parts >= max_parts || (parts > 0 && bytes + payload > max_bytes) {
            self.refused_post = true;
            return Ok((PostStatus::Full, None));
        }
        let load = |stream: &Stream| {
            // A small part joins frames that are about to leave: one system call at each end.
            let queued =
                if copied { stream.watches_output.into() } else { stream.send_queue.bytes() };
            (stream.channel.is_none(), queued)
        };
        // The first stream is reserved for latency-critical parts if there is another.
        let first = usize::from(work.class == TrafficClass::Bulk && self.streams.len() > 1);
        let least_loaded =
            (first..self.streams.len()).min_by_key(|&index| load(&self.streams[index]));
        let index = least_loaded.ok_or("it has no streams")?;
        let stream = &mut self.streams[index];
        let posted = if copied {
            stream.send_queue.push_copied(work.lane, work.pages, sources);
            stream.copied_at = flushes;
            PostStatus::Done
        } else {
            stream.send_queue.push_borrowed(work.lane, work.pages, sources, work.token);
            PostStatus::InFlight
        };
        let newly_dirty = !std::mem::replace(&mut stream.dirty, true);
        Ok((posted, newly_dirty.then_some(index as u32)))
    }

    /// Sends one stream's frames; epoll then watches for room if some are left or a post was refused.
    pub fn send(&mut self, index: usize, epoll: &OwnedFd, sink: &mut Sink) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        stream.dirty = false;
        let mut result = stream.send(sink);
        let rest = result.is_ok() && (self.refused_post || stream.has_unsent());
        sink.held |= rest;
        if let Some(channel) = &stream.channel
            && rest != stream.watches_output
        {
            let room = if rest { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let flags = epoll::EventFlags::IN | room;
            let watched = epoll::modify(epoll, channel, event_data(self.rank, index), flags);
            stream.watches_output = rest;
            result = result.and(watched.map_err(Into::into));
        }
        if let Err(e) = result {
            // The socket stays open to receive earlier bytes.
            self.begin_end(format!("connection failed: {e}"));
        }
    }

    /// Completes `token` once for each stream with unsent parts that were copied since the last flush but
    /// one, when these are sent. Returns how many streams that is.
    pub fn hold(&mut self, token: u64, flushes: u64) -> u32 {
        let mut held = 0;
        for stream in &mut self.streams {
            if stream.copied_at + 1 >= flushes && !stream.send_queue.is_empty() {
                stream.send_queue.defer_completion(token);
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

    /// True if posted bytes have not reached the other end's kernel, but may.
    pub fn has_undelivered(&self) -> bool {
        let undelivered = |stream: &Stream| {
            stream.channel.as_ref().is_some_and(|channel| {
                stream.has_unsent() || super::socket::unacknowledged(channel.as_fd()) > 0
            })
        };
        matches!(self.state, State::Open) && self.streams.iter().any(undelivered)
    }

    /// True if a stream has received bytes that epoll does not report.
    pub fn has_unread(&mut self, index: usize) -> bool {
        self.streams.get_mut(index).is_some_and(Stream::has_unread)
    }

    /// Handles a stream event.
    pub fn ready(
        &mut self,
        index: usize,
        flags: epoll::EventFlags,
        link: &LinkContext<'_>,
        sink: &mut Sink,
    ) {
        // Event from a poll that already lost the peer.
        if self.streams.get(index).is_none_or(|stream| stream.channel.is_none()) {
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.refused_post = false;
            self.send(index, link.epoll, sink);
        }
        // Other events than room: bytes, the end, an error.
        if flags == epoll::EventFlags::OUT {
            return;
        }
        let check = GrantCheck {
            peer: self.rank,
            rule: self.rule,
            granted: &self.granted,
            regions: link.regions,
            lanes: link.lanes,
        };
        match self.streams[index].receive(&check) {
            Ok(()) => {}
            Err(StreamEnd::Closed(why)) => {
                self.streams[index].close();
                self.begin_end(why);
            }
            Err(StreamEnd::Violation(why)) => {
                link.counters.refused_frames.fetch_add(1, Ordering::Relaxed);
                log::error!("{}: protocol violation: {why}", self.rank);
                self.report_lost(format!("protocol violation: {why}; connection closed"), sink);
            }
        }
    }

    /// Keeps the first reason from several streams, unless it was an orderly close.
    fn begin_end(&mut self, reason: String) {
        match &mut self.state {
            State::Open => self.state = State::Ending { since: None, why: reason },
            State::Ending { why, .. } if why == CLOSED => *why = reason,
            _ => {}
        }
    }

    /// True once an ending peer is lost: all streams have ended, or the grace time is over.
    pub fn has_ended(&mut self, now: Time, sink: &mut Sink) -> bool {
        let State::Ending { since, why } = &mut self.state else { return true };
        let since = *since.get_or_insert(now);
        if self.streams.iter().any(|s| s.channel.is_some()) && now.since(since) < DRAIN_GRACE {
            return false;
        }
        let why = std::mem::take(why);
        self.report_lost(why, sink);
        true
    }

    fn report_lost(&mut self, why: String, sink: &mut Sink) {
        self.state = State::Lost;
        self.close();
        sink.lost.push((self.rank, why));
    }

    pub fn fence(&mut self, sink: &mut Sink) {
        self.state = State::Fenced;
        self.close();
        for stream in &mut self.streams {
            stream.send_queue.fail("the peer was fenced before all of it was sent", sink);
        }
    }

    fn close(&mut self) {
        self.streams.iter_mut().for_each(Stream::close);
    }
}
