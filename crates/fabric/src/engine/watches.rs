//! Watches: conditions whose end a callback reports, in place of a thread that waits.
//!
//! Every poll checks them after it has taken arrivals and completions, and so does a thread that unlocks a shared
//! engine after other events. A watch ends once: when its condition holds, or with the error that a wait would
//! return.

use super::state::Engine;
use super::watch_list::{Condition, Watch, WatchCallback, WatchCondition, WatchId};
use crate::error::{Error, MissingPeer, Result};
use crate::poison::departure;
use crate::types::Time;

impl Engine {
    /// Calls `callback` once the condition holds, perhaps before this returns; the id is `None` then. Polls find
    /// arrivals, so an engine that nobody polls reports nothing ([`crate::Communicator::demand_progress`]).
    ///
    /// Later the callback gets the error that a wait would return: [`Error::Poisoned`]; [`Error::OldRound`] if the
    /// round was credited before it was complete; [`Error::Unknown`] if the counter was released. A watch that
    /// needs a peer that has left poisons the group a second later, as a wait does. The callback is
    /// dropped without a call if the engine is dropped first.
    ///
    /// # Errors
    /// Same as for the wait, apart from [`Error::Timeout`]; the callback is not called then.
    pub fn watch(
        &mut self,
        condition: WatchCondition,
        callback: WatchCallback,
    ) -> Result<Option<WatchId>> {
        let mut condition = self.with_rounds(condition)?;
        self.progress();
        if condition.holds(self)? {
            callback(Ok(()));
            self.note_unreported();
            return Ok(None);
        }
        self.check()?;
        self.watches.last += 1;
        let id = WatchId(self.watches.last);
        self.watches.list.push(Watch { id, condition, callback, left_since: None });
        Ok(Some(id))
    }

    /// Ends a watch without a call; returns the timeout error of a wait from `begin` to `now`, or `None` if the
    /// watch has ended before.
    pub fn unwatch(&mut self, id: WatchId, begin: Time, now: Time) -> Option<Error> {
        let at = self.watches.list.iter().position(|watch| watch.id == id)?;
        let watch = self.watches.list.remove(at);
        let missing = watch.condition.missing(self);
        Some(Error::timeout(watch.condition.what(), begin, now, missing))
    }

    /// Ends all watches, since the communicator closes or a thread that made progress for them has ended: with the
    /// poison, or with [`weft_control::Error::Closed`].
    pub fn end_watches(&mut self) {
        if self.check().is_err() {
            return self.fail_watches();
        }
        for watch in std::mem::take(&mut self.watches.list) {
            (watch.callback)(Err(weft_control::Error::Closed.into()));
        }
    }

    /// True if a watch has not ended.
    #[inline(always)]
    pub(crate) fn has_watches(&self) -> bool {
        !self.watches.list.is_empty()
    }

    fn with_rounds(&mut self, condition: WatchCondition) -> Result<Condition> {
        Ok(match condition {
            WatchCondition::Raised { counter, round, expected } => {
                let resolved = expected.into_iter().map(|(peer, raises)| {
                    let oldest = self.open_round(counter, peer)?;
                    Ok((peer, round.unwrap_or(oldest), raises))
                });
                let expected: Vec<_> = resolved.collect::<Result<_>>()?;
                let missing = expected.len();
                Condition::Raised { counter, expected, missing }
            }
            WatchCondition::Credited { counter, peer, round } => {
                let round = match round {
                    Some(round) => round,
                    None => self.next_round(counter, peer)?,
                };
                Condition::Credited { counter, peer, round }
            }
            WatchCondition::Ended(request) => Condition::Ended(request),
        })
    }

    /// Ends the watches whose conditions hold, if there was an event since the last check.
    #[cold]
    #[inline(never)]
    pub(crate) fn check_watches(&mut self) {
        if self.watches.checked == self.epoch {
            return;
        }
        self.watches.checked = self.epoch;
        let (mut at, mut ended) = (0, Vec::new());
        let mut list = std::mem::take(&mut self.watches.list);
        while at < list.len() {
            match list[at].condition.holds(self) {
                Ok(false) => at += 1,
                Ok(true) => ended.push((list.remove(at), Ok(()))),
                Err(error) => ended.push((list.remove(at), Err(error))),
            }
        }
        self.watches.list = list;
        if ended.is_empty() {
            return;
        }
        for (watch, outcome) in ended {
            (watch.callback)(outcome);
        }
        // The callbacks may have left work for the event loop.
        self.note_unreported();
    }

    /// [`Engine::check_watches`] without a new event: before and after a credit, which ends a round.
    #[cold]
    #[inline(never)]
    pub(super) fn renew_watches(&mut self) {
        self.watches.checked = u64::MAX;
        self.check_watches();
    }

    /// Poisons the group if a watch has needed a peer that left for longer than a wait would.
    #[cold]
    #[inline(never)]
    pub(super) fn check_departures(&mut self, now: Time) {
        let mut list = std::mem::take(&mut self.watches.list);
        for watch in &mut list {
            let missing = watch.condition.missing(self);
            let left =
                missing.iter().map(|each| each.rank).find(|rank| self.poison.has_left(*rank));
            let Some(rank) = left else {
                // The last writes of a rank that left have come: another rank's departure counts anew.
                watch.left_since = None;
                continue;
            };
            if let Some(cause) =
                departure(&mut watch.left_since, now, watch.condition.what(), self.rank, rank)
            {
                self.poison.poison(cause);
            }
        }
        self.watches.list = list;
    }

    /// Ends all watches in a poisoned group.
    pub(super) fn fail_watches(&mut self) {
        self.renew_watches();
        for watch in std::mem::take(&mut self.watches.list) {
            if let Err(error) = self.check() {
                (watch.callback)(Err(error));
            }
        }
        self.note_unreported();
    }
}

impl Condition {
    fn what(&self) -> &'static str {
        match self {
            Condition::Raised { .. } => "a wait on a counter",
            Condition::Credited { .. } => "a wait for credit",
            Condition::Ended(_) => "a request",
        }
    }

    /// True once it holds.
    fn holds(&mut self, engine: &mut Engine) -> Result<bool> {
        match self {
            Condition::Raised { counter, expected, missing } => {
                let mut at = 0;
                while at < *missing {
                    let (peer, round, raises) = expected[at];
                    if engine.count_in(*counter, peer, round)? < raises {
                        at += 1;
                    } else {
                        *missing -= 1;
                        expected.swap(at, *missing);
                    }
                }
                if *missing > 0 {
                    return Ok(false);
                }
                for &(peer, round, _) in &*expected {
                    if engine.open_round(*counter, peer)? == round {
                        engine.unlist(*counter, peer);
                    }
                }
                Ok(true)
            }
            Condition::Credited { counter, peer, round } => {
                engine.has_credit(*counter, *peer, *round)
            }
            Condition::Ended(request) => {
                if !engine.is_drained(*request) {
                    return Ok(false);
                }
                if engine.has_failed(*request) {
                    engine.check()?;
                }
                Ok(true)
            }
        }
    }

    fn missing(&self, engine: &mut Engine) -> Vec<MissingPeer> {
        match self {
            Condition::Raised { counter, expected, missing } => expected[..*missing]
                .iter()
                .map(|&(rank, round, expected)| {
                    let seen = engine.count_in(*counter, rank, round).unwrap_or_default();
                    MissingPeer { rank, expected, seen }
                })
                .collect(),
            Condition::Credited { counter, peer, round } => {
                let seen = engine.credits(*counter, *peer).unwrap_or_default();
                let expected = engine.credits_for(*counter, *peer, *round).unwrap_or(*round);
                vec![MissingPeer { rank: *peer, expected, seen }]
            }
            Condition::Ended(request) => engine.missing_of(*request),
        }
    }
}
