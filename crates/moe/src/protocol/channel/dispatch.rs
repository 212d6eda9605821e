//! Dispatch: the header and the private rows are sent to each peer as soon as credit allows, and the
//! remainder once all headers have arrived. Rows are taken as they arrive, source by source.

use super::Channel;
use crate::area::Area;
use crate::error::Error;
use crate::plan::packing;
use crate::protocol::peer::{Lane, LaneState, PeerState};
use crate::shape::config::Layout;
use crate::stage::Stage;
use std::ops::Range;
use weft_fabric::{Page, Rank, Requests};

impl Channel {
    pub(super) fn advance_dispatch(&mut self, requests: &mut Requests) -> Result<(), Error> {
        let ranks = self.shape.config().ranks;
        for rank in self.rotated() {
            self.send_header(rank, requests);
            self.send_private_rows(rank, requests);
        }
        for rank in 0..ranks {
            self.take_header(rank)?;
        }
        if !self.has_offsets && self.counts.is_complete() {
            self.derive_offsets()?;
        }
        if !self.has_offsets {
            return Ok(());
        }
        for rank in self.rotated() {
            self.send_remainder(rank, requests);
        }
        let mut complete = true;
        for rank in 0..ranks {
            complete &= self.take_rows(rank)?;
        }
        if complete && self.all_sent() {
            self.input = None;
            if self.overflow.is_some() {
                self.stage = Stage::Refused;
                self.credit_round(requests);
                return Ok(());
            }
            if self.shape.config().layout != Layout::Indexed {
                self.clear_padding()?;
            }
            self.stage = Stage::Dispatched;
        }
        Ok(())
    }

    fn send_header(&mut self, rank: u32, requests: &mut Requests) {
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        if peer.progress.header_sent || !peer.is_open() {
            return;
        }
        peer.progress.header_sent = true;
        let round = peer.start();
        let me = self.shape.config().rank as usize;
        let page = Page {
            source: self.areas.key(),
            source_offset: self.areas.offset(Area::SendHeader, 0),
            destination: peer.region,
            destination_offset: self.areas.offset(Area::Headers, me),
            length: self.shape.sizes().extent(Area::SendHeader).stride.into(),
        };
        peer.progress.writes_asked += 1;
        let (counter, tag) =
            (self.counters[Lane::Headers as usize], self.first_tag + u64::from(rank));
        requests.write(Rank(rank), counter, round, [page], tag);
    }

    /// Sends the private rows, after the header, whose round the peer's credit has opened.
    fn send_private_rows(&mut self, rank: u32, requests: &mut Requests) {
        let config = self.shape.config();
        let rows = self.plan.rows_for(rank);
        let private = rows.len().min(config.private_rows as usize);
        let private_slots = self.shape.sizes().private_slots();
        let first_slot = (config.rank * private_slots) as usize;
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        if peer.progress.private_sent || !peer.progress.header_sent {
            return;
        }
        peer.progress.private_sent = true;
        if private > 0 {
            self.write_rows(rank, rows.start..rows.start + private, first_slot, requests);
        }
    }

    fn take_header(&mut self, rank: u32) -> Result<(), Error> {
        let Some(peer) = &mut self.peers[rank as usize] else { return Ok(()) };
        let lane = peer.lane(Lane::Headers);
        if lane.raised >= lane.expected && !self.counts.has(rank) {
            let at = rank as usize;
            self.counts.accept(rank, self.areas.rows(Area::Headers, at..at + 1).row(0))?;
        }
        Ok(())
    }

    /// Derives all offsets from all ranks' headers.
    fn derive_offsets(&mut self) -> Result<(), Error> {
        match self.receive.begin(&self.counts) {
            Ok(()) => {}
            Err(error @ Error::Capacity { .. }) => self.overflow = Some(error),
            Err(error) => return Err(error),
        }
        self.has_offsets = true;
        for rank in self.rotated() {
            let expected = self.raises_of_rows(rank);
            if let Some(peer) = &mut self.peers[rank as usize] {
                peer.lane(Lane::Rows).expected = expected;
            }
        }
        if self.overflow.is_none() {
            self.keep_own_rows();
        }
        Ok(())
    }

    /// Copies this rank's rows for its own experts to their slots.
    fn keep_own_rows(&mut self) {
        let me = self.shape.config().rank;
        let token_bytes = self.shape.token_bytes();
        let record = self.shape.sizes().extent(Area::Metadata).stride as usize;
        let Some(input) = &self.input else { return };
        let memory = self.areas.memory();
        for (index, row) in self.plan.rows_for(me).enumerate() {
            let slot = self.receive.slot(me, index as u32) as usize;
            let from = self.plan.token_of(row) * token_bytes;
            let to = self.areas.offset(Area::Tokens, slot) as usize;
            input.memory.copy_to(from, memory, to, token_bytes);
            let from = self.areas.offset(Area::SendMetadata, row) as usize;
            let to = self.areas.offset(Area::Metadata, slot) as usize;
            memory.copy_to(from, memory, to, record);
        }
    }

    fn send_remainder(&mut self, rank: u32, requests: &mut Requests) {
        let config = self.shape.config();
        let (me, private) = (config.rank, config.private_rows as usize);
        let rows = self.plan.rows_for(rank);
        let overflow = self.overflow.is_some();
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        if peer.progress.remainder_sent || !peer.progress.private_sent {
            return;
        }
        if rows.len() <= private || overflow {
            peer.progress.remainder_sent = true;
            return;
        }
        peer.progress.remainder_sent = true;
        let private_slots = self.shape.sizes().private_slots();
        let first_slot =
            (config.ranks * private_slots + self.counts.remainder_offset(me, rank)) as usize;
        self.write_rows(rank, rows.start + private..rows.end, first_slot, requests);
    }

    /// Writes metadata and tokens for `rows` to the peer's slots from `first_slot` on.
    fn write_rows(
        &mut self,
        rank: u32,
        rows: Range<usize>,
        first_slot: usize,
        requests: &mut Requests,
    ) {
        let Some(peer) = &mut self.peers[rank as usize] else { return };
        peer.progress.writes_asked += 1;
        let (parts, destination, round) = (peer.parts, peer.region, peer.current());
        let (counter, tag) = (self.counters[Lane::Rows as usize], self.first_tag + u64::from(rank));
        if packing::is_packed(parts, rows.len()) {
            let page = self.pack(rows, destination, first_slot);
            return requests.write(Rank(rank), counter, round, page, tag);
        }
        let Some(input) = &self.input else { return };
        let record = u64::from(self.shape.sizes().extent(Area::Metadata).stride);
        let token_bytes = self.shape.token_bytes() as u64;
        let metadata = Page {
            source: self.areas.key(),
            source_offset: self.areas.offset(Area::SendMetadata, rows.start),
            destination,
            destination_offset: self.areas.offset(Area::Metadata, first_slot),
            length: rows.len() as u64 * record,
        };
        let tokens = rows.enumerate().map(|(index, row)| Page {
            source: input.region,
            source_offset: self.plan.token_of(row) as u64 * token_bytes,
            destination,
            destination_offset: self.areas.offset(Area::Tokens, first_slot + index),
            length: token_bytes,
        });
        requests.write(Rank(rank), counter, round, std::iter::once(metadata).chain(tokens), tag);
    }

    /// Rows that `rank` sends in this round: the private ones only, if the round is refused.
    fn rows_expected(&self, rank: u32) -> u32 {
        let config = self.shape.config();
        let rows = self.counts.rows(rank, config.rank);
        if self.overflow.is_some() { rows.min(config.private_rows) } else { rows }
    }

    /// Number of times that a peer raises the rows lane in this round.
    fn raises_of_rows(&self, rank: u32) -> u64 {
        self.peer(rank).map_or(0, |peer| {
            packing::raises_of_rows(&self.shape, peer.parts, self.rows_expected(rank))
        })
    }

    /// Takes one source's rows if all have arrived. Returns true if they are taken, now or before.
    fn take_rows(&mut self, rank: u32) -> Result<bool, Error> {
        let taken = match &self.peers[rank as usize] {
            Some(peer) => peer.progress.rows_taken,
            None => self.own.rows_taken,
        };
        if taken {
            return Ok(true);
        }
        if let Some(peer) = self.peers[rank as usize] {
            let LaneState { expected, raised: seen, .. } = peer.lanes[Lane::Rows as usize];
            if seen < expected {
                return Ok(false);
            }
            if seen > expected {
                return Err(Error::Overrun { peer: rank, phase: "dispatch", expected, seen });
            }
        }
        if self.overflow.is_none() {
            self.unpack_records(rank);
            let run = |slots| self.areas.rows(Area::Metadata, slots);
            self.receive.accept(rank, self.receive.source_rows(rank, run))?;
            if self.shape.config().layout != Layout::Indexed {
                self.lay_out(rank)?;
            }
        }
        match &mut self.peers[rank as usize] {
            Some(peer) => peer.progress.rows_taken = true,
            None => self.own.rows_taken = true,
        }
        Ok(true)
    }

    /// Copies one source's tokens, and the scales, to the experts' positions.
    fn lay_out(&mut self, rank: u32) -> Result<(), Error> {
        let positions = 0..self.receive.positions();
        let (out, run) = self.areas.write_beside(Area::Expert, positions.clone(), Area::Tokens);
        let tokens = self.receive.source_rows(rank, run);
        self.receive.lay_out(Area::Expert, rank, tokens, out)?;
        if self.shape.scale_bytes() > 0 {
            let (out, run) = self.areas.write_beside(Area::ExpertScales, positions, Area::Metadata);
            let records = self.receive.source_rows(rank, run);
            let scales = records.columns(self.shape.scales_in_record());
            self.receive.lay_out(Area::ExpertScales, rank, scales, out)?;
        }
        Ok(())
    }

    fn clear_padding(&mut self) -> Result<(), Error> {
        let positions = 0..self.receive.positions();
        let out = self.areas.rows_mut(Area::Expert, positions.clone());
        self.receive.clear_padding(Area::Expert, out)?;
        if self.shape.scale_bytes() > 0 {
            let out = self.areas.rows_mut(Area::ExpertScales, positions);
            self.receive.clear_padding(Area::ExpertScales, out)?;
        }
        Ok(())
    }

    /// True if all writes to every peer were sent and all source buffers are free.
    fn all_sent(&self) -> bool {
        let done = |p: &PeerState| {
            p.progress.header_sent && p.progress.remainder_sent && p.progress.is_drained()
        };
        self.peers.iter().flatten().all(done)
    }
}
