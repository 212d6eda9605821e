//! Peer presence: each peer's state, and departures.

use crate::link::PostStatus;
use crate::types::Time;
use std::time::Duration;
use weft_control::Rank;

/// Time after a peer's farewell for earlier messages to arrive.
const DRAIN_GRACE: Duration = Duration::from_millis(250);

/// A connected peer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    Open,
    /// Reported as lost. Parts toward it wait for the fence.
    Lost,
    /// Cut off: it is neither read nor written.
    Fenced,
}

impl PeerState {
    /// Status for a part toward a peer that is not open: toward a lost one it waits among `parked` for
    /// the fence.
    ///
    /// # Errors
    /// Toward a fenced peer.
    #[cold]
    pub fn post_closed(self, parked: &mut Vec<u64>, token: u64) -> Result<PostStatus, String> {
        if self == PeerState::Fenced {
            return Err("the peer is fenced".into());
        }
        parked.push(token);
        Ok(PostStatus::InFlight)
    }
}

/// Peers whose farewell has arrived, with the time of the next poll.
#[derive(Default)]
pub struct Departures(Vec<(Rank, Option<Time>)>);

impl Departures {
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a peer, once.
    pub fn add(&mut self, rank: Rank) {
        if !self.0.iter().any(|(known, _)| *known == rank) {
            self.0.push((rank, None));
        }
    }

    /// Calls `report` with each peer whose messages have had time to arrive: messages toward it no longer
    /// complete.
    #[cold]
    pub fn end(&mut self, now: Time, mut report: impl FnMut(Rank)) {
        self.0.retain_mut(|(rank, since)| {
            let since = *since.get_or_insert(now);
            let is_over = now.since(since) >= DRAIN_GRACE;
            if is_over {
                report(*rank);
            }
            !is_over
        });
    }

    /// Time at which [`Departures::end`] is due.
    pub fn next_deadline(&self) -> Option<Time> {
        let end = |(_, since): &(Rank, Option<Time>)| {
            since.map_or(Time(0), |since| since.after(DRAIN_GRACE))
        };
        self.0.iter().map(end).min()
    }
}
