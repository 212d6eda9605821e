//! Combine: answers leave for each source as they become ready, and are summed once all are here.

use super::{Exchange, Stage};
use crate::error::Error;
use crate::peer::{Lane, Way};
use crate::reduce;
use crate::rows::{Area, Rows, RowsMut};
use crate::shape::Weighting;
use weft_fabric::{Page, Rank, Requests};

impl Exchange {
    /// Computes the answers for one more source from the experts' outputs; whether there is another.
    ///
    /// The first after this rank comes first; this rank's own answers, which need no wire, come last.
    pub fn answer_next(&mut self, weighting: Weighting, outputs: Rows<'_>) -> Result<bool, Error> {
        let (ranks, me) = (self.shape.config().ranks, self.shape.config().rank);
        if self.answered < ranks {
            self.stage = Stage::Combining;
            self.answered += 1;
            self.answer((me + self.answered) % ranks, weighting, outputs)?;
        }
        Ok(self.answered < ranks)
    }

    fn answer(&mut self, rank: u32, weighting: Weighting, outputs: Rows<'_>) -> Result<(), Error> {
        let me = self.shape.config().rank;
        if rank == me {
            let own = self.plan.answers_from(me);
            let out = self.areas.rows_mut(Area::Answers, own);
            reduce::reply(&self.receive, me, weighting, outputs, out)?;
            self.own.answers_taken = true;
            return Ok(());
        }
        let replies = self.receive.replies_to(rank);
        let out = self.areas.rows_mut(Area::Replies, replies);
        reduce::reply(&self.receive, rank, weighting, outputs, out)?;
        if let Some(peer) = &mut self.peers[rank as usize] {
            peer.progress.answers_ready = true;
        }
        Ok(())
    }

    pub(super) fn advance_combine(&mut self, requests: &mut Requests) -> Result<(), Error> {
        for rank in self.rotated() {
            self.send_answers(rank, requests);
        }
        let mut complete = self.own.answers_taken;
        for rank in self.rotated() {
            let Some(peer) = &mut self.peers[rank as usize] else { continue };
            complete &= peer.progress.answers_sent && peer.progress.is_drained();
            if peer.progress.answers_taken {
                continue;
            }
            let Way { expected, raised: seen, .. } = *peer.way(Lane::Answers);
            if seen > expected {
                return Err(Error::Overrun { peer: rank, phase: "combine", expected, seen });
            }
            peer.progress.answers_taken = seen == expected;
            complete &= peer.progress.answers_taken;
        }
        if complete {
            self.stage = Stage::Combined;
        }
        Ok(())
    }

    fn send_answers(&mut self, rank: u32, requests: &mut Requests) {
        let replies = self.receive.replies_to(rank);
        let me = self.shape.config().rank;
        let stride = u64::from(self.shape.sizes().extent(Area::Replies).stride);
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        if peer.progress.answers_sent || !peer.progress.answers_ready {
            return;
        }
        if replies.is_empty() {
            peer.progress.answers_sent = true;
            return;
        }
        peer.progress.answers_sent = true;
        let round = peer.current();
        let row = self.counts.answer_offset(rank, me) as usize;
        let page = Page {
            source: self.areas.key(),
            source_offset: self.areas.offset(Area::Replies, replies.start),
            destination: peer.region,
            destination_offset: self.areas.offset(Area::Answers, row),
            length: replies.len() as u64 * stride,
        };
        peer.progress.writes_asked += 1;
        let (counter, tag) =
            (self.counters[Lane::Answers as usize], self.first_tag + u64::from(rank));
        requests.write(Rank(rank), counter, round, [page], tag);
    }

    /// Sums the answers of every token into `out`.
    pub fn sum_answers(&mut self, weighting: Weighting, out: RowsMut<'_>) -> Result<(), Error> {
        let tokens = 0..self.plan.tokens();
        let answers = self.areas.rows(Area::Answers, 0..self.plan.answer_count());
        reduce::combine(&mut self.plan, tokens, weighting, answers, out)
    }
}
