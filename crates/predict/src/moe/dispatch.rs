//! Dispatch: a header and the first rows for every peer, then the rest.

use super::tag::Kind;
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
            self.write(world, Kind::Header, round, (rank, peer), self.weights.header_bytes)?;
        }
        let bytes = self.traffic[round as usize].sent(rank) * self.weights.row_bytes;
        let staged = self.traffic[round as usize].sent_where(rank, |peer| {
            // What stays in the domain is stored straight into the peer's memory.
            !self.job.same_domain(rank, peer)
        }) * self.weights.row_bytes;
        let staging_s = self.job.costs.staging_bytes_per_s.map_or(0.0, |rate| staged as f64 / rate);
        let pack_s = world.constants().copy_s(bytes) + staging_s;
        self.after(world, rank, round, Kind::Packed, pack_s)?;
        // A rank alone has no header to wait for.
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
            self.after(world, rank, round, Kind::Routed, route_s)?;
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
        for peer in self.peers(rank) {
            let rows = self.private(self.traffic[round as usize].rows(rank, peer));
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.row_bytes;
                self.write(world, Kind::Rows, round, (rank, peer), bytes)?;
            }
        }
        self.send_remainder(world, rank, round)
    }

    /// The rest leaves once offsets are known and the first rows have left.
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
        for peer in self.peers(rank) {
            let all = self.traffic[round as usize].rows(rank, peer);
            let rows = all - self.private(all);
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.row_bytes;
                self.write(world, Kind::Rows, round, (rank, peer), bytes)?;
            }
        }
        self.end_dispatch(world, rank, round)
    }

    /// Whatever the rank waits for in dispatch may be there.
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
        let bytes = self.traffic[round as usize].received(rank) * self.weights.row_bytes;
        let (wait_s, unpack_s) = (world.constants().wait_s, world.constants().copy_s(bytes));
        let end_s = wait_s + unpack_s + self.job.costs.dispatch_end_s;
        self.after(world, rank, round, Kind::Dispatched, end_s)
    }
}
