//! Whom a round waits for, for the error that says so.

use crate::exchange::{Exchange, Stage};
use crate::peer::{Lane, Peer};
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
        let credit: Vec<Missing> = self
            .rotated()
            .filter_map(|rank| {
                let peer = self.peer(rank)?;
                let (expected, seen) = (peer.started, peer.credits);
                (!peer.progress.header_sent).then_some(Missing { rank: Rank(rank), expected, seen })
            })
            .collect();
        if !credit.is_empty() {
            return ("credit for this rank's own writes", credit);
        }
        let completion = self.rotated().filter_map(|rank| {
            let progress = &self.peer(rank)?.progress;
            let (expected, seen) = (progress.writes_asked, progress.writes_completed);
            (expected != seen).then_some(Missing { rank: Rank(rank), expected, seen })
        });
        ("completion of this rank's own writes", completion.collect())
    }

    /// The raises of this round that a peer owes on a lane, or `None` if it owes nothing.
    fn expected(&self, rank: u32, peer: &Peer, lane: Lane) -> Option<u64> {
        let taken = match lane {
            Lane::Headers => self.counts.has(rank),
            Lane::Rows => peer.progress.rows_taken,
            Lane::Answers => peer.progress.answers_taken,
        };
        let expected = peer.ways[lane as usize].expected;
        (!taken && expected > 0).then_some(expected)
    }
}
