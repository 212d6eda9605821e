//! Pauses between re-formations that lose no member.

use crate::types::Time;
use std::time::Duration;

/// Pause before the first re-formation that loses no member; each further one doubles it.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Time without a re-formation after which the next one has no pause.
pub(super) const STABLE_TIME: Duration = Duration::from_secs(60);

/// Pauses between a group's re-formations, shared by all generations.
#[derive(Debug)]
pub(super) struct ReformPace {
    /// Consecutive re-formations that lost no member, each within [`STABLE_TIME`] after the previous one.
    repeats: u32,
    /// Time at which a group last formed, or last tried to.
    last: Time,
}

impl ReformPace {
    /// Pace for a group that forms now.
    pub fn new(now: Time) -> ReformPace {
        ReformPace { repeats: 0, last: now }
    }

    /// Pause before the links in a re-formed group connect. `has_failed_link`: the previous group failed
    /// with an error that the program did not cause, and no member was lost.
    pub(super) fn pause(&mut self, now: Time, has_failed_link: bool) -> Duration {
        if !has_failed_link || now.since(self.last) >= STABLE_TIME {
            self.repeats = 0;
            return Duration::ZERO;
        }
        let doublings = self.repeats.min(16);
        self.repeats = self.repeats.saturating_add(1);
        (FIRST_PAUSE * (1 << doublings)).min(LONGEST_PAUSE)
    }

    /// Counts a finished formation, successful or not.
    pub(super) fn ended(&mut self, now: Time) {
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(1);

    /// Times at which connecting begins in an hour of virtual time, if each group fails with the first
    /// write, a millisecond after the group has formed.
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
