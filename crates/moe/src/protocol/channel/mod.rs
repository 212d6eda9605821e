//! All-to-all channel: memory, and a polled state machine for one round of dispatch and combine.
//!
//! ```text
//!        begin                  all rows arrived            reply             all replies arrived
//! Idle ---------> Dispatching ---------------------> Dispatched ----> Combining -----------------> Combined
//!  ^                   \---------> Refused               |                                            |
//!  +------------------------------ take --------------- release ------------------------------- release
//! ```
//!
//! - this file: the channel and the stages in a round
//! - `dispatch.rs`: headers and tokens
//! - `packed.rs`: rows and records in a write as one page
//! - `combine.rs`: replies
//! - `missing.rs`: peers that block the round
//!
//! Counted arrivals are the only input from other ranks.

mod combine;
mod dispatch;
mod missing;
mod packed;

use crate::area::Area;
use crate::error::Error;
use crate::plan::header::{self, RoundCounts};
use crate::plan::metadata;
use crate::plan::receive::ReceivePlan;
use crate::plan::send::SendPlan;
use crate::protocol::channel_memory::ChannelMemory;
use crate::protocol::peer::{LANES, Lane, PeerProgress, PeerState};
use crate::shape::Shape;
use crate::stage::Stage;
use std::sync::Arc;
use weft_fabric::{CounterId, Memory, Rank, RegionKey, Requests};

/// Input tokens for a round: a registered region and the memory behind it.
#[derive(Clone, Debug)]
pub struct TokenInput {
    /// Region key.
    pub region: RegionKey,
    /// Region memory, for the rows that stay on this rank.
    pub memory: Arc<Memory>,
}

/// A channel with the present round.
pub(crate) struct Channel {
    pub(crate) shape: Shape,
    pub areas: ChannelMemory,
    counters: [CounterId; 3],
    /// State by rank; `None` for this rank.
    peers: Vec<Option<PeerState>>,
    own: PeerProgress,
    pub stage: Stage,
    pub round: u64,
    pub plan: SendPlan,
    pub counts: RoundCounts,
    pub receive: ReceivePlan,
    input: Option<TokenInput>,
    has_offsets: bool,
    overflow: Option<Error>,
    /// Number of ranks whose replies have been computed.
    replied: u32,
    /// Staging buffer bytes that hold this round's packed rows.
    staged: u64,
    /// First tag for this channel's requests, which have one tag per rank.
    first_tag: u64,
}

impl Channel {
    /// Creates an idle channel. Tags from `first_tag` on, one for each rank, mark the requests.
    pub fn new(
        shape: &Shape,
        areas: ChannelMemory,
        counters: [CounterId; 3],
        first_tag: u64,
    ) -> Channel {
        Channel {
            shape: shape.clone(),
            areas,
            counters,
            peers: vec![None; shape.config().ranks as usize],
            own: PeerProgress::default(),
            stage: Stage::Idle,
            round: 0,
            plan: SendPlan::new(shape),
            counts: RoundCounts::new(shape),
            receive: ReceivePlan::new(shape),
            input: None,
            has_offsets: false,
            overflow: None,
            replied: 0,
            staged: 0,
            first_tag,
        }
    }

    /// Adds a peer.
    pub fn link(&mut self, rank: Rank, peer: PeerState) {
        self.peers[rank.0 as usize] = Some(peer);
    }

    /// A peer's state; `None` for this rank.
    pub(crate) fn peer(&self, rank: u32) -> Option<&PeerState> {
        self.peers.get(rank as usize)?.as_ref()
    }

    /// Records a peer's raises on a lane in `counter`, or its credits.
    pub fn note(
        &mut self,
        counter: CounterId,
        peer: Rank,
        raised: Option<u64>,
        credits: Option<u64>,
    ) {
        let Some(lane) = LANES.into_iter().find(|l| self.counters[*l as usize] == counter) else {
            return;
        };
        if let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize) {
            peer.credits = credits.map_or(peer.credits, |credits| peer.credits.max(credits));
            let lane = peer.lane(lane);
            lane.raised = raised.map_or(lane.raised, |raised| lane.raised.max(raised));
        }
    }

    /// Records that a write to `rank` has completed, whose source buffer is free.
    pub fn note_completed(&mut self, rank: u32) {
        if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
            peer.progress.writes_completed += 1;
        }
    }

    /// True if all writes' source buffers are free.
    pub fn is_drained(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.progress.is_drained())
    }

    /// Begins a round with the plan that was built.
    pub fn begin(&mut self, round: u64, input: TokenInput, scales: &[u8]) -> Result<(), Error> {
        self.stage = Stage::Dispatching;
        self.round = round;
        self.input = Some(input);
        self.has_offsets = false;
        self.overflow = None;
        self.replied = 0;
        self.staged = 0;
        self.own = PeerProgress::default();
        let stride = |area| u64::from(self.shape.sizes().extent(area).stride);
        let (header, reply) = (stride(Area::SendHeader), stride(Area::Replies));
        for (rank, peer) in (0..).zip(&mut self.peers) {
            let Some(peer) = peer else { continue };
            peer.progress = PeerProgress::default();
            peer.lane(Lane::Headers).expected = peer.parts.count_contiguous(header);
            peer.lane(Lane::Replies).expected = match self.plan.replies_from(rank).len() as u64 {
                0 => 0,
                replies => peer.parts.count_contiguous(replies * reply),
            };
        }
        self.counts.begin(round);
        header::encode(&self.plan, round, self.areas.rows_mut(Area::SendHeader, 0..1).row(0))?;
        let me = self.shape.config().rank;
        self.counts.accept(me, self.areas.rows(Area::SendHeader, 0..1).row(0))?;
        let rows = 0..self.plan.row_count();
        let out = self.areas.rows_mut(Area::SendMetadata, rows.clone());
        metadata::pack(&self.plan, rows, scales, out)
    }

    /// Advances the round as far as the arrivals allow.
    pub fn advance(&mut self, requests: &mut Requests) -> Result<(), Error> {
        match self.stage {
            Stage::Dispatching => self.advance_dispatch(requests),
            Stage::Combining => self.advance_combine(requests),
            Stage::Idle | Stage::Dispatched | Stage::Refused | Stage::Combined => Ok(()),
        }
    }

    /// Ends a round that was refused and returns the error.
    pub fn take_refusal(&mut self) -> Option<Error> {
        let refusal = self.overflow.take_if(|_| self.stage == Stage::Refused)?;
        self.stage = Stage::Idle;
        Some(refusal)
    }

    /// Ends the round: peers may write to the channel again.
    pub fn release(&mut self, requests: &mut Requests) {
        // A refused round was credited when it was refused.
        if self.stage != Stage::Refused {
            self.credit_round(requests);
        }
        self.stage = Stage::Idle;
    }

    /// Sends one credit to each peer, for this round's header, rows and replies from it, all of which were
    /// read.
    pub(super) fn credit_round(&mut self, requests: &mut Requests) {
        for rank in self.rotated() {
            if let Some(peer) = &mut self.peers[rank as usize] {
                peer.lanes.iter_mut().for_each(|lane| lane.raised = 0);
                requests.credit(Rank(rank), self.counters[Lane::Headers as usize]);
            }
        }
    }

    /// The peers, starting after this rank, so that not all ranks write to the same peer first.
    pub(crate) fn rotated(&self) -> impl Iterator<Item = u32> + use<> {
        let (ranks, me) = (self.shape.config().ranks, self.shape.config().rank);
        (1..ranks).map(move |step| (me + step) % ranks)
    }
}
