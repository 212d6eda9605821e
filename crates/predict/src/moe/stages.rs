//! Stages in a round at one rank: posts for dispatch and combine, and when these end.

use super::tag::MoeEvent;
use super::workload::MoeWorkload;
use crate::error::Error;
use crate::world::World;

impl MoeWorkload {
    pub(super) fn planned(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        for peer in self.peers(rank) {
            self.write(world, MoeEvent::Header, round, (rank, peer), self.sizes.header_bytes)?;
        }
        let bytes = self.traffic[round as usize].sent(rank) * self.sizes.row_bytes;
        let staged = self.traffic[round as usize].sent_where(rank, |peer| {
            // Rows within the domain are stored directly into the peer's memory.
            !self.job.same_domain(rank, peer)
        }) * self.sizes.row_bytes;
        let staging_s = self.job.costs.staging_bytes_per_s.map_or(0.0, |rate| staged as f64 / rate);
        let pack_s = world.constants().copy_s(bytes) + staging_s;
        self.after(world, rank, round, MoeEvent::Packed, pack_s)?;
        // A single rank expects no header.
        self.header_arrived(world, rank, round, 0)
    }

    pub(super) fn header_arrived(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
        headers: u32,
    ) -> Result<(), Error> {
        let all = self.job.ranks - 1;
        let progress = self.progress_of(rank, round);
        progress.headers += headers;
        if progress.headers == all && (headers > 0 || all == 0) {
            let route_s = self.job.costs.route_s;
            self.after(world, rank, round, MoeEvent::Routed, route_s)?;
        }
        Ok(())
    }

    pub(super) fn send_private(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        self.progress_of(rank, round).packed = true;
        self.send_rows(world, MoeEvent::Rows, round, rank, |this, peer| {
            this.private(this.traffic[round as usize].rows(rank, peer))
        })?;
        self.send_remainder(world, rank, round)
    }

    /// Writes each peer's rows or replies to it, if there are any.
    fn send_rows(
        &mut self,
        world: &mut World,
        event: MoeEvent,
        round: u32,
        rank: u32,
        rows: impl Fn(&Self, u32) -> u32,
    ) -> Result<(), Error> {
        let reply = event == MoeEvent::Replies;
        let row_bytes = if reply { self.sizes.answer_bytes } else { self.sizes.row_bytes };
        for peer in self.peers(rank) {
            let rows = rows(self, peer);
            if rows > 0 {
                self.write(world, event, round, (rank, peer), u64::from(rows) * row_bytes)?;
            }
        }
        Ok(())
    }

    /// Sends the remainder after the offsets and the private rows.
    pub(super) fn send_remainder(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        let progress = *self.progress_of(rank, round);
        if !(progress.packed && progress.routed) {
            return Ok(());
        }
        self.send_rows(world, MoeEvent::Rows, round, rank, |this, peer| {
            let all = this.traffic[round as usize].rows(rank, peer);
            all - this.private(all)
        })?;
        self.end_dispatch(world, rank, round)
    }

    /// Ends dispatch after the last arrival.
    pub(super) fn end_dispatch(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        let expected = self.expected_rows(rank, round);
        let progress = self.progress_of(rank, round);
        let complete = progress.packed && progress.routed && progress.rows == expected;
        if !complete || progress.dispatch_ended {
            return Ok(());
        }
        progress.dispatch_ended = true;
        let bytes = self.traffic[round as usize].received(rank) * self.sizes.row_bytes;
        let (wait_s, unpack_s) = (world.constants().wait_s, world.constants().copy_s(bytes));
        let end_s = wait_s + unpack_s + self.job.costs.dispatch_end_s;
        self.after(world, rank, round, MoeEvent::Dispatched, end_s)
    }

    pub(super) fn send_replies(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        self.send_rows(world, MoeEvent::Replies, round, rank, |this, peer| {
            this.traffic[round as usize].rows(peer, rank)
        })?;
        self.progress_of(rank, round).replies_sent = true;
        self.end_combine(world, rank, round)
    }

    pub(super) fn end_combine(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
    ) -> Result<(), Error> {
        let expected = self.expected_replies(rank, round);
        let progress = self.progress_of(rank, round);
        let complete = progress.replies_sent && progress.answers == expected;
        if !complete || progress.combine_ended {
            return Ok(());
        }
        progress.combine_ended = true;
        let bytes = self.traffic[round as usize].sent(rank) * self.sizes.answer_bytes;
        let (wait_s, sum_s) = (world.constants().wait_s, world.constants().reduce_s(bytes));
        let end_s = wait_s + sum_s + self.job.costs.combine_end_s;
        self.after(world, rank, round, MoeEvent::Combined, end_s)
    }
}
