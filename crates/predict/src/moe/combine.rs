//! Combine: one write of answers for each source, and their sums.

use super::tag::Kind;
use super::workload::MoeWorkload;
use crate::error::Error;
use crate::world::World;

impl MoeWorkload {
    pub(super) fn send_answers(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        for peer in self.peers(rank) {
            let rows = self.traffic[round as usize].rows(peer, rank);
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.answer_bytes;
                self.write(world, Kind::Answers, round, (rank, peer), bytes)?;
            }
        }
        self.progress_of(rank, round).answers_sent = true;
        self.end_combine(world, rank, round)
    }

    pub(super) fn end_combine(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        let expected = self.expected_answers(rank, round);
        let progress = self.progress_of(rank, round);
        let complete = progress.answers_sent && progress.answers == expected;
        if !complete || progress.combine_ended {
            return Ok(());
        }
        progress.combine_ended = true;
        let bytes = self.traffic[round as usize].sent(rank) * self.weights.answer_bytes;
        let (wait_s, sum_s) = (world.constants().wait_s, world.constants().reduce_s(bytes));
        let end_s = wait_s + sum_s + self.job.costs.combine_end_s;
        self.after(world, rank, round, Kind::Combined, end_s)
    }
}
