//! One round of dispatch and combine over one set of buffers, as a polled state machine.
//!
//! ```text
//!        begin                    all rows here              answer               all answers here
//! Idle ---------> Dispatching ---------------------> Dispatched ----> Combining -----------------> Combined
//!  ^                   \---------> Refused               |                                            |
//!  +------------------------------ take --------------- release ------------------------------- release
//! ```
//!
//! - this file: a set of buffers and the stages of its round
//! - `dispatch.rs`: headers and tokens
//! - `packed.rs`: rows and records of a write as one page
//! - `combine.rs`: answers
//!
//! Everything that a round needs to know of other ranks it learns from counted arrivals.

mod combine;
mod dispatch;
mod packed;

use crate::areas::Areas;
use crate::error::Error;
use crate::header::{self, Counts};
use crate::metadata;
use crate::peer::{LANES, Lane, Peer, Progress};
use crate::plan::SendPlan;
use crate::receive::ReceivePlan;
use crate::rows::Area;
use crate::shape::Shape;
use std::fmt;
use std::sync::Arc;
use weft_fabric::{CounterId, Memory, Rank, RegionKey, Requests};

/// Where a round stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No round.
    Idle,
    /// Tokens are on their way.
    Dispatching,
    /// All tokens for this rank's experts are here.
    Dispatched,
    /// Some rank has no room for its tokens: no rank has sent more than headers and private rows.
    Refused,
    /// Answers are on their way.
    Combining,
    /// All answers are here.
    Combined,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Idle => "released",
            Stage::Dispatching => "dispatching",
            Stage::Dispatched => "dispatched",
            Stage::Refused => "refused",
            Stage::Combining => "combining",
            Stage::Combined => "combined",
        })
    }
}

/// The user's tokens: a registered region, and the bytes of it that are the batch.
#[derive(Clone, Debug)]
pub struct Input {
    /// Its key.
    pub region: RegionKey,
    /// Its memory, for the rows that stay on this rank.
    pub memory: Arc<Memory>,
}

/// A set of buffers and the round in it.
pub(crate) struct Exchange {
    pub(crate) shape: Shape,
    pub areas: Areas,
    counters: [CounterId; 3],
    /// `None` for this rank.
    peers: Vec<Option<Peer>>,
    own: Progress,
    pub stage: Stage,
    pub round: u64,
    pub plan: SendPlan,
    pub counts: Counts,
    pub receive: ReceivePlan,
    input: Option<Input>,
    offsets_known: bool,
    overflow: Option<Error>,
    /// Ranks whose answers have been computed.
    answered: u32,
    /// Bytes of the staging buffer that hold packed rows of this round.
    staged: u64,
    /// The first of the tags that mark this set's requests, one for each rank.
    first_tag: u64,
}

impl Exchange {
    /// An idle set; tags from `first_tag` on, one for each rank, mark its requests.
    pub fn new(shape: &Shape, areas: Areas, counters: [CounterId; 3], first_tag: u64) -> Exchange {
        Exchange {
            shape: shape.clone(),
            areas,
            counters,
            peers: vec![None; shape.config().ranks as usize],
            own: Progress::default(),
            stage: Stage::Idle,
            round: 0,
            plan: SendPlan::new(shape),
            counts: Counts::new(shape),
            receive: ReceivePlan::new(shape),
            input: None,
            offsets_known: false,
            overflow: None,
            answered: 0,
            staged: 0,
            first_tag,
        }
    }

    /// Makes a peer's set of buffers known.
    pub fn link(&mut self, rank: Rank, peer: Peer) {
        self.peers[rank.0 as usize] = Some(peer);
    }

    /// A peer, unless it is this rank.
    pub(crate) fn peer(&self, rank: u32) -> Option<&Peer> {
        self.peers.get(rank as usize)?.as_ref()
    }

    /// A peer has raised a lane of `counter`, or given credit.
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
            let way = peer.way(lane);
            way.raised = raised.map_or(way.raised, |raised| way.raised.max(raised));
        }
    }

    /// A write to `rank` has completed: its source is free.
    pub fn note_completed(&mut self, rank: u32) {
        if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
            peer.progress.writes_completed += 1;
        }
    }

    /// Whether the sources of all writes are free.
    pub fn is_drained(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.progress.is_drained())
    }

    /// Begins a round whose plan has been built.
    pub fn begin(&mut self, round: u64, input: Input, scales: &[u8]) -> Result<(), Error> {
        self.stage = Stage::Dispatching;
        self.round = round;
        self.input = Some(input);
        self.offsets_known = false;
        self.overflow = None;
        self.answered = 0;
        self.staged = 0;
        self.own = Progress::default();
        let stride = |area| u64::from(self.shape.sizes().extent(area).stride);
        let (header, answer) = (stride(Area::SendHeader), stride(Area::Answers));
        for (rank, peer) in (0..).zip(&mut self.peers) {
            let Some(peer) = peer else { continue };
            peer.progress = Progress::default();
            peer.way(Lane::Headers).expected = peer.parts.count_contiguous(header);
            peer.way(Lane::Answers).expected = match self.plan.answers_from(rank).len() as u64 {
                0 => 0,
                answers => peer.parts.count_contiguous(answers * answer),
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

    /// Moves on as far as what has arrived allows.
    pub fn advance(&mut self, requests: &mut Requests) -> Result<(), Error> {
        match self.stage {
            Stage::Dispatching => self.advance_dispatch(requests),
            Stage::Combining => self.advance_combine(requests),
            Stage::Idle | Stage::Dispatched | Stage::Refused | Stage::Combined => Ok(()),
        }
    }

    /// Ends a round that was refused, and says why.
    pub fn take_refusal(&mut self) -> Option<Error> {
        let refusal = self.overflow.take_if(|_| self.stage == Stage::Refused)?;
        self.stage = Stage::Idle;
        Some(refusal)
    }

    /// Ends the round: peers may write to the set of buffers again.
    pub fn release(&mut self, requests: &mut Requests) {
        // A refused round was credited when it was found refused.
        if self.stage != Stage::Refused {
            self.credit_round(requests);
        }
        self.stage = Stage::Idle;
    }

    /// One credit to each peer, for its header, rows and answers of this round, all of which were read.
    pub(super) fn credit_round(&mut self, requests: &mut Requests) {
        for rank in self.rotated() {
            if let Some(peer) = &mut self.peers[rank as usize] {
                peer.ways.iter_mut().for_each(|way| way.raised = 0);
                requests.credit(Rank(rank), self.counters[Lane::Headers as usize]);
            }
        }
    }

    /// The peers, beginning behind this rank, so that not all ranks write to one first.
    pub(crate) fn rotated(&self) -> impl Iterator<Item = u32> + use<> {
        let (ranks, me) = (self.shape.config().ranks, self.shape.config().rank);
        (1..ranks).map(move |step| (me + step) % ranks)
    }
}
