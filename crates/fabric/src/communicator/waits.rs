//! Blocking communicator calls: see the [`Engine`] calls with these names.

use super::Communicator;
use crate::error::Result;
use crate::types::{CounterId, RequestId, Time};
use crate::wait::{self, WaitOptions};
use weft_control::Rank;

impl Communicator {
    /// Options for a wait until `deadline`, with this communicator's spin deadline.
    pub fn wait_options<'a>(
        &self,
        deadline: Time,
        interrupted: &'a mut dyn FnMut() -> bool,
    ) -> WaitOptions<'a> {
        WaitOptions { deadline, spin: self.spin, interrupted }
    }

    /// [`crate::Engine::wait`].
    ///
    /// # Errors
    /// Same as [`crate::Engine::wait`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait(
        &self,
        counter: CounterId,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait(&mut self.access(), counter, None, expected, options)
    }

    /// [`crate::Engine::wait_in`].
    ///
    /// # Errors
    /// Same as [`crate::Engine::wait_in`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait_in(
        &self,
        counter: CounterId,
        round: u64,
        expected: &[(Rank, u64)],
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait(&mut self.access(), counter, Some(round), expected, options)
    }

    /// [`crate::Engine::wait_for_credit`].
    ///
    /// # Errors
    /// Same as [`Communicator::wait`].
    pub fn wait_for_credit(
        &self,
        counter: CounterId,
        peer: Rank,
        round: u64,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait_for_credit(&mut self.access(), counter, peer, round, options)
    }

    /// [`crate::Engine::wait_for_request`].
    ///
    /// # Errors
    /// Same as [`crate::Engine::wait_for_request`]; [`weft_control::Error::Closed`] once the communicator was closed.
    pub fn wait_for_request(
        &self,
        request: RequestId,
        options: &mut WaitOptions<'_>,
    ) -> Result<()> {
        wait::wait_for_request(&mut self.access(), request, options)
    }

    /// Returns after every rank has entered.
    ///
    /// # Errors
    /// Same as [`Communicator::wait`]. After [`crate::Error::Timeout`] a repeated call continues the same
    /// barrier. [`crate::Error::InProgress`] if another thread is in a barrier on this communicator; that
    /// barrier continues.
    pub fn barrier(&self, options: &mut WaitOptions<'_>) -> Result<()> {
        wait::barrier(&mut self.access(), options)
    }
}
