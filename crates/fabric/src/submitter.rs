//! Submission producer for threads that must not block on a lock.

use crate::error::{Error, Result};
use crate::inbox::{DEPTH, OutcomeCallback, PendingOutcome, Submission, SubmissionDescriptor};
use crate::shared_engine::SharedEngine;
use std::sync::Arc;

/// Submission producer; clones push to the same engine.
#[derive(Clone)]
pub struct Submitter {
    shared: Arc<SharedEngine>,
}

impl SharedEngine {
    /// Submission producer for threads that must not block on the lock, such as a GPU proxy.
    pub fn submitter(self: &Arc<Self>) -> Submitter {
        self.inbox().open();
        // A thread that takes the lock from here on finds the inbox open, and drains it on release.
        drop(self.lock());
        Submitter { shared: self.clone() }
    }
}

impl Submitter {
    /// Submits a descriptor. `outcomes` is called once with the tag: when the source may be reused, or
    /// with the error if the submission was rejected or failed.
    ///
    /// # Errors
    /// [`Error::Limit`] if the queue is full: retry after progress;
    /// [`weft_control::Error::Closed`]. `outcomes` is not called then.
    pub fn push(
        &self,
        descriptor: SubmissionDescriptor,
        outcomes: &Arc<OutcomeCallback>,
    ) -> Result<()> {
        self.shared.check_open()?;
        let outcome = PendingOutcome { tag: descriptor.tag, outcomes: Some(outcomes.clone()) };
        let submission = Submission { descriptor, outcome };
        if let Err(mut submission) = self.shared.inbox().ring().put(submission) {
            submission.outcome.outcomes = None;
            let (wanted, limit) = (DEPTH as u64 + 1, DEPTH as u64);
            return Err(Error::Limit { what: "submissions in an inbox", wanted, limit });
        }
        self.shared.drain_inbox();
        Ok(())
    }
}
