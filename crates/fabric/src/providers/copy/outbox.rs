//! What goes to one peer by copy engines: parts, and the marks behind which their copies are over.
//!
//! Parts that are posted between two flushes form a batch, which has one mark in each queue that it
//! uses: one event for many copies, and one look at it instead of many.

use super::copier::{Copier, Mark, Queue, Why};
use crate::types::Lane;
use std::collections::VecDeque;

/// A part whose copies are under way.
#[derive(Debug)]
pub(super) struct Part {
    pub token: u64,
    pub lane: Lane,
    /// Why it fails once its copies are over.
    pub failure: Option<Why>,
}

#[derive(Debug, Default)]
struct Batch {
    parts: Vec<Part>,
    copies: usize,
    marks: Vec<Mark>,
}

/// A queue toward the peer.
#[derive(Debug)]
struct Line {
    device: u32,
    queue: Queue,
    /// Whether it was given copies behind its last mark.
    open: bool,
}

/// Copies under way toward one peer.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    lines: Vec<Line>,
    /// Takes parts until the next flush.
    open: Batch,
    sealed: VecDeque<Batch>,
    /// Empty, for their memory.
    spare: Vec<Batch>,
    /// Of all batches.
    copies: usize,
}

impl Outbox {
    /// Whether `more` copies may be added when `limit` may be under way. What is more than the limit by
    /// itself finds room when nothing else is there.
    pub fn has_room(&self, more: usize, limit: usize) -> bool {
        self.copies == 0 || self.copies + more <= limit
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.open.parts.is_empty() && self.sealed.is_empty()
    }

    /// The queue of a device toward this peer; a copy is about to be added to it.
    pub fn queue(&mut self, copier: &mut dyn Copier, device: u32) -> Result<Queue, Why> {
        let known = self.lines.iter().position(|line| line.device == device);
        let index = match known {
            Some(index) => index,
            None => {
                self.lines.push(Line { device, queue: copier.open(device)?, open: false });
                self.lines.len() - 1
            }
        };
        let line = &mut self.lines[index];
        line.open = true;
        Ok(line.queue)
    }

    /// Adds a part, whose copies were added to queues just before.
    pub fn add(&mut self, part: Part, copies: usize) {
        self.open.parts.push(part);
        self.open.copies += copies;
        self.copies += copies;
    }

    /// Puts marks behind what has been added.
    pub fn seal(&mut self, copier: &mut dyn Copier) {
        if self.open.parts.is_empty() {
            return;
        }
        let mut batch = std::mem::replace(&mut self.open, self.spare.pop().unwrap_or_default());
        for line in self.lines.iter_mut().filter(|line| line.open) {
            line.open = false;
            match copier.mark(line.queue) {
                Ok(mark) => batch.marks.push(mark),
                Err(why) => {
                    for part in &mut batch.parts {
                        part.failure.get_or_insert_with(|| why.clone());
                    }
                }
            }
        }
        self.sealed.push_back(batch);
    }

    /// Hands out the parts whose copies are over, oldest batch first, each with why it failed if it did.
    pub fn take_over(&mut self, copier: &mut dyn Copier, mut take: impl FnMut(Part)) {
        while let Some(batch) = self.sealed.front_mut() {
            while let Some(&mark) = batch.marks.last() {
                match copier.is_over(mark) {
                    Ok(false) => return,
                    Ok(true) => {}
                    Err(why) => {
                        for part in &mut batch.parts {
                            part.failure.get_or_insert_with(|| why.clone());
                        }
                    }
                }
                copier.release(mark);
                batch.marks.pop();
            }
            let Some(mut batch) = self.sealed.pop_front() else { return };
            self.copies -= std::mem::take(&mut batch.copies);
            batch.parts.drain(..).for_each(&mut take);
            self.spare.push(batch);
        }
    }

    /// Hands out all parts, though their copies may go on.
    pub fn give_up(&mut self, mut take: impl FnMut(Part)) {
        let open = std::mem::take(&mut self.open);
        let batches = std::mem::take(&mut self.sealed).into_iter().chain([open]);
        batches.flat_map(|batch| batch.parts).for_each(&mut take);
        self.copies = 0;
    }

    /// Gives the queues back; nothing is under way.
    pub fn close(&mut self, copier: &mut dyn Copier) {
        for line in self.lines.drain(..) {
            copier.close(line.queue);
        }
    }
}
