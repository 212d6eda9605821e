//! Collective calls and point-to-point messages of a handle.

use super::Control;
use crate::core::Payload;
use crate::deadline::Deadline;
use crate::wire::MAX_PAYLOAD;
use crate::{Error, Operation, Rank, Result};
use std::time::Duration;

impl Control {
    /// Gives every rank every rank's payload, in rank order.
    ///
    /// All ranks make the same collective calls in the same order: the first call of one belongs to
    /// the first of the others, and so on. At most [`crate::MAX_PAYLOAD`] bytes each.
    ///
    /// A call that ends with [`Error::Timeout`] or [`Error::Interrupted`] is unfinished: this rank's
    /// payload was sent and stands. The same call with the same payload continues it. Any other
    /// collective call gives it up, here only: to the other ranks this rank has made it.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::RepeatDiffers`] if an unfinished call is repeated with another
    /// payload; [`Error::OtherCall`] if a rank makes another call; [`Error::Left`];
    /// [`Error::Poisoned`]; [`Error::TooLarge`].
    pub fn all_gather(&self, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.all_gather_as(Operation::AllGather, payload, timeout)
    }

    /// [`Control::all_gather`] on behalf of an operation, which errors name.
    pub fn all_gather_as(
        &self,
        operation: Operation,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        self.gather(operation, Payload::Same(payload), &self.deadline(timeout))
    }

    /// Waits until every rank is here.
    ///
    /// # Errors
    /// Those of [`Control::all_gather`].
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let deadline = self.deadline(timeout);
        self.gather(Operation::Barrier, Payload::Same(&[]), &deadline).map(drop)
    }

    /// Gives each rank the bytes that are for it, `to_each` by rank, and returns what each rank gave
    /// to this one. A rank's bytes go to no other rank; those for this rank itself are returned as
    /// they are. A collective call, as [`Control::all_gather`] is.
    ///
    /// # Errors
    /// [`Error::WrongCount`] unless there is one element for each rank, and those of
    /// [`Control::all_gather`].
    pub fn exchange(&self, to_each: &[Vec<u8>], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.exchange_as(Operation::Exchange, to_each, timeout)
    }

    /// [`Control::exchange`] on behalf of an operation, which errors name.
    pub fn exchange_as(
        &self,
        operation: Operation,
        to_each: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        self.gather(operation, Payload::Each(to_each), &self.deadline(timeout))
    }

    pub(super) fn gather(
        &self,
        operation: Operation,
        payload: Payload,
        deadline: &Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        if payload.longest() > MAX_PAYLOAD {
            return Err(Error::TooLarge { size: payload.longest(), limit: MAX_PAYLOAD });
        }
        let (shared, generation) = (self.owner.shared()?, self.generation);
        let sequence = shared.with(|core| core.gather(generation, operation, payload))?;
        let waited =
            shared.wait(deadline, operation.name(), |core| core.gather_done(generation, sequence));
        if let Ok(Some(result)) = waited {
            return result;
        }
        let missing = shared.with(|core| {
            core.gather_pause(generation, sequence);
            core.gather_missing(generation, sequence)
        });
        let (operation, waited_for) = (operation.name(), deadline.waited());
        waited.and(Err(Error::Timeout { operation, missing, waited: waited_for }))
    }

    /// Sends a message to one rank, at most [`crate::MAX_PAYLOAD`] bytes. Messages to one rank on one
    /// `channel` are received in the order in which they were sent; channels are independent of each
    /// other. It returns at once: a message that a lost rank has not received is lost with it.
    ///
    /// # Errors
    /// [`Error::Backlog`] if too much that was sent to that rank before waits to be received there;
    /// [`Error::NoSuchRank`]; [`Error::Left`]; [`Error::Poisoned`]; [`Error::TooLarge`].
    pub fn send(&self, peer: Rank, channel: u32, bytes: &[u8]) -> Result<()> {
        if bytes.len() > MAX_PAYLOAD {
            return Err(Error::TooLarge { size: bytes.len(), limit: MAX_PAYLOAD });
        }
        let shared = self.owner.shared()?;
        shared.with(|core| core.post(self.generation, peer, channel, bytes))?;
        if peer == self.rank {
            shared.notify();
        }
        Ok(())
    }

    /// Waits for the next message of one rank on one channel.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Left`] once the rank has left and all its messages were received;
    /// [`Error::NoSuchRank`]; [`Error::Poisoned`], also if messages wait.
    pub fn receive(&self, peer: Rank, channel: u32, timeout: Duration) -> Result<Vec<u8>> {
        const RECEIVE: &str = "receive";
        let deadline = self.deadline(timeout);
        let received = self.owner.shared()?.wait(&deadline, RECEIVE, |core| {
            core.take(self.generation, peer, channel).transpose()
        })?;
        received.unwrap_or_else(|| {
            let (missing, waited) = (vec![peer], deadline.waited());
            Err(Error::Timeout { operation: RECEIVE, missing, waited })
        })
    }

    /// The next message of one rank on one channel, or `None` if there is none now.
    ///
    /// # Errors
    /// Those of [`Control::receive`] except [`Error::Timeout`].
    pub fn try_receive(&self, peer: Rank, channel: u32) -> Result<Option<Vec<u8>>> {
        self.owner.shared()?.with(|core| core.take(self.generation, peer, channel))
    }
}
