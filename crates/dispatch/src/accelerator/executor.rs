//! Executors, which run a node's batches.

use super::backend::Backend;
use super::batch::Batch;
use super::job::Job;
use super::tokens::JobQuery;
use weft_fabric::Time;

/// Runs batches while the node polls. A [`Backend`] is an executor that runs a batch when it starts, before the node
/// polls again.
pub trait Executor {
    /// True if it takes another batch now. Queries wait in the node meanwhile, where a cancel removes them.
    fn has_room(&self) -> bool;

    /// Starts a batch; returns it if it has ended already.
    fn start(&mut self, now: Time, job: Job) -> Option<Job>;

    /// The next batch that has ended.
    fn next_finished(&mut self, now: Time) -> Option<Job>;

    /// Removes a query from a batch that has not begun ([`Job::remove`]); false if there is none.
    fn cancel(&mut self, query: JobQuery) -> bool;

    /// The next time at which a batch may end without another event.
    fn next_deadline(&self) -> Option<Time> {
        None
    }
}

impl<B: Backend> Executor for B {
    fn has_room(&self) -> bool {
        true
    }

    fn start(&mut self, _: Time, mut job: Job) -> Option<Job> {
        self.run(&mut Batch::of(&mut job));
        Some(job)
    }

    fn next_finished(&mut self, _: Time) -> Option<Job> {
        None
    }

    fn cancel(&mut self, _: JobQuery) -> bool {
        false
    }
}
