//! Followers: counters whose rounds are released by credits from another counter, the leader.

use super::super::state::Engine;
use super::ends::CreditRole;
use super::table::{CounterConfig, find, get};
use crate::error::{Error, Result};
use crate::types::CounterId;
use weft_control::Rank;

impl Engine {
    /// Makes a counter credited with `leader`: a credit for a leader round releases that round on both,
    /// with one signal. This suits protocols that write several kinds of data in a round and count each
    /// kind in a separate lane. Peers, window and class are the same as on `leader`; all ranks make the
    /// same pairs of counters and release both together.
    ///
    /// # Errors
    /// [`Error::Limit`] if the lanes are used up; [`Error::Unknown`] if `leader` was released or is
    /// credited with another counter itself.
    pub fn counter_credited_with(&mut self, leader: CounterId) -> Result<CounterId> {
        let known = self.known_counter(leader)?;
        let class = known.class;
        let ends = || (0..).map(Rank).zip(&known.ends);
        let ends = ends().filter_map(|(rank, end)| Some((rank, end.as_ref()?)));
        let (mut peers, mut credits, mut window) = (Vec::new(), Vec::new(), 1);
        for (rank, end) in ends {
            if end.role == CreditRole::Follower {
                return Err(no_credits_of_its_own(leader));
            }
            peers.push(rank);
            credits.push(end.credit);
            window = end.window;
        }
        let follower = self.counter_with(CounterConfig { window, peers: Some(&peers), class })?;
        for (peer, credit) in peers.into_iter().zip(credits) {
            let end = self.end(follower, peer)?;
            (end.credit, end.role) = (credit, CreditRole::Follower);
            self.end(leader, peer)?.role = CreditRole::Leader;
        }
        if let Some(known) = get(&mut self.counters, leader) {
            known.followers.push(follower);
        }
        Ok(follower)
    }

    /// Closes the oldest round on each follower of `leader`.
    #[inline(never)]
    pub(super) fn close_followers(&mut self, peer: Rank, leader: CounterId) -> Result<()> {
        let mut index = 0;
        while let Some(known) = get(&mut self.counters, leader)
            && let Some(&follower) = known.followers.get(index)
        {
            index += 1;
            // A released follower has no rounds.
            let Ok((end, _)) = find(&mut self.counters, follower, peer) else { continue };
            let ours = end.oldest_lane();
            end.close_round(self.lanes.value(end.oldest()));
            if end.window > 1 {
                self.note_next_round(peer, follower)?;
            }
            if let Some(route) = self.peers[peer.index()].route {
                self.links[route.index].released(peer, ours);
            }
        }
        Ok(())
    }
}

#[cold]
#[inline(never)]
pub(super) fn no_credits_of_its_own(counter: CounterId) -> Error {
    Error::Unknown { what: "counter with credits of its own", number: counter.number().into() }
}
