//! Group re-formation, and the pause before links connect again if no member was lost.
//!
//! A link between two live ranks may fail after each re-formation: a queue pair whose cable or switch is
//! damaged. No member is lost then, and a program that calls `reform` at each error would connect in a loop.

use super::Communicator;
use crate::clock;
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use std::sync::PoisonError;
use std::time::Duration;
use weft_control::{Cause, Control};

impl Communicator {
    /// Re-forms the group after a loss: agrees with the other survivors on the members and makes a new
    /// communicator, with new ranks in the old order, new connections and new memory. The old memory is not
    /// reused, and the old connections are closed first.
    ///
    /// If no member was lost, because a link between two live ranks has failed, the new group pauses
    /// before connecting links: 0.25 s, twice as long after each further such re-formation, at most 8 s
    /// and half the time that is left. There is no pause after 60 s without a re-formation.
    ///
    /// # Errors
    /// [`Error::ReformOfPair`] on a pair; errors from [`Control::reform`] and [`Communicator::over`].
    pub fn reform(&self, timeout: Duration) -> Result<Communicator> {
        let (Some(control), Some(config)) = (self.control.mesh(), &self.config) else {
            return Err(Error::ReformOfPair { rank: self.rank() });
        };
        if control.poisoned().is_none() {
            let cause = self.engine().poison_flag().get().cloned();
            if let Some(cause) = cause {
                control.poison(&cause);
            }
        }
        self.end_links(control);
        let cause = control.poisoned().map_or(Cause::User, |poison| poison.kind);
        let (old, before) = (control, control.world_size());
        let control = old.reform(timeout)?;
        // This call may have been the first to learn about the loss.
        self.end_links(old);
        // The lost ranks need no cores.
        *self.processors.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let has_failed_link = cause != Cause::User && control.world_size() == before;
        let pace = || self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let pause = pace().pause(clock::now(), has_failed_link);
        let formed = rest(&control, pause).and_then(|()| {
            Communicator::over_devices(control, config.clone(), self.devices.clone())
        });
        pace().ended(clock::now());
        let mut formed = formed?;
        formed.pace = self.pace.clone();
        Ok(formed)
    }

    /// Closes a poisoned group's links before the next group makes new ones: no poll may have seen the
    /// poison.
    fn end_links(&self, control: &Control) {
        let mut engine = self.engine();
        if let Some(cause) = control.poisoned() {
            engine.poison_flag().poison_from_peer(cause);
        }
        engine.fence_if_poisoned();
    }
}

/// Pauses before a new group's links connect.
///
/// # Errors
/// Errors from [`Control::check`], which end the pause.
fn rest(control: &Control, pause: Duration) -> Result<()> {
    if pause.is_zero() {
        return Ok(());
    }
    let pause = pause.min(control.connect_time_left() / 2);
    log::warn!(
        "{}: the group re-forms with the same {} members after a failed link; it connects in {pause:?}",
        control.rank(),
        control.world_size()
    );
    let deadline = clock::now().after(pause);
    let mut limit = WaitLimit { deadline, give_up: &mut || Ok(control.check()?) };
    while let Some(park) = limit.park()? {
        std::thread::sleep(park);
    }
    Ok(())
}
