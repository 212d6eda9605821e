//! Combine: replies are sent to each source as they are computed, and summed once all have arrived.

use super::Channel;
use crate::area::Area;
use crate::error::Error;
use crate::plan::reduce;
use crate::plan::rows::{Rows, RowsMut};
use crate::protocol::peer::{Lane, LaneState};
use crate::shape::config::Weighting;
use crate::stage::Stage;
use weft_fabric::{Page, Rank, Requests};

impl Channel {
    /// Computes the replies for one more source from the experts' outputs. Returns true if sources remain.
    ///
    /// The rank after this one is first; this rank itself, which needs no write, is last.
    pub fn reply_next(&mut self, weighting: Weighting, outputs: Rows<'_>) -> Result<bool, Error> {
        let (ranks, me) = (self.shape.config().ranks, self.shape.config().rank);
        if self.replied < ranks {
            self.stage = Stage::Combining;
            self.replied += 1;
            self.reply((me + self.replied) % ranks, weighting, outputs)?;
        }
        Ok(self.replied < ranks)
    }

    fn reply(&mut self, rank: u32, weighting: Weighting, outputs: Rows<'_>) -> Result<(), Error> {
        let me = self.shape.config().rank;
        if rank == me {
            let own = self.plan.replies_from(me);
            let out = self.areas.rows_mut(Area::Replies, own);
            reduce::reply(&self.receive, me, weighting, outputs, out)?;
            self.own.replies_taken = true;
            return Ok(());
        }
        let replies = self.receive.replies_to(rank);
        let out = self.areas.rows_mut(Area::SendReplies, replies);
        reduce::reply(&self.receive, rank, weighting, outputs, out)?;
        if let Some(peer) = &mut self.peers[rank as usize] {
            peer.progress.replies_ready = true;
        }
        Ok(())
    }

    pub(super) fn advance_combine(&mut self, requests: &mut Requests) -> Result<(), Error> {
        for rank in self.rotated() {
            self.send_replies(rank, requests);
        }
        let mut complete = self.own.replies_taken;
        for rank in self.rotated() {
            let Some(peer) = &mut self.peers[rank as usize] else { continue };
            complete &= peer.progress.replies_sent && peer.progress.is_drained();
            if peer.progress.replies_taken {
                continue;
            }
            let LaneState { expected, raised: seen, .. } = *peer.lane(Lane::Replies);
            if seen > expected {
                return Err(Error::Overrun { peer: rank, phase: "combine", expected, seen });
            }
            peer.progress.replies_taken = seen == expected;
            complete &= peer.progress.replies_taken;
        }
        if complete {
            self.stage = Stage::Combined;
        }
        Ok(())
    }

    fn send_replies(&mut self, rank: u32, requests: &mut Requests) {
        let replies = self.receive.replies_to(rank);
        let me = self.shape.config().rank;
        let stride = u64::from(self.shape.sizes().extent(Area::SendReplies).stride);
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        if peer.progress.replies_sent || !peer.progress.replies_ready {
            return;
        }
        if replies.is_empty() {
            peer.progress.replies_sent = true;
            return;
        }
        peer.progress.replies_sent = true;
        let round = peer.current();
        let row = self.counts.reply_offset(rank, me) as usize;
        let page = Page {
            source: self.areas.key(),
            source_offset: self.areas.offset(Area::SendReplies, replies.start),
            destination: peer.region,
            destination_offset: self.areas.offset(Area::Replies, row),
            length: replies.len() as u64 * stride,
        };
        peer.progress.writes_asked += 1;
        let (counter, tag) =
            (self.counters[Lane::Replies as usize], self.first_tag + u64::from(rank));
        requests.write(Rank(rank), counter, round, [page], tag);
    }

    /// Sums each token's replies into `out`.
    pub fn sum_replies(&mut self, weighting: Weighting, out: RowsMut<'_>) -> Result<(), Error> {
        let tokens = 0..self.plan.tokens();
        let replies = self.areas.rows(Area::Replies, 0..self.plan.reply_count());
        reduce::combine(&mut self.plan, tokens, weighting, replies, out)
    }
}
