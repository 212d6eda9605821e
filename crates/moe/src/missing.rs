//! Whom a round waits for, for the error that says so.

use crate::exchange::{Exchange, Stage};
use crate::peer::{Lane, Peer};
use crate::rows::Area;
use weft_fabric::{Missing, Rank};

impl Exchange {
    /// The phase that the round is in, and the peers that it waits for.
    pub fn missing(&self) -> (&'static str, Vec<Missing>) {
        let (phase, lane) = match self.stage {
            Stage::Idle | Stage::Dispatched | Stage::Refused | Stage::Combined => {
                return ("idle", Vec::new());
            }
            Stage::Dispatching if !self.counts.is_complete() => {
                ("dispatch: headers", Lane::Headers)
            }
            Stage::Dispatching => ("dispatch: rows", Lane::Rows),
            Stage::Combining => ("combine: answers", Lane::Answers),
        };
        let missing: Vec<Missing> = self
            .rotated()
            .filter_map(|rank| {
                let peer = self.peer(rank)?;
                let expected = self.expected(rank, peer, lane)?;
                let seen = peer.ways[lane as usize].raised;
                Some(Missing { rank: Rank(rank), expected, seen })
            })
            .collect();
        if !missing.is_empty() {
            return (phase, missing);
        }
        let credit = self.rotated().filter_map(|rank| {
            let peer = self.peer(rank)?;
            let way = peer.ways[self.wants_credit(peer)? as usize];
            Some(Missing { rank: Rank(rank), expected: way.started, seen: way.credits })
        });
        ("credit for this rank's own writes", credit.collect())
    }

    /// The raises that a peer still owes on a lane, or `None` if it owes nothing.
    fn expected(&self, rank: u32, peer: &Peer, lane: Lane) -> Option<u64> {
        match lane {
            Lane::Headers => (!self.counts.has(rank)).then_some(peer.ways[lane as usize].expected),
            Lane::Rows => {
                (!peer.progress.rows_taken).then(|| self.raises_expected(rank, peer.parts))
            }
            Lane::Answers => {
                let stride = u64::from(self.shape.sizes().extent(Area::Answers).stride);
                let answers = self.plan.answers_from(rank).len() as u64;
                let owes = !peer.progress.answers_taken && answers > 0;
                owes.then(|| peer.parts.count_contiguous(answers * stride))
            }
        }
    }

    /// The lane on which this rank has something to write that the peer does not allow yet.
    fn wants_credit(&self, peer: &Peer) -> Option<Lane> {
        let progress = &peer.progress;
        if self.stage == Stage::Combining {
            return (!progress.answers_sent).then_some(Lane::Answers);
        }
        if !progress.header_sent {
            return Some(Lane::Headers);
        }
        (!progress.private_sent || !progress.remainder_sent).then_some(Lane::Rows)
    }
}
