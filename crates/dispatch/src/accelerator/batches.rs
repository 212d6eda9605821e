//! Batches on an accelerator node: start, cancel and end.

use super::Accelerator;
use super::executor::Executor;
use super::job::Job;
use super::tokens::{Appended, JobQuery};
use crate::wire::CANCELLED;
use weft_fabric::Time;

impl<E: Executor> Accelerator<E> {
    /// Answers a cancelled query whose batch has not begun.
    pub(super) fn cancel_if_not_begun(&mut self, index: usize, slot: u32) {
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        if !link.is_cancelled(slot) {
            return;
        }
        let query = JobQuery { link: link.memory.id, slot };
        if self.waiting.remove((index as u32, slot)) || self.executor.cancel(query) {
            self.cancelled += 1;
            link.answer_error(slot, CANCELLED);
        }
    }

    /// Takes batches that have ended, and starts full ones and those whose window has passed.
    pub(crate) fn run_due(&mut self, now: Time) {
        loop {
            let job = self.executor.next_finished(now);
            // A batch's tokens were appended before it ended.
            self.take_tokens();
            match job {
                Some(job) => self.finish(job),
                None => break,
            }
        }
        while self.executor.has_room()
            && let Some(bucket) = self.waiting.due(now)
        {
            let job = self.next_job(bucket);
            self.batches += 1;
            if let Some(job) = self.executor.start(now, job) {
                self.take_tokens();
                self.finish(job);
            }
        }
    }

    fn next_job(&mut self, bucket: usize) -> Job {
        let mut job = self.spare.pop().unwrap_or_else(|| {
            let (max_batch, inputs) = (self.config.max_batch as usize, self.schema.inputs.len());
            Job::with_capacity(max_batch, inputs, &self.most, self.tokens.clone())
        });
        self.batch.clear();
        self.batch.extend(self.waiting.take(bucket));
        if self.config.by_slot {
            self.batch.sort_unstable();
        }
        for &(link, slot) in &self.batch {
            if let Some(link) = &self.links[link as usize] {
                job.push(&link.memory, slot, link.lengths(slot));
            }
        }
        job
    }

    /// Enters tokens that backends have appended, except those for connections that are gone.
    fn take_tokens(&mut self) {
        self.tokens.take(&mut self.appended);
        for Appended { index, query, bytes } in self.appended.drain(..) {
            match &mut self.links[index] {
                Some(link) if link.memory.id == query.link => link.append(query.slot, bytes),
                _ => {}
            }
        }
    }

    /// Enters a batch's answers, except on connections that are gone.
    fn finish(&mut self, mut job: Job) {
        for (index, query, code, outputs) in job.answers() {
            match &mut self.links[index] {
                Some(link) if link.memory.id == query.link => {
                    link.answer(query.slot, code, outputs)
                }
                _ => {}
            }
        }
        job.clear();
        self.spare.push(job);
    }
}
