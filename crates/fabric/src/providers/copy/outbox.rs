//! Parts in flight toward one peer over copy engines, and the events behind the copies.
//!
//! Parts posted between two flushes form a batch with one event in each queue that it uses: many copies
//! share one event and one poll.

use super::engine::{CopyEngine, EventId, PageCopy, QueueId};
use crate::types::Lane;
use std::collections::VecDeque;

/// Part whose copies are in flight.
#[derive(Debug)]
pub struct CopyPart {
    pub token: u64,
    pub lane: Lane,
    /// Failure cause, reported once the part's copies are complete.
    pub failure: Option<String>,
}

#[derive(Debug, Default)]
struct Batch {
    parts: Vec<CopyPart>,
    copies: usize,
    events: Vec<EventId>,
}

/// One device's queue toward the peer.
#[derive(Debug)]
struct DeviceQueue {
    device: u32,
    queue: QueueId,
    /// True with copies behind the last event.
    open: bool,
}

/// Copies in flight toward one peer.
#[derive(Debug, Default)]
pub struct Outbox {
    queues: Vec<DeviceQueue>,
    /// Parts batched until the next flush.
    open: Batch,
    sealed: VecDeque<Batch>,
    /// Empty batches for reuse.
    spare: Vec<Batch>,
    /// Copies in all batches, by weight.
    copies: usize,
}

impl Outbox {
    /// True if `more` copies, by weight, fit into `limit` in flight. An empty outbox accepts any number.
    pub fn has_room(&self, more: usize, limit: usize) -> bool {
        self.copies == 0 || self.copies + more <= limit
    }

    /// True without parts in flight.
    pub fn is_empty(&self) -> bool {
        self.open.parts.is_empty() && self.sealed.is_empty()
    }

    /// Adds a copy to a device's queue toward this peer.
    ///
    /// # Safety
    /// Same as for [`CopyEngine::copy`].
    pub unsafe fn copy(
        &mut self,
        engine: &mut dyn CopyEngine,
        device: u32,
        page: PageCopy,
        by_kernels: bool,
    ) -> Result<(), String> {
        let queue = self.queue(engine, device)?;
        // SAFETY: by the caller's contract.
        unsafe { engine.copy(queue, page, by_kernels) }
    }

    /// A device's queue, for a copy that follows.
    fn queue(&mut self, engine: &mut dyn CopyEngine, device: u32) -> Result<QueueId, String> {
        let known = self.queues.iter().position(|queue| queue.device == device);
        let index = match known {
            Some(index) => index,
            None => {
                self.queues.push(DeviceQueue { device, queue: engine.open(device)?, open: false });
                self.queues.len() - 1
            }
        };
        let queue = &mut self.queues[index];
        queue.open = true;
        Ok(queue.queue)
    }

    /// Adds a part whose copies, by weight, are in the queues.
    pub fn add(&mut self, part: CopyPart, copies: usize) {
        self.open.parts.push(part);
        self.open.copies += copies;
        self.copies += copies;
    }

    /// Closes the open batch with an event in each queue.
    pub fn seal(&mut self, engine: &mut dyn CopyEngine) {
        if self.open.parts.is_empty() {
            return;
        }
        let mut batch = std::mem::replace(&mut self.open, self.spare.pop().unwrap_or_default());
        for queue in self.queues.iter_mut().filter(|queue| queue.open) {
            queue.open = false;
            match engine.record(queue.queue) {
                Ok(event) => batch.events.push(event),
                Err(why) => {
                    for part in &mut batch.parts {
                        part.failure.get_or_insert_with(|| why.clone());
                    }
                }
            }
        }
        self.sealed.push_back(batch);
    }

    /// Removes the parts whose copies are complete, oldest batch first, with the failure cause if any.
    pub fn take_finished(&mut self, engine: &mut dyn CopyEngine, mut take: impl FnMut(CopyPart)) {
        while let Some(batch) = self.sealed.front_mut() {
            while let Some(&event) = batch.events.last() {
                match engine.is_complete(event) {
                    Ok(false) => return,
                    Ok(true) => {}
                    Err(why) => {
                        for part in &mut batch.parts {
                            part.failure.get_or_insert_with(|| why.clone());
                        }
                    }
                }
                engine.release(event);
                batch.events.pop();
            }
            let Some(mut batch) = self.sealed.pop_front() else { return };
            self.copies -= std::mem::take(&mut batch.copies);
            batch.parts.drain(..).for_each(&mut take);
            self.spare.push(batch);
        }
    }

    /// Removes all parts although copies for them may continue.
    pub fn abandon(&mut self, mut take: impl FnMut(CopyPart)) {
        let open = std::mem::take(&mut self.open);
        let batches = std::mem::take(&mut self.sealed).into_iter().chain([open]);
        batches.flat_map(|batch| batch.parts).for_each(&mut take);
        self.copies = 0;
    }

    /// Closes an empty outbox's queues.
    pub fn close(&mut self, engine: &mut dyn CopyEngine) {
        for queue in self.queues.drain(..) {
            engine.close(queue.queue);
        }
    }
}
