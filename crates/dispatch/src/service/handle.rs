//! Handle: submissions to a front end from any thread.

use super::query::Query;
use crate::error::{Error, Result};
use crate::front_end::Admission;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weft_fabric::{QueueSender, Time, clock};

/// Service name in errors.
pub(super) const WHAT: &str = "front end";
/// Submissions after which the service's thread is woken.
const WAKE_INTERVAL: u64 = 16;
/// Number of yields while a thread waits for room, before it sleeps.
const YIELDS: u32 = 64;
/// Sleep time for a thread that waits for room.
const NAP: Duration = Duration::from_micros(50);

/// Part of a front end service that submitting threads share.
pub(super) struct Intake {
    pub admission: Arc<Admission>,
    pub sender: QueueSender<Query>,
    /// Most queries in the queue.
    pub limit: u32,
    /// No more queries are accepted.
    pub closed: AtomicBool,
}

/// Submits queries to a [`super::FrontEndService`]. Clones submit to the same one, from any thread and without a lock.
#[derive(Clone)]
pub struct FrontEndHandle(pub(super) Arc<Intake>);

/// Error from [`FrontEndHandle::submit_all`].
#[derive(Debug, thiserror::Error)]
#[error("{submitted} queries were submitted; the next one: {error}")]
pub struct Unsubmitted {
    /// Queries that were submitted.
    pub submitted: u64,
    /// Error for the next one.
    #[source]
    pub error: Error,
}

impl FrontEndHandle {
    /// Submits a query without waiting. Exactly one report that it has ended follows; its memory must not change until
    /// the report that returns it ([`crate::Report::is_last`]).
    ///
    /// # Errors
    /// [`Error::Full`]: back-pressure; [`Error::Query`]; [`Error::Stopped`].
    pub fn submit(&self, query: Query) -> Result<()> {
        self.0.admission.check(query.inputs())?;
        self.check_open()?;
        let put = self.0.sender.put(query);
        self.0.sender.wake();
        put.map_err(|_| self.refusal())
    }

    /// Submits queries in order; waits for room until `until`. Returns how many it submitted.
    ///
    /// # Errors
    /// [`Unsubmitted`], with an error from [`FrontEndHandle::submit`]; later queries were not taken from `queries`.
    pub fn submit_all(
        &self,
        queries: impl IntoIterator<Item = Query>,
        until: Time,
    ) -> std::result::Result<u64, Unsubmitted> {
        let mut submitted = 0;
        let result = self.put_all(queries, until, &mut submitted);
        self.0.sender.wake();
        match result {
            Ok(()) => Ok(submitted),
            Err(error) => Err(Unsubmitted { submitted, error }),
        }
    }

    fn put_all(
        &self,
        queries: impl IntoIterator<Item = Query>,
        until: Time,
        submitted: &mut u64,
    ) -> Result<()> {
        self.check_open()?;
        for query in queries {
            self.0.admission.check(query.inputs())?;
            let mut next = self.0.sender.put(query);
            let mut waits = 0;
            while let Err(query) = next {
                self.check_open()?;
                self.wait_for_room(&mut waits, until)?;
                next = self.0.sender.put(query);
            }
            *submitted += 1;
            if *submitted % WAKE_INTERVAL == 1 {
                self.0.sender.wake();
                self.check_open()?;
            }
        }
        Ok(())
    }

    fn wait_for_room(&self, waits: &mut u32, until: Time) -> Result<()> {
        self.0.sender.wake();
        if clock::now() >= until {
            return Err(self.full());
        }
        *waits += 1;
        match *waits {
            ..YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
        Ok(())
    }

    fn check_open(&self) -> Result<()> {
        if self.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Stopped { what: WHAT });
        }
        Ok(())
    }

    /// Reason for which the queue refused a query. The service marks itself as closed before the queue refuses.
    #[cold]
    fn refusal(&self) -> Error {
        self.check_open().err().unwrap_or_else(|| self.full())
    }

    #[cold]
    fn full(&self) -> Error {
        Error::Full { what: "submissions that wait for the front end", limit: self.0.limit }
    }
}

impl std::fmt::Debug for FrontEndHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrontEndHandle").field("limit", &self.0.limit).finish_non_exhaustive()
    }
}
