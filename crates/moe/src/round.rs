//! A round's calls on the driver: none of them waits, and what they start goes on with each poll.

use crate::driver::Driver;
use crate::error::Error;
use crate::exchange::{Input, Stage};
use crate::metadata;
use crate::receive::ReceivePlan;
use crate::rows::{Area, Rows, RowsMut};
use crate::shape::{Layout, Weighting};
use std::ops::Range;
use std::sync::Arc;
use weft_fabric::{Memory, Missing, Requests};

/// A round, from its dispatch to its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    pub(crate) round: u64,
}

impl Handle {
    /// Rounds are numbered from 0, alike on all ranks.
    pub fn round(&self) -> u64 {
        self.round
    }
}

/// Received tokens, where they lie. They stay there until the handle is released.
pub struct Received<'a> {
    /// The memory of the set of buffers.
    pub memory: &'a Arc<Memory>,
    /// The bytes of `memory` in which the rows lie.
    pub bytes: Range<usize>,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Number of rows: positions of the contiguous layout, slots of the indexed one.
    pub rows: usize,
    /// Where the rows' scales lie, if tokens have scales.
    pub scales: Option<ReceivedScales>,
    /// Which row each expert finds where.
    pub plan: &'a ReceivePlan,
}

/// The scales of received tokens, a row of them for each row of tokens.
#[derive(Clone, Debug)]
pub struct ReceivedScales {
    /// The bytes of the tokens' memory in which they lie; the first row begins at the first byte.
    pub bytes: Range<usize>,
    /// Bytes from the first scale of one row to that of the next.
    pub stride: usize,
}

impl Driver {
    /// Begins a round: `tokens` holds `[tokens, hidden]` of the token type and stays unchanged until
    /// the round is [`Stage::Dispatched`]; `ids` and `weights` are `[tokens, top_k]`. `scales` holds
    /// the scales of the tokens, `[tokens, blocks]`, if they have any.
    ///
    /// # Errors
    /// [`Error::InUse`] if all sets of buffers are held by rounds that were not released;
    /// [`Error::NotOnHost`] if the CPU cannot read the tokens; [`Error::WrongLength`]; those of
    /// [`crate::SendPlan::build`]. The round has not begun then.
    pub fn begin<I: Copy + Into<i64>>(
        &mut self,
        tokens: Input,
        ids: &[I],
        weights: Option<&[f32]>,
        scales: Option<&[u8]>,
    ) -> Result<Handle, Error> {
        let round = self.next_round();
        let row_bytes = self.shape().token_bytes();
        let scales = scales.unwrap_or_default();
        let buffers = self.shape().config().buffers;
        let set = self.set_mut(round);
        if set.stage != Stage::Idle {
            return Err(Error::InUse { round: set.round, buffers });
        }
        if tokens.memory.host().is_none() {
            return Err(Error::NotOnHost { what: Area::Input, place: tokens.memory.place() });
        }
        set.plan.build(ids, weights)?;
        let (expected, given) = (set.plan.tokens() * row_bytes, tokens.memory.len());
        if given < expected {
            return Err(Error::WrongLength { what: "the tokens' bytes", expected, given });
        }
        metadata::check_scales(&set.plan, scales)?;
        set.begin(round, tokens, scales)?;
        self.advance_round();
        Ok(Handle { round })
    }

    /// Where a round stands; [`Stage::Idle`] once it has been released.
    pub fn stage(&self, handle: Handle) -> Stage {
        let set = self.set(handle.round);
        if set.round == handle.round { set.stage } else { Stage::Idle }
    }

    /// Whether every token for this rank's experts is here, and this rank's own have left.
    ///
    /// # Errors
    /// [`Error::Capacity`], the same on every rank, if some rank has no room for its tokens: the
    /// round is over then. [`Error::WrongStage`].
    pub fn receive(&mut self, handle: Handle) -> Result<bool, Error> {
        let stages = [Stage::Dispatching, Stage::Refused, Stage::Dispatched];
        self.expect(handle, &stages, "dispatch_recv")?;
        let set = self.set_mut(handle.round);
        match set.take_refusal() {
            Some(refusal) => Err(refusal),
            None => Ok(set.stage == Stage::Dispatched),
        }
    }

    /// What a round waits for: the phase, and the peers.
    pub fn missing(&self, handle: Handle) -> (&'static str, Vec<Missing>) {
        self.set(handle.round).missing()
    }

    /// The tokens of a round that was received.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn received(&self, handle: Handle) -> Result<Received<'_>, Error> {
        let stages = [Stage::Dispatched, Stage::Combining, Stage::Combined];
        self.expect(handle, &stages, "looking at received tokens")?;
        let set = self.set(handle.round);
        let (area, rows) = match self.shape().config().layout {
            Layout::Contiguous { .. } => (Area::Expert, set.receive.positions()),
            Layout::Indexed => {
                (Area::Tokens, self.shape().sizes().extent(Area::Tokens).rows as usize)
            }
        };
        let lie = |area| {
            let stride = self.shape().sizes().extent(area).stride as usize;
            let first = set.areas.offset(area, 0) as usize;
            (first..first + rows * stride, stride)
        };
        let (bytes, stride) = lie(area);
        let scales = (self.shape().scale_bytes() > 0).then(|| match self.shape().config().layout {
            Layout::Contiguous { .. } => {
                let (bytes, stride) = lie(Area::ExpertScales);
                ReceivedScales { bytes, stride }
            }
            Layout::Indexed => {
                let (bytes, stride) = lie(Area::Metadata);
                let begin = bytes.start + self.shape().scales_in_record().start;
                ReceivedScales { bytes: begin.min(bytes.end)..bytes.end, stride }
            }
        });
        let (memory, plan) = (set.areas.memory(), &set.receive);
        Ok(Received { memory, bytes, stride, rows, scales, plan })
    }

    /// For each expert of the group, the tokens that name it in this round.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn expert_load(&self, handle: Handle) -> Result<&[u64], Error> {
        let stages = [Stage::Dispatched, Stage::Combining, Stage::Combined];
        self.expect(handle, &stages, "looking at the experts' load")?;
        Ok(self.set(handle.round).counts.rows_of_expert())
    }

    /// Computes the answers for one more source; they leave at the next poll. `outputs` has a row for
    /// every position of the received plan, in the combine dtype, the same at every call. Returns
    /// whether there are sources left.
    ///
    /// # Errors
    /// [`Error::WrongStage`], [`Error::TooFewRows`], [`Error::RowLength`].
    pub fn answer(
        &mut self,
        handle: Handle,
        outputs: Rows<'_>,
        weighting: Weighting,
    ) -> Result<bool, Error> {
        self.expect(handle, &[Stage::Dispatched, Stage::Combining], "combine")?;
        let row_bytes = self.shape().area_row_bytes(Area::ExpertOutput);
        let set = self.set_mut(handle.round);
        outputs.require(Area::ExpertOutput, set.receive.positions(), row_bytes)?;
        set.answer_next(weighting, outputs)
    }

    /// Sums the answers of a round that is [`Stage::Combined`] into `out`, `[tokens, hidden]` in the
    /// output dtype.
    ///
    /// # Errors
    /// [`Error::WrongStage`], [`Error::TooFewRows`], [`Error::RowLength`].
    pub fn sum_answers(
        &mut self,
        handle: Handle,
        out: RowsMut<'_>,
        weighting: Weighting,
    ) -> Result<(), Error> {
        self.expect(handle, &[Stage::Combined], "summing the answers")?;
        self.set_mut(handle.round).sum_answers(weighting, out)
    }

    /// Ends a round: its buffers go back to the peers, and what was received may no longer be read.
    /// A round that has been received need not be combined, if no rank combines it, and one that
    /// was refused need not be asked why.
    ///
    /// # Errors
    /// [`Error::WrongStage`].
    pub fn release(&mut self, handle: Handle, requests: &mut Requests) -> Result<(), Error> {
        let stages = [Stage::Dispatched, Stage::Refused, Stage::Combined];
        self.expect(handle, &stages, "release")?;
        self.set_mut(handle.round).release(requests);
        Ok(())
    }

    /// The number of tokens that this rank sent in a round.
    pub fn tokens(&self, handle: Handle) -> usize {
        self.set(handle.round).plan.tokens()
    }

    /// Rows that left this rank, and (token, expert) pairs, which a copy per expert would have sent;
    /// both without what stays on this rank.
    pub fn copies_sent(&self, handle: Handle) -> (usize, usize) {
        let plan = &self.set(handle.round).plan;
        let me = self.shape().config().rank;
        (plan.row_count() - plan.rows_for(me).len(), plan.pair_count() - plan.pairs_for(me).len())
    }

    pub(crate) fn expect(
        &self,
        handle: Handle,
        stages: &[Stage],
        call: &'static str,
    ) -> Result<(), Error> {
        let stage = self.stage(handle);
        if stages.contains(&stage) {
            return Ok(());
        }
        Err(Error::WrongStage { call, round: handle.round, stage })
    }
}
