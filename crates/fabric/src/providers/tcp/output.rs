//! What waits to be sent on one connection.
//!
//! Small parts are copied behind each other and go out together; large ones are sent from where they
//! lie.

use super::pieces::Pieces;
use super::socket::Sources;
use super::wire::put_head;
use crate::link::Sink;
use crate::memory::Memory;
use crate::types::{Lane, Page};
use std::collections::VecDeque;
use std::sync::Arc;

/// Small frames are gathered up to about this length before another place begins.
const GATHER: usize = 16 << 10;
/// Emptied batches kept for reuse.
const SPARE: usize = 64;

/// What waits to be sent. A part stays on the stream it was given to.
#[derive(Default)]
pub(super) struct Output {
    queue: VecDeque<Batch>,
    spare: Vec<Batch>,
    bytes: u64,
    parts: u32,
    /// Bytes sent since the connection was made.
    sent: u64,
    /// What completes when so many bytes have been sent, in this order.
    marks: VecDeque<Mark>,
}

/// Token of copied parts that are not sent yet.
struct Mark {
    at: u64,
    token: u64,
}

/// Bytes, and behind them pieces of source memory: some small frames, then at most one large one.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    sent: usize,
    pieces: Pieces,
    /// Of the large one, which alone borrows its source.
    token: Option<u64>,
    parts: u32,
}

impl Output {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes not sent yet.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Parts not wholly sent yet.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// Queues a frame whose payload is copied now; its source may be reused at once.
    pub fn push_copied<'a>(
        &mut self,
        lane: Lane,
        pages: &[Page],
        sources: impl Iterator<Item = &'a Arc<Memory>>,
    ) {
        let batch = self.open();
        let before = batch.bytes.len();
        put_head(&mut batch.bytes, lane, pages);
        for (page, memory) in pages.iter().zip(sources) {
            let begin = batch.bytes.len();
            batch.bytes.resize(begin + page.length as usize, 0);
            memory.copy_out(page.source_offset as usize, &mut batch.bytes[begin..]);
        }
        batch.parts += 1;
        let added = batch.bytes.len() - before;
        self.bytes += added as u64;
        self.parts += 1;
    }

    /// Queues a frame whose payload is sent from where it lies; `token` completes when it is.
    pub fn push_borrowed<'a>(
        &mut self,
        lane: Lane,
        pages: &[Page],
        sources: impl Iterator<Item = &'a Arc<Memory>>,
        token: u64,
    ) {
        let batch = self.open();
        let before = batch.bytes.len();
        put_head(&mut batch.bytes, lane, pages);
        let mut added = (batch.bytes.len() - before) as u64;
        for (page, memory) in pages.iter().zip(sources) {
            let (offset, length) = (page.source_offset as usize, page.length as usize);
            batch.pieces.push(memory.clone(), offset, length);
            added += page.length;
        }
        batch.token = Some(token);
        batch.parts += 1;
        self.bytes += added;
        self.parts += 1;
    }

    /// Completes `token` once all that is queued now has been sent. Something is.
    pub fn mark(&mut self, token: u64) {
        self.marks.push_back(Mark { at: self.sent + self.bytes, token });
    }

    /// The batch that the next frame's head goes to.
    fn open(&mut self) -> &mut Batch {
        let open = |batch: &Batch| batch.token.is_none() && batch.bytes.len() < GATHER;
        if !self.queue.back().is_some_and(open) {
            self.queue.push_back(self.spare.pop().unwrap_or_default());
        }
        self.queue.back_mut().expect("one was just pushed")
    }

    /// The next bytes to send: about as many as `limit`, or what one call takes.
    pub fn sources(&self, limit: usize) -> Sources<'_> {
        let mut sources = Sources::new();
        for batch in &self.queue {
            let all = sources.bytes(&batch.bytes[batch.sent..])
                && batch
                    .pieces
                    .each(|memory, offset, length| sources.memory(memory, offset, length));
            if !all || sources.len() >= limit {
                break;
            }
        }
        sources
    }

    /// The kernel has taken `count` bytes; parts that are wholly sent are complete.
    pub fn sent(&mut self, mut count: usize, sink: &mut Sink) {
        self.bytes -= count as u64;
        self.sent += count as u64;
        if !self.marks.is_empty() {
            self.complete_marks(sink);
        }
        while let Some(batch) = self.queue.front_mut() {
            let head = count.min(batch.bytes.len() - batch.sent);
            batch.sent += head;
            count -= head;
            count -= batch.pieces.advance(count);
            if batch.sent < batch.bytes.len() || !batch.pieces.is_done() {
                break;
            }
            self.parts -= batch.parts;
            if let Some(token) = batch.token {
                sink.done(token);
            }
            self.drop_front();
        }
    }

    #[cold]
    fn complete_marks(&mut self, sink: &mut Sink) {
        while let Some(mark) = self.marks.front().filter(|mark| mark.at <= self.sent) {
            sink.done(mark.token);
            self.marks.pop_front();
        }
    }

    fn drop_front(&mut self) {
        let Some(mut batch) = self.queue.pop_front() else { return };
        if self.spare.len() < SPARE {
            batch.bytes.clear();
            batch.pieces.clear();
            (batch.sent, batch.token, batch.parts) = (0, None, 0);
            self.spare.push(batch);
        }
    }

    /// Drops everything; parts that borrow their source, and marks, are reported as failed.
    pub fn fail(&mut self, why: &str, sink: &mut Sink) {
        for mark in self.marks.drain(..) {
            sink.failed(mark.token, why);
        }
        for batch in self.queue.drain(..) {
            if let Some(token) = batch.token {
                sink.failed(token, why);
            }
        }
        (self.bytes, self.parts) = (0, 0);
    }
}
