//! One connection's unsent frames. Small payloads are copied and batched; large ones are sent from the
//! source.

use super::segments::Segments;
use super::socket::SendVectors;
use super::wire::put_head;
use crate::link::Sink;
use crate::memory::Memory;
use crate::types::{Lane, Page};
use std::collections::VecDeque;
use std::sync::Arc;

/// Length from which a small-frame batch is closed.
const BATCH_BYTES: usize = 16 << 10;
/// Maximum empty batches kept for reuse.
const MAX_SPARE: usize = 64;

/// Batch queue. A part stays on the stream that it was assigned to.
#[derive(Default)]
pub(super) struct SendQueue {
    queue: VecDeque<Batch>,
    spare: Vec<Batch>,
    bytes: u64,
    parts: u32,
    /// Bytes sent since the connection was established.
    sent: u64,
    /// Deferred completions, in `at` order.
    deferred: VecDeque<DeferredCompletion>,
}

/// Completion for copied parts, due once `at` bytes are sent.
struct DeferredCompletion {
    at: u64,
    token: u64,
}

/// Bytes, then source memory segments: some small frames, then at most one large one.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    sent: usize,
    segments: Segments,
    /// Token for the large frame; only this frame borrows a source.
    token: Option<u64>,
    parts: u32,
}

impl SendQueue {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes not sent yet.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Parts not completely sent.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// Queues a frame and copies the payload; the source may be reused at once.
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

    /// Queues a frame whose payload is sent from the source; `token` completes once it is sent.
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
            batch.segments.push(memory.clone(), offset, length);
            added += page.length;
        }
        batch.token = Some(token);
        batch.parts += 1;
        self.bytes += added;
        self.parts += 1;
    }

    /// Completes `token` once all queued frames are sent. The queue is not empty.
    pub fn defer_completion(&mut self, token: u64) {
        self.deferred.push_back(DeferredCompletion { at: self.sent + self.bytes, token });
    }

    /// Open batch for the next frame's head.
    fn open(&mut self) -> &mut Batch {
        let open = |batch: &Batch| batch.token.is_none() && batch.bytes.len() < BATCH_BYTES;
        if !self.queue.back().is_some_and(open) {
            self.queue.push_back(self.spare.pop().unwrap_or_default());
        }
        self.queue.back_mut().expect("one was just pushed")
    }

    /// Next ranges to send: about `limit` bytes, or as many as one call takes.
    pub fn sources(&self, limit: usize) -> SendVectors<'_> {
        let mut sources = SendVectors::new();
        for batch in &self.queue {
            let all = sources.bytes(&batch.bytes[batch.sent..])
                && batch
                    .segments
                    .each(|memory, offset, length| sources.memory(memory, offset, length));
            if !all || sources.len() >= limit {
                break;
            }
        }
        sources
    }

    /// Removes `count` sent bytes; parts that are completely sent are completed.
    pub fn sent(&mut self, mut count: usize, sink: &mut Sink) {
        self.bytes -= count as u64;
        self.sent += count as u64;
        if !self.deferred.is_empty() {
            self.complete_deferred(sink);
        }
        while let Some(batch) = self.queue.front_mut() {
            let head = count.min(batch.bytes.len() - batch.sent);
            batch.sent += head;
            count -= head;
            count -= batch.segments.advance(count);
            if batch.sent < batch.bytes.len() || !batch.segments.is_done() {
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
    fn complete_deferred(&mut self, sink: &mut Sink) {
        while let Some(next) = self.deferred.front().filter(|next| next.at <= self.sent) {
            sink.done(next.token);
            self.deferred.pop_front();
        }
    }

    fn drop_front(&mut self) {
        let Some(mut batch) = self.queue.pop_front() else { return };
        if self.spare.len() < MAX_SPARE {
            batch.bytes.clear();
            batch.segments.clear();
            (batch.sent, batch.token, batch.parts) = (0, None, 0);
            self.spare.push(batch);
        }
    }

    /// Drops all frames; borrowed parts and deferred completions fail.
    pub fn fail(&mut self, why: &str, sink: &mut Sink) {
        for next in self.deferred.drain(..) {
            sink.failed(next.token, why);
        }
        for batch in self.queue.drain(..) {
            if let Some(token) = batch.token {
                sink.failed(token, why);
            }
        }
        (self.bytes, self.parts) = (0, 0);
    }
}
