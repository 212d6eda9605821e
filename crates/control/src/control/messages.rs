//! Collective calls and point-to-point messages on a handle.

use super::Control;
use crate::core::Payload;
use crate::deadline::Deadline;
use crate::wire::MAX_PAYLOAD;
use crate::{Error, Operation, Rank, Result};
use std::time::Duration;

impl Control {
    /// All-gather: returns all ranks' payloads, in rank order.
    ///
    /// All ranks make the same collective calls in the same order; calls are matched by position. At most
    /// [`crate::MAX_PAYLOAD`] bytes each.
    ///
    /// A call that ends with [`Error::Timeout`] or [`Error::Interrupted`] is unfinished: this
    /// rank's payload was sent and is final. The same call with the same payload continues it. Any other collective
    /// call abandons it at this rank only: for the other ranks, this rank has made it.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::PayloadMismatch`] if an unfinished call is repeated with another
    /// payload; [`Error::CallMismatch`] if another rank makes a different call; [`Error::Left`];
    /// [`Error::Poisoned`]; [`Error::TooLarge`].
    pub fn all_gather(&self, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.all_gather_as(Operation::AllGather, payload, timeout)
    }

    /// [`Control::all_gather`] for `operation`, which errors name.
    pub fn all_gather_as(
        &self,
        operation: Operation,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        self.gather(operation, Payload::Same(payload), &self.deadline(timeout))
    }

    /// Barrier: waits until every rank has called it.
    ///
    /// # Errors
    /// Same as [`Control::all_gather`].
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let deadline = self.deadline(timeout);
        self.gather(Operation::Barrier, Payload::Same(&[]), &deadline).map(drop)
    }

    /// All-to-all: sends element `r` of `to_each` to rank `r` only, and returns the elements that the ranks
    /// sent to this one. This rank's own element is returned unchanged. A collective call, as
    /// [`Control::all_gather`] is.
    ///
    /// # Errors
    /// [`Error::WrongCount`] unless there is one element for each rank, and the errors from
    /// [`Control::all_gather`].
    pub fn exchange(&self, to_each: &[Vec<u8>], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.exchange_as(Operation::Exchange, to_each, timeout)
    }

    /// [`Control::exchange`] for `operation`, which errors name.
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
        let (shared, generation) = (self.process.shared()?, self.generation);
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

    /// Sends a message with at most [`crate::MAX_PAYLOAD`] bytes to one rank. Messages to one rank on one
    /// `channel` arrive in order; channels are independent. It returns at once: messages that a lost rank has
    /// not received are lost.
    ///
    /// # Errors
    /// [`Error::Backlog`] if too many bytes sent to that rank are not received there;
    /// [`Error::NoSuchRank`]; [`Error::Left`]; [`Error::Poisoned`]; [`Error::TooLarge`].
    pub fn send(&self, peer: Rank, channel: u32, bytes: &[u8]) -> Result<()> {
        if bytes.len() > MAX_PAYLOAD {
            return Err(Error::TooLarge { size: bytes.len(), limit: MAX_PAYLOAD });
        }
        let shared = self.process.shared()?;
        shared.with(|core| core.post(self.generation, peer, channel, bytes))?;
        if peer == self.rank {
            shared.notify();
        }
        Ok(())
    }

    /// Waits for the next message from one rank on one channel.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Left`] once the rank has left and all its messages were received;
    /// [`Error::NoSuchRank`]; [`Error::Poisoned`], even if messages are queued.
    pub fn receive(&self, peer: Rank, channel: u32, timeout: Duration) -> Result<Vec<u8>> {
        const RECEIVE: &str = "receive";
        let deadline = self.deadline(timeout);
        let received = self.process.shared()?.wait(&deadline, RECEIVE, |core| {
            core.take_message(self.generation, peer, channel).transpose()
        })?;
        received.unwrap_or_else(|| {
            let (missing, waited) = (vec![peer], deadline.waited());
            Err(Error::Timeout { operation: RECEIVE, missing, waited })
        })
    }

    /// Next message from one rank on one channel; `None` if none is queued.
    ///
    /// # Errors
    /// Same as [`Control::receive`], except [`Error::Timeout`].
    pub fn try_receive(&self, peer: Rank, channel: u32) -> Result<Option<Vec<u8>>> {
        self.process.shared()?.with(|core| core.take_message(self.generation, peer, channel))
    }
}
