//! Re-formation of a group, and the pause of one that has lost no member before its links connect again.
//!
//! A link between two live ranks may fail after each re-formation: a queue pair whose cable or switch is
//! damaged. No member is lost then, and a program that calls `reform` at each error would connect in a loop.

use super::Communicator;
use crate::clock;
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::types::Time;
use std::sync::PoisonError;
use std::time::Duration;
use weft_control::{Cause, Control};

/// Pause of the first re-formation that loses no member; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Time without a re-formation after which the next one has no pause.
const STABLE_TIME: Duration = Duration::from_secs(60);

/// Pauses of a group's re-formations; its generations share it.
#[derive(Debug)]
pub(super) struct ReformPace {
    /// Re-formations in a row that lost no member, none of them [`STABLE_TIME`] after the one before.
    repeats: u32,
    /// Time of the last formation, or of the last attempt of one.
    last: Time,
}

impl ReformPace {
    /// Pace of a group that forms now.
    pub fn new(now: Time) -> ReformPace {
        ReformPace { repeats: 0, last: now }
    }

    /// Pause before the links of a re-formed group connect. `has_failed_link`: the error of the group before
    /// was not the program's own, and no member was lost.
    fn pause(&mut self, now: Time, has_failed_link: bool) -> Duration {
        if !has_failed_link || now.since(self.last) >= STABLE_TIME {
            self.repeats = 0;
            return Duration::ZERO;
        }
        let doublings = self.repeats.min(16);
        self.repeats = self.repeats.saturating_add(1);
        (FIRST_PAUSE * (1 << doublings)).min(LONGEST_PAUSE)
    }

    /// Counts the end of a formation, successful or not.
    fn ended(&mut self, now: Time) {
        self.last = now;
    }
}

impl Communicator {
    /// Re-forms the group after a loss: agrees with the other survivors on the members and makes a new
    /// communicator, with new ranks in the old order, new connections and new memory. The old memory is not
    /// reused.
    ///
    /// If no member was lost, because a link between two live ranks has failed, the new group pauses before
    /// its links connect: 0.25 s, twice as long after each further such re-formation, at most 8 s and half of
    /// the time that is left. There is no pause after 60 s without a re-formation.
    ///
    /// # Errors
    /// [`Error::ReformOfPair`] on a pair; those of [`Control::reform`] and [`Communicator::over`].
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
        let cause = control.poisoned().map_or(Cause::User, |poison| poison.kind);
        let before = control.world_size();
        let control = control.reform(timeout)?;
        // Its lost ranks need no cores.
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
}

/// Pauses before the links of a new group connect.
///
/// # Errors
/// Those of [`Control::check`], which end the pause.
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

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(1);

    /// Begins of the connections in an hour of virtual time, where each group fails with its first write, a
    /// millisecond after it has formed.
    fn attempts(pace: &mut ReformPace, begin: Time) -> Vec<Duration> {
        let (mut now, mut begins) = (begin, Vec::new());
        while now.since(begin) < Duration::from_secs(3600) {
            now = now.after(STEP);
            now = now.after(pace.pause(now, true));
            begins.push(now.since(begin));
            pace.ended(now);
        }
        begins
    }

    #[test]
    fn attempts_of_a_link_that_fails_at_once_back_off_up_to_the_longest_pause() {
        let mut pace = ReformPace::new(Time(0));
        let begins = attempts(&mut pace, Time(0));
        let pauses: Vec<u128> = std::iter::once(begins[0] - STEP)
            .chain(begins.windows(2).map(|pair| pair[1] - pair[0] - STEP))
            .map(|pause| pause.as_millis())
            .collect();
        assert_eq!(pauses[..8], [250, 500, 1000, 2000, 4000, 8000, 8000, 8000]);
        assert!(pauses[8..].iter().all(|pause| *pause == 8000), "{pauses:?}");
        assert_eq!(pauses.len(), 454);
    }

    #[test]
    fn a_stable_group_a_lost_member_and_the_programs_own_poison_end_the_back_off() {
        let mut pace = ReformPace::new(Time(0));
        let end = Time(0).after(Duration::from_secs(3600));
        for has_failed_link in [true, false] {
            attempts(&mut pace, Time(0));
            pace.ended(end);
            let lived = if has_failed_link { STABLE_TIME } else { STEP };
            let now = end.after(lived);
            assert_eq!(pace.pause(now, has_failed_link), Duration::ZERO);
            pace.ended(now);
            assert_eq!(pace.pause(now.after(STEP), true), FIRST_PAUSE);
        }
    }
}
