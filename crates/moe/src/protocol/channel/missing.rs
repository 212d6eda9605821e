//! Peers that block a round; fills [`Error::Timeout`](crate::Error::Timeout).

use super::Channel;
use crate::protocol::peer::{Lane, PeerState};
use crate::stage::Stage;
use weft_fabric::{MissingPeer, Rank};

impl Channel {
    /// The round's phase, and the peers that block it.
    pub fn missing(&self) -> (&'static str, Vec<MissingPeer>) {
        let (phase, lane) = match self.stage {
            Stage::Idle | Stage::Dispatched | Stage::Refused | Stage::Combined => {
                return ("idle", Vec::new());
            }
            Stage::Dispatching if !self.counts.is_complete() => {
                ("dispatch: headers", Lane::Headers)
            }
            Stage::Dispatching => ("dispatch: rows", Lane::Rows),
            Stage::Combining => ("combine: replies", Lane::Replies),
        };
        let missing: Vec<MissingPeer> = self
            .rotated()
            .filter_map(|rank| {
                let peer = self.peer(rank)?;
                let expected = self.expected(rank, peer, lane)?;
                let seen = peer.lanes[lane as usize].raised;
                Some(MissingPeer { rank: Rank(rank), expected, seen })
            })
            .collect();
        if !missing.is_empty() {
            return (phase, missing);
        }
        let credit: Vec<MissingPeer> = self
            .rotated()
            .filter_map(|rank| {
                let peer = self.peer(rank)?;
                let (expected, seen) = (peer.started, peer.credits);
                (!peer.progress.header_sent).then_some(MissingPeer {
                    rank: Rank(rank),
                    expected,
                    seen,
                })
            })
            .collect();
        if !credit.is_empty() {
            return ("credit for this rank's own writes", credit);
        }
        let completion = self.rotated().filter_map(|rank| {
            let progress = &self.peer(rank)?.progress;
            let (expected, seen) = (progress.writes_asked, progress.writes_completed);
            (expected != seen).then_some(MissingPeer { rank: Rank(rank), expected, seen })
        });
        ("completion of this rank's own writes", completion.collect())
    }

    /// Raises that a peer still owes on a lane in this round; `None` if none.
    fn expected(&self, rank: u32, peer: &PeerState, lane: Lane) -> Option<u64> {
        let taken = match lane {
            Lane::Headers => self.counts.has(rank),
            Lane::Rows => peer.progress.rows_taken,
            Lane::Replies => peer.progress.replies_taken,
        };
        let expected = peer.lanes[lane as usize].expected;
        (!taken && expected > 0).then_some(expected)
    }
}
